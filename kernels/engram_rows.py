"""Rows of the n-gram memory, gathered and decoded in one kernel: what a token reads, as its projection takes it.

    value_c of row r = payload_rc * 2^(s - 127), rounded to bf16        s = scale byte floor(c / 32) of row r

A program has 16 row ids and up to 256 channels. A row of the official table is 256 + 8 bytes read, once for each time
that it is named, and 512 written; no decoded table exists. Payload bytes become fp16 by their bits, since not every
GPU knows E4M3; that, the scale and their product in fp32 are exact, so the only rounding is the last one.

Tables of 384 million rows often stay in the host's memory. The kernel takes any pointer that its GPU can read: a
tensor on the CPU is served if it is pinned, and then 264 bytes a row cross the bus. Sources: V4.1 checkpoint layout;
official inference code; OCP 8-bit floating point; `dsv41_edu.quantization`, the reference.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.experts import decode_e4m3, decode_e8m0
from kernels.launch import tl, triton

BLOCK_R, GROUPS = 16, 8  # row ids and, at most, blocks of 32 channels of a program


@triton.jit
def gather_rows(
    values,  # bytes [R, width]
    scales,  # bytes [R, width / 32]
    rows,  # int64 [T, columns]
    out,  # bf16 [T, columns * width], written
    named,  # T columns
    R,
    columns,
    width,
    values_row,
    scales_row,
    token_stride,
    column_stride,
    BLOCK_R: tl.constexpr,
    GROUPS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    channel = (group[:, None] * 32 + tl.arange(0, 32)[None, :])[None, :, :]
    here, inside = i < named, (group * 32 < width)[None, :]
    row = tl.load(rows + i // columns * token_stride + i % columns * column_stride, mask=here, other=-1)
    stored = ((row >= 0) & (row < R))[:, None] & inside

    scale = tl.load(scales + row[:, None] * scales_row + group[None, :], mask=stored, other=255)  # NaN
    value = tl.load(values + row[:, None, None] * values_row + channel, mask=stored[:, :, None], other=0)
    product = decode_e4m3(value) * decode_e8m0(scale)[:, :, None]
    place = i[:, None, None] * width + channel
    tl.store(out + place, product.to(tl.bfloat16), mask=(here[:, None] & inside)[:, :, None])


def fused_engram_rows(values: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """bf16 [..., columns * width] of row ids int64 [..., columns], at any stride: the rows named, side by side.

    values: E4M3 [R, width], float8_e4m3fn or its bytes as uint8; scales: E8M0 [R, width / 32], float8_e8m0fnu or its
    bytes. Channels are adjacent, rows at any stride. As `fp8_rows_decode` of the reference: a scale byte of 255 makes
    its 32 channels NaN, as a payload of NaN does its own; beyond bf16 is infinity.

    Beside row ids on a GPU, values and scales may be on the CPU if they are pinned; for pageable ones Triton raises
    ValueError. Raises ValueError for shapes, strides, devices, and on a CPU for ids that the table doesn't have;
    TypeError for dtypes. Ids on a GPU aren't waited for: there such an id reads nothing, and its row is NaN.
    """
    if values.dim() != 2 or values.shape[1] == 0 or values.shape[1] % 32:
        raise ValueError(f"values of shape {list(values.shape)}: expected [R, a multiple of 32]")
    R, width = values.shape
    if scales.shape != (R, width // 32):
        raise ValueError(f"scales of shape {list(scales.shape)}: expected {[R, width // 32]}, one for 32 channels")
    if rows.dim() == 0 or rows.shape[-1] == 0:
        raise ValueError(f"rows of shape {list(rows.shape)}: expected [..., columns]")
    types = {"values": (values, torch.float8_e4m3fn), "scales": (scales, torch.float8_e8m0fnu)}
    for name, (table, dtype) in types.items():
        if table.dtype not in (dtype, torch.uint8):
            raise TypeError(f"{name} is {table.dtype}: expected {dtype}, or its bytes as torch.uint8")
        if table.shape[1] > 1 and table.stride(1) != 1:
            raise ValueError(f"{name} has strides {table.stride()}: expected its channels adjacent")
        if table.device != rows.device and (table.device.type, rows.device.type) != ("cpu", "cuda"):
            raise ValueError(f"{name} is on {table.device}: expected {rows.device}, where rows are, or pinned memory")
    if rows.dtype != torch.int64:
        raise TypeError(f"rows is {rows.dtype}: expected torch.int64")
    if rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < R:
        raise ValueError(f"rows from {rows.min()} to {rows.max()}: expected 0 to {R - 1}")

    *lead, columns = rows.shape
    out = torch.empty((*lead, columns * width), dtype=torch.bfloat16, device=rows.device)
    named = rows.numel()
    if named:
        flat = rows.reshape(-1, columns)
        groups = min(GROUPS, triton.next_power_of_2(width // 32))
        # fmt: off
        gather_rows[(triton.cdiv(named, BLOCK_R), triton.cdiv(width, 32 * groups))](
            values.view(torch.uint8), scales.view(torch.uint8), flat, out, named, R, columns, width,
            values.stride(0), scales.stride(0), *flat.stride(), BLOCK_R=BLOCK_R, GROUPS=groups,
        )
        # fmt: on
    return out


def _builds() -> list[Build]:
    """The table of V4.1: 24 rows of 256 a token, out of 384 million; ids as the hash of two layers leaves them."""
    signature = {"values": "*u8", "scales": "*u8", "rows": "*i64", "out": "*bf16", "named": "i32", "R": "i32"}
    signature |= {"columns": "i32", "width": "i32:16", "values_row": "i32:16", "scales_row": "i32"}
    signature |= {"token_stride": "i32:16", "column_stride": "i32"}
    return [Build("gather_rows", gather_rows, signature, {"BLOCK_R": BLOCK_R, "GROUPS": GROUPS})]


BUILDS = _builds()
