"""Experts against public vectors, the loop that is the equation, and the faults that were really made."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41_edu.config import preset
from dsv41_edu.moe.experts import Experts, MoE, QuantizedExperts, expert, experts_loop, split_expert, swiglu
from dsv41_edu.moe.gate import route
from dsv41_edu.quantization import fp8_tiles_decode, fp8_tiles_encode, mxfp4_decode, mxfp4_encode

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "experts.json").read_text())["cases"]
V = {k: v.double() if v.is_floating_point() else v for k, v in load_file(VECTORS / "experts.safetensors").items()}
MINI = preset("mini")


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def routing(T, E, k, seed=0, dtype=torch.float64):
    weights, indices = route(torch.rand(T, E, generator=torch.Generator().manual_seed(seed)), k, renormalise=True)
    return weights.to(dtype), indices


@pytest.mark.parametrize("case", CASES[:2], ids=lambda c: str(c["case"]))
def test_public_vectors_of_one_expert(case):
    n = f"case{case['case']}."
    x, w1, w2, w3 = (V[n + name] for name in ("x", "w1", "w2", "w3"))
    limit, weight = case["limit"] or None, V[n + "route_weight"].squeeze(-1)
    assert (expert(x, w1, w2, w3, limit) - V[n + "out_shared"]).abs().max() < 1e-11
    assert (expert(x, w1, w2, w3, limit, weight) - V[n + "out_routed"]).abs().max() < 1e-11


def test_public_vectors_of_a_whole_block():
    config = MINI.replace(
        hidden_size=32, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, swiglu_limit=1.0
    )
    moe = MoE(config).double()

    def matrices(prefix):
        return tuple(V[f"moe0.{prefix}.{name}.weight"] for name in ("w1", "w2", "w3"))

    moe.experts = Experts.of([matrices(f"experts.{e}") for e in range(8)], limit=1.0)
    moe.shared_experts = Experts.of([matrices("shared_experts")], limit=1.0)
    moe.gate.weight = torch.nn.Parameter(V["moe0.gate.weight"])
    moe.gate.bias, moe.gate.bias_vl = V["moe0.gate.bias"], V["moe0.gate.bias_vl"]
    with torch.no_grad():
        assert (moe(V["moe0.x"]) - V["moe0.out_text"]).abs().max() < 1e-11
        with_mask = moe(V["moe0.x"], image_mask=V["moe0.image_mask"].bool())
        assert (with_mask - V["moe0.out_with_mask"]).abs().max() < 1e-11
        assert (with_mask - V["moe0.out_text"]).abs().max() > 1e-3


def test_the_clamp_is_asymmetric_and_comes_first():
    """Gate 12 and up -15 give silu(10) * (-10); a gate of -30 stays -30."""
    ten = torch.tensor(10.0, dtype=torch.float64)
    assert swiglu(ten * 1.2, -ten * 1.5, 10.0).item() == pytest.approx(-99.995460, abs=1e-6)
    deep = torch.tensor(-30.0, dtype=torch.float64)
    assert swiglu(deep, ten, 10.0) == swiglu(deep, ten)
    assert swiglu(torch.tensor(-12.0), torch.tensor(1.0), 10.0) != swiglu(
        torch.tensor(-10.0), torch.tensor(1.0), 10.0
    )
    assert swiglu(ten * 3, ten * 3).item() == pytest.approx(900.0)


@pytest.mark.parametrize("limit", [None, 0.5])
def test_the_activation_of_bf16_is_fp32s(limit):
    a, u, g = (drawn(7, 33, seed=i).bfloat16() for i in range(3))
    ours, wide = [t.clone().requires_grad_() for t in (a, u)], [t.float().requires_grad_() for t in (a, u)]
    h, expected = swiglu(*ours, limit), swiglu(*wide, limit)
    assert h.dtype == torch.float32
    assert torch.equal(h, expected)
    assert torch.equal(ours[0], a), "the input stays as it was"
    for found, exact in zip(
        torch.autograd.grad(h, ours, g.float()), torch.autograd.grad(expected, wide, g.float()), strict=True
    ):
        assert torch.equal(found, exact.bfloat16())


def test_a_tokens_rows_are_summed_in_fp32_and_rounded_once():
    """Experts of outputs 1, 2^-9, ..., 2^-9: summed in bf16, each of the small ones would be lost."""
    experts = Experts(6, 8, 8).bfloat16()
    with torch.no_grad():
        experts.w13.zero_()
        experts.w2.zero_()
        experts.w13[:, 0, 0], experts.w13[:, 8, 0] = 64.0, 1.0  # silu(64) = 64
        experts.w2[:, :, 0] = 2.0**-9
        experts.w2[0, :, 0] = 1.0
    x, weights = torch.eye(8)[:1].bfloat16(), torch.full((1, 6), 1 / 64)
    y = experts(x, weights, torch.arange(6)[None])
    assert y.tolist() == [[1 + 2.0**-7] * 8]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.sampled_from([0, 1, 2, 13, 17]), st.integers(1, 9), st.integers(1, 3), st.integers(0, 999))
def test_the_grouped_form_is_the_loop(T, E, k, seed):
    k = min(k, E)
    experts = Experts(E, 16, 8, limit=0.5).double()
    w1, w3 = experts.w13.chunk(2, dim=1)
    weights, indices = routing(T, E, k, seed)
    x = drawn(T, 16, seed=seed)
    torch.testing.assert_close(
        experts(x, weights, indices),
        experts_loop(x, weights, indices, w1, experts.w2, w3, 0.5),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 5])  # strides that torch's grouped product takes, and that it refuses
@pytest.mark.parametrize(("E", "k"), [(6, 2), (1, 1)])
def test_the_grouped_form_in_narrow_types(dtype, width, E, k):
    experts = Experts(E, 16, width, limit=0.5).to(dtype)
    w1, w3 = experts.w13.chunk(2, dim=1)
    weights, indices = routing(40, E, k, dtype=torch.float32)
    x = drawn(40, 16, dtype=dtype)
    expected = experts_loop(x.double(), weights.double(), indices, *(w.double() for w in (w1, experts.w2, w3)), 0.5)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(experts(x, weights, indices).double(), expected, rtol=tolerance, atol=tolerance)
    experts(x, weights, indices).sum().backward()  # a gradient of stride 0
    assert experts.w13.grad.isfinite().all()


@pytest.mark.parametrize(("E", "k"), [(5, 2), (1, 1)])
def test_gradients_of_the_grouped_form_are_the_loops(E, k):
    experts = Experts(E, 8, 6, limit=0.7).double()
    weights, indices = routing(9, E, k)
    x, g = drawn(9, 8).requires_grad_(), drawn(9, 8, seed=1)
    w = weights.clone().requires_grad_()
    ours = torch.autograd.grad((experts(x, w, indices) * g).sum(), [x, w, experts.w13, experts.w2])
    w1, w3 = experts.w13.chunk(2, dim=1)
    loop = torch.autograd.grad(
        (experts_loop(x, w, indices, w1, experts.w2, w3, 0.7) * g).sum(), [x, w, experts.w13, experts.w2]
    )
    for a, b in zip(ours, loop, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_weight_enters_before_the_down_projection():
    """In exact arithmetic it may stand after it too; in bf16 the two round differently, and ours is the first."""
    x, w1, w2, w3 = (drawn(*s, seed=i).bfloat16() for i, s in enumerate([(64, 32), (32, 32), (32, 32), (32, 32)]))
    weight = torch.full((64,), 1 / 3)
    before = expert(x, w1, w2, w3, 10.0, weight)
    h = swiglu(torch.nn.functional.linear(x, w1).float(), torch.nn.functional.linear(x, w3).float(), 10.0)
    assert torch.equal(before, torch.nn.functional.linear((h * weight[:, None]).bfloat16(), w2))
    after = (expert(x, w1, w2, w3, 10.0).float() * weight[:, None]).bfloat16()
    assert not torch.equal(before, after)
    torch.testing.assert_close(before.float(), after.float(), rtol=0.02, atol=0.5)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 999))
def test_segmentation_changes_nothing(m, seed):
    """The same output, parameters and FLOPs from m narrow experts: a split layer can express the unsplit one."""
    w1, w2, w3 = drawn(12, 8, seed=seed), drawn(8, 12, seed=seed + 1), drawn(12, 8, seed=seed + 2)
    x, weight = drawn(5, 8, seed=seed + 3), drawn(5, seed=seed + 4).abs()
    parts = split_expert(w1, w2, w3, m)
    assert len(parts) == m
    assert sum(w.numel() for part in parts for w in part) == w1.numel() + w2.numel() + w3.numel()
    total = sum(expert(x, *part, 0.5, weight) for part in parts)
    torch.testing.assert_close(total, expert(x, w1, w2, w3, 0.5, weight), rtol=1e-12, atol=1e-12)
    narrow = Experts.of(parts, limit=0.5)
    everyone = torch.arange(m).expand(5, m)
    torch.testing.assert_close(narrow(x, weight[:, None].expand(5, m), everyone), total, rtol=1e-12, atol=1e-12)


def test_two_runs_are_equal_and_a_row_alone_equals_the_row_in_a_batch():
    experts = Experts(8, 32, 16, 10.0).double()
    weights, indices = routing(40, 8, 3)
    x = drawn(40, 32)
    y = experts(x, weights, indices)
    assert torch.equal(y, experts(x, weights, indices))
    for t in range(0, 40, 7):
        torch.testing.assert_close(experts(x[t : t + 1], weights[t : t + 1], indices[t : t + 1])[0], y[t])


def test_the_shared_expert_may_be_a_routed_one():
    moe = MoE(MINI).double()
    x = drawn(6, MINI.hidden_size)
    weights, indices = moe.gate(x)
    E = len(moe.experts.w13)
    both = Experts(E + 1, MINI.hidden_size, MINI.moe_intermediate_size, MINI.swiglu_limit).double()
    both.w13 = torch.nn.Parameter(torch.cat([moe.experts.w13, moe.shared_experts.w13]))
    both.w2 = torch.nn.Parameter(torch.cat([moe.experts.w2, moe.shared_experts.w2]))
    with_shared = (
        torch.cat([weights, weights.new_ones(6, 1)], 1),
        torch.cat([indices, indices.new_full((6, 1), E)], 1),
    )
    torch.testing.assert_close(both(x, *with_shared), moe(x), rtol=1e-12, atol=1e-12)


# ---- stored formats


def quantized(encode, seed=0):
    E, I, d = 4, 64, 96
    shapes = {"w1": (I, d), "w2": (d, I), "w3": (I, d)}
    parts = {}
    for i, (name, shape) in enumerate(shapes.items()):
        pairs = [encode(drawn(*shape, seed=seed + 10 * i + e).float() / 8) for e in range(E)]
        parts[name] = tuple(
            torch.stack([p[j].view(torch.uint8) for p in pairs]).view(pairs[0][j].dtype) for j in (0, 1)
        )
    return parts


@pytest.mark.parametrize(("encode", "decode"), [(mxfp4_encode, mxfp4_decode), (fp8_tiles_encode, fp8_tiles_decode)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_experts_are_decoded_exactly(encode, decode, dtype):
    parts = quantized(encode)
    experts = QuantizedExperts(10.0, **parts)
    dense = {
        n: torch.stack([decode(p[e], s[e], torch.float32).to(dtype) for e in range(4)]) for n, (p, s) in parts.items()
    }
    weights, indices = routing(9, 4, 2, dtype=torch.float32)
    x = drawn(9, 96, dtype=dtype)
    expected = experts_loop(x, weights, indices, dense["w1"], dense["w2"], dense["w3"], 10.0)
    assert torch.equal(experts(x, weights, indices), expected)


def test_only_the_chosen_experts_are_decoded(monkeypatch):
    experts, decoded = QuantizedExperts(10.0, **quantized(mxfp4_encode)), []
    real = experts.decode
    monkeypatch.setattr(experts, "decode", lambda name, e, dtype: decoded.append(e) or real(name, e, dtype))
    experts(drawn(1, 96, dtype=torch.float32), torch.ones(1, 2), torch.tensor([[3, 1]]))
    assert decoded == [1, 1, 1, 3, 3, 3]


# ---- parity with the public library, in the layout of its own block


def test_parity_with_the_library():
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    config = DeepseekV4Config(
        hidden_size=64, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3, swiglu_limit=0.5
    )
    config._experts_implementation = "eager"
    ours, theirs = Experts(8, 64, 32, 0.5), DeepseekV4Experts(config)
    with torch.no_grad():
        theirs.gate_up_proj.copy_(ours.w13)
        theirs.down_proj.copy_(ours.w2)
        weights, indices = routing(17, 8, 3, dtype=torch.float32)
        x = drawn(17, 64, dtype=torch.float32)
        torch.testing.assert_close(ours(x, weights, indices), theirs(x, indices, weights), rtol=1e-4, atol=1e-5)


# ---- bad input


def test_bad_input_is_refused():
    experts, x = Experts(4, 8, 6), torch.randn(3, 8)
    weights, indices = torch.rand(3, 2), torch.tensor([[0, 1]] * 3)
    with pytest.raises(ValueError, match=r"expected \[T, d\], \[T, k\], \[T, k\]"):
        experts(x, weights[:2], indices)
    with pytest.raises(ValueError, match=r"expected \[T, d\]"):
        experts(x[0], weights, indices)
    with pytest.raises(ValueError, match="indices from 0 to 4: expected 0 to 3"):
        experts(x, weights, torch.tensor([[0, 4]] * 3))
    with pytest.raises(ValueError, match="indices from -1 to 1: expected 0 to 3"):
        experts(x, weights, torch.tensor([[-1, 1]] * 3))
    with pytest.raises(ValueError, match="indices from 0 to 1: expected 0 to 0"):
        Experts(1, 8, 6)(x, weights[:, :1], torch.tensor([[0], [1], [0]]))
    with pytest.raises(TypeError, match="expected a float and an integer type"):
        experts(x, weights, indices.float())
    with pytest.raises(ValueError, match="m = 4: expected a divisor of the width 6"):
        split_expert(torch.rand(6, 8), torch.rand(8, 6), torch.rand(6, 8), 4)
    assert experts(torch.empty(0, 8), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int64)).shape == (0, 8)
