"""The small model is causal and seeded; a training step changes what its balancing should, and nothing else."""

import dataclasses
from itertools import islice

import pytest
import torch
from torch.nn import functional as F

from dsv41_edu.experiments import text
from dsv41_edu.experiments.small_moe import Balancing, Setup, SmallMoE, Watch, batches, evaluate, rate, train

TINY = Setup(hidden_size=32, context=16, batch=4, steps=20, warm_up=4)
ARMS = {"none": Balancing(), "loss": Balancing(alpha=0.1), "bias": Balancing(speed=(0.01, 0.001))}


def test_weights_and_batches_depend_on_the_seed_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (SmallMoE(TINY, seed) for seed in (1, 1, 2))
    x, y = next(batches(TINY, 1))
    assert torch.equal(state, torch.get_rng_state())  # the global generator is left alone
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.weight, other.head.weight)
    assert torch.equal(x, next(batches(TINY, 1))[0])
    assert not torch.equal(x, next(batches(TINY, 2))[0])
    assert x.shape == y.shape == (4, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_first_weights():
    model = SmallMoE(Setup(), 0)
    gate = model.blocks[0].moe.gate
    assert gate.weight.std().item() == pytest.approx(64**-0.5, rel=0.1)
    assert not gate.bias.any()
    assert (model.norm.weight == 1).all()


def test_a_token_never_reaches_an_earlier_position():
    model = SmallMoE(TINY, 0)
    ids = next(batches(TINY, 0))[0]
    before = model(ids)
    for at in (0, 7, 15):
        changed = ids.clone()
        changed[:, at] = (changed[:, at] + 1) % text.VOCAB_SIZE
        after = model(changed)
        torch.testing.assert_close(after[:, :at], before[:, :at], rtol=1e-5, atol=1e-5)
        assert not torch.isclose(after[:, at:], before[:, at:]).all(-1).any()


def test_watch_counts_every_choice():
    model = SmallMoE(TINY, 0)
    watch = Watch(model)
    model(next(batches(TINY, 0))[0])
    counts = watch.counts()
    assert counts.shape == (2, 16)
    assert (counts.sum(-1) == 4 * 16 * 2).all()


@pytest.mark.parametrize("arm", ARMS)
def test_a_step_moves_the_bias_in_the_loss_free_arm_alone(arm):
    model = SmallMoE(TINY, 0)
    weight = model.blocks[0].moe.gate.weight.detach().clone()
    step = next(train(model, TINY, ARMS[arm], 0))
    for block, counts in zip(model.blocks, step.counts, strict=True):
        moved = torch.sign(counts.float().mean() - counts) * (0.01 if arm == "bias" else 0)
        torch.testing.assert_close(block.moe.gate.bias, moved)
        assert not block.moe.gate.bias.requires_grad
        assert not block.moe.gate.bias_vl.any()
    assert not torch.equal(weight, model.blocks[0].moe.gate.weight)


def test_arms_start_from_the_same_loss_and_part():
    runs = {arm: list(islice(train(SmallMoE(TINY, 0), TINY, ARMS[arm], 0), 3)) for arm in ARMS}
    assert len({steps[0].loss for steps in runs.values()}) == 1
    assert len({steps[2].loss for steps in runs.values()}) == 3


def test_the_balance_loss_pushes_on_the_routers():
    model = SmallMoE(TINY, 0)
    watch = Watch(model)
    model(next(batches(TINY, 0))[0])
    watch.balance_loss(0.1).backward()
    assert all(block.moe.gate.weight.grad.abs().max() > 0 for block in model.blocks)
    assert model.head.weight.grad is None


def test_two_runs_are_equal_and_the_loss_falls():
    first, again = ([s.loss for s in train(SmallMoE(TINY, 0), TINY, ARMS["bias"], 0)] for _ in range(2))
    assert first == again
    assert len(first) == TINY.steps
    assert first[-1] < first[0] - 0.5


def test_learning_rate():
    assert rate(TINY, 0) == pytest.approx(3e-3 / 4)
    assert rate(TINY, 4) == pytest.approx(3e-3)
    assert rate(TINY, 20) == pytest.approx(0.05 * 3e-3)


def test_evaluation_is_the_mean_over_the_held_out_windows():
    setup = dataclasses.replace(TINY, context=128)
    model = SmallMoE(setup, 0)
    nats, bits, counts = evaluate(model, setup, windows=50)
    ids = text.tokens("heldout")
    with torch.no_grad():
        by_window = [
            F.cross_entropy(model(ids[None, a : a + 128])[0], ids[a + 1 : a + 129]) for a in range(0, 6400, 128)
        ]
    assert nats == pytest.approx(torch.stack(by_window).mean().item(), rel=1e-5)
    assert bits == pytest.approx(nats * len(ids) / 202677 / 0.693147, rel=1e-5)
    assert (counts.sum(-1) == 6400 * 2).all()
