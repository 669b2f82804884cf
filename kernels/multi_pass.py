"""The two forms in which V4 is served: kernels from a sublayer's output F to the next one's input, forward only.

    X'_k = post_k F + sum_j comb_jk X_j                   expand
    P, q = fn v and sum of v^2, in splits                 project: v is X' flattened to n d
    pre, post, comb                                       the coefficient step, `kernels.hyper_connections`
    z    = sum_c pre_c X'_c                               collapse, rounded to the streams' dtype
    norm z = z rsqrt(mean(z^2) + norm_eps) weight         norm

In elements of the streams, F and z that pass through memory:

    four_pass   expand; project; collapse; norm           (2n + 1) d + n d + (n + 1) d + 2 d = (4n + 4) d
    two_pass    expand and project; collapse and norm     (2n + 1) d + (n + 1) d = (3n + 2) d

which are 20 d and 14 d for n = 4. A program expands or projects 128 channels of all streams, so that one token has
40 programs at the official size; partials add 6% to the traffic there. The splits don't depend on T, so a token's
bits don't depend on the others.

bf16 streams meet fn as three bf16 parts, which hold all 24 bits of its fp32. Their products are exact, and matrix
units add them in fp32: the largest parts apart from the others, since such a unit may cut off what fp32 would round.
All else is summed in fp32 too, and rounded once where it is stored. Sources: mHC 4; V4 report 2.2; official
inference code; `dsv41_edu.mhc.seam`, the reference.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.hyper_connections import check, finish_coefficients
from kernels.launch import tl, triton

SPLIT = 128  # channels of each stream that a program expands or projects
BFLOAT16 = {"OPERAND": tl.bfloat16, "BLOCK_T": 32, "BLOCK_D": 32}
FLOAT32 = {"OPERAND": tl.float32, "BLOCK_T": 16, "BLOCK_D": 32}
WARPS = 8  # of a program that collapses: it has all channels of a token


@triton.jit
def expand_project(
    out, streams, post, comb, fn, mixed, partials, T, d,
    n: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """With an `out`, `mixed` is what the streams expand to; with an `fn`, a split of `partials` is the projection."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    here, is_column = token < T, column < n * n + 2 * n
    token = token.to(tl.int64)
    first = tl.program_id(1) * SPLIT
    q = tl.zeros((BLOCK_T,), tl.float32)
    products = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    rest = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    for start in range(first, tl.minimum(first + SPLIT, d), BLOCK_D):
        channel = start + tl.arange(0, BLOCK_D)[None, :]
        real = here & (channel < d)
        place = token * (n * d) + channel
        if out is not None:
            f = tl.load(out + token * d + channel, mask=real, other=0.0).to(tl.float32)
            x = ()
            for j in tl.static_range(n):
                x += (tl.load(streams + place + j * d, mask=real, other=0.0),)
        for k in range(n):  # not unrolled: the parts of fn for n streams take too many registers
            if out is not None:
                total = tl.load(post + token * n + k, mask=here, other=0.0) * f
                for j in tl.static_range(n):
                    total += tl.load(comb + (token * n + j) * n + k, mask=here, other=0.0) * x[j].to(tl.float32)
                value = total.to(mixed.dtype.element_ty)
                tl.store(mixed + place + k * d, value, mask=real)
            else:
                value = tl.load(streams + place + k * d, mask=real, other=0.0)
            if fn is not None:
                q += tl.sum(value.to(tl.float32) * value.to(tl.float32), 1)
                row = tl.trans(channel)
                w = tl.load(fn + column * (n * d) + k * d + row, mask=is_column & (row < d), other=0.0)
                high = w.to(OPERAND)
                products = tl.dot(value, high, products, input_precision="ieee")
                if w.dtype != OPERAND:
                    w -= high.to(tl.float32)
                    middle = w.to(OPERAND)
                    rest = tl.dot(value, middle, rest)
                    rest = tl.dot(value, (w - middle.to(tl.float32)).to(OPERAND), rest)
    if fn is not None:
        partials += (tl.program_id(1).to(tl.int64) * T + token) * (n * n + 2 * n + 1)
        tl.store(partials + column, products + rest, mask=here & is_column)
        tl.store(partials + n * n + 2 * n, q[:, None], mask=here)


