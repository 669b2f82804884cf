"""Totals and actives are equal to the parameter; the fit is that of an exact power; the stored file is whole."""

import dataclasses
import json

import pytest
import torch

from dsv41_edu.experiments import engram_budget, text
from dsv41_edu.experiments.engram_budget import (
    ARMS,
    EVERY,
    SEEDS,
    SETUP,
    SPARE,
    agrees,
    budget,
    fit,
    fits,
    run,
    setup_of,
    slice_run,
    summary,
)
from dsv41_edu.experiments.engram_lm import EngramLM, Setup, train

TINY = Setup(hidden_size=32, context=16, batch=2, steps=11, warm_up=2, row_width=8)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def stored():
    return engram_budget.read()


def numbers(model):
    """Parameters of the model: all, those of an expert and its router row, those of the table."""
    gate, experts = model.blocks[0].moe.gate, model.blocks[0].moe.experts
    expert = sum(p[0].numel() for p in (gate.weight, experts.w13, experts.w2))
    table = model.memory.table.weight.numel() if model.memory else 0
    return sum(p.numel() for p in model.parameters()), expert, table


@pytest.mark.parametrize("base", [SETUP, TINY])
def test_budgets_add_up_exactly(base):
    found = []
    for share in ARMS["share"]:
        setup = setup_of("share", share, base)
        model = EngramLM(setup)
        total, expert, table = numbers(model)
        token_reads = model.memory.rows(torch.zeros(1, 1, dtype=torch.int64)).numel() if model.memory else 0
        unread = table - token_reads * setup.row_width
        sparse = (setup.n_experts - setup.top_k) * setup.layers * expert + max(unread, 0)
        found.append((total, total - sparse))
        assert max(unread, 0) == pytest.approx(share * sparse, abs=1e-6)
        made = budget(setup)
        assert (made["total"], made["active"], made["table"]) == (*found[-1], table)
        assert made["rows_unread"] <= 0.01 * setup.table_rows
    assert len(set(found)) == 1


def test_only_the_table_grows_in_the_other_arms():
    setups = [setup_of("rows", rows) for rows in ARMS["rows"]]
    assert [s.table_rows for s in setups] == list(ARMS["rows"])
    assert len({dataclasses.replace(s, table_rows=0) for s in setups}) == 1
    sizes = [budget(s) for s in setups]
    assert len({s["active"] for s in sizes}) == len({s["total"] - s["table"] for s in sizes}) == 1
    assert ARMS["rows"][-1] >= 100 * ARMS["rows"][0]


def test_refuses_what_is_no_arm():
    with pytest.raises(ValueError, match="kind = 'shares': expected one of share, rows"):
        setup_of("shares", 0.5)
    for share in (0.26, -0.025, 1.025):
        with pytest.raises(ValueError, match=f"share = {share}: expected 0 to 1 in steps of 0.025"):
            setup_of("share", share)
    assert setup_of("share", 1.0).n_experts == SETUP.top_k == setup_of("share", 0.0).n_experts - SPARE


def test_fit_of_an_exact_power():
    rows = [10, 100, 1000]
    exact = fit(rows, [5 * r**-0.02 for r in rows])
    assert exact == {"scale": 5.0, "exponent": -0.02, "residual": 0.0, "r2": 1.0}
    bent = fit(rows, [4.0, 3.0, 4.0])
    assert bent["exponent"] == 0
    assert bent["residual"] == pytest.approx(0.4725, abs=1e-4)  # the line is at 48^(1/3) = 3.634
    assert bent["r2"] == 0


def runs_of(loss):
    return [
        {"kind": kind, "value": v, "seed": s, "heldout_loss": loss(at, s)}
        for kind, values in ARMS.items()
        for at, v in enumerate(values)
        for s in SEEDS
    ]


def test_differences_are_taken_seed_by_seed():
    rows = summary(runs_of(lambda at, seed: 5 + seed - 0.1 * at))
    assert [(r["kind"], r["value"]) for r in rows] == [(k, v) for k, values in ARMS.items() for v in values]
    assert rows[0]["minus_first"] == [0, 0]
    assert rows[2]["heldout_loss"] == [5.8, 2.0]
    assert rows[2]["minus_first"] == [-0.2, 0]


def test_fits_of_each_seed_and_of_the_mean():
    found = fits(runs_of(lambda at, seed: 5 * ARMS["rows"][min(at, 4)] ** (-0.02 - 0.01 * seed)))
    assert found["exponent"] == [-0.03, 0.02]
    assert -0.04 < found["mean"]["exponent"] < -0.02


def test_a_small_experiment_from_runs_to_file(tmp_path, monkeypatch):
    splits = {"train": text.tokens("train"), "heldout": text.tokens("heldout")[:3000]}
    monkeypatch.setattr(text, "tokens", splits.get)
    monkeypatch.setattr(engram_budget, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(engram_budget, "ARMS", {"share": (0.0, 0.25), "rows": (100, 500)})
    monkeypatch.setattr(engram_budget, "SEEDS", (0, 1))
    runs = [run(*job, TINY) for job in engram_budget.jobs()]
    assert len(runs) == 8
    engram_budget.write(runs)
    assert engram_budget.read() == json.loads(json.dumps(engram_budget.document(runs)))
    assert {**run("share", 0.25, 1, TINY), "duration_s": 0} == {**runs[3], "duration_s": 0}
    assert len({r["heldout_loss"] for r in runs}) == 8
    setup = setup_of("share", 0.25, TINY)
    assert runs[3]["curve"][0] == round(next(train(EngramLM(setup, 1), setup, 1)), 4)
    assert all(len(r["curve"]) == 2 for r in runs)


def test_stored_file_is_whole(stored):
    assert [(r["kind"], r["value"], r["seed"]) for r in stored["runs"]] == engram_budget.jobs()
    assert stored == json.loads(json.dumps({**engram_budget.document(stored["runs"]), "setup": stored["setup"]}))
    fields = json.loads(json.dumps(dataclasses.asdict(SETUP)))
    assert stored["setup"] == {**stored["setup"], **fields, "spare_experts": SPARE, "curve_every": EVERY}
    assert engram_budget.RESULT.stat().st_size < 200_000


def test_stored_curve_begins_as_a_live_one(stored):
    kept = next(r for r in stored["runs"] if (r["kind"], r["value"], r["seed"]) == ("share", 0.25, 0))
    piece = slice_run(steps=11)
    assert len(piece) == 2
    assert agrees(piece, kept)
    assert not agrees([piece[0], piece[1] + 0.03], kept)
