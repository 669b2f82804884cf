"""Runs the experiments: `python -m dsv41_edu.experiments [NAME ...]`, all or those whose name starts so.

An experiment is a module of this package with `jobs()`, a list of argument tuples, `run(*arguments)`, and
`write(results)` for its result file. Two processes share the jobs, one thread each.
"""

import argparse
import importlib
import multiprocessing
import pkgutil
from concurrent.futures import ProcessPoolExecutor, as_completed
from types import ModuleType

import torch
from tqdm import tqdm

from dsv41_edu import experiments

PROCESSES = 2


def collect() -> dict[str, ModuleType]:
    """The experiments by name."""
    names = [m.name for m in pkgutil.iter_modules(experiments.__path__) if m.name != "__main__"]
    modules = {name: importlib.import_module(f"{experiments.__name__}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "jobs")}


def main() -> None:
    found = collect()
    parser = argparse.ArgumentParser(prog="python -m dsv41_edu.experiments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(found)}")
    names = parser.parse_args().names
    chosen = {name: module for name, module in found.items() if name.startswith(tuple(names or [""]))}
    if names and not chosen:
        parser.error(f"no experiment has a name that starts with {' or '.join(names)}: expected {', '.join(found)}")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for name, module in chosen.items():
            futures = [pool.submit(module.run, *job) for job in module.jobs()]
            for _ in tqdm(as_completed(futures), total=len(futures), desc=name, unit="run"):
                pass
            module.write([future.result() for future in futures])


if __name__ == "__main__":
    main()
