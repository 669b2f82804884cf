"""Which device holds which expert: hot experts get replicas, and replicas are packed so that devices share the load.

    packing      by falling weight, each item to the lightest pack with room       m packs of n / m items
    replication  R - E times, one more replica for the expert of largest load / replicas
    hierarchy    pack groups on nodes, replicate inside each node, pack replicas on the node's devices

Without a hierarchy (groups that don't divide over the nodes) all experts are one group on one node. A *physical* id
numbers the R slots: slot p is on device p // (R / devices). Loads are compared and summed in fp32 as the published
balancer does, so its near-ties fall alike. Equals go to the lowest id; the published sort leaves their order open, so
there the machine may number the replicas of one expert, equal in load, in another order.

The published packing may put two replicas of an expert on one device, where the second is of no use. `distinct`
deals a node where that happens anew, in rounds of m sorted items, one to each pack. Any two packs then differ by at
most the heaviest item less the lightest, in whichever order a round is dealt. And none gets an expert twice: its
replicas, at most m, are neighbours in the order, so only a round's last expert reaches into the next round; there its
replicas are dealt first, and enough packs are without it.

Sources: EPLB repository; V3 report 3.4.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Placement(NamedTuple):
    """Where the experts lie, int64: of all layers or, from `layer(i)`, of one, without the L."""

    physical_to_logical: Tensor  # [L, R] the expert in each slot
    logical_to_physical: Tensor  # [L, E, most replicas] the slots of each expert, then -1
    counts: Tensor  # [L, E] replicas of each expert

    def layer(self, i: int) -> "Placement":
        """One layer's placement, the one that its gate needs."""
        return Placement(*(t[i] for t in self))

    def to_physical(self, indices: Tensor, positions: Tensor | None = None) -> Tensor:
        """Slots int64 [..., k] of one layer's chosen experts int [..., k]: of each, replica (position mod replicas).

        positions: int [...], the tokens' own numbers, from 0 up; by default their order in the batch. The rule has no
        state: a token meets the same slots each time. Raises ValueError for a placement of several layers, shapes,
        or ids outside 0 to E - 1; TypeError for dtypes.
        """
        if self.counts.ndim != 1:
            raise ValueError("placement of several layers: expected one layer's, placement.layer(i)")
        _check_ids("indices", indices, len(self.counts))
        tokens = indices.shape[:-1]
        if positions is None:
            positions = torch.arange(math.prod(tokens), device=indices.device).view(tokens)
        _check_ids("positions", positions)
        if positions.shape != tokens:
            raise ValueError(f"positions {list(positions.shape)}: expected {list(tokens)}, one for each token")
        indices = indices.long()
        return self.logical_to_physical[indices, positions.unsqueeze(-1) % self.counts[indices]]


def balanced_packing(weight: Tensor, n_packs: int) -> tuple[Tensor, Tensor]:
    """Pack n weighted items in n_packs packs of n / n_packs items each: every item's pack, and its rank in there.

    weight: [X, n], X separate problems, in fp32. Returns int64 [X, n] twice. Raises ValueError for a rank other
    than 2, weights that are negative or not finite, packs that don't divide the items; TypeError for dtypes.
    """
    return _pack(_load("weight", weight).float(), n_packs)


