"""Numbers for the prose: computed in a cell, named, and set into the text by the page."""

from typing import Any

from myst_nb import glue

from dsv41_edu.figures.tables import cell


def say(**values: Any) -> None:
    """Bind names to numbers (thousands separated) or finished text, for `{glue:text}` in the same page."""
    for name, value in values.items():
        glue(name, cell(value), display=False)
