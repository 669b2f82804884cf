"""Packing, replication and placement: the published balancer's vectors, then what must hold of any placement.

The packing is held against a slow greedy of the definition, and its quality against the best packing of small
inputs; the option `distinct` against its two promises, on loads made to break them. Last, that a rebalance moves
experts and nothing else: a layer's output keeps its bits.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41_edu.moe import placement as p

FOLDER = Path(__file__).parents[1] / "vectors"
VECTORS, CASES = load_file(FOLDER / "eplb.safetensors"), json.loads((FOLDER / "eplb.json").read_text())["cases"]
drawn = settings(derandomize=True, deadline=None, max_examples=50)
# few values: ties, zeros, and one expert that outweighs all others
weights = st.sampled_from([0.0, 0.0, 1.0, 1.0, 1.5, 2.0, 3.0, 7.0, 50.0])


@st.composite
def layouts(draw):
    """Load [L, E], replicas, groups, nodes, devices: hierarchical or not, no more slots than `distinct` can fill."""
    nodes, gpus_per_node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    groups, group = draw(st.sampled_from([nodes, 2 * nodes, nodes + 1])), draw(st.integers(1, 4))
    gpus, E = nodes * gpus_per_node, groups * group
    in_node = E if groups % nodes else E // nodes
    slots = draw(st.integers(-(-E // gpus), min(in_node, -(-E // gpus) + 3)))
    load = draw(st.lists(st.lists(weights, min_size=E, max_size=E), min_size=1, max_size=2))
    return torch.tensor(load), slots * gpus, groups, nodes, gpus


def per_device(placement, gpus):
    """[L, devices, slots] the experts on each device."""
    return placement.physical_to_logical.unflatten(1, (gpus, -1))


def has_repeat(slots):
    return any(len(set(device)) < len(device) for device in slots.tolist())


# The published balancer.
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["case"]))
def test_vectors(case):
    name = f"case{case['case']:02d}."
    load, R, gpus = VECTORS[name + "load"], case["replicas"], case["gpus"]
    found = p.rebalance_experts(load, R, case["groups"], case["nodes"], gpus)
    assert torch.equal(found.physical_to_logical, VECTORS[name + "replica_to_expert"].long())
    assert torch.equal(found.counts, VECTORS[name + "replica_count"].long())
    # replicas of one expert weigh the same: how the published sort orders them is the machine's choice
    expected = VECTORS[name + "expert_to_replicas"].long()
    assert found.logical_to_physical.shape == expected.shape
    assert torch.equal(found.logical_to_physical.sort(-1).values, expected.sort(-1).values)
    devices = p.device_load(load, found.physical_to_logical, gpus)
    ratio = devices.amax(1) / devices.mean(1)
    torch.testing.assert_close(ratio, torch.tensor(case["max_over_mean_gpu_load"]).double(), rtol=0, atol=1e-6)


def test_the_repository_readme():
    load = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float64):
        found = p.rebalance_experts(torch.tensor(load, dtype=dtype), 16, 4, 2, 8)
        assert found.physical_to_logical.tolist() == [
            [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
            [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
        ]


# Packing.
def greedy(row, m):
    """The definition, one item at a time, summed in fp32."""
    size, packs = len(row) // m, [[] for _ in range(m)]
    total = [np.float32(0)] * m
    for item in sorted(range(len(row)), key=lambda i: -row[i]):
        best = min((q for q in range(m) if len(packs[q]) < size), key=lambda q: total[q])
        packs[best].append(item)
        total[best] += np.float32(row[item])
    return packs


@drawn
@given(st.integers(1, 4), st.integers(2, 5), st.data())
def test_packing_is_the_greedy_of_its_definition(m, size, data):
    row = st.lists(weights | st.floats(0, 100, width=32), min_size=m * size, max_size=m * size)
    weight = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3)))
    pack, rank = p.balanced_packing(weight, m)
    assert (pack.dtype, rank.dtype, pack.shape, rank.shape) == (torch.int64, torch.int64, weight.shape, weight.shape)
    for x, row in enumerate(weight.tolist()):
        for q, items in enumerate(greedy(row, m)):
            assert [int(pack[x, i]) for i in items] == [q] * size
            assert [int(rank[x, i]) for i in items] == list(range(size))


def test_packing_sums_in_float32():
    # in fp32 the third item vanishes in the first pack's sum, which then ties with the second's and takes the fourth
    weight = torch.tensor([[2.0**25, 2.0**25, 1.0, 1.0, 1.0, 1.0]])
    assert p.balanced_packing(weight, 2)[0].tolist() == [[0, 1, 0, 0, 1, 1]]
    assert p.balanced_packing(weight.double(), 2)[0].tolist() == [[0, 1, 0, 0, 1, 1]]


def test_one_item_a_pack_stays_where_it_is():
    pack, rank = p.balanced_packing(torch.tensor([[1.0, 3.0, 2.0]]), 3)
    assert (pack.tolist(), rank.tolist()) == ([[0, 1, 2]], [[0, 0, 0]])


def test_equal_weights_are_dealt_in_order():
    pack, rank = p.balanced_packing(torch.ones(2, 6), 3)
    assert pack.tolist() == [[0, 1, 2, 0, 1, 2]] * 2
    assert rank.tolist() == [[0, 0, 0, 1, 1, 1]] * 2
    many = p.balanced_packing(torch.ones(1, 400), 4)[0]  # long rows take torch's other sort
    assert many.tolist() == [[0, 1, 2, 3] * 100]


@drawn
@given(st.lists(weights, min_size=6, max_size=6))
def test_packing_against_the_best_there_is(row):
    # packs of three: at most 4/3 - 1/(3 m) of the best (Kellerer and Woeginger 1993), 7/6 for two of them
    pack = p.balanced_packing(torch.tensor([row]), 2)[0][0]
    found = max(sum(w for w, q in zip(row, pack.tolist(), strict=True) if q == side) for side in (0, 1))
    best = min(
        max(sum(chosen), sum(row) - sum(chosen))
        for chosen in ([row[i] for i in three] for three in itertools.combinations(range(6), 3))
    )
    assert 6 * best <= 6 * found <= 7 * best


def deal(shares, experts, m):
    """The module's promise for `distinct`: rounds of m sorted items, each to the lightest pack that may have it."""
    packs, total = [[] for _ in range(m)], [np.float32(0)] * m
    order = sorted(range(len(shares)), key=lambda i: (-shares[i], experts[i], i))
    for start in range(0, len(order), m):
        unserved = set(range(m))
        for item in order[start : start + m]:
            held = [{experts[i] for i in pack} for pack in packs]
            best = min((q for q in sorted(unserved) if experts[item] not in held[q]), key=lambda q: total[q])
            unserved.remove(best)
            packs[best].append(item)
            total[best] += shares[item]
    return packs


