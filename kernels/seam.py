"""The single-pass seam: from one sublayer's output to the next one's input while the streams pass once.

    X'_k = post_k out + sum_j comb_jk X_j          in fp32, rounded to X's dtype
    z    = sum_k pending_k X'_k                    of the rounded X', in fp32, rounded to X's dtype
    P    = fn v,  q = sum of v^2,  v = X' flattened         of the rounded X', for pre, post and comb
    rstd = rsqrt(mean(z^2) + norm_eps)             of the rounded z, for the norm of the next sublayer's input

    stream    for each 16 tokens and 64 channels   X, out -> X', z and this split's part of P, q and sum of z^2
    gather    for each token                       adds the splits; rstd; on request norm z, also as E4M3
    finish    of `kernels.hyper_connections`       P, q -> pre, post, comb

Through memory go n d elements of X, d of out, n d of X' and d of z: (2n + 2) d a token, the floor. Each split adds
n^2 + 2n + 2 numbers in fp32, written and read once: 8% of the floor's bytes each way at n = 4 and d = 5120. fn is
read once for 16 tokens, and by programs that run side by side, so from the cache. The norm's factor may be applied
after the next product, as fn's own is; a norm on request reads d and writes d, while z is in the cache.

Splits have 64 channels whatever T is, so a token's sums have one order, and its bits don't depend on the others.
One token still has 80 programs at d = 5120; with fewer channels in each, the parts would cost more than they gain.
bf16 meets fn as three bf16 parts, which hold all 24 bits of fp32: each product is exact, and matrix units add them
in fp32; the largest part apart from the others, since such a unit may cut off where fp32 would round.
Sources: V4.1 report 2.4.1; mHC 4; `dsv41_edu.mhc.seam`, the reference.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.aot import Build
from kernels.hyper_connections import check, finish_coefficients
from kernels.launch import tl, triton

BLOCK_T, BLOCK_D = 16, 64  # tokens and channels of a program
WARPS = {torch.bfloat16: 4, torch.float32: 8}  # fp32, without matrix units, needs more registers


@triton.jit
def load_maps(pending, post, comb, token, row, here, N: tl.constexpr):
    """The maps of a tile's tokens, [B, PADDED]: pending, post, comb, in the order of fn's rows."""
    token, here = token.to(tl.int64)[:, None], here[:, None]
    maps = tl.load(pending + token * N + row, mask=here & (row < N), other=0.0)
    maps += tl.load(post + token * N + row - N, mask=here & (row >= N) & (row < 2 * N), other=0.0)
    is_comb = here & (row >= 2 * N) & (row < N * N + 2 * N)
    return maps + tl.load(comb + token * (N * N) + row - 2 * N, mask=is_comb, other=0.0)


@triton.jit
def load_streams(streams, token, channel, streams_row, stream_stride, mask, N: tl.constexpr):
    """A tuple of N tiles, fp32 [B, D]."""
    streams += token.to(tl.int64)[:, None] * streams_row + channel[None, :]
    x = ()
    for j in tl.static_range(N):
        x += (tl.load(streams + j * tl.cast(stream_stride, tl.int64), mask=mask, other=0.0).to(tl.float32),)
    return x


@triton.jit
def mixed(maps, row, out, x, k, N: tl.constexpr):
    """X'_k before it is rounded: fp32 [B, D]."""
    total = tl.sum(tl.where(row == N + k, maps, 0.0), 1, keep_dims=True) * out
    for j in tl.static_range(N):
        total += tl.sum(tl.where(row == 2 * N + j * N + k, maps, 0.0), 1, keep_dims=True) * x[j]
    return total


