"""Both forms of Sinkhorn against public vectors and what theory says of them; Birkhoff's decomposition rebuilt."""

import json
import math
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41_edu.mhc.sinkhorn import birkhoff, largest_error, sinkhorn, sinkhorn_paper

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "sinkhorn.json").read_text())["cases"]
V = load_file(VECTORS / "sinkhorn.safetensors")

logits = st.integers(1, 8).flatmap(
    lambda n: st.lists(st.floats(-30, 30), min_size=n * n, max_size=n * n).map(
        lambda values: torch.tensor(values, dtype=torch.float64).view(n, n)
    )
)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['case']}-{c['kind']}-{c['hc']}")
def test_public_vectors(case, dtype):
    name = f"case{case['case']}."
    found = sinkhorn(V[name + "logits"].to(dtype), case["iterations"])
    rounded = case["kind"] == "big_row"  # its logits were stored after rounding to fp32
    tolerance = 1e-4 if dtype == torch.float32 else 1e-7 if rounded else 1e-12
    assert (found - V[name + "out"]).abs().max() <= tolerance


def test_a_worked_example():
    """comb of logits 0.5 j - 0.25 k + 2 (j = k) + 0.7 (j = 0, k = 3), and of logits that are all equal."""
    j, k = torch.arange(4.0)[:, None], torch.arange(4.0)[None, :]
    values = 0.5 * j - 0.25 * k + 2 * (j == k) + 0.7 * ((j == 0) & (k == 3))
    expected = [
        [0.678818, 0.085110, 0.085110, 0.150962],
        [0.104299, 0.713965, 0.096625, 0.085110],
        [0.104299, 0.096625, 0.713964, 0.085110],
        [0.112583, 0.104299, 0.104299, 0.678817],
    ]
    assert torch.allclose(sinkhorn(values.double()), torch.tensor(expected).double(), rtol=0, atol=6e-7)
    assert torch.allclose(sinkhorn(torch.full((4, 4), 3.0).double()), torch.tensor(0.24999975).double(), atol=1e-8)


@settings(max_examples=60, deadline=None)
@given(logits)
def test_columns_sum_to_one_up_to_eps_whatever_the_logits(values):
    matrix = sinkhorn(values)
    n = len(values)
    assert (matrix >= 0).all()
    # a column of sum c is divided by c + eps; c is at least n eps of the softmax's eps, mostly near 1
    sums = matrix.sum(-2)
    assert (sums <= 1).all()
    assert (sums >= 1 - 2e-6 * n if values.abs().max() < 2 else sums > 0).all()


def test_what_a_step_does_in_the_order_it_does_it():
    """One iteration by hand: softmax over k, eps, columns; two: rows, then columns, eps in each division."""
    values, eps = drawn(3, 3), 0.1
    matrix = values.softmax(-1) + eps
    matrix = torch.stack([matrix[:, k] / (matrix[:, k].sum() + eps) for k in range(3)], dim=1)
    assert torch.allclose(sinkhorn(values, 1, eps), matrix, rtol=1e-14)
    matrix = torch.stack([row / (row.sum() + eps) for row in matrix])
    matrix = torch.stack([matrix[:, k] / (matrix[:, k].sum() + eps) for k in range(3)], dim=1)
    assert torch.allclose(sinkhorn(values, 2, eps), matrix, rtol=1e-14)


def test_forms_agree_without_eps():
    values = drawn(50, 4, 4)
    assert torch.allclose(sinkhorn(values, 7, eps=0.0), sinkhorn_paper(values, 7), rtol=1e-12)


@pytest.mark.parametrize("n", range(1, 9))
def test_the_paper_form_converges_to_a_doubly_stochastic_matrix(n):
    matrix = sinkhorn_paper(drawn(20, n, n), 200)
    assert largest_error(matrix, -1) < 1e-12
    assert largest_error(matrix, -2) < 1e-12


def test_no_iterations():
    assert torch.equal(sinkhorn_paper(torch.zeros(2, 2), 0), torch.ones(2, 2))
    with pytest.raises(ValueError, match="iterations = 0: expected 1 or more"):
        sinkhorn(torch.zeros(2, 2), 0)
    with pytest.raises(ValueError, match="iterations = -1: expected 0 or more"):
        sinkhorn_paper(torch.zeros(2, 2), -1)


def test_one_stream_is_the_identity():
    assert (sinkhorn_paper(50 * drawn(10, 1, 1)) == 1).all()
    assert (sinkhorn(50 * drawn(10, 1, 1)) - 1).abs().max() < 2e-6


def test_no_tokens():
    assert sinkhorn(torch.empty(0, 4, 4)).shape == (0, 4, 4)


def test_infinite_logits():
    minus = drawn(4, 4)
    minus[0, 1] = minus[2, 3] = -math.inf
    assert sinkhorn(minus).isfinite().all()
    assert sinkhorn(minus)[0, 1] < 1e-5, "eps, normalised"
    for bad in (math.inf, math.nan):
        row = drawn(4, 4)
        row[1, 2] = bad
        assert sinkhorn(row).isnan().all(), "seen, not hidden"
    empty = drawn(4, 4)
    empty[3] = -math.inf
    assert sinkhorn(empty).isnan().all()
    assert sinkhorn(torch.tensor([[50.0, -50.0], [-50.0, 50.0]])).isfinite().all()


def test_gradients_with_and_without_ties():
    for values in (drawn(3, 4, 4), torch.zeros(1, 3, 3).double(), drawn(1, 2, 2).expand(2, 2, 2).clone()):
        assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 5), values.requires_grad_())


def test_what_is_not_a_matrix_of_floats():
    for form in (sinkhorn, sinkhorn_paper):
        with pytest.raises(ValueError, match=r"logits of shape \[3, 4\]: expected square matrices"):
            form(torch.zeros(3, 4))
        with pytest.raises(TypeError, match=r"logits are torch.int64: expected a float type"):
            form(torch.zeros(3, 3, dtype=torch.int64))


# ---- Birkhoff


@pytest.mark.parametrize("n", range(1, 9))
def test_the_decomposition_is_the_matrix(n):
    matrix = sinkhorn_paper(drawn(n, n, seed=n), 300)
    weights, corners = birkhoff(matrix)
    again = torch.zeros(n, n).double()
    for weight, corner in zip(weights, corners, strict=True):
        assert sorted(corner.tolist()) == list(range(n))
        again[torch.arange(n), corner] += weight
    assert torch.allclose(again, matrix, rtol=0, atol=1e-10)
    assert (weights > 0).all()
    assert len(weights) <= (n - 1) ** 2 + 1


def test_a_permutation_is_its_own_decomposition():
    for p in permutations(range(4)):
        weights, corners = birkhoff(torch.eye(4)[list(p)])
        assert weights.tolist() == [1.0]
        assert corners.tolist() == [list(p)]


def test_the_deployed_matrix_decomposes_up_to_its_sums():
    weights, _ = birkhoff(sinkhorn(drawn(4, 4)))
    assert abs(weights.sum() - 1) < 1e-5


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        (torch.full((2, 2), 0.6), "expected a doubly stochastic matrix"),
        (torch.tensor([[1.5, -0.5], [-0.5, 1.5]]), "expected a doubly stochastic matrix"),
        (torch.full((2, 2), math.nan), "expected a doubly stochastic matrix"),
        (torch.eye(9), "n at most 8"),
        (torch.eye(3).expand(2, 3, 3), r"shape \[2, 3, 3\]"),
    ],
)
def test_what_has_no_decomposition(matrix, says):
    with pytest.raises(ValueError, match=says):
        birkhoff(matrix)
