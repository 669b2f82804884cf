"""The fused n-gram gate, forward and backward, against the reference in float64, fed the same bits.

Measured is the energy of the difference, |x - y|^2 / (|x|^2 + |y|^2): at most 2e-10 forward and 1e-8 backward for
what is fp32. What is bf16 is within one ulp of the rounded float64 for 99.9% of elements. Outputs start as NaN inside
larger buffers whose margins must stay as they were.
"""

import json
import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv41_edu.engram.gate import add_memory
from kernels import engram_gate as module
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.engram_gate import fused_engram_gate
from kernels.launch import INTERPRETED
from tests.kernels.test_experts import SHARED, ulps
from tests.kernels.test_gate import DEVICE, drawn, poison

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
BF16, FP32 = torch.bfloat16, torch.float32
VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "engram_gate.json").read_text())["cases"]
OUTPUTS = "streams", "gate"
INPUTS = "streams", "keys", "value", "q_weight", "k_weight"


def case(T, n, d, dtype=FP32, seed=0):
    """All arguments; every third token is of an image, but for the first two."""
    given = {
        "streams": drawn(T, n, d, seed=seed, dtype=dtype),
        "keys": drawn(T, n, d, seed=seed + 1, dtype=dtype),
        "value": drawn(T, d, seed=seed + 2, dtype=dtype),
        "q_weight": drawn(n, d, seed=seed + 3),
        "k_weight": drawn(n, d, seed=seed + 4),
    }
    return given | {"text_mask": torch.arange(T, device=DEVICE) % 3 != 2}


def reference(**given):
    return add_memory(**{name: x.double() if name in INPUTS else x for name, x in given.items()})


def gradients(function, given, used=OUTPUTS, wanted=INPUTS):
    """Of a sum of the used outputs, each element times a number that all tokens share."""
    leaves = {name: given[name].detach().requires_grad_() for name in wanted}
    outputs = dict(zip(OUTPUTS, function(**given | leaves), strict=True))
    total = 0.0
    for i, name in enumerate(used):
        weights = drawn(*outputs[name].shape[1:], seed=20 + i, dtype=BF16)
        total += (outputs[name] * weights.to(outputs[name].dtype)).sum(dtype=torch.float64)
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(given[name]) if grad is None else grad
        for name, grad in zip(wanted, grads, strict=True)
    }


def energy(x, y):
    total = x.double().square().sum() + y.double().square().sum()
    return float((x.double() - y.double()).square().sum() / total) if total else 0.0


def close(ours, expected, limit):
    assert ours.shape == expected.shape
    if ours.dtype == BF16:
        assert not ours.numel() or (ulps(ours, expected.to(BF16)) <= 1).double().mean() >= 0.999
    else:
        assert ours.dtype == FP32
        assert energy(ours, expected) <= limit


def check_forward(given):
    ours = fused_engram_gate(**given)
    assert ours[0].dtype == given["streams"].dtype
    assert ours[1].dtype == FP32
    for part, expected in zip(ours, reference(**given), strict=True):
        close(part, expected, 2e-10)
    return ours


def check_backward(given, *options):
    ours, expected = gradients(fused_engram_gate, given, *options), gradients(reference, given, *options)
    for name, grad in ours.items():
        assert grad.dtype == given[name].dtype
        close(grad, expected[name], 1e-8)
    return ours


@pytest.mark.parametrize(
    ("T", "n", "d", "dtype"),
    [
        (0, 4, 128, BF16),
        (1, 4, 576, BF16),
        (2, 3, 77, FP32),
        (13, 2, 128, FP32),
        (17, 2, 31, BF16),
        (63, 1, 33, FP32),
    ],
)
def test_outputs_and_gradients(T, n, d, dtype, monkeypatch):
    intact = poison(monkeypatch)
    given = case(T, n, d, dtype)
    check_forward(given)
    check_backward(given)
    intact()


@pytest.mark.parametrize("n", range(1, 9))
def test_any_number_of_streams(n, monkeypatch):
    intact = poison(monkeypatch)
    given = case(2, n, 5, seed=n)
    check_forward(given)
    check_backward(given)
    intact()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_official_size(dtype, monkeypatch):
    intact = poison(monkeypatch)
    given = case(2, 4, 5120, dtype)
    check_forward(given)
    if dtype == BF16:
        check_backward(given)
    intact()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"case {c['case']}")
