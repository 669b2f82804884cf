"""The claims ledger as a table that a page's script makes sortable and filterable; without it, a plain table."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dsv41_edu.claims import STATUSES, shown

COLUMNS = ("claim", "chapter", "says", "stated", "computed", "status", "how", "scope", "source")


@dataclass(frozen=True)
class LedgerTable:
    """Claims as `dsv41_edu.claims.results` gives them, as HTML and as one line each."""

    claims: Sequence[dict[str, Any]]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        chapters = dict.fromkeys(c["chapter"] for c in self.claims)
        filters = "".join(
            f'<label>{name} <select data-column="{name}"><option value="">all</option>'
            + "".join(f"<option>{value}</option>" for value in values)
            + "</select></label> "
            for name, values in (("chapter", chapters), ("status", STATUSES))
        )
        head = "".join(f'<th scope="col"><button type="button">{c}</button></th>' for c in COLUMNS)
        html = (
            f'<div class="ledger"><p>{filters}<label>find <input type="search" data-column=""></label> '
            f'<output>{len(self.claims)} claims</output></p><div class="table-scroll" tabindex="0">'
            f'<table class="table"><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(map(_row, self.claims))}</tbody></table></div></div>"
        )
        text = "\n".join(f"{c['status']:9} {c['id']}" for c in self.claims)
        return {"text/plain": text, "text/html": html}


def ledger_table(claims: Sequence[dict[str, Any]]) -> LedgerTable:
    """The table for a page; links lead from a claim to the card under its cell, where it has one."""
    return LedgerTable(claims)


def _row(c: dict[str, Any]) -> str:
    # pages of the book lie beside one another
    name = f"<code>{c['id']}</code>"
    link = f'<a href="{c["cell"].split("/")[-1]}">{name}</a>' if c["cell"] else name
    unit = "" if c["unit"] == "1" else f" {c['unit']}"
    computed = "" if c["computed"] is None else shown(c["computed"])
    why = f"<br><small>{escape(c['why'])}</small>" if c["why"] else ""
    cells = [
        link,
        c["chapter"],
        escape(c["says"]),
        escape(shown(c["stated"]) + unit),
        escape(computed),
        f'<span class="status-{c["status"]}">{c["status"]}</span>{why}',
        c["how"],
        escape(c["scope"]),
        escape(c["source"]),
    ]
    return (
        f'<tr data-chapter="{c["chapter"]}" data-status="{c["status"]}">'
        + "".join(f"<td>{v}</td>" for v in cells)
        + "</tr>"
    )
