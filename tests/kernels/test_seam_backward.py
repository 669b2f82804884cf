"""Gradients of the fused seam against autograd of the equations in float64, fed the same bits.

The reference rounds X' and z where the kernels do, and lets gradients pass as they are. Measured is the energy of the
difference, |x - y|^2 / (|x|^2 + |y|^2): at most 1e-8 for what is fp32. Gradients in bf16 are within one ulp of the
rounded float64 for 99.9% of elements. Sinkhorn has 3 iterations, which the interpreter does sooner than 20: the
coefficient step has tests of its own.
"""

import mmap
from functools import partial

import pytest
import torch

from dsv41_edu.mhc.seam import coefficients, collapse, expand
from kernels import seam_backward as module
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.seam import fused_single_pass
from tests.kernels.test_experts import SHARED, ulps
from tests.kernels.test_gate import drawn, poison
from tests.kernels.test_seam import BF16, FP32, case, interpreted

OUTPUTS = "streams", "z", "rstd", "pre", "post", "comb"
ITERATIONS = 3
fused = partial(fused_single_pass, iterations=ITERATIONS)


def reference(out, streams, post, comb, pending, fn, base, scale):
    def rounded(x):
        return x + (x.detach().to(dtype).double() - x.detach())

    dtype = streams.dtype
    out, streams, post, comb, pending, fn, base, scale = (
        x.double() for x in (out, streams, post, comb, pending, fn, base, scale)
    )
    new = rounded(expand(out, streams, post, comb))
    z = rounded(collapse(new, pending))
    return new, z, torch.rsqrt(z.square().mean(-1) + 1e-20), *coefficients(new, fn, base, scale, ITERATIONS)


def gradients(function, given, used=OUTPUTS):
    """Of a sum of the used outputs, each element times a number that all tokens share; zeros for None."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    outputs = dict(zip(OUTPUTS, function(**leaves), strict=False))
    total = 0.0
    for i, name in enumerate(used):
        weights = drawn(*outputs[name].shape[1:], seed=20 + i, dtype=BF16)
        total += (outputs[name] * weights.to(outputs[name].dtype)).sum(dtype=torch.float64)
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }


def energy(x, y):
    total = x.double().square().sum() + y.double().square().sum()
    return float((x.double() - y.double()).square().sum() / total) if total else 0.0


def check(ours, expected):
    for name, grad in ours.items():
        assert grad.shape == expected[name].shape
        if grad.dtype == FP32:
            assert energy(grad, expected[name]) <= 1e-8, name
        else:
            assert (ulps(grad, expected[name].to(BF16)) <= 1).double().mean() >= 0.999, name


@pytest.mark.parametrize("used", OUTPUTS)
def test_each_output_alone(used, monkeypatch):
    given = case(5, 2, 70, FP32)
    expected = gradients(reference, given, [used])
    intact = poison(monkeypatch)
    ours = gradients(fused, given, [used])
    assert ours["streams"].any()
    check(ours, expected)
    intact()


@pytest.mark.parametrize("n", range(1, 9))
def test_all_outputs_and_any_number_of_streams(n, monkeypatch):
    given = case(2, n, 5, FP32, seed=n)
    expected = gradients(reference, given)
    intact = poison(monkeypatch)
    check(gradients(fused, given), expected)
    intact()


@pytest.mark.parametrize(("T", "d"), [(17, 66), (2, 128)])
def test_streams_in_bf16(T, d, monkeypatch):
    given = case(T, 4, d)
    expected = gradients(reference, given)
    intact = poison(monkeypatch)
    ours = gradients(fused, given)
    assert [grad.dtype for grad in ours.values()] == [tensor.dtype for tensor in given.values()]
    check(ours, expected)
    intact()


@pytest.mark.parametrize("T", [0, 1, 13, 63])
def test_any_number_of_tokens(T, monkeypatch):
    """With two programs for grad fn, which take every other tile."""
    monkeypatch.setattr(module, "PROGRAMS", 2)
    given = case(T, 2, 9, FP32)
    expected = gradients(reference, given)
    intact = poison(monkeypatch)
    check(gradients(fused, given), expected)
    intact()


@pytest.mark.parametrize("zero", [["streams", "out"], ["fn"], ["base", "fn"], ["post", "comb", "pending"]])
def test_tied_and_zero_inputs(zero):
    """Without fn the logits are those of base, without both they are all equal: then no softmax has one largest."""
    given = case(2, 3, 9, FP32)
    given |= {name: torch.zeros_like(given[name]) for name in zero}
    used = ["streams", "z", "pre", "post", "comb"]
    ours = gradients(fused, given, used)
    assert all(grad.isfinite().all() for grad in ours.values())
    check(ours, gradients(reference, given, used))


def test_equal_streams():
    given = case(2, 3, 9, FP32)
    given["streams"] = given["streams"][:, :1].repeat(1, 3, 1)
    check(gradients(fused, given), gradients(reference, given))


def test_a_norm_outside():
    given, weight = case(3, 2, 40, FP32), drawn(40, seed=9)

    def normed(function):
        def outputs(**leaves):
            new, z, rstd, *maps = function(**leaves)[:6]
            return new, z * rstd[:, None] * weight, rstd, *maps

        return outputs

    used = ["z"]
    check(gradients(normed(fused), given, used), gradients(normed(reference), given, used))


# ---- the same again


def test_two_runs_are_equal_and_a_token_alone_has_the_gradients_it_has_in_a_batch():
    given = case(17, 2, 20)
    ours, again = gradients(fused, given), gradients(fused, given)
    assert all(torch.equal(ours[name], again[name]) for name in ours)

    of_tokens = [name for name in given if name not in ("fn", "base", "scale")]
    alone = gradients(fused, given | {name: given[name][16:] for name in of_tokens})
    for name in of_tokens:
        assert torch.equal(alone[name][0], ours[name][16])


def test_gradients_and_streams_at_any_stride():
    """A sum's gradient has stride 0. Streams that are one embedding have one gradient, the sum over the streams."""
    given = case(3, 3, 20, FP32)

    def outputs(function):
        embedding = given["streams"][:, 0].clone().requires_grad_()
        new, z, *_ = function(**given | {"streams": embedding[:, None].expand(-1, 3, -1)})
        (new.sum() + z.sum()).backward()
        return embedding.grad

    assert energy(outputs(fused), outputs(reference)) <= 1e-8