def test_public_vectors(case):
    stored = load_file(VECTORS / "engram_gate.safetensors", device=DEVICE)
    v = {name.split(".")[1]: t for name, t in stored.items() if name.startswith(f"case{case['case']}.")}
    leaves = [v[name].requires_grad_() for name in ("X", "key", "value", "q_weight", "k_weight")]
    out, gate = fused_engram_gate(*leaves)
    assert ((out - v["out"]).abs() <= 1e-5 * (1 + v["out"].abs())).all()
    assert (gate - v["gate"]).abs().max() <= 1e-5
    grads = torch.autograd.grad(out, leaves, v["upstream_grad"])
    for grad, name in zip(grads, ("X", "key", "value", "q_weight", "k_weight"), strict=True):
        expected = v[f"grad_{name}"]
        assert (grad - expected).abs().max() <= 1e-4 * expected.abs().max(), name


def test_it_is_the_reference():
    """In the same precisions: the gate but for the order of sums, streams by at most a rounding to bf16."""
    given = case(5, 3, 66, BF16)
    ours, expected = fused_engram_gate(**given), add_memory(**given)
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-5, atol=1e-6)
    assert ulps(ours[0], expected[0]).max() <= 1


def test_dtypes_may_differ():
    given = case(3, 2, 20)
    given |= {"keys": given["keys"].bfloat16(), "q_weight": given["q_weight"].bfloat16()}
    assert check_forward(given)[0].dtype == FP32
    check_backward(given)
    given = case(3, 2, 20) | {"streams": given["streams"].bfloat16()}
    assert check_forward(given)[0].dtype == BF16


# ---- the gate


def test_an_exact_zero_opens_or_closes_by_its_sign_bit():
    """Each product of weights is -1e-50, which fp32 does not hold: dot is -0. Zero streams give +0, as a sum does."""
    ones = torch.ones(2, 1, 4, device=DEVICE)
    given = dict(streams=ones * 1e18, keys=ones * 1e18, value=torch.ones(2, 4, device=DEVICE))
    given |= dict(q_weight=ones[0] * 1e-25, k_weight=ones[0] * -1e-25)
    opened, closed = torch.tensor(1e-3).sigmoid().item(), torch.tensor(-1e-3).sigmoid().item()
    for sign, expected in ((1, closed), (-1, opened), (0, opened), (-0.0, opened)):
        changed = given | {"streams": given["streams"] * sign}
        _, gate = fused_engram_gate(**changed)
        assert gate[0].item() == pytest.approx(expected, rel=1e-6)
        assert gate[0].item() == pytest.approx(add_memory(**changed)[1][0].item(), rel=1e-6)


def test_no_gradient_through_the_gate_below_the_floor():
    """dot = 2 q here: 0.8e-6 and -0.8e-6 are below, 1.2e-6 is above."""
    ones = torch.ones(1, 3, 4, device=DEVICE)
    given = dict(streams=ones, keys=ones, value=torch.ones(1, 4, device=DEVICE), k_weight=ones[0])
    given["q_weight"] = ones[0] * torch.tensor([[0.4e-6], [-0.4e-6], [0.6e-6]], device=DEVICE)
    check_forward(given)
    ours = check_backward(given)
    assert not ours["keys"][:, :2].any()
    assert not ours["q_weight"][:2].any()
    assert ours["q_weight"][2].all()
    through = gradients(fused_engram_gate, given, ["gate"], ["streams"])["streams"]
    assert not through[:, :2].any()


def test_an_image_token_gets_no_value_and_gives_no_gradient():
    given = case(4, 2, 20, BF16)
    given["text_mask"][:] = torch.tensor([True, False, True, False])
    streams, gate = check_forward(given)
    assert torch.equal(streams[1::2], given["streams"][1::2])
    assert not gate[1::2].any()
    grads = check_backward(given)
    assert not grads["keys"][1::2].any()
    assert not grads["value"][1::2].any()
    assert grads["keys"][::2].any()
    everything = fused_engram_gate(**given | {"text_mask": torch.ones_like(given["text_mask"])})
    for part, other in zip(everything, fused_engram_gate(**given | {"text_mask": None}), strict=True):
        assert torch.equal(part, other)


