"""Counts, bias and losses against loops over tokens in exact fractions.

Each loss is first held against a transcription of its sums, then differentiated: all of the gradient must come
through P, and f must be as constant as a table. Then the small statistics, the vectors, and bad input.
"""

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41_edu.config import preset
from dsv41_edu.moe import balance as b

VECTORS = load_file(Path(__file__).parents[1] / "vectors" / "balance.safetensors")
drawn = settings(derandomize=True, deadline=None, max_examples=40)


EXPERTS = st.integers(1, 9)


@st.composite
def routings(draw, experts=EXPERTS):
    """Affinities fp64 [T, E], eighths; indices [T, k], different experts or padding."""
    E = draw(experts)
    T, k = draw(st.integers(0, 6)), draw(st.integers(1, E))
    rows = [draw(st.permutations([*range(E), *[-1] * draw(st.integers(0, 1))]))[:k] for _ in range(T)]
    affinity = [[draw(st.integers(1, 16)) / 8 for _ in range(E)] for _ in range(T)]
    return torch.tensor(affinity, dtype=torch.float64).view(T, E), torch.tensor(rows, dtype=torch.int64).view(T, k)


def fractions_of(affinity):
    return [[Fraction(x) for x in row] for row in affinity.tolist()]


def f_of(indices, E):
    T, k = indices.shape
    return [Fraction(E * sum(e in row for row in indices.tolist()), k * T) if T else Fraction(0) for e in range(E)]


def p_of(affinity, E):
    return [sum((row[e] for row in affinity), Fraction(0)) / max(1, len(affinity)) for e in range(E)]


def dot(f, p):
    return float(sum(x * y for x, y in zip(f, p, strict=True)))


def close(x, y):
    torch.testing.assert_close(x, torch.as_tensor(y, dtype=x.dtype), rtol=1e-12, atol=1e-12)


# Counts.
@drawn
@given(routings())
def test_counts_are_occurrences(routing):
    affinity, indices = routing
    E = affinity.shape[1]
    expected = [indices.flatten().tolist().count(e) for e in range(E)]
    for found in (b.expert_counts(indices, E), b.expert_counts(indices.int(), E), b.expert_counts(indices[None], E)):
        assert found.dtype == torch.int64
        assert found.tolist() == expected


def test_counts_of_no_tokens_and_of_one_expert():
    assert b.expert_counts(torch.empty(0, 3, dtype=torch.int64), 4).tolist() == [0, 0, 0, 0]
    assert b.expert_counts(torch.tensor([[0], [0], [-1]]), 1).tolist() == [2]
    assert b.expert_counts(torch.tensor([2, 0]), 3).tolist() == [1, 0, 1]


# The bias.
@drawn
@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=3), st.integers(0, 1))
def test_bias_follows_its_own_rows_mean(counts, wide):
    dtype = torch.float64 if wide else torch.float32
    bias = torch.linspace(-1, 1, 4 * len(counts), dtype=dtype).view(-1, 4)
    moved = b.update_bias(bias, torch.tensor(counts), 0.25)
    assert moved.dtype == dtype
    for before, row, after in zip(bias.tolist(), counts, moved.tolist(), strict=True):
        mean = Fraction(sum(row), 4)
        steps = [0.25 if c < mean else -0.25 if c > mean else 0.0 for c in row]
        assert after == torch.tensor(before, dtype=dtype).add(torch.tensor(steps, dtype=dtype)).tolist()


def test_bias_moves_by_the_mean_and_not_by_a_neighbour():
    # the median is 1, half the largest is 5, the mean 3
    assert b.update_bias(torch.zeros(5), torch.tensor([1, 1, 1, 3, 9]), 1.0).tolist() == [1, 1, 1, 0, -1]


