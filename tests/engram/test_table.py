"""Rows from memory and from a mapped shard are the same; a table of the official size costs no memory."""

import gc
import json
import math
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv41_edu.config import preset
from dsv41_edu.engram.hashing import NgramHash
from dsv41_edu.engram.table import EngramTable, TieredTable
from dsv41_edu.headers import HeaderError, file_size
from dsv41_edu.quantization import E4M3, E8M0, fp8_rows_encode
from dsv41_edu.tensors import tensor_plan

V = load_file(Path(__file__).parents[1] / "vectors" / "quantisation.safetensors")
ROWS, WIDTH = 40, 64
WEIGHT, SCALE = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"


def stored(rows=ROWS, width=WIDTH, seed=0):
    """Payload and scales of random rows, no two alike."""
    return fp8_rows_encode(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)))


PAYLOAD, SCALES = stored()
TABLE = EngramTable.of(PAYLOAD, SCALES)
EVERY = TABLE.read(torch.arange(ROWS))


def bits(x):
    return x.view(torch.int16)


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "model-00047-of-00048.safetensors"
    wkv = torch.zeros(32, 3 * WIDTH, dtype=E4M3)
    save_file({WEIGHT: PAYLOAD, SCALE: SCALES, "layers.1.engram.wkv.weight": wkv}, path)
    return path


def write(path, tensors, order=None):
    """A safetensors file by hand: name to (dtype, shape, bytes), in the file's order; `order` is the header's."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps({name: header[name] for name in order or header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return path


def rounded(x):
    """A float64 to bf16's nearest, ties to even; beyond its largest to infinity."""
    if x == 0 or not math.isfinite(x):
        return x
    step = 2.0 ** (max(math.frexp(x)[1] - 1, -126) - 7)
    x = round(x / step) * step
    return math.copysign(math.inf, x) if abs(x) >= 2.0**128 else x


# Values.
def test_public_vectors():
    payload, scales = V["engram_row.bytes"].view(E4M3), V["engram_row.scale_bytes"].view(E8M0)
    found = EngramTable.of(payload, scales).read(torch.arange(6))
    expected = V["engram_row.values"].float().bfloat16()  # four bits of mantissa: float32 holds them
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_every_payload_byte_under_every_scale_byte():
    """Row s holds all 256 payload bytes under the scale byte s."""
    payload = torch.arange(256).to(torch.uint8).expand(256, 256).contiguous()
    scales = torch.arange(256).to(torch.uint8)[:, None].expand(256, 8).contiguous()
    found = EngramTable.of(payload.view(E4M3), scales.view(E8M0)).read(torch.arange(256))
    values = payload[0].view(E4M3).double().tolist()
    for byte in range(255):
        expected = torch.tensor([rounded(v * 2.0 ** (byte - 127)) for v in values]).bfloat16()
        torch.testing.assert_close(found[byte], expected, rtol=0, atol=0, equal_nan=True)
    assert found[255].isnan().all()


def test_a_nan_scale_takes_its_32_channels_and_no_other():
    scales = SCALES.view(torch.uint8).clone()
    scales[3, 1] = 255
    found = EngramTable.of(PAYLOAD, scales.view(E8M0)).read(torch.tensor([2, 3]))
    assert torch.equal(found[0], EVERY[2])
    assert torch.equal(found[1, :32], EVERY[3, :32])
    assert found[1, 32:].isnan().all()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 0), (2, 3), (2, 3, 4, 2)])
def test_shapes_of_a_read(shape):
    rows = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(2))
    found = TABLE.read(rows)
    assert found.shape == (*shape, WIDTH)
    assert torch.equal(bits(found), bits(EVERY[rows]))


def test_rows_of_other_strides():
    payload, scales = stored(2 * ROWS)
    strided = EngramTable.of(payload[::2], scales[::2])
    everything = EngramTable.of(payload, scales)
    assert torch.equal(strided.read(torch.arange(ROWS)), everything.read(torch.arange(0, 2 * ROWS, 2)))
    rows = torch.arange(ROWS).view(8, 5).T
    assert torch.equal(TABLE.read(rows), EVERY[rows])


# The mapped form.
def test_a_mapped_shard_reads_as_memory_does(shard):
    mapped = EngramTable.open(shard, 1, rows=ROWS, width=WIDTH)
    rows = torch.randint(0, ROWS, (3, 7), generator=torch.Generator().manual_seed(3))
    assert torch.equal(bits(mapped.read(rows)), bits(EVERY[rows]))
    assert (mapped.rows, mapped.width, mapped.source is None) == (ROWS, WIDTH, False)
    assert not mapped.payload.flags.writeable


