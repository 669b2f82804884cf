"""The coefficient step against its equation in float64, fed the same bits, and its gradients against autograd."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv41_edu.mhc.seam import coefficients
from dsv41_edu.mhc.sinkhorn import sinkhorn
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.hyper_connections import finish_coefficients, finish_coefficients_backward
from kernels.launch import INTERPRETED
from tests.kernels.test_gate import DEVICE, drawn, poison
from tests.kernels.test_sinkhorn import LIMIT

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "mhc_seam.json").read_text())["cases"]
NAN, INF = float("nan"), float("inf")
D = 24  # channels of a stream; the step knows them by the mean alone


def case(S, T, n, seed=0):
    """Partials, base and scale, as if fn were of the size that makes products of 1."""
    columns = n * n + 2 * n
    partials = drawn(S, T, columns + 1, seed=seed) * (D * n / S) ** 0.5
    partials[..., -1] = D * n / S * (1 + partials[..., -1].abs())
    return partials, drawn(columns, seed=seed + 1), torch.tensor([0.7, 1.3, -2.0], device=DEVICE)


def step(partials, base, scale, n, d, iterations=20, eps=1e-6, norm_eps=1e-20):
    """The equation."""
    *products, q = partials.sum(0).split([n, n, n * n, 1], -1)
    r = torch.rsqrt(q / (n * d) + norm_eps)
    pre, post, comb = (x * r * s + b for x, s, b in zip(products, scale, base.split([n, n, n * n]), strict=True))
    return pre.sigmoid() + eps, 2 * post.sigmoid(), sinkhorn(comb.unflatten(-1, (n, n)), iterations, eps)


def gradients(grads, inputs, n, *options):
    """Of partials [T, columns], base and scale, in float64, with the outputs whose gradient is None left out."""
    partials, base, scale = (x.double().requires_grad_() for x in inputs)
    summed = partials.sum(0)
    outputs = step(summed[None], base, scale, n, D, *options)
    used = [i for i in range(3) if grads[i] is not None]
    given = [outputs[i] for i in used], (summed, base, scale), [grads[i].double() for i in used]
    found = torch.autograd.grad(*given, allow_unused=True)
    return [
        torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, (summed, base, scale), strict=True)
    ]


def close(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == torch.float32
        assert one.shape == other.shape
        assert (one - other).norm() <= LIMIT * other.norm()


def check(inputs, n, *options):
    """Outputs and gradients of all three together."""
    outputs = finish_coefficients(*inputs, n, D, *options)
    close(outputs, step(*(x.double() for x in inputs), n, D, *options))
    grads = [drawn(*out.shape, seed=i + 5) for i, out in enumerate(outputs)]
    close(finish_coefficients_backward(*grads, *inputs, n, D, *options), gradients(grads, inputs, n, *options))


@pytest.mark.parametrize(
    ("S", "T", "n", "iterations"),
    [(3, 0, 4, 3), (1, 1, 4, 20), (20, 2, 4, 2), (2, 13, 3, 5), (5, 17, 8, 3), (4, 63, 4, 6)],
)
def test_maps_and_gradients(S, T, n, iterations, monkeypatch):
    intact = poison(monkeypatch)
    check(case(S, T, n), n, iterations)
    intact()


@pytest.mark.parametrize("n", range(1, 9))
def test_any_number_of_streams(n):
    check(case(2, 3, n), n, 2)


@pytest.mark.parametrize("eps", [(1e-2, 0.3), (0.0, 0.0)])
def test_each_eps_counts_where_the_equation_has_it(eps):
    check(case(2, 5, 3), 3, 3, *eps)


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{c['case']}") for c in CASES])
def test_public_vectors(case):
    """The streams' products by torch, in two halves; the reference gives the same."""
    n, tensors = case["hc"], load_file(VECTORS / "mhc_seam.safetensors", device=DEVICE)
    X, fn, base, scale = (tensors[f"case{case['case']}.{name}"] for name in ("X", "fn", "base", "scale"))
    halves = zip(X.flatten(1).chunk(2, 1), fn.chunk(2, 1), strict=True)
    partials = torch.stack([torch.cat([v @ w.T, v.square().sum(1, keepdim=True)], 1) for v, w in halves])
    ours = finish_coefficients(partials, base, scale, n, case["d"])
    for name, one, chain in zip(("pre", "post", "comb"), ours, coefficients(X, fn, base, scale), strict=True):
        limit = 2e-5 if name == "comb" and case["comb_logit_scale"] >= 30 else 1e-5
        expected = tensors[f"case{case['case']}.{name}"]
        assert ((one - expected).abs() / (1 + expected.abs())).max() <= limit
        torch.testing.assert_close(one, chain, rtol=limit, atol=1e-6)


