"""The training loss against loops over positions, against the public vectors, and for where its gradients go."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41_edu.dspark import losses

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "dspark_loss.json").read_text())["cases"]
T = load_file(VECTORS / "dspark_loss.safetensors")
drawn = settings(derandomize=True, deadline=None, max_examples=40)


def problem(*shape, V=5, dtype=torch.float64, seed=0):
    """Arguments of the loss for blocks [*shape], the last of it g; some drafts don't count."""
    r = torch.Generator().manual_seed(seed)
    draft, target = (torch.randn(*shape, V, generator=r, dtype=torch.float64).to(dtype) for _ in range(2))
    confidence = torch.randn(shape, generator=r, dtype=torch.float64).to(dtype)
    tokens, mask = torch.randint(0, V, shape, generator=r), torch.rand(shape, generator=r) < 0.8
    return draft, target, tokens, confidence, mask


def by_loops(draft, target, tokens, confidence, mask, decay):
    """Three weighted means, one draft after the other."""
    sums, weights = [0.0, 0.0, 0.0], 0.0
    flat = zip(
        *(x.flatten(0, -2).tolist() for x in (draft.softmax(-1).flatten(0, -3), target.softmax(-1).flatten(0, -3))),
        tokens.flatten().tolist(), confidence.flatten().tolist(), mask.flatten().tolist(), strict=True,
    )  # fmt: skip
    for number, (q, p, token, c, counts) in enumerate(flat):
        if not counts:
            continue
        w = math.exp(-(number % tokens.shape[-1]) / decay)
        common = sum(min(a, b) for a, b in zip(p, q, strict=True))
        sigmoid = 1 / (1 + math.exp(-c))
        terms = (
            -math.log(q[token]),
            sum(abs(a - b) for a, b in zip(p, q, strict=True)),
            -common * math.log(sigmoid) - (1 - common) * math.log(1 - sigmoid),
        )
        sums, weights = [s + w * t for s, t in zip(sums, terms, strict=True)], weights + w
    return [s / weights for s in sums]


@pytest.mark.parametrize("decay", [None, 4.0, 0.5])
def test_the_loss_by_loops(decay):
    arguments = problem(2, 3, 4)
    found = losses.dspark_loss(*arguments, decay)
    means = by_loops(*arguments, 4 if decay is None else decay)
    assert [x.item() for x in found[1:]] == pytest.approx(means, rel=1e-12)
    assert found.total.item() == pytest.approx(0.1 * means[0] + 0.9 * means[1] + 1.0 * means[2], rel=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c["case"]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors(case, dtype):
    v = {key.partition(".")[2]: t for key, t in T.items() if key.startswith(f"case{case['case']}.")}
    draft, confidence = (v[name].to(dtype).requires_grad_() for name in ("draft_logits", "confidence_logits"))
    found = losses.dspark_loss(
        draft, v["target_logits"].to(dtype), v["target_ids"], confidence, v["eval_mask"], case["position_decay"]
    )
    for value, name in zip(found, ("loss", "ce", "l1", "confidence"), strict=True):
        assert value.dtype == dtype
        torch.testing.assert_close(value.detach().float(), v[name][0], rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(found.total, (draft, confidence))
    for grad, name in zip(grads, ("grad_draft_logits", "grad_confidence"), strict=True):
        torch.testing.assert_close(grad.float(), v[name], rtol=0, atol=1e-6)
    q, p = draft.detach().softmax(-1), v["target_logits"].to(dtype).softmax(-1)
    torch.testing.assert_close(losses.acceptance(p, q).float(), v["accept_rate"], rtol=1e-5, atol=1e-6)


@drawn
@given(st.integers(1, 9), st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 8.0]))
def test_acceptance_is_one_minus_half_the_distance_and_what_rejection_sampling_accepts(V, seed, sharpness):
    r = torch.Generator().manual_seed(seed)
    p, q = (sharpness * torch.randn(2, V, generator=r, dtype=torch.float64)).softmax(-1)
    common = losses.acceptance(p, q)
    assert common.item() == pytest.approx(1 - losses.distance(p, q).item() / 2, abs=1e-12)
    assert common.item() == pytest.approx(float((q * (p / q).clamp(max=1)).sum()), abs=1e-12)


