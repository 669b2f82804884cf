import datetime
import gc
import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from dsv41_edu import benchmarks
from dsv41_edu.benchmarks import __main__ as command
from dsv41_edu.benchmarks.harness import Case, Skip, machine, peak_memory, run, write

CAN_RESET = os.access("/proc/self/clear_refs", os.W_OK)
resettable = pytest.mark.skipif(not CAN_RESET, reason="the peak memory cannot be reset here")


class Clock:
    """Stands still, but for the contestants that push it."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def contestant(self, label, *seconds):
        """Takes that long on each call; the last number repeats."""
        seconds = list(seconds)

        def call():
            self.calls.append(label)
            self.now += seconds.pop(0) if len(seconds) > 1 else seconds[0]

        return call


def skipping():
    raise Skip("peer 1.0 is not installed")


def failing():
    raise ArithmeticError("no such shape")


def test_contestants_take_turns_after_the_warm_up():
    clock = Clock()
    contestants = {label: clock.contestant(label, 0.5) for label in ("ours", "one", "two")}
    run([Case("turns", "nothing", contestants)], clock)
    assert clock.calls[:12] == ["ours"] * 4 + ["one"] * 4 + ["two"] * 4
    memory = ["ours", "one", "two"] if CAN_RESET else []
    # five rounds of 1.5 s although the time is up after four
    assert clock.calls[12:] == ["ours", "one", "two"] * 5 + memory


def test_rounds_fill_the_time():
    clock = Clock()
    (result,) = run([Case("rounds", "", {"ours": clock.contestant("ours", 0.5)})], clock)
    assert result["contestants"][0]["rounds"] == 10


def test_median_spread_and_ratio():
    clock = Clock()
    contestants = {
        # after a warm-up of four calls, five rounds
        "ours": clock.contestant("ours", 9, 9, 9, 9, 1, 5, 2, 4, 3),
        "peer": clock.contestant("peer", 9, 9, 9, 9, 8, 6, 6, 6, 16),
    }
    (result,) = run([Case("numbers", "", contestants)], clock)
    ours, peer = result["contestants"]
    assert (ours["label"], ours["median"], ours["iqr"], ours["ratio"], ours["rounds"]) == ("ours", 3, 2, 1, 5)
    assert (peer["label"], peer["median"], peer["iqr"], peer["ratio"], peer["rounds"]) == ("peer", 6, 2, 2, 5)


def test_short_calls_are_repeated_within_a_measurement():
    clock = Clock()
    # The second call, the first measurement, is long by accident.
    (result,) = run([Case("short", "", {"ours": clock.contestant("ours", 1, 1, 2**-8)})], clock)
    (ours,) = result["contestants"]
    assert ours["median"] == 2**-8
    # one call, two measurements of 1 call, one of 2 and of 4, and three of 8, which last 2**-5 s
    assert len(clock.calls) == 1 + (2 * 1 + 2 + 4 + 3 * 8) + 8 * ours["rounds"] + CAN_RESET


def test_no_garbage_is_collected_while_timing():
    seen = []
    clock = Clock()
    push = clock.contestant("ours", 1)
    run([Case("garbage", "", {"ours": lambda: (seen.append(gc.isenabled()), push())})], clock)
    assert not any(seen)
    assert gc.isenabled()


def test_a_peer_may_be_skipped():
    clock = Clock()
    (result,) = run([Case("skip", "4 x 4", {"ours": clock.contestant("ours", 1), "peer": skipping})], clock)
    ours, peer = result["contestants"]
    assert ours["median"] == 1
    assert peer == {"label": "peer", "skipped": "peer 1.0 is not installed"}
    assert (result["name"], result["work"], result["machine"]) == ("skip", "4 x 4", machine())
    assert datetime.date.fromisoformat(result["date"]).year >= 2025


def test_without_ours_there_is_no_ratio():
    clock = Clock()
    (result,) = run([Case("skip", "", {"ours": skipping, "peer": clock.contestant("peer", 1)})], clock)
    assert result["contestants"][1]["median"] == 1
    assert result["contestants"][1]["ratio"] is None
    (result,) = run([Case("all", "", {"ours": skipping})], clock)
    assert result["contestants"] == [{"label": "ours", "skipped": "peer 1.0 is not installed"}]


def test_an_error_names_contestant_and_case():
    clock = Clock()
    case = Case("broken", "", {"ours": clock.contestant("ours", 1), "peer": failing})
    with pytest.raises(ArithmeticError, match="raised by contestant 'peer' of benchmark case 'broken'"):
        run([case], clock)


@resettable
def test_peak_memory():
    mib = 2**20
    assert 60 * mib <= peak_memory(lambda: b"x" * (64 * mib)) < 80 * mib  # freed again within the call
    assert peak_memory(list) < 4 * mib


@resettable
def test_peak_memory_counts_what_the_allocator_kept():
    def call():
        return [b"x" * 2**16 for _ in range(128)]  # 8 MiB, in blocks of the heap

    call()
    assert peak_memory(call) >= 7 * 2**20


def test_peak_memory_is_none_where_the_peak_cannot_be_reset(monkeypatch):
    def refuse(path, text):
        raise PermissionError(path)

    monkeypatch.setattr(Path, "write_text", refuse)
    assert peak_memory(list) is None


def test_machine(monkeypatch):
    here = machine()
    assert set(here) == {
        *("cpu", "cores", "memory_gib", "python", "torch", "torch_threads", "numpy", "triton", "platform"),
    }
    assert here["memory_gib"] * 2**30 == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert here["torch"] == torch.__version__
    assert here["torch_threads"] == torch.get_num_threads()

    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert machine()["triton"] is None


def case_result(name, median, date="2026-01-01"):
    contestants = [{"label": "ours", "median": median, "iqr": 0.0, "rounds": 5, "ratio": 1.0, "peak_memory": None}]
    return {"name": name, "work": "", "date": date, "machine": {"cores": 2}, "contestants": contestants}


def test_the_file_keeps_cases_that_were_not_run(tmp_path):
    path = tmp_path / "book" / "data" / "benchmarks.json"
    write(path, [case_result("b", 1.0), case_result("c", 1.0)])
    write(path, [case_result("c", 0.123456, "2026-02-02"), case_result("a", 12345.6, "2026-02-02")])
    assert json.loads(path.read_text()) == {
        "cases": [
            case_result("a", 12350.0, "2026-02-02"),
            case_result("b", 1.0),
            case_result("c", 0.1235, "2026-02-02"),
        ]
    }
    assert path.read_text().startswith('{\n "cases": [\n  {\n   "contestants": [')


def test_command(tmp_path, monkeypatch, capsys):
    clock = Clock()
    cases = [
        Case("add 4", "", {"ours": clock.contestant("ours", 1), "peer": skipping}),
        Case("mul 4", "", {"ours": clock.contestant("ours", 1)}),
    ]
    monkeypatch.setattr(command, "collect", lambda: cases)
    monkeypatch.setattr(command, "run", lambda cases: run(cases, clock))
    monkeypatch.setattr(command, "RESULTS", tmp_path / "benchmarks.json")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "add"])
    command.main()
    header, ours, peer = capsys.readouterr().out.splitlines()
    assert header.split() == "case contestant median s iqr s rounds ratio peak MiB".split()
    assert ours.split()[:-1] == "add 4 ours 1 0 5 1.00".split()
    assert peer.split() == "add 4 peer - - - - - skipped: peer 1.0 is not installed".split()
    assert ours.index("ours") == peer.index("peer") == header.index("contestant")
    names = [case["name"] for case in json.loads((tmp_path / "benchmarks.json").read_text())["cases"]]
    assert names == ["add 4"]


def test_command_refuses_a_name_without_cases(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "no such case"])
    with pytest.raises(SystemExit):
        command.main()
    assert "no such case" in capsys.readouterr().err


def test_cases_are_collected_from_every_module(tmp_path, monkeypatch):
    text = "from dsv41_edu.benchmarks.harness import Case\ndef cases(): return [Case('{}', '', {{}})]\n"
    (tmp_path / "bench_toy_a.py").write_text(text.format("a"))
    (tmp_path / "bench_toy_b.py").write_text(text.format("b"))
    monkeypatch.setattr(benchmarks, "__path__", [*benchmarks.__path__, str(tmp_path)])
    assert [case.name for case in command.collect()][-2:] == ["a", "b"]
    (tmp_path / "bench_toy_c.py").write_text(text.format("a"))
    with pytest.raises(ValueError, match=r"bench_toy_c has a second benchmark case called 'a'"):
        command.collect()