@pytest.mark.parametrize(("E", "R", "m"), [(4, 8, 2), (6, 12, 4), (24, 48, 8), (40, 64, 4), (20, 60, 6)])
def test_distinct_deals_rounds(E, R, m):
    rng, dealt = np.random.default_rng(0), 0
    for row in [
        np.zeros(E),
        np.ones(E),
        *rng.poisson(2.0, (6, E)),
        *rng.permuted(np.ones((4, 1)) / np.arange(1, E + 1)),
    ]:
        load = torch.tensor(row[None]).float()
        expert, _, counts = p.replicate_experts(load, R, most=m)
        shares = (load / counts)[0].numpy()[expert[0]]
        packs = greedy(shares, m)
        if any(len({int(expert[0, i]) for i in pack}) < len(pack) for pack in packs):
            packs, dealt = deal(shares, expert[0].tolist(), m), dealt + 1
        place = p.rebalance_experts(load, R, 1, 1, m, distinct=True).layer(0)
        slots = [item for pack in packs for item in pack]  # the replicas in order of their slots
        assert place.physical_to_logical.tolist() == expert[0, slots].tolist()
        for e in range(E):
            replicas = [i for i in range(R) if expert[0, i] == e]
            assert place.logical_to_physical[e, : len(replicas)].tolist() == [slots.index(i) for i in replicas]
    assert dealt >= 3


