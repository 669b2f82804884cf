"""Small tables for pages: HTML for a reader, aligned text for a test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


@dataclass(frozen=True)
class Table:
    """Columns and rows; numbers are set right with their thousands separated, floats as given."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        cells = [[cell(v) for v in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.columns, *cells, strict=True)]
        numeric = [all(isinstance(row[i], int | float) for row in self.rows) for i in range(len(self.columns))]

        def line(row: Sequence[str]) -> str:
            return "  ".join(
                v.rjust(w) if right else v.ljust(w) for v, w, right in zip(row, widths, numeric, strict=True)
            ).rstrip()

        def html_row(tag: str, row: Sequence[str]) -> str:
            classes = (' class="number"' if right else "" for right in numeric)
            return "".join(f"<{tag}{c}>{escape(v)}</{tag}>" for v, c in zip(row, classes, strict=True))

        head = f"<thead><tr>{html_row('th', self.columns)}</tr></thead>"
        body = "".join(f"<tr>{html_row('td', row)}</tr>" for row in cells)
        html = (
            f'<div class="table-scroll" tabindex="0"><table class="table">{head}<tbody>{body}</tbody></table></div>'
        )
        return {"text/plain": "\n".join(map(line, [self.columns, *cells])), "text/html": html}


def table(columns: str | Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """`columns` as a list, or as one string split at `|`. Raises ValueError where a row has another length."""
    names = tuple(columns.split("|") if isinstance(columns, str) else columns)
    for row in rows:
        if len(row) != len(names):
            raise ValueError(f"row {row!r:.60} has {len(row)} cells, expected {len(names)}")
    return Table(names, tuple(map(tuple, rows)))


def cell(value: Any) -> str:
    """Numbers with thousands separated; everything else as it prints."""
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def refused(call: Callable[[], object]) -> str:
    """What the error of a call says that is to be refused; "accepted" if it isn't."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return "accepted"
