"""Stored timings as a table of a page: they belong to the machine and the day that `measured` names."""

from dsv41_edu.benchmarks import harness
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


def measured(prefix: str) -> str:
    """Where and when the stored cases were timed: the last one's processor, cores, version of torch and day."""
    case = harness.read(prefix)[-1]
    here = case["machine"]
    return f"{here['cpu']}, {here['cores']} cores, torch {here['torch']}, {case['date']}"
