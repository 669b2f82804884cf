"""The fused index scores against the reference in float64, fed the same bits; then what goes wrong in masks.

Scores that are seen have an rms relative error of at most 1e-5, all others are -inf. Outputs start as NaN inside
larger buffers whose margins must stay as they were.
"""

import json
import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv41_edu.attention import indexer as reference
from dsv41_edu.attention.indexer import hide, select
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.index_scores import fused_index_scores
from kernels.launch import INTERPRETED
from kernels.launches import count_launches
from tests.kernels.test_experts import SHARED
from tests.kernels.test_gate import DEVICE, drawn, poison

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
BF16, FP32 = torch.bfloat16, torch.float32
VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "indexer.json").read_text())["cases"]
NONE = float("-inf")


def case(B, S, H, D, N, dtype=FP32, seed=0):
    """All arguments; the first token of each sequence sees nothing, the last one every entry."""
    seen = torch.randint(0, N + 1, (B, S), generator=torch.Generator().manual_seed(seed))
    seen[:, 0], seen[:, -1:] = 0, N
    return {
        "q": drawn(B, S, H, D, seed=seed, dtype=dtype),
        "k": drawn(B, N, D, seed=seed + 1, dtype=dtype),
        "w": drawn(B, S, H, seed=seed + 2, dtype=dtype),
        "seen": seen.to(DEVICE),
    }


def oracle(q, k, w, seen):
    return hide(reference.index_scores(q.double(), k.double(), w.double()), seen)


def checked(given):
    ours, expected = fused_index_scores(**given), oracle(**given)
    assert ours.dtype == FP32
    assert ours.shape == expected.shape
    assert torch.equal(ours.isneginf(), expected.isneginf())
    shown = ~expected.isneginf()
    assert (ours - expected)[shown].norm() <= 1e-5 * expected[shown].norm()
    return ours


@pytest.mark.parametrize(
    ("B", "S", "H", "D", "N", "dtype"),
    [
        (3, 1, 4, 32, 1, BF16),
        (1, 2, 5, 64, 129, FP32),
        (2, 13, 5, 32, 130, BF16),
        (1, 17, 4, 32, 40, FP32),
        (1, 17, 4, 64, 300, BF16),
        (2, 1, 64, 128, 257, BF16),
        (1, 2, 64, 512, 33, FP32),
        (1, 2, 32, 200, 100, BF16),
        (1, 3, 1, 1, 7, FP32),
    ],
)
def test_scores_are_the_oracles(B, S, H, D, N, dtype, monkeypatch):
    intact = poison(monkeypatch)
    checked(case(B, S, H, D, N, dtype))
    intact()


@pytest.mark.parametrize("shape", [(0, 3, 4, 8, 5), (2, 3, 4, 8, 0)])
def test_no_token_and_no_entry(shape):
    B, S, _, _, N = shape
    assert fused_index_scores(**case(*shape)).shape == (B, S, N)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['case']}-ratio{c['ratio']}")