@triton.jit
def bf16_parts(x):
    """Three numbers that hold 8 of fp32's 24 bits each, the largest first."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def stream(
    out, streams, post, comb, pending, fn, new, z, parts, T, d, out_row, streams_row, stream_stride,
    N: tl.constexpr, PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """new [T, N, d], z [T, d] and parts [T, splits, N^2 + 2N + 2]: P, q and the sum of z^2 of this split."""
    ROWS: tl.constexpr = N * N + 2 * N
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.arange(0, PADDED)[None, :]
    here, inside = token < T, channel < d
    mask = here[:, None] & inside[None, :]
    is_fn = inside[:, None] & (row < ROWS)
    place = token.to(tl.int64)[:, None]

    f = tl.load(out + place * out_row + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    x = load_streams(streams, token, channel, streams_row, stream_stride, mask, N)
    maps = load_maps(pending, post, comb, token, row, here, N)
    products = tl.zeros((BLOCK_T, PADDED), tl.float32)
    smaller = tl.zeros((BLOCK_T, PADDED), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    collapsed = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for k in tl.static_range(N):
        rounded = mixed(maps, row, f, x, k, N).to(new.dtype.element_ty)
        tl.store(new + (place * N + k) * d + channel[None, :], rounded, mask=mask)
        v = rounded.to(tl.float32)
        collapsed += tl.sum(tl.where(row == k, maps, 0.0), 1, keep_dims=True) * v
        squares += tl.sum(v * v, 1)
        matrix = tl.load(fn + row * (N * d) + k * d + channel[:, None], mask=is_fn, other=0.0)
        if new.dtype.element_ty == tl.bfloat16:
            high, middle, low = bf16_parts(matrix)
            smaller = tl.dot(rounded, low, smaller)
            smaller = tl.dot(rounded, middle, smaller)
            products = tl.dot(rounded, high, products)
        else:
            products = tl.dot(v, matrix, products, input_precision="ieee")
    rounded = collapsed.to(z.dtype.element_ty)
    tl.store(z + place * d + channel[None, :], rounded, mask=mask)
    v = rounded.to(tl.float32)

    sums = tl.where(row == ROWS, squares[:, None], products + smaller)
    sums = tl.where(row == ROWS + 1, tl.sum(v * v, 1)[:, None], sums)
    parts += (place * tl.num_programs(1) + tl.program_id(1)) * (ROWS + 2)
    tl.store(parts + row, sums, mask=here[:, None] & (row < ROWS + 2))


@triton.jit
def add_splits(parts, token, splits, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """The sums [PADDED] of one token's parts, of [T, splits, WIDTH]."""
    split, row = tl.arange(0, SPLITS)[:, None], tl.arange(0, PADDED)[None, :]
    place = (token * splits + split) * WIDTH + row
    return tl.sum(tl.load(parts + place, mask=(split < splits) & (row < WIDTH), other=0.0), 0)


