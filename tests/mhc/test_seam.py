"""The seam against public vectors, a public library, and the faults that were really made."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from dsv41_edu.mhc.seam import Seam, coefficients, collapse, expand, head_mix, one_hot, project, single_pass

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "mhc_seam.json").read_text())["cases"]
V = load_file(VECTORS / "mhc_seam.safetensors")


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_seam(n, d, seed=0):
    """A seam whose maps depend on the streams."""
    seam = Seam(n, d).double()
    with torch.no_grad():
        seam.fn.copy_(drawn(*seam.fn.shape, seed=seed) / (n * d) ** 0.5)
        seam.base.copy_(drawn(*seam.base.shape, seed=seed + 1))
        seam.scale.copy_(torch.tensor([0.7, 1.1, 1.3]))
    return seam


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['case']}-{c['hc']}x{c['d']}")
def test_public_vectors(case, dtype):
    v = {name.split(".")[1]: t for name, t in V.items() if name.startswith(f"case{case['case']}.")}
    X, F_out, pending = (v[name].to(dtype) for name in ("X", "F_out", "pending_pre"))
    pre, post, comb = coefficients(X, *(v[name].to(dtype) for name in ("fn", "base", "scale")))
    head = [v[name].to(dtype) for name in ("head_fn", "head_base", "head_scale")]
    found = {
        "pre": pre,
        "post": post,
        "comb": comb,
        "collapsed_single_pass": collapse(X, pending),
        "collapsed_multi_pass": collapse(X, pre),
        "expanded": expand(F_out, X, post, comb),
        "head_collapsed": head_mix(X, *head),
    }
    for name, value in found.items():
        error = ((value - v[name]).abs() / (1 + v[name].abs())).flatten(1).amax(1)
        if dtype == torch.float64:  # tokens 0 and 1 were scaled, and stored after rounding to fp32
            assert error[2:].max() <= 1e-12, name
            assert error.max() <= (1e-6 if case["comb_logit_scale"] >= 30 else 1e-7), name
        else:
            assert error.max() <= (2e-5 if name == "comb" and case["comb_logit_scale"] >= 30 else 1e-5), name


@pytest.mark.parametrize("n", [2, 4])
def test_parity_with_the_public_library(n):
    config = DeepseekV4Config(hidden_size=48, hc_mult=n, rms_norm_eps=1e-20)
    peer, head, ours = DeepseekV4HyperConnection(config), DeepseekV4HyperHead(config), Seam(n, 48)
    with torch.no_grad():
        for i, name in enumerate(("fn", "base", "scale")):
            getattr(peer, name).copy_(drawn(*getattr(peer, name).shape, seed=i) * 0.3)
            getattr(ours, name).copy_(getattr(peer, name))
            getattr(head, f"hc_{name}").copy_(drawn(*getattr(head, f"hc_{name}").shape, seed=9 + i) * 0.3)
        X = drawn(2, 5, n, 48, dtype=torch.float32)
        post, comb, collapsed = peer(X)
        pre, our_post, our_comb = ours.coefficients(X)
        assert torch.allclose(our_post, post, atol=1e-6)
        assert torch.allclose(our_comb, comb, atol=1e-6)
        assert torch.allclose(collapse(X, pre), collapsed, atol=1e-5)
        assert torch.allclose(head_mix(X, head.hc_fn, head.hc_base, head.hc_scale), head(X), atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 8), d=st.integers(1, 9), T=st.integers(0, 3), seed=st.integers(0, 99))
def test_the_formulas_number_by_number(n, d, T, seed):
    X, out, seam = (
        drawn(T, n, d, seed=seed),
        drawn(T, d, seed=seed + 1),
        random_seam(n, d, seed).requires_grad_(False),
    )
    pre, post, comb = seam.coefficients(X)
    new, z = expand(out, X, post, comb), collapse(X, pre)
    assert new.shape == X.shape
    for t in range(T):
        v = X[t].flatten()
        m = [float(row @ v) / float((v * v).mean() + 1e-20) ** 0.5 for row in seam.fn]
        for c in range(n):
            for found, i, times, more in ((pre, c, 1, 1e-6), (post, n + c, 2, 0)):
                logit = m[i] * float(seam.scale[i // n]) + float(seam.base[i])
                assert float(found[t, c]) == pytest.approx(times / (1 + math.exp(-logit)) + more, rel=1e-9)
        for i in range(d):
            assert float(z[t, i]) == pytest.approx(sum(float(pre[t, c] * X[t, c, i]) for c in range(n)), abs=1e-9)
            for k in range(n):
                mixed = sum(float(comb[t, j, k] * X[t, j, i]) for j in range(n))
                assert float(new[t, k, i]) == pytest.approx(float(post[t, k] * out[t, i]) + mixed, abs=1e-9)


def test_all_products_and_bases_zero():
    n, d = 4, 6
    pre, post, comb = coefficients(drawn(2, n, d), torch.zeros(24, n * d).double(), torch.zeros(24), torch.ones(3))
    assert torch.allclose(pre, torch.tensor(0.500001).double(), atol=1e-12)
    assert (post == 1).all(), "no eps on post"
    assert torch.allclose(comb, torch.tensor(0.24999975).double(), atol=1e-8)


# ---- faults that were made


def test_a_permutation_moves_streams_by_its_first_index():
    """With a zero sublayer old stream j becomes new stream k where comb_jk is 1; its transpose does otherwise."""
    X, silent, post = drawn(3, 4, 8), torch.zeros(3, 8).double(), torch.ones(3, 4).double()
    comb = torch.eye(4).double()[[2, 0, 3, 1]].expand(3, 4, 4)  # 0 to 2, 1 to 0, 2 to 3, 3 to 1
    assert torch.equal(expand(silent, X, post, comb), X[:, [1, 3, 0, 2]])


def test_the_residual_map_is_used_by_the_module():
    seam = random_seam(4, 8)
    X = drawn(3, 4, 8, seed=3)
    _, _, comb = seam.coefficients(X)
    new, _ = seam(X, lambda z: torch.zeros_like(z))
    assert torch.allclose(new, comb.mT @ X)
    assert not torch.allclose(new, X)


def test_maps_are_fp32_whatever_the_streams():
    seam, X = Seam(4, 16), drawn(5, 4, 16, dtype=torch.bfloat16)
    maps = seam.coefficients(X)
    assert all(m.dtype == torch.float32 for m in maps)
    exact = coefficients(X.double(), seam.fn.double(), seam.base.double(), seam.scale.double())
    for m, e in zip(maps, exact, strict=True):
        assert (m - e).norm() <= 1e-5 * e.norm(), "not of rounded products"
    assert expand(X[:, 0], X, *maps[1:]).dtype == collapse(X, maps[0]).dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"fn is torch.bfloat16: expected float32, whatever the streams' dtype"):
        seam.bfloat16().coefficients(X)


def test_an_output_is_rounded_once():
    """bf16 results are the float64 ones rounded, but for what fp32 sums lose."""
    X, out, seam = drawn(64, 4, 32, dtype=torch.bfloat16), drawn(64, 32, seed=1, dtype=torch.bfloat16), Seam(4, 32)
    pre, post, comb = (m.detach() for m in seam.coefficients(X))
    pairs = [
        (collapse(X, pre), collapse(X.double(), pre.double())),
        (expand(out, X, post, comb), expand(out.double(), X.double(), post.double(), comb.double())),
    ]
    for found, exact in pairs:
        assert (found == exact.bfloat16()).double().mean() > 0.999


def test_the_first_and_the_last_seam_of_the_single_pass_form():
    n, d = 4, 8
    seams = [random_seam(n, d, seed=s) for s in range(3)]
    X = drawn(5, 1, d).expand(5, n, d)
    assert torch.equal(collapse(X, one_hot(X, torch.float64)), X[:, 0]), "the first input is the embedding"
    seen, pending, streams, predicted = [], one_hot(X, torch.float64), X, []
    for seam in seams:
        predicted.append(seam.coefficients(streams)[0])
        inputs = collapse(streams, pending)
        streams, pending = seam(streams, lambda z: seen.append(z) or z.tanh(), pending)
        assert torch.equal(seen[-1], inputs)
        assert torch.equal(pending, predicted[-1]), "each hands on the map that it made of its own streams"


def test_without_a_pending_map_a_seam_uses_its_own():
    seam, X, seen = random_seam(3, 8), drawn(2, 3, 8), []
    seam(X, lambda z: seen.append(z) or z)
    assert torch.equal(seen[0], collapse(X, seam.coefficients(X)[0]))


def test_the_pass_is_two_seams_cut_differently():
    n, d = 4, 8
    a, b = random_seam(n, d, 1), random_seam(n, d, 2)
    X, pending = drawn(5, n, d), drawn(5, n, seed=4)
    pre, post, comb = a.coefficients(X)
    out = collapse(X, pending).tanh()
    streams, z, *maps = single_pass(out, X, post, comb, pre, b.fn, b.base, b.scale)
    by_seam, handed = a(X, torch.tanh, pending)
    assert torch.equal(streams, by_seam)
    assert torch.equal(z, collapse(by_seam, handed))
    for m, expected in zip(maps, b.coefficients(by_seam), strict=True):
        assert torch.equal(m, expected)


def test_a_fresh_seam_is_the_plain_residual_and_can_learn():
    n, d = 4, 16
    seam = Seam(n, d)
    X = drawn(7, 1, d, dtype=torch.float32).expand(7, n, d)
    new, pre = seam(X, torch.tanh)
    assert torch.allclose(new, X + torch.tanh(X), atol=0.05)
    assert torch.allclose(pre, one_hot(X), atol=2e-3)
    (new * drawn(7, n, d, seed=2, dtype=torch.float32)).sum().backward()
    for name, p in seam.named_parameters():
        assert p.grad.abs().max() > 1e-7, f"{name} gets no gradient"


def test_zero_streams_have_the_maps_of_the_bases():
    seam = random_seam(4, 8)
    zeros = torch.zeros(2, 4, 8).double()
    maps = seam.coefficients(zeros)
    expected = coefficients(drawn(2, 4, 8), torch.zeros_like(seam.fn), seam.base, seam.scale)
    for m, e in zip(maps, expected, strict=True):
        assert torch.allclose(m, e, rtol=1e-12)


def test_one_stream():
    seam, X = Seam(1, 8), drawn(3, 1, 8, dtype=torch.float32)
    new, pre = seam(X, torch.tanh, one_hot(X))
    assert torch.allclose(new, X + torch.tanh(X), atol=0.02)
    assert pre.shape == (3, 1)


def test_gradients():
    seam = random_seam(3, 4)
    leaves = [drawn(2, 4), drawn(2, 3, 4), drawn(2, 3), drawn(2, 3, 3), drawn(2, 3)]
    leaves += [seam.fn.detach().clone(), seam.base.detach().clone(), seam.scale.detach().clone()]
    assert torch.autograd.gradcheck(lambda *a: single_pass(*a, iterations=3), [x.requires_grad_() for x in leaves])


# ---- bad input


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"streams": (3, 9, 8)},
            ValueError,
            r"streams of shape \[3, 9, 8\]: expected .* n from 1 to 8",
        ),
        ({"streams": (8,)}, ValueError, "expected"),
        ({"fn": (24, 31)}, ValueError, r"fn of shape \[24, 31\]: expected \[24, 32\] for 4 streams"),
        ({"base": (8,)}, ValueError, r"base of shape \[8\]: expected \[24\]"),
        ({"scale": (1,)}, ValueError, r"scale of shape \[1\]: expected \[3\]"),
    ],
)
def test_shapes_that_do_not_fit(change, error, says):
    shapes = {"streams": (3, 4, 8), "fn": (24, 32), "base": (24,), "scale": (3,)} | change
    with pytest.raises(error, match=says):
        coefficients(*(torch.zeros(shape) for shape in shapes.values()))


def test_streams_of_integers_and_other_numbers_of_them():
    with pytest.raises(TypeError, match=r"streams are torch.int64: expected a float type"):
        coefficients(torch.zeros(3, 4, 8, dtype=torch.int64), torch.zeros(24, 32), torch.zeros(24), torch.zeros(3))
    for n in (0, 9):
        with pytest.raises(ValueError, match=f"n = {n}: expected 1 to 8 streams"):
            Seam(n, 8)


def test_the_norm_factor_is_applied_after_the_product():
    X, fn = drawn(3, 2, 4), drawn(8, 8, seed=1)
    m = project(X, fn, norm_eps=0.5)
    v = X.flatten(1)
    assert torch.allclose(m, (v @ fn.T) / (v.square().mean(1, keepdim=True) + 0.5).sqrt(), rtol=1e-12)
