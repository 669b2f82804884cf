"""Mutation testing: change one operator or constant of a module at a time and see whether its tests notice.

    python tests/mutants.py [--limit N] dsv41_edu.config dsv41_edu.accounting ...

Run it from the repository root. It lists the survivors, the changes that no test noticed, to be read by a
person: each is a missing test or a change without effect. The tests of `dsv41_edu.<name>` are
`tests/test_<name>.py`, those of `dsv41_edu.<sub>.<name>` and `<sub>.<name>` are `tests/<sub>/test_<name>.py`.

A mutant exists only inside the process that runs the tests: a test that starts another process
(`python -m ...`) runs the unchanged module there, and cannot notice a mutant.
"""

import argparse
import ast
import copy
import gc
import importlib.machinery
import importlib.util
import linecache
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Imported here once, so that no forked child has to: together they take seconds.
import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pytest
import torch
from tqdm import tqdm

FLIPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
MEMORY = 4 << 30  # bytes that one child may take

CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def mutable(node: ast.AST, in_error: bool = False) -> Iterator[ast.AST]:
    """Yield a node and those below it, without type hints, error messages and `if __name__ == ...` blocks."""
    match node:
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return
        case ast.JoinedStr() if in_error:
            return
        case ast.Raise() | ast.Assert():
            in_error = True
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from mutable(child, in_error)


def changed(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of a node with some fields changed; the other fields are shared."""
    node = copy.copy(node)
    vars(node).update(fields)
    return node


def mutations(node: ast.AST) -> Iterator[ast.AST]:
    """Yield each replacement of one node; none for a node that is neither operator, call nor number."""
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(2 * value or 1.0)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op) in FLIPS:
            yield changed(node, op=FLIPS[type(op)]())
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                if type(op) in FLIPS:
                    yield changed(node, ops=[*ops[:i], FLIPS[type(op)](), *ops[i + 1 :]])
        case ast.Call(func=ast.Name(id=name) as function) if name in CALLS:
            yield changed(node, func=changed(function, id=CALLS[name]))
        case ast.Call(func=ast.Attribute(attr=name) as function) if name in CALLS:
            yield changed(node, func=changed(function, attr=CALLS[name]))


class Replace(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


class MutantLoader(importlib.machinery.SourceFileLoader):
    """Import hook (finder and loader) that gives one module a syntax tree with one node replaced."""

    def __init__(self, module: str, path: Path, tree: ast.Module, old: ast.AST, new: ast.AST):
        super().__init__(module, str(path))
        self.tree, self.replace = tree, Replace(old, new)

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name == self.name:
            return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_code(self, name: str) -> object:
        source = ast.unparse(self.replace.visit(self.tree))
        # Triton compiles what `inspect` reads of a kernel, and `inspect` reads this cache.
        linecache.cache[self.path] = len(source), None, source.splitlines(True), self.path
        return compile(source, self.path, "exec")


def run_tests(root: Path, tests: Path, scratch: str, loader: MutantLoader, seconds: int) -> None:
    """In a forked child: run the tests, with that import hook, and exit with pytest's status.

    `scratch` is a directory for their files. The child is killed after that many seconds; 0 means never.
    """
    signal.alarm(seconds)
    # A mutated size must not take the whole machine's memory.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    torch.set_num_threads(1)  # the children share the cores
    gc.freeze()  # pytest collects garbage, and would walk all of torch each time
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    os.chdir(root)
    sys.path.insert(0, str(root))
    sys.meta_path.insert(0, loader)
    # Loading the plugins, of which the tests need none, takes longer than most tests.
    options = "-x -q --tb=no --disable-plugin-autoload -p no:cacheprovider -o addopts="
    sys.exit(pytest.main([*options.split(), f"--basetemp={scratch}/{os.getpid()}", str(tests)]))


def survivors(root: Path, module: str, limit: int | None = None) -> tuple[int, list[str]]:
    """Run a module's tests on its mutants, as many at a time as there are cores.

    `root` is the directory that holds the module's top package and tests/; `limit` takes that many mutants,
    evenly spread over the file. Returns the number of mutants run and one line for each survivor,
    `file:line:column  source line  before -> after`, in the order of the file.
    Raises FileNotFoundError for an unknown module, and RuntimeError if the tests fail on the module as it is
    or if it is imported already, which would hide the mutants.
    """
    if module in sys.modules:
        raise RuntimeError(f"{module} is already imported, so its tests would not see the mutants")
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    *folders, name = module.removeprefix("dsv41_edu.").split(".")
    tests = root.joinpath("tests", *folders, f"test_{name}.py")
    source = path.read_text()
    tree = ast.parse(source)
    mutants = [(old, new) for old in mutable(tree) for new in mutations(old)]
    mutants.sort(key=lambda mutant: (mutant[0].lineno, mutant[0].col_offset))
    if limit is not None and limit < len(mutants):
        mutants = [mutants[i * len(mutants) // limit] for i in range(limit)]

    def start(old: ast.AST, new: ast.AST, seconds: int) -> multiprocessing.Process:
        loader = MutantLoader(module, path, tree, old, new)  # replaces the node in the child's copy of the tree
        arguments = root, tests, scratch, loader, seconds
        process = multiprocessing.get_context("fork").Process(target=run_tests, args=arguments)
        process.start()
        return process

    waiting, running, survived = mutants.copy(), {}, []
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=len(mutants), desc=module, unit="mutant") as progress:
        began = time.perf_counter()
        clean = start(tree, tree, seconds=0)
        clean.join()
        if clean.exitcode != 0:
            raise RuntimeError(f"{tests} must pass before {module} is mutated; pytest's status is {clean.exitcode}")
        seconds = max(20, round(10 * (time.perf_counter() - began)))
        while waiting or running:
            if waiting and len(running) < os.cpu_count():
                mutant = waiting.pop(0)
                process = start(*mutant, seconds)
                running[process.sentinel] = process, mutant
            else:
                for sentinel in multiprocessing.connection.wait(list(running)):
                    process, mutant = running.pop(sentinel)
                    process.join()
                    progress.update()
                    if process.exitcode == 0:
                        survived.append(mutant)
    lines = source.splitlines()
    return len(mutants), [
        f"{path.relative_to(root)}:{old.lineno}:{old.col_offset + 1}  {lines[old.lineno - 1].strip()}  "
        f"{ast.unparse(old)} -> {ast.unparse(new)}"
        for old, new in mutants
        if (old, new) in survived
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="+", metavar="MODULE")
    parser.add_argument("--limit", type=int, metavar="N", help="run N mutants of each module, evenly spread")
    arguments = parser.parse_args()
    total, survived = 0, 0
    for module in arguments.modules:
        try:
            count, lines = survivors(Path.cwd(), module, arguments.limit)
        except (FileNotFoundError, RuntimeError) as error:
            sys.exit(str(error))
        for line in lines:
            print(line)
        total, survived = total + count, survived + len(lines)
    print(f"{total} mutants, {total - survived} killed, {survived} survived")


if __name__ == "__main__":
    main()
