"""Losses by hand, who learns from which, what is rounded, and what is measured."""

import math

import pytest
import torch
from small_models import CONFIG, IDS, SEEING, drawn, drawn_ids, drawn_model

from dsv41_edu import checkpoint
from dsv41_edu.config import preset
from dsv41_edu.model import Transformer
from dsv41_edu.moe.balance import update_bias
from dsv41_edu.training import (
    Loads,
    evaluate,
    groups,
    indexer_loss,
    initialise,
    language_loss,
    rate,
    rounded,
    set_dropout,
    teach,
)


def trainable(config=CONFIG):
    return drawn_model(config).train().requires_grad_(True)


def test_first_weights_are_the_seed_s_alone():
    models = [Transformer(CONFIG) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        initialise(model, seed)
    one, again, other = (model.state_dict() for model in models)
    assert all(torch.equal(one[n], again[n]) for n in one)
    assert not torch.equal(one["layers.0.attn.wq_a.weight"], other["layers.0.attn.wq_a.weight"])
    spread = one["layers.3.ffn.experts.1.w1.weight"].std()
    assert 0.9 < spread * CONFIG.hidden_size**0.5 < 1.1
    assert all((t == 1).all() for n, t in one.items() if n.endswith("norm.weight"))
    base, n = one["layers.0.hc_ffn_base"], CONFIG.hc_mult
    assert base[:n].tolist() == [2, -2, -2, -2]
    assert torch.equal(base[2 * n :].view(n, n), 2 * torch.eye(n))


def test_every_parameter_is_in_one_group():
    model = Transformer(preset("mini"), device="meta")
    found = groups(model, 0.1, 3.0)
    of = {id(p): group for group in found for p in group["params"]}
    assert len(of) == sum(len(group["params"]) for group in found) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        group = of[id(p)]
        table = "engram.embed" in name
        assert group["times"] == (3.0 if table else 1.0), name
        decays = p.ndim > 1 and "hc_" not in name and not table
        assert group["weight_decay"] == (0.1 if decays else 0.0), name


def test_the_rate():
    assert rate(0, 100, 10) == pytest.approx(0.1)
    assert rate(9, 100, 10) == rate(50, 100, 10) == 1
    assert rate(75, 100, 10) == pytest.approx(1 - 0.95 / 2)
    assert rate(100, 100, 10) == pytest.approx(0.05)


def test_the_teacher_in_plain_python():
    scores, mass = drawn(1, 3, 4), drawn(1, 3, 4, seed=1).abs()
    scores[0, 1, 2:] = float("-inf")
    indices = torch.tensor([[[0, 2, 3], [0, 1, -1], [-1, -1, -1]]])
    total = 0.0
    for t, read in ((0, [0, 2, 3]), (1, [0, 1])):
        a = [float(mass[0, t, j]) for j in read]
        e = [math.exp(scores[0, t, j]) for j in read]
        total += sum(x / sum(a) * math.log(x / sum(a) / (y / sum(e))) for x, y in zip(a, e, strict=True))
    torch.testing.assert_close(teach(scores, _only(mass, indices), indices), torch.tensor(total / 2).double())


def _only(mass, indices):
    """Attention falls on what was read alone."""
    kept = torch.zeros_like(mass)
    for t in range(3):
        for j in indices[0, t].tolist():
            if j >= 0:
                kept[0, t, j] = mass[0, t, j]
    return kept


def test_scores_that_say_what_attention_does_cost_nothing():
    mass = drawn(1, 2, 5).abs()
    indices = torch.arange(5).expand(1, 2, 5)
    assert teach(mass.log() + 3, mass, indices).abs() < 1e-12
    assert teach(drawn(1, 2, 5), mass, indices) > 0
    nobody = torch.full((1, 2, 5), -1)
    assert teach(drawn(1, 2, 5), torch.zeros(1, 2, 5).double(), nobody) == 0


@pytest.mark.parametrize("dense", [True, False])
def test_each_loss_has_parameters_of_its_own(dense):
    model = trainable()
    run = model.run(IDS[:, :40], dense=dense, teach=True)
    indexer_loss(run.chunk).backward()
    taught = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    expected = {n for n, _ in model.named_parameters() if ".indexer." in n}
    assert taught == expected
    model.zero_grad(set_to_none=True)
    run = model.run(IDS[:, :40], dense=dense)
    language_loss(model.logits(run.hidden), IDS[:, 1:41]).backward()
    assert all(p.grad is None for n, p in model.named_parameters() if n in expected)
    assert model.layers[3].attn.wq_b.weight.grad.any()


def test_teaching_brings_the_scores_to_the_attention():
    model = trainable()
    parameters = [p for n, p in model.named_parameters() if ".indexer." in n]
    optimizer, losses = torch.optim.Adam(parameters, lr=0.01), []
    for _ in range(12):
        optimizer.zero_grad()
        loss = indexer_loss(model.run(IDS[:1, :32], dense=True, teach=True).chunk)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_loads_and_their_update():
    model = drawn_model(CONFIG)
    loads, before = Loads(model.layers), [layer.ffn.gate.bias.clone() for layer in model.layers]
    other = [layer.ffn.gate.bias_vl.clone() for layer in model.layers]
    model(IDS[:, :30])
    counts = loads.update(0.01)
    assert counts.sum(1).tolist() == [2 * 30 * CONFIG.num_experts_per_tok] * CONFIG.num_hidden_layers
    for layer, bias, vl, c in zip(model.layers, before, other, counts, strict=True):
        assert torch.equal(layer.ffn.gate.bias, update_bias(bias, c, 0.01))
        assert torch.equal(layer.ffn.gate.bias_vl, vl)


def test_rounded_weights_are_those_of_the_checkpoint(tmp_path):
    model = trainable(SEEING).float()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    checkpoint.save(model, tmp_path / "model")
    loaded = checkpoint.load(tmp_path / "model", dtype=torch.float32).state_dict()
    with rounded(model):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, loaded[name]), name
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_weights_that_do_not_learn_stay_as_they_are():
    model = trainable(SEEING).float()
    model.layers[1].requires_grad_(False)
    before = model.layers[1].attn.wq_a.weight.clone(), model.layers[0].attn.wq_a.weight.clone()
    with rounded(model):
        assert torch.equal(model.layers[1].attn.wq_a.weight, before[0])
        assert not torch.equal(model.layers[0].attn.wq_a.weight, before[1])