def _pack(weight: Tensor, n_packs: int, expert: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `balanced_packing`; with the experts [X, n] of the items, dealt in rounds, and no expert twice in a pack.

    An expert's items are then at most n_packs, and of equal weight.
    """
    rows, n = weight.shape
    size = _divide(n, n_packs, "items", "packs")
    label = torch.arange(n).repeat(rows, 1)
    if size == 1:  # as published: nothing to balance, so nothing moves
        return label, torch.zeros_like(label)
    if expert is not None:
        label = expert
    order = label.argsort(dim=-1, stable=True)
    order = order.gather(1, weight.gather(1, order).argsort(dim=-1, descending=True, stable=True))
    pack, rank = torch.empty_like(order), torch.empty_like(order)
    load, filled = torch.zeros(rows, n_packs), torch.zeros(rows, n_packs, dtype=torch.int64)
    newest = torch.full_like(filled, -1)  # the label that each pack got last
    for i, item in enumerate(order.split(1, dim=1)):  # [X, 1], heaviest first
        full = filled == size if expert is None else filled > i // n_packs
        closed = full | (newest == label.gather(1, item))
        lightest = load.masked_fill(closed, math.inf).argmin(-1, keepdim=True)
        pack.scatter_(1, item, lightest)
        rank.scatter_(1, item, filled.gather(1, lightest))
        load.scatter_add_(1, lightest, weight.gather(1, item))
        filled.scatter_add_(1, lightest, torch.ones_like(lightest))
        newest.scatter_(1, lightest, label.gather(1, item))
    return pack, rank


def replicate_experts(weight: Tensor, n_physical: int, most: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Give E experts n_physical replicas: the expert of each [X, n_physical], its number among the expert's own
    [X, n_physical], and the replicas of each expert [X, E], all int64.

    weight: [X, E], the load, in fp32. most: no expert gets more replicas than this. Raises ValueError for a rank
    other than 2, a load that is negative or not finite, n_physical outside E to most * E; TypeError for dtypes.
    """
    weight = _load("weight", weight).float()
    rows, n_experts = weight.shape
    most = n_physical if most is None else most
    if not n_experts <= n_physical <= most * n_experts:
        raise ValueError(f"{n_physical} replicas: expected {n_experts}, one an expert, to {most * n_experts}")
    expert = torch.arange(n_physical).repeat(rows, 1)
    rank, counts = torch.zeros_like(expert), torch.ones(rows, n_experts, dtype=torch.int64)
    for slot in range(n_experts, n_physical):
        hottest = (weight / counts).masked_fill(counts == most, -1.0).argmax(-1, keepdim=True)
        expert[:, [slot]] = hottest
        rank[:, [slot]] = counts.gather(1, hottest)
        counts.scatter_add_(1, hottest, torch.ones_like(hottest))
    return expert, rank, counts


def rebalance_experts(
    load: Tensor, n_replicas: int, n_groups: int, n_nodes: int, n_gpus: int, distinct: bool = False
) -> Placement:
    """The placement for a measured load [L, E]; every layer by itself. Lives on the load's device.

    distinct: no two replicas of an expert on one device, so no expert gets more replicas than its node has devices.
    A node whose published packing repeats an expert is packed again; its devices then differ by at most its heaviest
    replica's load less its lightest's. The default is the published algorithm.
    Raises ValueError for a rank other than 2, a load that is negative or not finite, fewer replicas than experts,
    replicas that the devices don't divide, experts that the groups don't, devices that the nodes don't, and, where
    distinct, more slots on a device than its node has experts; TypeError for dtypes.
    """
    weight = _load("load", load).float().cpu()
    layers, n_experts = weight.shape
    per_group = _divide(n_experts, n_groups, "experts", "groups")
    _divide(n_replicas, n_gpus, "replicas", "devices")
    _divide(n_gpus, n_nodes, "devices", "nodes")
    if n_groups % n_nodes:
        per_group, n_groups, n_nodes = n_experts, 1, 1

    # groups to nodes; from here on experts stand in their node's order, [L * nodes, E / nodes]
    node, rank = _pack(weight.view(layers, n_groups, per_group).sum(-1), n_nodes)
    groups = (node * (n_groups // n_nodes) + rank).argsort(-1)
    experts = (groups.unsqueeze(-1) * per_group + torch.arange(per_group)).view(layers * n_nodes, -1)
    weight = weight.gather(1, experts.view(layers, -1)).view_as(experts)

    # replicas of each node's experts, then to its devices
    gpus = n_gpus // n_nodes
    chosen, number, counts = replicate_experts(weight, n_replicas // n_nodes, gpus if distinct else None)
    share = (weight / counts).gather(1, chosen)
    gpu, rank = _pack(share, gpus)
    if distinct:
        here = (gpu * n_experts + chosen).sort(-1).values  # device and expert as one number: a repeat is a pair
        twice = (here.diff() == 0).any(-1)
        gpu[twice], rank[twice] = _pack(share[twice], gpus, chosen[twice])
    slots = (gpu * (n_replicas // n_gpus) + rank).argsort(-1)

    # back to the experts' own ids, [L, ...]
    expert = experts.gather(1, chosen.gather(1, slots)).view(layers, n_replicas)
    number = number.gather(1, slots).view(layers, n_replicas)
    counts = torch.empty(layers, n_experts, dtype=torch.int64).scatter_(
        1, experts.view(layers, -1), counts.view(layers, -1)
    )
    most = int(counts.max())
    physical = torch.full((layers, n_experts * most), -1)
    physical.scatter_(1, expert * most + number, torch.arange(n_replicas).expand(layers, -1))
    return Placement(*(t.to(load.device) for t in (expert, physical.view(layers, n_experts, most), counts)))


def device_load(load: Tensor, physical_to_logical: Tensor, n_gpus: int) -> Tensor:
    """Load of each device, fp64 [L, n_gpus], when an expert's tokens are shared equally among its replicas.

    load: [L, E]; physical_to_logical: int [L, R], every expert at least once. Before any balancing it is 0 to E - 1.
    Raises ValueError for shapes, ids outside 0 to E - 1, an expert without a slot, slots that the devices don't
    divide, a load that is negative or not finite; TypeError for dtypes.
    """
    load = _load("load", load).double()
    _check_ids("physical_to_logical", physical_to_logical, load.shape[1])
    if physical_to_logical.ndim != 2 or len(physical_to_logical) != len(load):
        raise ValueError(f"physical_to_logical {list(physical_to_logical.shape)}: expected [{len(load)}, R]")
    _divide(physical_to_logical.shape[1], n_gpus, "slots", "devices")
    slots = physical_to_logical.long()
    counts = torch.zeros_like(load).scatter_add(1, slots, torch.ones_like(slots, dtype=load.dtype))
    if not counts.all():
        raise ValueError("physical_to_logical: expected a slot for every expert")
    return (load / counts).gather(1, slots).view(len(load), n_gpus, -1).sum(-1)


def shared_as_routed(weights: Tensor, indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """Treat the shared expert as routed expert E that every token picks with weight 1.

    weights: float [..., k]; indices: int [..., k], 0 to E - 1. Returns both with one more column, k + 1: at decode
    one grouped product then serves all, and the shared expert can be placed and replicated like any other.
    Raises ValueError for unequal shapes or ids out of range, TypeError for dtypes. Source: V3 report 3.4.
    """
    _check_ids("indices", indices, n_experts)
    if not weights.is_floating_point():
        raise TypeError(f"weights is {weights.dtype}: expected a float type")
    if weights.shape != indices.shape:
        raise ValueError(f"weights {list(weights.shape)}, indices {list(indices.shape)}: expected equal shapes")
    column = (*weights.shape[:-1], 1)
    shared = indices.new_full(column, n_experts)
    return torch.cat([weights, weights.new_ones(column)], -1), torch.cat([indices, shared], -1)


def _load(name: str, value: Tensor) -> Tensor:
    if value.dtype == torch.bool or value.is_complex():
        raise TypeError(f"{name} is {value.dtype}: expected real numbers")
    if value.ndim != 2 or not value.numel():
        raise ValueError(f"{name} of shape {list(value.shape)}: expected [layers, experts or items], not empty")
    if not ((value >= 0).all() and (2 * value.float().sum(-1)).isfinite().all()):  # in any order of summing
        raise ValueError(f"{name}: expected numbers from 0 up, with a finite fp32 sum")
    return value


def _divide(n: int, by: int, many: str, few: str) -> int:
    if by < 1 or n % by:
        raise ValueError(f"{n} {many}, {by} {few}: expected equally many {many} for each")
    return n // by


def _check_ids(name: str, ids: Tensor, n: int | None = None) -> None:
    """Ids [...] from 0 to n - 1, or from 0 up."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} is {ids.dtype}: expected int64 or int32")
    if n is not None and ids.ndim < 1:
        raise ValueError(f"{name} is one number: expected [..., k]")
    if ids.numel() and (int(ids.min()) < 0 or (n is not None and int(ids.max()) >= n)):
        raise ValueError(f"{name} from {ids.min()} to {ids.max()}: expected 0 to {'...' if n is None else n - 1}")
