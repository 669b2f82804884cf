"""Both forms of attention against public vectors, number by number, and each other."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_models import drawn

from dsv41_edu.attention.sparse_attention import banded_attention, gather, named, softmax_with_sink, sparse_attention

V = load_file(Path(__file__).parents[1] / "vectors" / "attention.safetensors")


def drawn_indices(B, S, K, N, seed=0):
    """Distinct ids below N in any order, some of them -1; the first token names nothing."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(B, S, N, generator=generator).argsort(-1)[..., :K]
    named_ids = order.masked_fill(torch.rand(order.shape, generator=generator) < 0.3, -1)
    named_ids[:, 0] = -1
    return named_ids


def drawn_case(B=2, S=3, H=3, D=4, N=6, W=5, seed=0, dtype=torch.float64):
    """The arguments of `sparse_attention`: any choice of a window's W latents and of N entries."""
    q, window, entries = (
        drawn(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate([(B, S, H, D), (B, W, D), (B, N, D)])
    )
    ids, entry_ids = drawn_indices(B, S, 3, W, seed), drawn_indices(B, S, 5, N, seed + 1)
    return [q, window, ids, entries, entry_ids, drawn(H, seed=seed + 3), D**-0.5]


def band(B, S, W):
    """What each of a sequence's first tokens sees of the chunk's own latents, int64 [B, S, W]."""
    p = torch.arange(S).unsqueeze(1) - torch.arange(W - 1, -1, -1)
    return p.clamp(min=-1).expand(B, S, W)


@pytest.mark.parametrize("cut", [30, 12])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_public_vectors(cut, dtype, tolerance):
    """The vectors have one array; wherever it is cut into window and entries, the output is the same."""
    q, kv, sink, indices = (V[f"case0.{n}"] for n in ("q", "kv", "sink", "indices"))
    indices = indices.long()
    window, entries = kv.to(dtype).split([cut, 30 - cut], dim=1)
    chosen = indices.where(indices < cut, -1), (indices - cut).where(indices >= cut, -1)
    pair = (entries, chosen[1]) if cut < 30 else (None, None)
    o = sparse_attention(q.to(dtype), window, chosen[0], *pair, sink.to(dtype), 32**-0.5)
    assert (o - V["case0.out"]).abs().max() < tolerance
    empty = (indices < 0).all(-1)
    assert empty.any()
    assert (o[empty] == 0).all()


def expected_output(q, kv, ids, sink, scale):
    """o and p [N] of one head and token: q [D], kv [N, D], the ids that it names."""
    weights = {i: math.exp(scale * float(q @ kv[i])) for i in ids}
    total = sum(weights.values()) + math.exp(sink)
    o = [sum(w * float(kv[i, c]) for i, w in weights.items()) / total for c in range(len(q))]
    return o, [weights.get(i, 0) / total for i in range(len(kv))]


def test_any_choice_number_by_number():
    q, window, window_ids, entries, entry_ids, sink, scale = arguments = drawn_case()
    o = sparse_attention(*arguments)
    for b in range(2):
        for t in range(3):
            ids = [i for i in window_ids[b, t].tolist() if i >= 0]
            ids += [5 + i for i in entry_ids[b, t].tolist() if i >= 0]
            for h in range(3):
                kv = torch.cat([window[b], entries[b]])
                expected, _ = expected_output(q[b, t, h], kv, ids, sink[h], scale)
                assert o[b, t, h].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("W", [1, 3, 4, 9])
def test_a_band_number_by_number(W):
    S, N = 8, 6
    q, latents, _, entries, entry_ids, sink, scale = drawn_case(S=S, N=N, W=S)
    o, p = banded_attention(q, latents, W, entries, entry_ids, sink, scale)
    assert p.shape == (2, S, 3, N)
    for b in range(2):
        for t in range(S):
            ids = list(range(max(0, t - W + 1), t + 1)) + [S + i for i in entry_ids[b, t].tolist() if i >= 0]
            for h in range(3):
                kv = torch.cat([latents[b], entries[b]])
                expected, weights = expected_output(q[b, t, h], kv, ids, sink[h], scale)
                assert o[b, t, h].tolist() == pytest.approx(expected, abs=1e-12)
                assert p[b, t, h].tolist() == pytest.approx(weights[S:])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 9), st.integers(1, 3), st.integers(1, 10), st.integers(0, 7), st.integers(0, 99)
)
def test_the_two_forms_agree_in_values_and_gradients(B, S, H, W, N, seed):
    q, latents, _, entries, entry_ids, sink, scale = drawn_case(B, S, H, 4, N, S, seed)
    leaves = [x.requires_grad_() for x in ((q, latents, entries, sink) if N else (q, latents, sink))]
    pair = (entries, entry_ids) if N else (None, None)
    sparse = sparse_attention(q, latents, band(B, S, W), *pair, sink, scale)
    banded, p = banded_attention(q, latents, W, *pair, sink, scale)
    assert (p is None) == (N == 0)
    torch.testing.assert_close(sparse, banded)
    gradients = [torch.autograd.grad(o, leaves, drawn(*o.shape, seed=7)) for o in (sparse, banded)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_sink_is_in_the_denominator_alone_and_isnt_scaled():
    scores, sink = torch.tensor([[[[0.0, 0.0, -math.inf]]]]), torch.tensor([math.log(6)])
    assert softmax_with_sink(scores, sink).flatten().tolist() == pytest.approx([1 / 8, 1 / 8, 0])
    nothing = torch.full((1, 1, 1, 3), -math.inf)
    assert softmax_with_sink(nothing, sink).flatten().tolist() == [0, 0, 0]


def test_names_that_are_none():
    assert named(torch.tensor([[[2, -1, 0], [-1, -1, -1]]]), 3).tolist() == [[[True, False, True], [False] * 3]]
    entries = drawn(2, 3, 4)
    rows = gather(entries, torch.tensor([[[2, -1]], [[1, 0]]]))
    assert torch.equal(rows, torch.stack([entries[0, [2, 0]], entries[1, [1, 0]]]).unsqueeze(1))


def test_no_entries_yet():
    q, window, _, _, _, sink, scale = drawn_case(S=1, W=1)
    none = torch.empty(2, 0, 4).double(), torch.empty(2, 1, 0).long()
    expected = sparse_attention(q, window, band(2, 1, 1), None, None, sink, scale)
    torch.testing.assert_close(sparse_attention(q, window, band(2, 1, 1), *none, sink, scale), expected)
    o, p = banded_attention(q, window, 4, *none, sink, scale)
    torch.testing.assert_close(o, expected)
    assert p.shape == (2, 1, 3, 0)


def both(q, latents, _, *rest):
    """The outputs of either form, the window being a band of 3."""
    B, S = q.shape[:2]
    return sparse_attention(q, latents, band(B, S, 3), *rest), banded_attention(q, latents, 3, *rest)[0]


def test_huge_scores_stay_finite():
    q, *rest = drawn_case(S=7, W=7, dtype=torch.float32)
    for o in both(q * 1e4, *rest):
        assert o.isfinite().all()


def test_bf16_is_rounded_once_at_the_end():
    arguments = drawn_case(S=7, W=7, D=32, dtype=torch.bfloat16)
    exact = both(*(a.double() if getattr(a, "dtype", 0) == torch.bfloat16 else a for a in arguments))
    for o, expected in zip(both(*arguments), exact, strict=True):
        assert o.dtype == torch.bfloat16
        assert ((o - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