@pytest.mark.parametrize("counts", [[0, 0, 0], [7, 7, 7], [2**40, 2**40, 2**40]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_equal_load_leaves_the_bias(counts, dtype):
    bias = torch.tensor([0.1, -0.3, 0.7])
    assert torch.equal(b.update_bias(bias, torch.tensor(counts, dtype=dtype), 0.001), bias)


def test_one_load_beyond_float32_is_seen():
    counts = torch.tensor([2**24 + 1, 2**24, 2**24, 2**24])
    assert b.update_bias(torch.zeros(4), counts, 1.0).tolist() == [-1, 1, 1, 1]
    narrow = torch.full((3,), 2**30, dtype=torch.int32) + torch.tensor([0, 1, 2], dtype=torch.int32)
    assert b.update_bias(torch.zeros(3), narrow, 1.0).tolist() == [1, 0, -1]


def test_speed_zero_and_one_expert_move_nothing():
    bias = torch.tensor([0.5, -0.5])
    assert torch.equal(b.update_bias(bias, torch.tensor([9, 0]), 0), bias)
    assert b.update_bias(torch.tensor([0.5]), torch.tensor([9]), 0.1).tolist() == [0.5]


def test_bias_update_is_new_and_outside_the_graph():
    bias = torch.zeros(2, requires_grad=True)
    moved = b.update_bias(bias, torch.tensor([1, 0]), 0.5)
    assert not moved.requires_grad
    assert bias.tolist() == [0, 0]
    assert moved.tolist() == [-0.5, 0.5]


def test_a_modality_is_not_moved_by_the_other():
    text, image = torch.tensor([9, 1]), torch.tensor([1, 9])  # together balanced
    assert b.update_bias(torch.zeros(2), text + image, 0.1).tolist() == [0, 0]
    both = b.update_bias(torch.zeros(2, 2), torch.stack([text, image]), 0.5)
    assert both.tolist() == [[-0.5, 0.5], [0.5, -0.5]]
    silent = b.update_bias(torch.zeros(2, 2), torch.stack([text, torch.zeros(2, dtype=torch.int64)]), 0.5)
    assert silent.tolist() == [[-0.5, 0.5], [0, 0]]


# The losses.
@drawn
@given(routings())
def test_sequence_loss_normalises_each_token(routing):
    affinity, indices = routing
    E = affinity.shape[1]
    normalised = [[x / sum(row) for x in row] for row in fractions_of(affinity)]
    expected = 0.5 * dot(f_of(indices, E), p_of(normalised, E))
    close(b.sequence_loss(affinity, indices, 0.5), expected)
    close(b.load_fractions(indices, E), [float(x) for x in f_of(indices, E)])


@drawn
@given(routings())
def test_expert_loss_takes_affinities_as_they_are(routing):
    affinity, indices = routing
    E = affinity.shape[1]
    close(b.expert_loss(affinity, indices, 0.5), 0.5 * dot(f_of(indices, E), p_of(fractions_of(affinity), E)))


@drawn
@given(routings(st.sampled_from([6])), st.sampled_from([1, 2, 3, 6]))
def test_device_loss_means_f_and_sums_p(routing, D):
    affinity, indices = routing
    f, p, size = f_of(indices, 6), p_of(fractions_of(affinity), 6), 6 // D
    parts = [range(i * size, (i + 1) * size) for i in range(D)]
    f = [sum(f[j] for j in part) / size for part in parts]
    p = [sum(p[j] for j in part) for part in parts]
    close(b.device_loss(affinity, indices, D, 0.5), 0.5 * dot(f, p))


@drawn
@given(routings(st.sampled_from([6])), st.sampled_from([(1, 1), (2, 1), (3, 1), (3, 2), (3, 3), (6, 4)]))
def test_communication_loss_counts_a_token_once_a_device(routing, D_M):
    affinity, indices = routing
    (D, M), T = D_M, len(indices)
    size, p = 6 // D, p_of(fractions_of(affinity), 6)
    sent = [sum(any(e >= 0 and e // size == i for e in row) for row in indices.tolist()) for i in range(D)]
    f = [Fraction(D * n, M * max(1, T)) for n in sent]
    p = [sum(p[i * size : (i + 1) * size]) for i in range(D)]
    close(b.communication_loss(affinity, indices, D, M, 0.5), 0.5 * dot(f, p))


LOSSES = {
    "sequence": lambda s, i: b.sequence_loss(s, i, 0.5),
    "expert": lambda s, i: b.expert_loss(s, i, 0.5),
    "device": lambda s, i: b.device_loss(s, i, 2, 0.5),
    "communication": lambda s, i: b.communication_loss(s, i, 2, 2, 0.5),
}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def routing(*shape, E=6, k=2, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    affinity = torch.rand(*shape, E, generator=g, dtype=torch.float64).add(0.1).to(dtype)
    return affinity, torch.rand(*shape, E, generator=g).argsort(-1)[..., :k]


@every_loss
def test_gradient_is_that_of_p_alone(loss):
    affinity, indices = routing(5)
    assert torch.autograd.gradcheck(lambda s: loss(s, indices), affinity.requires_grad_())
    # were the choice made inside the graph, its hard counts would still be constants
    chosen = lambda s: s.topk(2).indices  # noqa: E731
    (inside,) = torch.autograd.grad(loss(affinity, chosen(affinity)), affinity)
    (outside,) = torch.autograd.grad(loss(affinity, chosen(affinity.detach())), affinity)
    assert torch.equal(inside, outside)
    assert not b.load_fractions(indices, 6).requires_grad


def test_gradient_of_a_loss_linear_in_p_is_f_itself():
    affinity, indices = routing(5)
    b.expert_loss(affinity.requires_grad_(), indices, 0.5).backward()
    close(affinity.grad, 0.5 * b.load_fractions(indices, 6).expand(5, 6) / 5)


@every_loss
def test_dtype_and_scalar(loss):
    affinity, indices = routing(5, dtype=torch.float32)
    found, wide = loss(affinity, indices), loss(affinity.double(), indices)
    assert (found.dtype, found.shape, wide.dtype) == (torch.float32, (), torch.float64)
    torch.testing.assert_close(found.double(), wide, rtol=1e-6, atol=0)
    assert torch.equal(found, loss(affinity, indices.int()))


@every_loss
@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)])
def test_no_tokens_cost_nothing(loss, shape):
    affinity = torch.ones(*shape, 6, requires_grad=True)
    found = loss(affinity, torch.empty(*shape, 2, dtype=torch.int64))
    assert found.item() == 0
    found.backward()
    assert affinity.grad.shape == affinity.shape


@every_loss
def test_padding_alone_costs_nothing(loss):
    assert loss(torch.ones(3, 6), torch.full((3, 2), -1)).item() == 0


def test_sequence_loss_is_the_mean_over_sequences_and_the_others_see_one_batch():
    affinity, indices = routing(3, 5)
    each = [b.sequence_loss(s, i, 0.5) for s, i in zip(affinity, indices, strict=True)]
    close(b.sequence_loss(affinity, indices, 0.5), sum(each) / 3)
    close(b.sequence_loss(affinity.view(3, 1, 5, 6), indices.view(3, 1, 5, 2), 0.5), sum(each) / 3)
    for name in ("expert", "device", "communication"):
        close(LOSSES[name](affinity, indices), LOSSES[name](affinity.flatten(0, 1), indices.flatten(0, 1)))


def test_a_batch_can_be_balanced_where_its_sequences_are_not():
    affinity = torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]], dtype=torch.float64)
    indices = affinity.argmax(-1, keepdim=True)
    close(b.expert_loss(affinity, indices, 1.0), 1.0)
    close(b.sequence_loss(affinity, indices, 1.0), 1.8)


