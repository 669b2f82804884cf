"""The gate against public vectors, against plain Python number by number, and where its equation has edges.

In the vectors, tokens 0 and 3 were scaled after what follows from them had been computed, then rounded to fp32: they,
and sums over tokens, agree to that rounding alone. The modules are held against the equations of their sources.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from dsv41_edu.engram.gate import EngramGate, PaperEngram, add_memory, signed_root_gate, similarity

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "engram_gate.json").read_text())["cases"]
V = load_file(VECTORS / "engram_gate.safetensors")
NAMES = "X", "key", "value", "q_weight", "k_weight"
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
OPENED, CLOSED = 1 / (1 + math.exp(-1e-3)), 1 / (1 + math.exp(1e-3))  # at a dot of +0 and -0


def drawn(*shape, seed=0, dtype=FP64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def case(T=5, n=3, d=7, dtype=FP64):
    """The arguments of `add_memory`, but for the mask."""
    shapes = (T, n, d), (T, n, d), (T, d), (n, d), (n, d)
    return [drawn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def vectors(number, dtype):
    v = {name.split(".")[1]: t for name, t in V.items() if name.startswith(f"case{number}.")}
    leaves = [v[name].to(dtype).requires_grad_() for name in NAMES]
    out, gate = add_memory(*leaves)
    grads = torch.autograd.grad(out, leaves, v["upstream_grad"].to(dtype))
    return v, leaves, out.detach(), gate.detach(), dict(zip(NAMES, grads, strict=True))


@pytest.mark.parametrize("number", [c["case"] for c in CASES])
def test_public_vectors_in_float64(number):
    v, leaves, out, gate, grads = vectors(number, FP64)
    exact = torch.tensor([t not in (0, 3) for t in range(len(out))])
    dot = similarity(leaves[0], leaves[1], leaves[3], leaves[4]).detach()
    for ours, expected in ((out, v["out"]), (gate, v["gate"]), (dot, v["dot"])):
        assert (ours - expected)[exact].abs().max() <= 1e-11
        assert ((ours - expected).abs() <= 1e-6 * (1 + expected.abs())).all()
    for name, ours in grads.items():
        expected = v[f"grad_{name}"]
        if len(ours) == len(out):
            assert (ours - expected)[exact].abs().max() <= 1e-11, name
        assert (ours - expected).abs().max() <= 1e-6 * expected.abs().max(), name


@pytest.mark.parametrize("number", [c["case"] for c in CASES])
def test_public_vectors_in_float32(number):
    v, _, out, gate, grads = vectors(number, FP32)
    assert (out.dtype, gate.dtype) == (FP32, FP32)
    assert (gate - v["gate"]).abs().max() <= 1e-5
    assert ((out - v["out"]).abs() <= 1e-5 * (1 + v["out"].abs())).all()
    for name, ours in grads.items():
        assert (ours - v[f"grad_{name}"]).abs().max() <= 1e-4 * v[f"grad_{name}"].abs().max(), name


def test_number_by_number():
    streams, keys, value, q, k = case()
    out, gate = add_memory(streams, keys, value, q, k, norm_eps=0.1)
    d = 7

    def normed(x, weight):
        factor = 1 / math.sqrt(sum(a * a for a in x) / d + 0.1)
        return [a * factor * w for a, w in zip(x, weight, strict=True)]

    for t in range(5):
        for c in range(3):
            x, key = streams[t, c].tolist(), keys[t, c].tolist()
            pairs = zip(normed(x, q[c].tolist()), normed(key, k[c].tolist()), strict=True)
            dot = sum(a * b for a, b in pairs) / math.sqrt(d)
            root = math.copysign(math.sqrt(max(abs(dot), 1e-6)), dot)
            expected = 1 / (1 + math.exp(-root))
            assert gate[t, c].item() == pytest.approx(expected, rel=1e-12)
            added = [a + expected * u for a, u in zip(x, value[t].tolist(), strict=True)]
            assert out[t, c].tolist() == pytest.approx(added, rel=1e-12, abs=1e-12)


# ---- the gate


def test_zero_counts_by_its_sign_bit():
    """An implementation with sign(0) = 0 gives 0.5 for both."""
    gate = signed_root_gate(torch.tensor([0.0, -0.0, 1e-7, -1e-7, 1e-6], dtype=FP64))
    assert gate.tolist() == pytest.approx([OPENED, CLOSED, OPENED, CLOSED, OPENED], rel=1e-12)
    streams, keys, value, q, k = case()
    for zero in (add_memory(streams * 0, keys, value, q, k), add_memory(streams, keys * 0, value, -q, k)):
        assert zero[1].flatten().tolist() == pytest.approx([OPENED] * 15)


def test_a_dot_that_underflows_keeps_its_sign():
    ones = torch.ones(1, 1, 4)
    x = ones * 1e18
    for sign, expected in ((1, OPENED), (-1, CLOSED)):
        weights = ones[0] * 1e-25, ones[0] * 1e-25 * sign
        assert similarity(x, x, *weights).item() == 0.0
        assert add_memory(x, x, ones[0], *weights)[1].item() == pytest.approx(expected, rel=1e-6)


def test_the_root_and_its_values():
    dots = torch.tensor([4.0, -4.0, 0.25, -0.25, 71.55, -71.55], dtype=FP64)
    roots = [2, -2, 0.5, -0.5, math.sqrt(71.55), -math.sqrt(71.55)]
    assert signed_root_gate(dots).tolist() == pytest.approx([1 / (1 + math.exp(-r)) for r in roots], rel=1e-12)
    assert signed_root_gate(torch.tensor(float("nan"))).isnan()


def test_no_gradient_below_the_floor():
    dot = torch.tensor([0.0, -0.0, 9e-7, -9e-7, 1.1e-6, -1.1e-6], dtype=FP64, requires_grad=True)
    (grad,) = torch.autograd.grad(signed_root_gate(dot).sum(), dot)
    assert grad[:4].tolist() == [0, 0, 0, 0]
    gate = signed_root_gate(dot.detach())[4:]
    slope = gate * (1 - gate) / (2 * math.sqrt(1.1e-6))
    torch.testing.assert_close(grad[4:], slope, rtol=1e-10, atol=0)


def test_with_unit_weights_the_gate_never_closes():
    d, ones = 5120, torch.ones(1, 5120, dtype=FP64)
    x = drawn(2, 1, d)
    keys = x * torch.tensor([3.0, -3.0], dtype=FP64)[:, None, None]
    _, gate = add_memory(x, keys, drawn(2, d, seed=1), ones, ones)
    assert similarity(x, keys, ones, ones)[0].item() == pytest.approx(math.sqrt(d), rel=1e-12)
    assert [round(g, 6) for g in gate.flatten().tolist()] == [0.999788, 0.000212]


def test_each_stream_has_a_gate_of_its_own_and_all_share_the_value():
    streams, keys, value, q, k = case()
    out, gate = add_memory(streams, keys, value, q, k)
    assert gate.unique().numel() == gate.numel()
    torch.testing.assert_close(out - streams, gate[..., None] * value[:, None], rtol=1e-12, atol=1e-12)


def test_the_norm_takes_any_scale_out_until_eps_counts():
    streams, keys, value, q, k = case()
    gate = add_memory(streams, keys, value, q, k)[1]
    scaled = add_memory(streams * 1e-4, keys * 1e3, value, q, k)[1]
    torch.testing.assert_close(scaled, gate, rtol=1e-9, atol=0)
    assert (add_memory(streams * 1e-4, keys, value, q, k, norm_eps=1e-6)[1] - gate).abs().max() > 0.1


def test_an_image_token_gets_no_value():
    given = case()
    mask = torch.tensor([True, False, True, True, False])
    out, gate = add_memory(*given, mask)
    assert torch.equal(out[~mask], given[0][~mask])
    assert not gate[~mask].any()
    everything = add_memory(*given)
    assert torch.equal(out[mask], everything[0][mask])
    assert torch.equal(gate[mask], everything[1][mask])


@pytest.mark.parametrize(
    ("streams", "others", "gates"), [(BF16, BF16, FP32), (FP32, BF16, FP32), (BF16, FP32, FP32), (FP64, FP64, FP64)]
)
def test_dtypes(streams, others, gates):
    given = [x.to(others) for x in case()]
    given[0] = given[0].to(streams)
    out, gate = add_memory(*given)
    assert (out.dtype, gate.dtype) == (streams, gates)
    expected = add_memory(*(x.double() for x in given))
    torch.testing.assert_close(gate.double(), expected[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(out.double(), expected[0], rtol=2.0**-8 if streams == BF16 else 1e-5, atol=1e-5)


def test_streams_are_rounded_once():
    """gate u is 2^-8 (1 + 2^-10) here: next to 1 that rounds up in bf16, but 2^-8, its own rounding, is a tie."""
    x, ones = torch.ones(1, 1, 4, dtype=BF16), torch.ones(1, 4)
    value = ones * (2.0**-8 * (1 + 2.0**-10) * (1 + math.exp(-1)))
    out, gate = add_memory(x, x, value, ones, ones * 0.5)
    assert gate.item() == pytest.approx(1 / (1 + math.exp(-1)))
    assert (out == 1 + 2.0**-7).all()


@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True])])
def test_gradients(mask):
    given = [x.requires_grad_() for x in case(T=3, n=2, d=4)]
    assert torch.autograd.gradcheck(lambda *x: add_memory(*x, mask), given)


def test_any_leading_shape():
    given = case(T=6)
    out, gate = add_memory(*given)
    shaped = [x.unflatten(0, (2, 3)) for x in given[:3]]
    mask = torch.ones(2, 3, dtype=torch.bool)
    ours = add_memory(*shaped, *given[3:], mask)
    assert torch.equal(ours[0].flatten(0, 1), out)
    assert torch.equal(ours[1].flatten(0, 1), gate)
    assert add_memory(*(x[:0] for x in given[:3]), *given[3:])[0].shape == (0, 3, 7)


@pytest.mark.parametrize(
    ("place", "change", "error", "message"),
    [
        (1, lambda x: x[:, :2], ValueError, r"keys of shape \[5, 2, 7\]: expected \[5, 3, 7\]"),
        (2, lambda x: x[:, None], ValueError, r"value of shape \[5, 1, 7\]: expected \[5, 7\]"),
        (3, lambda x: x[0], ValueError, r"q_weight of shape \[7\]: expected \[3, 7\]"),
        (4, lambda x: x.T, ValueError, r"k_weight of shape \[7, 3\]: expected \[3, 7\]"),
        (5, lambda x: torch.ones(4).bool(), ValueError, r"text_mask of shape \[4\]: expected \[5\]"),
        (5, lambda x: torch.ones(5), TypeError, r"text_mask is torch\.float32: expected torch\.bool"),
    ],
)
def test_bad_input(place, change, error, message):
    given = [*case(), None]
    given[place] = change(given[place])
    with pytest.raises(error, match=message):
        add_memory(*given)


# ---- the deployed module


def test_the_module_is_the_projection_and_the_gate():
    torch.manual_seed(0)
    module = EngramGate(n=3, d=8, width=12, norm_eps=0.1).double()
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {
        "wkv.weight": (32, 12),
        "q_weight": (3, 8),
        "k_weight": (3, 8),
    }
    module.q_weight.data, module.k_weight.data = drawn(3, 8, seed=1), drawn(3, 8, seed=2)
    streams, rows, mask = drawn(2, 5, 3, 8), drawn(2, 5, 12, seed=3), drawn(2, 5, seed=4) > 0
    projected = rows @ module.wkv.weight.T
    keys = torch.stack([projected[..., 8 * c : 8 * c + 8] for c in range(3)], 2)  # keys come first, the value last
    expected = add_memory(streams, keys, projected[..., 24:], module.q_weight, module.k_weight, mask, 0.1)[0]
    torch.testing.assert_close(module(streams, rows, mask), expected, rtol=1e-12, atol=1e-12)
    assert module(streams, rows).shape == streams.shape


def test_the_module_begins_with_unit_weights_and_refuses_other_rows():
    module = EngramGate(n=2, d=4, width=6)
    assert (module.q_weight == 1).all()
    assert (module.k_weight == 1).all()
    assert module.norm_eps == 1e-20
    with pytest.raises(ValueError, match=r"rows of shape \[5, 7\]: expected 6 channels last"):
        module(torch.zeros(5, 2, 4), torch.zeros(5, 7))


# ---- the first paper's module


@pytest.fixture
def paper():
    torch.manual_seed(0)
    return PaperEngram(n=2, d=4, width=6, order=3).double()


def gated(module, streams, rows):
    """Y, before the convolution."""
    keys = F.linear(rows, module.keys.weight, module.keys.bias).unflatten(-1, (2, 4))
    value = F.linear(rows, module.value.weight, module.value.bias)
    out, _ = add_memory(streams, keys, value, module.q_weight, module.k_weight)
    return out - streams


def test_before_training_the_convolution_adds_nothing(paper):
    assert not paper.conv.weight.any()
    assert paper.conv.bias is None
    streams, rows = drawn(2, 11, 2, 4), drawn(2, 11, 6, seed=1)
    torch.testing.assert_close(paper(streams, rows), streams + gated(paper, streams, rows), rtol=1e-12, atol=1e-12)


def test_the_convolution_number_by_number(paper):
    """Channel by channel, four places `order` apart, the last of them the position itself; none before the start."""
    paper.conv.weight.data = drawn(8, 1, 4, seed=2)
    paper.conv_norm.data = drawn(2, 4, seed=3)
    streams, rows = drawn(1, 11, 2, 4), drawn(1, 11, 6, seed=1)
    y = gated(paper, streams, rows)[0]
    normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * paper.conv_norm
    taps = paper.conv.weight[:, 0].unflatten(0, (2, 4))
    out = paper(streams, rows)[0]
    for t in range(11):
        total = torch.zeros(2, 4, dtype=FP64)
        for i, place in enumerate(range(t - 9, t + 1, 3)):
            if place >= 0:
                total += normed[place] * taps[..., i]
        torch.testing.assert_close(out[t], streams[0, t] + y[t] + total * total.sigmoid(), rtol=1e-10, atol=1e-10)


def test_the_convolution_looks_back_and_never_ahead(paper):
    paper.conv.weight.data = drawn(8, 1, 4, seed=2)
    streams, rows = drawn(1, 20, 2, 4), drawn(1, 20, 6, seed=1)
    changed = rows.clone()
    changed[0, 7] += 1
    differs = (paper(streams, rows) != paper(streams, changed)).flatten(2).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [7, 10, 13, 16]