# Replication.
@drawn
@given(st.lists(weights, min_size=1, max_size=6), st.integers(0, 8))
def test_replication_is_greedy_and_minimises_the_heaviest_replica(row, extra):
    E, R = len(row), len(row) + extra
    expert, rank, counts = (t[0].tolist() for t in p.replicate_experts(torch.tensor([row]), R))
    assert sum(counts) == R
    assert expert[:E] == list(range(E))
    for slot in range(E, R):
        before = [expert[:slot].count(e) for e in range(E)]
        heat = [np.float32(w) / n for w, n in zip(row, before, strict=True)]
        assert expert[slot] == heat.index(max(heat))
    assert rank == [expert[:slot].count(e) for slot, e in enumerate(expert)]
    assert counts == [expert.count(e) for e in range(E)]
    # no other division has a lighter heaviest replica
    heaviest = max(w / n for w, n in zip(row, counts, strict=True))
    ways = itertools.product(range(1, extra + 2), repeat=E) if E <= 3 else []
    for other in ways:
        if sum(other) == R:
            assert max(w / n for w, n in zip(row, other, strict=True)) >= heaviest - 1e-6


def test_replication_with_a_limit():
    expert, rank, counts = p.replicate_experts(torch.tensor([[0.0, 100.0, 1.0]]), 7, most=3)
    assert counts.tolist() == [[1, 3, 3]]
    assert expert.tolist() == [[0, 1, 2, 1, 1, 2, 2]]
    assert rank.tolist() == [[0, 0, 0, 1, 2, 1, 2]]
    assert p.replicate_experts(torch.zeros(1, 3), 9, most=3)[2].tolist() == [[3, 3, 3]]
    assert p.replicate_experts(torch.zeros(1, 3), 3, most=1)[2].tolist() == [[1, 1, 1]]
    assert p.replicate_experts(torch.zeros(1, 3), 9)[2].tolist() == [[7, 1, 1]]