def test_equal_load_costs_alpha():
    affinity = routing(6)[0]
    indices = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6], 1)
    close(b.sequence_loss(affinity, indices, 1e-4), 1e-4)
    close(b.sequence_loss(torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64), 1e-4), 1e-4)


def test_a_limit_reached_evenly_costs_alpha_in_communication():
    # every token on 2 of 4 devices, evenly, and affinities of sum 1
    indices = torch.tensor([[0, 2], [4, 6], [1, 3], [5, 7]])
    affinity = routing(4, E=8)[0].softmax(-1)
    close(b.communication_loss(affinity, indices, 4, 2, 0.02), 0.02)


# What a chapter plots.
def test_statistics_of_loads():
    counts = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [8, 8, 0, 0], [0, 0, 0, 0]])
    for load in (counts, counts.float(), counts.int()):
        assert b.max_violation(load).tolist() == [0, 3, 1, 0]
        close(b.variation(load), [0, 3**0.5, 1, 0])
        assert b.starved_share(load).tolist() == [0, 0.75, 0.5, 0]
    assert b.max_violation(counts[1]).shape == ()
    assert b.max_violation(torch.tensor([1, 0, 0, 0])).item() == 3  # fewer tokens than experts
    assert b.max_violation(torch.tensor([5])).item() == 0
    assert {f(counts).dtype for f in (b.max_violation, b.variation, b.starved_share)} == {torch.float64}


