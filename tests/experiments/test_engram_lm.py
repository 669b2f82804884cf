"""Rows are those of the real hash, the mask takes the whole memory away, and every part learns at its own rate."""

import dataclasses

import numpy as np
import pytest
import torch

from dsv41_edu.engram.gate import signed_root_gate
from dsv41_edu.engram.hashing import is_prime, multipliers, primes_from
from dsv41_edu.experiments import text
from dsv41_edu.experiments.engram_lm import EngramLM, Setup, compress, first_prime, gates, train, vocabulary
from dsv41_edu.experiments.small_moe import Watch, batches

TINY = Setup(hidden_size=32, context=16, batch=4, steps=16, warm_up=4, row_width=8, table_rows=600)
WITHOUT = dataclasses.replace(TINY, table_rows=0)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ids():
    return next(batches(TINY, 0))[0]


def loud(seed=0):
    """A model whose memory says as much as the rest."""
    model = EngramLM(TINY, seed)
    with torch.no_grad():
        model.memory.table.weight *= 50
    return model


def streams(model):
    """What the memory is added to, and ids."""
    with torch.no_grad():
        return model.blocks[0](model.embedding(ids()) + model.positions.weight)


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for setup in (TINY, WITHOUT):
        first, again, other = (EngramLM(setup, seed) for seed in (1, 1, 2))
        assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
        assert not torch.equal(first.head.weight, other.head.weight)
        assert all(p.isfinite().all() for p in first.parameters())
    assert torch.equal(state, torch.get_rng_state())  # the global generator is left alone
    base, memory = EngramLM(WITHOUT, 1), EngramLM(TINY, 1)
    assert torch.equal(base.blocks[1].qkv.weight, memory.blocks[1].qkv.weight)
    assert memory.memory.table.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert memory.memory.gate.wkv.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert (memory.memory.gate.q_weight == 1).all()
    assert not base.dense.w1.bias.any()


def test_rows_by_the_formula():
    model = EngramLM(TINY)
    x = ids()[:1]
    m, primes = multipliers(1, 3, vocabulary().size), primes_from(first_prime(600, 4), 4)
    c = [int(vocabulary().map[2])] * 2 + [int(vocabulary().map[i]) for i in x[0]]
    expected = []
    for at in range(2, len(c)):
        two = c[at] * m[0] ^ c[at - 1] * m[1]
        three = two ^ c[at - 2] * m[2]
        rows = [h % p for h, p in zip((two, two, three, three), primes, strict=True)]
        expected.append([r + sum(primes[:i]) for i, r in enumerate(rows)])
    assert model.memory.rows(x)[0].tolist() == expected
    assert all(map(is_prime, primes))


def test_spellings_of_a_token_share_their_rows():
    tokenizer, model = text.tokenizer(), EngramLM(TINY)
    upper, lower = (tokenizer.token_to_id(t) for t in ("ĠThe", "Ġthe"))
    assert upper != lower
    assert torch.equal(*(model.memory.rows(torch.tensor([[i, 70, i]])) for i in (upper, lower)))
    assert np.array_equal(compress(torch.tensor([upper])), compress(torch.tensor([lower])))


def test_primes_fill_the_rows():
    for rows in (17, 100, 599, 600, 7764, 32768):
        first = first_prime(rows, 4)
        assert sum(primes_from(first, 4)) <= rows < sum(primes_from(primes_from(first, 1)[0] + 1, 4))
    with pytest.raises(ValueError, match="table_rows = 16: expected at least 17 for 4 heads"):
        first_prime(16, 4)


def test_memory_reads_the_table_and_adds_before_the_second_layer():
    model = loud()
    x, rows = streams(model), model.memory.rows(ids())
    e = model.memory.table.weight[rows.flatten()].view(4, 16, 32)
    key, value = model.memory.gate.wkv(e).split(32, dim=-1)

    def rms(v):
        return v / v.square().mean(-1, keepdim=True).sqrt()

    gate = signed_root_gate((rms(x) * rms(key)).sum(-1) * 32**-0.5)
    torch.testing.assert_close(gates(model, ids()), gate)
    expected = model.head(model.norm(model.blocks[1](x + gate.unsqueeze(-1) * value)))
    torch.testing.assert_close(model(ids()), expected)


def test_gates_off_equals_no_memory():
    model = loud()
    mask = torch.zeros(4, 16, dtype=torch.bool)
    without = model.head(model.norm(model.blocks[1](streams(model))))
    assert torch.equal(model(ids(), mask), without)
    on = model(ids())
    assert torch.equal(model(ids(), ~mask), on)
    assert (on - without).abs().max() > 0.1
    mask[:, :9] = True
    part = model(ids(), mask)
    torch.testing.assert_close(part[:, :9], on[:, :9])
    assert not torch.isclose(part[:, 9:], on[:, 9:]).all(-1).any()


@pytest.mark.parametrize("setup", [TINY, WITHOUT])
def test_a_token_never_reaches_an_earlier_position(setup):
    model = loud() if setup.table_rows else EngramLM(setup)
    before, changed = model(ids()), ids().clone()
    changed[:, 7] = (changed[:, 7] + 100) % text.VOCAB_SIZE
    after = model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=1e-4, atol=1e-5)
    assert not torch.isclose(after[:, 7:], before[:, 7:]).all(-1).any()


def test_what_stands_in_the_memorys_place_is_as_large_as_what_a_token_uses_of_it():
    dense = sum(p.numel() for p in EngramLM(WITHOUT).dense.parameters())
    memory = EngramLM(TINY).memory
    assert dense == sum(p.numel() for p in memory.gate.parameters()) + TINY.columns * TINY.row_width
    assert memory.rows(ids()).shape[-1] == TINY.columns


def test_table_learns_five_times_faster_and_never_decays():
    model = EngramLM(TINY)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    next(train(model, TINY, 0))
    moved = {name: (p - before[name]).abs() for name, p in model.named_parameters()}
    first = TINY.learning_rate / TINY.warm_up  # Adam's first step is the rate
    assert moved["memory.table.weight"].max().item() == pytest.approx(5 * first, rel=1e-3)
    assert moved["memory.gate.q_weight"].max().item() == pytest.approx(first, rel=1e-2)
    read = torch.zeros(600, dtype=torch.bool)
    read[model.memory.rows(ids()).flatten()] = True
    assert 0 < read.sum() < 600
    assert not moved["memory.table.weight"][~read].any()  # nor do its other rows shrink
    unused = torch.ones(text.VOCAB_SIZE, dtype=torch.bool)
    unused[ids().flatten()] = False
    shrunk = before["embedding.weight"][unused] * (1 - first * TINY.weight_decay)
    torch.testing.assert_close(model.embedding.weight[unused], shrunk)


def test_a_step_moves_the_routers_bias():
    model = EngramLM(TINY)
    watch = Watch(model)
    next(train(model, TINY, 0))
    for block, counts in zip(model.blocks, watch.counts(), strict=True):
        torch.testing.assert_close(block.moe.gate.bias, 0.01 * torch.sign(counts.float().mean() - counts))


@pytest.mark.parametrize("setup", [TINY, WITHOUT])
def test_two_runs_are_equal_and_the_loss_falls(setup):
    first, again = (list(train(EngramLM(setup, 1), setup, 1)) for _ in range(2))
    assert first == again
    assert len(first) == setup.steps
    assert first[-1] < first[0] - 0.3
