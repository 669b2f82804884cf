"""The fused gather against `fp8_rows_decode`: the same bits for every payload byte and every scale byte.

A NaN has its place but no bits of its own: torch stores 0x7FC0 or 0xFFFF for it, as the CPU's instructions have it.
Outputs start as NaN or -7 inside larger buffers whose margins must stay as they were.
"""

import mmap

import pytest
import torch

from dsv41_edu.engram.hashing import NgramHash
from dsv41_edu.engram.table import EngramTable
from dsv41_edu.quantization import fp8_rows_decode, fp8_rows_encode
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.engram_rows import fused_engram_rows
from kernels.launch import INTERPRETED
from kernels.ngram_hash import fused_ngram_hash
from tests.kernels.test_gate import DEVICE, drawn, poison

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
E4M3, E8M0, U8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8


def table(R, width, seed=0):
    """Any bytes, as values and scales."""
    g = torch.Generator().manual_seed(seed)
    bytes = torch.randint(0, 256, (R, width + width // 32), generator=g, dtype=U8).to(DEVICE)
    return bytes[:, :width].contiguous().view(E4M3), bytes[:, width:].contiguous().view(E8M0)


def drawn_rows(*shape, R, seed=1):
    return torch.randint(0, R, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check(values, scales, rows):
    ours = fused_engram_rows(values, scales, rows)
    stored = values.view(U8)[rows].view(E4M3), scales.view(U8)[rows].view(E8M0)
    expected = fp8_rows_decode(*stored, torch.bfloat16).flatten(-2)
    assert ours.shape == expected.shape
    same_bits(ours, expected)
    return ours


def same_bits(ours, expected):
    assert (ours.dtype, expected.dtype) == (torch.bfloat16, torch.bfloat16)
    nan = expected.isnan()
    assert torch.equal(ours.isnan(), nan)
    ours, expected = (x.view(torch.int16).masked_fill(nan, 0) for x in (ours, expected))
    assert torch.equal(ours, expected)


def test_every_payload_with_every_scale(monkeypatch):
    """256 rows of one scale each: subnormals of both formats and of bf16, overflow, both NaN, both zeros."""
    intact = poison(monkeypatch)
    values = torch.arange(256, dtype=U8, device=DEVICE).repeat(256, 1)
    scales = torch.arange(256, dtype=U8, device=DEVICE)[:, None].repeat(1, 8)
    ours = check(values.view(E4M3), scales.view(E8M0), torch.arange(256, device=DEVICE)[:, None])
    assert ours[255].isnan().all(), "scale byte 255"
    assert ours[:, [0x7F, 0xFF]].isnan().all()
    assert ours[254, 0x7E] == float("inf"), "448 * 2^127"
    assert ours[0, 0x01] == 0, "2^-9 * 2^-127, below bf16"
    assert ours[0, 0x08] == 2.0**-133, "2^-6 * 2^-127, the least of bf16"
    assert ours[127, 0x38] == 1
    assert ours[127, 0x80].signbit()
    intact()


@pytest.mark.parametrize("T", [0, 1, 2, 13, 17, 63])
@pytest.mark.parametrize(("columns", "width"), [(24, 256), (3, 32), (5, 352)])
def test_sizes(T, columns, width, monkeypatch):
    intact = poison(monkeypatch)
    check(*table(50, width), drawn_rows(T, columns, R=50))
    intact()


def test_the_public_rows():
    """What the package encodes it reads back, and as its table does; one row, many times, one id alone."""
    values, scales = fp8_rows_encode(drawn(9, 64) * 300)
    values, scales = values.to(DEVICE), scales.to(DEVICE)
    rows = torch.tensor([[3, 3, 8], [0, 3, 8]], device=DEVICE)
    ours = check(values, scales, rows)
    assert torch.equal(ours.cpu(), EngramTable.of(values.cpu(), scales.cpu()).read(rows.cpu()).flatten(1))
    assert torch.equal(fused_engram_rows(values, scales, rows[0, 2:]), ours[0, 128:])


def test_bytes_are_taken_too():
    values, scales = table(7, 64)
    rows = drawn_rows(2, 3, 4, R=7)
    expected = check(values, scales, rows)
    same_bits(fused_engram_rows(values.view(U8), scales.view(U8), rows), expected)


def test_the_chain_from_ids():
    """As the rows of one layer leave the hash: a view with the other layer's between."""
    hash = NgramHash((1, 4), order=4, heads=2, first=53, size=97, pad=72)
    values, scales = table(hash.rows[1], 32)
    ids = drawn_rows(2, 5, R=97)
    rows, _ = fused_ngram_hash(ids, *(x.to(DEVICE) for x in (hash.multipliers, hash.primes, hash.offsets)), hash.pad)
    rows = rows[:, :, 1]
    assert not rows.is_contiguous()
    assert check(values, scales, rows).shape == (2, 5, 6 * 32)


# ---- the same again


def test_two_runs_are_equal_and_a_token_alone_equals_the_token_in_a_batch():
    values, scales = table(40, 64)
    rows = drawn_rows(17, 3, R=40)
    ours = fused_engram_rows(values, scales, rows).view(torch.int16)
    assert torch.equal(ours, fused_engram_rows(values, scales, rows).view(torch.int16))
    for t in (0, 16):
        assert torch.equal(ours[t], fused_engram_rows(values, scales, rows[t]).view(torch.int16))


def test_ids_at_any_stride_and_a_table_with_its_scales_beside_it():
    values, scales = table(40, 64)
    rows = drawn_rows(4, 3, R=40)
    expected = check(values, scales, rows)
    same_bits(fused_engram_rows(values, scales, rows.T.contiguous().T), expected)
    same_bits(fused_engram_rows(values, scales, rows[:1].expand(4, 3))[3], expected[0])
    beside = torch.cat([values.view(U8), scales.view(U8)], 1)
    same_bits(fused_engram_rows(beside[:, :64], beside[:, 64:], rows), expected)
    transposed = values.view(U8).T.contiguous().T
    with pytest.raises(ValueError, match=r"values has strides \(1, 40\): expected its channels adjacent"):
        fused_engram_rows(transposed, scales, rows)


@interpreted
def test_addresses_pass_2_to_the_31():
    """A table as large as the official one, in memory that is only promised: 98 GB of which two rows are touched."""
    R = 384_006_168
    memory = mmap.mmap(-1, R * 264, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    beside = torch.frombuffer(memory, dtype=U8).view(R, 264)
    values, scales = table(2, 256)
    rows = torch.tensor([[R - 1, 2**23 + 5]])  # times 256 past 2^31, and past 2^36
    beside[rows[0], :256], beside[rows[0], 256:] = values.view(U8), scales.view(U8)
    ours = fused_engram_rows(beside[:, :256], beside[:, 256:], rows)
    same_bits(ours, fused_engram_rows(values, scales, torch.tensor([[0, 1]])))


@interpreted
def test_what_is_read_and_written():
    """264 bytes a row and its id of 8, 512 bytes written; a row named twice is read twice."""
    T, columns, width = 7, 5, 256
    values, scales = (x.view(U8) for x in table(11, width))
    rows = drawn_rows(T, columns, R=11)
    with count_traffic(values=values, scales=scales, rows=rows) as traffic:
        fused_engram_rows(values, scales, rows)
    named = T * columns
    assert traffic["values"] == Traffic(named * 256, 0, named * 256, 0)
    assert traffic["scales"] == Traffic(named * 8, 0, named * 8, 0)
    assert traffic["rows"] == Traffic(named, 0, named * 8, 0)
    assert traffic["allocated bfloat16"] == Traffic(0, named * 256, 0, named * 512)


# ---- bad input

VALUES_TABLE, SCALES = table(5, 64)
GOOD = dict(values=VALUES_TABLE, scales=SCALES, rows=torch.tensor([[0, 4]], device=DEVICE))
VALUES = [
    (dict(values=VALUES_TABLE[0]), r"values of shape \[64\]: expected \[R, a multiple of 32\]"),
    (dict(values=VALUES_TABLE[:, :40]), r"values of shape \[5, 40\]: expected \[R, a multiple of 32\]"),
    (dict(scales=SCALES[:4]), r"scales of shape \[4, 2\]: expected \[5, 2\], one for 32 channels"),
    (dict(rows=GOOD["rows"][:, :0]), r"rows of shape \[1, 0\]: expected \[..., columns\]"),
    (dict(rows=GOOD["rows"][0, 0]), r"rows of shape \[\]: expected \[..., columns\]"),
    (dict(scales=SCALES.view(U8).T.contiguous().T), r"scales has strides \(1, 5\): expected its channels adjacent"),
    (dict(values=VALUES_TABLE.to("meta")), "values is on meta: expected .*, where rows are, or pinned memory"),
]
ON_A_CPU = [
    (dict(rows=GOOD["rows"] + 1), "rows from 1 to 5: expected 0 to 4"),
    (dict(rows=GOOD["rows"] - 1), "rows from -1 to 3: expected 0 to 4"),
]
TYPES = [
    (dict(values=VALUES_TABLE.float()), r"values is torch\.float32: expected torch\.float8_e4m3fn, or its bytes"),
    (dict(scales=SCALES.float()), r"scales is torch\.float32: expected torch\.float8_e8m0fnu, or its bytes"),
    (dict(rows=GOOD["rows"].int()), r"rows is torch\.int32: expected torch\.int64"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [(c, ValueError, m) for c, m in VALUES + (ON_A_CPU if DEVICE == "cpu" else [])]
    + [(c, TypeError, m) for c, m in TYPES],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        fused_engram_rows(**GOOD | change)


@pytest.mark.skipif(INTERPRETED, reason="there is no GPU")
def test_a_gpu_reads_pinned_rows_and_gives_nan_for_ids_that_no_row_has():
    values, scales = (x.cpu().pin_memory() for x in table(9, 64))
    rows = drawn_rows(3, 2, R=9)
    same_bits(fused_engram_rows(values, scales, rows), check(values.to(DEVICE), scales.to(DEVICE), rows))
    strange = torch.tensor([[-1, 9, 2**40]], device=DEVICE)
    assert fused_engram_rows(values, scales, strange).isnan().all()


def test_it_fits_every_target_at_the_official_size():
    reports = compile_all(["kernels.engram_rows"])
    assert {report.target for report in reports} == {*TARGETS}
    assert all(report.spilled == report.stack_bytes == 0 for report in reports)