def test_starved_is_below_a_tenth_of_the_mean():
    assert b.starved_share(torch.tensor([37, 3])).item() == 0
    assert b.starved_share(torch.tensor([57, 3])).item() == 0  # exactly a tenth
    assert b.starved_share(torch.tensor([58, 3])).item() == 0.5


def test_loss_free_balancing_balances():
    # tokens prefer low ids; the bias alone must undo that
    g = torch.Generator().manual_seed(0)
    bias, tilt = torch.zeros(8), torch.linspace(1, 0, 8)
    start = None
    for _ in range(300):
        scores = (torch.randn(256, 8, generator=g) + 2 * tilt).sigmoid()
        counts = b.expert_counts((scores + bias).topk(2).indices, 8)
        start = b.max_violation(counts).item() if start is None else start
        bias = b.update_bias(bias, counts, 0.01)
    assert start > 0.7
    assert b.max_violation(counts) < 0.25


# The published vectors.
def test_vectors():
    v = VECTORS
    affinity, indices = v["affinity"].double(), v["indices"]
    torch.testing.assert_close(b.load_fractions(indices, 16), v["f"], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        b.load_fractions(v["indices_with_padding"], 16), v["f_with_padding"], rtol=0, atol=1e-6
    )
    torch.testing.assert_close(b.sequence_loss(affinity, indices, 1e-4), v["loss_alpha_1e-4"][0], rtol=1e-6, atol=0)
    for e, p in enumerate(v["P"]):  # with all tokens at e, f_e is 16 and P_e is left
        torch.testing.assert_close(b.sequence_loss(affinity, torch.full((40, 1), e), 1 / 16), p, rtol=1e-6, atol=0)
    after = b.update_bias(v["bias.before"], v["bias.counts"], 1e-3)
    torch.testing.assert_close(after.double(), v["bias.after_gamma_1e-3"], rtol=0, atol=1e-6)
    after = b.update_bias(v["bias.before"].double(), v["bias.counts"], 1e-3)
    torch.testing.assert_close(after, v["bias.after_gamma_1e-3"], rtol=0, atol=1e-12)


def test_the_official_size():
    c = preset("v41_flash")
    E, k = c.n_routed_experts, c.num_experts_per_tok
    indices = (torch.arange(64 * k) % E).view(64, k)  # every expert once
    assert b.expert_counts(indices, E).tolist() == [1] * E
    close(b.sequence_loss(routing(64, E=E)[0], indices, 1e-4), 1e-4)


