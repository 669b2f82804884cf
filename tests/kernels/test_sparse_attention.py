"""The fused sparse attention against the reference in float64, fed the same bits; then what goes wrong in gathers.

What is fp32 has an rms relative error of at most 1e-5; what is bf16 is within one ulp of the rounded float64 result
for 99.9% of elements. Outputs start as NaN inside larger buffers whose margins must stay as they were.
"""

import math
import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv41_edu.attention import sparse_attention as reference
from kernels import sparse_attention as module
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.launch import INTERPRETED
from kernels.launches import count_launches
from kernels.sparse_attention import fused_sparse_attention
from tests.kernels.test_experts import SHARED, check
from tests.kernels.test_gate import DEVICE, drawn, poison

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
BF16, FP32 = torch.bfloat16, torch.float32
FLOATS = "q", "window", "entries", "sink"


def names(B, S, K, N, seed=0):
    """Distinct rows below N in any order, a third of them -1; the very first token names nothing."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(B, S, N, generator=generator).argsort(-1)[..., :K]
    order = order.masked_fill(torch.rand(order.shape, generator=generator) < 0.3, -1)
    order[:1, :1] = -1
    return order.to(DEVICE)


def case(B, S, H, D, K=(7, 12), dtype=FP32, seed=0):
    """All arguments: K indices of the window's K + 2 rows and of the K + 30 entries."""
    W, N = K[0] + 2, K[1] + 30
    return {
        "q": drawn(B, S, H, D, seed=seed, dtype=dtype),
        "window": drawn(B, W, D, seed=seed + 1, dtype=dtype),
        "window_indices": names(B, S, K[0], W, seed),
        "entries": drawn(B, N, D, seed=seed + 2, dtype=dtype),
        "entry_indices": names(B, S, K[1], N, seed + 1),
        "sink": drawn(H, seed=seed + 3),
        "scale": D**-0.5,
    }


def oracle(**given):
    exact = {name: x.double() if name in FLOATS and x is not None else x for name, x in given.items()}
    return reference.sparse_attention(**exact)


def checked(given):
    ours = fused_sparse_attention(**given)
    assert ours.dtype == given["q"].dtype
    check(ours, oracle(**given))
    return ours


@pytest.mark.parametrize(
    ("B", "S", "H", "D", "K", "dtype"),
    [
        (2, 1, 4, 32, (3, 1), BF16),
        (3, 2, 5, 64, (17, 3), FP32),
        (1, 13, 5, 32, (7, 12), BF16),
        (1, 17, 4, 64, (1, 12), FP32),
        (1, 2, 64, 512, (20, 30), BF16),
        (1, 2, 17, 512, (3, 15), FP32),
        (1, 2, 16, 200, (32, 32), BF16),
        (1, 2, 3, 1, (4, 4), FP32),
    ],
)
def test_outputs_are_the_oracles(B, S, H, D, K, dtype, monkeypatch):
    intact = poison(monkeypatch)
    ours = checked(case(B, S, H, D, K, dtype))
    assert (ours[0, 0] == 0).all(), "it names nothing"
    assert ours.flatten(0, 1)[1:].any(-1).all()
    intact()


@pytest.mark.parametrize("shape", [(0, 3, 4, 8), (2, 0, 4, 8)])
def test_no_token_at_all(shape):
    assert fused_sparse_attention(**case(*shape)).shape == shape


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_window_alone_and_no_entries_yet(dtype, monkeypatch):
    intact = poison(monkeypatch)
    given = case(1, 3, 4, 32, dtype=dtype)
    alone = checked(given | {"entries": None, "entry_indices": None})
    none = {"entries": given["entries"][:, :0], "entry_indices": given["entry_indices"][..., :0]}
    assert torch.equal(fused_sparse_attention(**given | none), alone)
    assert torch.equal(fused_sparse_attention(**given | {"entry_indices": given["entry_indices"] * 0 - 1}), alone)
    assert not fused_sparse_attention(**given | none | {"window_indices": given["window_indices"][..., :0]}).any()
    intact()


