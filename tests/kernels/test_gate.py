"""The fused gate against the reference in float64, fed the same bits; then what goes wrong in gates.

Ids must be equal, weights within an rms relative error of 1e-5. Outputs start as NaN and as ids out of range,
inside larger buffers whose margins must stay as they were.
"""

import pytest
import torch

from dsv41_edu.moe.gate import affinity, route
from dsv41_edu.moe.placement import rebalance_experts
from kernels.counting import Traffic, count_traffic
from kernels.gate import SCORING, fused_gate
from kernels.launch import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
GUARD = 64


def drawn(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).to(DEVICE)


def case(T, d, E, dtype=torch.bfloat16, seed=0):
    return drawn(T, d, seed=seed, dtype=dtype), (drawn(E, d, seed=seed + 1) / d**0.5).to(dtype)


def expected(x, weight, bias=None, *, scoring_func, temperature=1.0, **options):
    scores = affinity(x.double() @ weight.double().T / temperature, scoring_func)
    return route(scores, bias=None if bias is None else bias.double(), **options)


def check(ours, reference):
    weights, indices = ours
    assert torch.equal(indices, reference[1])
    assert weights.dtype == torch.float32
    error = (weights - reference[0]).norm()
    assert error <= 1e-5 * reference[0].norm()


def poison(monkeypatch):
    """From here on new tensors are full of NaN or of -7, in a margin of the same; returns a check of the margins."""
    buffers, empty = [], torch.empty

    def guarded(shape, *, dtype, device):
        n = torch.Size(shape).numel()
        fill = float("nan") if dtype.is_floating_point else -7
        buffer = empty(n + 2 * GUARD, dtype=dtype, device=device).fill_(fill)
        buffers.append(buffer)
        return buffer[GUARD : GUARD + n].view(shape)

    def intact():
        assert buffers
        for buffer in buffers:
            margins = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
            assert (margins.isnan() if buffer.is_floating_point() else margins == -7).all()

    monkeypatch.setattr(torch, "empty", guarded)
    return intact


@pytest.mark.parametrize("T", [0, 1, 2, 13, 17, 63])
@pytest.mark.parametrize("d", [128, 576])
def test_ids_are_exact_and_weights_close(T, d, monkeypatch):
    intact = poison(monkeypatch)
    x, weight = case(T, d, 27)
    bias = drawn(27, seed=5) / 10
    options = dict(top_k=6, scoring_func="sqrtsoftplus", renormalise=True, scale=1.5)
    check(fused_gate(x, weight, bias, **options), expected(x, weight, bias, **options))
    intact()


@pytest.mark.parametrize(("T", "d", "E"), [(512, 128, 16), (33, 1280, 160), (2, 5120, 384), (5, 7, 3), (4, 64, 1)])
def test_other_sizes(T, d, E, monkeypatch):
    intact = poison(monkeypatch)
    x, weight = case(T, d, E, seed=3)
    options = dict(top_k=min(6, E), scoring_func="sqrtsoftplus", renormalise=True, scale=2.5)
    check(fused_gate(x, weight, **options), expected(x, weight, **options))
    intact()


@pytest.mark.parametrize("scoring_func", SCORING)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_every_affinity(scoring_func, renormalise, top_k):
    x, weight = case(19, 96, 21, torch.float32)
    options = dict(scoring_func=scoring_func, renormalise=renormalise, top_k=top_k, scale=1.5, temperature=0.7)
    bias = drawn(21, seed=5) / 10
    check(fused_gate(x, weight, bias, **options), expected(x, weight, bias, **options))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_mixed_dtypes_are_multiplied_in_fp32(dtypes):
    x, weight = drawn(9, 80, dtype=dtypes[0]), drawn(11, 80, seed=1, dtype=dtypes[1]) / 16
    options = dict(scoring_func="sigmoid", top_k=4)
    check(fused_gate(x, weight.to(dtypes[1]), **options), expected(x, weight.to(dtypes[1]), **options))


@pytest.mark.parametrize("scoring_func", SCORING)
def test_affinities_of_large_and_small_logits(scoring_func):
    """softplus(-30) is 9e-14: log(1 + exp(l)) taken literally is zero there, and overflows above 88."""
    logits = torch.tensor([-80.0, -30.0, -12.0, -4.0, -1e-3, 0.0, 1e-3, 3.0, 19.9, 20.1, 85.0], device=DEVICE)
    if scoring_func != "sqrtsoftplus":  # beyond these some are equal in fp32
        logits = logits[2:8]
    options = dict(scoring_func=scoring_func, top_k=len(logits))
    x = torch.ones(1, 1, device=DEVICE)
    weights, indices = fused_gate(x, logits[:, None].contiguous(), **options)
    reference = expected(x, logits[:, None], **options)
    assert torch.equal(indices, reference[1])
    torch.testing.assert_close(weights.double(), reference[0], rtol=1e-5, atol=0)