def test_the_gate_never_closes():
    d, ones = 5120, torch.ones(1, 5120, device=DEVICE)
    x = drawn(2, 1, d)
    keys = x * torch.tensor([1.0, -1.0], device=DEVICE)[:, None, None]
    _, gate = fused_engram_gate(x, keys, drawn(2, d, seed=1), ones, ones)
    assert [round(g, 6) for g in gate[:, 0].tolist()] == [0.999788, 0.000212]


def test_zero_streams_and_zero_keys():
    for name in ("streams", "keys"):
        given = case(3, 2, 20)
        given[name] = torch.zeros_like(given[name])
        check_forward(given)
        assert all(grad.isfinite().all() for grad in check_backward(given).values())


@pytest.mark.parametrize("name", ["streams", "keys"])
def test_streams_and_keys_of_any_size(name):
    """The norm takes any scale out of dot; below 1e-10 norm_eps counts, and a larger one sooner."""
    given = case(4, 2, 20) | {"text_mask": None}
    given[name] *= torch.tensor([1e-12, 1e-4, 1.0, 1e12], device=DEVICE)[:, None, None]
    check_forward(given)
    check_backward(given)
    check_forward(given | {"norm_eps": 1e-6})


def test_nan_stays_in_its_stream():
    given = case(4, 2, 20) | {"text_mask": None}
    before = fused_engram_gate(**given)
    given["streams"][1, 0, 3] = float("nan")
    ours = fused_engram_gate(**given)
    is_nan = torch.tensor([[False, False], [True, False], [False, False], [False, False]], device=DEVICE)
    assert torch.equal(ours[1].isnan(), is_nan)
    assert torch.equal(ours[0].isnan().all(-1), is_nan)
    assert torch.equal(ours[0][~is_nan], before[0][~is_nan])


# ---- the backward


@pytest.mark.parametrize("used", OUTPUTS)
def test_each_output_alone(used, monkeypatch):
    intact = poison(monkeypatch)
    assert check_backward(case(5, 2, 20), [used])["keys"].any()
    intact()


@pytest.mark.parametrize("wanted", INPUTS)
def test_each_gradient_alone(wanted):
    given = case(3, 2, 20)
    alone = gradients(fused_engram_gate, given, OUTPUTS, [wanted])
    assert torch.equal(alone[wanted], gradients(fused_engram_gate, given)[wanted])


def test_programs_that_take_every_other_tile(monkeypatch):
    monkeypatch.setattr(module, "PROGRAMS", 2)
    intact = poison(monkeypatch)
    check_backward(case(43, 1, 7))
    intact()


def test_a_gradient_of_any_stride():
    """A sum's gradient has stride 0. One embedding as all streams has the sum over the streams as its gradient."""
    given = case(3, 3, 20) | {"text_mask": None}

    def of_embedding(function):
        embedding = given["streams"][:, 0].clone().requires_grad_()
        streams, gate = function(**given | {"streams": embedding[:, None].expand(-1, 3, -1)})
        (streams.sum() + gate.sum()).backward()
        return embedding.grad

    assert energy(of_embedding(fused_engram_gate), of_embedding(add_memory)) <= 1e-8


def test_what_is_kept_for_the_backward():
    """The input and three numbers a stream."""
    given = case(3, 4, 20)
    streams, _ = fused_engram_gate(**given | {"value": given["value"].requires_grad_()})
    saved = streams.grad_fn.next_functions[0][0].saved_tensors
    inputs = {tensor.data_ptr() for tensor in given.values()}
    assert sum(tensor.numel() for tensor in saved if tensor.data_ptr() not in inputs) == 3 * 4 * 3


