"""The ledger: tolerances, verdicts and their reasons, and the way from a cell's output to the score."""

import ast
import json
from fractions import Fraction
from pathlib import Path

import nbformat
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_edu.claims import (
    BOOK,
    KEY,
    STATUSES,
    Claim,
    LedgerError,
    agrees,
    anchor,
    check,
    cite,
    ledger,
    main,
    number,
    results,
    score,
    shown,
)

ROOT = BOOK.parent


def claim(value, tol, how="computed"):
    return Claim("x.y", "x", "says", value, "1", tol, how, "source", "scope")


@pytest.mark.parametrize(
    ("value", "tol", "computed", "expected"),
    [
        ("35389440", "exact", 35389440, True),
        ("35389440", "exact", 35389441, False),
        ("0.45", "exact", Fraction(9, 20), True),
        ("0.45", "exact", 0.45, True),  # the float nearest to it
        ("0.45", "exact", 0.4500000000000001, False),
        ("552", "printed", 552.366, True),
        ("552", "printed", Fraction(5525, 10) + Fraction(1, 10**30), False),
        ("476", "printed", 475.241, False),
        ("5.40", "printed", 5.404, True),
        ("5.40", "printed", 5.41, False),  # two printed decimals, one of them a zero
        ("5.4", "printed", 5.41, True),
        ("4.3e12", "printed", 4281625192384, True),
        ("4.3e12", "printed", 4.36e12, False),
        ("2.2e-16", "printed", 2.220446e-16, True),
        ("2.2e-16", "printed", 2.3e-16, False),
        ("-0.265", "printed", -0.26512, True),
        ("100.0", "printed", 99.96, True),
        ("1", "bound", 1, True),
        ("1", "bound", Fraction(10**20 + 1, 10**20), False),
        ("0.04", "bound", 0.01, True),
        ("6", "0.1", 6.6, True),
        ("6", "0.1", 6.61, False),
        ("-2", "0.1", -2.19, True),
        ("1.0", "0.1", float("nan"), False),
        ("1.0", "bound", float("-inf"), False),
        ("1", "exact", True, False),
        ("1", "printed", float("inf"), False),
    ],
)
def test_tolerances(value, tol, computed, expected):
    assert agrees(claim(value, tol), [computed]) is expected


def test_statements_want_true_and_lists_want_their_length():
    assert agrees(claim(None, "exact"), [True])
    assert not agrees(claim(None, "exact"), [False])
    assert not agrees(claim(None, "exact"), [1])
    assert agrees(claim(["true", "false"], "exact"), [True, False])
    assert not agrees(claim(["true", "false"], "exact"), [True, True])
    assert agrees(claim(["1", "2"], "exact"), [1, 2])
    assert not agrees(claim(["1", "2"], "exact"), [1])
    assert not agrees(claim(["1", "2"], "exact"), [1, 3])


@settings(derandomize=True, max_examples=200)
@given(st.integers(-(10**9), 10**9), st.integers(0, 6))
def test_printing_then_checking_agrees(n, digits):
    value = n / 997
    assert agrees(claim(f"{value:.{digits}f}", "printed"), [value])


def test_a_difference_needs_a_reason_and_agreement_needs_none():
    assert check("acc.token_width", 16128).status == "verified"
    with pytest.raises(LedgerError, match=r"stated 16,128 channels, computed 16,129\nexpected a sentence why"):
        check("acc.token_width", 16129)
    found = check("acc.token_width", 16129, why="one too many")
    assert (found.status, found.why, found.computed) == ("differs", "one too many", 16129)
    with pytest.raises(LedgerError, match="expected no sentence: it agrees"):
        check("acc.token_width", 16128, why="an excuse")


def test_what_can_not_be_checked_is_cited_and_the_reverse():
    with pytest.raises(LedgerError, match=r"how = cited: expected cite\(\)"):
        check("moe.kernels_per_layer", [15, 11])
    with pytest.raises(LedgerError, match=r"how = computed: expected check\(\)"):
        cite("acc.token_width")
    assert cite("moe.kernels_per_layer").status == "cited"
    with pytest.raises(LedgerError, match=r"no claim 'acc\.nothing'"):
        check("acc.nothing", 1)
    with pytest.raises(LedgerError, match="computed = 'many': expected a number"):
        check("acc.token_width", "many")


def test_a_trained_claim_is_held_by_its_direction():
    found = check("moe.lossfree_maxvio", [3.0, 0.2], holds=True)
    assert (found.status, found.computed) == ("verified", [3.0, 0.2])
    assert check("moe.lossfree_maxvio", [0.2, 3.0], holds=False, why="worse").status == "differs"
    with pytest.raises(LedgerError, match="expected holds for trained claims alone"):
        check("moe.lossfree_maxvio", [0.52, 0.04])
    with pytest.raises(LedgerError, match="expected holds for trained claims alone"):
        check("acc.token_width", 16128, holds=True)


def test_numbers_of_other_libraries_are_taken_as_they_are():
    assert check("acc.token_width", np.int64(16128)).computed == 16128
    assert check("moe.touched_closed", list(np.array([6.0, 45.5, 243.8, 377.2, 384.0]))).status == "verified"
    assert check("acc.routed_total", Fraction(543581798400, 10**9)).computed == 543.582


def test_the_card_holds_both_figures_and_the_verdict():
    data, metadata = check("acc.checkpoint_gib", 475.241, why="a < b")._repr_mimebundle_()
    assert data["text/plain"] == "differs: acc.checkpoint_gib: stated 476 GiB, computed 475.241\n  a < b"
    assert 'id="claim-acc-checkpoint_gib"' in data["text/html"]
    assert "a &lt; b" in data["text/html"]
    assert metadata[KEY] == {"id": "acc.checkpoint_gib", "status": "differs", "computed": 475.241, "why": "a < b"}
    data, _ = cite("moe.kernels_per_layer")._repr_mimebundle_()
    assert data["text/plain"] == "cited: moe.kernels_per_layer: stated 15, 11 kernels"
    assert "computed" not in data["text/html"]


