"""The compressor: one latent for each group of `ratio` tokens, the entries that every later token may read.

    ratio 1:  g_j    = norm(wkv x_j)
    ratio 2:  u, s   = wkv x, wgate x                       in fp32
              g_j[c] = norm(sum_t softmax_t(s_t[c]) u_t[c])   t over the group's tokens, each channel c for itself

Entry j stands at position j * ratio, its first token, and is seen by a query at t once its group is whole:
j < (t + 1) // ratio. Groups don't overlap and no bias marks a place in the group (V4 has both).
Sources: V4.1 report 2.3; official inference code.
"""

import torch
from torch import Tensor, nn


def compress(u: Tensor, s: Tensor | None = None) -> Tensor:
    """Latents [..., D] of groups u and s [..., ratio, D]; one token a group needs no weights s."""
    return u.squeeze(-2) if s is None else (s.softmax(-2) * u).sum(-2)


class Compressor(nn.Module):
    """`wkv` and, for groups of several tokens, `wgate` [D, d]; `norm` [D]."""

    def __init__(self, d: int, D: int, ratio: int, norm_eps: float):
        super().__init__()
        self.ratio = ratio
        self.wkv = nn.Linear(d, D, bias=False)
        if ratio > 1:
            self.wgate = nn.Linear(d, D, bias=False)
        self.norm = nn.RMSNorm(D, norm_eps)

    def project(self, x: Tensor) -> Tensor:
        """What a token brings to its group, [B, S, 1 or 2, D] of x [B, S, d]: u and, at ratio 2, s, then in fp32."""
        if self.ratio == 1:
            return self.wkv(x).unsqueeze(-2)
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = [nn.functional.linear(x.to(wide), w.weight.to(wide)) for w in (self.wkv, self.wgate)]
        return torch.stack(parts, dim=-2)

    def forward(self, projected: Tensor, waiting: Tensor | None = None, phase: Tensor | None = None) -> Tensor:
        """Latents [B, G, D], before rotation, of the groups that a chunk's tokens [B, S, 1 or 2, D] may complete.

        waiting: [B, ratio - 1, 1 or 2, D], tokens of the group that was open before the chunk, of which row b has
        phase[b], int64 [B]; both None where the chunk starts a group. Where a chunk ends inside a group the last
        latent is of no meaning (with a phase) or missing (without).
        """
        r = self.ratio
        if waiting is None:
            grouped = projected[:, : projected.shape[1] // r * r].unflatten(1, (-1, r))
        else:
            both = torch.cat([waiting.to(projected.dtype), projected], dim=1)
            groups = both.shape[1] // r
            place = torch.arange(groups * r, device=projected.device).expand(len(both), -1)
            late = place >= phase.unsqueeze(1)
            at = torch.where(late, place - phase.unsqueeze(1) + r - 1, place).clamp(max=both.shape[1] - 1)
            grouped = both[torch.arange(len(both), device=at.device).unsqueeze(1), at].unflatten(1, (groups, r))
        u, s = grouped[..., 0, :], grouped[..., 1, :] if r > 1 else None
        return self.norm(compress(u, s).to(self.norm.weight.dtype))
