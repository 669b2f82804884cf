"""Where the kernels take over they give what the reference gives: forced on here, in Triton's interpreter."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_edu.config import preset
from dsv41_edu.moe import gate as gate_module
from dsv41_edu.moe.experts import Experts, MoE, QuantizedExperts
from dsv41_edu.moe.gate import Gate, fuse
from dsv41_edu.moe.placement import rebalance_experts
from dsv41_edu.quantization import mxfp4_encode

MINI = preset("mini").replace(hidden_size=64, n_routed_experts=6)


def both(monkeypatch, call):
    """What `call` returns by the reference and by the kernels."""
    with torch.no_grad():
        expected = call()
        monkeypatch.setattr(gate_module, "fuse", lambda x: True)
        return expected, call()


def test_the_kernels_serve_on_a_gpu_without_gradients_alone():
    on_gpu = {t: SimpleNamespace(is_cuda=True, dtype=t) for t in (torch.bfloat16, torch.float32, torch.float64)}
    assert not any(fuse(x) for x in (torch.zeros(1), *on_gpu.values()))
    with torch.no_grad():
        assert not fuse(torch.zeros(1))
        assert [fuse(x) for x in on_gpu.values()] == [True, True, False]


@pytest.mark.parametrize("tokens", [(5,), (2, 3), ()])
@pytest.mark.parametrize("placed", [False, True])
def test_gate(monkeypatch, tokens, placed):
    gate, x = Gate(MINI), torch.randn(*tokens, 64)
    gate.bias, gate.bias_vl = torch.randn(6) / 5, torch.randn(6) / 5
    if placed:
        gate.placement = rebalance_experts(torch.rand(1, 6), 8, 2, 1, 2).layer(0)
    mask = torch.rand(tokens) > 0.5
    (weights, indices), (fused_weights, fused_indices) = both(monkeypatch, lambda: gate(x, mask))
    assert torch.equal(indices, fused_indices)
    torch.testing.assert_close(weights, fused_weights, rtol=1e-5, atol=1e-6)


def test_a_whole_block(monkeypatch):
    moe, x = MoE(MINI), torch.randn(2, 4, 64)
    expected, found = both(monkeypatch, lambda: moe(x))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_stored_experts(monkeypatch):
    parts = {}
    for i, (name, shape) in enumerate({"w1": (32, 64), "w2": (64, 32), "w3": (32, 64)}.items()):
        pairs = [
            mxfp4_encode(torch.randn(shape, generator=torch.Generator().manual_seed(9 * i + e))) for e in range(6)
        ]
        stacked = [torch.stack([p[j].view(torch.uint8) for p in pairs]).view(pairs[0][j].dtype) for j in (0, 1)]
        parts[name] = tuple(stacked)
    experts, x = QuantizedExperts(10.0, **parts), torch.randn(5, 64)
    weights, indices = torch.rand(5, 2), torch.randint(0, 6, (5, 2))
    expected, found = both(monkeypatch, lambda: experts(x, weights, indices))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@settings(derandomize=True, deadline=None, max_examples=5)
@given(st.integers(0, 99))
def test_experts(seed):
    experts, x = Experts(6, 64, 32, 10.0), torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
    weights, indices = torch.rand(3, 2), torch.randint(0, 6, (3, 2))
    with pytest.MonkeyPatch.context() as patch:
        expected, found = both(patch, lambda: experts(x, weights, indices))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
