"""Bins by a loop over samples, temperatures by a search in plain Python, both against the public vectors."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41_edu.dspark import calibration as c

T = load_file(Path(__file__).parents[1] / "vectors" / "scheduler.safetensors")
LOGITS, ACCEPTED = T["sts.logits"], T["sts.prefix_mask"]
drawn = settings(derandomize=True, deadline=None, max_examples=60)
samples = st.lists(st.tuples(st.integers(0, 64).map(lambda n: n / 64), st.booleans()), min_size=1, max_size=30)


def error_of(pairs, bins):
    """By one bin after the other: above its lower edge and up to its upper one."""
    total = 0.0
    for b in range(bins):
        mine = [(p, y) for p, y in pairs if b < p * bins <= b + 1 or (b == 0 and p == 0)]
        if mine:
            predicted, observed = (sum(x) / len(mine) for x in zip(*mine, strict=True))
            total += len(mine) / len(pairs) * abs(predicted - observed)
    return total


@drawn
@given(samples, st.sampled_from([1, 2, 4, 15]))
def test_error_by_a_loop(pairs, bins):
    p, y = (torch.tensor(x) for x in zip(*pairs, strict=True))
    assert c.calibration_error(p, y, bins) == pytest.approx(error_of(pairs, bins), abs=1e-12)
    assert c.calibration_error(p.float(), y.long(), bins) == pytest.approx(error_of(pairs, bins), abs=1e-12)
    if bins == 15:
        assert c.calibration_error(p, y) == c.calibration_error(p, y, 15)


def test_diagram_counts_each_bin_with_its_upper_edge():
    p, y = torch.tensor([0.0, 0.25, 0.3, 0.5, 1.0, 1.0]), torch.tensor([1, 0, 1, 0, 1, 0])
    diagram = c.reliability(p, y, 4)
    assert diagram.count.tolist() == [2, 2, 0, 2]
    assert diagram.predicted[[0, 1, 3]].tolist() == pytest.approx([0.125, 0.4, 1.0])
    assert diagram.observed[[0, 1, 3]].tolist() == [0.5, 0.5, 0.5]
    assert diagram.predicted[2].isnan()
    assert diagram.observed[2].isnan()
    assert c.calibration_error(p, y, 4) == pytest.approx((2 * 0.375 + 2 * 0.1 + 2 * 0.5) / 6)


def test_what_means_what_it_says_has_no_error():
    p = torch.tensor([0.25] * 4 + [0.75] * 4)
    y = torch.tensor([1, 0, 0, 0, 1, 1, 1, 0])
    assert c.calibration_error(p, y) == 0
    assert c.calibration_error(1 - p, y) == pytest.approx(0.5)


def test_survivals_are_products_of_scaled_chances():
    found = c.survivals(torch.tensor([[2.0, -1.0], [0.0, 4.0]]), [0.5, 2.0])
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    expected = [[sigmoid(4), sigmoid(4) * sigmoid(-0.5)], [0.5, 0.5 * sigmoid(2)]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_vectors():
    grid = T["sts.grid"].tolist()
    torch.testing.assert_close(c.GRID, T["sts.grid"], rtol=1e-7, atol=0)
    found = c.fit_temperatures(LOGITS, ACCEPTED, grid)
    assert found == T["sts.temperatures"].tolist()
    for temperatures, name in (([1.0] * 5, "sts.ece_before"), (found, "sts.ece_after")):
        survivals = c.survivals(LOGITS, temperatures)
        errors = [c.calibration_error(survivals[:, k], ACCEPTED[:, k]) for k in range(5)]
        # stored rounded to fp32
        torch.testing.assert_close(torch.tensor(errors, dtype=torch.float64), T[name], rtol=2**-24, atol=1e-9)


def test_temperatures_are_fitted_from_left_to_right():
    grid, logits, accepted = [0.5, 1.0, 2.0, 4.0], LOGITS[:500, :3], ACCEPTED[:500, :3]
    fixed, before = [], torch.ones(500, dtype=torch.float64)
    for k in range(3):
        products = [before * (logits[:, k].double() / T_k).sigmoid() for T_k in grid]
        errors = [error_of(list(zip(s.tolist(), accepted[:, k].tolist(), strict=True)), 15) for s in products]
        fixed.append(grid[errors.index(min(errors))])
        before = products[errors.index(min(errors))]
    assert c.fit_temperatures(logits, accepted, grid) == fixed
    assert c.fit_temperatures(logits[:, :2], accepted[:, :2], grid) == fixed[:2]
    assert len(set(fixed)) > 1


def test_a_planted_temperature_is_found():
    # the head is too sure by a factor that differs by place
    r = torch.Generator().manual_seed(0)
    honest, planted = torch.randn(20_000, 3, generator=r, dtype=torch.float64) + 1, [2.0, 0.5, 1.0]
    accepted = (torch.rand(20_000, 3, generator=r) < honest.sigmoid()).cumprod(1)
    found = c.fit_temperatures(honest * torch.tensor(planted), accepted)
    for T_k, expected in zip(found, planted, strict=True):
        assert 0.75 < T_k / expected < 1.35
    s = c.survivals(honest * torch.tensor(planted), found)
    assert max(c.calibration_error(s[:, k], accepted[:, k]) for k in range(3)) < 0.02


def test_the_first_of_equal_temperatures():
    logits, accepted = torch.zeros(4, 1), torch.tensor([[1], [1], [0], [0]])  # sigmoid(0 / T) is 0.5 for all
    assert c.fit_temperatures(logits, accepted, [3.0, 1.0, 2.0]) == [3.0]


P, Y = torch.tensor([0.5, 0.5]), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: c.reliability(P[:1], Y), r"probability \[1\], event \[2\]"),
        (lambda: c.reliability(P[:0], Y[:0]), r"probability \[0\]"),
        (lambda: c.reliability(P[None], Y[None]), r"probability \[1, 2\]"),
        (lambda: c.reliability(P, Y, 0), "bins = 0"),
        (lambda: c.reliability(P + 1, Y), "probability from 1.5 to 1.5"),
        (lambda: c.reliability(torch.tensor([0.5, 1.5]), Y), "probability from 0.5 to 1.5"),
        (lambda: c.reliability(P, torch.tensor([1, 2])), "event from 1.0 to 2.0"),
        (lambda: c.reliability(P - 1, Y), "probability from -0.5"),
        (lambda: c.reliability(P * float("nan"), Y), "probability from nan"),
        (lambda: c.reliability(P, Y * 2), "event from 0.0 to 2.0"),
        (lambda: c.calibration_error(P, Y * 0.5), "event from 0.0 to 0.5"),
        (lambda: c.survivals(P, [1.0, 1.0]), r"logits \[2\], 2 temperatures"),
        (lambda: c.survivals(P[None], [1.0]), r"logits \[1, 2\], 1 temperatures"),
        (lambda: c.survivals(P[None], [1.0, 0.0]), r"temperatures = \[1.0, 0.0\]"),
        (lambda: c.survivals(P[None], [1.0, float("inf")]), "temperatures"),
        (lambda: c.fit_temperatures(P[None], Y), r"accepted \[2\]"),
        (lambda: c.fit_temperatures(P[None], Y[None]), "accepted rises along a row"),
        (lambda: c.fit_temperatures(P[:0, None], Y[:0, None]), r"probability \[0\]"),
    ],
)
def test_refuses(call, says):
    with pytest.raises(ValueError, match=says):
        call()
