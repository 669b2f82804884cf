"""The indexer against public vectors, plain sorting and enumeration."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_models import drawn

from dsv41_edu.attention.indexer import Indexer, candidate_blocks, hide, index_scores, select
from dsv41_edu.attention.rope import frequencies, rotate, turns

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "indexer.json").read_text())["cases"]
V = load_file(VECTORS / "indexer.safetensors")
NONE = float("-inf")
VALUES = [NONE, -2.0, -0.0, 0.0, 0.5, 1.0, 7.0]


def same_scores(scores, expected, tolerance):
    """Hidden entries alike, and the others within tolerance times 1 + |score|."""
    assert torch.equal(scores.isneginf(), expected.isneginf())
    seen = ~expected.isneginf()
    assert ((scores - expected).abs()[seen] <= tolerance * (1 + expected.abs()[seen])).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['case']}-ratio{c['ratio']}")
def test_public_vectors(case, dtype, tolerance):
    v = {n.split(".")[1]: t for n, t in V.items() if n.startswith(f"case{case['case']}.")}
    q, k, w, again = (v[n].to(dtype) for n in ("q", "k", "w", "q_reindex"))
    seen = ((torch.arange(case["tokens"]) + 1) // case["ratio"]).expand(2, -1)
    scores = hide(index_scores(q, k, w), seen)
    same_scores(scores, v["scores"], tolerance)
    assert torch.equal(select(scores, case["top_k"]).int(), v["topk"])
    candidates = candidate_blocks(scores, seen, case["candidate_blocks"], case["block_size"])
    assert torch.equal(candidates, v["candidates"].bool())
    inside = hide(index_scores(again, k, w), seen).masked_fill(~candidates, NONE)
    same_scores(inside, v["scores_reindex_masked"], tolerance)
    assert torch.equal(select(inside, case["top_k"]).int(), v["topk_reindex"])


def test_number_by_number():
    q, k, w = drawn(1, 3, 2, 4), drawn(1, 5, 4, seed=1), drawn(1, 3, 2, seed=2)
    scores = index_scores(q, k, w)
    for t in range(3):
        for j in range(5):
            products = [max(0.0, float(q[0, t, h] @ k[0, j])) for h in range(2)]
            expected = sum(float(w[0, t, h]) * p for h, p in enumerate(products))
            assert scores[0, t, j].item() == pytest.approx(expected, abs=1e-12)


def test_scores_are_fp32_at_least():
    q, k, w = (drawn(*shape, dtype=torch.bfloat16) for shape in ((1, 3, 2, 64), (1, 9, 64), (1, 3, 2)))
    scores = index_scores(q, k, w)
    assert scores.dtype == torch.float32
    exact = index_scores(q.double(), k.double(), w.double())
    assert (scores - exact).norm() <= 1e-6 * exact.norm()


def test_no_entries_yet():
    scores = hide(index_scores(drawn(2, 1, 3, 4), drawn(2, 0, 4), drawn(2, 1, 3)), torch.zeros(2, 1).long())
    assert scores.shape == (2, 1, 0)
    assert select(scores, 4).shape == (2, 1, 0)


# ---- the choice


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(VALUES), min_size=1, max_size=12), st.integers(1, 14))
def test_the_largest_the_lowest_first_in_rising_order(values, top_k):
    best = sorted((j for j, v in enumerate(values) if v != NONE), key=lambda j: (-values[j], j))[:top_k]
    expected = sorted(best) + [-1] * (min(top_k, len(values)) - len(best))
    assert select(torch.tensor([[values]]), top_k).tolist() == [[expected]]


def test_all_equal_scores_choose_the_oldest_entries():
    scores = hide(torch.zeros(1, 6, 6), torch.arange(1, 7).view(1, -1))
    assert select(scores, 3)[0].tolist() == [[0, -1, -1], [0, 1, -1]] + [[0, 1, 2]] * 4
    assert select(torch.ones(1, 1, 5000), 7).tolist() == [[list(range(7))]]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(VALUES), min_size=1, max_size=13),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 13),
)
def test_candidates_by_enumeration(values, blocks, size, seen):
    seen = min(seen, len(values))
    values = values[:seen] + [NONE] * (len(values) - seen)
    cut = [values[i : i + size] for i in range(0, len(values), size)]
    newest = (seen - 1) // size
    worth = [math.inf if b == newest else max(block) for b, block in enumerate(cut)]
    kept = sorted((b for b, v in enumerate(worth) if v != NONE), key=lambda b: (-worth[b], b))[:blocks]
    expected = [j // size in kept for j in range(len(values))]
    mask = candidate_blocks(torch.tensor([[values]]), torch.tensor([[seen]]), blocks, size)
    assert mask.tolist() == [[expected]]
    assert not seen or expected[seen - 1], "the newest that is seen is always among them"


def test_as_many_candidates_as_there_are():
    """Up to blocks x size entries nothing is filtered."""
    scores, seen = drawn(1, 12, 12), torch.arange(1, 13).view(1, -1)
    assert candidate_blocks(hide(scores, seen), seen, 3, 4)[~hide(scores, seen).isneginf()].all()
    assert not candidate_blocks(hide(scores, seen), seen, 2, 4)[0, -1].all()


# ---- the module


def test_the_modules_equations():
    indexer, turn = (
        Indexer(6, 5, 8, 2, 4, 0.1, makes_keys=True).double(),
        turns(torch.tensor([[3, 9]]), frequencies(2, 100.0), torch.float64),
    )
    for i, p in enumerate(indexer.parameters()):
        p.data = drawn(*p.shape, seed=i)
    x, qr, latents = drawn(1, 2, 6), drawn(1, 2, 5, seed=1), drawn(1, 2, 8, seed=2)
    projected = latents @ indexer.wk.weight.T
    normed = projected * torch.rsqrt(projected.square().mean(-1, keepdim=True) + 0.1) * indexer.k_norm.weight
    torch.testing.assert_close(indexer.keys(latents, turn), rotate(normed, turn))
    q, w = indexer.queries(x, qr, turn)
    for h in range(2):
        torch.testing.assert_close(q[:, :, h], rotate(qr @ indexer.wq_b.weight[4 * h : 4 * h + 4].T, turn))
    torch.testing.assert_close(w, x @ indexer.weights_proj.weight.T / 2 / 2**0.5)
    asks_only = Indexer(6, 5, 8, 2, 4, 0.1, makes_keys=False)
    assert {n for n, _ in asks_only.named_parameters()} == {"wq_b.weight", "weights_proj.weight"}


def test_what_it_reads_is_detached():
    indexer, turn = (
        Indexer(6, 5, 8, 2, 4, 1e-20, makes_keys=True),
        turns(torch.tensor([[0, 1]]), frequencies(4, 100.0), torch.float32),
    )
    inputs = [drawn(1, 2, n, dtype=torch.float32).requires_grad_() for n in (6, 5, 8)]
    q, w = indexer.queries(*inputs[:2], turn)
    index_scores(q, indexer.keys(inputs[2], turn), w).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in indexer.parameters())
    assert all(i.grad is None for i in inputs)
