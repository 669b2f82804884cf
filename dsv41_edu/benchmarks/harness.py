"""Times contestants, ours and its peers, side by side in one process; nothing here passes or fails by a clock."""

import ctypes
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

RESULTS = Path(__file__).parents[2] / "book" / "data" / "benchmarks.json"
SECONDS_PER_CASE = 5.0  # rounds go on until then
FEWEST_ROUNDS = 5
SHORTEST_MEASUREMENT = 0.02  # seconds; shorter ones are mostly clock and call overhead


class Skip(Exception):
    """A contestant raises it, with the reason, on its warm-up call when it cannot run here."""


@dataclass(frozen=True)
class Case:
    """One thing to time.

    `work` says what is done: shapes, dtypes, device. `contestants` maps a label to a function without
    arguments; the first is ours, the others are peers doing the same work. On a GPU a contestant must
    synchronise before it returns.
    """

    name: str
    work: str
    contestants: dict[str, Callable[[], object]]


def run(cases: Iterable[Case], clock: Callable[[], float] = time.perf_counter) -> list[dict]:
    """Measure the cases one after the other, `clock` telling the time in seconds.

    A case's contestants are first warmed up, in order: one call, then measurements of 1, 2, 4, ... calls until
    three of a size last SHORTEST_MEASUREMENT each. Then they take turns, one measurement of that size each a
    round. Returns a dict for each case: `name`, `work`, `date` (UTC day), `machine` and `contestants`, a list in
    the order of the case of dicts with `label` and either `skipped` (the reason), or

    - `median` and `iqr`, the interquartile range: of the rounds, in seconds a call,
    - `rounds`,
    - `ratio`: this median over our median, above 1 for a slower peer; None if ours was skipped,
    - `peak_memory`: see `peak_memory`.

    An exception from a contestant passes through, with a note of the contestant's and the case's name.
    """
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    this_machine = machine()
    return [
        {
            "name": case.name,
            "work": case.work,
            "date": date,
            "machine": this_machine,
            "contestants": _run_case(case, clock),
        }
        for case in cases
    ]


def _run_case(case: Case, clock: Callable[[], float]) -> list[dict]:
    skipped, calls, times = {}, {}, {}
    for label in case.contestants:
        try:
            _measure(case, label, clock, 1)
        except Skip as reason:
            skipped[label] = str(reason)
            continue
        calls[label] = 1
        # Three times, since a single one may be long only because the machine was busy.
        while any(_measure(case, label, clock, calls[label]) < SHORTEST_MEASUREMENT for _ in range(3)):
            calls[label] *= 2
        times[label] = []

    rounds, end = 0, clock() + SECONDS_PER_CASE
    while times and (rounds < FEWEST_ROUNDS or clock() < end):
        for label in times:
            times[label].append(_measure(case, label, clock, calls[label]) / calls[label])
        rounds += 1

    ours = times.get(next(iter(case.contestants)))
    results = []
    for label in case.contestants:
        if label in skipped:
            results.append({"label": label, "skipped": skipped[label]})
            continue
        lower, median, upper = statistics.quantiles(times[label], n=4, method="inclusive")
        results.append(
            {
                "label": label,
                "median": median,
                "iqr": upper - lower,
                "rounds": rounds,
                "ratio": median / statistics.median(ours) if ours else None,
                "peak_memory": peak_memory(partial(_measure, case, label, clock, 1)),
            }
        )
    return results


def _measure(case: Case, label: str, clock: Callable[[], float], calls: int) -> float:
    """Seconds that a number of calls of one contestant take."""
    contestant = case.contestants[label]
    gc.disable()
    try:
        start = clock()
        for _ in range(calls):
            contestant()
        return clock() - start
    except Exception as error:
        error.add_note(f"raised by contestant {label!r} of benchmark case {case.name!r}")
        raise
    finally:
        gc.enable()


def peak_memory(call: Callable[[], object]) -> int | None:
    """Bytes by which the process's resident memory grows at its highest during one call.

    None where the platform cannot tell: it takes Linux's /proc/self/clear_refs and the GNU C library.
    """
    gc.collect()
    try:
        # Else the call would find memory that earlier calls left with the allocator, and seem to need none.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the highest resident memory
    except (OSError, AttributeError):
        return None
    before = _status_bytes("VmRSS")
    call()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {field}")


def machine() -> dict:
    """What the times depend on: processor, cores, memory in GiB, versions (None: not installed), platform."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "torch_threads": torch.get_num_threads(),
        "numpy": _version("numpy"),
        "triton": _version("triton"),
        "platform": platform.platform(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read(prefix: str) -> list[dict]:
    """The stored cases whose names start so, in their order."""
    return [case for case in json.loads(RESULTS.read_text())["cases"] if case["name"].startswith(prefix)]


def write(path: Path, results: list[dict]) -> None:
    """Write what `run` returned to a JSON file, {"cases": [...]} in the order of their names.

    Cases that the file holds already and that were not run now are kept, with their own date and machine.
    Floats are rounded to four significant digits.
    """
    cases = {case["name"]: case for case in json.loads(path.read_text())["cases"]} if path.exists() else {}
    cases |= {case["name"]: case for case in results}
    text = json.dumps({"cases": [cases[name] for name in sorted(cases)]})
    rounded = json.loads(text, parse_float=lambda digits: float(f"{float(digits):.4g}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded, indent=1, sort_keys=True) + "\n")