# Any placement.
@drawn
@given(layouts(), st.booleans())
def test_maps_agree_and_groups_stay_on_a_node(layout, distinct):
    load, R, groups, nodes, gpus = layout
    E = load.shape[1]
    found = p.rebalance_experts(load, R, groups, nodes, gpus, distinct)
    assert {t.dtype for t in found} == {torch.int64}
    for i in range(len(load)):
        slots, where, counts = (t.tolist() for t in found.layer(i))
        assert sum(counts) == R
        for e in range(E):
            held = [slot for slot in where[e] if slot >= 0]
            assert sorted(held) == [slot for slot in range(R) if slots[slot] == e]
            assert len(held) == counts[e] >= 1
            assert where[e][len(held) :] == [-1] * (len(where[e]) - len(held))
        if groups % nodes == 0:
            node_of = {(slots[slot] // (E // groups), slot // (R // nodes)) for slot in range(R)}
            assert len(node_of) == groups
    assert found.logical_to_physical.shape[2] == found.counts.max()
    total = p.device_load(load, found.physical_to_logical, gpus).sum(1)
    torch.testing.assert_close(total, load.double().sum(1), rtol=1e-12, atol=0)


@drawn
@given(layouts(), st.booleans())
def test_a_layer_is_placed_by_itself(layout, distinct):
    load, *sizes = layout
    found = p.rebalance_experts(load, *sizes, distinct)
    for i in range(len(load)):
        alone = p.rebalance_experts(load[i : i + 1], *sizes, distinct)
        assert torch.equal(alone.physical_to_logical[0], found.physical_to_logical[i])
        assert torch.equal(alone.counts[0], found.counts[i])


@settings(drawn, max_examples=150)
@given(layouts())
def test_distinct_never_repeats_and_keeps_its_bound(layout):
    load, R, groups, nodes, gpus = layout
    if groups % nodes:
        nodes = 1
    plain = p.rebalance_experts(load, R, *layout[2:])
    found = p.rebalance_experts(load, R, *layout[2:], distinct=True)
    for i in range(len(load)):
        assert not has_repeat(per_device(found, gpus)[i])
        replica = (load[i] / found.counts[i]).double()[found.physical_to_logical[i]]
        in_node = replica.view(nodes, -1)
        gap = p.device_load(load, found.physical_to_logical, gpus)[i].view(nodes, -1)
        spread = in_node.amax(1) - in_node.amin(1)
        for node in range(nodes):
            same = (
                found.physical_to_logical[i].view(nodes, -1)[node],
                plain.physical_to_logical[i].view(nodes, -1)[node],
            )
            if not torch.equal(*same):
                assert gap[node].max() - gap[node].min() <= spread[node] + 1e-5
        if not has_repeat(per_device(plain, gpus)[i]):  # nothing to mend
            assert torch.equal(found.physical_to_logical[i], plain.physical_to_logical[i])


@pytest.mark.parametrize("kind", ["uniform", "exponential", "zipf", "counts", "zeros"])
def test_distinct_at_the_official_size(kind):
    rng = np.random.default_rng(0)
    rows = {
        "uniform": lambda: rng.random(384),
        "exponential": lambda: rng.exponential(size=384),
        "zipf": lambda: rng.permutation(1 / np.arange(1, 385)),
        "counts": lambda: rng.poisson(1.0, 384),
        "zeros": lambda: np.zeros(384),
    }
    load = torch.tensor(np.stack([rows[kind]() for _ in range(2)]))
    found = p.rebalance_experts(load, 416, 1, 1, 32, distinct=True)
    assert not has_repeat(per_device(found, 32).flatten(0, 1))
    devices = p.device_load(load, found.physical_to_logical, 32)
    replica = load / found.counts
    assert (devices.amax(1) <= devices.mean(1) + replica.amax(1) - replica.amin(1)).all()


def test_the_published_algorithm_repeats_an_expert():
    load = torch.tensor([[50.0, 1.0, 1.0, 1.0]])
    plain = p.rebalance_experts(load, 8, 1, 1, 2)
    assert plain.counts.tolist() == [[5, 1, 1, 1]]
    assert has_repeat(per_device(plain, 2)[0])
    found = p.rebalance_experts(load, 8, 1, 1, 2, distinct=True)
    assert found.counts.tolist() == [[2, 2, 2, 2]]
    assert per_device(found, 2).sort(-1).values.tolist() == [[[0, 1, 2, 3]] * 2]


def test_distinct_mends_one_node_and_leaves_the_other():
    load = torch.tensor([[7.0, 7.0, 1.0, 5.0, 9.0, 8.0, 7.0, 5.0]])
    plain, found = (p.rebalance_experts(load, 12, 2, 2, 4, distinct) for distinct in (False, True))
    assert per_device(plain, 4).tolist() == [[[3, 0, 2], [0, 1, 1], [6, 4, 5], [7, 4, 5]]]
    assert per_device(found, 4)[0, 2:].tolist() == [[6, 4, 5], [7, 4, 5]]
    assert per_device(found, 4)[0, :2].sort(-1).values.tolist() == [[0, 1, 3], [0, 1, 2]]


def test_replicas_relieve_the_busiest_device():
    rng = np.random.default_rng(0)
    load = torch.tensor(rng.permutation(1 / np.arange(1, 257))).view(1, 256)  # V3: 256 experts, 32 devices, 32 more
    before = p.device_load(load, torch.arange(256).view(1, -1), 32)
    after = p.device_load(load, p.rebalance_experts(load, 288, 8, 4, 32).physical_to_logical, 32)
    assert before.max() / before.mean() > 4
    assert after.max() / after.mean() < 1.6


def test_one_expert_and_equal_loads():
    found = p.rebalance_experts(torch.tensor([[5.0]]), 4, 1, 1, 4)
    assert [t.tolist() for t in found] == [[[0, 0, 0, 0]], [[[0, 1, 2, 3]]], [[4]]]
    assert p.rebalance_experts(torch.ones(1, 8), 8, 1, 1, 4).physical_to_logical.tolist() == [
        [0, 4, 1, 5, 2, 6, 3, 7]
    ]
    # without load no pack ever grows heavier, and the first is filled first
    assert p.rebalance_experts(torch.zeros(1, 8), 8, 1, 1, 4).physical_to_logical.tolist() == [list(range(8))]


def test_load_is_left_alone():
    load = torch.tensor([[50.0, 1.0, 1.0, 1.0]])
    kept = load.clone()
    p.rebalance_experts(load, 8, 1, 1, 2, distinct=True)
    p.balanced_packing(load, 2)
    p.replicate_experts(load, 6)
    assert torch.equal(load, kept)


def test_device_load_by_hand():
    load = torch.tensor([[6, 2, 1], [0, 4, 8]])
    slots = torch.tensor([[0, 1, 0, 2], [2, 1, 0, 2]])
    found = p.device_load(load, slots, 2)
    assert found.dtype == torch.float64
    assert found.tolist() == [[5, 4], [8, 4]]
    assert torch.equal(p.device_load(load, slots.int(), 2), found)


# Used by a gate.
def layer_of(load, **options):
    return p.rebalance_experts(torch.tensor([load]), 6, 1, 1, 2, **options).layer(0)


def test_replicas_take_turns_by_position():
    place = layer_of([9.0, 1.0, 3.0, 1.0], distinct=True)
    assert place.counts.tolist() == [2, 1, 2, 1]
    a, b = place.logical_to_physical[0].tolist()
    c = place.logical_to_physical[1, 0].item()
    indices = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 1]])
    expected = torch.tensor([[a, c], [b, c], [c, a], [b, c]])
    assert torch.equal(place.to_physical(indices), expected)
    assert torch.equal(place.to_physical(indices.int()), expected)
    assert torch.equal(place.to_physical(indices.view(2, 2, 2)), expected.view(2, 2, 2))
    positions = torch.tensor([7, 2, 3, 4])
    expected = torch.tensor([[b, c], [a, c], [c, b], [a, c]])
    assert torch.equal(place.to_physical(indices, positions), expected)
    assert torch.equal(place.to_physical(indices, positions.int()), expected)
    assert place.to_physical(torch.tensor([0, 1])).tolist() == [a, c]
    assert place.to_physical(torch.empty(0, 2, dtype=torch.int64)).shape == (0, 2)
    assert place.to_physical(indices).dtype == torch.int64