def test_public_vectors_and_the_choice_from_them(case):
    stored = load_file(VECTORS / "indexer.safetensors", device=DEVICE)
    v = {name.split(".")[1]: t for name, t in stored.items() if name.startswith(f"case{case['case']}.")}
    seen = ((torch.arange(case["tokens"], device=DEVICE) + 1) // case["ratio"]).expand(2, -1)
    scores = fused_index_scores(v["q"], v["k"], v["w"], seen)
    assert torch.equal(scores.isneginf(), v["scores"].isneginf())
    shown = ~v["scores"].isneginf()
    assert ((scores - v["scores"]).abs()[shown] <= 1e-4 * (1 + v["scores"].abs()[shown])).all()
    assert torch.equal(select(scores, case["top_k"]).int(), v["topk"])
    again = fused_index_scores(v["q_reindex"], v["k"], v["w"], seen).masked_fill(~v["candidates"].bool(), NONE)
    assert torch.equal(select(again, case["top_k"]).int(), v["topk_reindex"])


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_it_is_the_unfused_chain(dtype):
    """To the bit where all sums are exact, of small whole numbers; else but for their order."""
    given = case(1, 5, 4, 64, 70, dtype)
    chain = hide(reference.index_scores(given["q"], given["k"], given["w"]), given["seen"])
    torch.testing.assert_close(fused_index_scores(**given), chain, rtol=1e-5, atol=1e-4)
    given |= {name: (given[name] * 2).round() for name in ("q", "k", "w")}
    chain = hide(reference.index_scores(given["q"], given["k"], given["w"]), given["seen"])
    assert torch.equal(fused_index_scores(**given), chain)


def test_each_product_is_cut_at_zero_before_its_weight():
    """Heads with products 2 and -3, and weights of either sign: what is cut adds nothing, whatever its weight."""
    q = torch.tensor([[[[2.0], [-3.0]]]], device=DEVICE).expand(1, 4, 2, 1)
    w = torch.tensor([[[5.0, 7.0], [5.0, -7.0], [-5.0, 7.0], [0.0, 7.0]]], device=DEVICE)
    k = torch.tensor([[[1.0], [-1.0], [0.0]]], device=DEVICE)
    scores = fused_index_scores(q, k, w, torch.full((1, 4), 3, device=DEVICE))
    assert scores.tolist() == [[[10, 21, 0], [10, -21, 0], [-10, 21, 0], [0, 21, 0]]]


def test_equal_keys_have_equal_scores_wherever_they_stand():
    """Bit for bit, over blocks too, so that a stable choice takes the lowest."""
    for dtype in (BF16, FP32):
        given = case(1, 3, 5, 64, 5, dtype)
        given |= {"k": given["k"].repeat(1, 30, 1), "seen": torch.full((1, 3), 150, device=DEVICE)}
        scores = fused_index_scores(**given)
        assert torch.equal(scores, scores[..., :5].repeat(1, 1, 30))
        assert select(scores, 4)[0, 0].diff().tolist() == [5, 5, 5]


@pytest.mark.parametrize("seen", [-1, 0, 1, 127, 128, 129, 200, 2**40])
def test_what_is_hidden_to_the_entry(seen):
    given = case(1, 1, 4, 16, 200, BF16) | {"seen": torch.full((1, 1), seen, device=DEVICE)}
    assert checked(given).isfinite().sum() == min(max(seen, 0), 200)


def test_huge_scores_are_finite_and_nan_is_its_own():
    given = case(1, 4, 5, 32, 60)
    big = given | {"q": given["q"] * 1e4, "k": given["k"] * 1e4}
    assert checked(big)[:, -1].isfinite().all()
    given["seen"][:] = torch.tensor([0, 30, 31, 60])
    before = fused_index_scores(**given)
    given["k"][0, 30, 3] = float("nan")
    ours = fused_index_scores(**given)
    assert ours.isnan().nonzero().tolist() == [[0, 2, 30], [0, 3, 30]], "not where it's hidden"
    assert torch.equal(ours[~ours.isnan()], before[~ours.isnan()])
    given["q"][0, 1, 4, 0] = float("nan")
    assert fused_index_scores(**given)[0, 1].isnan().sum() == 30


# ---- the same again


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_two_runs_are_equal_and_a_token_alone_equals_the_token_in_a_batch(dtype):
    given = case(2, 18, 5, 32, 140, dtype)
    scores = fused_index_scores(**given)
    assert torch.equal(scores, fused_index_scores(**given))
    for b, t in ((0, 17), (1, 5)):
        alone = {name: given[name][b : b + 1, t : t + 1] for name in ("q", "w", "seen")}
        assert torch.equal(fused_index_scores(**alone, k=given["k"][b : b + 1])[0, 0], scores[b, t])


def test_views_of_longer_buffers():
    """Keys of a cache that isn't full; of the others other dimensions come first."""
    given = case(2, 3, 5, 32, 40, BF16)
    buffer = torch.full((2, 100, 48), float("nan"), device=DEVICE, dtype=BF16)
    buffer[:, :40, :32] = given["k"]
    apart = {"k": buffer[:, :40, :32], "q": given["q"].permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)}
    apart |= {name: given[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("w", "seen")}
    apart["seen"] = apart["seen"].int()
    assert not any(x.is_contiguous() for x in apart.values())
    assert torch.equal(fused_index_scores(**apart), fused_index_scores(**given))


@interpreted
@pytest.mark.parametrize(("name", "far"), [("k", "batch"), ("k", "row"), ("q", "batch"), ("q", "row"), ("q", "head")])
def test_addresses_pass_2_to_the_31(name, far):
    """The last sequence, row or head lies 2.4e9 elements on, in memory that is only promised; 32 bits would wrap."""
    memory = mmap.mmap(-1, 10_000_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    given = case(3 if far == "batch" else 1, 3, 3, 8, 3)
    strides = {
        "batch": (1_200_000_000, 24, 8, 1),
        "row": (24, 1_200_000_000, 8, 1),
        "head": (24, 8, 1_200_000_000, 1),
    }
    strides = strides[far] if name == "q" else (*strides[far][:2], 1)
    placed = torch.frombuffer(memory, dtype=torch.uint8).view(FP32).as_strided(given[name].shape, strides)
    placed.copy_(given[name])
    assert torch.equal(fused_index_scores(**given | {name: placed}), fused_index_scores(**given))


@interpreted
@pytest.mark.parametrize(("H", "block", "dtype"), [(4, 128, BF16), (5, 32, FP32)])
def test_what_is_read_and_written(H, block, dtype):
    """Keys once for 16 tokens, and none that all of these don't see; q and w where at least one sees something."""
    B, S, D, N, width = 2, 20, 24, 258, dtype.itemsize
    given = case(B, S, H, D, N, dtype)
    given["k"] = torch.cat([given["k"]] * 2, 1)[:, :N]  # what lies beyond must not be read, seen or not
    given["seen"] = torch.stack([torch.arange(S) * 3, 241 + torch.arange(S)])
    with count_traffic(**given) as traffic, count_launches() as launched:
        fused_index_scores(**given)
    tiles = [(45, 16), (57, 4), (256, 16), (258, 4)]  # what is seen at most, and by how many tokens at once
    keys = sum(most for most, _ in tiles) * D
    assert traffic["k"] == Traffic(keys, 0, keys * width, 0)
    visits = sum(-(-most // block) * tokens for most, tokens in tiles)
    assert traffic["q"] == Traffic(visits * H * D, 0, visits * H * D * width, 0)
    assert traffic["w"].loaded == visits * H
    assert traffic["seen"].loaded == B * S * -(-N // block) + visits
    assert traffic["allocated float32"] == Traffic(0, B * S * N, 0, 4 * B * S * N)
    assert launched == {"index_scores": 1}


# ---- bad input

GOOD = case(2, 3, 4, 8, 5)
VALUES = [
    (dict(q=GOOD["q"][0]), r"q of shape \[3, 4, 8\]: expected \[B, S, H, D\], H and D from 1"),
    (dict(q=GOOD["q"][:, :, :0]), r"q of shape \[2, 3, 0, 8\]: expected \[B, S, H, D\], H and D from 1"),
    (dict(q=GOOD["q"][..., :0]), r"q of shape \[2, 3, 4, 0\]: expected"),
    (dict(k=GOOD["k"][0]), r"k of shape \[5, 8\]: expected \[B, N, D\]"),
    (dict(k=GOOD["k"][:1]), r"k of shape \[1, 5, 8\]: expected \[2, 5, 8\]"),
    (dict(k=GOOD["k"][..., :7]), r"k of shape \[2, 5, 7\]: expected \[2, 5, 8\]"),
    (dict(w=GOOD["w"][:, :2]), r"w of shape \[2, 2, 4\]: expected \[2, 3, 4\]"),
    (dict(seen=GOOD["seen"][:, :, None]), r"seen of shape \[2, 3, 1\]: expected \[2, 3\]"),
    (dict(q=GOOD["q"].mT.contiguous().mT), r"q has strides \(96, 32, 1, 4\): expected its channels adjacent"),
    (dict(k=GOOD["k"].mT.contiguous().mT), r"k has strides \(40, 1, 5\): expected its channels adjacent"),
    (dict(seen=GOOD["seen"].to("meta")), "seen is on meta: expected .*, where q is"),
]
TYPES = [
    (dict(q=GOOD["q"].double()), r"q is torch\.float64: expected torch\.bfloat16 or torch\.float32"),
    (dict(k=GOOD["k"].bfloat16()), r"k is torch\.bfloat16: expected torch\.float32"),
    (dict(w=GOOD["w"].half()), r"w is torch\.float16: expected torch\.bfloat16 or torch\.float32"),
    (dict(seen=GOOD["seen"].float()), r"seen is torch\.float32: expected torch\.int64 or torch\.int32"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [(c, ValueError, m) for c, m in VALUES] + [(c, TypeError, m) for c, m in TYPES],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        fused_index_scores(**GOOD | change)


def test_it_fits_every_target_at_the_official_size():
    reports = compile_all(["kernels.index_scores"])
    assert {report.target for report in reports} == {*TARGETS}
    for report in reports:
        assert report.spilled == report.stack_bytes == 0, report
        assert report.shared_bytes <= SHARED[report.target], report
