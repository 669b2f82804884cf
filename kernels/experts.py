"""Routed experts in three kernels, on weights as they are stored: dense, FP8 or MXFP4.

    a = w1 x,  u = w3 x                                      summed in fp32, rounded to x's dtype
    h = silu(min(a, c)) * clamp(u, -c, c) * r                in fp32, rounded to x's dtype
    y = w2 h                                                 summed in fp32, rounded to x's dtype
    out = sum of a token's k rows y, in the order of its choice, in fp32, rounded to x's dtype

It rounds where the reference does (`dsv41_edu.moe.experts`), so they differ by the order of sums alone. The P = T k
pairs of token and slot are sorted by expert and cut into tiles, at most M pairs of one expert each:

    gate_up   for each tile and N channels of I    gathers x, w1, w3 -> hidden [P, I], in sorted order
    down      for each tile and N channels of d    hidden, w2        -> rows [P, d], back in the tokens' order
    combine   for each token                       rows              -> out [T, d]

A tile reads the whole matrices of its expert, and no other's: a stored weight is read once for each tile of M
pairs. Nothing is added by atomics, so two runs are equal to the bit. No decoded weight is ever stored:

    FP8     byte to fp16 by its bits, times 2^8; times the E8M0 scale of its 32x32 tile
    MXFP4   nibble to fp16 by its bits, times 2^14; times the E8M0 scale of its row's 32 channels

All exact in bf16 too, but for scales at the very end of their range. Sources: V4 report 4.2.3; official inference
code; checkpoint layout; OCP Microscaling Formats (MX) v1.0.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.launch import tl, triton

Stored = Tensor | tuple[Tensor, Tensor]


@triton.jit
def decode_e8m0(byte):
    """2^(b - 127) by its bits as fp32; 0 is subnormal there, 255 is NaN."""
    byte = byte.to(tl.int32)
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decode_e4m3(byte):
    """E4M3 has 4 exponent bits with bias 7 where fp16 has 5 with bias 15: the same bits mean 2^8 less."""
    byte = byte.to(tl.int32)
    magnitude = byte & 0x7F
    bits = ((byte & 0x80) << 8) | tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7)  # NaN
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def decode_e2m1(code):
    """E2M1 has 2 exponent bits with bias 1 where fp16 has 5 with bias 15: the same bits mean 2^14 less."""
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def weight_tile(
    w, scales, row, channel, rows, channels, w_row, scale_row, FORMAT: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    """N rows by K channels of one expert's matrix [rows, channels], from (row, channel) on, decoded."""
    n = row + tl.arange(0, N)
    is_row = (n < rows)[:, None]
    w += n[:, None] * w_row
    k = channel + tl.arange(0, K)[None, :]
    if FORMAT == "dense":
        tile = tl.load(w + k, mask=is_row & (k < channels), other=0.0)
    else:
        block = channel // 32 + tl.arange(0, K // 32)[None, :]
        is_block = block < tl.cdiv(channels, 32)
        if FORMAT == "fp8":
            values = decode_e4m3(tl.load(w + k, mask=is_row & (k < channels), other=0))
            group = row // 32 + tl.arange(0, N // 32)[:, None]
            stored = tl.load(scales + group * scale_row + block, mask=(group * 32 < rows) & is_block, other=0)
            stored = tl.reshape(tl.broadcast_to(stored[:, None, :], (N // 32, 32, K // 32)), (N, K // 32))
        else:
            byte = channel // 2 + tl.arange(0, K // 2)[None, :]
            codes = tl.load(w + byte, mask=is_row & (byte < channels // 2), other=0).to(tl.int32)
            values = tl.interleave(decode_e2m1(codes), decode_e2m1(codes >> 4))  # the even channel is the low nibble
            stored = tl.load(scales + n[:, None] * scale_row + block, mask=is_row & is_block, other=0)
        scale = decode_e8m0(stored)[:, :, None]
        tile = tl.reshape(tl.reshape(values, (N, K // 32, 32)) * scale, (N, K))
    return tile


@triton.jit
def gate_up(
    x, weights, order, tiles, w1, w3, scales1, scales3, hidden,
    n_experts, slots, d, width, limit, x_row, w_expert, w_row, scale_expert, scale_row,
    FORMAT: tl.constexpr, OPERAND: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """hidden [P, width] in sorted order, of x [T, d], weights [T, slots], w1 and w3 [E, width, d] as stored."""
    tile, n_tiles = tl.program_id(0), tl.num_programs(0)
    expert = tl.load(tiles + tile).to(tl.int64)  # times a matrix's size it passes 2^31
    if expert >= n_experts:
        return
    place = tl.load(tiles + n_tiles + tile) + tl.arange(0, M)
    here = place < tl.load(tiles + 2 * n_tiles + tile)
    pair = tl.load(order + place, mask=here, other=0)
    x += (pair // slots)[:, None] * x_row
    w1, w3 = w1 + expert * w_expert, w3 + expert * w_expert
    scales1, scales3 = scales1 + expert * scale_expert, scales3 + expert * scale_expert

    a = tl.zeros((M, N), tl.float32)
    u = tl.zeros((M, N), tl.float32)
    row = tl.program_id(1) * N
    for start in range(0, d, K):
        k = start + tl.arange(0, K)[None, :]
        left = tl.load(x + k, mask=here[:, None] & (k < d), other=0.0).to(OPERAND)
        right = weight_tile(w1, scales1, row, start, width, d, w_row, scale_row, FORMAT, N, K).to(OPERAND)
        a = tl.dot(left, tl.trans(right), a, input_precision="ieee")
        right = weight_tile(w3, scales3, row, start, width, d, w_row, scale_row, FORMAT, N, K).to(OPERAND)
        u = tl.dot(left, tl.trans(right), u, input_precision="ieee")

    a, u = a.to(OPERAND).to(tl.float32), u.to(OPERAND).to(tl.float32)  # as a product in x's dtype leaves them
    a = tl.where(a > limit, limit, a)  # from above alone; NaN stays NaN
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    r = tl.load(weights + pair, mask=here, other=0.0).to(tl.float32)[:, None]
    h = a / (1.0 + tl.exp(-a)) * u * r
    n = row + tl.arange(0, N)[None, :]
    tl.store(hidden + place.to(tl.int64)[:, None] * width + n, h.to(OPERAND), mask=here[:, None] & (n < width))


@triton.jit
def down(
    hidden, order, tiles, w2, scales2, rows,
    n_experts, d, width, w_expert, w_row, scale_expert, scale_row,
    FORMAT: tl.constexpr, OPERAND: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """rows [P, d] in the tokens' order, of hidden [P, width] and w2 [E, d, width] as stored."""
    tile, n_tiles = tl.program_id(0), tl.num_programs(0)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert >= n_experts:
        return
    place = tl.load(tiles + n_tiles + tile) + tl.arange(0, M)
    here = place < tl.load(tiles + 2 * n_tiles + tile)
    hidden += place.to(tl.int64)[:, None] * width
    w2, scales2 = w2 + expert * w_expert, scales2 + expert * scale_expert

    y = tl.zeros((M, N), tl.float32)
    row = tl.program_id(1) * N
    for start in range(0, width, K):
        k = start + tl.arange(0, K)[None, :]
        left = tl.load(hidden + k, mask=here[:, None] & (k < width), other=0.0)
        right = weight_tile(w2, scales2, row, start, d, width, w_row, scale_row, FORMAT, N, K).to(OPERAND)
        y = tl.dot(left, tl.trans(right), y, input_precision="ieee")
    pair = tl.load(order + place, mask=here, other=0)
    n = row + tl.arange(0, N)[None, :]
    tl.store(rows + pair[:, None] * d + n, y.to(OPERAND), mask=here[:, None] & (n < d))


@triton.jit
def combine(rows, indices, out, n_experts, d, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, d] from rows [T k, d]; a pair whose id is no expert's has no row, and adds nothing."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(SLOTS):
        pair = token * SLOTS + slot
        expert = tl.load(indices + pair)
        present = tl.where((expert >= 0) & (expert < n_experts), d, 0)
        total += tl.load(rows + pair * d + n, mask=n < present, other=0.0).to(tl.float32)
    tl.store(out + token * d + n, total.to(out.dtype.element_ty), mask=n < d)


def tiles_by_expert(indices: Tensor, n_experts: int, M: int) -> tuple[Tensor, Tensor]:
    """The pairs sorted by expert, int64 [P], and the tiles, int32 [3, n]: expert, first place, end of its expert's.

    indices: int [T, k]. The sort is stable: pairs of one expert stay in the tokens' order. n is the most tiles that
    P pairs can need, known without waiting for a GPU; the tiles left over have the expert n_experts. Ids outside
    0 to n_experts - 1 get no tile.
    """
    ids, order = indices.flatten().sort(stable=True)
    P, device = len(order), indices.device
    bounds = torch.searchsorted(ids, torch.arange(n_experts + 1, device=device, dtype=ids.dtype))  # first of each
    ends = ((bounds.diff() + M - 1) // M).cumsum(0)  # tiles up to and with each expert
    some = min(P, n_experts)  # experts that have pairs, at most; each may have one tile that isn't full
    tile = torch.arange((P - some) // M + some, device=device)
    expert = torch.searchsorted(ends, tile, right=True)
    known = expert.clamp(max=n_experts - 1)
    before = torch.where(known > 0, ends[known - 1], 0)
    tiles = torch.stack([expert, bounds[known] + (tile - before) * M, bounds[known + 1]])
    return order, tiles.int()


def fused_experts(
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    w1: Stored,
    w2: Stored,
    w3: Stored,
    limit: float | None = None,
    tile: int | None = None,
) -> Tensor:
    """Sum over each token's experts, [T, d] in x's dtype: as `experts_loop` of the reference.

    x: bf16 or fp32 [T, d]; weights: float [T, k]; indices: int [T, k]. w1, w3 [E, I, d] and w2 [E, d, I] are all of
    one format: a tensor of x's dtype, or a pair of payload and E8M0 scales, FP8 (E4M3 and [E, ceil(out/32),
    ceil(in/32)]) or MXFP4 (int8 [E, out, in/2] and [E, out, in/32]). Last dimensions are contiguous; x's rows and
    the matrices' others have any stride, so the halves of a joint w13 may be given. limit: of the clamp, or none.
    tile: most pairs in a tile, 16 or 64; by default 64 where there are 32 pairs an expert. A row's bits depend on
    the batch through this alone, since a matrix unit may sum in another order.

    Raises ValueError for shapes, strides, devices, formats, or ids outside 0 to E - 1 on a CPU; TypeError for dtypes.
    Ids on a GPU aren't waited for: a pair with an id outside belongs to no expert here, and adds nothing.
    """
    one, two, three = (_Matrix(name, stored, x.dtype) for name, stored in (("w1", w1), ("w2", w2), ("w3", w3)))
    _check(x, weights, indices, one, two, three)
    (T, d), k, E, width = x.shape, indices.shape[1], one.experts, one.out
    M = tile or (64 if T * k >= 32 * E else 16)
    if M not in (16, 64):
        raise ValueError(f"tile = {tile}: expected 16 or 64")
    out = torch.empty((T, d), dtype=x.dtype, device=x.device)
    if T * k == 0 or d == 0:
        return out.zero_()
    order, tiles = tiles_by_expert(indices, E, M)
    n = tiles.shape[1]
    hidden = torch.empty((T * k, width), dtype=x.dtype, device=x.device)
    rows = torch.empty((T * k, d), dtype=x.dtype, device=x.device)
    how = blocks(one.format, x.dtype, M)
    # fmt: off
    # tiles vary fastest: those of one expert run side by side and find its weights in the cache
    gate_up[(n, triton.cdiv(width, how["N"]))](
        x, weights, order, tiles, one.payload, three.payload, one.scales, three.scales, hidden,
        E, k, d, width, float("inf") if limit is None else float(limit), x.stride(0), *one.strides, **how,
    )
    down[(n, triton.cdiv(d, how["N"]))](
        hidden, order, tiles, two.payload, two.scales, rows, E, d, width, *two.strides, **how,
    )
    combine[(T, triton.cdiv(d, 1024))](rows, indices, out, E, d, SLOTS=k, BLOCK=1024)
    # fmt: on
    return out


def blocks(format: str, dtype: torch.dtype, M: int) -> dict[str, object]:
    """What a launch fixes: few rows leave room for long tiles of weights, and many want more warps."""
    how = {"FORMAT": format, "M": M, "N": 64, "num_warps": 4 if M == 16 else 8}
    if dtype == torch.float32:  # no matrix units: for tests more than for speed
        return how | {"OPERAND": tl.float32, "K": 32}
    return how | {"OPERAND": tl.bfloat16, "K": 128 if M == 16 and format != "dense" else 64}


class _Matrix:
    """What a kernel needs of E stacked matrices: integers for bytes, sizes, strides."""

    def __init__(self, name: str, stored: Stored, dtype: torch.dtype):
        dense = isinstance(stored, Tensor)
        payload, scales = (stored, stored) if dense else stored
        packed = {torch.float8_e4m3fn: "fp8", torch.int8: "mxfp4", torch.uint8: "mxfp4"}
        formats = {dtype: "dense"} if dense else packed
        if payload.dtype not in formats or (not dense and scales.dtype != torch.float8_e8m0fnu):
            raise TypeError(
                f"{name} is {payload.dtype} with {scales.dtype}: expected {dtype}, as x is, alone, or a pair of "
                "float8_e4m3fn or int8 with float8_e8m0fnu"
            )
        if payload.dim() != 3:
            raise ValueError(f"{name} of shape {list(payload.shape)}: expected [E, out, in]")
        self.format, self.device, (E, out, columns) = formats[payload.dtype], payload.device, payload.shape
        self.shape = E, out, channels = E, out, columns * 2 if self.format == "mxfp4" else columns
        self.experts, self.out = E, out
        tiles = (E, -(-out // 32), -(-channels // 32))
        expected = {"dense": payload.shape, "fp8": tiles, "mxfp4": (E, out, channels // 32)}[self.format]
        if scales.shape != expected or (self.format == "mxfp4" and channels % 32):
            raise ValueError(f"scales of {name} {list(scales.shape)}: expected {list(expected)}, of whole blocks")
        for part in (payload, scales):
            if part.shape[2] > 1 and (part.stride(2) != 1 or out * part.stride(1) >= 2**31):
                raise ValueError(
                    f"{name} has strides {part.stride()}: expected 1 last, 2^31 elements within an expert"
                )
        if not dense:
            payload, scales = payload.view(torch.uint8), scales.view(torch.uint8)
        self.payload, self.scales = payload, scales
        self.strides = (*payload.stride()[:2], *scales.stride()[:2])


def _check(x: Tensor, weights: Tensor, indices: Tensor, one: _Matrix, two: _Matrix, three: _Matrix) -> None:
    if x.dim() != 2 or weights.shape != indices.shape or indices.dim() != 2 or len(indices) != len(x):
        raise ValueError(
            f"x {list(x.shape)}, weights {list(weights.shape)}, indices {list(indices.shape)}: "
            "expected [T, d], [T, k], [T, k]"
        )
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"x is {x.dtype}: expected torch.bfloat16 or torch.float32")
    if not weights.is_floating_point() or indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"weights {weights.dtype}, indices {indices.dtype}: expected a float and an integer type")
    for name, tensor in {"a row of x": x[:1], "weights": weights, "indices": indices}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: expected contiguous")
    E, width, d = one.experts, one.out, x.shape[1]
    for name, matrix, shape in (("w1", one, (E, width, d)), ("w2", two, (E, d, width)), ("w3", three, (E, width, d))):
        if matrix.shape != shape or matrix.format != one.format:
            raise ValueError(f"{name} {list(matrix.shape)}, {matrix.format}: expected {list(shape)}, {one.format}")
    if one.strides != three.strides:
        raise ValueError(f"w3 has strides {three.strides}: expected {one.strides}, as w1 has")
    for name, part in {"weights": weights, "indices": indices, "w1": one, "w2": two, "w3": three}.items():
        if part.device != x.device:
            raise ValueError(f"{name} is on {part.device}: expected {x.device}, where x is")
    if indices.device.type == "cpu" and indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= E):
        raise ValueError(f"indices from {indices.min()} to {indices.max()}: expected 0 to {E - 1}")


def _builds() -> list[Build]:
    """The experts of V4.1: 384 of 2304 x 5120, 6 a token."""
    sizes = dict.fromkeys(("n_experts", "d", "width", "w_expert", "w_row", "scale_expert", "scale_row"), "i32:16")
    pairs = {"order": "*i64", "tiles": "*i32"}
    builds = []
    for kind in "dense_16 dense_64 fp8_16 fp8_64 mxfp4_16 mxfp4_64 fp32_16".split():
        name, M = kind.split("_")
        real = "*fp32" if name == "fp32" else "*bf16"
        w = real if name in ("dense", "fp32") else "*u8"
        dtype, format = (torch.float32, "dense") if name == "fp32" else (torch.bfloat16, name)
        how = blocks(format, dtype, int(M))
        warps = how.pop("num_warps")
        up = pairs | sizes | {"x": real, "weights": "*fp32", "w1": w, "w3": w, "scales1": w, "scales3": w}
        up |= {"hidden": real, "slots": "i32", "limit": "fp32", "x_row": "i32:16"}
        builds.append(Build(f"gate_up_{kind}", gate_up, up, how, warps))
        back = pairs | sizes | {"hidden": real, "w2": w, "scales2": w, "rows": real}
        back |= {} if w == real else {"scale_row": "i32"}  # 2304 / 32 = 72 is no multiple of 16
        builds.append(Build(f"down_{kind}", down, back, how, warps))
    types = {"rows": "*bf16", "indices": "*i64", "out": "*bf16", "n_experts": "i32:16", "d": "i32:16"}
    return [*builds, Build("combine", combine, types, {"SLOTS": 6, "BLOCK": 1024})]


BUILDS = _builds()