@drawn
@given(layouts(), st.booleans())
def test_a_slot_holds_the_expert_that_was_chosen_and_all_slots_serve(layout, distinct):
    load, *sizes = layout
    E = load.shape[1]
    place = p.rebalance_experts(load, *sizes, distinct).layer(0)
    most = int(place.counts.max())
    indices = torch.arange(E).repeat(most, 1)  # each expert at positions 0, 1, ...
    slots = place.to_physical(indices)
    assert torch.equal(place.physical_to_logical[slots], indices)
    assert slots.unique().tolist() == list(range(sizes[0]))


@pytest.mark.parametrize("distinct", [False, True])
def test_a_rebalance_keeps_the_layers_output(distinct):
    g = torch.Generator().manual_seed(0)
    matrices, x = torch.randn(8, 5, 5, generator=g), torch.randn(20, 5, generator=g)
    weights, indices = torch.rand(20, 8, generator=g).topk(3)

    def output(matrices, indices):
        rows = zip(weights, indices.tolist(), x, strict=True)
        return torch.stack(
            [sum(w * (matrices[e] @ token) for w, e in zip(r, es, strict=True)) for r, es, token in rows]
        )

    before = output(matrices, indices)
    for load in (torch.rand(1, 8, generator=g), torch.zeros(1, 8), torch.tensor([[99.0] + [1.0] * 7])):
        place = p.rebalance_experts(load, 16, 2, 2, 4, distinct).layer(0)
        moved = matrices[place.physical_to_logical]
        assert torch.equal(output(moved, place.to_physical(indices)), before)
    assert not torch.equal(output(moved, indices), before)  # a placement changed without its map


