"""The drafter's training in small: a block's loss is that of drafting for real, and it ends in a checkpoint."""

import json
from dataclasses import replace

import pytest
import torch

from dsv41_edu import checkpoint
from dsv41_edu.dspark.losses import dspark_loss
from dsv41_edu.experiments import mini, mini_drafter, text
from dsv41_edu.experiments.mini_drafter import SHORT, Trial, block_loss, calibration, lessons, train, trial
from dsv41_edu.model import Transformer
from dsv41_edu.training import initialise

SMALL = replace(SHORT, steps=4, lessons=16, context=48, blocks=6, warm_up=2, as_stored=0.5)


@pytest.fixture(scope="module")
def model():
    backbone = mini.miniature()
    model = Transformer(backbone.config, backbone.token_map)
    initialise(model, 0)
    return model.eval()


@pytest.fixture(scope="module")
def given(model):
    return lessons(model, mini.in_rows("train", SMALL.context, SMALL.lessons))


@pytest.mark.parametrize("t", [0, 3, 31, 43])
def test_a_block_s_loss_is_that_of_drafting_with_a_cache(model, given, t):
    """Also before the ring is full, and after it has wrapped around."""
    c, ids = model.config, given.ids[:2]
    g, row = c.dspark_block_size, torch.tensor([0, 1])
    found = block_loss(model, given, row, torch.tensor([t, t]))
    with torch.no_grad():
        cache = model.cache(2, 60)
        cache.commit(model.run(ids[:, : t + 1], cache, features=True).chunk, torch.tensor([t + 1, t + 1]))
        draft, y = model.draft(ids[:, t + 1], cache), ids[:, t + 1 : t + 1 + g]
        heads = model.mtp[-1].markov_head, model.mtp[-1].confidence_head
        logits = draft.base + heads[0](y)  # as if the text's own tokens had been drawn
        confidence = heads[1](draft.hidden, heads[0].embed(y))
        target = model.logits(model.run(y, cache).hidden)
        expected = dspark_loss(logits, target, ids[:, t + 2 : t + 2 + g], confidence, torch.ones(2, g))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_the_other_heads_learn_with_their_own_weights(kind):
    model = mini_drafter.with_drafter(kind)
    train(model, lessons(model, mini.in_rows("train", SMALL.context, SMALL.lessons)), SMALL, kind)
    initialise(again := Transformer(model.config).mtp, SMALL.seed)
    first = dict(again.named_parameters())
    for name in ("gate_proj", "joint_proj"):
        moved = [not torch.equal(p, first[n]) for n, p in model.mtp.named_parameters() if name in n]
        assert moved == [True, True] * (name == {"gated": "gate_proj", "rnn": "joint_proj"}[kind])


def test_the_backbone_stays_and_each_variant_trains_its_own(model, given):
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for variant, untouched in (
        ("parallel", ("markov_head.head", "confidence")),
        ("markov", ("confidence",)),
        ("confidence", ()),
    ):
        curves = train(model, given, SMALL, variant)
        assert len(curves) == SMALL.steps
        after = model.state_dict()
        assert all(torch.equal(t, before[name]) for name, t in after.items() if not name.startswith("mtp."))
        initialise(again := Transformer(model.config).mtp, SMALL.seed)
        first = again.state_dict()
        if variant == "parallel":
            first["1.markov_head.head.weight"].zero_()
        for name in ("1.markov_head.head.weight", "1.confidence_head.proj.weight", "0.main_proj.weight"):
            still = any(part in name for part in untouched)
            assert torch.equal(after[f"mtp.{name}"], first[name]) == still, (variant, name)


def test_what_a_trial_counts(model):
    ids = torch.cat(mini.in_rows("heldout", 256, 4))
    found = trial(model, ids, (20, 40, 41), 0.0)
    assert found.accepted.shape == (12,)
    assert found.confidence.shape == (12, model.config.dspark_block_size)
    again = trial(model, ids[1:2], (40,), 0.0)
    assert found.accepted[5] == again.accepted[0]
    torch.testing.assert_close(found.confidence[5], again.confidence[0], atol=1e-4, rtol=1e-4)
    one = Trial(torch.tensor([0, 2, 3]), torch.zeros(3, 3))
    assert one.stood().tolist() == [[False] * 3, [True, True, False], [True] * 3]


def test_calibration_by_hand():
    survival = torch.tensor([[0.9, 0.5], [0.9, 0.1]], dtype=torch.float64)
    found = calibration(survival, torch.tensor([[True, True], [False, False]]))
    assert found["errors"] == pytest.approx([0.4, (0.5 + 0.1) / 2])
    assert [(b["predicted"], b["observed"], b["count"]) for b in found["bins"]] == [
        (0.1, 0, 1),
        (0.5, 1, 1),
        (0.9, 0.5, 2),
    ]


def test_it_is_shipped_beside_the_miniature(model, monkeypatch, tmp_path):
    shipped = mini.miniature()
    initialise(shipped, 0)
    checkpoint.save(shipped, tmp_path / "mini", tokenizer=text.tokenizer())
    monkeypatch.setattr(mini_drafter, "WEIGHTS", tmp_path / "mini")
    monkeypatch.setattr(mini_drafter, "TRAINED", tmp_path / "trained.json")
    monkeypatch.setattr(mini_drafter, "Setup", lambda: replace(SMALL, threads=1))
    monkeypatch.setattr(mini_drafter, "measured", lambda model, **_: {"accepted": 1.0, "greedy_accepted": 2.0})
    mini_drafter.main()
    found, both = (
        json.loads((tmp_path / "trained.json").read_text()),
        checkpoint.load(tmp_path / "mini", dtype=torch.float32),
    )
    assert found["parameters"] == sum(p.numel() for p in both.mtp.parameters())
    assert found["accepted"] == 1
    again = mini_drafter.with_drafter()
    assert all(
        torch.equal(t, both.state_dict()[n]) for n, t in again.state_dict().items() if not n.startswith("mtp.")
    )


def test_the_shipped_weights_are_those_of_the_stored_result():
    stored = json.loads(mini_drafter.TRAINED.read_text())
    assert mini_drafter.digest(mini.WEIGHTS) == stored["sha256"]


def test_the_shipped_drafter_is_as_good_after_a_long_text():
    """Positions that are off, or that begin anew, would cost it more and more drafts."""
    shipped = checkpoint.load(mini.WEIGHTS, dtype=torch.float32)
    ids = torch.cat(mini.in_rows("heldout", 256, 48))
    early, late = (trial(shipped, ids, starts, 1.0).accepted.double() for starts in ((24, 48, 72), (200, 220, 240)))
    error = (early.var() / len(early) + late.var() / len(late)).sqrt()
    assert late.mean() > early.mean() - 3 * error
    assert late.mean() > 0.8


def test_the_result(monkeypatch, tmp_path):
    monkeypatch.setattr(mini_drafter, "RESULT", tmp_path / "heads.json")
    results = [
        {
            "variant": variant,
            "blocks": 7,
            "accepted": seed,
            "greedy_accepted": 2 * seed,
            "acceptance": [0.5, 0.1 * seed],
        }
        for variant, seed in mini_drafter.jobs()
    ]
    mini_drafter.write(results)
    found = json.loads((tmp_path / "heads.json").read_text())
    assert list(found["variants"]) == sorted(mini_drafter.VARIANTS)
    one = {"accepted": [2.0, 2.0], "greedy_accepted": [4.0, 4.0], "acceptance": [[0.5, 0.0], [0.2, 0.2]]}
    assert found["variants"]["markov"] == one
    assert (found["seeds"], found["blocks"]) == (3, 7)
