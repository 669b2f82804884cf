"""Hold a checkpoint's shards against the tensor plan by their headers alone: no weight is read.

A safetensors file is an 8-byte little-endian length N, N bytes of JSON that give each tensor's dtype, shape
and place, then the data. A header is believed only when its data tile the file exactly, so a truncated or
overlapping shard is named before anybody allocates for it. Source: the safetensors format specification.
"""

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

from dsv41_edu.tensors import Tensor

DTYPE_BYTES = {
    **dict.fromkeys("BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0".split(), 1),
    **dict.fromkeys("U16 I16 F16 BF16".split(), 2),
    **dict.fromkeys("U32 I32 F32".split(), 4),
    **dict.fromkeys("U64 I64 F64".split(), 8),
}
LONGEST_HEADER = 100_000_000  # bytes, the format's own limit
INDEX = "model.safetensors.index.json"


class HeaderError(ValueError):
    """A file that is no whole safetensors file; says which and why."""


class Entry(NamedTuple):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Problem(NamedTuple):
    """One difference. `kind`: damaged, index, twice, missing, extra, dtype or shape."""

    kind: str
    name: str
    file: str
    found: str
    expected: str


def read_header(path: str | Path) -> dict[str, Entry]:
    """Names to entries of one shard. Raises HeaderError where the file isn't whole, OSError where it isn't there."""
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise HeaderError(f"{path.name}: {size} bytes, expected at least 8 for the header's length")
        length = int.from_bytes(prefix, "little")
        if length > min(LONGEST_HEADER, size - 8):
            raise HeaderError(
                f"{path.name}: header of {length} bytes, expected at most {min(LONGEST_HEADER, size - 8)} "
                f"in a file of {size}"
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"{path.name}: header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise HeaderError(f"{path.name}: header is a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    placed = sorted((*_place(path.name, name, entry), name) for name, entry in header.items())
    at = 0
    for start, end, name in placed:
        if start != at:
            what = "overlaps the one before it" if start < at else "leaves a hole before it"
            raise HeaderError(f"{path.name}: {name} starts at {start} and {what}, expected {at}")
        at = end
    if at != size - 8 - length:
        raise HeaderError(
            f"{path.name}: {size - 8 - length} bytes of data, expected {at}: truncated or trailing bytes"
        )
    return {
        name: Entry(header[name]["dtype"], tuple(header[name]["shape"]), end - start) for start, end, name in placed
    }


def file_size(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Bytes of the header and of the data of a safetensors file that holds these tensors in this order.

    The header is compact JSON with the metadata that torch's writer adds, padded with blanks to a multiple of 8.
    """
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    length = len(json.dumps(header, separators=(",", ":")))
    return -(-length // 8) * 8, at


def _place(file: str, name: str, entry: object) -> tuple[int, int]:
    """The byte range of one tensor, once its entry is known to be sound."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise HeaderError(f"{file}: {name}: expected dtype, shape and two data_offsets, got {entry!r:.80}") from None
    if dtype not in DTYPE_BYTES:
        raise HeaderError(f"{file}: {name}: dtype {dtype!r:.40}, expected one of {' '.join(DTYPE_BYTES)}")
    whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in [*shape, start, end])
    if not whole:
        raise HeaderError(
            f"{file}: {name}: shape {shape!r:.40} at {start!r:.20}, {end!r:.20}: expected non-negative integers"
        )
    if end - start != prod(shape) * DTYPE_BYTES[dtype]:
        raise HeaderError(
            f"{file}: {name}: {end - start} bytes, expected {prod(shape) * DTYPE_BYTES[dtype]} for {dtype} {shape}"
        )
    return start, end


def _unique(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def compare(folder: str | Path, plan: Iterable[Tensor]) -> list[Problem]:
    """Every difference between the shards (and the index) in `folder` and the plan; empty when they agree.

    Raises FileNotFoundError where the folder holds no `.safetensors` file.
    """
    folder = Path(folder)
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise FileNotFoundError(f"{folder}: no .safetensors file in it")
    problems, found = [], {}
    for shard in shards:
        try:
            header = read_header(shard)
        except HeaderError as error:
            problems.append(Problem("damaged", shard.name, shard.name, str(error), "a whole safetensors file"))
            continue
        for name, entry in header.items():
            if name in found:
                problems.append(Problem("twice", name, shard.name, f"also in {found[name][0]}", "one shard"))
            found[name] = (shard.name, entry)
    problems += _index_problems(folder, found, len(shards))
    planned = {t.name: t for t in plan}
    for name, t in planned.items():
        if name not in found:
            problems.append(Problem("missing", name, "", "nothing", f"{t.dtype} {list(t.shape)}"))
            continue
        file, entry = found[name]
        if entry.dtype != t.dtype:
            problems.append(Problem("dtype", name, file, entry.dtype, t.dtype))
        if entry.shape != t.shape:
            problems.append(Problem("shape", name, file, str(list(entry.shape)), str(list(t.shape))))
    extra = (name for name in found if name not in planned)
    problems += [
        Problem("extra", n, found[n][0], f"{found[n][1].dtype} {list(found[n][1].shape)}", "nothing") for n in extra
    ]
    return problems


def _index_problems(folder: Path, found: dict, shards: int) -> list[Problem]:
    """The index must name exactly the tensors that the shards hold, each in its shard, and their bytes."""
    path = folder / INDEX
    if not path.exists():
        return [Problem("index", INDEX, "", "no such file", f"an index of {shards} shards")] if shards > 1 else []
    try:
        index = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
        named, size = dict(index["weight_map"]), index.get("metadata", {}).get("total_size")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        return [Problem("index", INDEX, INDEX, reason, "a JSON object with a weight_map")]
    problems = []
    for name in sorted(named.keys() | found.keys()):
        said, actual = named.get(name, "nothing"), found[name][0] if name in found else "nothing"
        if said != actual:
            problems.append(Problem("index", name, INDEX, f"{said!s:.80}", actual))
    total = sum(entry.nbytes for _, entry in found.values())
    if size is not None and size != total:
        problems.append(Problem("index", "total_size", INDEX, f"{size!r:.40}", str(total)))
    return problems
