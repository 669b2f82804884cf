"""The ledger: each figure that the source article states, once, and what became of it when it was checked.

    check("acc.routed_total", routed / 1e9)       # in a notebook cell: shows stated, computed, verdict
    python -m dsv41_edu.claims [--json]           # the score, from the outputs of the executed notebooks

A status is never written down: it is read from the notebooks' own outputs. `pending` has none yet,
`verified` and `differs` come from `check`, `cited` from `cite`. The code that computes a value never reads
the ledger; only the notebooks bring the two together.
"""

import argparse
import json
import sys
from collections import Counter
from decimal import Context, Decimal
from fractions import Fraction
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import yaml

BOOK = Path(__file__).parents[1] / "book"
KEY = "dsv41_claim"  # of an output's metadata: where a check leaves its verdict for `results`
STATUSES = ("verified", "differs", "cited", "pending")
HOW = {  # what a check of each kind establishes, unless the claim says it more exactly
    "computed": "Follows from the released config by the formula shown; says nothing of the trained weights.",
    "simulated": "Holds for the seeded simulation shown, not for the traffic of a deployed model.",
    "proved": "Holds over the inputs drawn or enumerated in the cell, in the arithmetic used there.",
    "trained": "Shows the direction in a small model trained here; the stated figure is of a far larger run.",
    "cited": "Shown with its source: the result of a run that can't be repeated here, never checked by us.",
}
DIGITS = Context(prec=60)


class LedgerError(ValueError):
    """A claim that isn't in the ledger, is checked twice, or whose verdict and reason don't fit."""


class Claim(NamedTuple):
    """One row of the ledger. Figures stay text, since their printed digits are part of the claim."""

    id: str
    chapter: str
    says: str
    value: str | list[str] | None
    unit: str
    tol: str
    how: str
    source: str
    scope: str


class Check(NamedTuple):
    """A verdict on one claim; a notebook shows it as a card, and the ledger reads it back."""

    claim: Claim
    status: str
    computed: Any = None
    why: str | None = None

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        verdict = {"id": self.claim.id, "status": self.status, "computed": self.computed, "why": self.why}
        return {"text/plain": self._text(), "text/html": self._html()}, {KEY: verdict}

    def _text(self) -> str:
        found = "" if self.status == "cited" else f", computed {shown(self.computed)}"
        line = f"{self.status}: {self.claim.id}: stated {shown(self.claim.value)} {self.claim.unit}{found}"
        return f"{line}\n  {self.why}" if self.why else line

    def _html(self) -> str:
        c, unit = self.claim, "" if self.claim.unit == "1" else f" {escape(self.claim.unit)}"
        found = "" if self.status == "cited" else f"<dt>computed</dt><dd>{escape(shown(self.computed))}{unit}</dd>"
        why = f"<p>{escape(self.why)}</p>" if self.why else ""
        return (
            f'<div class="claim claim-{self.status}" id="{anchor(c.id)}"><p><b>{self.status}</b> {escape(c.says)}</p>'
            f"<dl><dt>stated</dt><dd>{escape(shown(c.value))}{unit}</dd>{found}</dl>{why}"
            f"<p><small><code>{c.id}</code>, {escape(c.source)}</small></p></div>"
        )


def ledger(path: Path = BOOK / "claims.yml") -> dict[str, Claim]:
    """Claims by id, in order. Raises LedgerError for a row that isn't whole, OSError without the file."""
    claims: dict[str, Claim] = {}
    for row in yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader):
        row = {**row, "value": None if row.get("value") == "null" else row.get("value")}
        try:
            claim = Claim(**{"scope": HOW[row["how"]], **row})
        except (KeyError, TypeError) as error:
            raise LedgerError(f"{path.name}: {row.get('id')}: not a whole claim: {error}") from None
        if claim.id in claims:
            raise LedgerError(f"{path.name}: {claim.id} stands twice")
        claims[claim.id] = claim
    return claims


def check(claim_id: str, computed: Any, why: str | None = None, holds: bool | None = None) -> Check:
    """Hold a computed figure (a number, a bool, or a list of them) against the stated one.

    A `trained` claim is of a far larger run: what can be checked is its direction, `holds`, which the cell works
    out; our own figures stand beside the stated ones. Raises LedgerError for an unknown or merely cited claim,
    for a difference without the sentence `why`, for a sentence where there is no difference, and where `holds`
    is missing or doesn't belong.
    """
    claim = _claim(claim_id)
    if claim.how == "cited":
        raise LedgerError(f"{claim_id}: how = cited: expected cite(), it can't be computed here")
    if (claim.how == "trained") != (holds is not None):
        raise LedgerError(f"{claim_id}: how = {claim.how}, holds = {holds}: expected holds for trained claims alone")
    values = [_plain(v) for v in (computed if isinstance(computed, list | tuple) else [computed])]
    status = "verified" if (agrees(claim, values) if holds is None else holds) else "differs"
    shown_values = [v if isinstance(v, bool | int) else float(f"{float(v):.6g}") for v in values]
    found = Check(claim, status, shown_values if isinstance(claim.value, list) else shown_values[0], why)
    if (status == "differs") != bool(why):
        raise LedgerError(f"{found._text()}\nexpected {'a sentence why' if not why else 'no sentence: it agrees'}")
    return found


