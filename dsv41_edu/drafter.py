"""DSpark: a few blocks that draft a handful of tokens at once, behind the backbone.

    m = main_norm(main_proj [streams' means entering the target layers])     of every token the backbone has run
    context of a block: its attn's latents of m, in a ring of W; nothing of a draft is ever kept
    block input: y_0 and noise, ..., noise at positions t+1 ... t+g          t: the last token the backbone has run
    queries see the whole ring and all rows of the block, before and behind them
    draft i+1 ~ head(norm(x_i)) + Markov(y_i)        x: what the last block leaves, collapsed; see `dspark.heads`

Blocks are the backbone's layers with fewer experts and a window alone; embedding and head are the backbone's.
Sources: DSpark 3; V4.1 official inference code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dsv41_edu.attention.cache import Cache, Chunk, ring_positions
from dsv41_edu.config import ModelConfig
from dsv41_edu.dspark.heads import ConfidenceHead, markov_head
from dsv41_edu.layer import Layer, Residual


class Draft(NamedTuple):
    """What the drafter proposes; g is `dspark_block_size`."""

    ids: Tensor  # int64 [B, g + 1]: y_0, then the drafts
    logits: Tensor | None  # [B, g, V]: draft i + 1 was drawn from softmax(logits / temperature); none if greedy
    confidence: Tensor  # [B, g]: logits that draft i + 1 is accepted, given those before it
    base: Tensor  # [B, g, V]: logits without the Markov head
    hidden: Tensor  # [B, g, d]: collapsed, before the norm


@dataclass
class Block(Chunk):
    """The block's tokens: each sees the ring and all of them."""

    def window(self, layer: int, latents: Tensor) -> tuple[Tensor, Tensor]:
        """As `Chunk.window`."""
        ring = self.cache.windows[layer]
        positions = ring_positions(self.start, ring.shape[1])
        slots = torch.arange(ring.shape[1], device=ring.device).where(positions >= 0, -1)
        own = torch.arange(latents.shape[1], device=ring.device).expand(len(slots), -1) + ring.shape[1]
        seen = torch.cat([slots, own], dim=1).unsqueeze(1).expand(-1, latents.shape[1], -1)
        return torch.cat([ring, latents], dim=1), seen


class Drafter(nn.ModuleList):
    """The blocks; `main_norm` and `main_proj` are the first one's, `norm` and the two heads the last one's."""

    def __init__(self, config: ModelConfig):
        c, first = config, config.num_hidden_layers
        super().__init__(Layer(c, first + i, drafter=True) for i in range(c.num_nextn_predict_layers))
        self.config = c
        d = c.hidden_size
        self[0].main_norm = nn.RMSNorm(d, c.rms_norm_eps)
        self[0].main_proj = nn.Linear(len(c.dspark_target_layer_ids) * d, d, bias=False)
        self[-1].norm = nn.RMSNorm(d, c.rms_norm_eps)
        self[-1].markov_head = markov_head(c)
        self[-1].confidence_head = ConfidenceHead(d, c.dspark_markov_rank)

    def remember(self, features: Tensor, chunk: Chunk) -> None:
        """Leave each block's latents of new tokens to the commit; features [B, S, targets * d]."""
        x, turn = self[0].main_norm(self[0].main_proj(features)), chunk.turn(0)
        for block in self:
            chunk.latents[block.attn.layer] = chunk.start, block.attn.latent(x, turn, chunk.round_trips)

    def hidden(
        self, ids: Tensor, cache: Cache, embed: nn.Embedding, seams: tuple[Callable, Callable], round_trips: bool
    ) -> Tensor:
        """Collapsed streams [B, g, d] of a block's ids, int64 [B, g], after what the cache has committed."""
        c = self.config
        positions = cache.lengths.unsqueeze(1) + torch.arange(ids.shape[1], device=ids.device)
        block = Block(c, cache.lengths, positions, embed.weight.dtype, cache, round_trips, fresh=False)
        residual = Residual(embed(ids), c.hc_mult, (c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps), seams)
        for layer in self:
            residual = layer(residual, block)
        return residual.collapsed()

    def forward(
        self,
        tokens: Tensor,
        cache: Cache,
        embed: nn.Embedding,
        logits: Callable[[Tensor], Tensor],
        temperature: float,
        u: Tensor | None,
        seams: tuple[Callable, Callable],
        round_trips: bool = False,
    ) -> Draft:
        """Drafts after `tokens`, int64 [B], each row's next token, which the cache doesn't have yet.

        embed, logits: the backbone's; temperature and u [B, g]: as of `MarkovHead.step`, for each draft.
        """
        c, last = self.config, self[-1]
        noise = torch.full((len(tokens), c.dspark_block_size - 1), c.dspark_noise_token_id, device=tokens.device)
        x = self.hidden(torch.cat([tokens.unsqueeze(1), noise], dim=1), cache, embed, seams, round_trips)
        hidden = last.norm(x)
        base, ids, laws = logits(hidden), [tokens], []
        for i in range(c.dspark_block_size):
            so_far, chance = torch.stack(ids, dim=1), None if u is None else u[:, i]
            drawn, law = last.markov_head.step(base[:, i], so_far, hidden[:, : i + 1], temperature, chance)
            ids.append(drawn)
            laws.append(law)
        ids = torch.stack(ids, dim=1)
        confidence = last.confidence_head(x, last.markov_head.embed(ids[:, :-1]))
        return Draft(ids, None if temperature == 0 else torch.stack(laws, dim=1), confidence, base, x)
