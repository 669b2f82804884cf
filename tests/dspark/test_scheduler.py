"""The scheduler against a walk over sorted slots, against exhaustive search, and for what it must not know.

Confidences are eighths where ties matter, so that survivals are equal in fp64 where they are in fractions. A decision
about a draft may hang on those before it alone: changed first by hand, then in the law of a whole output.
"""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dsv41_edu.benchmarks.dspark import walk
from dsv41_edu.dspark import scheduler as s
from dsv41_edu.dspark.exact import output_law, target_law
from dsv41_edu.dspark.verification import BLOCK, TOKEN_BY_TOKEN

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "scheduler.json").read_text())["cases"]
T = load_file(VECTORS / "scheduler.safetensors")
drawn = settings(derandomize=True, deadline=None, max_examples=60)

eighths = st.integers(0, 8).map(lambda n: n / 8)
positive = st.integers(1, 8).map(lambda n: n / 8)


@st.composite
def requests(draw, most=5, chance=eighths):
    """confidence [R, g]."""
    R, g = draw(st.integers(0, most)), draw(st.integers(0, 4))
    return np.array([[draw(chance) for _ in range(g)] for _ in range(R)], dtype=np.float64).reshape(R, g)


@st.composite
def problems(draw, most=5, chance=eighths):
    """confidence and a table, falling or not, that holds all positions."""
    confidence = draw(requests(most, chance))
    R, g = confidence.shape
    size = R * (g + 1) + 1
    return confidence, np.array(draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))) / 8


# Against plain walks and searches.
@drawn
@given(problems())
def test_algorithm_1_is_the_walk(problem):
    confidence, rate = problem
    found = s.schedule(confidence, rate)
    assert found.tolist() == walk(confidence.tolist(), rate.tolist())
    assert found.dtype == np.int64


def test_algorithm_1_is_the_walk_at_size():
    r = np.random.default_rng(0)
    for slope in (0.5, 2, 8):
        confidence = r.beta(4, 1, (300, 5))
        rate = 1 / (1 + slope * np.arange(1801) / 1800)
        found = s.schedule(confidence, rate)
        assert found.tolist() == walk(confidence.tolist(), rate.tolist())
        assert 0 < found.sum() < 1500


def value(confidence, lengths, rate):
    tokens = sum(1 + sum(np.prod(row[: j + 1]) for j in range(n)) for row, n in zip(confidence, lengths, strict=True))
    return tokens * rate[len(confidence) + sum(lengths)]


@drawn
@given(problems(most=3, chance=positive))
def test_global_search_is_the_best_of_all_lengths(problem):
    confidence, rate = problem
    R, g = confidence.shape
    every = list(product(range(g + 1), repeat=R))
    found = s.schedule(confidence, rate, early_stop=False)
    best = max(value(confidence, lengths, rate) for lengths in every)
    assert value(confidence, found.tolist(), rate) == pytest.approx(best, rel=1e-12)
    assert s.throughput(confidence, found, rate) == pytest.approx(best, rel=1e-12)
    assert s.throughput(confidence, s.schedule(confidence, rate), rate) <= best * (1 + 1e-12)


@drawn
@given(requests(most=3, chance=positive))
def test_a_budget_is_filled_by_the_best_prefixes(confidence):
    R, g = confidence.shape
    survivals, flat = s.survival(confidence), np.ones(R * (g + 1) + 1)
    order = sorted((-survivals[r, j], j, r) for r in range(R) for j in range(g))
    for budget in range(R * g + 1):
        found = s.fill(survivals, budget).tolist()
        assert found == [sum(r == taken for _, _, taken in order[:budget]) for r in range(R)]
        best = max(
            (value(confidence, x, flat) for x in product(range(g + 1), repeat=R) if sum(x) == budget), default=0
        )
        assert value(confidence, found, flat) == pytest.approx(best, rel=1e-12)
    assert s.fill(survivals, R * g + 7).tolist() == [g] * R


