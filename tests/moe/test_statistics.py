"""Experts touched, against every batch there is at small sizes, and against the article's printed table.

The skewed form has two oracles: successive draws written out as a sum over all orders (exact, small), and the
simulation at the official size. The slow simulation of the article's table comes last.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_edu.config import preset
from dsv41_edu.moe import statistics as s

BATCHES = [1, 8, 64, 256, 1024]
drawn = settings(derandomize=True, deadline=None, max_examples=40)


@pytest.mark.parametrize(
    ("E", "k", "B"), [(1, 1, 1), (2, 1, 3), (4, 2, 3), (5, 2, 2), (4, 3, 3), (3, 3, 2), (6, 1, 4)]
)
def test_closed_form_is_the_mean_over_every_batch(E, k, B):
    tokens = list(itertools.combinations(range(E), k))
    sizes = [len(set().union(*batch)) for batch in itertools.product(tokens, repeat=B)]
    assert s.experts_touched(E, k, B) == pytest.approx(float(Fraction(sum(sizes), len(sizes))), rel=1e-14)


@drawn
@given(st.integers(1, 400), st.data())
def test_closed_form_grows_from_k_to_all(E, data):
    k, B = data.draw(st.integers(1, E)), data.draw(st.integers(1, 3000))
    assert s.experts_touched(E, k, 0) == 0
    assert s.experts_touched(E, k, 1) == pytest.approx(k)
    assert k * (1 - 1e-12) <= s.experts_touched(E, k, B) <= min(E, B * k) * (1 + 1e-12)
    assert s.experts_touched(E, k, B) <= s.experts_touched(E, k, B + 1)
    assert s.experts_touched(E, E, B) == E


def test_the_articles_closed_form():
    touched = [s.experts_touched(384, 6, B) for B in BATCHES]
    assert [round(t, 1) for t in touched] == [6.0, 45.5, 243.8, 377.2, 384.0]
    assert [round(100 * t / 384, 1) for t in touched] == [1.6, 11.8, 63.5, 98.2, 100.0]


def test_simulation_is_seeded_and_near_the_closed_form():
    first = s.experts_touched_simulated(20, 3, [0, 1, 4, 15])
    assert first == s.experts_touched_simulated(20, 3, [0, 1, 4, 15], draws=200, seed=0)
    assert first != s.experts_touched_simulated(20, 3, [0, 1, 4, 15], seed=1)
    assert first[:2] == [0, 3]
    for B, found in zip([4, 15], first[2:], strict=True):
        assert found == pytest.approx(s.experts_touched(20, 3, B), abs=0.4)
    one = s.experts_touched_simulated(20, 3, [4], draws=1)[0]
    assert one == int(one)
    assert s.experts_touched_simulated(5, 5, [1, 3]) == [5, 5]


# Skewed routing.
def successive(p, k):
    """Exact inclusion: the sum over all orders of k draws, each by popularity among those left."""
    pi = np.zeros(len(p))
    for order in itertools.permutations(range(len(p)), k):
        left, chance = 1.0, 1.0
        for e in order:
            chance, left = chance * p[e] / left, left - p[e]
        pi[list(order)] += chance
    return pi


@drawn
@given(st.integers(1, 500), st.floats(0, 32) | st.just(32))
def test_popularity_is_zipfs_law(E, exponent):
    p = s.popularity(E, exponent)
    assert p.dtype == np.float64
    assert p.sum() == pytest.approx(1, rel=1e-12)
    for rank in {1, 2, E}:
        if rank <= E:
            assert p[rank - 1] == pytest.approx(p[0] / rank**exponent, rel=1e-12)


@drawn
@given(st.integers(1, 500), st.floats(0, 32), st.data())
def test_inclusion_sums_to_k_and_is_the_race_at_one_time(E, exponent, data):
    k = data.draw(st.integers(1, E))
    pi = s.inclusion(E, k, exponent)
    assert pi.sum() == pytest.approx(k, rel=1e-9)
    assert (pi[1:] <= pi[:-1]).all()
    assert (pi > 0).all()
    assert (pi <= 1).all()
    inside = pi < 1 - 1e-6  # there c can be read back, and must be one number
    if k < E and inside.any():
        c = -np.log1p(-pi[inside]) / s.popularity(E, exponent)[inside]
        np.testing.assert_allclose(c, c[0], rtol=1e-8)


def test_uniform_routing_is_exact():
    for E, k in ((384, 6), (7, 7), (5, 1)):
        np.testing.assert_allclose(s.inclusion(E, k, 0), k / E, rtol=1e-12)
        for B in (0, 1, 9):
            assert s.experts_touched_zipf(E, k, B, 0) == pytest.approx(s.experts_touched(E, k, B), rel=1e-12)


@pytest.mark.parametrize(("E", "k", "exponent"), [(6, 2, 1.0), (8, 3, 0.5), (8, 4, 1.0), (5, 5, 2.0)])
def test_inclusion_is_near_that_of_successive_draws(E, k, exponent):
    exact = successive(s.popularity(E, exponent), k)
    assert exact.sum() == pytest.approx(k)
    assert abs(s.inclusion(E, k, exponent) - exact).max() < 0.08


@pytest.mark.parametrize(("E", "k", "exponent"), [(6, 2, 1.0), (5, 4, 2.0), (6, 3, 0.0), (4, 4, 1.0)])
def test_the_race_is_successive_draws(E, k, exponent):
    exact = successive(s.popularity(E, exponent), k)
    found = s.experts_touched_zipf_simulated(E, k, [0, 1, 2, 5], exponent, draws=4000)
    assert found[:2] == [0, k]
    for B, touched in zip([2, 5], found[2:], strict=True):
        assert touched == pytest.approx((1 - (1 - exact) ** B).sum(), abs=0.06)


def test_the_race_among_many():
    p = s.popularity(2000, 1.0)
    exact = p + p * ((p / (1 - p)).sum() - p / (1 - p))  # first, or second after another
    (found,) = s.experts_touched_zipf_simulated(2000, 2, [40], 1.0, draws=200)
    assert found == pytest.approx((1 - (1 - exact) ** 40).sum(), rel=0.02)


def test_skew_touches_fewer_and_the_approximation_holds_at_the_official_size():
    batches, last = [8, 64, 256], None
    for exponent in (0.0, 0.5, 1.0):
        closed = [s.experts_touched_zipf(384, 6, B, exponent) for B in batches]
        found = s.experts_touched_zipf_simulated(384, 6, batches, exponent, draws=40)
        assert found == s.experts_touched_zipf_simulated(384, 6, batches, exponent, draws=40, seed=0)
        np.testing.assert_allclose(found, closed, rtol=0.03)  # 40 draws scatter by 1%
        assert last is None or all(x < y for x, y in zip(closed, last, strict=True))
        last = closed
    once = s.experts_touched_zipf_simulated(384, 6, [8], 1.0)
    assert once == s.experts_touched_zipf_simulated(384, 6, [8], 1.0, draws=200, seed=0)
    assert once != s.experts_touched_zipf_simulated(384, 6, [8], 1.0, seed=1)


# What reading costs.
def test_weight_bytes():
    assert s.weight_bytes_per_step(100, 6.5) == 650
    assert s.weight_bytes_per_step(100, 6, shared_bytes=30) == 630


def test_weight_traffic_flattens():
    c = preset("v41_flash")
    touched = [s.experts_touched(c.n_routed_experts, c.num_experts_per_tok, B) for B in (1, 512, 1024)]
    one, many, twice = (s.weight_bytes_per_step(18_800_640, t) for t in touched)
    assert many > 60 * one
    assert twice / many < 1.001


@drawn
@given(st.integers(1, 60), st.data())
def test_memory_bound_batch_is_the_first_that_computes_longer(E, data):
    k = data.draw(st.integers(1, E))
    params, nbytes = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 50))
    peak, bandwidth = data.draw(st.floats(0.1, 100)), data.draw(st.floats(0.1, 10))

    def computes_longer(B):
        return 2 * params * k * B / peak >= nbytes * s.experts_touched(E, k, B) / bandwidth

    # a hair's breadth from equality, rounding may decide either way
    found = s.memory_bound_batch(E, k, params, nbytes, peak, bandwidth)
    assert computes_longer(found * (1 + 1e-12))
    assert not any(computes_longer(B * (1 - 1e-12)) for B in range(1, min(found, 2000)))
    assert found == 1 or not computes_longer((found - 1) * (1 - 1e-12))


def test_memory_bound_batch_by_hand():
    # one expert for everybody: 10 bytes at 1 byte/s against 2 FLOPs a token at 1 FLOP/s
    assert s.memory_bound_batch(1, 1, 1, 10, 1.0, 1.0) == 5
    assert s.memory_bound_batch(1, 1, 1, 11, 1.0, 1.0) == 6
    assert s.memory_bound_batch(1, 1, 1, 1, 1.0, 1.0) == 1
    # two experts, 1.5 of them touched by two tokens: 6 B = 8 * 1.5
    assert s.memory_bound_batch(2, 1, 3, 8, 1.0, 1.0) == 2
    # all of 384 FP4 experts at 4.8 TB/s against 1979 TFLOP/s
    found = s.memory_bound_batch(384, 6, 35_389_440, 18_800_640, 1979e12, 4.8e12)
    assert found == math.ceil(384 * 18_800_640 / 4.8e12 / (2 * 35_389_440 * 6 / 1979e12)) == 7009


# Bad input.
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: s.experts_touched(4, 5, 1), "active = 5: expected 1 to 4"),
        (lambda: s.experts_touched(4, 0, 1), "active = 0"),
        (lambda: s.experts_touched(0, 0, 1), "active = 0"),
        (lambda: s.experts_touched(4, 2, -1), r"batches \[-1\]"),
        (lambda: s.experts_touched_simulated(4, 5, [1]), "active = 5"),
        (lambda: s.experts_touched_simulated(4, 2, [1, -2]), r"batches \[1, -2\]"),
        (lambda: s.experts_touched_simulated(4, 2, [1], draws=0), "draws = 0"),
        (lambda: s.popularity(4, -0.1), "exponent = -0.1"),
        (lambda: s.popularity(4, 32.5), "exponent = 32.5"),
        (lambda: s.popularity(4, math.nan), "exponent = nan"),
        (lambda: s.inclusion(4, 5, 1.0), "active = 5"),
        (lambda: s.experts_touched_zipf(4, 2, -1, 1.0), r"batches \[-1\]"),
        (lambda: s.experts_touched_zipf(4, 4, 1, -1.0), "exponent = -1.0"),
        (lambda: s.experts_touched_zipf_simulated(4, 5, [1], 1.0), "active = 5"),
        (lambda: s.experts_touched_zipf_simulated(4, 2, [1], 1.0, draws=0), "draws = 0"),
        (lambda: s.experts_touched_zipf_simulated(4, 2, [-1], 1.0), r"batches \[-1\]"),
        (lambda: s.experts_touched_zipf_simulated(4, 2, [1], -1.0), "exponent = -1.0"),
        (lambda: s.memory_bound_batch(4, 5, 1, 1, 1.0, 1.0), "active = 5"),
        (lambda: s.memory_bound_batch(4, 2, 0, 1, 1.0, 1.0), "expected positive finite"),
        (lambda: s.memory_bound_batch(4, 2, 1, 0, 1.0, 1.0), "expected positive finite"),
        (lambda: s.memory_bound_batch(4, 2, 1, 1, 0.0, 1.0), "expected positive finite"),
        (lambda: s.memory_bound_batch(4, 2, 1, 1, math.inf, 1.0), "expected positive finite"),
        (lambda: s.memory_bound_batch(4, 2, 1, 1, 1.0, math.nan), "expected positive finite"),
    ],
)
def test_refuses(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_the_articles_simulation():
    touched = s.experts_touched_simulated(384, 6, BATCHES)
    assert [round(t, 1) for t in touched] == [6.0, 45.7, 243.8, 377.1, 384.0]
    assert touched == pytest.approx([6.0, 45.68, 243.815, 377.105, 384.0], rel=1e-12)