@interpreted
def test_addresses_pass_2_to_the_31():
    memory = mmap.mmap(-1, 10_000_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    given = case(3, 3, 8, FP32)
    strides = (1_200_000_000, 8, 1)
    far = torch.frombuffer(memory, dtype=torch.uint8).view(FP32).as_strided((3, 3, 8), strides)
    far.copy_(given["streams"])
    base = given["base"].requires_grad_()
    expected, ours = (fused(**given | {"streams": streams}).comb[2, 0, 0] for streams in (given["streams"], far))
    (expected,), (ours,) = (torch.autograd.grad(one, [base]) for one in (expected, ours))
    assert torch.equal(ours, expected)


def test_what_is_kept_for_the_backward():
    """The input, z and n^2 + 2n + 2 numbers a token: neither X' nor the splits' parts."""
    given = case(3, 4, 200, FP32)
    ours = fused(**given | {"base": given["base"].requires_grad_()})
    inputs = {tensor.data_ptr() for tensor in given.values()}
    kept = [tensor for tensor in ours.pre.grad_fn.saved_tensors if tensor.data_ptr() not in inputs]
    assert sum(tensor.numel() for tensor in kept) == 3 * (200 + 4 * 4 + 2 * 4 + 2)


def test_no_second_derivative():
    given = case(2, 2, 8, FP32)
    given["out"].requires_grad_()
    (grad,) = torch.autograd.grad(fused(**given).z.square().sum(), [given["out"]], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@interpreted
def test_what_is_read_and_written(monkeypatch):
    """(3n + 3) d elements a token for its own gradients and (n + 1) d for fn's."""
    T, n, d = 18, 2, 70
    tiles, splits, rows = 2, 2, 8
    given = case(T, n, d)
    ours = fused(**given | {"base": given["base"].requires_grad_()})
    saved = ours.pre.grad_fn.saved_tensors
    grads = {name: torch.ones_like(part) for name, part in zip(OUTPUTS, ours, strict=False) if name != "rstd"}
    grads = {f"grad_{name}": grad for name, grad in grads.items()}
    shapes = {"grad_sums": (T, rows + 1), "sums": (1, rows + 3), "fn_parts": (tiles, rows, n * d)}
    shapes |= {"grad_out": (T, d), "of_streams": (T, n, d), "parts": (T, splits, rows), "maps": (T, rows)}
    types = dict.fromkeys(("grad_out", "of_streams"), BF16)
    made = {name: torch.empty(shape, dtype=types.get(name, FP32)) for name, shape in shapes.items()}
    waiting = list(made.values())

    def empty(shape, *, dtype, device):
        assert waiting[0].shape == shape
        assert waiting[0].dtype == dtype
        return waiting.pop(0)

    monkeypatch.setattr(torch, "empty", empty)
    kept = dict(zip(("base", "scale", "kept_sums"), saved[6:9], strict=True))
    counted = given | kept | made | grads
    with torch.no_grad(), count_traffic(**counted) as traffic:
        module.single_pass_backward(
            *(grads.get(f"grad_{name}") for name in OUTPUTS), saved=saved, steps=(ITERATIONS, 1e-6, 1e-20)
        )
    assert not waiting
    assert traffic["streams"] == Traffic(2 * T * n * d, 0, 4 * T * n * d, 0)
    assert traffic["out"] == Traffic(2 * T * d, 0, 4 * T * d, 0)
    assert traffic["grad_streams"] == Traffic(T * n * d, 0, 2 * T * n * d, 0)
    assert traffic["grad_z"] == Traffic(T * d, 0, 2 * T * d, 0)
    assert traffic["of_streams"] == Traffic(0, T * n * d, 0, 2 * T * n * d)
    assert traffic["grad_out"] == Traffic(0, T * d, 0, 2 * T * d)
    streamed = ("streams", "out", "grad_streams", "grad_z", "of_streams", "grad_out")
    elements = sum(traffic[name].loaded + traffic[name].stored for name in streamed)
    assert elements == (3 * n + 3) * d * T + (n + 1) * d * T
    assert traffic["fn"].loaded == tiles * rows * n * d
    assert traffic["fn_parts"] == Traffic(0, tiles * rows * n * d, 0, 4 * tiles * rows * n * d)
    assert traffic["parts"].loaded == traffic["parts"].stored == T * splits * rows


# ---- compiled


def test_forward_and_backward_fit_every_target_at_the_official_size():
    reports = compile_all(["kernels.seam", "kernels.seam_backward"])
    assert {report.target for report in reports} == {*TARGETS}
    without_e4m3 = [report.target for report in reports if report.build == "gather_fp8"]
    assert without_e4m3 == ["sm_90", "sm_100", "gfx942"]
    for report in reports:
        assert report.spilled == report.stack_bytes == 0, report
        assert report.shared_bytes <= SHARED[report.target], report
