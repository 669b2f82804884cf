"""What each kernel takes of each target, compiled ahead of time: python -m dsv41_edu.benchmarks.resources

Writes book/data/kernel_resources.json, a list with `module, build, target, registers, spilled, shared_bytes`.
Registers and spills are the compiler's, so they belong to the pinned Triton, not to a machine.
"""

import json
from pathlib import Path

from kernels.aot import Report, compile_all

RESULTS = Path(__file__).parents[2] / "book" / "data" / "kernel_resources.json"
FIELDS = ("module", "build", "target", "registers", "spilled", "shared_bytes")


def rows(reports: list[Report]) -> list[dict]:
    """The fields that a page shows, in the order of the builds."""
    return [{name: getattr(report, name) for name in FIELDS} for report in reports]


def read(module: str) -> list[dict]:
    """The stored rows of one module of `kernels`."""
    return [row for row in json.loads(RESULTS.read_text()) if row["module"] == module]


if __name__ == "__main__":
    RESULTS.write_text(json.dumps(rows(compile_all()), indent=1) + "\n")
