"""The fused scheduler against the reference, where ties are exact and at size, and against the public vectors.

Confidences and rates of eighths make equal survivals and equal rates equal in fp64, whatever the order of sums.
Outputs start as NaN and as numbers out of range, with margins that must stay as they were.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from dsv41_edu.dspark import scheduler
from dsv41_edu.dspark.scheduler import schedule
from kernels import admission
from kernels.admission import BLOCK, FLOOR, fused_schedule
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.launch import INTERPRETED
from kernels.launches import count_launches
from tests.dspark.test_scheduler import CASES, T, problems
from tests.kernels.test_experts import SHARED
from tests.kernels.test_gate import DEVICE, poison

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
either = pytest.mark.parametrize("early_stop", [True, False])


def fused(confidence, step_rate, early_stop=True):
    given = (torch.from_numpy(np.asarray(x)).to(DEVICE) for x in (confidence, step_rate))
    lengths = fused_schedule(*given, early_stop)
    assert lengths.dtype == torch.int64
    return lengths.tolist()


def case(R, g, slope=2.0, seed=0):
    """Confidences, and a table that falls slowly enough for about half of the drafts."""
    positions = np.arange(R * (g + 1) + 1)
    return np.random.default_rng(seed).beta(4, 1, (R, g)), 1 / (1 + slope * positions / len(positions))


@settings(derandomize=True, deadline=None, max_examples=15)
@given(problems())
def test_it_is_the_reference_where_all_ties_are_exact(problem):
    for early_stop in (True, False):
        assert fused(*problem, early_stop) == schedule(*problem, early_stop).tolist()


@either
@pytest.mark.parametrize(("R", "g"), [(1, 5), (2, 1), (13, 7), (17, 0), (BLOCK + 3, 5)])
def test_it_is_the_reference_at_size(R, g, early_stop, monkeypatch):
    confidence, step_rate = case(R, g)
    intact = poison(monkeypatch)
    found = fused(confidence, step_rate, early_stop)
    intact()
    assert found == schedule(confidence, step_rate, early_stop).tolist()
    assert g == 0 or 0 < sum(found) < R * g or R < 3


@either
def test_more_drafts_than_are_added_at_once(early_stop, monkeypatch):
    """A stair in the second of seven parts: the first stop comes early, the best number late."""
    monkeypatch.setattr(admission, "WIDE", 16)
    R, g = 21, 5
    confidence, step_rate = case(R, g, slope=0.05)
    step_rate[40:] *= 0.93
    found = fused(confidence, step_rate, early_stop)
    assert found == schedule(confidence, step_rate, early_stop).tolist()
    assert sum(found) == 39 - R if early_stop else sum(found) > 4 * 16


def test_the_fewest_of_equally_good_numbers(monkeypatch):
    """Rates of 1 with 4 drafts and with 60, far apart, and less with all others."""
    monkeypatch.setattr(admission, "WIDE", 16)
    step_rate = np.full(65, 1e-3)
    step_rate[[8, 64]] = 1 / 8, 1 / 64
    assert fused(np.ones((4, 15)), step_rate, early_stop=False) == [1, 1, 1, 1]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['curve']}-{c['confidences']}")
def test_vectors(case):
    key = f"case{case['case']:02d}."
    confidence, step_rate = (T[key + name].astype(np.float64) for name in ("confidence", "sps"))
    assert fused(confidence, step_rate) == T[key + "lens_early_stop"].tolist()
    assert fused(confidence, step_rate, early_stop=False) == T[key + "lens_global"].tolist()


def test_equal_survivals_go_by_position_then_by_request():
    """Room for 0 to 6 drafts of three requests that are equal in all."""
    ones = np.ones((3, 2))
    expected = [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]
    assert [fused(ones, np.ones(4 + b)) for b in range(7)] == expected


def test_the_floor_itself_is_worth_it_and_less_never_is():
    assert FLOOR.value == scheduler.FLOOR
    below = np.nextafter(1e-6, 0)
    assert fused(np.array([[1e-6, 1.0, 0.9], [below, 1.0, 1.0]]), np.ones(9)) == [2, 0]


def test_what_is_no_chance_is_never_verified():
    wrong = np.array([[1.0, np.nan, 1.0], [-0.5, 1.0, 1.0], [1.0, 1.0, 1.5], [0.5, 0.5, 0.5]])
    assert fused(wrong, np.ones(17)) == [1, 0, 2, 3]


@either
def test_a_stair_stops_the_walk_alone(early_stop):
    confidence, step_rate = np.full((2, 2), 0.9), np.array([1.0, 1.0, 1.0, 0.5, 0.9, 0.9, 0.9])
    assert fused(confidence, step_rate, early_stop) == ([0, 0] if early_stop else [2, 2])


def test_fp32_confidences_are_multiplied_in_fp64():
    confidence, step_rate = case(11, 5)
    narrow = confidence.astype(np.float32)
    assert fused(narrow, step_rate) == schedule(narrow, step_rate).tolist()


def test_two_runs_are_equal():
    assert fused(*case(40, 5)) == fused(*case(40, 5))


@interpreted
@either
def test_what_is_read_and_written(early_stop):
    R, g = 30, 5
    N, confidence, step_rate = R * g, *(torch.from_numpy(x) for x in case(R, g))
    with count_traffic(confidence=confidence, step_rate=step_rate) as traffic, count_launches() as launched:
        fused_schedule(confidence, step_rate, early_stop)
    assert traffic["confidence"] == Traffic(N, 0, 8 * N, 0)
    assert traffic["step_rate"].loaded == N + 1, "all are above the floor"
    slots = N * (-(-N // BLOCK) + 1)
    rates = N + 1 + (N if early_stop else 0)  # and each one's neighbour
    assert traffic["allocated float64"].stored == 2 * N + N + 1
    assert traffic["allocated float64"].loaded == slots + N + rates
    assert traffic["allocated int32"] == Traffic(N, N, 4 * N, 4 * N)
    assert traffic["allocated int64"] == Traffic(0, R, 0, 8 * R)
    assert launched == dict.fromkeys(("survivals", "rank", "rates", "lengths"), 1)


# ---- in its place


@either
def test_the_scheduler_uses_it_on_a_gpu(early_stop, monkeypatch):
    confidence, step_rate = case(9, 5)
    expected = schedule(confidence, step_rate, early_stop)
    assert not scheduler.fuse(confidence)
    assert not scheduler.fuse(torch.from_numpy(confidence))
    monkeypatch.setattr(scheduler, "fuse", lambda confidence: True)
    monkeypatch.setattr(scheduler, "survival", None)  # the reference would fail
    found = schedule(*(torch.from_numpy(x) for x in (confidence, step_rate)), early_stop)
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == expected.tolist()


# ---- bad input

C, S = (torch.from_numpy(x).to(DEVICE) for x in case(3, 2))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(confidence=C[0]), ValueError, r"confidence of shape \[2\]: expected \[R, g\], contiguous"),
        (dict(confidence=C.T), ValueError, r"confidence of shape \[2, 3\]: expected \[R, g\], contiguous"),
        (dict(step_rate=S[:3]), ValueError, r"step_rate of shape \[3\]: expected \[N\] with N > 3, contiguous"),
        (dict(step_rate=S[::2]), ValueError, r"step_rate of shape \[5\]: expected \[N\] with N > 3, contiguous"),
        (dict(step_rate=S.to("meta")), ValueError, "step_rate is on meta: expected .*, where confidence is"),
        (dict(confidence=C.half()), TypeError, r"confidence is torch\.float16: expected torch\.float32 or"),
        (dict(step_rate=S.float()), TypeError, r"step_rate is torch\.float32: expected torch\.float64"),
    ],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        fused_schedule(**dict(confidence=C, step_rate=S) | change)


def test_no_requests():
    assert fused(np.zeros((0, 5)), np.ones(1)) == []


def test_it_fits_every_target():
    reports = compile_all(["kernels.admission"])
    assert {report.target for report in reports} == {*TARGETS}
    for report in reports:
        assert report.spilled == report.stack_bytes == 0, report
        assert report.shared_bytes <= SHARED[report.target], report
