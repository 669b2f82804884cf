"""Latencies of a small file, by a clock that is known; what they say of time itself is nobody's test."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from dsv41_edu.benchmarks import engram_latency, harness
from dsv41_edu.benchmarks.engram_latency import forget, measure
from dsv41_edu.engram.table import EngramTable
from dsv41_edu.figures import benchmarks as figures
from dsv41_edu.quantization import E4M3, E8M0

ROWS = 2000


@pytest.fixture
def path(tmp_path):
    name = "layers.1.engram.embed"
    weight, scale = torch.zeros(ROWS, 256, dtype=E4M3), torch.zeros(ROWS, 8, dtype=E8M0)
    save_file({f"{name}.weight": weight, f"{name}.scale": scale}, tmp_path / "table.safetensors")
    return tmp_path / "table.safetensors"


def test_what_is_measured(path, tmp_path, monkeypatch):
    """A look-up takes 1 s, the next one 2 s, and so on, for each way anew; a file is forgotten before a cold one."""
    ways = {("warm", 1): 4, ("warm", 3): 100, ("cold", 2): 3}
    ticks = iter([t for times in ways.values() for n in range(1, times + 1) for t in (0.0, float(n))])
    blocks = iter([0, 4, 4, 104, 104, 134])  # read from the disk, before and after each way
    events, read = [], EngramTable.read
    monkeypatch.setattr(engram_latency, "LOOK_UPS", ways)
    monkeypatch.setattr(engram_latency, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_inblock=next(blocks)))
    monkeypatch.setattr(engram_latency, "resource", usage)
    monkeypatch.setattr(engram_latency, "forget", lambda *given: events.append("forget"))
    monkeypatch.setattr(EngramTable, "read", lambda table, rows: events.append(rows) or read(table, rows))
    found = measure(path, ROWS)

    assert found["file_bytes"] == path.stat().st_size > ROWS * 264
    one, many, cold = found["latencies"]
    assert [(x["state"], x["tokens"], x["look_ups"]) for x in (one, many, cold)] == [
        ("warm", 1, 4), ("warm", 3, 100), ("cold", 2, 3),
    ]  # fmt: skip
    assert (one["p50"], one["p99"], one["rows_per_s"]) == (2.5, None, 4 * 24 / 10)
    assert (many["p50"], many["p99"]) == (50.5, pytest.approx(99.01))
    assert cold["rows_per_s"] == 3 * 2 * 24 / 6
    assert [x["disk_bytes"] for x in (one, many, cold)] == [512, 512, 5120]
    assert all(x["peak_memory"] is None or 0 <= x["peak_memory"] < 2**30 for x in (one, many, cold))
    assert [x if isinstance(x, str) else x.shape for x in events[104:]] == ["forget", (2, 24)] * 3
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(events[:104]))

    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results.json")
    harness.write(
        harness.RESULTS, [found | {"latencies": [one | {"peak_memory": None}, many | {"peak_memory": 2**20}]}]
    )
    assert figures.latencies("latency.engram").rows == (
        ("warm", 1, 4, "10", "2.5e+03", "-", "unknown"),
        ("warm", 3, 100, "1", "5.05e+04", "9.9e+04", "1.0"),
    )
    assert figures.measured("latency.engram").endswith(found["date"])


def test_without_a_way_to_forget_there_is_nothing_cold(path, monkeypatch):
    monkeypatch.setattr(engram_latency, "LOOK_UPS", {("cold", 1): 1, ("warm", 1): 1})
    monkeypatch.delattr(engram_latency.os, "posix_fadvise", raising=False)
    assert [x["state"] for x in measure(path, ROWS)["latencies"]] == ["warm"]


def test_what_is_forgotten_is_read_again(path):
    table = EngramTable.open(path, 1, ROWS)
    forget(table)
    assert (table.read(torch.arange(ROWS)) == 0).all()
