"""The whole law of the output: equal to the target's under both rules, and not under any of the usual faults.

The fault tests are what gives the others their weight: each breaks one thing that the law must notice.
"""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41_edu.dspark.exact import output_law, target_law
from dsv41_edu.dspark.verification import BLOCK, TOKEN_BY_TOKEN, Rule, block_chances, block_verify, leading, residual

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "verification.json").read_text())["cases"]
T = load_file(VECTORS / "verification.safetensors")
RULES = {"token_by_token": TOKEN_BY_TOKEN, "block": BLOCK}
drawn = settings(derandomize=True, deadline=None, max_examples=60)
both = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def fp64(values):
    return torch.tensor(values, dtype=torch.float64)


def close(x, y, atol=1e-12):
    torch.testing.assert_close(x, y, rtol=0, atol=atol)


def laws(V, depth, seed, zeros=0.0, sharpness=1.0):
    """For every prefix a law, some tokens excluded."""
    r, found = torch.Generator().manual_seed(seed), []
    for i in range(depth):
        logits = sharpness * torch.randn((V,) * (i + 1), generator=r, dtype=torch.float64)
        gone = torch.rand(logits.shape, generator=r) < zeros
        gone[..., 0] &= ~gone.all(-1)
        found.append(logits.masked_fill(gone, float("-inf")).softmax(-1))
    return found


seeds = st.integers(0, 2**31)


@drawn
@given(st.integers(1, 4), st.integers(1, 3), seeds, st.sampled_from([0.0, 0.4]))
def test_both_keep_the_law_and_the_block_keeps_more_drafts(V, g, seed, zeros):
    target, draft = laws(V, g + 1, seed, zeros), laws(V, g, seed + 1, zeros)
    single, block = (output_law(rule, target, draft) for rule in RULES.values())
    for law in (single, block):
        close(law.tokens, target_law(target))
        close(law.accepted.sum(), fp64(1.0))
    assert block.expected >= single.expected - 1e-12


@both
def test_a_drafter_that_is_right(rule):
    target = laws(3, 4, 0)
    law = output_law(rule, target, target[:-1])
    close(law.accepted, fp64([0, 0, 0, 1]))
    close(law.tokens, target_law(target))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_vectors(case, name):
    c, key = CASES[case], f"case{case}."
    V, g = c["vocab"], c["drafts"]

    def tree(rows, depth):
        parts = rows[: sum(V**i for i in range(depth))].split([V**i for i in range(depth)])
        return [part.reshape((V,) * (i + 1)) for i, part in enumerate(parts)]

    target, draft = tree(T[key + "prefix_target"], g + 1), tree(T[key + "prefix_draft"], g)
    law = output_law(RULES[name], target, draft)
    close(law.tokens, T[key + f"law_{name}"])
    close(target_law(target), T[key + "law_target"])
    assert abs(law.expected - c[f"expected_accepted_{name}"]) < 1e-12


TARGET = [fp64([0.7, 0.3]), fp64([[0.2, 0.8], [0.6, 0.4]]), fp64([[[0.5, 0.5]] * 2] * 2)]
DRAFT = [fp64([0.5, 0.5]), fp64([[0.6, 0.4], [0.3, 0.7]])]


def test_the_example_of_two_drafts():
    for rule, expected in ((TOKEN_BY_TOKEN, 1.31), (BLOCK, 1.37)):
        law = output_law(rule, TARGET, DRAFT)
        assert abs(law.expected - expected) < 1e-12
        close(law.tokens.sum(-1), fp64([[0.14, 0.56], [0.18, 0.12]]))


