"""Stored measurements as tables of a page: timings belong to the machine and the day that `measured` names."""

from dsv41_edu.benchmarks import harness, resources
from dsv41_edu.figures.tables import Table, table


def timings(prefix: str) -> Table:
    """Of each stored case's contestants: median time, over ours, and peak memory."""
    rows = []
    for case in harness.read(prefix):
        for one in case["contestants"]:
            if "skipped" not in one:
                memory = "unknown" if one["peak_memory"] is None else f"{one['peak_memory'] / 2**20:.1f}"
                rows.append((case["work"], one["label"], f"{1e3 * one['median']:.3g}", f"{one['ratio']:.2f}", memory))
    return table("work|contestant|median, ms|over ours|peak, MiB", rows)


def latencies(name: str) -> Table:
    """Of a stored case with latencies: rows a second, median and 99th percentile of a look-up, peak memory."""
    rows = []
    for one in harness.read(name)[0]["latencies"]:
        p99 = "-" if one["p99"] is None else f"{1e3 * one['p99']:.3g}"
        memory = "unknown" if one["peak_memory"] is None else f"{one['peak_memory'] / 2**20:.1f}"
        speed, median = f"{one['rows_per_s']:,.0f}", f"{1e3 * one['p50']:.3g}"
        rows.append((one["state"], one["tokens"], one["look_ups"], speed, median, p99, memory))
    return table("file|tokens|look-ups|rows a second|median, ms|p99, ms|peak, MiB", rows)


def measured(prefix: str) -> str:
    """Where and when the stored cases were timed: the last one's processor, cores, version of torch and day."""
    case = harness.read(prefix)[-1]
    here = case["machine"]
    return f"{here['cpu']}, {here['cores']} cores, torch {here['torch']}, {case['date']}"


def registers(*modules: str) -> Table:
    """Registers a thread of each build of modules of `kernels`, by target. Raises AssertionError where some spill."""
    used = [row for module in modules for row in resources.read(f"kernels.{module}")]
    assert not any(row["spilled"] for row in used), f"{modules}: expected no spills"
    targets = dict.fromkeys(row["target"] for row in used)
    found = {(row["build"], row["target"]): row["registers"] for row in used}
    builds = dict.fromkeys(row["build"] for row in used)
    return table(
        "registers a thread|" + "|".join(targets),
        [(build, *(found.get((build, target), "none") for target in targets)) for build in builds],
    )
