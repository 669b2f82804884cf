"""Balanced totals can hide a modality's imbalance; one bias for each modality removes it."""

import dataclasses
import json

import pytest
import torch

from dsv41_edu.experiments import modality
from dsv41_edu.experiments.modality import Simulation, measures, run, simulate

SMALL = Simulation(tokens=2000, steps=200, speed=0.01)


def without_time(run):
    return {key: value for key, value in run.items() if key != "duration_s"}


@pytest.mark.parametrize("seed", range(3))
def test_one_bias_balances_the_total_alone_and_two_balance_all(seed):
    one, two = (run(n, dataclasses.replace(SMALL, seed=seed))["end_maxvio"] for n in (1, 2))
    assert one["total"] < 0.1
    assert one["image"] > 1
    assert one["image"] > 5 * one["text"] > 5 * one["total"]
    assert max(two.values()) < 0.15


def test_both_start_from_the_same_choices():
    one, two = (simulate(dataclasses.replace(SMALL, steps=2), n) for n in (1, 2))
    assert torch.equal(one[0], two[0])
    assert not torch.equal(one[1], two[1])
    assert one[0].sum(-1).tolist() == [1600 * 2, 400 * 2]


def test_without_a_move_nothing_is_balanced():
    end = run(2, dataclasses.replace(SMALL, steps=20, speed=0.0))["end_maxvio"]
    assert min(end.values()) > 1


def test_measures_of_counts_by_hand():
    counts = torch.tensor([[[4, 0], [0, 2]]]).expand(10, 2, 2)
    found = measures(counts)
    assert found["end_maxvio"] == {"total": pytest.approx(1 / 3, abs=1e-4), "text": 1.0, "image": 1.0}
    assert found["end_load"] == {"total": [1.3333, 0.6667], "text": [2.0, 0.0], "image": [0.0, 2.0]}
    assert found["maxvio"]["text"] == [1.0, 1.0]


def test_refuses_three_biases():
    with pytest.raises(ValueError, match="expected 1, for all tokens, or 2"):
        simulate(SMALL, 3)


def test_stored_file_is_what_the_simulation_gives():
    stored = modality.read()
    assert stored["setup"]["seed"] == 0
    assert [r["biases"] for r in stored["runs"]] == [1, 2]
    for r in stored["runs"]:
        fresh = run(r["biases"], dataclasses.replace(Simulation(), steps=20))
        for name in ("total", "text", "image"):
            assert fresh["maxvio"][name] == pytest.approx(r["maxvio"][name][:4], abs=0.02)


def test_result_file_holds_the_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(modality, "RESULT", tmp_path / "result.json")
    runs = [run(*job, dataclasses.replace(SMALL, steps=10)) for job in modality.jobs()]
    modality.write(runs)
    assert modality.read() == json.loads(json.dumps(modality.document(runs)))
    assert without_time(runs[0]) == without_time(run(1, dataclasses.replace(SMALL, steps=10)))