# ---- the sum over the splits


def test_splits_are_added_in_their_order():
    partials, base, scale = case(7, 4, 4)
    total = partials[0]
    for split in partials[1:]:
        total = total + split
    other = partials.flip(0)
    assert not torch.equal(total, other.sum(0)), "an order that makes no difference would show nothing"
    ours = finish_coefficients(partials, base, scale, 4, D, 2)
    for one, expected in zip(ours, finish_coefficients(total[None], base, scale, 4, D, 2), strict=True):
        assert torch.equal(one, expected)
    assert not torch.equal(ours[0], finish_coefficients(other, base, scale, 4, D, 2)[0])


def test_two_runs_are_equal_and_a_row_alone_equals_the_row_in_a_batch():
    partials, *parameters = case(3, 40, 3)
    grads = drawn(40, 3), drawn(40, 3, seed=1), drawn(40, 3, 3, seed=2)

    def run(t=slice(None)):
        inputs = partials[:, t].contiguous(), *parameters, 3, D, 3
        return *finish_coefficients(*inputs), *finish_coefficients_backward(*(g[t] for g in grads), *inputs)

    ours = run()
    for one, two in zip(ours, run(), strict=True):
        assert torch.equal(one, two)
    for t in (0, 13, 39):
        for alone, batch in zip(
            run(slice(t, t + 1))[:4], ours[:4], strict=True
        ):  # base's and scale's sum over tokens
            assert torch.equal(alone[0], batch[t])


# ---- gradients


@pytest.mark.parametrize("used", range(3))
def test_each_output_used_alone(used, monkeypatch):
    intact = poison(monkeypatch)
    inputs, shapes = case(2, 6, 4), [(6, 4), (6, 4), (6, 4, 4)]
    grads = [drawn(*shape, seed=5) if i == used else None for i, shape in enumerate(shapes)]
    ours = finish_coefficients_backward(*grads, *inputs, 4, D, 3)
    close(ours, gradients(grads, inputs, 4, 3))
    intact()


def test_no_output_used():
    for grad in finish_coefficients_backward(None, None, None, *case(2, 3, 4), 4, D):
        assert grad.count_nonzero() == 0


def test_gradients_of_any_strides():
    inputs, one = case(2, 5, 4), drawn(1, seed=5)
    grads = one.expand(5, 4), drawn(4, 5).T, drawn(5, 4, 4).mT
    ours = finish_coefficients_backward(*grads, *inputs, 4, D, 2)
    for apart, together in zip(
        ours, finish_coefficients_backward(*(g.contiguous() for g in grads), *inputs, 4, D, 2), strict=True
    ):
        assert torch.equal(apart, together)


# ---- unusual numbers


def test_streams_of_zeros():
    """r is 1e10 there: the gradient of P is as large as the reference's, that of q is 0, and all is finite."""
    partials, base, scale = case(2, 4, 4)
    partials[:, 1:3] = 0
    check((partials, base, scale), 4, 3)


def test_saturated_maps():
    """exp(120) is infinite in fp32. The first of each map is -inf, as a map that is switched off may have it."""
    partials, base, scale = case(1, 4, 4)
    base = base.sign() * torch.tensor([120.0] * 8 + [50.0] * 16, device=DEVICE)
    base[[0, 4, 8]] = -INF
    check((partials, base, scale), 4, 3)


def test_equal_logits():
    partials, base, scale = case(1, 4, 4)
    base[8:], scale[2] = 0.0, 0.0
    check((partials, base, scale), 4, 3)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum says so
@pytest.mark.parametrize("column", [0, 5, 12, 24])
def test_nan_stays_in_its_token(column):
    partials, base, scale = case(2, 5, 4)
    partials[1, 2, column] = NAN
    others = [0, 1, 3, 4]
    ours, few = (finish_coefficients(p, base, scale, 4, D, 2) for p in (partials, partials[:, others].contiguous()))
    for one, finite in zip(ours, few, strict=True):
        assert torch.equal(one[others], finite)
    pre, post, comb = (x[2].isnan() for x in ours)
    assert pre.tolist() == [column in (0, 24), *[column == 24] * 3]
    assert post.tolist() == [column == 24, column in (5, 24), *[column == 24] * 2]
    assert comb.all() == comb.any() == (column in (12, 24))
    grads = [drawn(*x.shape, seed=5) for x in ours]
    ours = finish_coefficients_backward(*grads, partials, base, scale, 4, D, 2)
    assert ours[0][2].isnan().any()
    assert ours[0][others].isfinite().all()
    assert all(x.isnan().any() for x in ours[1:])


