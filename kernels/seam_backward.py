"""The backward of the single-pass seam: one pass for what a token gets, one for what fn gets from all tokens.

    G_k = grad X'_k + pending_k grad z + sum_m grad P_m fn_mk + 2 grad q X'_k        m: rows of fn, of stream k

    grad out    = sum_k post_k G_k          grad X_j     = sum_k comb_jk G_k
    grad post_k = sum of G_k out            grad comb_jk = sum of G_k X_j       over channels
    grad fn_mk  = sum of grad P_m X'_k      over tokens                         grad pending_k = sum of grad z X'_k

    spread   for each 16 tokens and 64 channels   out, X, grad X', grad z -> grad out, grad X, the maps' parts
    add      for each token                       adds the splits of the maps
    weigh    for each 64 channels, 16 times       out, X of every 16th tile -> a part of grad fn; torch adds these

Roundings count as the identity. X' isn't stored for this: both passes compute it again from X and out, rounded as in
the forward, since that is what z and P were made of. Through memory go (3n + 3) d elements a token for `spread` and
(n + 1) d for `weigh`, which leaves room in the registers for a sum over tokens. Nothing is added by atomics.

bf16 streams bring matrix units: they take grad P and fn as two bf16 parts each, which are off by 2^-16 at most.
Sources: `dsv41_edu.mhc.seam` and its autograd.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.hyper_connections import finish_coefficients_backward
from kernels.launch import tl, triton
from kernels.seam import BLOCK_D, BLOCK_T, add_splits, bf16_parts, load_maps, load_streams, mixed

SPREAD_D = {torch.bfloat16: 64, torch.float32: 32}  # channels of a program: as many as find registers
PROGRAMS = 16  # parts of grad fn
WARPS = 8  # of a program of `weigh`, which keeps n sums of 32 x 64


@triton.jit
def spread(
    out, streams, post, comb, pending, fn, grad_new, grad_z, grad_sums, grad_out, grad_streams, parts,
    T, d, out_row, streams_row, stream_stride,
    N: tl.constexpr, PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """grad_out [T, d], grad_streams [T, N, d] and parts [T, splits, N^2 + 2N]: of pending, post and comb.

    grad_new [T, N, d], grad_z [T, d], grad_sums [T, N^2 + 2N + 1] of P and q: each may be None.
    """
    ROWS: tl.constexpr = N * N + 2 * N
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.arange(0, PADDED)[None, :]
    here, inside = token < T, channel < d
    mask = here[:, None] & inside[None, :]
    is_fn = tl.trans(row < ROWS) & inside[None, :]
    place = token.to(tl.int64)[:, None]

    f = tl.load(out + place * out_row + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    x = load_streams(streams, token, channel, streams_row, stream_stride, mask, N)
    maps = load_maps(pending, post, comb, token, row, here, N)
    if grad_z is not None:
        of_z = tl.load(grad_z + place * d + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    if grad_sums is not None:
        is_sum = here[:, None] & (row <= ROWS)
        of_sums = tl.load(grad_sums + place * (ROWS + 1) + row, mask=is_sum, other=0.0)
        sums_high, sums_middle, _low = bf16_parts(of_sums)

    of_out = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    of_maps = tl.zeros((BLOCK_T, PADDED), tl.float32)
    of_x = ()
    for _ in tl.static_range(N):
        of_x += (tl.zeros((BLOCK_T, BLOCK_D), tl.float32),)
    for k in tl.static_range(N):
        v = mixed(maps, row, f, x, k, N).to(out.dtype.element_ty).to(tl.float32)
        g = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        if grad_sums is not None:
            g = 2.0 * tl.sum(tl.where(row == ROWS, of_sums, 0.0), 1, keep_dims=True) * v
            matrix = tl.load(fn + tl.trans(row) * (N * d) + k * d + channel[None, :], mask=is_fn, other=0.0)
            if out.dtype.element_ty == tl.bfloat16:
                high, middle, _low = bf16_parts(matrix)
                g = tl.dot(sums_high, middle, g)
                g = tl.dot(sums_middle, high, g)
                g = tl.dot(sums_high, high, g)
            else:
                g = tl.dot(of_sums, matrix, g, input_precision="ieee")
        if grad_z is not None:
            g += tl.sum(tl.where(row == k, maps, 0.0), 1, keep_dims=True) * of_z
            of_maps = tl.where(row == k, tl.sum(of_z * v, 1, keep_dims=True), of_maps)
        if grad_new is not None:
            g += tl.load(grad_new + (place * N + k) * d + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        of_out += tl.sum(tl.where(row == N + k, maps, 0.0), 1, keep_dims=True) * g
        of_maps = tl.where(row == N + k, tl.sum(g * f, 1, keep_dims=True), of_maps)
        added = ()
        for j in tl.static_range(N):
            added += (of_x[j] + tl.sum(tl.where(row == 2 * N + j * N + k, maps, 0.0), 1, keep_dims=True) * g,)
            of_maps = tl.where(row == 2 * N + j * N + k, tl.sum(g * x[j], 1, keep_dims=True), of_maps)
        of_x = added

    tl.store(grad_out + place * d + channel[None, :], of_out.to(grad_out.dtype.element_ty), mask=mask)
    for j in tl.static_range(N):
        to = grad_streams + (place * N + j) * d + channel[None, :]
        tl.store(to, of_x[j].to(grad_streams.dtype.element_ty), mask=mask)
    parts += (place * tl.num_programs(1) + tl.program_id(1)) * ROWS
    tl.store(parts + row, of_maps, mask=here[:, None] & (row < ROWS))


@triton.jit
def add(parts, sums, splits, WIDTH: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr):
    """sums [T, WIDTH] of parts [T, splits, WIDTH]."""
    token, row = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    total = add_splits(parts, token, splits, WIDTH, PADDED, SPLITS)
    tl.store(sums + token * WIDTH + row, total, mask=row < WIDTH)


@triton.jit
def weigh(
    out, streams, post, comb, pending, grad_sums, parts, T, d, out_row, streams_row, stream_stride,
    N: tl.constexpr, PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """parts [programs, N^2 + 2N, N d] of grad fn: of every so many tiles of tokens, from this program's own on."""
    ROWS: tl.constexpr = N * N + 2 * N
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.arange(0, PADDED)[None, :]
    inside = channel < d
    total = ()
    for _ in tl.static_range(N):
        total += (tl.zeros((PADDED, BLOCK_D), tl.float32),)
    for tile in range(tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.num_programs(0)):
        token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        here = token < T
        mask = here[:, None] & inside[None, :]
        place = token.to(tl.int64)[:, None]
        f = tl.load(out + place * out_row + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        x = load_streams(streams, token, channel, streams_row, stream_stride, mask, N)
        maps = load_maps(pending, post, comb, token, row, here, N)
        is_sum = here[:, None] & (row < ROWS)
        of_sums = tl.trans(tl.load(grad_sums + place * (ROWS + 1) + row, mask=is_sum, other=0.0))
        high, middle, _low = bf16_parts(of_sums)
        added = ()
        for k in tl.static_range(N):
            rounded = mixed(maps, row, f, x, k, N).to(out.dtype.element_ty)
            if out.dtype.element_ty == tl.bfloat16:
                added += (tl.dot(high, rounded, tl.dot(middle, rounded, total[k])),)
            else:
                added += (tl.dot(of_sums, rounded, total[k], input_precision="ieee"),)
        total = added
    is_fn = tl.trans(row < ROWS) & inside[None, :]
    parts += tl.program_id(0).to(tl.int64) * (ROWS * N) * d
    for k in tl.static_range(N):
        tl.store(parts + tl.trans(row) * (N * d) + k * d + channel[None, :], total[k], mask=is_fn)


def single_pass_backward(
    grad_new: Tensor | None,
    grad_z: Tensor | None,
    grad_rstd: Tensor | None,
    grad_pre: Tensor | None,
    grad_post: Tensor | None,
    grad_comb: Tensor | None,
    saved: tuple[Tensor, ...],
    steps: tuple[int, float, float],
) -> tuple[Tensor | None, ...]:
    """Gradients of out, streams, post, comb, pending, fn, base and scale; None where no used output hangs on it.

    The outputs' gradients, of any strides, or None for one that was not used; what `_SinglePass` of `kernels.seam`
    saved, and its iterations, eps and norm_eps.
    """
    out, streams, post, comb, pending, fn, base, scale, sums, z, rstd = saved
    (T, n, d), device, rows = streams.shape, streams.device, fn.shape[0]
    if grad_rstd is not None:  # rstd^-2 = mean(z^2) + norm_eps
        of_norm = (grad_rstd * rstd**3 / -d)[:, None] * z
        grad_z = of_norm if grad_z is None else grad_z + of_norm
    grad_new, grad_z = (None if grad is None else grad.contiguous() for grad in (grad_new, grad_z))
    grad_sums = grad_fn = grad_base = grad_scale = None
    strides = out.stride(0), *streams.stride()[:2]
    how = {"N": n, "PADDED": max(16, triton.next_power_of_2(rows + 1)), "BLOCK_T": BLOCK_T}
    tiles = triton.cdiv(T, BLOCK_T)

    if any(grad is not None for grad in (grad_pre, grad_post, grad_comb)):
        grad_sums, grad_base, grad_scale = finish_coefficients_backward(
            grad_pre, grad_post, grad_comb, sums, base, scale, n, d, *steps
        )
        programs = min(tiles, PROGRAMS)
        parts = torch.empty((programs, rows, n * d), dtype=torch.float32, device=device)
        weigh[(programs, triton.cdiv(d, BLOCK_D))](
            out, streams, post, comb, pending, grad_sums, parts, T, d, *strides,
            **how, BLOCK_D=BLOCK_D, num_warps=WARPS, num_stages=1,
        )  # fmt: skip
        grad_fn = parts.sum(0)

    grad_out = torch.empty((T, d), dtype=out.dtype, device=device)
    grad_streams = torch.empty((T, n, d), dtype=streams.dtype, device=device)
    block = SPREAD_D[streams.dtype]
    splits = triton.cdiv(d, block)
    parts = torch.empty((T, splits, rows), dtype=torch.float32, device=device)
    maps = torch.empty((T, rows), dtype=torch.float32, device=device)
    spread[(tiles, splits)](
        out, streams, post, comb, pending, fn, grad_new, grad_z, grad_sums, grad_out, grad_streams, parts,
        T, d, *strides, **how, BLOCK_D=block,
    )  # fmt: skip
    add[(T,)](parts, maps, splits, WIDTH=rows, PADDED=how["PADDED"], SPLITS=triton.next_power_of_2(splits))
    grad_pending, of_post, of_comb = maps.split([n, n, n * n], dim=1)
    return grad_out, grad_streams, of_post, of_comb.unflatten(1, (n, n)), grad_pending, grad_fn, grad_base, grad_scale


def _builds() -> list[Build]:
    """The seam of V4.1: 4 streams of 5120 channels."""
    given = dict.fromkeys(("post", "comb", "pending", "grad_sums", "parts"), "*fp32") | {"T": "i32"}
    given |= dict.fromkeys(("d", "out_row", "streams_row", "stream_stride"), "i32:16")
    how = {"N": 4, "PADDED": 32, "BLOCK_T": BLOCK_T}
    builds = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        both = given | dict.fromkeys(("out", "streams"), f"*{name}")
        grads = dict.fromkeys(("grad_new", "grad_z", "grad_out", "grad_streams"), f"*{name}") | {"fn": "*fp32"}
        builds.append(Build(f"spread_{name}", spread, both | grads, how | {"BLOCK_D": SPREAD_D[dtype]}))
        if dtype == torch.bfloat16:  # with a gradient of rstd, the one of z comes in fp32
            signature = both | grads | {"grad_z": "*fp32"}
            builds.append(Build("spread_bf16_rstd", spread, signature, how | {"BLOCK_D": SPREAD_D[dtype]}))
        builds.append(Build(f"weigh_{name}", weigh, both, how | {"BLOCK_D": BLOCK_D}, WARPS, num_stages=1))
    types = {"parts": "*fp32", "sums": "*fp32", "splits": "i32:16"}
    return [*builds, Build("add", add, types, {"WIDTH": 24, "PADDED": 32, "SPLITS": 128})]


BUILDS = _builds()