# ---- the choice


def test_equal_scores_go_to_the_lowest_ids():
    x = torch.ones(3, 64, device=DEVICE).bfloat16()
    weights, indices = fused_gate(x, x.new_ones(37, 64), top_k=5, scoring_func="sigmoid", renormalise=True)
    assert indices.tolist() == [[0, 1, 2, 3, 4]] * 3
    torch.testing.assert_close(weights, torch.full_like(weights, 0.2))


def test_ties_below_the_best_and_negative_scores():
    bias = torch.tensor([-3.0, -2.0, -3.0, -2.0, -3.0, -2.5], device=DEVICE)
    x = torch.zeros(1, 16, device=DEVICE)
    _, indices = fused_gate(x, x.new_zeros(6, 16), bias, top_k=6, scoring_func="sigmoid")
    assert indices.tolist() == [[1, 3, 5, 0, 2, 4]]
    _, indices = fused_gate(x, x.new_zeros(6, 16), bias + 2, top_k=6, scoring_func="sigmoid")
    assert indices.tolist() == [[1, 3, 5, 0, 2, 4]], "scores of both signs"


def test_a_large_bias_chooses_and_leaves_no_trace_in_the_weight():
    x, weight = case(9, 64, 12)
    bias = torch.zeros(12, device=DEVICE)
    bias[7] = 1e4
    options = dict(top_k=3, scoring_func="sqrtsoftplus")
    weights, indices = fused_gate(x, weight, bias, **options)
    assert (indices[:, 0] == 7).all()
    scores = affinity(x.double() @ weight.double().T, "sqrtsoftplus")
    torch.testing.assert_close(weights.double(), scores.gather(1, indices), rtol=1e-5, atol=0)


def test_each_modality_has_its_own_bias():
    x, weight = case(40, 64, 10)
    bias = torch.zeros(10, device=DEVICE)
    bias[2] = 100.0
    image = torch.arange(40, device=DEVICE) % 3 == 0
    options = dict(top_k=1, scoring_func="sqrtsoftplus")
    _, indices = fused_gate(x, weight, bias, bias.flip(0), image, **options)
    assert torch.equal(indices[:, 0], torch.where(image, 7, 2))
    _, indices = fused_gate(x, weight, bias, bias.flip(0), **options)
    assert (indices == 2).all(), "no mask: all are text"


def test_nan_comes_last_and_no_id_leaves_the_range(monkeypatch):
    intact = poison(monkeypatch)
    x, weight = case(6, 64, 11)
    x[2, 5] = float("nan")
    x[4, 0] = float("inf")
    bias = torch.zeros(11, device=DEVICE)
    bias[0], bias[1], bias[2] = float("nan"), float("-inf"), float("inf")
    weights, indices = fused_gate(x, weight, bias, top_k=11, scoring_func="sqrtsoftplus")
    assert (indices.sort(-1).values == torch.arange(11, device=DEVICE)).all()
    assert (indices[:2, 0] == 2).all()
    assert (indices[:2, -2:] == torch.tensor([1, 0], device=DEVICE)).all(), "-inf is a number, NaN is none"
    assert indices[2].tolist() == [*range(11)]
    assert weights[2].isnan().all()
    assert weights[[0, 1, 3, 5]].isfinite().all(), "a token's NaN is its own"
    intact()


def test_a_placement_maps_experts_to_replicas():
    load = torch.rand(1, 12, generator=torch.Generator().manual_seed(0)) ** 4
    placement = rebalance_experts(load, 16, 4, 2, 4).layer(0)
    x, weight = case(70, 64, 12)
    options = dict(top_k=4, scoring_func="sqrtsoftplus", renormalise=True)
    table, counts = placement.logical_to_physical.to(DEVICE), placement.counts.to(DEVICE)
    assert counts.max() > 1
    logical = fused_gate(x, weight, **options)
    for dtype in (torch.int64, torch.int32):
        weights, slots = fused_gate(x, weight, **options, physical=table.to(dtype), counts=counts.to(dtype))
        assert torch.equal(slots, placement.to_physical(logical[1].cpu()).to(DEVICE))
        assert torch.equal(weights, logical[0])


# ---- the same again


def test_two_runs_are_equal_and_a_row_alone_equals_the_row_in_a_batch():
    x, weight = case(40, 576, 33)
    options = dict(top_k=6, scoring_func="sqrtsoftplus", renormalise=True)
    weights, indices = fused_gate(x, weight, **options)
    again = fused_gate(x, weight, **options)
    assert torch.equal(weights, again[0])
    assert torch.equal(indices, again[1])
    for t in (0, 13, 39):
        alone = fused_gate(x[t : t + 1], weight, **options)
        assert torch.equal(alone[0][0], weights[t])
        assert torch.equal(alone[1][0], indices[t])