@pytest.mark.parametrize("cut", [30, 12])
def test_public_vectors(cut):
    """The vectors have one array; wherever it is cut into window and entries, the output is the same."""
    v = load_file(Path(__file__).parents[1] / "vectors" / "attention.safetensors", device=DEVICE)
    q, kv, sink, indices = (v[f"case0.{name}"] for name in ("q", "kv", "sink", "indices"))
    window, entries = kv.split([cut, 30 - cut], dim=1)
    chosen = indices.where(indices < cut, -1), (indices - cut).where(indices >= cut, -1)
    pair = (entries, chosen[1]) if cut < 30 else (None, None)
    o = fused_sparse_attention(q, window, chosen[0], *pair, sink, 32**-0.5)
    assert (o - v["case0.out"]).abs().max() < 1e-5
    empty = (indices < 0).all(-1)
    assert empty.any()
    assert (o[empty] == 0).all()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_it_is_the_reference_but_for_the_order_of_sums(dtype):
    given = case(1, 5, 16, 64, dtype=dtype)
    check(fused_sparse_attention(**given), reference.sparse_attention(**given))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_row_that_outweighs_all_others_is_copied(dtype):
    """Bit for bit, in whichever block it stands: scores of 1e4 and -1e4 leave weights of 1 and 0."""
    given = case(1, 1, 8, 32, (40, 40), dtype)
    rows = torch.cat([given["window"], given["entries"]], 1)
    rows[..., 0] = -100.0
    given |= {"q": torch.zeros_like(given["q"]), "scale": 1.0}
    given["q"][..., 0] = 100.0
    given["window_indices"], given["entry_indices"] = (torch.arange(n, device=DEVICE).view(1, 1, n) for n in (40, 70))
    for place in (0, 31, 39, 42, 42 + 69):
        chosen = rows.clone()
        chosen[:, place, 0] = 100.0
        given["window"], given["entries"] = chosen.split([42, 70], 1)
        ours = fused_sparse_attention(**given)
        assert torch.equal(ours, chosen[:, None, place : place + 1].expand_as(ours))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_scores_of_1e4_keep_their_differences(dtype, sign):
    """Channel 0 adds 1e4 to each score or takes it away; the others are quarters and halves, so no product rounds."""
    given = case(1, 3, 6, 64, dtype=dtype) | {"scale": 1.0, "sink": drawn(6, seed=3) + sign * 1e4}
    for name, steps in (("q", 4), ("window", 2), ("entries", 2)):
        given[name] = (given[name] * 1.5).round() / steps
        given[name][..., 0] = 100.0 * (sign if name == "q" else 1)
    ours = checked(given)
    assert (ours.double() - oracle(**given | {"sink": given["sink"] + 2})).norm() > 0.1


def test_the_sink_is_in_the_denominator_alone_and_isnt_scaled():
    """Two rows at score 0 beside sinks ln 6, 1e4 and -1e4: weights of 1/8, 0 and 1/2."""
    given = case(1, 1, 3, 16) | {"scale": 0.125}
    given |= {"q": torch.zeros_like(given["q"]), "sink": torch.tensor([math.log(6), 1e4, -1e4], device=DEVICE)}
    given["window_indices"] = torch.tensor([[[-1, 3, -1, 0]]], device=DEVICE)
    given["entry_indices"] = torch.full((1, 1, 5), -1, device=DEVICE)
    pair = given["window"][0, 3] + given["window"][0, 0]
    expected = torch.stack([pair / 8, pair * 0, pair / 2])
    torch.testing.assert_close(fused_sparse_attention(**given)[0, 0], expected, rtol=1e-6, atol=1e-7)


def test_a_weight_has_more_than_bf16s_bits():
    """1 - 3p with p close to 1/3: what is left of the sum is below the last place of p as bf16."""
    given = case(1, 1, 1, 16, dtype=BF16) | {"scale": 1.0}
    score = torch.tensor(-math.log(3), device=DEVICE).bfloat16()
    given |= {"q": torch.zeros_like(given["q"]), "sink": torch.tensor([0.0], device=DEVICE)}
    given["q"][..., 0] = 1.0
    given["window"][0, :2] = 0.0
    given["window"][0, 0, 0], given["window"][0, 0, 1], given["window"][0, 1, 1] = score, -3.0, 1.0
    given["window_indices"] = torch.tensor([[[0, 1]]], device=DEVICE)
    given |= {"entries": None, "entry_indices": None}
    p = score.double().exp()
    expected = (1 - 3 * p) / (2 + p)
    assert fused_sparse_attention(**given)[0, 0, 0, 1].item() == pytest.approx(expected.item(), rel=2**-7)


def test_indices_in_any_order_and_one_twice():
    given = case(1, 3, 4, 32)
    ours = fused_sparse_attention(**given)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    shuffled = {"entry_indices": given["entry_indices"][..., order].int()}
    other = fused_sparse_attention(**given | shuffled | {"window_indices": given["window_indices"].int()})
    torch.testing.assert_close(other, ours, rtol=1e-5, atol=1e-6)
    checked(given | {"entry_indices": given["entry_indices"].repeat(1, 1, 2)})


