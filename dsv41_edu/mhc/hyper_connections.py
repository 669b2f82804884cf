"""Hyper-connections as first proposed: the maps may be anything.

    H    [n, d], the streams
    h0   = A_m^T H                        A_m [n, 1]: F's input
    H'   = A_r^T H + B^T F(h0)            A_r [n, n], B [1, n]

    static:   A_m, A_r, B are learned numbers
    dynamic:  B   + s_beta  tanh(norm(H) W_beta)^T      W_beta [d, 1]
              A_m + s_alpha tanh(norm(H) W_m)           W_m [d, 1]
              A_r + s_alpha tanh(norm(H) W_r)           W_r [d, n]

Nothing keeps the product of many A_r near 1: what mHC's Sinkhorn is for. Source: Hyper-Connections (Zhu et al.
2024) 2, eq. 1 to 13.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class HyperConnection(nn.Module):
    """One connection around a sublayer, number `index` of its network, for n streams of d channels.

    It starts as the plain residual: W is zero, stream `index mod n` is read, every stream is given F's output.
    """

    def __init__(self, n: int, d: int, index: int = 0, dynamic: bool = True, scale: float = 0.01):
        super().__init__()
        if not 1 <= n <= 8:
            raise ValueError(f"n = {n}: expected 1 to 8 streams")
        self.a_m = nn.Parameter(F.one_hot(torch.tensor(index % n), n).float())
        self.a_r = nn.Parameter(torch.eye(n))
        self.b = nn.Parameter(torch.ones(n))
        self.dynamic = dynamic
        if dynamic:
            self.norm = nn.Parameter(torch.ones(d))
            self.w = nn.Parameter(torch.zeros(n + 2, d))  # rows: m, r (n of them), beta
            self.s_alpha = nn.Parameter(torch.tensor(scale))
            self.s_beta = nn.Parameter(torch.tensor(scale))

    def maps(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """a_m [..., n], a_r [..., n, n] by (from, to), b [..., n], for streams [..., n, d] in the maps' dtype."""
        if streams.shape[-2] != len(self.b):
            raise ValueError(f"streams of shape {list(streams.shape)}: expected [..., {len(self.b)}, d]")
        if not self.dynamic:
            return self.a_m, self.a_r, self.b
        normed = F.rms_norm(streams.to(self.w.dtype), self.norm.shape, self.norm)
        m, r, beta = F.linear(normed, self.w).tanh().split([1, len(self.b), 1], dim=-1)
        a_m = self.a_m + self.s_alpha * m.squeeze(-1)
        return a_m, self.a_r + self.s_alpha * r, self.b + self.s_beta * beta.squeeze(-1)

    def forward(self, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Streams [..., n, d] past the sublayer, in their dtype."""
        a_m, a_r, b = self.maps(streams)
        out = sublayer((a_m.unsqueeze(-1) * streams).sum(-2).to(streams.dtype))
        return (a_r.transpose(-1, -2) @ streams.to(a_r.dtype) + b.unsqueeze(-1) * out.unsqueeze(-2)).to(streams.dtype)