def test_rounded_weights_go_back_after_an_error_too():
    model = trainable(SEEING).float()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(KeyError), rounded(model):
        raise KeyError
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_gradients_of_rounded_weights_stay():
    model = drawn_model(SEEING, torch.float32).requires_grad_(True)
    ids = drawn_ids(SEEING, 1, 12)
    with rounded(model):
        language_loss(model(ids[:, :-1]), ids[:, 1:]).backward()
    assert model.layers[0].attn.wq_a.weight.grad.any()


def test_dropout_acts_in_training_alone():
    model = drawn_model(CONFIG)
    set_dropout(model, 0.5, 0.5)
    quiet = model(IDS[:, :10])
    assert torch.equal(model(IDS[:, :10]), quiet)
    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.equal(model(IDS[:, :10]), quiet)


def test_evaluation_by_hand():
    model = drawn_model(CONFIG).train()
    set_dropout(model, 0.5, 0.5)
    rows = [IDS[:, :20], IDS[:1, 20:30]]
    found = evaluate(model, rows)
    assert model.training
    model.eval()
    total = 0.0
    for ids in rows:
        p = model(ids[:, :-1]).log_softmax(-1)
        total -= float(p.gather(-1, ids[:, 1:].unsqueeze(-1)).sum())
    assert found == pytest.approx(total / (2 * 19 + 9))
