"""How long look-ups in a table of several gigabytes on disk take: python -m dsv41_edu.benchmarks.engram_latency

Warm, the system holds the file in memory. Cold, it is told before each look-up to forget the file, and pages come
from the disk, or from what the host of a virtual machine holds of it. Rows are drawn evenly, which is the worst case:
real n-grams repeat. Takes about three minutes and writes the case "latency.engram" of book/data/benchmarks.json.
"""

import datetime
import os
import resource
import time
from pathlib import Path

import numpy as np
import torch

from dsv41_edu.benchmarks.engram import FILE_ROWS, written
from dsv41_edu.benchmarks.harness import RESULTS, machine, peak_memory, write
from dsv41_edu.engram.table import EngramTable

COLUMNS = 24  # rows that a token reads
LOOK_UPS = {("warm", 1): 2000, ("warm", 4096): 100, ("cold", 1): 300, ("cold", 4096): 3}  # by state and tokens
ENOUGH = 100  # look-ups for a 99th percentile


def forget(table: EngramTable) -> None:
    """Ask the system to drop what it holds of a table's file."""
    file = table.source[0]
    os.fsync(file)  # it keeps what isn't on the disk yet
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def look_up(table: EngramTable, state: str, tokens: int, times: int) -> dict:
    """One way to look up, measured so many times, with seconds a look-up and bytes of memory.

    `peak_memory`: by how much the process was larger at its largest than before; None as in the harness.
    `disk_bytes`: what the disk gave for a look-up, on average; 0 where the system doesn't tell.
    """
    generator, seconds = torch.Generator().manual_seed(tokens), []

    def all_of_them() -> None:
        for _ in range(times):
            rows = torch.randint(0, table.rows, (tokens, COLUMNS), generator=generator)
            if state == "cold":
                forget(table)
            start = time.perf_counter()
            table.read(rows)
            seconds.append(time.perf_counter() - start)

    blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    peak = peak_memory(all_of_them)
    if not seconds:  # this system doesn't tell the peak
        all_of_them()
    blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock - blocks
    return {
        "state": state,
        "tokens": tokens,
        "look_ups": times,
        "rows_per_s": times * tokens * COLUMNS / sum(seconds),
        "p50": np.quantile(seconds, 0.5),
        "p99": np.quantile(seconds, 0.99) if times >= ENOUGH else None,
        "peak_memory": peak,
        "disk_bytes": 512 * blocks / times,
    }


def measure(path: Path, rows: int) -> dict:
    """The case: `file_bytes`, and in `latencies` what `look_up` says of each of LOOK_UPS."""
    table = EngramTable.open(path, layer=1, rows=rows)
    return {
        "name": "latency.engram",
        "work": f"random rows of {rows:,} in a file, {COLUMNS} a token, bf16 out",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "file_bytes": path.stat().st_size,
        "latencies": [
            look_up(table, state, tokens, times)
            for (state, tokens), times in LOOK_UPS.items()
            if state == "warm" or hasattr(os, "posix_fadvise")
        ],
    }


if __name__ == "__main__":
    write(RESULTS, [measure(written(), FILE_ROWS)])