@triton.jit
def collapse(streams, pre, weight, z, d, norm_eps, n: tl.constexpr, BLOCK_D: tl.constexpr):
    """A token's z of n streams, or the one stream where there is no `pre`; its norm where there is a `weight`."""
    token, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for c in tl.static_range(n):
        stream = tl.load(streams + (token * n + c) * d + channel, mask=channel < d, other=0.0).to(tl.float32)
        total += stream if pre is None else stream * tl.load(pre + token * n + c)
    value = total.to(z.dtype.element_ty)
    if weight is not None:
        value = value.to(tl.float32)
        r = tl.rsqrt(tl.sum(value * value) / d + norm_eps)
        value = value * r * tl.load(weight + channel, mask=channel < d, other=0.0)
    tl.store(z + token * d + channel, value.to(z.dtype.element_ty), mask=channel < d)


def fused_expand(out: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post_k out + sum_j comb_jk X_j: out [T, d], streams [T, n, d] -> [T, n, d], bf16 or fp32 all three.

    post [T, n], comb [T, n, n]: fp32. All contiguous, n from 1 to 8. Raises ValueError for shapes, strides and
    devices, TypeError for dtypes. (2n + 1) d elements a token. V4 report 2.2.
    """
    _check(streams, out=out, post=post, comb=comb)
    return _expand_project(streams, out, post, comb)[0]


def fused_project(streams: Tensor, fn: Tensor) -> Tensor:
    """Partials fp32 [S, T, n^2 + 2n + 1] of streams [T, n, d]: of fn v in each split of the channels, and of sum v^2.

    streams: bf16 or fp32; fn [n^2 + 2n, n d]: fp32. All contiguous, n from 1 to 8. Raises ValueError for shapes,
    strides and devices, TypeError for dtypes. n d elements a token. V4 report 2.2.
    """
    _check(streams, fn=fn)
    return _expand_project(streams, fn=fn)[1]


def fused_collapse(
    streams: Tensor, pre: Tensor, norm_weight: Tensor | None = None, norm_eps: float = 1e-20
) -> Tensor:
    """sum_c pre_c X_c of streams [T, n, d], bf16 or fp32: [T, d] in their dtype, normalised if there is a weight.

    pre [T, n], norm_weight [d]: fp32. All contiguous, n from 1 to 8. The norm is taken of the rounded sum, in fp32.
    Raises ValueError for shapes, strides and devices, TypeError for dtypes. (n + 1) d elements a token.
    V4 report 2.2.
    """
    _check(streams, pre=pre, norm_weight=norm_weight)
    return _collapse(streams, pre, norm_weight, norm_eps)


def fused_rms_norm(x: Tensor, norm_weight: Tensor, norm_eps: float = 1e-20) -> Tensor:
    """x rsqrt(mean(x^2) + norm_eps) norm_weight of x [T, d], bf16 or fp32, in its dtype; norm_weight: fp32 [d].

    Raises ValueError for shapes, strides and devices, TypeError for dtypes. 2 d elements a token.
    """
    if x.dim() != 2 or x.shape[1] < 1:
        raise ValueError(f"x of shape {list(x.shape)}: expected [T, d] with d from 1")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"x is {x.dtype}: expected torch.bfloat16 or torch.float32")
    check(x.device, x=(x, x.shape, x.dtype), norm_weight=(norm_weight, (x.shape[1],), torch.float32))
    return _collapse(x[:, None], None, norm_weight, norm_eps)


def two_pass(
    out: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    iterations: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From one sublayer's output to the next one's input in three kernels, two of which touch the streams.

    out [T, d] and streams [T, n, d]: bf16 or fp32; post [T, n] and comb [T, n, n] of the seam that ends; fn
    [n^2 + 2n, n d], base [n^2 + 2n] and scale [3] of the one that begins, norm_weight [d] of its sublayer: fp32. All
    contiguous, n from 1 to 8. Returns the new streams [T, n, d], the input [T, d], collapsed with the new seam's own
    pre and normalised, and its pre, post and comb. Raises ValueError for shapes, strides, devices and without an
    iteration, TypeError for dtypes. (3n + 2) d elements a token.
    """
    _check(streams, out=out, post=post, comb=comb, fn=fn, base=base, scale=scale, norm_weight=norm_weight)
    streams, partials = _expand_project(streams, out, post, comb, fn)
    maps = finish_coefficients(partials, base, scale, *streams.shape[1:], iterations, eps, norm_eps)
    return streams, _collapse(streams, maps[0], norm_weight, norm_eps), *maps


def four_pass(
    out: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    iterations: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `two_pass` returns, in V4's five kernels, of which four touch the streams or z: (4n + 4) d elements."""
    streams = fused_expand(out, streams, post, comb)
    partials = fused_project(streams, fn)
    maps = finish_coefficients(partials, base, scale, *streams.shape[1:], iterations, eps, norm_eps)
    return streams, fused_rms_norm(fused_collapse(streams, maps[0]), norm_weight, norm_eps), *maps


def _expand_project(
    streams: Tensor,
    out: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    fn: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """New streams if there is an `out`, partials of them or else of the old ones if there is an `fn`."""
    T, n, d = streams.shape
    splits, columns = triton.cdiv(d, SPLIT), n * n + 2 * n
    mixed = partials = None
    if out is not None:
        mixed = torch.empty((T, n, d), dtype=streams.dtype, device=streams.device)
    if fn is not None:
        partials = torch.empty((splits, T, columns + 1), dtype=torch.float32, device=streams.device)
    how = BFLOAT16 if streams.dtype == torch.bfloat16 else FLOAT32
    expand_project[(triton.cdiv(T, how["BLOCK_T"]), splits)](
        out, streams, post, comb, fn, mixed, partials, T, d,
        n=n, COLUMNS=max(16, triton.next_power_of_2(columns)), SPLIT=SPLIT, **how,
    )  # fmt: skip
    return mixed, partials


def _collapse(streams: Tensor, pre: Tensor | None, norm_weight: Tensor | None, norm_eps: float) -> Tensor:
    T, n, d = streams.shape
    z = torch.empty((T, d), dtype=streams.dtype, device=streams.device)
    BLOCK_D = triton.next_power_of_2(d)
    collapse[(T,)](streams, pre, norm_weight, z, d, norm_eps, n=n, BLOCK_D=BLOCK_D, num_warps=WARPS)
    return z


def _check(streams: Tensor, **others: Tensor | None) -> None:
    if streams.dim() != 3 or not 1 <= streams.shape[1] <= 8 or streams.shape[2] < 1:
        raise ValueError(f"streams of shape {list(streams.shape)}: expected [T, n, d] with n from 1 to 8, d from 1")
    if streams.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"streams are {streams.dtype}: expected torch.bfloat16 or torch.float32")
    T, n, d = streams.shape
    columns = n * n + 2 * n
    shapes = {"out": (T, d), "pre": (T, n), "post": (T, n), "comb": (T, n, n), "norm_weight": (d,)}
    shapes |= {"fn": (columns, n * d), "base": (columns,), "scale": (3,)}
    dtypes = dict.fromkeys(shapes, torch.float32) | {"out": streams.dtype}
    expected = {name: (part, shapes[name], dtypes[name]) for name, part in others.items()}
    check(streams.device, streams=(streams, streams.shape, streams.dtype), **expected)


def _builds() -> list[Build]:
    """The official size: 4 streams of 5120 channels. In fp32 what two_pass takes."""
    builds = []
    for name, blocks in (("bf16", BFLOAT16), ("fp32", FLOAT32)):
        real = f"*{name}"
        expand = {"out": real, "post": "*fp32", "comb": "*fp32", "mixed": real}
        project = {"fn": "*fp32", "partials": "*fp32"}
        sizes, how = {"streams": real, "T": "i32", "d": "i32:16"}, blocks | {"n": 4, "COLUMNS": 32, "SPLIT": SPLIT}
        kinds = {"expand": expand, "project": project} if name == "bf16" else {}
        for kind, given in (kinds | {"expand_project": expand | project}).items():
            absent = dict.fromkeys({*expand, *project} - {*given})
            builds.append(Build(f"{kind}_{name}", expand_project, given | sizes, how | absent))
        sizes = {"streams": real, "z": real, "d": "i32:16", "norm_eps": "fp32"}
        kinds = {"collapse": (4, ["pre"]), "norm": (1, ["weight"])} if name == "bf16" else {}
        for kind, (n, given) in (kinds | {"collapse_norm": (4, ["pre", "weight"])}).items():
            absent = dict.fromkeys({"pre", "weight"} - {*given})
            types = sizes | dict.fromkeys(given, "*fp32")
            builds.append(Build(f"{kind}_{name}", collapse, types, {"n": n, "BLOCK_D": 8192} | absent, WARPS))
    return builds


BUILDS = _builds()
