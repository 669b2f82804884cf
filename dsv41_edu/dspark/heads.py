"""The drafter's small heads.

    Markov:      logits_i = base_i + H v_i                 E, H [V, r]: what follows y_i
      vanilla    v_i = E[y_i]                              whatever the context is: the released head
      gated      v_i = sigmoid(G [h_i, E[y_i]] + b) E[y_i]     h_i the block's state after its norm: as far as it says
      recurrent  (a, c, o) = J [s_i, E[y_i], h_i] + b      s_0 = 0: the tokens before y_i, too
                 s_i+1 = sigmoid(a) s_i + (1 - sigmoid(a)) tanh(c);   v_i = tanh(o)
    confidence:  c_i = w . [x_i, E[y_i]]                   sigmoid(c_i): is draft i accepted, if those before it are

The block is drafted at once, so its base logits don't know which tokens were drawn before them; the Markov head tells
them the one just before, at the price of a row and a product with r columns. On a GPU a step of the released kind,
from the token before to the draft, is one fused path. Sources: DSpark 3.2, 3.3, and its code for the other two kinds;
V4.1 report.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.config import ModelConfig
from dsv41_edu.dspark.verification import sample


def fuse(base: Tensor) -> bool:
    """Whether the fused step serves: on a GPU, for fp32 logits, without gradients."""
    return base.is_cuda and base.dtype == torch.float32 and not torch.is_grad_enabled()


class WideLinear(nn.Linear):
    """Computes in at least fp32, whatever its weights are stored in."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))


class MarkovHead(nn.Module):
    """`embed` and `head`, both [V, r]."""

    def __init__(self, vocab_size: int, rank: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, rank)
        self.head = WideLinear(rank, vocab_size, bias=False)

    def vectors(self, tokens: Tensor, hidden: Tensor | None) -> Tensor:
        """v [..., r] of a block's tokens so far, int64 [...], and its states after their norm, [..., d]."""
        return self.embed(tokens)

    def forward(self, tokens: Tensor, hidden: Tensor | None = None) -> Tensor:
        """What a block's tokens add to the logits that follow them: [..., V], in at least fp32; see `vectors`."""
        return self.head(self.vectors(tokens, hidden))

    def step(
        self, base: Tensor, tokens: Tensor, hidden: Tensor | None, temperature: float = 0.0, u: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The drafts, int64 [B], after a block's tokens so far, int64 [B, i + 1], and the logits [B, V] of their law.

        base: [B, V]; hidden: [B, i + 1, d], which the vanilla head doesn't need. At temperature 0 the likeliest, the
        lowest id of equals: no law, None. Above it a draw from the softmax of logits / temperature in fp64, by u,
        fp64 [B] in [0, 1).
        """
        if type(self) is MarkovHead and fuse(base):
            from kernels.markov import fused_markov

            return fused_markov(base, tokens[:, -1], self.embed.weight, self.head.weight, temperature, u)
        logits = base + self.head(self.vectors(tokens, hidden)[:, -1])
        if temperature == 0:
            return logits.argmax(-1), None
        return sample((logits.double() / temperature).softmax(-1), u), logits


class GatedMarkovHead(MarkovHead):
    """And `gate_proj` [r, d + r] with a bias."""

    def __init__(self, vocab_size: int, rank: int, d: int):
        super().__init__(vocab_size, rank)
        self.gate_proj = WideLinear(d + rank, rank)

    def vectors(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        rows = self.embed(tokens)
        return self.gate_proj(torch.cat([hidden, rows], dim=-1)).sigmoid() * rows


class RecurrentHead(MarkovHead):
    """And `joint_proj` [3 r, 2 r + d] with a bias."""

    def __init__(self, vocab_size: int, rank: int, d: int):
        super().__init__(vocab_size, rank)
        self.joint_proj = WideLinear(2 * rank + d, 3 * rank)

    def vectors(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        rows, found = self.embed(tokens), []
        state = torch.zeros_like(rows[..., 0, :])
        for row, h in zip(rows.unbind(-2), hidden.unbind(-2), strict=True):
            keep, new, out = self.joint_proj(torch.cat([state, row, h], dim=-1)).chunk(3, dim=-1)
            state = torch.lerp(new.tanh(), state.to(new.dtype), keep.sigmoid())
            found.append(out.tanh())
        return torch.stack(found, dim=-2)


def markov_head(config: ModelConfig) -> MarkovHead:
    """The one that a drafter's config names."""
    c, kind = config, config.dspark_markov_head_type
    if kind in (None, "vanilla"):
        return MarkovHead(c.vocab_size, c.dspark_markov_rank)
    return {"gated": GatedMarkovHead, "rnn": RecurrentHead}[kind](c.vocab_size, c.dspark_markov_rank, c.hidden_size)


class ConfidenceHead(nn.Module):
    """`proj` [1, d + r], no bias."""

    def __init__(self, d: int, rank: int):
        super().__init__()
        self.proj = WideLinear(d + rank, 1, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """Logits [...], in at least fp32: x [..., d] the block's states before their norm, rows [..., r] of E."""
        return self.proj(torch.cat([x, rows], dim=-1)).squeeze(-1)
