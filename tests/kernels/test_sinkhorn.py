"""Fused Sinkhorn against the reference in float64, fed the same bits, and its gradient against float64 autograd."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv41_edu.mhc.sinkhorn import sinkhorn
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.launch import INTERPRETED, tl, triton
from kernels.sinkhorn import fused_sinkhorn, sinkhorn_backward_tile, sinkhorn_tile, square_tile
from tests.kernels.test_gate import DEVICE, drawn, poison

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "sinkhorn.json").read_text())["cases"]
NAN, INF = float("nan"), float("inf")
LIMIT = 2e-6 if INTERPRETED else 1e-5  # relative, in fp32; compiled, exp and / have errors of their own


def both(function, logits, grad, *options):
    """The matrices and the gradient of the logits."""
    logits = logits.clone().requires_grad_()
    matrices = function(logits, *options)
    return matrices.detach(), *torch.autograd.grad(matrices, logits, grad)


def check(logits, *options):
    grad = drawn(*logits.shape, seed=9)
    expected = both(sinkhorn, logits.double(), grad.double(), *options)
    for ours, theirs in zip(both(fused_sinkhorn, logits, grad, *options), expected, strict=True):
        assert ours.dtype == torch.float32
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= LIMIT * theirs.norm()


@pytest.mark.parametrize(
    ("T", "n", "iterations"), [(0, 4, 20), (1, 4, 20), (2, 3, 5), (13, 8, 20), (17, 5, 7), (63, 4, 6)]
)
def test_matrices_and_gradients(T, n, iterations, monkeypatch):
    intact = poison(monkeypatch)
    check(drawn(T, n, n) * 3, iterations)
    intact()


@pytest.mark.parametrize("n", range(1, 9))
def test_any_number_of_streams(n):
    check(drawn(3, n, n), 3)


@pytest.mark.parametrize("iterations", [1, 2, 6, 7, 11])
def test_any_number_of_iterations(iterations):
    """Backward, matrices are computed again from each fifth one on: before, at and past the borders."""
    check(drawn(5, 4, 4) * 2, iterations)


@pytest.mark.parametrize("eps", [0.0, 1e-3, 0.1])
def test_eps_counts_wherever_the_reference_has_it(eps):
    check(drawn(4, 3, 3), 4, eps)


ONE = torch.eye(4, dtype=torch.bool, device=DEVICE)
LOGITS = {
    "all equal": torch.full((2, 4, 4), 0.7, device=DEVICE),
    "tied maxima": drawn(6, 4, 4).clamp(max=0.1),
    "plus and minus 50": drawn(9, 4, 4).sign() * 50,
    "far apart": torch.tensor([[[3e38, -3e38], [0.0, 1e-30]]], device=DEVICE),
    "a permutation": drawn(1, 4, 4).masked_fill(~ONE[[2, 0, 3, 1]], -INF),
    "some -inf": drawn(9, 4, 4).masked_fill((drawn(9, 4, 4, seed=1) < 0) & ~ONE, -INF),
    "a column of -inf": drawn(3, 4, 4).index_fill(2, torch.tensor(1, device=DEVICE), -INF),
}


@pytest.mark.parametrize("kind", LOGITS)
def test_unusual_logits(kind):
    check(LOGITS[kind], 4)


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{c['hc']}-{c['kind']}-{c['iterations']}") for c in CASES])
def test_public_vectors(case):
    tensors = load_file(VECTORS / "sinkhorn.safetensors")
    logits, expected = (tensors[f"case{case['case']}.{name}"].to(DEVICE) for name in ("logits", "out"))
    ours = fused_sinkhorn(logits, case["iterations"])
    assert ((ours - expected).abs() / (1 + expected.abs())).max() <= 1e-5


def test_the_unfused_chain_differs_in_the_order_of_sums_alone():
    logits, grad = drawn(8, 4, 4) * 2, drawn(8, 4, 4, seed=1)
    for ours, theirs in zip(both(fused_sinkhorn, logits, grad, 8), both(sinkhorn, logits, grad, 8), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("place", "value"), [((1, 2), NAN), ((0, 0), INF), ((3,), -INF)])
def test_a_matrix_without_softmax_is_nan_and_no_other(place, value):
    logits, grad = drawn(5, 4, 4), drawn(5, 4, 4, seed=1)
    usual = both(fused_sinkhorn, logits, grad, 2)
    logits[(2, *place)] = value
    for ours, before in zip(both(fused_sinkhorn, logits, grad, 2), usual, strict=True):
        assert ours[2].isnan().all()
        assert torch.equal(ours[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_two_runs_are_equal_and_a_matrix_alone_equals_the_one_in_a_batch():
    logits, grad = drawn(40, 3, 3), drawn(40, 3, 3, seed=1)
    ours = both(fused_sinkhorn, logits, grad, 3)
    for one, two in zip(ours, both(fused_sinkhorn, logits, grad, 3), strict=True):
        assert torch.equal(one, two)
    for t in (0, 13, 39):
        for alone, batch in zip(both(fused_sinkhorn, logits[t : t + 1], grad[t : t + 1], 3), ours, strict=True):
            assert torch.equal(alone[0], batch[t])


def test_logits_and_gradients_of_any_strides():
    logits, grad = drawn(4, 6, 4)[:, ::2].mT[:, :3], drawn(3, 1, seed=1).expand(4, 3, 3)
    assert not logits.is_contiguous()
    ours = both(fused_sinkhorn, logits, grad, 2)
    for apart, together in zip(ours, both(fused_sinkhorn, logits.contiguous(), grad.contiguous(), 2), strict=True):
        assert torch.equal(apart, together)


def test_a_second_derivative_is_refused():
    logits = drawn(1, 2, 2).requires_grad_()
    (grad,) = torch.autograd.grad(fused_sinkhorn(logits, 1).square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@triton.jit
def whole_tiles(logits, matrices, gradients):
    place, real = square_tile(2, 9, 3, 4, 2)
    tile = tl.load(logits + place, mask=real, other=0.0)
    whole, _ = square_tile(2, 16, 4, 4, 2)
    tl.store(matrices + whole, sinkhorn_tile(tile, 3, 2, 1e-6))
    tl.store(gradients + whole, sinkhorn_backward_tile(tile, tile, 3, 2, 1e-6))


def test_tiles_are_zero_beyond_n():
    """A kernel that has the tile in its registers may sum over it."""
    logits = drawn(2, 3, 3)
    tiles = [torch.full((2, 4, 4), NAN, device=DEVICE) for _ in range(2)]
    whole_tiles[(1,)](logits, *tiles)
    for tile, expected in zip(tiles, both(fused_sinkhorn, logits, logits, 2), strict=True):
        assert torch.equal(tile[:, :3, :3], expected)
        assert tile.count_nonzero() == expected.count_nonzero()


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
@pytest.mark.parametrize(("T", "n"), [(33, 4), (5, 3)])
def test_what_is_read_and_written(T, n, monkeypatch):
    """Each number once: what the backward computes again costs no traffic."""
    logits, grad = drawn(T, n, n).requires_grad_(), drawn(T, n, n, seed=1)
    results = [torch.empty(T, n, n), torch.empty(T, n, n)]
    tensors = dict(logits=logits, grad=grad, matrices=results[0], grad_logits=results[1])
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: results.pop(0))
    size = T * n * n
    read, written = Traffic(size, 0, 4 * size, 0), Traffic(0, size, 0, 4 * size)
    with count_traffic(**tensors) as traffic:
        matrices = fused_sinkhorn(logits, 2)
    assert (traffic["logits"], traffic["matrices"], traffic.total) == (
        read,
        written,
        Traffic(size, size, 4 * size, 4 * size),
    )
    with count_traffic(**tensors) as traffic:
        torch.autograd.grad(matrices, logits, grad)
    assert (traffic["logits"], traffic["grad"], traffic["grad_logits"]) == (read, read, written)
    assert traffic["matrices"] == Traffic()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(4, 4),), ValueError, r"logits of shape \[4, 4\]: expected \[T, n, n\] with n from 1 to 8"),
        ((torch.zeros(2, 3, 4),), ValueError, r"logits of shape \[2, 3, 4\]"),
        ((torch.zeros(2, 9, 9),), ValueError, r"logits of shape \[2, 9, 9\]: .* n from 1 to 8"),
        ((torch.zeros(2, 0, 0),), ValueError, r"logits of shape \[2, 0, 0\]"),
        ((torch.zeros(2, 4, 4).bfloat16(),), TypeError, r"logits are torch\.bfloat16: expected torch\.float32"),
        ((torch.zeros(2, 4, 4), 0), ValueError, "iterations = 0: expected 1 or more"),
    ],
)
def test_bad_input_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        fused_sinkhorn(*arguments)


def test_no_spills_on_any_target_at_the_official_size():
    reports = compile_all(["kernels.sinkhorn"])
    assert [report.target for report in reports] == 2 * [*TARGETS]
    for report in reports:
        assert report.spilled == report.stack_bytes == 0, report
