"""The GPU run on a machine without one: the same path at tiny sizes, and what it does when something fails."""

import json
import sys
import time

import pytest
import torch

from dsv41_edu import benchmarks
from dsv41_edu.benchmarks import gpu
from dsv41_edu.benchmarks.gpu import GpuCase, Running, at_most, collect, run, run_case, seconds_of

CPU = torch.device("cpu")
NO_LIMITS = {"copy_bytes_per_s": None, "bf16_flop_per_s": None}
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def failing(*_):
    raise ArithmeticError("no such shape")


def case(name="toy", **changed):
    parts = dict(contestants={"ours": int, "eager": int}, error=lambda: {"rms": 0.0}, bytes=600, flops=1000)
    return GpuCase(name, "nothing", lambda device: Running(**parts | changed))


def test_a_dry_run_takes_the_whole_path(tmp_path, monkeypatch, capsys):
    out = tmp_path / "data" / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry-run", "--out", str(out)])
    gpu.main()
    results = json.loads(out.read_text())
    assert set(results) == {"machine", "ceilings", "cases"}
    assert {"gpu", "torch", "triton", "date", "cores"} <= set(results["machine"])
    assert results["ceilings"] == NO_LIMITS
    names = [c["name"] for c in results["cases"]]
    assert {"gate.1", "gate.3", "experts.bf16.3", "experts.fp8.3", "experts.mxfp4.3"} <= set(names)
    assert {"seam.3", "seam_backward.3"} <= set(names)
    engram = {"ngram_hash.3", "engram_rows.device.3", "engram_rows.host.3", "engram_gate.3", "engram_gate_backward.3"}
    assert engram <= set(names)
    assert {"sparse_attention.3", "index_scores.3"} <= set(names)
    assert {"markov.drawn.3", "markov.likeliest.3", "verify.block.3", "schedule.3"} <= set(names)
    assert len({*names}) == len(names)
    for found in results["cases"]:
        assert "error" not in found, found
        assert found["bytes"] > 0
        assert found["flops"] > 0
        assert [one["label"] for one in found["contestants"]][:2] == ["ours", "eager"]
        assert all(one["seconds"] is one["launches"] is None and "error" not in one for one in found["contestants"])
        if found["name"].startswith("gate"):
            assert found["difference"]["ids_equal"] == 1
            assert found["difference"]["rms"] < 1e-5
        if found["name"].startswith("experts"):
            assert found["difference"]["within_one_ulp"] > 0.99
            assert found["difference"]["rms"] < 5e-3
        if found["name"] == "seam.3":
            assert max(found["difference"][name] for name in ("pre", "post", "comb")) < 1e-5
            assert max(found["difference"].values()) < 4e-3, "bf16"
        if found["name"] in ("seam_backward.3", "engram_gate.3", "engram_gate_backward.3", "sparse_attention.3"):
            assert max(found["difference"].values()) < 4e-3, "bf16"
        if found["name"] == "engram_gate.3":
            assert found["difference"]["gate"] < 1e-5
        if found["name"] == "index_scores.3":
            assert found["difference"]["rms"] < 1e-5
        if found["name"].startswith(("ngram_hash", "engram_rows")):
            assert found["difference"] == {"equal": 1}
    assert "experts.mxfp4.3" in capsys.readouterr().out


@without_gpu
def test_without_a_gpu_only_a_dry_run_is_possible(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "torch sees no GPU here: try --dry-run" in capsys.readouterr().err


def test_times_give_rates_and_a_floor(monkeypatch):
    monkeypatch.setattr(gpu, "seconds_of", lambda call: 2.0)
    monkeypatch.setattr(gpu, "launches_of", lambda call: 3)
    result = run_case(case(), CPU, False, {"copy_bytes_per_s": 100.0, "bf16_flop_per_s": 500.0}, 10)
    assert result["floor_s"] == 6.0, "600 bytes take longer than 1000 operations"
    assert result["difference"] == {"rms": 0.0}
    times = {"seconds": 2.0, "launches": 3, "bytes_per_s": 300.0, "flop_per_s": 500.0}
    assert result["contestants"] == [{"label": "ours"} | times, {"label": "eager"} | times]


def test_a_failure_is_recorded_and_the_rest_goes_on():
    cases = [
        GpuCase("unbuildable", "", failing),
        case("peerless", contestants={"ours": int, "eager": failing, "compiled": int}),
        case("wrong", error=failing),
        case("good"),
    ]
    unbuildable, peerless, wrong, good = run(cases, dry=True)["cases"]
    assert unbuildable["error"] == wrong["error"] == "ArithmeticError: no such shape"
    assert [one.get("error") for one in peerless["contestants"]] == [None, "ArithmeticError: no such shape", None]
    assert "error" not in peerless
    assert len(good["contestants"]) == 2


def test_time_runs_out_for_a_case_and_for_all():
    slow = case("slow", contestants={"ours": int, "eager": lambda: time.sleep(5)})
    result = run_case(slow, CPU, True, NO_LIMITS, 0.2)
    assert result["error"] == "TimeoutError: took more than 0 s"
    assert result["contestants"][0] == {"label": "ours", "seconds": None, "launches": None}
    assert run([case()], dry=True, seconds=-1)["cases"] == [
        {"name": "toy", "work": "nothing", "error": "no time was left"}
    ]


def test_a_limit_is_gone_after_its_block():
    with at_most(0.05):
        pass
    time.sleep(0.1)
    with pytest.raises(TimeoutError, match="took more than 0 s"), at_most(0.05):
        time.sleep(5)


def test_the_time_of_a_call_is_the_median_between_events(monkeypatch):
    durations = iter([5.0, 1.0, 2.0, 9.0, 3.0])  # milliseconds

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return next(durations)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu, "SECONDS_PER_TIMING", 0.0)
    calls = []
    assert seconds_of(lambda: calls.append(1)) == pytest.approx(0.003)
    assert len(calls) == 3 + 5


def test_cases_are_collected_from_every_module(tmp_path, monkeypatch):
    (tmp_path / "bench_toy_gpu.py").write_text("def gpu_cases(dry): return ['dry' if dry else 'real']\n")
    monkeypatch.setattr(benchmarks, "__path__", [*benchmarks.__path__, str(tmp_path)])
    assert "dry" in collect(True)
    assert "real" in collect(False)
    official = [c.name for c in collect(False) if isinstance(c, GpuCase)]
    assert {"gate.1", "gate.4096", "experts.bf16.1", "experts.fp8.64", "experts.mxfp4.4096"} <= {*official}
    assert {"ngram_hash.4096", "engram_rows.host.4096", "engram_gate.64", "engram_gate_backward.4096"} <= {*official}