def test_nan_in_a_row_is_of_those_who_name_it():
    given = case(1, 6, 4, 32)
    before = fused_sparse_attention(**given)
    row = int(given["entry_indices"][0, 3].max())
    names_it = (given["entry_indices"] == row).any(-1)
    given["entries"][0, row, 5] = float("nan")
    ours = fused_sparse_attention(**given)
    assert 0 < names_it.sum() < 6
    assert ours[names_it].isnan().all()
    assert torch.equal(ours[~names_it], before[~names_it])
    given["entries"][0, row, 5] = 0.0
    given["q"][0, 4, 2, 1] = float("nan")
    assert fused_sparse_attention(**given).isnan().all(-1).nonzero().tolist() == [[0, 4, 2]], "a head's is its own"


def test_an_index_beyond_the_rows_names_nothing(monkeypatch):
    """On a GPU indices aren't waited for, so none may lead out of the rows."""
    given = case(1, 3, 4, 32)
    beyond = {"window_indices": given["window_indices"].clone(), "entry_indices": given["entry_indices"].clone()}
    given["window_indices"][0, 1, 2], beyond["window_indices"][0, 1, 2] = -1, given["window"].shape[1]
    given["entry_indices"][0, 2, 0], beyond["entry_indices"][0, 2, 0] = -1, given["entries"].shape[1]
    given["entry_indices"][0, 1, 1], beyond["entry_indices"][0, 1, 1] = -1, 2**40
    given["entry_indices"][0, 1, 4], beyond["entry_indices"][0, 1, 4] = -1, -7
    monkeypatch.setattr(module, "_check", lambda *_: None)
    assert torch.equal(fused_sparse_attention(**given | beyond), fused_sparse_attention(**given))


# ---- the same again


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_two_runs_are_equal_and_a_token_alone_equals_the_token_in_a_batch(dtype):
    given = case(2, 4, 20, 32, dtype=dtype)
    ours = fused_sparse_attention(**given)
    assert torch.equal(ours, fused_sparse_attention(**given))
    for b, t in ((0, 3), (1, 1)):
        alone = {name: given[name][b : b + 1] for name in ("window", "entries")}
        alone |= {name: given[name][b : b + 1, t : t + 1] for name in ("q", "window_indices", "entry_indices")}
        assert torch.equal(fused_sparse_attention(**given | alone)[0, 0], ours[b, t])


def test_views_of_longer_buffers():
    """Entries of a cache that isn't full, one window for all sequences; of the others other dimensions come first."""
    given = case(2, 3, 5, 32, dtype=BF16)
    given["window"] = given["window"][:1].expand(2, -1, -1)
    ours = fused_sparse_attention(**given | {"window": given["window"].contiguous()})
    buffer = torch.full((2, 100, 40), float("nan"), device=DEVICE, dtype=BF16)
    buffer[:, : given["entries"].shape[1], :32] = given["entries"]
    apart = {"entries": buffer[:, : given["entries"].shape[1], :32]}
    apart["q"] = given["q"].permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    apart["sink"] = torch.stack([given["sink"], given["sink"]], 1)[:, 0]
    apart["entry_indices"] = given["entry_indices"].mT.contiguous().mT
    apart["window_indices"] = torch.cat([given["window_indices"]] * 2, -1)[..., :7]
    assert not any(x.is_contiguous() for x in apart.values())
    assert torch.equal(fused_sparse_attention(**given | apart), ours)