@pytest.mark.parametrize("order", [(WEIGHT, SCALE, "first", "last"), ("last", SCALE, "first", WEIGHT)])
def test_tensors_are_found_wherever_they_lie(tmp_path, order):
    """Odd offsets, scales before the payload, other tensors between, names in any order."""
    payload, scales = (t.view(torch.uint8).numpy().tobytes() for t in (PAYLOAD, SCALES))
    tensors = {
        "first": ("U8", [3], b"abc"),
        SCALE: ("F8_E8M0", [ROWS, WIDTH // 32], scales),
        "empty": ("U8", [0], b""),
        "last": ("U8", [1], b"z"),
        WEIGHT: ("F8_E4M3", [ROWS, WIDTH], payload),
    }
    path = write(tmp_path / "odd.safetensors", tensors, [*order, "empty"])
    assert torch.equal(EngramTable.open(path, 1, ROWS, WIDTH).read(torch.arange(ROWS)), EVERY)


def test_a_table_outlives_its_name_and_folder_entry(shard):
    mapped = EngramTable.open(str(shard), 1, ROWS, WIDTH)
    shard.unlink()
    assert torch.equal(mapped.read(torch.tensor([ROWS - 1])), EVERY[-1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 14}, r"model-00047.*: no tensor layers\.14\.engram\.embed\.weight: expected F8_E4M3 \[40, 64\]"),
        ({"rows": 41}, r"embed\.weight is F8_E4M3 \[40, 64\]: expected F8_E4M3 \[41, 64\]"),
        ({"width": 96}, r"embed\.weight is F8_E4M3 \[40, 64\]: expected F8_E4M3 \[40, 96\]"),
        ({"width": 256}, r"expected F8_E4M3 \[40, 256\]"),
    ],
)
def test_a_shard_of_another_table(shard, options, message):
    with pytest.raises(ValueError, match=message):
        EngramTable.open(shard, **{"layer": 1, "rows": ROWS, "width": WIDTH, **options})


def test_the_official_width_is_the_default(shard):
    with pytest.raises(ValueError, match=r"expected F8_E4M3 \[40, 256\]"):
        EngramTable.open(shard, 1, ROWS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({SCALE: None}, r"no tensor layers\.1\.engram\.embed\.scale: expected F8_E8M0 \[40, 2\]"),
        ({WEIGHT: PAYLOAD.view(torch.int8)}, r"embed\.weight is I8 \[40, 64\]: expected F8_E4M3 \[40, 64\]"),
        ({SCALE: SCALES.view(torch.uint8)}, r"embed\.scale is U8 \[40, 2\]: expected F8_E8M0 \[40, 2\]"),
        ({SCALE: SCALES[:, :1].contiguous()}, r"embed\.scale is F8_E8M0 \[40, 1\]: expected F8_E8M0 \[40, 2\]"),
        ({WEIGHT: PAYLOAD.flatten()}, r"embed\.weight is F8_E4M3 \[2560\]: expected"),
    ],
)
def test_missing_and_wrong_tensors_are_named(tmp_path, change, message):
    tensors = {WEIGHT: PAYLOAD, SCALE: SCALES, **change}
    path = tmp_path / "model.safetensors"
    save_file({name: t for name, t in tensors.items() if t is not None}, path)
    with pytest.raises(ValueError, match=message):
        EngramTable.open(path, 1, ROWS, WIDTH)


