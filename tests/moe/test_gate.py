"""Five generations of routers against public vectors, enumeration, and the faults that were really made."""

import json
import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41_edu.config import preset
from dsv41_edu.moe import gate as gate_module
from dsv41_edu.moe.experts import Experts, MoE
from dsv41_edu.moe.gate import Gate, affinity, route, top_k_by_keys, top_k_lowest, weigh
from dsv41_edu.moe.placement import rebalance_experts

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "routers.json").read_text())["cases"]
V = load_file(VECTORS / "routers.safetensors")
MINI = preset("mini")
PRESET = {"DeepSeekMoE": "deepseekmoe_16b", "V2": "v2", "V3": "v3", "V4": "v4_flash", "V4 hash layer": "v4_flash"}


def drawn(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gate_of(case) -> Gate:
    """A gate by the generation's own config, with the vector's sizes and weights."""
    n = f"case{case['case']}."
    sizes = {
        "hidden_size": V[n + "x"].shape[1],
        "n_routed_experts": case["experts"],
        "num_experts_per_tok": case["top_k"],
        "routed_scaling_factor": case["scale"],
    }
    if case["kind"] == "V4.1":
        config = preset("v41_flash").replace(**sizes | {"hidden_size": 64})
    else:
        groups = {"n_group": case.get("groups"), "topk_group": case.get("groups_kept")}
        config = preset(PRESET[case["kind"]]).replace(**sizes | groups | {"hidden_size": 64})
    gate = Gate(config, layer=0 if "hash" in case["kind"] else 5)
    gate.weight = torch.nn.Parameter(V[n + "weight"].double())
    for name in ("bias", "bias_vl"):
        if n + name in V:
            setattr(gate, name, V[n + name].double())
    if n + "table" in V:
        gate.tid2eid = V[n + "table"].long()
    return gate


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['case']}-{c['kind']}")
def test_public_vectors(case, dtype):
    n = f"case{case['case']}."
    gate = gate_of(case).to(dtype)
    mask, ids = V.get(n + "image_mask"), V.get(n + "token_ids")
    weights, indices = gate(V[n + "x"].to(dtype), None if mask is None else mask.bool(), ids)
    ascending = indices.argsort(-1)
    assert torch.equal(indices.gather(1, ascending), V[n + "indices"].long())
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert (weights.gather(1, ascending) - V[n + "weights"]).abs().max() < tolerance


def test_the_fact_sheets_example():
    s = affinity(torch.tensor([2.0, 1.0, 0.0, -1.0]), "sqrtsoftplus")
    assert s.tolist() == pytest.approx([1.458399, 1.145976, 0.832555, 0.559698], abs=1e-6)
    weights, indices = route(s, 2, renormalise=True, scale=1.5)
    assert indices.tolist() == [0, 1]
    assert weights.tolist() == pytest.approx([0.839971, 0.660029], abs=1e-6)


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_affinities_are_finite_and_rising(scoring_func):
    logits = torch.tensor([-1e4, -200.0, -20.0, 0.0, 20.0, 200.0, 1e4])
    s = affinity(logits, scoring_func)
    assert s.isfinite().all()
    assert (s.diff() >= 0).all()
    wide = affinity(logits.double(), scoring_func)
    torch.testing.assert_close(s.double(), wide, rtol=1e-6, atol=1e-12)
    if scoring_func == "sqrtsoftplus":
        assert wide[3].item() == pytest.approx(math.sqrt(math.log(2)))
        assert wide[6].item() == pytest.approx(100.0)
    with pytest.raises(ValueError, match="scoring_func = 'relu'"):
        affinity(logits, "relu")


# ---- ties: the lowest id wins


PATHS = {"few": ("FEW", 10**9), "many": ("FEW", -1)}  # of fp32 on a CPU: torch.topk if it meets no tie, or a sort
VALUES = st.lists(
    st.sampled_from([-math.inf, -1.0, -1e-40, -0.0, 0.0, 1e-40, 0.5, 1.0, 3e38, math.inf]), min_size=1, max_size=12
)


@pytest.mark.parametrize("path", PATHS)
@settings(derandomize=True, deadline=None, max_examples=200)
@given(VALUES, st.data())
def test_top_k_is_the_sorted_list(path, values, data):
    k = data.draw(st.integers(1, len(values)))
    rows = [values, data.draw(st.permutations(values))]
    expected = [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate_module, *PATHS[path])
        for dtype in (torch.float32, torch.float64):
            assert top_k_lowest(torch.tensor(rows, dtype=dtype), k).tolist() == expected


