"""A seam: how n residual streams meet a sublayer F, as deployed in V4 and V4.1.

    v    = X flattened to n d, fp32                     X [n, d], the streams
    m    = fn v * rsqrt(mean(v^2) + norm_eps)           fn [n^2 + 2n, n d]: the norm's weight is folded in
    pre  = sigmoid(m * scale_0 + base) + eps            n numbers: how the streams collapse into F's input
    post = 2 sigmoid(m * scale_1 + base)                n: how F's output is given to the streams
    comb = sinkhorn(m * scale_2 + base)                 n x n: how the streams mix

    z    = sum_c pre_c X_c                              collapse
    X'_k = post_k F(norm z) + sum_j comb_jk X_j         expand: the sum runs over comb's first index

In the multi-pass form (V4) a seam collapses with its own `pre`. In the single-pass form (V4.1) it collapses with
the one that the seam before it predicted, so `pre` is known before X is there: `single_pass` can expand, collapse
and project for the next seam while the streams are read and written once. The first seam collapses with stream 0
alone, which is the embedding; after the last one the streams collapse with its `pre`, and no head mix is needed.
Sources: mHC 4; V4 report 2.2; V4.1 report 2.4.1; official inference code.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.mhc.sinkhorn import EPS, ITERATIONS, sinkhorn

NORM_EPS = 1e-20  # rms_norm_eps


def coefficients(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int = ITERATIONS,
    eps: float = EPS,
    norm_eps: float = NORM_EPS,
) -> tuple[Tensor, Tensor, Tensor]:
    """The three maps of a seam, in the parameters' dtype: pre [..., n], post [..., n], comb [..., n, n].

    streams [..., n, d] of any float dtype; fn [n^2 + 2n, n d], base [n^2 + 2n], scale [3], fp32 or fp64: rows of
    fn for pre, post, then comb by its first index. Raises ValueError for shapes that don't fit and n outside 1 to 8,
    TypeError for parameters of another dtype (in bf16 the maps would be off by more than the streams' rounding).
    """
    n = check_streams(streams)
    columns = n * n + 2 * n
    expected = ("fn", fn, [columns, n * streams.shape[-1]]), ("base", base, [columns]), ("scale", scale, [3])
    for name, parameter, shape in expected:
        if list(parameter.shape) != shape:
            raise ValueError(f"{name} of shape {list(parameter.shape)}: expected {shape} for {n} streams")
    m = project(streams, fn, norm_eps)
    pre, post, comb = m.split([n, n, n * n], dim=-1)
    pre_base, post_base, comb_base = base.split([n, n, n * n])
    pre = (pre * scale[0] + pre_base).sigmoid() + eps
    post = 2 * (post * scale[1] + post_base).sigmoid()
    comb = sinkhorn((comb * scale[2] + comb_base).unflatten(-1, (n, n)), iterations, eps)
    return pre, post, comb


def project(streams: Tensor, fn: Tensor, norm_eps: float = NORM_EPS) -> Tensor:
    """fn v * rsqrt(mean(v^2) + norm_eps) of streams [..., n, d]: [..., rows of fn], in fn's dtype."""
    if fn.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"fn is {fn.dtype}: expected float32, whatever the streams' dtype")
    v = streams.flatten(-2).to(fn.dtype)
    return F.linear(v, fn) * torch.rsqrt(v.square().mean(-1, keepdim=True) + norm_eps)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_c pre_c X_c: streams [..., n, d], pre [..., n] -> [..., d], summed in pre's dtype, in the streams'."""
    return (pre.unsqueeze(-1) * streams).sum(-2).to(streams.dtype)


def expand(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post_k out + sum_j comb_jk X_j: out [..., d], streams [..., n, d], post [..., n], comb [..., n, n]."""
    mixed = comb.transpose(-1, -2) @ streams.to(comb.dtype)
    return (mixed + post.unsqueeze(-1) * out.unsqueeze(-2)).to(streams.dtype)


def one_hot(streams: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The map [..., n] that collapses to stream 0, pending at the start of the single-pass form."""
    first = torch.zeros(streams.shape[:-1], dtype=dtype, device=streams.device)
    first[..., 0] = 1
    return first


def head_mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float = EPS, norm_eps: float = NORM_EPS
) -> Tensor:
    """V4's last collapse, with a map of its own: fn [n, n d], base [n], scale [1]. V4.1 has no such tensors."""
    return collapse(streams, (project(streams, fn, norm_eps) * scale + base).sigmoid() + eps)


def single_pass(
    out: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pending: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iterations: int = ITERATIONS,
    eps: float = EPS,
    norm_eps: float = NORM_EPS,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From one sublayer's output to the next one's input: what lies between, in one pass over the streams.

    out [..., d] and streams [..., n, d] of one dtype; post, comb and pending (its `pre`) of the seam that ends;
    fn, base, scale of the one that begins. Returns its streams [..., n, d], their collapse [..., d] with the
    pending map, and its own pre, post and comb.
    """
    streams = expand(out, streams, post, comb)
    return streams, collapse(streams, pending), *coefficients(streams, fn, base, scale, iterations, eps, norm_eps)


def check_streams(streams: Tensor) -> int:
    """How many streams there are. Raises ValueError, TypeError."""
    if streams.dim() < 2 or not 1 <= streams.shape[-2] <= 8:
        raise ValueError(f"streams of shape {list(streams.shape)}: expected [..., n, d] with n from 1 to 8")
    if not streams.is_floating_point():
        raise TypeError(f"streams are {streams.dtype}: expected a float type")
    return streams.shape[-2]


class Seam(nn.Module):
    """The parameters of one seam and what they do: fn [n^2 + 2n, n d], base [n^2 + 2n], scale [3], all fp32.

    They start as the plain residual: the input is stream 0, F's output goes to every stream with weight 1, and
    the streams hardly mix; the scales start at 0.01 (mHC 4.1).
    """

    def __init__(self, n: int, d: int, iterations: int = ITERATIONS, eps: float = EPS, norm_eps: float = NORM_EPS):
        super().__init__()
        if not 1 <= n <= 8:
            raise ValueError(f"n = {n}: expected 1 to 8 streams")
        self.iterations, self.eps, self.norm_eps = iterations, eps, norm_eps
        self.fn = nn.Parameter(torch.empty(n * n + 2 * n, n * d))
        nn.init.normal_(self.fn, std=(n * d) ** -0.5)
        first = torch.full((n,), -8.0)  # sigmoid(-8) = 0.0003, and its gradient is as large
        first[0] = 8.0
        self.base = nn.Parameter(torch.cat([first, torch.zeros(n), 8 * torch.eye(n).flatten()]))
        self.scale = nn.Parameter(torch.full((3,), 0.01))

    def coefficients(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre, post and comb of these streams."""
        return coefficients(streams, self.fn, self.base, self.scale, self.iterations, self.eps, self.norm_eps)

    def forward(
        self, streams: Tensor, sublayer: Callable[[Tensor], Tensor], pending: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Streams [..., n, d] past the sublayer, and this seam's own pre [..., n], pending for the next one.

        Collapses with `pending` (single-pass, V4.1), or with its own pre without it (multi-pass, V4).
        """
        pre, post, comb = self.coefficients(streams)
        z = collapse(streams, pre if pending is None else pending)
        return expand(sublayer(z), streams, post, comb), pre
