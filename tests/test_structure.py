"""The house's floors: who may import whom."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
GROUND = {"config", "config_rules", "claims", "quantization"}
MECHANISMS = {"moe", "mhc", "engram", "dspark", "attention"}
TOP = {"figures", "benchmarks", "experiments"}


def imports(path: Path) -> set[str]:
    """First names below dsv41_edu (or `kernels`, `book`) that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [f"{node.module}.{a.name}" for a in getattr(node, "names", ()) if isinstance(node, ast.ImportFrom)]
        names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            first, *rest = name.split(".")
            if first == "dsv41_edu" and rest:
                found.add(rest[0])
            elif first in ("kernels", "book"):
                found.add(first)
    return found


def floor(path: Path) -> str:
    return path.relative_to(ROOT / "dsv41_edu").parts[0].removesuffix(".py")


def test_imports_go_down():
    for path in (ROOT / "dsv41_edu").rglob("*.py"):
        mine, used = floor(path), imports(path)
        assert "book" not in used, path
        if mine in GROUND:
            assert used <= GROUND, path
        elif mine in MECHANISMS:
            assert not used & (MECHANISMS - {mine}), path
        if mine not in TOP:
            assert not used & TOP, path
    for path in (ROOT / "kernels").rglob("*.py"):
        assert not imports(path) - {"kernels"}, f"{path} knows shapes and strides, nothing of configs"


def test_files_are_short():
    for folder in ("dsv41_edu", "kernels", "book/_tools"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 340, path


def test_nothing_at_the_top_level_but_what_belongs_there():
    allowed = {"book", "dsv41_edu", "kernels", "tests", "_config.yml", "_toc.yml", "requirements.txt", "README.md"}
    allowed |= {"Makefile", "pyproject.toml", "LICENSE", "_build", "dsv41_edu.egg-info"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert found <= allowed


def test_no_pickle_and_no_network_in_the_package():
    for path in [*(ROOT / "dsv41_edu").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        names = {a.name for n in ast.walk(ast.parse(path.read_text())) for a in getattr(n, "names", ())}
        assert not names & {"pickle", "requests", "urllib", "urllib.request", "http.client", "socket"}, path
