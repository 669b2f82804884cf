"""The two heads against sums in plain Python, against the public vectors of a whole model, and in low precision."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41_edu.config import preset
from dsv41_edu.dspark.heads import ConfidenceHead, GatedMarkovHead, MarkovHead, RecurrentHead, markov_head
from dsv41_edu.generations import plan

VECTORS = Path(__file__).parents[1] / "vectors"


def filled(module, seed=0, dtype=torch.float64):
    """Weights from a generator, of size one."""
    r = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.data = torch.randn(weight.shape, generator=r, dtype=torch.float64)
    return module.to(dtype)


def test_markov_head_is_a_table_of_low_rank():
    V, rank = 7, 3
    head = filled(MarkovHead(V, rank))
    E, H = head.embed.weight.tolist(), head.head.weight.tolist()
    tokens = torch.tensor([[0, 6], [3, 3]])
    found = head(tokens)
    assert found.shape == (2, 2, V)
    for b in range(2):
        for i in range(2):
            row = [sum(H[v][r] * E[tokens[b, i]][r] for r in range(rank)) for v in range(V)]
            assert found[b, i].tolist() == pytest.approx(row, rel=1e-12)
    assert torch.linalg.matrix_rank(head(torch.arange(V))) == rank


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def times(layer, vector):
    rows, bias = layer.weight.tolist(), [0.0] * len(layer.weight) if layer.bias is None else layer.bias.tolist()
    return [b + sum(w * x for w, x in zip(row, vector, strict=True)) for row, b in zip(rows, bias, strict=True)]


def by_hand(head, tokens, hidden):
    """Logits of one block's places by the equations, in plain Python."""
    E, found = head.embed.weight.tolist(), []
    r = len(E[0])
    state = [0.0] * r
    for y, h in zip(tokens.tolist(), hidden.tolist(), strict=True):
        if isinstance(head, GatedMarkovHead):
            gate = times(head.gate_proj, [*h, *E[y]])
            v = [sigmoid(g) * e for g, e in zip(gate, E[y], strict=True)]
        else:
            joint = times(head.joint_proj, [*state, *E[y], *h])
            keep, new = [sigmoid(a) for a in joint[:r]], [math.tanh(c) for c in joint[r : 2 * r]]
            state = [k * s + (1 - k) * n for k, s, n in zip(keep, state, new, strict=True)]
            v = [math.tanh(o) for o in joint[2 * r :]]
        found.append(times(head.head, v))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("kind", [GatedMarkovHead, RecurrentHead])
