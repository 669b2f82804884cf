"""The stored file is whole, its summary is that of its runs, and a slice run live agrees with it."""

import json
import statistics
from functools import partial

import pytest
import torch

from dsv41_edu.experiments import balancing
from dsv41_edu.experiments.balancing import ARMS, EVERY, MAP_ROWS, SEEDS, SETUP, agrees, curves, run, slice_run
from dsv41_edu.experiments.small_moe import Setup, Step, evaluate


@pytest.fixture(scope="module")
def stored():
    return balancing.read()


def of(stored, arm, seed):
    return next(r for r in stored["runs"] if (r["arm"], r["seed"]) == (arm, seed))


def test_stored_file_was_made_with_these_settings(stored):
    now = json.loads(json.dumps(balancing.document(stored["runs"])["setup"]))
    assert {**now, "torch": stored["setup"]["torch"]} == stored["setup"]
    assert [(r["arm"], r["seed"]) for r in stored["runs"]] == balancing.jobs()


def test_every_run_is_whole(stored):
    for r in stored["runs"]:
        points = -(-SETUP.steps // EVERY)
        assert len(r["loss"]) == len(r["maxvio_curve"]) == points
        assert len(r["load_map"]) == MAP_ROWS
        for row in r["load_map"]:
            assert len(row) == SETUP.n_experts
            assert sum(row) == pytest.approx(1, abs=1e-3)
        assert 0 <= r["maxvio"] <= SETUP.n_experts / SETUP.top_k - 1
        assert 0 <= r["starved"] <= 1
        assert r["bits_per_byte"] < r["heldout_loss"] < r["loss"][0]


def test_summary_is_that_of_the_runs(stored):
    assert stored["summary"] == balancing.summary(stored["runs"])
    for arm in ARMS:
        mean, spread = stored["summary"][arm]["maxvio"]
        values = [r["maxvio"] for r in stored["runs"] if r["arm"] == arm]
        assert len(values) == len(SEEDS)
        assert mean == pytest.approx(sum(values) / 3, abs=1e-4)
        assert spread == pytest.approx(2 * statistics.stdev(values), abs=1e-4)
    assert stored["summary"]["none"]["loss_minus_none"] == [0, 0]


def test_what_the_chapter_says_of_the_runs(stored):
    """With every seed: without balancing experts starve; the bias ends far nearer to balance."""
    for seed in SEEDS:
        none, free = of(stored, "none", seed), of(stored, "loss-free", seed)
        assert none["maxvio"] > 4 * free["maxvio"]
        assert none["starved"] > 0.1
        assert free["starved"] < 0.05


@pytest.mark.parametrize("arm", ["none", "loss-free"])
def test_a_live_slice_agrees_with_the_stored_file(stored, arm):
    piece = slice_run(arm, 0)
    assert len(piece["loss"]) == 3
    assert agrees(piece, of(stored, arm, 0))


def test_another_seed_or_a_shifted_loss_does_not_agree(stored):
    piece = slice_run("none", 0, steps=11)
    assert not agrees(piece, of(stored, "none", 1))
    shifted = {**piece, "loss": [x + 0.05 for x in piece["loss"]]}
    assert not agrees(shifted, of(stored, "none", 0))


def test_curves_by_hand():
    even, one = torch.tensor([[1, 1], [2, 2]]), torch.tensor([[2, 0], [3, 1]])
    steps = [Step(float(i), one if i == EVERY else even) for i in range(EVERY + 2)]
    assert curves(steps) == {"loss": [0.0, float(EVERY)], "maxvio_curve": [0.0, 0.75]}


def test_a_small_experiment_from_runs_to_file(tmp_path, monkeypatch):
    tiny = Setup(hidden_size=32, context=32, steps=MAP_ROWS + 1)
    monkeypatch.setattr(balancing, "evaluate", partial(evaluate, windows=20))
    monkeypatch.setattr(balancing, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(balancing, "ARMS", {"none": ARMS["none"], "loss-free": ARMS["loss-free"]})
    monkeypatch.setattr(balancing, "SEEDS", (0, 1))
    runs = [run(arm, seed, tiny) for arm, seed in balancing.jobs()]
    balancing.write(runs)
    assert balancing.read() == json.loads(json.dumps(balancing.document(runs)))
    again = run("loss-free", 1, tiny)
    same = [{k: v for k, v in r.items() if k != "duration_s"} for r in (again, runs[-1])]
    assert same[0] == same[1]
