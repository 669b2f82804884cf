"""A good checkpoint agrees; each kind of damage is named, and nothing is read beyond the headers."""

import contextlib
import json
import struct

import pytest
from checkpoints import layout, shard_names, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from dsv41_edu.config import preset
from dsv41_edu.headers import DTYPE_BYTES, INDEX, HeaderError, compare, file_size, read_header
from dsv41_edu.tensors import tensor_plan

MINI = preset("mini")
PLAN = tensor_plan(MINI)


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "mini", MINI, "mini")


def write(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(start, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def edit_header(path, change):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    write(path, header, raw[8 + length :])


def kinds(problems):
    return sorted({p.kind for p in problems})


def test_a_checkpoint_of_the_real_layout_agrees(folder):
    assert compare(folder, PLAN) == []
    assert sorted(p.name for p in folder.glob("*.safetensors")) == shard_names(4)
    engram = [t.name for t in layout(MINI)["model-00003-of-00004.safetensors"]]
    assert len(engram) == 6
    assert all(".1.engram." in n for n in engram)


def test_headers_are_what_the_library_reads(folder):
    path = folder / "model-00001-of-00004.safetensors"
    header = read_header(path)
    with safe_open(path, "pt") as file:
        assert sorted(header) == sorted(file.keys())
        for name in file.keys():  # noqa: SIM118 - no mapping
            part = file.get_slice(name)
            assert (part.get_dtype(), tuple(part.get_shape())) == header[name][:2]


def test_file_sizes_are_foretold(folder):
    """The library's own files of the small model, shard by shard."""
    order = "I8 F8_E4M3 F8_E8M0 BF16 F32".split()  # the library's, from the last
    for name, tensors in layout(MINI).items():
        header, data = file_size(sorted(tensors, key=lambda t: (-order.index(t.dtype), t.name)))
        assert int.from_bytes((folder / name).read_bytes()[:8], "little") == header
        assert (folder / name).stat().st_size == 8 + header + data


def test_missing_extra_wrong_dtype_wrong_shape_are_each_named(folder):
    name = "layers.3.ffn.gate.weight"

    def change(header):
        header["surprise"] = header.pop(name)
        header["layers.0.ffn.gate.bias"]["dtype"] = "I32"
        header["embed.weight"]["shape"].reverse()

    edit_header(folder / "model-00001-of-00004.safetensors", change)
    found = {(p.kind, p.name): (p.found, p.expected) for p in compare(folder, PLAN) if p.kind != "index"}
    assert found == {
        ("missing", name): ("nothing", "BF16 [16, 192]"),
        ("extra", "surprise"): ("BF16 [16, 192]", "nothing"),
        ("dtype", "layers.0.ffn.gate.bias"): ("I32", "F32"),
        ("shape", "embed.weight"): ("[192, 2048]", "[2048, 192]"),
    }


def test_every_missing_tensor_is_listed(folder):
    shard = "model-00002-of-00004.safetensors"
    (folder / shard).unlink()
    problems = compare(folder, PLAN)
    missing = {p.name for p in problems if p.kind == "missing"}
    assert missing == {t.name for t in layout(MINI)[shard]}
    assert kinds(problems) == ["index", "missing"]


def test_a_truncated_shard_is_damaged_not_believed(folder):
    path = folder / "model-00004-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    problems = compare(folder, PLAN)
    assert [p.file for p in problems if p.kind == "damaged"] == [path.name]
    assert "truncated" in next(p.found for p in problems if p.kind == "damaged")
    assert len([p for p in problems if p.kind == "missing"]) == 6


def test_a_tensor_in_two_shards_is_named(folder):
    write(folder / "model-00005-of-00005.safetensors", {"norm.weight": entry(0, 384, [192], "BF16")}, bytes(384))
    problems = compare(folder, PLAN)
    first = "model-00001-of-00004.safetensors"
    assert ("twice", "norm.weight", "model-00005-of-00005.safetensors", f"also in {first}", "one shard") in problems


def test_the_index_must_agree(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["norm.weight"] = "model-00002-of-00004.safetensors"
    del index["weight_map"]["head.weight"]
    index["weight_map"]["ghost"] = "../../etc/passwd"
    index["metadata"]["total_size"] += 1
    (folder / INDEX).write_text(json.dumps(index))
    problems = compare(folder, PLAN)
    assert kinds(problems) == ["index"]
    assert {p.name for p in problems} == {"norm.weight", "head.weight", "ghost", "total_size"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}, "metadata": 4}', "\x00"])
def test_a_broken_index_is_a_problem_not_a_crash(folder, text):
    (folder / INDEX).write_text(text)
    assert kinds(compare(folder, PLAN)) == ["index"]


def test_no_index_is_fine_for_one_shard_only(folder, tmp_path):
    (folder / INDEX).unlink()
    assert kinds(compare(folder, PLAN)) == ["index"]
    single = tmp_path / "single"
    single.mkdir()
    write(single / "model.safetensors", {"a": entry(0, 4)}, bytes(4))
    assert compare(single, []) == [("extra", "a", "model.safetensors", "U8 [4]", "nothing")]
    write(single / "more.safetensors", {"b": entry(0, 4)}, bytes(4))
    assert kinds(compare(single, [])) == ["extra", "index"]


def test_bytes_of_every_dtype():
    sizes = {1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0", 2: "U16 I16 F16 BF16", 4: "U32 I32 F32", 8: "U64 I64 F64"}
    assert {name: n for n, names in sizes.items() for name in names.split()} == DTYPE_BYTES


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors file"):
        compare(tmp_path, PLAN)


HUGE = (1 << 63).to_bytes(8, "little")
DAMAGED = {
    "empty": (b"", "0 bytes, expected at least 8"),
    "seven bytes": (b"1234567", "7 bytes, expected at least 8"),
    "huge header length": (HUGE + b"{}", "header of 9223372036854775808 bytes, expected at most 2"),
    "header one byte longer than the file": (struct.pack("<Q", 3) + b"{}", "header of 3 bytes, expected at most 2"),
    "header is no JSON": (struct.pack("<Q", 4) + b"{{{{", "header is no JSON"),
    "header is not UTF-8": (struct.pack("<Q", 2) + b"\xff\xfe", "header is no JSON"),
    "header is a list": (struct.pack("<Q", 2) + b"[]", "header is a list"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(tmp_path, name):
    raw, message = DAMAGED[name]
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(HeaderError, match=message):
        read_header(tmp_path / "x.safetensors")


BAD_HEADERS = {
    "overlap": ({"a": entry(0, 4), "b": entry(3, 7)}, 7, "b starts at 3 and overlaps the one before it, expected 4"),
    "hole": ({"a": entry(0, 4), "b": entry(5, 7)}, 7, "b starts at 5 and leaves a hole before it, expected 4"),
    "does not start at 0": ({"a": entry(1, 4)}, 4, "a starts at 1 and leaves a hole"),
    "too short": ({"a": entry(0, 4)}, 3, "3 bytes of data, expected 4"),
    "too long": ({"a": entry(0, 4)}, 5, "5 bytes of data, expected 4"),
    "bytes for shape": ({"a": entry(0, 4, [3])}, 4, r"4 bytes, expected 3 for U8 \[3\]"),
    "backwards": ({"a": entry(4, 0, [0])}, 4, "-4 bytes, expected 0"),
    "negative": ({"a": entry(0, 4, [-2, -2])}, 4, "expected non-negative integers"),
    "fraction": ({"a": entry(0, 4, [4.0])}, 4, "expected non-negative integers"),
    "unknown dtype": ({"a": entry(0, 4, None, "F3")}, 4, "dtype 'F3', expected one of BOOL"),
    "no offsets": ({"a": {"dtype": "U8", "shape": []}}, 4, "expected dtype, shape and two data_offsets"),
    "no object": ({"a": 3}, 4, "expected dtype, shape and two data_offsets"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_headers_that_do_not_tile_their_file(tmp_path, name):
    header, size, message = BAD_HEADERS[name]
    with pytest.raises(HeaderError, match=message):
        read_header(write(tmp_path / "x.safetensors", header, bytes(size)))


def test_a_name_given_twice_is_refused(tmp_path):
    one = b'"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}'
    text = b"{" + one + b", " + one + b"}"
    with pytest.raises(HeaderError, match="given twice"):
        read_header(write(tmp_path / "x.safetensors", text, bytes(2)))


def test_empty_tensors_scalars_metadata_and_padding_are_fine(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "none": entry(0, 0, [0, 5]), "one": entry(0, 4, [], "F32")}
    text = json.dumps(header).encode() + b"   "
    found = read_header(write(tmp_path / "x.safetensors", text, bytes(4)))
    assert {n: e.shape for n, e in found.items()} == {"none": (0, 5), "one": ()}


def test_only_the_header_is_read(tmp_path):
    """A sparse terabyte opens at once: the format's data are never touched."""
    path = write(tmp_path / "x.safetensors", {"a": entry(0, 1 << 40, [1 << 40])})
    try:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + (1 << 40))
    except OSError:
        pytest.skip("this file system holds no sparse terabyte")
    assert read_header(path)["a"].nbytes == 1 << 40


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(raw)
    with contextlib.suppress(HeaderError):
        assert isinstance(read_header(path), dict)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.data())
def test_any_single_changed_byte_of_a_header_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    raw = bytearray(write(path, {"a": entry(0, 4), "bc": entry(4, 12, [2], "F32")}, bytes(12)).read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 13))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with contextlib.suppress(HeaderError):
        assert isinstance(read_header(path), dict)