def test_only_the_drafter_learns_and_the_confidence_pulls_no_draft():
    draft, target, tokens, confidence, mask = problem(2, 3)
    for x in (draft, target, confidence):
        x.requires_grad_()
    found = losses.dspark_loss(draft, target, tokens, confidence, mask)
    of_parts = [
        [
            g is not None and bool(g.any())
            for g in torch.autograd.grad(part, (draft, target, confidence), retain_graph=True, allow_unused=True)
        ]
        for part in found
    ]
    assert of_parts == [[True, False, True], [True, False, False], [True, False, False], [False, False, True]]


def test_gradients():
    draft, target, tokens, confidence, mask = problem(2, 3)
    arguments = draft.requires_grad_(), confidence.requires_grad_()
    goal = losses.acceptance(target.softmax(-1), draft.detach().softmax(-1))
    assert torch.autograd.gradcheck(
        lambda d: losses.dspark_loss(d, target, tokens, confidence.detach(), mask)[1:3], arguments[:1]
    )
    (grad,) = torch.autograd.grad(losses.dspark_loss(draft, target, tokens, confidence, mask).total, confidence)
    w = mask * torch.exp(-torch.arange(3.0, dtype=torch.float64) / 3)
    torch.testing.assert_close(grad, w / w.sum() * (confidence.sigmoid() - goal), rtol=1e-12, atol=1e-15)


def test_what_is_masked_counts_for_nothing_whatever_its_token():
    draft, target, tokens, confidence, mask = problem(4, 3)
    found = losses.dspark_loss(draft, target, tokens.where(mask, -100), confidence, mask)
    other = [torch.where(mask.unsqueeze(-1), x, 9 * x.flip(-1)) for x in (draft, target)]
    assert found == losses.dspark_loss(*other, tokens, confidence.where(mask, 7.0), mask.long())
    draft.requires_grad_()
    none = losses.dspark_loss(draft, target, tokens, confidence, mask & False)
    assert [x.item() for x in none] == [0, 0, 0, 0]
    none.total.backward()
    assert not draft.grad.any()


def test_positions_count_less_and_less():
    draft, target, tokens, confidence, _ = problem(1, 3)
    each = []
    for k in range(3):
        mask = torch.zeros(1, 3)
        mask[0, k] = 1
        each.append(losses.dspark_loss(draft, target, tokens, confidence, mask).total.item())
    weights = [1, math.exp(-1 / 3), math.exp(-2 / 3)]
    together = losses.dspark_loss(draft, target, tokens, confidence, torch.ones(1, 3)).total.item()
    mean = sum(w * x for w, x in zip(weights, each, strict=True)) / sum(weights)
    assert together == pytest.approx(mean, rel=1e-12)


def test_a_drafter_that_is_the_target():
    _, target, tokens, confidence, mask = problem(2, 3)
    found = losses.dspark_loss(target, target, tokens, 40 + 0 * confidence, mask)
    assert found.l1.item() == 0
    assert found.confidence.item() == pytest.approx(0, abs=1e-15)


def test_low_precision_is_computed_in_fp32():
    arguments = problem(2, 3, V=50, dtype=torch.bfloat16)
    found = losses.dspark_loss(*arguments)
    wide = losses.dspark_loss(*[x.double() if x.is_floating_point() else x for x in arguments])
    assert {x.dtype for x in found} == {torch.float32}
    torch.testing.assert_close(torch.stack(found).double(), torch.stack(wide), rtol=1e-6, atol=0)


D, G, Y, C, M = problem(2, 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((D[:, :2], G, Y, C, M), r"draft_logits \[2, 2, 5\]"),
        ((D, G[..., :4], Y, C, M), r"target_logits \[2, 3, 4\]"),
        ((D, G, Y[:1], C, M), r"tokens \[1, 3\]"),
        ((D, G, Y, C[..., None], M), r"confidence_logits \[2, 3, 1\]"),
        ((D, G, Y, C, M[0]), r"mask \[3\]"),
        ((D, G, Y, C, M, 0), "decay = 0"),
        ((D, G, Y, C, M, float("nan")), "decay = nan"),
        ((D, G, Y * 0 + 5, C, M), "tokens from .* to 5: expected ids from 0 to 4"),
        ((D, G, Y * 0 - 1, C, M), "tokens from -1 to"),
    ],
)
def test_refuses(arguments, says):
    with pytest.raises(ValueError, match=says):
        losses.dspark_loss(*arguments)