def test_figures_as_text():
    assert [shown(v) for v in (None, True, 1234567, 0.082, "35389440", "4.3e12", ["1", "2.50"], [1000, 2])] == [
        "holds",
        "true",
        "1,234,567",
        "0.082",
        "35,389,440",
        "4.3e12",
        "1, 2.50",
        "1,000, 2",
    ]
    assert number(["1", "2.5", "true"]) == [1, 2.5, True]
    assert number(None) is None


# ---- the ledger's file


def test_the_ledger_is_whole():
    claims = ledger()
    assert len(claims) == 131
    for c in claims.values():
        assert c.how in ("computed", "simulated", "proved", "trained", "cited")
        assert c.chapter in ("accounting", "moe", "mhc", "engram", "dspark", "model")
        assert c.scope.endswith(".")
        assert c.tol in ("exact", "printed", "bound") or 0 < float(c.tol) < 1
        number(c.value)
    assert {c.chapter for c in claims.values() if c.id.startswith("acc.")} == {"accounting"}


def test_broken_ledgers_are_refused(tmp_path):
    path = tmp_path / "claims.yml"
    row = {"id": "a", "chapter": "c", "says": "s", "value": 1, "unit": "1", "tol": "exact", "how": "computed"}
    path.write_text(yaml.dump([row]))
    with pytest.raises(LedgerError, match="a: not a whole claim"):
        ledger(path)
    path.write_text(yaml.dump([{**row, "source": "x", "how": "guessed"}]))
    with pytest.raises(LedgerError, match="not a whole claim"):
        ledger(path)
    path.write_text(yaml.dump([{**row, "source": "x"}] * 2))
    with pytest.raises(LedgerError, match="a stands twice"):
        ledger(path)


# ---- from the pages to the score


def write_book(tmp_path: Path, *pages: list):
    """A book with the real ledger and pages whose cells gave these verdicts."""
    (tmp_path / "claims.yml").write_text((BOOK / "claims.yml").read_text())
    for i, verdicts in enumerate(pages):
        notebook = nbformat.v4.new_notebook()
        for verdict in verdicts:
            data, metadata = verdict._repr_mimebundle_()
            output = nbformat.v4.new_output("execute_result", data, metadata=metadata, execution_count=1)
            notebook.cells.append(nbformat.v4.new_code_cell("check()", outputs=[output]))
        notebook.cells.append(nbformat.v4.new_markdown_cell("words"))
        nbformat.write(notebook, tmp_path / f"page{i}.ipynb")
    return tmp_path


def test_statuses_come_from_outputs_alone(tmp_path):
    verified, differs = check("acc.token_width", 16128), check("acc.checkpoint_gib", 475.2, why="so")
    book = write_book(tmp_path, [verified, differs], [cite("moe.kernels_per_layer")])
    rows = {r["id"]: r for r in results(book)}
    assert len(rows) == 131
    assert rows["acc.token_width"]["status"] == "verified"
    assert rows["acc.token_width"]["cell"] == f"{tmp_path.name}/page0.html#claim-acc-token_width"
    assert (rows["acc.checkpoint_gib"]["stated"], rows["acc.checkpoint_gib"]["computed"]) == (476, 475.2)
    assert rows["acc.checkpoint_gib"]["why"] == "so"
    assert rows["moe.kernels_per_layer"]["status"] == "cited"
    assert rows["acc.backbone"]["status"] == "pending"
    assert rows["acc.backbone"]["cell"] is None
    counts = score(list(rows.values()))
    assert counts["accounting"] == {"verified": 1, "differs": 1, "cited": 0, "pending": 18}
    assert sum(counts["all"].values()) == 131
    assert list(counts) == ["accounting", "moe", "mhc", "engram", "dspark", "model", "all"]


def test_a_claim_checked_twice_or_unknown_is_an_error(tmp_path):
    twice = check("acc.token_width", 16128)
    with pytest.raises(LedgerError, match=r"acc\.token_width is checked twice"):
        results(write_book(tmp_path, [twice], [twice]))
    stranger = twice._replace(claim=twice.claim._replace(id="acc.stranger"))
    with pytest.raises(LedgerError, match=r"acc\.stranger is unknown"):
        results(write_book(tmp_path, [stranger], []))


def test_command(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == list(STATUSES)
    assert "acc.checkpoint_gib: stated 476, computed 475.241" in out
    assert main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    wanted = {"id", "chapter", "how", "stated", "computed", "status", "cell", "scope"}
    assert all(wanted <= set(row) for row in rows)
    assert rows[0]["stated"] == rows[0]["computed"] == 35389440
    assert rows[0]["cell"].endswith(anchor(rows[0]["id"]))


def test_no_computing_code_reads_the_ledger():
    """Only the ledger's own module and its table on a page know that there are stated values."""
    allowed = {"dsv41_edu/claims.py", "dsv41_edu/figures/ledger.py"}
    for path in [*ROOT.glob("dsv41_edu/**/*.py"), *ROOT.glob("kernels/**/*.py")]:
        names = {alias.name for node in ast.walk(ast.parse(path.read_text())) for alias in getattr(node, "names", ())}
        modules = {getattr(node, "module", None) for node in ast.walk(ast.parse(path.read_text()))}
        reads = "dsv41_edu.claims" in names | modules or "claims.yml" in path.read_text()
        assert not reads or path.relative_to(ROOT).as_posix() in allowed, path