@settings(derandomize=True, deadline=None, max_examples=25)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_the_other_heads_are_their_equations(kind, V, rank, d, places, seed):
    head = filled(kind(V, rank, d), seed)
    r = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (2, places), generator=r)
    hidden, base = (torch.randn(2, places, n, generator=r, dtype=torch.float64) for n in (d, V))
    found = head(tokens, hidden)
    for b in range(2):
        torch.testing.assert_close(found[b], by_hand(head, tokens[b], hidden[b]), rtol=1e-10, atol=1e-12)
    u = torch.tensor([0.25, 0.75], dtype=torch.float64)
    for i in range(places):
        expected, so_far = base[:, i] + found[:, i], (base[:, i], tokens[:, : i + 1], hidden[:, : i + 1])
        ids, none = head.step(*so_far)
        assert none is None
        assert torch.equal(ids, expected.argmax(-1))
        ids, logits = head.step(*so_far, 0.7, u)
        torch.testing.assert_close(logits, expected)
        until = (expected / 0.7).softmax(-1).cumsum(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
        assert (until > u).all()


def test_an_open_gate_is_the_vanilla_head_and_a_closed_one_adds_nothing():
    V, rank, d = 7, 3, 4
    gated, vanilla = filled(GatedMarkovHead(V, rank, d)), MarkovHead(V, rank).double()
    vanilla.load_state_dict({n: p for n, p in gated.state_dict().items() if not n.startswith("gate")})
    tokens, hidden = torch.arange(V).view(1, V), torch.zeros(1, V, d, dtype=torch.float64)
    gated.gate_proj.weight.data.zero_()
    for bias, expected in ((1e3, vanilla(tokens)), (-1e3, torch.zeros(1, V, V, dtype=torch.float64))):
        gated.gate_proj.bias.data.fill_(bias)
        assert torch.equal(gated(tokens, hidden), expected)


def test_the_recurrent_head_knows_every_token_before_and_none_behind():
    head = filled(RecurrentHead(5, 3, 2))
    tokens, hidden = torch.tensor([[0, 1, 2, 3]]), torch.zeros(1, 4, 2, dtype=torch.float64)
    before = head(tokens, hidden)
    for j in range(4):
        other = tokens.clone()
        other[0, j] = 4
        moved = (head(other, hidden) != before).any(-1)[0].tolist()
        assert moved == [i >= j for i in range(4)]


@pytest.mark.parametrize(("kind", "name"), [(GatedMarkovHead, "gate_proj"), (RecurrentHead, "joint_proj")])
def test_gradients_reach_every_part_of_the_other_heads(kind, name):
    head = filled(kind(6, 3, 4))
    head(torch.tensor([[1, 4, 4]]), torch.ones(1, 3, 4, dtype=torch.float64)).square().sum().backward()
    for part in (getattr(head, name).weight, getattr(head, name).bias, head.head.weight):
        assert part.grad.ne(0).all()


def test_confidence_head_weighs_states_first_then_rows():
    head = filled(ConfidenceHead(4, 2))
    (w,) = head.proj.weight.tolist()
    r = torch.Generator().manual_seed(1)
    x, rows = (torch.randn(3, 5, n, generator=r, dtype=torch.float64) for n in (4, 2))
    found = head(x, rows)
    assert found.shape == (3, 5)
    for b in range(3):
        for i in range(5):
            both = [*x[b, i].tolist(), *rows[b, i].tolist()]
            assert found[b, i].item() == pytest.approx(sum(a * c for a, c in zip(w, both, strict=True)), rel=1e-12)


@pytest.mark.parametrize("name", ["drafter20", "drafter3"])
def test_vectors(name):
    weights = load_file(VECTORS / "whole_A_weights.safetensors")
    v = {
        k.partition(".")[2]: t for k, t in load_file(VECTORS / "whole_A_io.safetensors").items() if k.startswith(name)
    }
    V, rank = weights["mtp.1.markov_head.embed.weight"].shape
    heads = MarkovHead(V, rank), ConfidenceHead(v["collapsed"].shape[-1], rank)
    for head, name in zip(heads, ("mtp.1.markov_head.", "mtp.1.confidence_head."), strict=True):
        head.load_state_dict({k.removeprefix(name): t for k, t in weights.items() if k.startswith(name)})
        head.double()
    ids = v["draft_ids"].long()[..., :-1]
    corrected = v["base_logits"] + heads[0](ids)
    torch.testing.assert_close(corrected, v["corrected_logits"], rtol=0, atol=1e-12)
    assert torch.equal(corrected.argmax(-1), v["draft_ids"].long()[..., 1:])
    found = heads[1](v["collapsed"], heads[0].embed(ids))
    torch.testing.assert_close(found, v["confidence_logits"], rtol=0, atol=1e-6)  # the states were stored in fp32


def test_low_precision_weights_are_multiplied_in_fp32():
    markov, confidence = filled(MarkovHead(50, 64)), filled(ConfidenceHead(64, 64))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = torch.arange(9)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = [m.to(dtype) for m in (markov, confidence)]
        found = narrow[0](tokens), narrow[1](x.to(dtype), narrow[0].embed(tokens))
        wide = [m.double() for m in narrow]
        expected = wide[0](tokens), wide[1](x.to(dtype).double(), wide[0].embed(tokens))
        for a, b in zip(found, expected, strict=True):
            assert (a.dtype, b.dtype) == (torch.float32, torch.float64)
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", [GatedMarkovHead, RecurrentHead])
def test_the_other_heads_in_low_precision(kind):
    head, tokens = filled(kind(50, 16, 8)).bfloat16(), torch.arange(12).view(3, 4)
    hidden = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = head(tokens, hidden)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), head.double()(tokens, hidden.double()), rtol=1e-5, atol=1e-4)


def test_gradients_reach_rows_that_were_asked_for():
    markov, confidence = filled(MarkovHead(6, 3)), filled(ConfidenceHead(4, 3))
    tokens, x = torch.tensor([1, 4, 4]), torch.ones(3, 4, dtype=torch.float64)
    markov(tokens).square().sum().backward()
    assert markov.embed.weight.grad.any(1).tolist() == [False, True, False, False, True, False]
    assert markov.head.weight.grad.all()
    confidence(x, markov.embed(tokens)).sum().backward()
    assert confidence.proj.weight.grad[0, :4].tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("kind", [None, "vanilla", "gated", "rnn"])
def test_shapes_and_names_are_the_checkpoints(kind):
    c = preset("v41_flash").replace(dspark_markov_head_type=kind)
    planned = {t.name: tuple(t.shape) for t in plan(c)}
    with torch.device("meta"):
        heads = {
            "markov_head": markov_head(c),
            "confidence_head": ConfidenceHead(c.hidden_size, c.dspark_markov_rank),
        }
    for prefix, head in heads.items():
        of_plan = {n.partition(prefix + ".")[2]: shape for n, shape in planned.items() if f".{prefix}." in n}
        assert of_plan == {n: tuple(p.shape) for n, p in head.named_parameters()}
