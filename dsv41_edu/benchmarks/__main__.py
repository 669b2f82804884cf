"""Runs the benchmarks: `python -m dsv41_edu.benchmarks [NAME ...]`, all or those whose name starts so.

The cases come from every module of this package that has a function `cases()`, which returns a list of `Case`.
Prints a table and writes book/data/benchmarks.json.
"""

import argparse
import importlib
import pkgutil

from tqdm import tqdm

from dsv41_edu import benchmarks
from dsv41_edu.benchmarks.harness import RESULTS, Case, run, write

HEADER = ("case", "contestant", "median s", "iqr s", "rounds", "ratio", "peak MiB", "")


def collect() -> list[Case]:
    """The cases of every module of the package. Raises ValueError if two have the same name."""
    cases = {}
    for found in pkgutil.iter_modules(benchmarks.__path__, f"{benchmarks.__name__}."):
        module = importlib.import_module(found.name)
        if hasattr(module, "cases"):
            for case in module.cases():
                if case.name in cases:
                    raise ValueError(f"{found.name} has a second benchmark case called {case.name!r}")
                cases[case.name] = case
    return list(cases.values())


def table(results: list[dict]) -> str:
    """The results of `run` as aligned text, one line a contestant."""
    rows = [HEADER]
    for case in results:
        for c in case["contestants"]:
            if "skipped" in c:
                numbers = ["-"] * 5 + [f"skipped: {c['skipped']}"]
            else:
                ratio = "-" if c["ratio"] is None else f"{c['ratio']:.2f}"
                peak = "-" if c["peak_memory"] is None else f"{c['peak_memory'] / 2**20:.1f}"
                numbers = [f"{c['median']:.3g}", f"{c['iqr']:.3g}", str(c["rounds"]), ratio, peak, ""]
            rows.append([case["name"], c["label"], *numbers])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dsv41_edu.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="run the cases whose name starts with it")
    names = parser.parse_args().names
    cases = [case for case in collect() if case.name.startswith(tuple(names or [""]))]
    if names and not cases:
        parser.error(f"no benchmark case has a name that starts with {' or '.join(names)}")
    results = []
    for case in tqdm(cases, unit="case"):
        results += run([case])
        write(RESULTS, results)
    print(table(results))


if __name__ == "__main__":
    main()