def test_damaged_files(shard, tmp_path):
    raw = shard.read_bytes()
    with pytest.raises(FileNotFoundError):
        EngramTable.open(tmp_path / "none.safetensors", 1, ROWS, WIDTH)
    for damaged, message in [
        (raw[:-1], "truncated"),
        (raw[: len(raw) // 2], "truncated"),
        (raw + b"x", "trailing"),
        (raw[:4], "4 bytes, expected at least 8"),
        (raw[:100], "header of"),
        (raw.replace(b'"data_offsets":[0,', b'"data_offsets":[1,'), "expected [0-9]+ for"),
    ]:
        path = tmp_path / "damaged.safetensors"
        path.write_bytes(damaged)
        with pytest.raises(HeaderError, match=rf"damaged\.safetensors: .*{message}"):
            EngramTable.open(path, 1, ROWS, WIDTH)


def test_misaligned_offsets_name_the_tensor(tmp_path):
    """A hole before the scales: the payload would still read right, the scales would not."""
    payload, scales = (t.view(torch.uint8).numpy().tobytes() for t in (PAYLOAD, SCALES))
    tensors = {
        WEIGHT: ("F8_E4M3", [ROWS, WIDTH], payload),
        "hole": ("U8", [2], b"??"),
        SCALE: ("F8_E8M0", [ROWS, WIDTH // 32], scales),
    }
    path = write(tmp_path / "hole.safetensors", tensors, (WEIGHT, SCALE))
    with pytest.raises(HeaderError, match=r"embed\.scale starts at 2562 and leaves a hole before it, expected 2560"):
        EngramTable.open(path, 1, ROWS, WIDTH)


# The official size.
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize(("layer", "rows"), [(1, 384_006_168), (14, 384_016_682)])
def test_a_table_of_the_official_size_in_little_memory(tmp_path, layer, rows):
    """101.5 GB of holes with a few rows written, the very last one too: opened, read at random, memory bounded."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system doesn't tell a process its resident memory by /proc")
    config = preset("v41_flash")
    assert NgramHash.of(config, pad=2).rows[config.engram_layer_ids.index(layer)] == rows
    tensors = [t for t in tensor_plan(config) if t.name.startswith(f"layers.{layer}.engram.")]
    entries, at, starts = {}, 0, {}
    for t in tensors:
        entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + t.nbytes]}
        starts[t.name], at = at, at + t.nbytes
    length, data = file_size(tensors)
    assert data == at
    path = tmp_path / f"{layer}.safetensors"
    written = [0, 1, 2**24 + 1, rows - 2, rows - 1]
    payload, scales = stored(len(written), 256)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.write(
            json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode().ljust(length)
        )
        try:
            file.truncate(8 + length + data)
        except OSError:
            pytest.skip("this file system holds no sparse file of 101 GB")
        for name, tensor in (("weight", payload), ("scale", scales)):
            for row, its in zip(written, tensor.view(torch.uint8), strict=True):
                file.seek(8 + length + starts[f"layers.{layer}.engram.embed.{name}"] + row * len(its))
                file.write(its.numpy().tobytes())
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system wrote the holes out")
    assert path.stat().st_size > 101_500_000_000
    before = resident()
    table = EngramTable.open(path, layer, rows)
    assert torch.equal(table.read(torch.tensor(written)), EngramTable.of(payload, scales).read(torch.arange(5)))
    ids = torch.randint(2, rows - 2, (32, 24), generator=torch.Generator().manual_seed(layer))
    assert not table.read(ids).any()
    # one or two pages for each row's payload and one for its scales, some of them with neighbours
    assert resident() - before < 8_192 * os.sysconf("SC_PAGESIZE")
    assert table.counts.disk_bytes == (5 + ids.unique().numel()) * 264
    path.unlink()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system doesn't tell what is mapped by /proc")
def test_nothing_read_of_a_file_stays(shard):
    """Of the mapping no page enters the process, but by those who want all of it."""
    table = EngramTable.open(shard, 1, ROWS, WIDTH)

    def held():
        lines = Path("/proc/self/smaps").read_text().split(str(shard))[1].splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    assert torch.equal(bits(table.read(torch.arange(ROWS))), bits(EVERY))
    assert held() == 0
    assert (table.payload == PAYLOAD.view(torch.uint8).numpy()).all()
    assert held() > 0


def test_the_file_is_closed_with_the_last_table_that_reads_it(shard):
    table = EngramTable.open(shard, 1, ROWS, WIDTH)
    file = table.source[0]
    tiered = TieredTable(table, torch.arange(3))
    del table
    assert torch.equal(tiered.read(torch.tensor([30])), EVERY[30:31])
    del tiered
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_file_that_was_cut_off(shard):
    table = EngramTable.open(shard, 1, ROWS, WIDTH)
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 32 * 3 * WIDTH - 1)  # all of the projection, and the last scale's byte
    assert torch.equal(table.read(torch.tensor([3, ROWS - 2])), EVERY[[3, ROWS - 2]])
    with pytest.raises(OSError, match=r"rows from 3 to 39: expected the file to stay as it was opened"):
        table.read(torch.tensor([ROWS - 1, 3]))
    assert table.counts.asked == 2