@pytest.mark.parametrize(
    ("slope", "start", "lengths", "best"),
    [(0.1, 1, [4, 2], 2.959111), (0.3, 1, [2, 1], 1.688), (0.5, 0.5, [1, 0], 1.45)],
)
def test_the_examples_of_two_requests(slope, start, lengths, best):
    confidence = [[0.9, 0.8, 0.7, 0.6, 0.5], [0.6, 0.5, 0.4, 0.3, 0.2]]
    rate = 1 / (start + slope * np.arange(13))
    for early_stop in (True, False):
        assert s.schedule(confidence, rate, early_stop).tolist() == lengths
    assert round(s.throughput(confidence, lengths, rate), 6) == best


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['curve']}-{c['confidences']}")
def test_vectors(case):
    key = f"case{case['case']:02d}."
    confidence, rate = T[key + "confidence"], T[key + "sps"]
    survivals = s.survival(confidence)
    early, searched = s.schedule(confidence, rate), s.schedule(confidence, rate, early_stop=False)
    assert np.array_equal(early, T[key + "lens_early_stop"])
    assert np.array_equal(searched, T[key + "lens_global"])
    assert (early.sum(), searched.sum()) == (case["budget_early_stop"], case["budget_global"])
    assert abs(s.throughput(confidence, early, rate) - case["theta_early_stop"]) < 1e-6
    assert abs(s.throughput(confidence, searched, rate) - case["theta_global"]) < 1e-6
    assert abs(s.theta(survivals, rate).max() - case["theta_global"]) < 1e-6
    for budget, lengths in case["lens_for_fixed_budget"].items():
        assert s.fill(survivals, int(budget)).tolist() == lengths
    assert np.array_equal(s.schedule(torch.from_numpy(confidence), rate), early)


# Rules.
def test_survival_is_the_running_product_and_the_first_place_counts():
    assert s.survival([[0.5, 0.5, 1.0]]).tolist() == [[0.5, 0.25, 0.25]]
    # a sure second draft doesn't help where the first one hardly ever stands
    assert s.schedule([[0.01, 1.0], [0.5, 0.1]], np.ones(7) / (1 + 0.1 * np.arange(7))).tolist() == [0, 1]


def test_ties_go_to_the_smaller_place_then_to_the_smaller_request():
    survivals = s.survival(np.array([[0.5, 1.0], [0.5, 1.0], [0.25, 1.0]]))
    assert [s.fill(survivals, b).tolist() for b in range(1, 7)] == [
        [1, 0, 0], [1, 1, 0], [2, 1, 0], [2, 2, 0], [2, 2, 1], [2, 2, 2]
    ]  # fmt: skip


def test_a_rate_that_is_only_equal_stops_the_walk_and_loses_the_search():
    # theta: 2, 2, 2.5 with 0, 1, 2 drafts of the first curve; 2, 3, 3 of the second
    first, second = np.array([9, 9, 1, 0.8, 1]), np.array([9, 9, 1, 1.2, 1])
    confidence = [[0.5], [0.5]]
    assert s.theta(s.survival(confidence), first).tolist() == [2, 2, 3]
    assert s.schedule(confidence, first).tolist() == [0, 0]
    assert s.schedule(confidence, first, early_stop=False).tolist() == [1, 1]
    assert s.theta(s.survival(confidence), second).tolist() == [2, 3, 3]
    assert s.schedule(confidence, second, early_stop=False).tolist() == [1, 0]


def test_a_staircase_traps_the_walk_but_not_the_search():
    # the first draft doubles the step, the second and third are free; the walk never gets that far
    rate = s.step_rates([1, 4, 8], [0.5, 1.0, 1.5], staircase=True)
    assert rate.tolist() == [2, 2, 1, 1, 1, 1 / 1.5, 1 / 1.5, 1 / 1.5, 1 / 1.5]
    confidence = [[0.9] * 7]
    assert s.schedule(confidence, rate).tolist() == [0]
    assert s.schedule(confidence, rate, early_stop=False).tolist() == [7]
    smooth = s.step_rates([1, 4, 8], [0.5, 1.0, 1.5])
    assert smooth == pytest.approx(1 / np.array([0.5, 0.5, 2 / 3, 5 / 6, 1, 1.125, 1.25, 1.375, 1.5]))
    assert s.schedule(confidence, smooth).tolist() == [7]