def test_shared_expert_as_a_routed_one():
    weights, indices = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).double(), torch.tensor([[2, 0], [1, 2]])
    w, i = p.shared_as_routed(weights, indices, 3)
    assert (w.tolist(), i.tolist()) == ([[0.75, 0.25, 1], [0.5, 0.5, 1]], [[2, 0, 3], [1, 2, 3]])
    assert (w.dtype, i.dtype) == (torch.float64, torch.int64)
    g = torch.Generator().manual_seed(0)
    experts, x = torch.randn(4, 5, 5, generator=g).double(), torch.randn(2, 5, generator=g).double()
    every = torch.einsum("eij,tj->tei", experts, x)
    routed = torch.stack([weights[t] @ every[t, indices[t]] for t in range(2)])
    joint = torch.stack([w[t] @ every[t, i[t]] for t in range(2)])
    torch.testing.assert_close(joint, routed + every[:, 3], rtol=1e-14, atol=1e-14)
    w, i = p.shared_as_routed(torch.ones(0, 2), torch.empty(0, 2, dtype=torch.int32), 3)
    assert (w.shape, i.shape, i.dtype) == ((0, 3), (0, 3), torch.int32)
    p.shared_as_routed(weights.requires_grad_(), indices, 3)[0].sum().backward()
    assert weights.grad.tolist() == [[1, 1], [1, 1]]


