"""The miniature's training in small: it learns, goes on where it was stopped, and ships what it says."""

import json
from dataclasses import replace

import pytest
import torch

from dsv41_edu import checkpoint
from dsv41_edu.experiments import mini, text
from dsv41_edu.experiments.mini import Setup, Training, batch, bits_per_byte, heldout, miniature

SMALL = Setup(steps=6, batch=2, context=24, warm_up=2)


def trained(steps: int, training: Training | None = None) -> Training:
    training = training or Training(SMALL, miniature())
    while training.step < steps:
        training.advance()
    return training


def test_stopped_and_started_again_it_is_the_same(tmp_path):
    whole, begun = trained(6), trained(3)  # the last step is on rounded weights
    begun.save(tmp_path / "state")
    again = Training(SMALL, miniature())
    again.load(tmp_path / "state")
    trained(6, again)
    assert all(torch.equal(t, again.tensors()[name]) for name, t in whole.tensors().items())
    assert again.curves == whole.curves
    assert whole.curves[-1]["loss"] < whole.curves[0]["loss"]


def test_another_setup_s_state_is_refused(tmp_path):
    trained(1).save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"state of .* expected"):
        Training(replace(SMALL, seed=1), miniature()).load(tmp_path / "state")


def test_it_ends_in_a_checkpoint_and_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(mini, "WEIGHTS", tmp_path / "weights")
    monkeypatch.setattr(mini, "CURVES", tmp_path / "mini.json")
    monkeypatch.setattr(mini, "heldout", lambda context, rows=None: heldout(context, 4))
    training = trained(6)
    mini.finish(training)
    result = json.loads((tmp_path / "mini.json").read_text())
    assert result["tokens"] == 6 * 2 * 24
    assert len(result["curves"]) == 6
    assert abs(result["bits_per_byte"]["trained"] - result["bits_per_byte"]["as stored"]) < 0.1
    model = checkpoint.load(tmp_path / "weights", dtype=torch.float32)
    assert model.token_map is not None
    ids = text.tokens("heldout")[:20].unsqueeze(0)
    assert model(ids).isfinite().all()


def test_batches_are_places_of_the_training_text():
    rows = batch(SMALL, 3)
    assert rows.shape == (2, 25)
    assert torch.equal(rows, batch(SMALL, 3))
    assert not torch.equal(rows, batch(SMALL, 4))
    every = text.tokens("train")
    at = (every.unfold(0, 25, 1) == rows[0]).all(1)
    assert at.any()


def test_the_held_out_text_is_read_once():
    rows = torch.cat(heldout(256))
    ids = text.tokens("heldout")
    assert torch.equal(rows[:, :-1].flatten(), ids[: rows[:, :-1].numel()])
    assert torch.equal(rows[:, 1:].flatten(), ids[1 : rows[:, :-1].numel() + 1])
    few = torch.cat(heldout(256, 5))
    assert torch.equal(few[[0, -1]], rows[[0, -1]])
    assert len(few) == 5
    assert all(len(part) <= 16 for part in heldout(256))


def test_bits():
    nats = 2.0
    whole = sum(len(c.encode()) for c in text.chapters("heldout"))
    assert bits_per_byte(nats) == pytest.approx(nats * len(text.tokens("heldout")) / whole / 0.6931471805599453)