def cite(claim_id: str) -> Check:
    """Show a figure that can't be checked here, with its source. Raises LedgerError for one that can be."""
    claim = _claim(claim_id)
    if claim.how != "cited":
        raise LedgerError(f"{claim_id}: how = {claim.how}: expected check(), it can be checked here")
    return Check(claim, "cited")


def agrees(claim: Claim, values: list) -> bool:
    """Whether the figures meet the claim within its tolerance; a claim without a figure wants True."""
    stated = claim.value if isinstance(claim.value, list) else [claim.value]
    return len(stated) == len(values) and all(_agrees(s, v, claim.tol) for s, v in zip(stated, values, strict=True))


def _agrees(stated: str | None, value: bool | int | float | Fraction, tol: str) -> bool:
    if stated in (None, "true", "false"):
        return value is (stated != "false")
    if isinstance(value, bool) or not isfinite(value):
        return False
    target, exact = Decimal(stated), Fraction(value)
    if tol == "exact":  # a float can only be the one nearest to the stated decimal
        return value == float(target) if isinstance(value, float) else exact == Fraction(target)
    if tol == "bound":
        return exact <= Fraction(target)
    if tol == "printed":  # equal after rounding to the digits that were printed
        number = DIGITS.divide(Decimal(exact.numerator), Decimal(exact.denominator))
        return number.quantize(Decimal((0, (1,), target.as_tuple().exponent)), context=DIGITS) == target
    return abs(exact - Fraction(target)) <= Fraction(tol) * abs(Fraction(target))


def _plain(value: Any) -> bool | int | float | Fraction:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, bool | int | float | Fraction):
        raise LedgerError(f"computed = {value!r:.80}: expected a number or a bool, or a list of them")
    return value


def _claim(claim_id: str) -> Claim:
    claims = ledger()
    if claim_id not in claims:
        raise LedgerError(f"no claim {claim_id!r} in the ledger")
    return claims[claim_id]


def shown(value: Any) -> str:
    """A figure as text: thousands separated, lists joined, a bare claim as 'holds'."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if value is None or isinstance(value, bool):
        return {None: "holds", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return f"{int(value):,}" if value.isdigit() else value
    return f"{value:,}"


def number(text: str | list[str] | None) -> Any:
    """A stated figure as JSON has it: int, float, bool, a list of them, or None."""
    if isinstance(text, list):
        return [number(t) for t in text]
    return None if text is None else json.loads(text)


def anchor(claim_id: str) -> str:
    """The id of a claim's card on its page."""
    return "claim-" + claim_id.replace(".", "-")


def results(book: Path = BOOK) -> list[dict[str, Any]]:
    """Every claim with what the executed notebooks in `book` say of it.

    Keys: id, chapter, how, says, stated, unit, computed, status, why, cell, scope, source. Raises
    LedgerError where two cells check one claim, or a cell checks one that the ledger lacks.
    """
    claims = ledger(book / "claims.yml")
    found: dict[str, tuple[dict, str]] = {}
    for path in sorted(book.glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", ()):
                if verdict := output.get("metadata", {}).get(KEY):
                    name = verdict["id"]
                    if name not in claims or name in found:
                        raise LedgerError(f"{path.name}: {name} is {'checked twice' if name in found else 'unknown'}")
                    found[name] = verdict, f"{book.name}/{path.stem}.html#{anchor(name)}"
    rows = []
    for c in claims.values():
        verdict, cell = found.get(c.id, ({"status": "pending", "computed": None, "why": None}, None))
        rows.append(
            {
                "id": c.id,
                "chapter": c.chapter,
                "how": c.how,
                "says": c.says,
                "stated": number(c.value),
                "unit": c.unit,
                "computed": verdict["computed"],
                "status": verdict["status"],
                "why": verdict["why"],
                "cell": cell,
                "scope": c.scope,
                "source": c.source,
            }
        )
    return rows


def score(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Chapter to the number of claims in each status, and a last row `all`."""
    counts = Counter((row["chapter"], row["status"]) for row in rows)
    chapters = list(dict.fromkeys(row["chapter"] for row in rows))
    table = {c: {s: counts[c, s] for s in STATUSES} for c in chapters}
    return table | {"all": {s: sum(table[c][s] for c in chapters) for s in STATUSES}}


def main(arguments: list[str] | None = None) -> int:
    """The command: the score and the differences, or every claim as JSON."""
    parser = argparse.ArgumentParser("dsv41_edu.claims", description="The score of the claims ledger.")
    parser.add_argument("--json", action="store_true", help="print a list with every claim and its status")
    rows = results()
    if parser.parse_args(arguments).json:
        print(json.dumps(rows, indent=1))
        return 0
    print("".join(f"{name:>12}" for name in ("", *STATUSES)))
    for chapter, counts in score(rows).items():
        print(f"{chapter:>12}" + "".join(f"{counts[s]:12}" for s in STATUSES))
    for row in rows:
        if row["status"] == "differs":
            print(f"\n{row['id']}: stated {shown(row['stated'])}, computed {shown(row['computed'])}\n  {row['why']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