# Bad input.
I = torch.tensor([[0, 1]])
S = torch.ones(1, 2)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: b.expert_counts(torch.tensor([[0, 4]]), 4), ValueError, "from 0 to 4: expected -1 .none. to 3"),
        (lambda: b.expert_counts(torch.tensor([[-2, 0]]), 4), ValueError, "from -2 to 0"),
        (lambda: b.expert_counts(I.float(), 4), TypeError, "indices is torch.float32"),
        (lambda: b.expert_counts(torch.tensor(1), 4), ValueError, "indices"),
        (lambda: b.expert_counts(torch.empty(0, 2, dtype=torch.int64), 0), ValueError, "n_experts = 0"),
        (lambda: b.load_fractions(torch.tensor([0, 1]), 4), ValueError, r"indices \[2\]"),
        (lambda: b.load_fractions(torch.empty(3, 0, dtype=torch.int64), 4), ValueError, r"indices \[3, 0\]"),
        (lambda: b.load_fractions(I, 1), ValueError, "from 0 to 1"),
        (lambda: b.update_bias(torch.zeros(2), torch.zeros(3), 0.1), ValueError, r"bias \[2\], counts \[3\]"),
        (lambda: b.update_bias(torch.zeros(2, 2), torch.zeros(2), 0.1), ValueError, r"counts \[2\]"),
        (lambda: b.update_bias(torch.zeros(2).bfloat16(), torch.zeros(2), 0.1), TypeError, "bias is torch.bfloat16"),
        (lambda: b.update_bias(torch.zeros(2), torch.zeros(2), -0.1), ValueError, "speed = -0.1"),
        (lambda: b.update_bias(torch.zeros(2), torch.zeros(2), float("inf")), ValueError, "speed = inf"),
        (lambda: b.update_bias(torch.zeros(2), torch.zeros(2), float("nan")), ValueError, "speed = nan"),
        (lambda: b.update_bias(torch.zeros(2), torch.tensor([-1, 1]), 0.1), ValueError, "counts"),
        (lambda: b.update_bias(torch.zeros(2), torch.tensor([0, float("nan")]), 0.1), ValueError, "counts"),
        (lambda: b.max_violation(torch.tensor([1, float("inf")])), ValueError, "counts"),
        (lambda: b.max_violation(torch.tensor(3)), ValueError, "counts of shape"),
        (lambda: b.max_violation(torch.zeros(2, 0)), ValueError, "counts of shape"),
        (lambda: b.variation(torch.tensor([True])), TypeError, "counts is torch.bool"),
        (lambda: b.starved_share(torch.tensor([1j])), TypeError, "counts is torch.complex64"),
        (lambda: b.sequence_loss(S.bfloat16(), I, 1.0), TypeError, "affinity is torch.bfloat16"),
        (lambda: b.sequence_loss(S, I.float(), 1.0), TypeError, "indices is"),
        (lambda: b.sequence_loss(torch.ones(2), torch.tensor(0), 1.0), ValueError, "affinity"),
        (lambda: b.sequence_loss(torch.ones(2, 2), I, 1.0), ValueError, r"affinity \[2, 2\], indices \[1, 2\]"),
        (lambda: b.sequence_loss(S, I + 1, 1.0), ValueError, "from 1 to 2"),
        (lambda: b.sequence_loss(0 * S, I, 1.0), ValueError, "affinity: expected a positive"),
        (lambda: b.sequence_loss(S / 0, I, 1.0), ValueError, "affinity: expected a positive"),
        (lambda: b.sequence_loss(S * float("nan"), I, 1.0), ValueError, "affinity: expected a positive"),
        (lambda: b.expert_loss(torch.ones(2), torch.tensor([0]), 1.0), ValueError, "affinity"),
        (lambda: b.device_loss(S, I, 3, 1.0), ValueError, "n_devices = 3"),
        (lambda: b.device_loss(S, I, 0, 1.0), ValueError, "n_devices = 0"),
        (lambda: b.communication_loss(S, I, 0, 1, 1.0), ValueError, "n_devices = 0"),
        (lambda: b.communication_loss(S, I, 2, 0, 1.0), ValueError, "most = 0"),
        (lambda: b.communication_loss(S, I, 2, 3, 1.0), ValueError, "most = 3"),
    ],
)
def test_refuses(call, error, says):
    with pytest.raises(error, match=says):
        call()