def test_drafts_that_hardly_survive_are_never_verified():
    rising = np.arange(1, 8.0)
    confidence = np.array([[0.5, 2.001e-6, 1.0], [0.5, 1.999e-6, 1.0]])
    for early_stop in (True, False):
        assert s.schedule(confidence, rising, early_stop).tolist() == [3, 1]
    assert s.fill(s.survival(confidence), 6).tolist() == [3, 1]
    assert s.fill(np.array([[1e-6], [0.9e-6]]), 2).tolist() == [1, 0]
    assert s.theta(np.array([[1e-6], [0.9e-6]]), rising).shape == (2,)
    assert s.schedule(np.zeros((2, 3)), rising).tolist() == [0, 0]


def test_the_tables_end_is_the_capacity():
    confidence = np.full((3, 4), 1.0)
    for positions, total in ((3, 0), (4, 1), (9, 6), (15, 12), (40, 12)):
        for early_stop in (True, False):
            assert s.schedule(confidence, np.ones(positions + 1), early_stop).sum() == total


def test_without_a_table_all_are_verified():
    assert s.schedule([[0.0, 0.5], [1.0, 0.0]], None).tolist() == [2, 2]
    assert s.schedule(np.zeros((0, 3)), None).tolist() == []


def test_no_requests_and_no_drafts():
    for early_stop in (True, False):
        assert s.schedule(np.zeros((0, 5)), [1.0], early_stop).tolist() == []
        assert s.schedule(np.zeros((2, 0)), [1.0, 1.0, 1.0], early_stop).tolist() == [0, 0]
    assert s.Delayed([1.0])(np.zeros((0, 5))).tolist() == []
    assert s.throughput(np.zeros((0, 5)), [], [1.0]) == 0


# What a decision may know.
@drawn
@given(problems(), st.integers(0, 4), st.integers(0, 3), st.lists(eighths, min_size=4, max_size=4))
def test_later_confidences_decide_nothing(problem, r, j, others):
    confidence, rate = problem
    if r >= len(confidence) or j >= confidence.shape[1]:
        return
    changed = confidence.copy()
    changed[r, j:] = others[j : confidence.shape[1]]
    before, after = s.schedule(confidence, rate), s.schedule(changed, rate)
    assert min(before[r], j) == min(after[r], j)
    for budget in range(confidence.size + 1):
        before, after = (s.fill(s.survival(x), budget) for x in (confidence, changed))
        assert min(before[r], j) == min(after[r], j)


TARGET = [torch.tensor(x, dtype=torch.float64) for x in ([0.7, 0.3], [[0.7, 0.3]] * 2, [[[0.7, 0.3]] * 2] * 2)]
DRAFT = [torch.full((2,), 0.5, dtype=torch.float64), torch.full((2, 2), 0.5, dtype=torch.float64)]
RATE = [2, 1, 0.5, 0.45]
AFTER = [[0.8, 1.0], [0.8, 0.0]]  # confidences after a first draft of 0, of 1: the second knows the first


def lengths_after(scheduler):
    return torch.tensor([[int(scheduler([AFTER[first]])[0])] * 2 for first in range(2)])


@pytest.mark.parametrize("rule", [TOKEN_BY_TOKEN, BLOCK], ids=["token by token", "block"])
def test_a_search_over_current_confidences_bends_the_law(rule):
    lengths = lengths_after(lambda c: s.schedule(c, RATE, early_stop=False))
    assert lengths.tolist() == [[2, 2], [0, 0]]
    law = output_law(rule, TARGET, DRAFT, lengths=lengths).tokens
    torch.testing.assert_close(law.sum((1, 2)), torch.tensor([0.85, 0.15], dtype=torch.float64), rtol=0, atol=1e-12)
    for old in ([0.8, 1.0], [0.8, 0.0]):

        def delayed(confidence, old=old):
            scheduler = s.Delayed(RATE)
            scheduler([old])
            scheduler([[0.5, 0.5]])
            return scheduler(confidence)

        for lossless in (lambda c: s.schedule(c, RATE), delayed):
            law = output_law(rule, TARGET, DRAFT, lengths=lengths_after(lossless)).tokens
            torch.testing.assert_close(law, target_law(TARGET), rtol=0, atol=1e-12)
    assert lengths_after(delayed).sum() == 0
    assert lengths_after(lambda c: s.schedule(c, RATE)).sum() == 0


