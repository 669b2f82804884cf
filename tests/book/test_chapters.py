"""The chapters as programs: their claims hang on the config, and their words hold no figure of their own."""

import ast
import re
import sys
from pathlib import Path

import pytest

from dsv41_edu import claims, config
from dsv41_edu.accounting import grand_total
from dsv41_edu.generations import plan

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "book" / "_tools"))
import notebooks  # noqa: E402

WRITTEN = [p.stem for p in sorted((ROOT / "book").glob("*.py")) if p.stem not in notebooks.LAST]


def verdicts(chapter: str, monkeypatch, **changes) -> dict[str, bool]:
    """Run a chapter's cells with another config until each of its claims was checked; which of them agree."""
    found: dict[str, bool] = {}
    real = config.preset("v41_flash").replace(**changes)

    def check(claim_id, computed, why=None):
        claim = claims.ledger()[claim_id]
        values = [claims._plain(v) for v in (computed if isinstance(computed, list) else [computed])]
        found[claim_id] = claims.agrees(claim, values)
        return claims.Check(claim, "verified")

    monkeypatch.setattr(config, "preset", lambda name: real if name == "v41_flash" else config.preset("mini"))
    monkeypatch.setattr(claims, "check", check)
    owned = {c.id for c in claims.ledger().values() if c.chapter == chapter and c.how != "cited"}
    page: dict = {}
    for cell in notebooks.from_source(ROOT / "book" / f"{chapter}.py").cells:
        if cell.cell_type == "code" and not cell.source.startswith("draw.") and owned - set(found):
            exec(cell.source, page)
    assert set(found) == owned
    return found


CHANGES = {
    "nothing": ({}, set()),
    "wider experts": (
        {"moe_intermediate_size": 2336},
        "expert_params expert_params_m expert_rel_width token_width token_rel_width owned_rel_width routed_total "
        "backbone decode_expert_active experts_gib",
    ),
    "fewer experts": ({"n_routed_experts": 380}, "owned_rel_width routed_total backbone experts_gib"),
    "one expert more per token": (
        {"num_experts_per_tok": 7},
        "token_width token_rel_width decode_expert_active decode_active prefill_active",
    ),
    "a larger vocabulary": ({"vocab_size": 140_000}, "embedding remainder"),
    "a smaller table": (
        {"engram_num_embeddings": (384_006_168, 384_000_000 + 2_000_000)},
        "engram_params engram_gib",
    ),
    "no shared expert": (
        {"n_shared_experts": 0},
        "shared_total token_width token_rel_width backbone decode_expert_active decode_active prefill_active",
    ),
    "wider low-rank queries": (
        {"q_lora_rank": 2560},
        "remainder backbone decode_other_active decode_active prefill_active",
    ),
    "half the upper half's sources": (
        {
            "kv_source_layer_ids": (2, 8, 14),
            "index_source_layer_ids": (2, 8, 14, 24, 28, 32, 36),
            "candidate_source_layer_id": 14,
            "compress_ratios": (0, 0) + (2,) * 38 + (0, 0, 0),
        },
        "prefill_layers prefill_active",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changing_a_field_fails_the_claims_that_hang_on_it(name, monkeypatch):
    changes, expected = CHANGES[name]
    found = verdicts("accounting", monkeypatch, **changes)
    failed = {claim.removeprefix("acc.") for claim, agrees in found.items() if not agrees} - {"checkpoint_gib"}
    assert failed == set(expected.split() if expected else ())


def test_every_claim_of_the_chapter_fails_for_some_change():
    """A check that no field can move would be no check."""
    moved = {claim for _, expected in CHANGES.values() for claim in (expected.split() if expected else ())}
    owned = {c.id.removeprefix("acc.") for c in claims.ledger().values() if c.chapter == "accounting"}
    assert owned - moved == {"checkpoint_gib"}


@pytest.mark.parametrize("chapter", WRITTEN)
def test_every_claim_of_a_written_chapter_has_its_status(chapter):
    """Checked by exactly one cell (two are refused by `results`), or shown as cited."""
    rows = [row for row in claims.results() if row["chapter"] == chapter]
    assert rows
    assert [row["id"] for row in rows if row["status"] == "pending"] == []
    assert all(row["cell"].startswith(f"book/{chapter}.html#") for row in rows)


def test_no_pair_of_source_and_notebook_is_stale():
    assert notebooks.stale() == []


def test_the_readme_states_what_is_computed():
    whole = grand_total(plan(config.preset("v41_flash")))
    words = " ".join((ROOT / "README.md").read_text().split())
    assert re.findall(r"\d[\d,]{5,}", words) == [f"{n:,}" for n in (whole.parameters, whole.tensors, whole.nbytes)]


@pytest.mark.parametrize("page", [*WRITTEN, *notebooks.LAST])
def test_prose_holds_no_computed_figure(page):
    """A number in the words is glued from a cell. Names (V4.1), layer numbers and format widths are no figures."""
    for cell in notebooks.from_source(ROOT / "book" / f"{page}.py").cells:
        if cell.cell_type == "markdown":
            words = re.sub(r"`[^`]*`|```.*?```|\$[^$]*\$", "", cell.source, flags=re.DOTALL)
            assert not re.findall(r"\d[\d,]{3,}|\d+\.\d+ ?[BMG%]|\d+ ?(?:GiB|MiB|billion|million)", words), (
                cell.source
            )


@pytest.mark.parametrize("page", [*WRITTEN, *notebooks.LAST])
def test_a_page_draws_the_same_each_time(page):
    """Its modules' first weights, too."""
    source = (ROOT / "book" / f"{page}.py").read_text()
    assert "import torch" not in source or "\ntorch.manual_seed(0)" in source


@pytest.mark.parametrize("page", [*WRITTEN, *notebooks.LAST])
def test_cells_are_short_and_outputs_clean(page):
    notebook = notebooks.nbformat.read(ROOT / "book" / f"{page}.ipynb", 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            statements = [n for n in ast.parse(cell.source).body if not isinstance(n, ast.Import | ast.ImportFrom)]
            lines = sum(n.end_lineno - n.lineno + 1 for n in statements)
            assert lines <= 20, cell.source
            for output in cell.outputs:
                assert output.output_type in ("execute_result", "display_data", "stream")
                assert output.get("name") != "stderr"
                assert "0x7f" not in str(output), "an address"