# ---- traffic


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
@pytest.mark.parametrize(("S", "T", "n"), [(3, 33, 4), (2, 5, 3)])
def test_what_is_read_and_written(S, T, n, monkeypatch):
    partials, base, scale = case(S, T, n)
    C, programs = n * n + 2 * n + 1, -(-T // 32)
    outputs = [
        torch.empty(T, n),
        torch.empty(T, n),
        torch.empty(T, n, n),
        torch.empty(T, C),
        torch.empty(programs, C + 2),
    ]
    names = "pre post comb grad sums".split()
    tensors = dict(partials=partials, base=base, scale=scale) | dict(zip(names, outputs, strict=True))
    grads = dict(grad_pre=drawn(T, n), grad_post=drawn(T, n), grad_comb=drawn(T, n, n))
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: outputs.pop(0))
    with count_traffic(**tensors) as forward:
        finish_coefficients(partials, base, scale, n, D, 2)
    with count_traffic(**tensors, **grads) as backward:
        finish_coefficients_backward(*grads.values(), partials, base, scale, n, D, 2)
    for traffic in (forward, backward):
        assert traffic["partials"] == Traffic(S * T * C, 0, 4 * S * T * C, 0)
        assert traffic["base"].loaded == programs * (C - 1)
    assert forward["scale"].loaded == 3 * programs
    assert backward["scale"].loaded == 6 * programs, "once for m's gradient"
    written = dict(pre=T * n, post=T * n, comb=T * n * n)
    assert {name: forward[name] for name in written} == {k: Traffic(0, v, 0, 4 * v) for k, v in written.items()}
    assert backward["grad"].stored == T * C
    assert backward["sums"].stored == programs * (C + 2)
    assert [backward[name].loaded for name in grads] == [*written.values()]
    assert forward.total.stored == sum(written.values())


# ---- bad input

PARTIALS, BASE, SCALE = case(2, 3, 4)
GOOD = dict(partials=PARTIALS, base=BASE, scale=SCALE, n=4, d=D)
VALUES = [
    (dict(n=0), "n = 0: expected 1 to 8 streams"),
    (dict(n=9), "n = 9: expected 1 to 8 streams"),
    (dict(iterations=0), "iterations = 0: expected 1 or more"),
    (dict(partials=PARTIALS[0]), r"partials of shape \[3, 25\]: expected \[S, T, 25\] with S from 1"),
    (dict(partials=PARTIALS[:0]), r"partials of shape \[0, 3, 25\]: expected \[S, T, 25\] with S from 1"),
    (dict(partials=PARTIALS[..., :24]), r"partials of shape \[2, 3, 24\], strides .*: expected \[2, 3, 25\]"),
    (
        dict(partials=PARTIALS.mT.contiguous().mT),
        r"partials of shape .*, strides \(75, 1, 3\): expected .*, contiguous",
    ),
    (dict(base=BASE[:23]), r"base of shape \[23\], strides \(1,\): expected \[24\], contiguous"),
    (dict(scale=SCALE[:, None]), r"scale of shape \[3, 1\], strides \(1, 1\): expected \[3\], contiguous"),
    (dict(base=BASE.to("meta")), "base is on meta: expected"),
]
TYPES = [
    (dict(partials=PARTIALS.double()), r"partials is torch\.float64: expected torch\.float32"),
    (dict(base=BASE.bfloat16()), r"base is torch\.bfloat16: expected torch\.float32"),
]
BAD = [(c, ValueError, m) for c, m in VALUES] + [(c, TypeError, m) for c, m in TYPES]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        finish_coefficients(**GOOD | change)
    with pytest.raises(error, match=message):
        finish_coefficients_backward(None, None, None, **GOOD | change)


def test_bad_gradients_are_refused():
    with pytest.raises(ValueError, match=r"grad_post of shape \[3, 3\], strides \(3, 1\): expected \[3, 4\]"):
        finish_coefficients_backward(None, drawn(3, 3), None, **GOOD)
    with pytest.raises(TypeError, match=r"grad_comb is torch\.float64: expected torch\.float32"):
        finish_coefficients_backward(None, None, drawn(3, 4, 4).double(), **GOOD)


def test_no_spills_on_any_target_at_the_official_size():
    reports = compile_all(["kernels.hyper_connections"])
    assert [report.target for report in reports] == 2 * [*TARGETS]
    for report in reports:
        assert report.spilled == report.stack_bytes == 0, report