@triton.jit
def gather(
    parts, z, weight, sums, rstd, normed, scales, d, splits, norm_eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums [T, WIDTH - 1] and rstd [T] of parts; with a weight [d] normed [T, d], E4M3 with scales [T, d / 32]."""
    token, row = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    total = add_splits(parts, token, splits, WIDTH, PADDED, SPLITS)
    tl.store(sums + token * (WIDTH - 1) + row, total, mask=row < WIDTH - 1)
    factor = tl.rsqrt(tl.sum(tl.where(row == WIDTH - 1, total, 0.0)) / d + norm_eps)
    tl.store(rstd + token, factor)
    if weight is not None:
        for start in range(0, d, BLOCK):
            group = start // 32 + tl.arange(0, BLOCK // 32)
            channel = group[:, None] * 32 + tl.arange(0, 32)[None, :]
            value = tl.load(z + token * d + channel, mask=channel < d, other=0.0).to(tl.float32) * factor
            value *= tl.load(weight + channel, mask=channel < d, other=0.0)
            value = value.to(z.dtype.element_ty)
            if scales is not None:
                v = value.to(tl.float32)
                amax = tl.max(tl.where(v == v, tl.abs(v), 0.0), 1)  # a NaN marks its own element alone
                bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)
                byte = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 is 1.75 * 2^8
                inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
                value = (v * inverse[:, None]).to(tl.float8e4nv)
                tl.store(scales + token * (d // 32) + group, byte.to(tl.uint8), mask=group * 32 < d)
            tl.store(normed + token * d + channel, value, mask=channel < d)


class SinglePass(NamedTuple):
    """What a seam hands on. With a norm, z is normed; as E4M3 it has `scales`, one for 32 channels."""

    streams: Tensor  # [T, n, d]
    z: Tensor  # [T, d]
    rstd: Tensor  # fp32 [T]
    pre: Tensor  # fp32 [T, n]
    post: Tensor  # fp32 [T, n]
    comb: Tensor  # fp32 [T, n, n]
    scales: Tensor | None  # E8M0 [T, d / 32]


class _SinglePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, norm_weight, fp8, steps, out, streams, post, comb, pending, fn, base, scale):
        (T, n, d), device = streams.shape, streams.device
        width, splits = n * n + 2 * n + 2, triton.cdiv(d, BLOCK_D)
        padded = max(16, triton.next_power_of_2(width))
        new = torch.empty((T, n, d), dtype=streams.dtype, device=device)
        z = torch.empty((T, d), dtype=streams.dtype, device=device)
        parts = torch.empty((T, splits, width), dtype=torch.float32, device=device)
        sums = torch.empty((1, T, width - 1), dtype=torch.float32, device=device)
        rstd = torch.empty((T,), dtype=torch.float32, device=device)
        normed = scales = None
        if norm_weight is not None:
            normed = torch.empty((T, d), dtype=torch.float8_e4m3fn if fp8 else streams.dtype, device=device)
        if fp8:
            scales = torch.empty((T, d // 32), dtype=torch.uint8, device=device)
        # fmt: off
        # tiles vary fastest: those of one split run side by side and find its channels of fn in the cache
        stream[(triton.cdiv(T, BLOCK_T), splits)](
            out, streams, post, comb, pending, fn, new, z, parts, T, d, out.stride(0), *streams.stride()[:2],
            N=n, PADDED=padded, BLOCK_T=BLOCK_T, BLOCK_D=BLOCK_D, num_warps=WARPS[streams.dtype],
        )
        gather[(T,)](
            parts, z, norm_weight, sums, rstd, normed, scales, d, splits, steps[2], WIDTH=width, PADDED=padded,
            SPLITS=triton.next_power_of_2(splits), BLOCK=min(4096, max(32, triton.next_power_of_2(d))), num_warps=8,
        )
        # fmt: on
        coefficients = finish_coefficients(sums, base, scale, n, d, *steps)
        ctx.steps = steps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, streams, post, comb, pending, fn, base, scale, sums, z, rstd)
        if fp8:
            scales = scales.view(torch.float8_e8m0fnu)
        return new, z if normed is None else normed, rstd, *coefficients, scales

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        from kernels.seam_backward import single_pass_backward  # which builds on this file

        return None, None, None, *single_pass_backward(*grads[:6], ctx.saved_tensors, ctx.steps)


def fused_single_pass(
    out: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    pending: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_weight: Tensor | None = None,
    fp8: bool = False,
    iterations: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-20,
) -> SinglePass:
    """As `single_pass` of the reference, with the norm of its z: what lies between two sublayers, in three kernels.

    out [T, d] and streams [T, n, d], n from 1 to 8: both bf16 or both fp32, channels adjacent, all else at any
    stride. post [T, n], comb [T, n, n], pending [T, n]: maps of the seam that ends; fn [n^2 + 2n, n d], base
    [n^2 + 2n], scale [3]: of the one that begins. All fp32 and contiguous.

    z isn't normed, for its factor `rstd` may follow the next product, which has the norm's weight in its matrix.
    With norm_weight, fp32 [d], z is normed, rounded to its dtype, and with fp8 that is cast to E4M3 as
    `fp8_rows_encode` of `dsv41_edu.quantization` does, for d a multiple of 32; a block with an infinity, which that
    refuses, means nothing.

    Differentiable once, but for the norm. The backward takes roundings for the identity, and keeps no X': beside the
    input, z and n^2 + 2n + 2 numbers a token.

    Raises ValueError for shapes, strides, devices, n, iterations below 1, fp8 without norm_weight, and norm_weight
    where gradients are wanted; TypeError for dtypes. V4.1 report 2.4.1; official inference code.
    """
    tensors = out, streams, post, comb, pending, fn, base, scale
    _check(*tensors, norm_weight, fp8)
    if norm_weight is not None and torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, norm_weight)):
        raise ValueError("norm_weight: expected none where gradients are wanted; norm z by rstd outside")
    return SinglePass(*_SinglePass.apply(norm_weight, fp8, (iterations, eps, norm_eps), *tensors))


def _check(out, streams, post, comb, pending, fn, base, scale, norm_weight, fp8) -> None:
    if streams.dim() != 3 or not 1 <= streams.shape[1] <= 8 or streams.shape[2] == 0:
        raise ValueError(f"streams of shape {list(streams.shape)}: expected [T, n, d], n from 1 to 8, d from 1")
    T, n, d = streams.shape
    if out.shape != (T, d):
        raise ValueError(f"out of shape {list(out.shape)}: expected {[T, d]}, as streams are [T, n, d]")
    if streams.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"streams are {streams.dtype}: expected torch.bfloat16 or torch.float32")
    if out.dtype != streams.dtype:
        raise TypeError(f"out is {out.dtype}: expected {streams.dtype}, as streams are")
    for name, tensor in {"out": out, "streams": streams}.items():
        if tensor.stride(-1) != 1 and d > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: expected its channels adjacent")
        if tensor.device != streams.device:
            raise ValueError(f"{name} is on {tensor.device}: expected {streams.device}, where streams are")
    rows, fp32 = n * n + 2 * n, torch.float32
    check(streams.device, post=(post, (T, n), fp32), comb=(comb, (T, n, n), fp32), pending=(pending, (T, n), fp32))
    check(streams.device, fn=(fn, (rows, n * d), fp32), base=(base, (rows,), fp32), scale=(scale, (3,), fp32))
    check(streams.device, norm_weight=(norm_weight, (d,), fp32))
    if fp8 and (norm_weight is None or d % 32):
        raise ValueError(f"fp8 with d = {d}: expected a multiple of 32, and norm_weight")


def _builds() -> list[Build]:
    """The seam of V4.1: 4 streams of 5120 channels."""
    tensors = dict.fromkeys(("post", "comb", "pending", "fn", "parts"), "*fp32")
    sizes = dict.fromkeys(("d", "out_row", "streams_row", "stream_stride"), "i32:16") | {"T": "i32"}
    how = {"N": 4, "PADDED": 32, "BLOCK_T": BLOCK_T, "BLOCK_D": BLOCK_D}
    builds = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        reals = dict.fromkeys(("out", "streams", "new", "z"), f"*{name}")
        builds.append(Build(f"stream_{name}", stream, tensors | sizes | reals, how, WARPS[dtype]))
    given = dict.fromkeys(("parts", "sums", "rstd"), "*fp32") | dict.fromkeys(("d", "splits"), "i32:16")
    given |= {"z": "*bf16", "norm_eps": "fp32"}
    how = {"WIDTH": 26, "PADDED": 32, "SPLITS": 128, "BLOCK": 4096}
    norm = given | {"weight": "*fp32", "normed": "*bf16"}
    fp8 = norm | {"normed": "*fp8e4nv", "scales": "*u8"}
    return [
        *builds,
        Build("gather", gather, given, how | dict.fromkeys(("weight", "normed", "scales")), 8),
        Build("gather_norm", gather, norm, how | {"scales": None}, 8),
        Build("gather_fp8", gather, fp8, how, 8, targets=("sm_90", "sm_100", "gfx942")),
    ]


BUILDS = _builds()