def test_rows_may_be_apart_and_columns_may_not():
    x, weight = case(5, 64, 9)
    options = dict(top_k=2, scoring_func="sigmoid")
    apart = torch.cat([x, x * 3], 1)[:, :64], torch.cat([weight, weight], 1)[:, 64:]
    assert torch.equal(fused_gate(*apart, **options)[0], fused_gate(x, weight, **options)[0])
    assert torch.equal(
        fused_gate(x[:1].expand(5, 64), weight, **options)[0][4], fused_gate(x, weight, **options)[0][0]
    )
    with pytest.raises(ValueError, match=r"x has strides \(1, 5\): expected its channels adjacent"):
        fused_gate(x.T.contiguous().T, weight, **options)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
@pytest.mark.parametrize(
    ("T", "d", "E", "k", "dtype"), [(33, 48, 21, 4, torch.bfloat16), (17, 40, 5, 2, torch.float32)]
)
def test_what_is_read_and_written(T, d, E, k, dtype, monkeypatch):
    x, weight = case(T, d, E, dtype)
    x = torch.cat([x, x], 1)[:, :d]  # beyond a row's end lies something that must not be read
    bias, image = torch.zeros(E), torch.zeros(T, dtype=torch.bool)
    outputs = {torch.float32: torch.empty(T, k), torch.int64: torch.empty(T, k, dtype=torch.int64)}
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: outputs[dtype])
    tensors = dict(x=x, weight=weight, bias=bias, image=image, weights=outputs[torch.float32])
    with count_traffic(**tensors, indices=outputs[torch.int64]) as traffic:
        fused_gate(x, weight, bias, bias, image, top_k=k, scoring_func="sqrtsoftplus")
    programs = -(-T // (32 if dtype == torch.bfloat16 else 16))
    width = dtype.itemsize
    assert traffic["x"] == Traffic(T * d, 0, T * d * width, 0)
    assert traffic["weight"] == Traffic(programs * E * d, 0, programs * E * d * width, 0)
    assert traffic["bias"].loaded == 2 * programs * E, "both biases"
    assert traffic["image"] == Traffic(T, 0, T, 0)
    assert traffic["weights"] == Traffic(0, T * k, 0, 4 * T * k)
    assert traffic["indices"] == Traffic(0, T * k, 0, 8 * T * k)


# ---- bad input

X, W = torch.zeros(3, 8, device=DEVICE), torch.zeros(5, 8, device=DEVICE)
TABLE = torch.zeros(5, 2, dtype=torch.int64, device=DEVICE)
VALUES = [
    (dict(weight=W[:, :7]), r"x \[3, 8\], weight \[5, 7\]: expected \[T, d\] and \[E, d\]"),
    (dict(x=X[0]), r"x \[8\], weight"),
    (dict(top_k=6), "top_k = 6: expected 1 to 5"),
    (dict(top_k=0), "top_k = 0: expected 1 to 5"),
    (dict(scoring_func="relu"), "scoring_func = 'relu': expected softmax, sigmoid, sqrtsoftplus"),
    (dict(n_group=5, topk_group=2), "n_group = 5: expected 1; for groups take .*the reference"),
    (dict(bias=W[:4, 0].contiguous()), r"bias of shape \[4\]: expected \[5\], contiguous"),
    (dict(bias=W[:, 0]), r"bias of shape \[5\]: expected \[5\], contiguous"),
    (dict(image_mask=X[:, 0] > 0), "image_mask: expected none without both bias and bias_vl"),
    (dict(physical=TABLE), "physical and counts: expected both or none"),
    (dict(physical=TABLE[:4], counts=TABLE[:, 0].contiguous()), r"physical of shape \[4, 2\]: expected \[5, 2\]"),
    (dict(weight=W.to("meta")), "weight is on meta: expected"),
]
TYPES = [
    (dict(x=X.double()), r"x is torch\.float64: expected torch\.bfloat16 or torch\.float32"),
    (dict(bias=W[:, 0].bfloat16()), r"bias is torch\.bfloat16: expected torch\.float32"),
    (dict(bias=W[:, 0] + 0, bias_vl=W[:, 0] + 0, image_mask=X[:, 0]), r"image_mask is .*: expected torch\.bool"),
    (dict(physical=TABLE.float(), counts=TABLE[:, 0]), r"physical is torch\.float32: expected torch\.int64"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [(c, ValueError, m) for c, m in VALUES] + [(c, TypeError, m) for c, m in TYPES],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        fused_gate(**dict(x=X, weight=W, top_k=2, scoring_func="sigmoid") | change)
