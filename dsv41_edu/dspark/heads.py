"""The drafter's two small heads.

    Markov:      logits_i = base_i + H E[y_i]              E, H [V, r]: what follows y_i, whatever the context is
    confidence:  c_i = w . [x_i, E[y_i]]                   sigmoid(c_i): is draft i accepted, if those before it are

The block is drafted at once, so its base logits don't know which tokens were drawn before them; the Markov head tells
them the one just before, at the price of a row and a product with r columns. On a GPU a step of it, from the token
before to the draft, is one fused path. Source: DSpark 3.2, 3.3; V4.1 report.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.dspark.verification import sample


def fuse(base: Tensor) -> bool:
    """Whether the fused step serves: on a GPU, for fp32 logits, without gradients."""
    return base.is_cuda and base.dtype == torch.float32 and not torch.is_grad_enabled()


class MarkovHead(nn.Module):
    """`embed` and `head`, both [V, r]."""

    def __init__(self, vocab_size: int, rank: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, rank)
        self.head = nn.Linear(rank, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """What the tokens, int64 [...], add to the logits that follow them: [..., V], in at least fp32."""
        rows = self.embed(tokens)
        wide = torch.promote_types(rows.dtype, torch.float32)
        return F.linear(rows.to(wide), self.head.weight.to(wide))

    def step(
        self, base: Tensor, tokens: Tensor, temperature: float = 0.0, u: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The drafts after tokens, int64 [B] both, from base logits [B, V]; and the logits [B, V] of their law.

        At temperature 0 the likeliest, the lowest id of equals: no law, None. Above it a draw from the softmax of
        logits / temperature in fp64, by u, fp64 [B] in [0, 1).
        """
        if fuse(base):
            from kernels.markov import fused_markov

            return fused_markov(base, tokens, self.embed.weight, self.head.weight, temperature, u)
        logits = base + self(tokens)
        if temperature == 0:
            return logits.argmax(-1), None
        return sample((logits.double() / temperature).softmax(-1), u), logits


class ConfidenceHead(nn.Module):
    """`proj` [1, d + r], no bias."""

    def __init__(self, d: int, rank: int):
        super().__init__()
        self.proj = nn.Linear(d + rank, 1, bias=False)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        """Logits [...], in at least fp32: x [..., d] the block's states before their norm, rows [..., r] of E."""
        both = torch.cat([x, rows], dim=-1)
        wide = torch.promote_types(both.dtype, torch.float32)
        return F.linear(both.to(wide), self.proj.weight.to(wide)).squeeze(-1)
