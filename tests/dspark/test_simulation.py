"""The engine by hand where nothing is random, by its expectations where something is, then what it is for.

Statistical checks are seeded, and allow five standard errors.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_edu.dspark import simulation as sim
from dsv41_edu.dspark.scheduler import Delayed, schedule

drawn = settings(derandomize=True, deadline=None, max_examples=60)
ENGINE = sim.Roofline(
    dense_bytes=200.0, routed_bytes=800.0, routed_share=0.1, position_flops=30.0, cached_token_bytes=0.01,
    bandwidth=1000.0, peak=5000.0, overhead=0.25,
)  # fmt: skip
LONG = 10**9  # an answer that never ends
FREE = sim.Roofline(1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)  # a second a step, whatever it does


# Expected tokens.
@drawn
@given(st.integers(0, 63).map(lambda n: Fraction(n, 64)), st.integers(0, 12))
def test_expected_tokens_in_closed_form(a, g):
    tokens = sim.expected_tokens(float(a), g)
    assert tokens == pytest.approx(float((1 - a ** (g + 1)) / (1 - a)), rel=1e-15)
    if g:
        assert sim.acceptance_of(tokens, g) == pytest.approx(float(a), rel=1e-12, abs=1e-300)


def test_acceptance_at_its_ends():
    assert sim.acceptance_of(1, 3) < 1e-15
    assert sim.acceptance_of(4, 3) == 1
    assert (sim.expected_tokens(1.0, 3), sim.expected_tokens(0.0, 3), sim.expected_tokens(0.5, 0)) == (4, 1, 1)


@pytest.mark.parametrize(("a", "g"), [(0.5, 2), (0.8, 5), (0.95, 7)])
def test_simulated_tokens_are_the_expected_ones(a, g):
    slots, steps = 100, 300
    found = sim.simulate(FREE, sim.fixed(g), [[a] * g], sim.Load(slots, answer=LONG), steps=steps)
    mean = sim.expected_tokens(a, g)
    second = sum((2 * j + 1) * a**j for j in range(g + 1))  # of tokens squared
    assert abs(found.tokens - mean) < 5 * math.sqrt((second - mean**2) / (slots * steps))
    assert found.throughput == pytest.approx(slots * found.tokens)
    assert found.verified == g + 1


def test_each_place_and_each_kind_has_its_own_acceptance():
    kinds = [[0.9, 0.2, 0.7], [0.3, 0.6, 0.5]]
    means = [1 + a * (1 + b * (1 + c)) for a, b, c in kinds]
    for spread in (math.inf, 3.0, 0.5):
        found = sim.simulate(FREE, sim.fixed(3), kinds, sim.Load(300, answer=20), spread=spread, steps=600)
        # a request of the slower kind stays longer: steps are shared in proportion to 1 / tokens a step
        expected = 2 / sum(1 / mean for mean in means)
        assert found.tokens == pytest.approx(expected, rel=0.05)
    one = sim.simulate(FREE, sim.fixed(3), kinds[:1], sim.Load(300, answer=LONG), spread=3.0, steps=300)
    assert one.tokens == pytest.approx(means[0], rel=0.01)


# Time.
def test_seconds_of_a_step_by_hand():
    assert ENGINE.seconds(0, 0) == pytest.approx(0.25 + 0.2)
    assert ENGINE.seconds(1, 0) == pytest.approx(0.25 + (200 + 80) / 1000)
    assert ENGINE.seconds(2, 3000) == pytest.approx(0.25 + (200 + 800 * 0.19 + 30) / 1000)
    assert ENGINE.seconds(1000, 0) == pytest.approx(0.25 + 30 * 1000 / 5000)
    assert ENGINE.seconds(np.array([1, 1000]), 0) == pytest.approx([ENGINE.seconds(1, 0), ENGINE.seconds(1000, 0)])


@pytest.mark.parametrize(("acceptance", "tokens"), [(1.0, 4), (0.0, 1)])
def test_a_run_without_chance_by_hand(acceptance, tokens):
    load = sim.Load(5, prompt=100, answer=LONG)
    found = sim.simulate(ENGINE, sim.fixed(3), [[acceptance] * 3], load, steps=3, warm_up=2)
    # cached tokens grow by `tokens` a step and request, from the first step of the warm-up on
    seconds = [float(ENGINE.seconds(20, 5 * (100 + tokens * i))) for i in (2, 3, 4)]
    assert found.throughput == pytest.approx(3 * 5 * tokens / sum(seconds), rel=1e-12)
    assert found.user_speed == pytest.approx(3 * tokens / sum(seconds), rel=1e-12)
    assert (found.verified, found.tokens, found.running) == pytest.approx((4, tokens, 5), rel=1e-12)


def test_the_same_seed_gives_the_same_run():
    def run(seed):
        return sim.simulate(ENGINE, sim.threshold(0.5), [[0.8] * 3], sim.Load(7, 2.0, 10, 30), 4.0, 50, 5, seed)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_smallest_run():
    found = sim.simulate(FREE, sim.fixed(0), [[0.5]], sim.Load(1, prompt=0, answer=1), steps=1, warm_up=0)
    assert found == sim.Result(throughput=1, user_speed=1, verified=1, tokens=1, running=1)


# Arrivals.
def test_an_engine_waits_for_its_first_request():
    found = sim.simulate(FREE, sim.fixed(0), [[0.5]], sim.Load(1, rate=1e-3), steps=1, warm_up=0)
    assert found.running < 0.1


def test_with_few_arrivals_requests_hardly_meet():
    # 20 tokens at 1 a step and second: busy for 20 s, 1000 s apart
    found = sim.simulate(FREE, sim.fixed(0), [[0.5]], sim.Load(10, rate=1e-3, answer=20), steps=20_000)
    assert found.user_speed == pytest.approx(1, rel=1e-12)
    assert found.running == pytest.approx(0.02, rel=0.2)
    assert found.throughput == pytest.approx(0.02, rel=0.2)


def test_what_arrives_is_what_is_written_until_the_slots_are_full():
    # a request takes about 10 s: below one a second for 10 slots they keep up
    for rate, running in ((0.3, 3.0), (0.6, 6.0), (3.0, 10.0)):
        found = sim.simulate(FREE, sim.fixed(0), [[0.5]], sim.Load(10, rate, answer=10), steps=8000, warm_up=1000)
        assert found.running == pytest.approx(running, rel=0.1)
        assert found.throughput == pytest.approx(running, rel=0.1)
    full = sim.simulate(FREE, sim.fixed(0), [[0.5]], sim.Load(10, answer=10), steps=100)
    assert (full.running, full.throughput) == (10, 10)


def test_answers_have_their_mean_length_and_prompts_their_share_of_the_time():
    # steps of a second and a hundredth for each cached token
    engine = sim.Roofline(1.0, 0.0, 0.0, 0.0, 0.01, 1.0, 1.0)
    found = sim.simulate(engine, sim.fixed(0), [[0.5]], sim.Load(50, prompt=30, answer=40), steps=2000, warm_up=500)
    # whoever is met has written 39 so far, on average: geometric lengths don't know their age
    assert 50 / found.throughput == pytest.approx(1 + 0.01 * 50 * (30 + 39), rel=0.03)


# Policies.
def test_policies():
    confidence = np.array([[0.9, 0.5, 0.9], [0.4, 0.9, 0.9], [0.5, 0.6, 0.7]])
    assert sim.fixed(2)(confidence).tolist() == [2, 2, 2]
    assert sim.threshold(0.5)(confidence).tolist() == [3, 0, 3]
    assert sim.threshold(0.51)(confidence).tolist() == [1, 0, 0]


def test_under_load_the_scheduler_verifies_less_and_is_never_below_a_fixed_choice():
    engine = sim.Roofline(1.0, 20.0, 0.03, 0.01, 0.0, 20.0, 3.0, overhead=0.1)
    acceptance, scheduled = [[0.9, 0.85, 0.8, 0.75, 0.7], [0.6, 0.55, 0.5, 0.45, 0.4]], []
    best = []
    for slots in (20, 80, 320):
        rate = 1 / engine.seconds(np.arange(6 * slots + 1), 0)
        policies = [sim.fixed(1), sim.fixed(3), sim.fixed(5), sim.threshold(0.5)]
        runs = [
            sim.simulate(engine, p, acceptance, sim.Load(slots), spread=4.0, steps=150, warm_up=20)
            for p in [*policies, Delayed(rate), lambda c, rate=rate: schedule(c, rate)]
        ]
        *others, delayed, early = (run.throughput for run in runs)
        # what chance does to a mean of so few steps
        assert min(delayed, early) > 0.99 * max(others)
        best.append(others[:3].index(max(others[:3])))
        scheduled.append(runs[4].verified)
    assert best == [2, 1, 0]  # the fixed choice that is best changes with the load
    assert scheduled[0] > scheduled[1] > scheduled[2]
    assert scheduled[0] > 4
    assert scheduled[2] < 3


# Bad input.
L = sim.Load(2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sim.acceptance_of(0.9, 3), "tokens = 0.9: expected 1 to 4"),
        (lambda: sim.acceptance_of(4.1, 3), "tokens = 4.1"),
        (lambda: sim.acceptance_of(math.nan, 3), "tokens = nan"),
        (lambda: sim.Load(0), "slots=0"),
        (lambda: sim.Load(1, rate=0.0), "rate=0.0"),
        (lambda: sim.Load(1, rate=math.nan), "rate=nan"),
        (lambda: sim.Load(1, prompt=-1), "prompt=-1"),
        (lambda: sim.Load(1, answer=0), "answer=0"),
        (lambda: sim.simulate(FREE, sim.fixed(1), [0.5], L), r"acceptance \[1\]: expected \[kinds, g\]"),
        (lambda: sim.simulate(FREE, sim.fixed(1), np.zeros((0, 2)), L), r"acceptance \[0, 2\]"),
        (lambda: sim.simulate(FREE, sim.fixed(1), [[0.5, 1.5]], L), "acceptance holds 1.5: expected chances from 0"),
        (lambda: sim.simulate(FREE, sim.fixed(1), [[-0.5]], L), "acceptance holds -0.5"),
        (lambda: sim.simulate(FREE, sim.fixed(1), [[math.nan]], L), "acceptance holds nan"),
        (lambda: sim.simulate(FREE, sim.fixed(1), [[1.0]], L, spread=2.0), "holds 1.0: expected chances between"),
        (lambda: sim.simulate(FREE, sim.fixed(1), [[0.0]], L, spread=2.0), "holds 0.0: expected chances between"),
        (lambda: sim.simulate(FREE, sim.fixed(1), [[0.5]], L, spread=0.0), "spread = 0.0"),
        (lambda: sim.simulate(FREE, sim.fixed(1), [[0.5]], L, spread=math.nan), "spread = nan"),
        (lambda: sim.simulate(FREE, sim.fixed(1), [[0.5]], L, steps=0), "steps = 0"),
        (lambda: sim.simulate(FREE, sim.fixed(1), [[0.5]], L, warm_up=-1), "warm_up = -1"),
        (lambda: sim.simulate(FREE, sim.fixed(2), [[0.5]], L), r"lengths \[2, 2\]: expected 2 numbers from 0 to 1"),
        (lambda: sim.simulate(FREE, sim.fixed(-1), [[0.5]], L), r"lengths \[-1, -1\]"),
        (lambda: sim.simulate(FREE, lambda c: np.array([0, 2]), [[0.5]], L), r"lengths \[0, 2\]"),
        (lambda: sim.simulate(FREE, lambda c: np.zeros(3), [[0.5]], L), "expected 2 numbers"),
    ],
)
def test_refuses(call, says):
    with pytest.raises(ValueError, match=says):
        call()
