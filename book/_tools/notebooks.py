"""Pages that run: `book/x.py` (percent format, reviewed) and `book/x.ipynb` (executed, published, compared).

    python book/_tools/notebooks.py build [NAME ...]   # execute all pages, or the named ones
    python book/_tools/notebooks.py check              # fail where a pair differs in its source

Pages that show the ledger's score read the others' outputs: they are executed last, and again whenever
another page was.
"""

import hashlib
import sys
from collections import Counter
from pathlib import Path

import jupytext
import nbclient
import nbformat
from dsv41_edu.config import preset
from dsv41_edu.figures.model_map import model_map
from tqdm import tqdm

BOOK = Path(__file__).parents[1]
PICTURE = BOOK / "_static" / "model.svg"
LAST = ("ledger", "intro")
METADATA = {
    "kernelspec": {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},
}


def from_source(path: Path) -> nbformat.NotebookNode:
    """The notebook that a percent script stands for, without outputs; cell ids follow from the cells' text."""
    notebook = jupytext.read(path, fmt="py:percent")
    seen: Counter = Counter()
    for cell in notebook.cells:
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        seen[digest] += 1
        cell["id"] = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def build(names: list[str]) -> None:
    """Execute the pages and write their notebooks. Raises where a cell fails or writes to stderr."""
    if unknown := {*names} - {p.stem for p in BOOK.glob("*.py")}:
        raise SystemExit(f"no page {', '.join(sorted(unknown))} in book/")
    pages = [
        p
        for p in sorted(BOOK.glob("*.py"))
        if p.stem not in LAST and (not names or p.stem in names)
    ]
    pages += [BOOK / f"{name}.py" for name in LAST]
    for path in tqdm(pages, unit="page"):
        notebook = from_source(path)
        nbclient.NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": BOOK}},
            extra_arguments=["--log-level=ERROR"],
        ).execute()
        noise = [
            o.text
            for c in notebook.cells
            for o in c.get("outputs", ())
            if o.get("name") == "stderr"
        ]
        if noise:
            raise SystemExit(f"{path.name}: a cell wrote to stderr: {noise[0]:.500}")
        notebook.metadata = nbformat.from_dict(METADATA)  # less the kernel's version
        nbformat.write(notebook, path.with_suffix(".ipynb"))
    PICTURE.write_text(picture())


def picture() -> str:
    """The landing page's map for the README, where no page lends it a text colour and a ground."""
    svg = model_map(preset("v41_flash")).svg.replace("currentColor", "#1b1f24")
    return svg.replace('style="', 'style="background: white; ', 1) + "\n"


def stale() -> list[str]:
    """Pages whose notebook is missing, was not executed, or has other cells than its source; the picture too."""

    def cells(notebook: nbformat.NotebookNode) -> list[tuple]:
        return [(c.cell_type, c.id, c.source, c.metadata) for c in notebook.cells]

    found = []
    for path in sorted(BOOK.glob("*.py")):
        pair = path.with_suffix(".ipynb")
        if not pair.exists():
            found.append(path.stem)
            continue
        notebook = nbformat.read(pair, 4)
        executed = all(c.execution_count for c in notebook.cells if c.cell_type == "code")
        if cells(notebook) != cells(from_source(path)) or not executed:
            found.append(path.stem)
    if PICTURE.read_text() != picture():
        found.append(PICTURE.name)
    return found


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["build", *names]:
            build(names)
        case ["check"]:
            if found := stale():
                sys.exit(f"stale: {', '.join(found)}: run make notebooks")
        case _:
            sys.exit(__doc__)