# Bad input.
L = torch.ones(1, 12)
ONE = torch.zeros(1, 2, dtype=torch.int64)
MIXED = torch.tensor([[0, 2]])
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: p.rebalance_experts(L, 8, 4, 2, 8), ValueError, "replicas: expected"),
        (lambda: p.rebalance_experts(L, 18, 4, 2, 8), ValueError, "18 replicas, 8 devices"),
        (lambda: p.rebalance_experts(L, 16, 5, 2, 8), ValueError, "12 experts, 5 groups"),
        (lambda: p.rebalance_experts(L, 16, 4, 3, 8), ValueError, "8 devices, 3 nodes"),
        (lambda: p.rebalance_experts(L, 16, 0, 2, 8), ValueError, "0 groups"),
        (lambda: p.rebalance_experts(L, 16, 4, 0, 8), ValueError, "0 nodes"),
        (lambda: p.rebalance_experts(L, 16, 4, 2, 0), ValueError, "0 devices"),
        (lambda: p.rebalance_experts(L, 56, 4, 2, 8, True), ValueError, "28 replicas: expected 6, .* to 24"),
        (lambda: p.rebalance_experts(L[0], 16, 4, 2, 8), ValueError, r"load of shape \[12\]"),
        (lambda: p.rebalance_experts(L[:0], 16, 4, 2, 8), ValueError, r"load of shape \[0, 12\]"),
        (lambda: p.rebalance_experts(-L, 16, 4, 2, 8), ValueError, "load: expected"),
        (lambda: p.rebalance_experts(L - torch.eye(12)[:1] * 2, 16, 4, 2, 8), ValueError, "load: expected"),
        (lambda: p.rebalance_experts(torch.cat([L, L * INF]), 16, 4, 2, 8), ValueError, "load: expected"),
        (lambda: p.rebalance_experts(L * INF, 16, 4, 2, 8), ValueError, "load: expected"),
        (lambda: p.rebalance_experts(L * NAN, 16, 4, 2, 8), ValueError, "load: expected"),
        (lambda: p.rebalance_experts(L.double() * 1e40, 16, 4, 2, 8), ValueError, "load: expected"),
        (lambda: p.rebalance_experts(L * 1.5e37, 16, 4, 2, 8), ValueError, "load: expected"),
        (lambda: p.rebalance_experts(L > 0, 16, 4, 2, 8), TypeError, "load is torch.bool"),
        (lambda: p.rebalance_experts(L * 1j, 16, 4, 2, 8), TypeError, "load is torch.complex64"),
        (lambda: p.balanced_packing(L, 5), ValueError, "12 items, 5 packs"),
        (lambda: p.balanced_packing(L, 0), ValueError, "12 items, 0 packs"),
        (lambda: p.balanced_packing(-L, 4), ValueError, "weight: expected"),
        (lambda: p.replicate_experts(L, 11), ValueError, "11 replicas: expected 12"),
        (lambda: p.replicate_experts(L, 25, 2), ValueError, "25 replicas: expected 12, .* to 24"),
        (lambda: p.replicate_experts(L[0], 12), ValueError, "weight of shape"),
        (lambda: p.device_load(L, ONE, 2), ValueError, "a slot for every expert"),
        (lambda: p.device_load(L[:, :1], ONE, 3), ValueError, "2 slots, 3 devices"),
        (lambda: p.device_load(L[:, :1], ONE + 1, 2), ValueError, "from 1 to 1: expected 0 to 0"),
        (lambda: p.device_load(L[:, :1], ONE[0], 2), ValueError, r"physical_to_logical \[2\]"),
        (lambda: p.device_load(L[:, :1], ONE.repeat(2, 1), 2), ValueError, r"\[2, 2\]: expected \[1, R\]"),
        (lambda: p.device_load(-L, ONE, 2), ValueError, "load: expected"),
        (lambda: p.shared_as_routed(torch.ones(1, 2), ONE + 3, 3), ValueError, "from 3 to 3: expected 0 to 2"),
        (lambda: p.shared_as_routed(torch.ones(1, 3), ONE, 3), ValueError, r"weights \[1, 3\], indices \[1, 2\]"),
        (lambda: p.shared_as_routed(ONE, ONE, 3), TypeError, "weights is torch.int64"),
        (lambda: p.shared_as_routed(torch.ones(1, 2), torch.ones(1, 2), 3), TypeError, "indices is torch.float32"),
        (lambda: layer_of([1.0] * 3).to_physical(ONE - 1), ValueError, "indices from -1 to -1: expected 0 to 2"),
        (lambda: layer_of([1.0] * 3).to_physical(ONE + 3), ValueError, "indices from 3 to 3: expected 0 to 2"),
        (lambda: layer_of([1.0] * 3).to_physical(MIXED - 1), ValueError, "indices from -1 to 1: expected 0 to 2"),
        (lambda: layer_of([1.0] * 3).to_physical(MIXED + 1), ValueError, "indices from 1 to 3: expected 0 to 2"),
        (lambda: layer_of([1.0] * 3).to_physical(ONE[0, 0]), ValueError, "indices is one number"),
        (lambda: layer_of([1.0] * 3).to_physical(ONE, ONE), ValueError, r"positions \[1, 2\]: expected \[1\]"),
        (lambda: layer_of([1.0] * 3).to_physical(ONE, ONE[0, :1] - 1), ValueError, "positions from -1 to -1"),
        (lambda: layer_of([1.0] * 3).to_physical(ONE, torch.ones(1)), TypeError, "positions is torch.float32"),
        (lambda: p.rebalance_experts(L, 16, 4, 2, 8).to_physical(ONE), ValueError, r"placement.layer\(i\)"),
    ],
)
def test_refuses(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_the_largest_sum_that_is_taken():
    assert p.rebalance_experts(L * 1.4e37, 16, 4, 2, 8).counts.sum() == 16