@interpreted
@pytest.mark.parametrize("name", ["window", "entries"])
@pytest.mark.parametrize("far", ["batch", "row"])
def test_addresses_pass_2_to_the_31(name, far):
    """The last sequence, or row, lies 2.4e9 elements on, in memory that is only promised; 32 bits would wrap."""
    memory = mmap.mmap(-1, 10_000_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    B = 3 if far == "batch" else 1
    given = case(B, 2, 4, 8, (1, 1))
    given |= {"window": given["window"][:, :3], "entries": given["entries"][:, :3]}
    given |= {indices: torch.full((B, 2, 1), 2) for indices in ("window_indices", "entry_indices")}
    strides = (1_200_000_000, 8, 1) if far == "batch" else (24, 1_200_000_000, 1)
    placed = torch.frombuffer(memory, dtype=torch.uint8).view(FP32).as_strided((B, 3, 8), strides)
    placed.copy_(given[name])
    assert torch.equal(fused_sparse_attention(**given | {name: placed}), fused_sparse_attention(**given))


@interpreted
@pytest.mark.parametrize(("H", "dtype"), [(5, BF16), (20, FP32)])
def test_what_is_read_and_written(H, dtype, monkeypatch):
    """For each 16 heads the rows named, and no others; one launch, since only tests on a CPU look at the indices."""
    B, S, D, K = 2, 3, 24, (7, 12)
    given = case(B, S, H, D, K, dtype)
    given["entries"] = torch.cat([given["entries"]] * 2, 1)[:, :42]  # what lies beyond must not be read
    scale, programs, width = given.pop("scale"), -(-H // 16), dtype.itemsize
    monkeypatch.setattr(module, "_check", lambda *_: None)
    with count_traffic(**given) as traffic:
        fused_sparse_attention(**given, scale=scale)
    for rows, indices, k in zip(("window", "entries"), ("window_indices", "entry_indices"), K, strict=True):
        loaded = programs * int((given[indices] >= 0).sum()) * D
        assert traffic[rows] == Traffic(loaded, 0, loaded * width, 0)
        assert traffic[indices].loaded == programs * B * S * k
    elements = B * S * H * D
    assert traffic["q"] == Traffic(elements, 0, elements * width, 0)
    assert traffic["sink"].loaded == B * S * H
    assert traffic[f"allocated {str(dtype).removeprefix('torch.')}"] == Traffic(0, elements, 0, elements * width)
    with count_launches() as launched:
        fused_sparse_attention(**given, scale=scale)
    assert launched == {"sparse_attention": 1}


# ---- bad input

GOOD = case(2, 3, 4, 8)
VALUES = [
    (dict(q=GOOD["q"][0]), r"q of shape \[3, 4, 8\]: expected \[B, S, H, D\], H and D from 1"),
    (dict(q=GOOD["q"][:, :, :0]), r"q of shape \[2, 3, 0, 8\]: expected \[B, S, H, D\], H and D from 1"),
    (dict(q=GOOD["q"][..., :0]), r"q of shape \[2, 3, 4, 0\]: expected"),
    (dict(window=GOOD["window"][:1]), r"window of shape \[1, 9, 8\]: expected \[2, \*, 8\]"),
    (dict(window=GOOD["window"][..., :7]), r"window of shape \[2, 9, 7\]: expected \[2, \*, 8\]"),
    (dict(window_indices=GOOD["window_indices"][:, :2]), r"window_indices of shape .*: expected \[2, 3, \*\]"),
    (dict(window_indices=GOOD["window_indices"][..., 0]), r"window_indices of shape \[2, 3\]: expected \[2, 3, \*\]"),
    (dict(entries=GOOD["entries"][0]), r"entries of shape \[42, 8\]: expected \[2, \*, 8\]"),
    (dict(entry_indices=GOOD["entry_indices"][:1]), r"entry_indices of shape \[1, 3, 12\]: expected \[2, 3, \*\]"),
    (dict(entries=None), "entries and entry_indices: expected both or none"),
    (dict(entry_indices=None), "entries and entry_indices: expected both or none"),
    (dict(sink=GOOD["sink"][:3]), r"sink of shape \[3\]: expected \[4\]"),
    (dict(q=GOOD["q"].mT.contiguous().mT), r"q has strides \(96, 32, 1, 4\): expected its channels adjacent"),
    (dict(window=GOOD["window"].mT.contiguous().mT), r"window has strides .*: expected its channels adjacent"),
    (dict(entries=GOOD["entries"].mT.contiguous().mT), r"entries has strides .*: expected its channels adjacent"),
    (dict(sink=GOOD["sink"].to("meta")), "sink is on meta: expected .*, where q is"),
]
if INTERPRETED:
    VALUES += [
        (dict(window_indices=GOOD["window_indices"] * 0 + 9), "window_indices up to 9: expected below 9, or neg"),
        (dict(entry_indices=GOOD["entry_indices"] * 0 + 42), "entry_indices up to 42: expected below 42"),
    ]
TYPES = [
    (dict(q=GOOD["q"].double()), r"q is torch\.float64: expected torch\.bfloat16 or torch\.float32"),
    (dict(window=GOOD["window"].bfloat16()), r"window is torch\.bfloat16: expected torch\.float32"),
    (dict(entries=GOOD["entries"].bfloat16()), r"entries is torch\.bfloat16: expected torch\.float32"),
    (dict(window_indices=GOOD["window_indices"].float()), r"window_indices is .*: expected torch\.int64 or"),
    (dict(entry_indices=GOOD["entry_indices"].int()), r"entry_indices is torch\.int32: expected torch\.int64"),
    (dict(sink=GOOD["sink"].double()), r"sink is torch\.float64: expected torch\.float32 or torch\.bfloat16"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [(c, ValueError, m) for c, m in VALUES] + [(c, TypeError, m) for c, m in TYPES],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        fused_sparse_attention(**GOOD | change)


def test_it_fits_every_target_at_the_official_size():
    reports = compile_all(["kernels.sparse_attention"])
    assert {report.target for report in reports} == {*TARGETS}
    for report in reports:
        assert report.spilled == report.stack_bytes == 0, report
        assert report.shared_bytes <= SHARED[report.target], report