def test_the_law_is_that_of_the_sampling_verifier():
    # one draft of each block, tests and next token by a fine grid of uniforms
    N = 60
    grid = (torch.arange(N, dtype=torch.float64) + 0.5) / N
    u = torch.cartesian_prod(grid, grid, grid[::12])
    accepted = torch.zeros(3, dtype=torch.float64)
    for x, y in product(range(2), repeat=2):
        p, q = torch.stack([TARGET[0], TARGET[1][x], TARGET[2][x, y]]), torch.stack([DRAFT[0], DRAFT[1][x]])
        found = block_verify(
            p.expand(len(u), 3, 2), q.expand(len(u), 2, 2), torch.tensor([[x, y]]).expand(len(u), 2), None, u
        )
        accepted += found.accepted.bincount(minlength=3) / len(u) * DRAFT[0][x] * DRAFT[1][x, y]
    close(accepted, output_law(BLOCK, TARGET, DRAFT).accepted, atol=1.5 / N)


# Faults.
def is_lossless(law, target):
    return bool((law.tokens - target_law(target)).abs().max() < 1e-9)


@both
@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_another_law_than_they_are_tested_against(rule, seed):
    target, draft = laws(3, 3, seed), laws(3, 2, seed + 9)
    hotter = [(law.log() / 1.1).softmax(-1) for law in draft]
    rounded = [(law.log().bfloat16().double()).softmax(-1) for law in draft]
    assert is_lossless(output_law(rule, target, hotter), target)
    for other in (hotter, rounded):
        assert not is_lossless(output_law(rule, target, draft, drawn=other), target)


def wrong_residual(p, q, drafts):
    """The block's tests, but the next token from max(p - q, 0)."""
    a, w = block_chances(p, q, drafts)
    return a, torch.ones_like(w)


@pytest.mark.parametrize(
    "rule",
    [Rule(wrong_residual, BLOCK.count), Rule(block_chances, leading), Rule(TOKEN_BY_TOKEN.chances, BLOCK.count)],
    ids=["residual", "first failure stops the block", "last success of single tests"],
)
def test_a_broken_rule_shows(rule):
    target, draft = laws(3, 4, 5), laws(3, 3, 6)
    assert is_lossless(output_law(BLOCK, target, draft), target)
    assert not is_lossless(output_law(rule, target, draft), target)


# Lengths.
@both
def test_how_many_are_verified_may_hang_on_the_drafts_before_but_not_on_the_draft_itself(rule):
    target, draft = laws(3, 4, 1), laws(3, 3, 2)
    before = torch.full((3, 3, 3), 3)
    before[1] = 1  # after a first draft of 1, the second isn't verified, whatever it is
    before[2, 0] = 2
    itself = torch.full((3, 3, 3), 3)
    itself[:, 1] = 1  # a second draft of 1 isn't verified
    assert is_lossless(output_law(rule, target, draft, lengths=before), target)
    assert not is_lossless(output_law(rule, target, draft, lengths=itself), target)


@both
def test_none_verified_is_the_target_itself(rule):
    target, draft = laws(3, 3, 1), laws(3, 2, 2)
    law = output_law(rule, target, draft, lengths=torch.zeros(3, 3, dtype=torch.int64))
    close(law.tokens, target_law(target))
    close(law.accepted, fp64([1, 0, 0]))
    assert law.expected == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"target": TARGET[:2]}, r"target has shapes \[\[2\], \[2, 2\]\]: expected \[\[2\], \[2, 2\], \[2, 2, 2\]\]"),
        ({"draft": DRAFT[:1]}, "target has shapes"),
        ({"draft": [DRAFT[0], DRAFT[0]]}, r"draft has shapes \[\[2\], \[2\]\]: expected \[\[2\], \[2, 2\]\]"),
        ({"drawn": TARGET}, "drawn has shapes"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, r"lengths has shapes \[\[2\]\]: expected \[\[2, 2\]\]"),
    ],
)
def test_refuses(arguments, says):
    with pytest.raises(ValueError, match=says):
        output_law(**{"rule": BLOCK, "target": TARGET, "draft": DRAFT} | arguments)


def test_residual_takes_the_weight():
    assert residual(fp64([[0.5, 0.5]]), fp64([[0.1, 0.3]]), fp64([0.5])).tolist() == [[0.15, 0.0]]
