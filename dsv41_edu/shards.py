"""The files of a checkpoint: shards cut along the tensor plan, read and written some rows at a time, and a config.

    shard = N (8 bytes, little-endian) | N bytes of JSON: dtype, shape and place of each tensor | the data

The published libraries hold a whole shard in memory to write it, and map it to read it, which a machine refuses for a
file larger than itself. Here nothing larger than the rows in hand is ever held. A shard is the same to the byte as
theirs: the widest dtypes first, then by name, so that every tensor is aligned.
Sources: the safetensors format specification; the layout of the released shards.
"""

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv41_edu.config import ModelConfig
from dsv41_edu.headers import INDEX, read_header
from dsv41_edu.quantization import BLOCK, E4M3, E8M0
from dsv41_edu.tensors import Tensor as Planned

# in the order of a shard's data
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": E8M0, "F8_E4M3": E4M3, "I8": torch.int8}
# fields of a config.json that aren't the language model's
OUTER = (
    "architectures model_type dtype transformers_version bos_token_id eos_token_id pad_token_id image_token_id "
    "quantization_config vision_config"
).split()
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
PIECE = 1 << 20  # numbers in hand at a time

Rows = Iterable[tuple[Planned, int, Tensor]]  # a tensor, its first row here, these rows as stored


def pieces(shape: tuple[int, ...]) -> Iterator[slice]:
    """The rows of a tensor in slices of about `PIECE` numbers, each but the last of whole tiles."""
    step = max(PIECE // prod(shape[1:]) // BLOCK, 1) * BLOCK
    return (slice(at, min(at + step, shape[0])) for at in range(0, shape[0], step))


def row_bytes(t: Planned) -> int:
    """Of one row in the file."""
    return t.nbytes // t.shape[0]


class Shards:
    """The tensors of a folder's shards by name. No file stays open or mapped."""

    def __init__(self, folder: Path):
        """Raises OSError, and HeaderError for a shard that isn't whole."""
        self.places: dict[str, tuple[Path, int]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            header = read_header(path)
            # a header's tensors tile the file up to its end, in the header's order
            at = path.stat().st_size - sum(entry.nbytes for entry in header.values())
            for name, entry in header.items():
                self.places[name] = path, at
                at += entry.nbytes

    def read(self, t: Planned, rows: slice) -> Tensor:
        """Rows of a tensor as they are stored, in its dtype. Raises OSError."""
        path, at = self.places[t.name]
        width = row_bytes(t)
        raw = np.fromfile(path, np.uint8, (rows.stop - rows.start) * width, offset=at + rows.start * width)
        return torch.from_numpy(raw).view(DTYPES[t.dtype]).view(-1, *t.shape[1:])


def cut(plan: Iterable[Planned], shard_bytes: int) -> dict[str, list[Planned]]:
    """File names to their tensors, in the plan's order; each Engram module in a shard of its own, after the others.

    A payload and its scales stay together, so a shard has more than `shard_bytes` of data where it holds an Engram
    module, or one matrix, of more. Raises ValueError for less than a byte.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes = {shard_bytes}: expected at least 1")
    units: list[list[Planned]] = []
    for t in sorted(plan, key=lambda t: ".engram." in t.name):
        if t.use == "scale":
            units[-1].append(t)
        else:
            units.append([t])
    shards, size, owner = [], 0, None
    for unit in units:
        nbytes = sum(t.nbytes for t in unit)
        engram = unit[0].layer if ".engram." in unit[0].name else None
        if not shards or engram != owner or (engram is None and size + nbytes > shard_bytes):
            shards, size, owner = [*shards, []], 0, engram
        shards[-1] += unit
        size += nbytes
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def write_shard(path: Path, tensors: Iterable[Planned], rows: Callable[[Planned], Rows]) -> None:
    """One file of these tensors; `rows(t)` yields the data of t, and may yield others of the shard with them."""
    order = list(DTYPES)
    tensors = sorted(tensors, key=lambda t: (order.index(t.dtype), t.name))
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for t in tensors:
            for part, row, data in rows(t):
                file.seek(8 + len(text) + header[part.name]["data_offsets"][0] + row * row_bytes(part))
                file.write(data.contiguous().view(torch.uint8).numpy())


def write_shards(folder: Path, plan: Iterable[Planned], shard_bytes: int, rows: Callable[[Planned], Rows]) -> None:
    """All shards and their index. Raises OSError, before anything is written where the disk hasn't the room."""
    shards = cut(plan, shard_bytes)
    total = sum(t.nbytes for tensors in shards.values() for t in tensors)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise OSError(f"{folder.parent}: {free:,} bytes free, expected {total:,}, beside the old checkpoint")
    for file, tensors in shards.items():
        write_shard(folder / file, tensors, rows)
    weight_map = {t.name: file for file, tensors in shards.items() for t in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def document(config: ModelConfig) -> dict[str, Any]:
    """A config.json in the official, nested form: `ModelConfig.from_dict` reads the same config back."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    values |= values.pop("metadata") | values.pop("unknown")
    outer = {name: values[name] for name in OUTER if name in values}
    inner = {name: value for name, value in values.items() if name not in OUTER}
    return outer | {"text_config": {"model_type": f"{config.model_type}_text", **inner}}


@contextmanager
def replacing(folder: Path, beside_shards: Collection[str]) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `folder` when the block ends and vanishes where it fails.

    First every file is on the disk, and then their names; the old folder steps aside and the new one takes its name;
    when that is on the disk the old one goes. So `folder` holds the old files or the new, never some of each; who is
    killed between the two renames finds both, whole, in the hidden folder `.{name}-*` beside.
    Raises FileExistsError for a folder with files in it other than shards, their index and those named
    `beside_shards`: they would go too.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    others = [name for name in names if not SHARD.fullmatch(name) and name not in (INDEX, *beside_shards)]
    if others:
        raise FileExistsError(f"{folder}: holds {', '.join(others[:5])}: expected no files but those to be replaced")
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    new, old = beside / "new", beside / "old"
    try:
        new.mkdir()  # by the umask: mkdtemp's own folder is closed to others
        yield new
        for path in (*new.iterdir(), new):
            sync(path)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        sync(folder.parent)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(beside)


def sync(path: Path) -> None:
    """Wait until a file's data, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
