"""The rows of the hashed memory, read by id: from memory, from a shard that nobody loads, or from both.

    value_c of row r = payload_rc * 2^(s - 127), rounded to bf16        s = scale byte floor(c / 32) of row r

A token reads 24 rows of 264 bytes out of 384 million. So the shard isn't loaded: each row is read from its place in
the file, and nothing else enters the process (of a mapped file whole neighbourhoods would, and stay). Ids that a read
names twice are read once; and since n-grams follow Zipf's law, few rows held in memory answer many of the reads.
Sources: V4.1 checkpoint layout; official inference code; the Engram paper (tiers).
"""

import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from dsv41_edu.headers import read_header
from dsv41_edu.quantization import BLOCK, E4M3, E8M0, fp8_rows_decode

PART = 256  # rows that are decoded at once


@dataclass
class Counts:
    """What the reads of a table took so far. Of what was read from the file the system may still hold parts."""

    row_bytes: int  # of one row: payload and scales
    asked: int = 0  # row ids, repeats counted
    hits: int = 0  # rows read from memory
    misses: int = 0  # rows read from the file

    @property
    def rows(self) -> int:
        """Rows read: each read's distinct ids."""
        return self.hits + self.misses

    @property
    def memory_bytes(self) -> int:
        """Bytes of payload and scales read from memory."""
        return self.hits * self.row_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of payload and scales read from the file."""
        return self.misses * self.row_bytes


class EngramTable:
    """Stored rows, and `counts` of what was read: `payload` uint8 [rows, width], `scales` uint8 [rows, width / 32].

    Made by `of` or `open`. Several threads may read it.
    """

    def __init__(self, payload: np.ndarray, scales: np.ndarray, source: tuple[int, int, int] | None = None):
        """Bytes as stored; `source`, if in a file: its descriptor, where the payload begins, where the scales begin.

        Raises ValueError for shapes that don't fit each other.
        """
        if payload.ndim != 2 or not payload.size or payload.shape[1] % BLOCK:
            raise ValueError(f"payload of shape {list(payload.shape)}: expected [rows, a multiple of {BLOCK}]")
        self.rows, self.width = payload.shape
        if scales.shape != (self.rows, self.width // BLOCK):
            raise ValueError(
                f"scales of shape {list(scales.shape)}: expected {[self.rows, self.width // BLOCK]}, "
                f"one for {BLOCK} channels"
            )
        self.payload, self.scales, self.source = payload, scales, source
        self.counts = Counts(self.width + self.width // BLOCK)
        self.lock = Lock()

    @classmethod
    def of(cls, payload: Tensor, scales: Tensor) -> "EngramTable":
        """In memory, without a copy: float8_e4m3fn [rows, width] and float8_e8m0fnu [rows, width / 32].

        They are what `quantization.fp8_rows_encode` makes. Raises TypeError for dtypes, ValueError for shapes.
        """
        for name, tensor, dtype in (("payload", payload, E4M3), ("scales", scales, E8M0)):
            if tensor.dtype != dtype:
                raise TypeError(f"{name} is {tensor.dtype}: expected {dtype}")
        return cls(payload.view(torch.uint8).numpy(), scales.view(torch.uint8).numpy())

    @classmethod
    def open(cls, path: str | Path, layer: int, rows: int, width: int = 256) -> "EngramTable":
        """The table of one layer in a shard of the official layout: of the data only rows asked for are read.

        rows: `NgramHash.rows` of the layer; width: `engram_head_dim`. `payload` and `scales` are mapped, for those
        who want them whole. Raises OSError without the file, HeaderError for one that isn't whole, ValueError for a
        tensor that is missing or isn't what rows and width say.
        """
        path, header = Path(path), read_header(path)
        # a header's tensors tile the file up to its end, in the header's order
        at, start = path.stat().st_size - sum(entry.nbytes for entry in header.values()), {}
        for name, entry in header.items():
            start[name], at = at, at + entry.nbytes
        file = os.open(path, os.O_RDONLY)
        whole = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        weakref.finalize(whole, os.close, file)  # when the last table lets go of its arrays
        if hasattr(os, "posix_fadvise"):  # else the disk reads each row's neighbours along
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        arrays, source = [], [file]
        for suffix, dtype, columns in (("weight", "F8_E4M3", width), ("scale", "F8_E8M0", width // BLOCK)):
            name, shape = f"layers.{layer}.engram.embed.{suffix}", (rows, columns)
            if name not in header:
                raise ValueError(f"{path.name}: no tensor {name}: expected {dtype} {list(shape)}")
            found = header[name]
            if (found.dtype, found.shape) != (dtype, shape):
                raise ValueError(
                    f"{path.name}: {name} is {found.dtype} {list(found.shape)}: expected {dtype} {list(shape)}"
                )
            arrays.append(np.ndarray(shape, np.uint8, whole, start[name]))
            source.append(start[name])
        return cls(*arrays, tuple(source))

    def check(self, rows: Tensor) -> None:
        """Raises TypeError for row ids that aren't int64, ValueError for ids that the table doesn't have."""
        if rows.dtype != torch.int64:
            raise TypeError(f"rows are {rows.dtype}: expected torch.int64")
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < self.rows:
            raise ValueError(f"rows from {rows.min()} to {rows.max()}: expected 0 to {self.rows - 1}")

    def read(self, rows: Tensor) -> Tensor:
        """Values bf16 [..., width] of row ids, int64 [...]. Raises what `check` and `fetch` raise.

        A scale byte of 255 makes its 32 channels NaN, as a payload of NaN does its own; beyond bf16 is infinity.
        """
        self.check(rows)
        distinct, place = torch.unique(rows, return_inverse=True)
        payload, scales, hits = self.fetch(distinct.numpy())
        with self.lock:
            self.counts.asked += rows.numel()
            self.counts.hits += hits
            self.counts.misses += len(distinct) - hits
        stored = torch.from_numpy(payload).view(E4M3), torch.from_numpy(scales).view(E8M0)
        values = torch.empty(payload.shape, dtype=torch.bfloat16)
        for start in range(0, len(values), PART):  # so that what is made on the way stays in the processor's cache
            part = slice(start, start + PART)
            values[part] = fp8_rows_decode(*(t[part] for t in stored), torch.bfloat16)
        return values[place]

    def fetch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Payload and scales of ids [n], valid and ascending, copied; and how many of them were in memory.

        Raises OSError where the file no longer has them.
        """
        if self.source is None:
            return self.payload[ids], self.scales[ids], len(ids)
        (file, *starts), found = self.source, []
        for start, width in zip(starts, (self.width, self.width // BLOCK), strict=True):
            data = bytearray().join([os.pread(file, width, start + width * row) for row in ids.tolist()])
            if len(data) != width * len(ids):
                raise OSError(f"rows from {ids[0]} to {ids[-1]}: expected the file to stay as it was opened")
            found.append(np.frombuffer(data, np.uint8).reshape(len(ids), width))
        return *found, 0


class TieredTable(EngramTable):
    """A table with some of its rows held in memory, which answer first: the same values for any choice of rows.

    The choice is made once, by frequency, and not by the last use: how often n-grams occur is a property of the
    language and hardly changes, a read then changes nothing that another thread sees, and hits can be repeated.
    """

    def __init__(self, table: EngramTable, hot_rows: Tensor):
        """hot_rows: int64 [H], as of `most_frequent`; H = 0 holds none. Raises what `check` raises."""
        super().__init__(table.payload, table.scales, table.source)
        self.check(hot_rows)
        self.hot_rows = np.unique(hot_rows.numpy())
        self.hot_payload, self.hot_scales, _ = super().fetch(self.hot_rows)

    def fetch(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """As of `EngramTable`: the hot rows from memory, the others from the table behind."""
        place = np.searchsorted(self.hot_rows, ids)
        hot = place < len(self.hot_rows)
        hot[hot] = self.hot_rows[place[hot]] == ids[hot]
        payload, scales = (np.empty((len(ids), a.shape[1]), np.uint8) for a in (self.payload, self.scales))
        payload[hot], scales[hot] = self.hot_payload[place[hot]], self.hot_scales[place[hot]]
        payload[~hot], scales[~hot], hits = super().fetch(ids[~hot])
        return payload, scales, int(hot.sum()) + hits


def most_frequent(rows: Tensor, capacity: int) -> Tensor:
    """The ids that occur most often in rows, int64 [...], the most frequent first, the lower first of equals.

    Returns int64 [H], H = capacity or, where rows hold fewer, how many there are. Raises ValueError below 0.
    """
    if capacity < 0:
        raise ValueError(f"capacity = {capacity}: expected at least 0 rows")
    distinct, counts = torch.unique(rows, return_counts=True)
    return distinct[counts.argsort(descending=True, stable=True)[:capacity]]