@pytest.mark.parametrize("T", [3, 300])  # on both sides of FEW
@pytest.mark.parametrize("k", [1, 6])
def test_ties_among_a_few_and_among_many_tokens(T, k):
    scores = drawn(T, 64).float()
    for values in (scores, (scores * 50).round()):  # rows with and without ties
        indices = top_k_lowest(values, k)
        assert torch.equal(indices, values.sort(descending=True, stable=True).indices[:, :k])
        assert indices.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_one_nan_is_refused_wherever_it_stands(dtype, nan):
    for T in (1, 2, 300):
        for row, e in ((0, 0), (T - 1, 63), (T // 2, 31)):
            scores = drawn(T, 64).to(dtype)
            scores[T - 1 - row, :] = 0.5  # and a row of ties beside it
            scores[row, e] = nan
            for k in (1, 6, 64):
                with pytest.raises(ValueError, match="scores: expected numbers, got NaN"):
                    top_k_lowest(scores, k)
    with pytest.raises(ValueError, match="scores: expected numbers, got NaN"):
        top_k_lowest(torch.tensor([[0.5], [nan]], dtype=dtype), 1)


@pytest.mark.parametrize("E", [6, 64, 384])
def test_all_equal_scores_choose_the_first_experts(E):
    _, indices = route(torch.full((3, E), 0.5), 6, bias=torch.zeros(E), renormalise=True)
    assert indices.tolist() == [list(range(6))] * 3
    _, indices = route(torch.full((1, E), 0.5), 2, n_group=2, topk_group=1, group_score="top2")
    assert indices.tolist() == [[0, 1]]


# ---- the bias selects only


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(2, 16), st.integers(0, 2**31))
def test_a_large_bias_selects_and_leaves_the_weight_alone(E, seed):
    s = drawn(E, seed=seed)
    bias = torch.zeros(E, dtype=torch.float64)
    bias[E - 1] = 100.0
    weights, indices = route(s, 2, bias=bias, renormalise=True, scale=1.5)
    assert indices[0] == E - 1
    assert weights.sum().item() == pytest.approx(1.5)
    chosen = s[indices]
    torch.testing.assert_close(weights, 1.5 * chosen / (chosen.sum() + 1e-20))


def test_no_gradient_reaches_the_bias():
    gate = Gate(MINI)
    gate.bias.requires_grad_()
    weights, _ = gate(torch.randn(5, MINI.hidden_size))
    weights.square().sum().backward()
    assert gate.bias.grad is None
    assert gate.weight.grad.abs().sum() > 0
    assert not [n for n, _ in Gate(MINI).named_parameters() if "bias" in n]


@pytest.mark.parametrize("renormalise", [False, True])
def test_gradients_of_the_weights_are_the_formulas(renormalise):
    scores, g = drawn(5, 9).requires_grad_(), drawn(5, 3, seed=1)
    weights, indices = route(scores, 3, renormalise=renormalise, scale=2.5)
    chosen = scores.gather(-1, indices)
    formula = 2.5 * chosen / (chosen.sum(-1, keepdim=True) if renormalise else 1)
    ours, expected = (torch.autograd.grad((w * g).sum(), scores)[0] for w in (weights, formula))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_opposed_modality_biases_send_each_row_its_own_way():
    gate = Gate(MINI)
    gate.bias[3] += 50
    gate.bias_vl[7] += 50
    x, mask = torch.randn(4, MINI.hidden_size), torch.tensor([True, False, True, False])
    _, indices = gate(x, image_mask=mask)
    assert indices[:, 0].tolist() == [7, 3, 7, 3]
    _, text = gate(x)
    assert text[:, 0].tolist() == [3] * 4


# ---- groups


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(2, 4), st.integers(2, 4), st.integers(0, 2**31), st.sampled_from(["max", "top2"]))
def test_groups_by_enumeration(G, size, seed, group_score):
    s, kept, k = drawn(G * size, seed=seed) - 0.5, G - 1, 2
    groups = s.view(G, size)
    score = groups.amax(-1) if group_score == "max" else groups.sort(descending=True).values[:, :2].sum(-1)
    best = max(combinations(range(G), kept), key=lambda c: sum(score[list(c)].tolist()))
    eligible = [e for e in range(G * size) if e // size in best]
    expected = sorted(eligible, key=lambda e: -s[e].item())[:k]
    _, indices = route(s, k, n_group=G, topk_group=kept, group_score=group_score)
    assert indices.tolist() == expected


def test_v3_bounds_a_token_to_four_of_eight_nodes_and_v4_does_not():
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    for name, most in (("v3", 4), ("v4_flash", 8)):
        gate = Gate(preset(name).replace(hidden_size=64, num_experts_per_tok=8), layer=10)
        _, indices = gate(x)
        nodes = [len(set((row // (gate.n_experts // 8)).tolist())) for row in indices]
        assert max(nodes) <= most
        assert max(nodes) > 3 if name == "v3" else max(nodes) > 4


def test_negative_scores_survive_the_group_mask():
    """A mask of 0 instead of -inf would choose an expert outside the groups where biased scores are negative."""
    s = torch.tensor([-1.0, -2.0, -9.0, -9.0])
    _, indices = route(s, 2, n_group=2, topk_group=1)
    assert indices.tolist() == [0, 1]


# ---- hash-routed layers


def hash_gate(table):
    config = preset("v4_flash").replace(hidden_size=64, n_routed_experts=8, num_experts_per_tok=2, vocab_size=129280)
    gate = Gate(config, layer=2)
    gate.tid2eid = table
    return gate


def test_a_hash_layer_weighs_by_learned_affinities():
    gate = hash_gate(torch.tensor([[3, 1], [7, 0], [2, 5]]))
    x = torch.randn(3, 64)
    weights, indices = gate(x, token_ids=torch.tensor([1, 0, 1]))
    assert indices.tolist() == [[7, 0], [3, 1], [7, 0]]
    torch.testing.assert_close(weights, weigh(gate.scores(x), indices, True, 1.5))
    assert not torch.allclose(weights, torch.full_like(weights, 0.75), atol=1e-3), "not 1/k each"
    assert gate.bias is None


def test_the_hash_table_stays_whole():
    gate = hash_gate(torch.tensor([[383, 1]])).to(torch.bfloat16)
    assert gate.tid2eid.dtype == torch.int64
    assert gate.tid2eid[0, 0] == 383, "a cast to bf16 would make it 384"
    assert Gate(preset("v4_flash").replace(hidden_size=64), layer=3).tid2eid is None


def test_ids_outside_the_table_are_an_error():
    gate = hash_gate(torch.tensor([[3, 1], [7, 0]]))
    for bad in (2, -1):
        with pytest.raises(ValueError, match=r"token_ids from .* expected 0 to 1"):
            gate(torch.randn(1, 64), token_ids=torch.tensor([bad]))
    with pytest.raises(ValueError, match="token_ids: expected the tokens' ids"):
        gate(torch.randn(1, 64))
    with pytest.raises(TypeError, match=r"token_ids is torch\.float32: expected torch\.int64"):
        gate(torch.randn(1, 64), token_ids=torch.tensor([1.0]))


# ---- placement


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(0, 999), st.booleans())
def test_a_rebalance_is_invisible_in_the_layers_output(seed, distinct):
    """Replicas hold copies of their expert: whichever placement the gate maps to, the output is what it was."""
    moe, x = MoE(MINI).double(), drawn(9, MINI.hidden_size, seed=seed) - 0.5
    expected = moe(x)
    load = drawn(1, 16, seed=seed + 1) ** 4
    placement = rebalance_experts(load, 24, n_groups=4, n_nodes=2, n_gpus=4, distinct=distinct)
    held = placement.physical_to_logical[0]
    placed = Experts(24, MINI.hidden_size, MINI.moe_intermediate_size, MINI.swiglu_limit).double()
    with torch.no_grad():
        placed.w13.copy_(moe.experts.w13[held])
        placed.w2.copy_(moe.experts.w2[held])
    moe.experts, moe.gate.placement = placed, placement.layer(0)
    torch.testing.assert_close(moe(x), expected, rtol=1e-12, atol=1e-12)
    _, physical = moe.gate(x, positions=torch.arange(9) + 1)
    _, logical = Gate.forward(moe.gate, x)
    assert torch.equal(held[physical], held[logical])


# ---- precision and shapes


def test_scores_are_fp32_inside_whatever_the_tokens_are():
    gate = Gate(MINI).to(torch.bfloat16)
    x = torch.randn(4, MINI.hidden_size).bfloat16()
    weights, _ = gate(x)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(gate.scores(x).double(), gate.scores(x.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [2.5, 2.827])  # fp32 holds the first exactly
def test_the_scale_is_exact_in_fp64(scale):
    gate = Gate(MINI.replace(routed_scaling_factor=scale)).double()
    weights, _ = gate(drawn(4, MINI.hidden_size))
    torch.testing.assert_close(weights.sum(-1), torch.full((4,), scale, dtype=torch.float64), rtol=1e-14, atol=0)


def test_a_gate_made_without_storage_works_when_it_has_some():
    with torch.device("meta"):
        gate = Gate(MINI)
    other = Gate(MINI)
    gate.to_empty(device="cpu").load_state_dict(other.state_dict())
    x = drawn(3, MINI.hidden_size).float()
    for found, expected in zip(gate(x), other(x), strict=True):
        assert torch.equal(found, expected)


def test_temperature_divides_the_logits():
    hot, cold = Gate(MINI, temperature=2.0), Gate(MINI)
    cold.weight = torch.nn.Parameter(hot.weight / 2)
    x = torch.randn(3, MINI.hidden_size)
    torch.testing.assert_close(hot.scores(x), cold.scores(x))


@pytest.mark.parametrize("tokens", [(), (1,), (0,), (2, 3), (2, 0)])
def test_any_leading_shape(tokens):
    weights, indices = Gate(MINI)(torch.randn(*tokens, MINI.hidden_size))
    assert weights.shape == indices.shape == (*tokens, 2)
    assert indices.dtype == torch.int64


def test_a_row_alone_equals_the_row_in_a_batch():
    gate, x = Gate(MINI).double(), torch.randn(7, MINI.hidden_size).double()
    weights, indices = gate(x)
    for t in range(7):
        alone = gate(x[t])
        torch.testing.assert_close(alone[0], weights[t])
        assert torch.equal(alone[1], indices[t])


def test_one_chosen_expert_is_not_renormalised():
    s = torch.tensor([0.5, 0.25])
    weights, _ = route(s, 1, renormalise=True, scale=1.5)
    assert weights.tolist() == [0.75]


def test_the_drafters_gate_has_its_own_sizes():
    gate = Gate(preset("v41_flash"), layer=40, drafter=True)
    assert (gate.n_experts, gate.top_k, gate.weight.shape) == (128, 3, (128, 5120))


BAD = [
    (dict(scores=torch.rand(3, 4), top_k=5), "top_k = 5: expected 1 to 4"),
    (dict(scores=torch.rand(3, 4), top_k=0), "top_k = 0: expected 1 to 4"),
    (dict(scores=torch.rand(3, 6), top_k=1, n_group=4), "n_group = 4, topk_group = 1: expected a divisor of 6"),
    (dict(scores=torch.rand(3, 6), top_k=4, n_group=2), "room for 4 experts"),
    (dict(scores=torch.rand(3, 6), top_k=1, n_group=2, topk_group=3), "topk_group = 3"),
    (
        dict(scores=torch.rand(3, 6), top_k=1, n_group=2, group_score="mean"),
        "group_score = 'mean': expected 'max' or",
    ),
    (dict(scores=torch.tensor([[0.1, float("nan")]]), top_k=1), "scores: expected numbers, got NaN"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[m[:30] for _, m in BAD])
def test_bad_routing_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        route(**arguments)


def test_bad_masks_and_shapes_are_refused():
    gate, x = Gate(MINI), torch.randn(3, MINI.hidden_size)
    with pytest.raises(ValueError, match=r"image_mask of shape \[2\]: expected \[3\], one for each token"):
        gate(x, image_mask=torch.zeros(2, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"image_mask is torch\.uint8: expected torch\.bool"):
        gate(x, image_mask=torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="expected 192 channels last"):
        gate(torch.randn(3, 5))
    with pytest.raises(ValueError, match="image_mask: expected none, this gate has one bias"):
        Gate(preset("v4_flash").replace(hidden_size=64), layer=9)(torch.randn(1, 64), torch.ones(1, dtype=torch.bool))


# ---- compiled


@pytest.mark.parametrize("compiling", [False, True])
@settings(derandomize=True, deadline=None)
@given(VALUES)
def test_the_smallest_keys_are_the_stable_sort(compiling, values):
    row = torch.tensor(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        for k in range(1, len(row) + 1):
            assert torch.equal(top_k_by_keys(row, k), row.sort(descending=True, stable=True).indices[:k])


def test_compiled_it_is_the_same_gate():
    gate = Gate(MINI)
    x = torch.randn(13, gate.weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gate.weight[5] = gate.weight[2]  # a tie, when they are chosen
        gate.bias[2] = gate.bias[5] = 9
        compiled = torch.compile(gate, fullgraph=True)(x)
        weights, indices = gate(x)
    assert torch.equal(compiled[1], indices)
    assert torch.allclose(compiled[0], weights, rtol=1e-5)
    assert (indices[:, :2] == torch.tensor([2, 5])).all()