def test_no_second_derivative():
    given = case(2, 2, 8)
    given["value"].requires_grad_()
    (grad,) = torch.autograd.grad(fused_engram_gate(**given)[0].square().sum(), [given["value"]], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# ---- the same again


def test_two_runs_are_equal_and_a_token_alone_equals_the_token_in_a_batch():
    given = case(11, 2, 40, BF16) | {"text_mask": None}
    ours, grads = fused_engram_gate(**given), gradients(fused_engram_gate, given)
    again = gradients(fused_engram_gate, given)
    assert all(torch.equal(part, other) for part, other in zip(ours, fused_engram_gate(**given), strict=True))
    assert all(torch.equal(grads[name], again[name]) for name in grads)
    for t in (0, 7, 10):
        alone = given | {name: given[name][t : t + 1] for name in ("streams", "keys", "value")}
        assert all(torch.equal(part[t], one[0]) for part, one in zip(ours, fused_engram_gate(**alone), strict=True))
        of_one = gradients(fused_engram_gate, alone)
        assert all(torch.equal(grads[name][t], of_one[name][0]) for name in ("streams", "keys", "value"))


def test_keys_and_value_of_one_projection():
    n, d = 3, 20
    given = case(6, n, d)
    expected, grads = fused_engram_gate(**given), gradients(fused_engram_gate, given)
    joint = torch.cat([given["keys"].flatten(1), given["value"]], 1).view(2, 3, -1).requires_grad_()
    keys, value = joint.split([n * d, d], dim=-1)
    streams = given["streams"].transpose(0, 1).contiguous().transpose(0, 1).view(2, 3, n, d)
    mask = given["text_mask"].view(2, 3)
    ours = fused_engram_gate(streams, keys.unflatten(-1, (n, d)), value, given["q_weight"], given["k_weight"], mask)
    assert ours[0].shape == (2, 3, n, d)
    assert ours[1].shape == (2, 3, n)
    for part, other in zip(ours, expected, strict=True):
        assert torch.equal(part.flatten(0, 1), other)
    weights = [drawn(*shape, seed=20 + i, dtype=BF16) for i, shape in enumerate(((n, d), (n,)))]
    (of_joint,) = torch.autograd.grad([(p * w).sum() for p, w in zip(ours, weights, strict=True)], [joint])
    assert torch.equal(of_joint.view(6, -1), torch.cat([grads["keys"].flatten(1), grads["value"]], 1))


@interpreted
@pytest.mark.parametrize("order", ["token", "stream"])
@pytest.mark.parametrize("name", ["streams", "keys"])
def test_addresses_pass_2_to_the_31(name, order):
    """The last token, or stream, lies 2.4e9 elements on, in memory that is only promised; 32 bits would wrap."""
    memory = mmap.mmap(-1, 10_000_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    given = case(3, 3, 8)
    strides = (1_200_000_000, 8, 1) if order == "token" else (8 * 3, 1_200_000_000, 1)
    far = torch.frombuffer(memory, dtype=torch.uint8).view(FP32).as_strided((3, 3, 8), strides)
    far.copy_(given[name])
    q = given["q_weight"].requires_grad_()
    ours, expected = (fused_engram_gate(**given | {name: tensor})[0] for tensor in (far, given[name]))
    assert torch.equal(ours, expected)
    (ours,), (expected,) = (torch.autograd.grad(part.sum(), [q]) for part in (ours, expected))
    assert torch.equal(ours, expected)


@interpreted
def test_what_is_read_and_written():
    """Forward (3n + 1) d elements a token, backward (6n + 2) d; the weights once for 2 tokens, and once for 8."""
    T, n, d = 9, 2, 130
    given = case(T, n, d, BF16)
    joint = torch.cat([given["keys"].flatten(1), given["value"]], 1)
    given["keys"], given["value"] = joint[:, : n * d].unflatten(1, (n, d)), joint[:, n * d :]
    floats = T * n * d
    with count_traffic(**given) as traffic:
        fused_engram_gate(**given)
    assert traffic["streams"] == traffic["keys"] == Traffic(floats, 0, 2 * floats, 0)
    assert traffic["value"] == Traffic(T * d, 0, 2 * T * d, 0)
    assert traffic["allocated bfloat16"] == Traffic(0, floats, 0, 2 * floats)
    elements = sum(traffic[name].loaded for name in INPUTS[:3]) + traffic["allocated bfloat16"].stored
    assert elements == (3 * n + 1) * d * T
    assert traffic["q_weight"].loaded == traffic["k_weight"].loaded == 5 * n * d
    assert traffic["text_mask"].loaded == T
    assert traffic["allocated float32"] == Traffic(0, T * n * 4, 0, 4 * T * n * 4), "gate, dot and two factors"

    leaves = [given[name].requires_grad_() for name in INPUTS]
    outputs = fused_engram_gate(**given)
    kept = outputs[0].grad_fn.next_functions[0][0].saved_tensors[-1]
    grads = [torch.ones_like(part) for part in outputs]
    with count_traffic(**given, kept=kept, grad_new=grads[0], grad_gates=grads[1]) as traffic:
        torch.autograd.grad(outputs, leaves, grads)
    assert traffic["streams"] == traffic["keys"] == Traffic(floats, 0, 2 * floats, 0)
    assert traffic["value"] == Traffic(T * d, 0, 2 * T * d, 0)
    assert traffic["grad_new"] == Traffic(2 * floats, 0, 4 * floats, 0)
    written = 2 * floats + T * d
    assert traffic["allocated bfloat16"] == Traffic(0, written, 0, 2 * written)
    read = sum(traffic[name].loaded for name in ("streams", "keys", "value", "grad_new"))
    assert read + written == (6 * n + 2) * d * T
    assert traffic["q_weight"].loaded == traffic["k_weight"].loaded == 2 * n * d
    assert traffic["kept"].loaded == T * n * 3
    assert traffic["grad_gates"].loaded == T * n
    splits, programs = 2, 2
    assert traffic["allocated float32"].loaded == T * n * 4 * splits
    assert traffic["allocated float32"].stored == T * n * 4 + programs * n * d


# ---- bad input

GOOD = case(3, 2, 8)
VALUES = [
    (dict(streams=GOOD["streams"][0, 0]), r"streams of shape \[8\]: expected \[..., n, d\], n from 1 to 8"),
    (dict(streams=torch.zeros(3, 9, 8, device=DEVICE)), r"streams of shape \[3, 9, 8\]: expected .* n from 1 to 8"),
    (dict(streams=torch.zeros(3, 2, 0, device=DEVICE)), r"streams of shape \[3, 2, 0\]: expected .* d from 1"),
    (dict(keys=GOOD["keys"][:, :1]), r"keys of shape \[3, 1, 8\]: expected \[3, 2, 8\]"),
    (dict(value=GOOD["value"][:2]), r"value of shape \[2, 8\]: expected \[3, 8\]"),
    (dict(q_weight=GOOD["q_weight"][0]), r"q_weight of shape \[8\]: expected \[2, 8\]"),
    (dict(k_weight=GOOD["q_weight"].T), r"k_weight of shape \[8, 2\]: expected \[2, 8\]"),
    (dict(text_mask=GOOD["text_mask"][:, None]), r"text_mask of shape \[3, 1\]: expected \[3\]"),
    (dict(keys=GOOD["keys"].transpose(1, 2).contiguous().transpose(1, 2)), r"keys has strides .*channels adjacent"),
    (dict(value=GOOD["value"].to("meta")), "value is on meta: expected .*, where streams are"),
]
TYPES = [
    (
        dict(streams=GOOD["streams"].double()),
        r"streams is torch\.float64: expected torch\.bfloat16 or",
    ),
    (dict(keys=GOOD["keys"].half()), r"keys is torch\.float16: expected torch\.bfloat16 or torch\.float32"),
    (dict(k_weight=GOOD["k_weight"].double()), r"k_weight is torch\.float64: expected"),
    (dict(text_mask=GOOD["text_mask"].float()), r"text_mask is torch\.float32: expected torch\.bool"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [(c, ValueError, m) for c, m in VALUES] + [(c, TypeError, m) for c, m in TYPES],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        fused_engram_gate(**GOOD | change)


def test_forward_and_backward_fit_every_target_at_the_official_size():
    reports = compile_all(["kernels.engram_gate"])
    assert {report.target for report in reports} == {*TARGETS}
    for report in reports:
        assert report.spilled == report.stack_bytes == 0, report
        assert report.shared_bytes <= SHARED[report.target], report