# The production form.
def test_the_budget_is_two_steps_old_and_the_order_is_current():
    rate = s.step_rates([2, 4, 8], [1.0, 1.2, 2.0], staircase=True)
    steps = [np.random.default_rng(i).beta(3, 1, (2, 3)) for i in range(8)]
    budgets = [int(s.schedule(c, rate, early_stop=False).sum()) for c in steps]
    delayed = s.Delayed(rate)
    found = [delayed(c) for c in steps]
    for i, confidence in enumerate(steps):
        if i < 2:
            assert np.array_equal(found[i], s.schedule(confidence, rate))
        else:
            assert np.array_equal(found[i], s.fill(s.survival(confidence), budgets[i - 2]))
    assert len(set(budgets)) > 1


def test_the_budget_is_of_positions_so_it_stays_on_its_stair():
    delayed = s.Delayed(s.step_rates([8, 16], [1.0, 4.0], staircase=True))
    sure = [np.full((R, 3), 0.9) for R in (2, 2, 3, 4, 9, 9, 1)]
    assert [len(c) + delayed(c).sum() for c in sure] == [8, 8, 8, 8, 9, 9, 4]
    assert delayed(np.zeros((0, 3))).tolist() == []


def test_two_schedulers_share_nothing_and_the_same_steps_give_the_same():
    rate, steps = np.ones(9), [np.random.default_rng(i).random((2, 3)) for i in range(5)]
    one, two = s.Delayed(rate), s.Delayed(rate)
    first = [one(c).tolist() for c in steps]
    assert [two(c).tolist() for c in steps] == first


# Bad input.
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: s.schedule([0.5, 0.5], [1, 1]), r"confidence \[2\]: expected \[R, g\]"),
        (lambda: s.schedule([[0.5, 1.5]], np.ones(4)), "confidence holds 1.5"),
        (lambda: s.schedule([[-0.1]], np.ones(4)), "confidence holds -0.1"),
        (lambda: s.schedule([[float("nan")]], np.ones(4)), "confidence holds nan"),
        (lambda: s.schedule([[2.0]], None), "confidence holds 2.0"),
        (lambda: s.schedule([[0.5], [0.5]], np.ones(2)), r"step_rate \[2\]: expected \[N\] with N > 2"),
        (lambda: s.schedule([[0.5]], np.ones((2, 2))), r"step_rate \[2, 2\]"),
        (lambda: s.schedule([[0.5]], [1, 1, 0]), r"step_rate\[2\] = 0.0"),
        (lambda: s.schedule([[0.5]], [1, -1, 1]), r"step_rate\[1\] = -1.0"),
        (lambda: s.schedule([[0.5]], [1, float("inf"), 1]), r"step_rate\[1\] = inf"),
        (lambda: s.schedule([[0.5]], [float("nan"), 1, 1]), r"step_rate\[0\] = nan"),
        (lambda: s.Delayed([]), r"step_rate \[0\]"),
        (lambda: s.Delayed([1, 0]), r"step_rate\[1\] = 0.0"),
        (lambda: s.Delayed([1, 1])([[0.5], [0.5]]), "N > 2"),
        (lambda: s.Delayed([1, 1])([[1.5]]), "confidence holds 1.5"),
        (lambda: s.throughput([[0.5]], [1], [1, 1]), "N > 2"),
        (lambda: s.step_rates([1, 2], [1.0]), r"positions \[2\], seconds \[1\]"),
        (lambda: s.step_rates([], []), r"positions \[0\]"),
        (lambda: s.step_rates([[1]], [[1.0]]), r"positions \[1, 1\]"),
        (lambda: s.step_rates([0, 2], [1.0, 1.0]), r"positions = \[0, 2\]"),
        (lambda: s.step_rates([2, 2], [1.0, 1.0]), r"positions = \[2, 2\]"),
        (lambda: s.step_rates([1, 3, 2], [1.0, 1.0, 1.0]), r"positions = \[1, 3, 2\]"),
        (lambda: s.step_rates([1, 2], [1.0, 0.0]), r"seconds = \[1.0, 0.0\]"),
        (lambda: s.schedule([[0.5, 0.5], [0.5, 1.5]], np.ones(7)), "confidence holds 1.5"),
        (lambda: s.step_rates([1, 2], [1.0, float("inf")]), "seconds"),
        (lambda: s.step_rates([1, 2], [1.0, float("nan")]), "seconds"),
    ],
)
def test_refuses(call, says):
    with pytest.raises(ValueError, match=says):
        call()
