"""Where the kernels take over they give what the references give: forced on here, in Triton's interpreter."""

from types import SimpleNamespace

import pytest
import torch

from dsv41_edu.engram import gate as gate_module
from dsv41_edu.engram import hashing as hashing_module
from dsv41_edu.engram.gate import EngramGate
from dsv41_edu.engram.hashing import NgramHash
from kernels import engram_gate, ngram_hash
from kernels.launch import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU kernels don't take tensors of the CPU")


@pytest.fixture
def called(monkeypatch):
    """The names of the kernels that were called."""
    names = []

    def watch(module, name):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: names.append(name) or kernel(*given))

    watch(engram_gate, "fused_engram_gate")
    watch(ngram_hash, "fused_ngram_hash")
    return names


def test_the_kernels_serve_on_a_gpu_alone():
    on_gpu = [SimpleNamespace(is_cuda=True, dtype=t) for t in (torch.bfloat16, torch.float32, torch.float64)]
    assert [gate_module.fuse(x) for x in on_gpu] == [True, True, False]
    assert hashing_module.fuse(on_gpu[0])
    assert not gate_module.fuse(torch.zeros(1))
    assert not hashing_module.fuse(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("chunked", [False, True])
def test_hash(monkeypatch, called, chunked):
    hash = NgramHash((1, 4), order=4, heads=2, first=53, size=97, pad=72)
    g = torch.Generator().manual_seed(0)
    given = [torch.randint(0, 97, (2, 5), generator=g)]
    if chunked:
        given += [torch.rand(2, 5, generator=g) > 0.3, torch.randint(-1, 97, (2, 3), generator=g)]
    expected = hash(*given)
    assert called == []
    monkeypatch.setattr(hashing_module, "fuse", lambda ids: True)
    for _ in range(2):
        rows, history = hash(*given)
        assert torch.equal(rows, expected[0])
        assert torch.equal(history, expected[1])
    assert called == ["fused_ngram_hash"] * 2


def test_the_hashs_constants_are_copied_to_a_device_once():
    hash = NgramHash((1, 4), order=4, heads=2, first=53, size=97, pad=72)
    copies = hash.on(torch.device("meta"))
    assert [t.device.type for t in copies] == ["meta"] * 3
    assert [t.shape for t in copies] == [(2, 4), (2, 6), (2, 6)]
    assert hash.on(torch.device("meta")) is copies
    here = hash.multipliers, hash.primes, hash.offsets
    assert all(a is b for a, b in zip(hash.on(torch.device("cpu")), here, strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_gate(monkeypatch, called, masked):
    """Values and the gradients of all inputs and parameters."""
    torch.manual_seed(0)
    module = EngramGate(n=3, d=40, width=12, norm_eps=0.1)
    for weight in (module.q_weight, module.k_weight):
        torch.nn.init.normal_(weight)
    streams, rows = torch.randn(2, 3, 3, 40), torch.randn(2, 3, 12)
    mask = torch.rand(2, 3) > 0.5 if masked else None
    assert mask is None or 0 < mask.sum() < 6

    def run():
        leaves = [x.clone().requires_grad_() for x in (streams, rows)]
        out = module(*leaves, mask)
        return out, *torch.autograd.grad(out.square().sum(), [*leaves, *module.parameters()])

    expected = run()
    assert called == []
    monkeypatch.setattr(gate_module, "fuse", lambda streams: True)
    for ours, theirs in zip(run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert called == ["fused_engram_gate"]
