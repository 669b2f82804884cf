# %% [markdown]
# # Experts and routing
#
# Nearly all of the backbone is experts, and a token meets a handful of them in each layer. Three questions follow.
# Why so many and so narrow? Who decides which token goes where, and what keeps that decision from collapsing onto a
# few favourites? And what does it cost to read experts that are chosen differently by every token of a batch?
#
# This chapter runs the router of five generations from one function, the expert of the official code, the balancing
# that needs no gradient, and the placement that serving needs.

# %% tags=["hide-input"]
import itertools
import math
from fractions import Fraction

import numpy as np
import torch
from dsv41_edu.accounting import active, totals
from dsv41_edu.accounting import expert as one_expert
from dsv41_edu.claims import check, cite
from dsv41_edu.config import preset
from dsv41_edu.experiments import balancing, modality
from dsv41_edu.figures import moe as draw
from dsv41_edu.figures.benchmarks import measured, registers, timings
from dsv41_edu.figures.glue import say
from dsv41_edu.figures.tables import table
from dsv41_edu.generations import plan
from dsv41_edu.moe.balance import expert_counts, max_violation, update_bias
from dsv41_edu.moe.experts import Experts, MoE, expert, split_expert, swiglu
from dsv41_edu.moe.gate import Gate, route
from dsv41_edu.moe.placement import device_load, rebalance_experts, shared_as_routed
from dsv41_edu.moe.statistics import (
    experts_touched,
    experts_touched_simulated,
    memory_bound_batch,
    weight_bytes_per_step,
)
from kernels.counting import count_traffic
from kernels.gate import fused_gate
from kernels.launches import count_launches

torch.set_num_threads(1)  # small work: more threads only wait for one another
torch.manual_seed(0)  # of modules' first weights
config, mini = preset("v41_flash"), preset("mini")
E, k = config.n_routed_experts, config.num_experts_per_tok
held = totals(plan(config))["routed experts"].parameters / one_expert(config).parameters
say(E=E, k=k, n_experts=round(held))


def normal(*shape, seed=0):
    """Standard normal numbers in float64, the same on every machine."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


# %% [markdown]
# ## The cost, and the idea: narrow experts
#
# The model holds {glue:text}`n_experts` routed experts. A layer has {glue:text}`E`, and a token is sent to
# {glue:text}`k`. Why not sixteen wide ones and send it to two? Split each wide expert into narrow ones, and send the
# token to as many times more. Parameters and arithmetic stay; the number of teams to choose from doesn't:

# %%
check("moe.comb_16_2", math.comb(16, 2))

# %%
check("moe.comb_64_8", math.comb(16 * 4, 2 * 4))

# %%
check("moe.comb_384_6", math.comb(E, k))

# %% [markdown]
# And nothing is lost by the split. In a SwiGLU network each hidden channel works alone and the down projection adds
# them up, so any partition of the channels is a partition of the sum:
#
# ```{literalinclude} ../dsv41_edu/moe/experts.py
# :pyobject: split_expert
# ```
#
# Here a layer of wide experts is split in all ways that its width allows. Routed to the parts of the same expert, the
# split layer gives the unsplit one's output to rounding, with the very same parameters:


# %%
def same_output(m, seed):
    """A layer of 4 experts of width 12, top 2, against its split in 4m experts, top 2m."""
    x = normal(5, 8, seed=seed)
    wide = [
        tuple(normal(*s, seed=seed + i) for s in ((12, 8), (8, 12), (12, 8))) for i in range(4)
    ]
    weights, indices = route(normal(5, 4, seed=seed).sigmoid(), 2, renormalise=True)
    narrow = Experts.of([part for w in wide for part in split_expert(*w, m)], limit=0.5)
    parts = (indices[..., None] * m + torch.arange(m)).flatten(1)
    a = Experts.of(wide, limit=0.5)(x, weights, indices)
    b = narrow(x, weights.repeat_interleave(m, 1), parts)
    sizes = sum(w.numel() for e in wide for w in e) == narrow.w13.numel() + narrow.w2.numel()
    return sizes and torch.allclose(a, b, rtol=1e-12, atol=1e-12)


check(
    "moe.segmentation_invariant",
    all(same_output(m, s) for m in (1, 2, 3, 4, 6, 12) for s in range(5)),
)

# %% [markdown]
# DeepSeekMoE {cite}`deepseekmoe` was the first of the family to be built so, and set some experts apart that every
# token uses, so that the routed ones need not all learn the same common things:

# %%
first = preset("deepseekmoe_16b")
check(
    "moe.deepseekmoe16b_shape",
    [first.n_shared_experts, first.n_routed_experts, first.num_experts_per_tok],
)

# %% [markdown]
# Its experts are said to be a quarter of a standard network's width. Which standard? A SwiGLU network of $8d/3$
# channels, rounded up to a multiple of 256 as in LLaMA; the dense layer that this model itself starts with is wider.

# %%
standard = -(-8 * first.hidden_size // 3 // 256) * 256
say(own_dense=f"{first.moe_intermediate_size / first.intermediate_size:.3f}", standard=standard)
check("moe.quarter_width", Fraction(first.moe_intermediate_size, standard))

# %% [markdown]
# (Against {glue:text}`standard` channels. Measured by the model's own dense layer it would be
# {glue:text}`own_dense`.) With few of them active, it computes far less than a dense model of its quality. Counted
# as 6 FLOPs for each active parameter and training token, and attention's two products over the paper's context:


# %%
def training_tflop(matrices, layers, d, T=4096):
    """6 N T + 12 L d T^2, in TFLOP a sequence: forward and backward, head included."""
    return (6 * matrices * T + 12 * layers * d * T * T) / 1e12


llama = (
    32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
)  # LLaMA2-7B: its paper's table of sizes
ours = training_tflop(active(first), first.num_hidden_layers, first.hidden_size)
check("moe.deepseekmoe16b_flops", 100 * ours / training_tflop(llama, 32, 4096))

# %% [markdown]
# ## Shapes: the router
#
# ```{literalinclude} ../dsv41_edu/moe/gate.py
# :pyobject: route
# ```
#
# The score has changed from generation to generation, and so has what restricts the choice. One table, computed from
# the configs:

# %%
family = dict(DeepSeekMoE="deepseekmoe_16b", V2="v2", V3="v3", V4="v4_flash")
family = {name: preset(p) for name, p in family.items()} | {"V4.1": config}
lineage = []
for name, c in family.items():
    gate = Gate(
        c.replace(hidden_size=64 if c.hc_mult else c.hidden_size), layer=c.num_hidden_layers - 1
    )
    groups = f"{c.topk_group} of {c.n_group}" if c.n_group else "none"
    biases = sum(b is not None for b in (gate.bias, gate.bias_vl))
    row = (name, c.scoring_func, c.n_routed_experts, c.num_experts_per_tok, groups, biases)
    lineage.append((*row, c.norm_topk_prob, c.routed_scaling_factor, c.num_hash_layers or 0))
table("model|affinity|experts|active|groups|biases|renormalised|scale|hash layers", lineage)

# %%
scores = {row[0]: row[1] for row in lineage}
expected = dict(DeepSeekMoE="softmax", V2="softmax", V3="sigmoid", V4="sqrtsoftplus")
check("moe.affinity_lineage", scores == expected | {"V4.1": "sqrtsoftplus"})

# %% [markdown]
# ## Build it: one token, step by step
#
# A miniature gate with a bias that pushes some experts up and some down. The dashed line separates the chosen from
# the rest; the weights in the last row are made from the affinities of the first, not from the second.

# %%
gate = Gate(mini.replace(num_experts_per_tok=4)).double()
with torch.no_grad():
    gate.weight.copy_(normal(*gate.weight.shape, seed=1) * mini.hidden_size**-0.5)
gate.bias = 0.3 * normal(gate.n_experts, seed=2)
token = normal(mini.hidden_size, seed=3)
weights, chosen = gate(token)
draw.routing_steps(gate.scores(token).detach(), gate.bias, chosen, weights.detach())

# %% [markdown]
# The chosen affinities are renormalised to sum 1, then scaled, so that the routed part has the same weight whoever is
# chosen:

# %%
x = normal(1000, mini.hidden_size, seed=4)
sums = Gate(config.replace(hidden_size=192)).double()(x)[0].sum(-1)
assert torch.allclose(sums, torch.full_like(sums, config.routed_scaling_factor), rtol=1e-12)
check("moe.renormalised", round(sums.mean().item(), 9))

# %% [markdown]
# V3 also bounds how many nodes a token's experts may lie on, since each costs a message; V4 lifted the bound. Over
# many tokens, the largest number of nodes, of the eight, that one token reaches:


# %%
def nodes_reached(name, layer=10, nodes=8):
    gate = Gate(preset(name).replace(hidden_size=64), layer)
    with torch.no_grad():
        gate.weight.copy_(normal(*gate.weight.shape, seed=5))
    _, indices = gate(normal(2000, 64, seed=6).float())
    return max(len(set(row)) for row in (indices // (gate.n_experts // nodes)).tolist()), nodes


assert nodes_reached("v4_flash")[0] > preset("v3").topk_group
check("moe.node_limit", list(nodes_reached("v3")))

# %% [markdown]
# V4's first layers don't select at all: a table of token ids says who serves a token, while the weights are still the
# learned affinities of those experts. V4.1 has no such layers, and no such key in its config.

# %%
assert config.num_hash_layers is None
check("moe.hash_layers", preset("v4_flash").num_hash_layers)

# %% [markdown]
# ## Build it: the expert
#
# ```{literalinclude} ../dsv41_edu/moe/experts.py
# :pyobject: swiglu
# ```
#
# ```{literalinclude} ../dsv41_edu/moe/experts.py
# :pyobject: expert
# ```
#
# Two details decide whether a port is right. The clamp bounds the linear branch on both sides and the gate branch
# from above alone; and the routing weight multiplies *before* the down projection.

# %%
limit = config.swiglu_limit
wide = torch.linspace(-50, 50, 2001).double()
below = swiglu(wide, torch.ones_like(wide), limit)
linear = swiglu(torch.full_like(wide, 3.0), wide, limit) / swiglu(
    torch.tensor(3.0).double(), torch.tensor(1.0).double()
)
free = torch.equal(below[wide < limit], swiglu(wide, torch.ones_like(wide))[wide < limit])
two_sided = torch.allclose(linear, wide.clamp(-limit, limit))
x, w1, w2, w3 = (normal(*s, seed=i) for i, s in enumerate([(4, 8), (6, 8), (8, 6), (6, 8)]))
weight = normal(4, seed=9).abs()
before = torch.allclose(
    expert(x, w1, w2, w3, 1.0, weight), expert(x, w1, w2, w3, 1.0) * weight[:, None]
)
assert all((free, two_sided, before))
check(
    "moe.clamp", round(below.max().item() / torch.sigmoid(torch.tensor(limit).double()).item(), 9)
)

# %% [markdown]
# In exact arithmetic the weight may stand before or after the projection; in bf16 the two differ in the last bit, and
# the official code puts it before, where it meets the narrow vector.
#
# ## Keep them busy: balance
#
# A router that learns by gradient alone favours whoever was good first, and they get better. The classical cure is an
# auxiliary loss, which pulls the router's gradient away from the language. Loss-free balancing {cite}`lossfree` moves
# a bias instead, outside of any gradient, after each step and from that step's counts alone:
#
# ```{literalinclude} ../dsv41_edu/moe/balance.py
# :pyobject: update_bias
# ```

# %%
moved = update_bias(torch.zeros(4), torch.tensor([9, 1, 5, 5]))
table(
    "load|bias after", list(zip((9, 1, 5, 5), (round(b, 4) for b in moved.tolist()), strict=True))
)

# %%
check(
    "moe.bias_update_speed", update_bias(torch.zeros(2).double(), torch.tensor([0, 2]))[0].item()
)

# %% [markdown]
# The bias selects and does nothing else. Over many drawn tokens and biases, the weights of the chosen are made of
# their affinities alone, to the bit; and the loss sends no gradient to the bias:


# %%
def selects_only(seed):
    """Weights by a drawn bias against the chosen affinities' own, and whether a gradient arrives at the bias."""
    gate = Gate(mini).double()
    gate.bias = normal(gate.n_experts, seed=seed).requires_grad_()
    x = normal(50, mini.hidden_size, seed=seed + 1)
    weights, indices = gate(x)
    weights.square().sum().backward()
    chosen = gate.scores(x).gather(-1, indices)
    own = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * mini.routed_scaling_factor
    return gate.bias.grad is None and torch.equal(weights, own)


check("moe.bias_selects_only", all(selects_only(seed) for seed in range(20)))

# %% [markdown]
# It also has to look back only. If a sequence's own load moved the bias that routes the same sequence, a token's
# expert would depend on later tokens, and a language model could read its own future. Here the last token is changed:
# with the bias of finished steps no earlier choice moves; with a bias updated from the sequence itself some do.


# %%
def earlier_choices(x, peek):
    """Experts of all tokens but the last; `peek` balances with this sequence's own load before routing it."""
    gate = Gate(mini)
    with torch.no_grad():
        gate.weight.copy_(normal(*gate.weight.shape, seed=7) / 10)
    if peek:
        counts = expert_counts(gate(x)[1], gate.n_experts)
        gate.bias = update_bias(gate.bias, counts, 0.5)
    return gate(x)[1][:-1]


pairs = []
for seed in range(20):
    x = normal(16, mini.hidden_size, seed=seed).float()
    y = torch.cat([x[:-1], normal(1, mini.hidden_size, seed=seed + 99).float()])
    pairs.append(
        [torch.equal(earlier_choices(x, p), earlier_choices(y, p)) for p in (False, True)]
    )
causal, peeking = (all(column) for column in zip(*pairs, strict=True))
assert not peeking
check("moe.update_is_causal", causal)

# %% [markdown]
# The auxiliary loss stays, weak and within one sequence, against the odd sequence that sends everything to one expert.
# Its strength is where two sources disagree:

# %%
check(
    "moe.seq_aux_coefficient",
    preset("v3").aux_loss_alpha,
    why="V3's released config carries another coefficient than its report; which one trained it can't be seen here.",
)

# %% [markdown]
# ### Collapse and cure, trained
#
# A small language model with the gate and the experts of this chapter, on a real text, once without any balancing,
# with the auxiliary loss weak and strong, and loss-free; {glue:text}`n_seeds` seeds each.

# %% tags=["hide-input"]
trained = balancing.read()
seeds, arms = trained["setup"]["seeds"], list(trained["setup"]["arms"])
say(n_seeds=len(seeds), minutes=round(trained["setup"]["duration_s"] / 60))
runs = {(r["arm"], r["seed"]): r for r in trained["runs"]}
curves = {arm: [runs[arm, s]["maxvio_curve"] for s in seeds] for arm in arms}
steps = [i * trained["setup"]["curve_every"] for i in range(len(curves[arms[0]][0]))]
draw.violation_curves(curves, steps)

# %% tags=["hide-input"]
draw.load_maps({arm: runs[arm, seeds[0]]["load_map"] for arm in arms})

# %%
shown = ("maxvio", "starved", "heldout_loss", "loss_minus_none")
summary = {arm: [trained["summary"][arm][f] for f in shown] for arm in arms}
say(largest=max(abs(f[3][0]) for f in summary.values()), spread=summary["none"][2][1])
table(
    "arm, mean ± 2 sd|MaxVio|starved share|held-out loss|less that of none",
    [(arm, *(f"{m:.3f} ± {s:.3f}" for m, s in figures)) for arm, figures in summary.items()],
)

# %%
violation = {arm: trained["summary"][arm]["maxvio"][0] for arm in arms}
starved = {arm: trained["summary"][arm]["starved"][0] for arm in arms}
collapsed = starved["none"] > 0.1 and violation["none"] > 2 * violation["loss-free"]
check("moe.collapse", collapsed, holds=collapsed)

# %%
held_out = {
    a: [runs[a, s]["heldout_maxvio"] for s in seeds] for a in ("auxiliary, strong", "loss-free")
}
lower = all(free < loss for loss, free in zip(*held_out.values(), strict=True))  # seed by seed
check("moe.lossfree_maxvio", [sum(v) / len(v) for v in held_out.values()], holds=lower)

# %% [markdown]
# Collapse needs no help: whoever is ahead after the first steps takes nearly all tokens, in every arm and for every
# seed, and without a cure the router finds back only part of the way by itself.
#
# Balance is bought in all three arms that ask for it, and without bending the loss by the bias. The last column says
# what it costs in language: nothing that matters here. No arm's mean is more than {glue:text}`largest` nats from the
# unbalanced one's, where the seeds alone differ by {glue:text}`spread`, in a model trained for
# {glue:text}`minutes` processor minutes in all. The paper's two perplexities belong to a model thousands of times
# larger and can't be computed here:

# %%
cite("moe.lossfree_ppl")

# %% [markdown]
# The curves are read from a stored file. So that a stale file is noticed, its first steps are trained again right here:

# %%
live = balancing.agrees(balancing.slice_run(), runs["loss-free", 0])
assert live, "book/data/moe_balancing.json is stale: make experiments"
table("first steps, stored and live", [("agree",)])

# %% [markdown]
# ### One bias a modality
#
# Image tokens and text tokens prefer different experts. A single bias balances their *sum*, and the sum can look
# fine while images pile up. V4.1 keeps two biases, each moved by its own modality's load:

# %% tags=["hide-input"]
one_bias, two_biases = modality.read()["runs"]
draw.modality_curves(one_bias["maxvio"], two_biases["maxvio"])

# %%
ends = {n: modality.run(i)["end_maxvio"] for i, n in ((1, "one bias"), (2, "two"))}  # again, live
hidden = ends["one bias"]["total"] < ends["one bias"]["image"] / 3
removed = ends["two"]["image"] < ends["one bias"]["image"] / 3
check("moe.modality_bias", bool(hidden and removed))

# %% [markdown]
# ## Serve it: which experts does a batch touch?
#
# Every token reads its own experts, but a batch reads each expert once. How many different ones does a batch touch?
# By simulation, as the article does it, and in closed form, $E\big(1-(1-k/E)^B\big)$:

# %%
batches = [1, 8, 64, 256, 1024]
drawn = experts_touched_simulated(E, k, batches)
closed = [experts_touched(E, k, b) for b in batches]
check("moe.touched_simulated", drawn)

# %%
check("moe.touched_closed", closed)

# %%
check("moe.touched_percent", [100 * n / E for n in closed])

# %% [markdown]
# The simulated figure for eight tokens and the closed one differ in their last digit: one is the mean of some hundred
# draws, the other of all.

# %%
one = one_expert(config)
machines = {"H200, FP8": (1.98e15, 4.8e12), "half the bandwidth": (1.98e15, 2.4e12)}
knees = {n: memory_bound_batch(E, k, one.parameters, one.nbytes, *m) for n, m in machines.items()}
draw.touched_by_batch(E, k, knees)

# %%
reads = [
    weight_bytes_per_step(one.nbytes, experts_touched(E, k, b)) for b in (1, 64, 256, 512, 1024)
]
growth = [b / a for a, b in itertools.pairwise(reads)]
check("moe.weight_traffic_flattens", growth[0] > 30 and growth[-1] < 1.001)

# %% [markdown]
# ## Serve it: hot experts get replicas
#
# In a deployment the experts lie on many devices, and a step ends when the busiest device does. V3's prefill unit is
# 32-way expert parallel and gives each device one slot more than its share: the hottest experts are held twice. The
# balancer's algorithm {cite}`eplb` is replication, then packing; `rebalance_experts` is it. On a skewed load:

# %%
devices, slots = 32, 9  # V3's prefill unit: 8 experts and one redundant on each device
load = 1000.0 / torch.arange(1, 257) ** 0.7
load = load[np.random.default_rng(11).permutation(256)].unsqueeze(0)
placement = rebalance_experts(load, devices * slots, n_groups=8, n_nodes=4, n_gpus=devices)
before = device_load(load, torch.arange(256).unsqueeze(0), devices)[0]
after = device_load(load, placement.physical_to_logical, devices)[0]
draw.device_loads(before, after, ("256 slots", "288 slots"))

# %%
minutes = 10  # between two placements: the report's, an input here
redundant = len(placement.physical_to_logical[0]) - load.shape[1]
assert after.max() < before.max()
check("moe.redundant_experts", [redundant, minutes])

# %% [markdown]
# A new placement must be invisible: the gate maps the chosen experts to their replicas, and the layer's output is
# what it was. And at decode the shared expert may become a routed one that every token picks, so that one grouped
# product serves all:


# %%
def as_routed():
    moe, x = MoE(mini).double(), normal(20, mini.hidden_size, seed=12)
    weights, indices = shared_as_routed(*moe.gate(x), moe.gate.n_experts)
    merged = Experts(
        moe.gate.n_experts + 1, *x.shape[1:], mini.moe_intermediate_size, mini.swiglu_limit
    ).double()
    with torch.no_grad():
        merged.w13.copy_(torch.cat([moe.experts.w13, moe.shared_experts.w13]))
        merged.w2.copy_(torch.cat([moe.experts.w2, moe.shared_experts.w2]))
    return torch.allclose(merged(x, weights, indices), moe(x), rtol=1e-12, atol=1e-12)


check("moe.shared_as_routed", as_routed())

# %% [markdown]
# ## Fuse it
#
# Eagerly, a gate is a chain of small operations, each a launch on a GPU that reads and writes its intermediate result
# in memory. The fused kernel does product, affinity, bias, choice, weights and placement in one, so a token's logits
# never leave the chip. The serving report counts the kernels of a whole layer in this way:

# %%
cite("moe.kernels_per_layer")

# %% [markdown]
# Ties are what a fused top-k gets wrong first. The kernel makes one integer of a score and an expert's id, such that
# the greater integer is the greater score, or the lower id where the scores are equal; then the maximum of integers
# is all that it needs:
#
# ```{literalinclude} ../kernels/gate.py
# :pyobject: sort_keys
# ```
#
# It reads each token's channels once and the router's matrix once for a block of tokens, and writes nothing but the
# chosen ids and their weights. Without a GPU it runs in Triton's interpreter, which is
# slow and exact, so the page can hold it against the reference:

# %%
gate, x = gate.float(), normal(8, mini.hidden_size, seed=20).float()
with torch.no_grad():
    weights, indices = gate(x)
options = dict(top_k=gate.top_k, scoring_func=gate.scoring_func, renormalise=True, scale=1.5)
fused = fused_gate(x, gate.weight.detach(), gate.bias, **options)
same = torch.equal(indices, fused[1]), torch.allclose(weights, fused[0], rtol=1e-5)
table(
    "fused gate and reference|agree",
    list(zip(("experts", "weights, to 1e-5"), same, strict=True)),
)

# %% [markdown]
# Now count both: the operations that torch dispatches for the reference and would launch, views and allocations left
# out; the launches of the fused form; and every element that the kernel loads and stores, which the interpreter sees.

# %%
W, b = gate.weight.detach(), gate.bias
with count_launches() as eager, torch.no_grad():
    gate(x)
with count_launches() as launched, count_traffic(x=x, W=W, b=b) as moved:
    fused_gate(x, W, b, **options)
moved["weights"], moved["ids"] = (moved.pop(f"allocated {t}") for t in ("float32", "int64"))
rows = [(name, t.loaded, t.stored, t.loaded_bytes + t.stored_bytes) for name, t in moved.items()]
say(eager_gate=eager.total(), fused_gate=launched.total())
table("fused gate, 8 tokens|elements loaded|stored|bytes", rows)

# %% [markdown]
# Eagerly that is {glue:text}`eager_gate` launches, fused {glue:text}`fused_gate`.

# %% [markdown]
# The experts are three kernels: gather, both products and the clamped SwiGLU; the down product; and the sum of each
# token's rows, in a fixed order, so that two runs are equal to the bit where floating-point atomics would not be.
# Weights are read as the checkpoint stores them, FP8 or FP4, and decoded on the way. At the official sizes, compiled
# for real targets without one of them at hand, nothing spills:

# %%
registers("gate", "experts")

# %% [markdown]
# On a CPU the experts are grouped: pairs sorted by expert, one product for all. Beside the naive loop and the public
# library's V4 block, with the same weights; and the gate, eager and compiled, beside the library's router. With few
# tokens the eager gate pays for lowest-id ties and the refusal of NaN, which the library doesn't promise:

# %%
say(measured=measured("moe."))
timings("moe.")

# %% [markdown]
# Measured on {glue:text}`measured`.
#
# ## Break it
#
# Faults that were really made, one by one. A bias that leaks into the weights hands most of a token to the expert
# that balancing wanted to be *chosen* more often; a clamp from below changes experts whose gate is far negative; a
# hash table that is cast with the rest of the model to bf16 sends tokens to experts that don't exist; and a
# top-k that doesn't break ties by the lowest id makes two engines disagree on the same input.

# %%
s, b = torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([0.0, 0.0, 0.0, 3.0])
right, chosen = route(s, 2, bias=b, renormalise=True)
wrong = (s + b)[chosen] / (s + b)[chosen].sum()
deep, one_up = torch.tensor(-30.0), torch.tensor(1.0)
below = swiglu(deep.clamp(-limit, limit), one_up)

# %%
rows = [
    ("bias in the weights", right.numpy().round(3), wrong.numpy().round(3)),
    ("gate clamped from below", f"{swiglu(deep, one_up, limit):.1e}", f"{below:.1e}"),
    ("hash table in bf16", 383, int(torch.tensor(383).bfloat16())),
    ("all affinities equal", route(torch.full((384,), 0.5), 6)[1].numpy(), "what topk likes"),
]
table("fault|right|wrong", [(name, str(a), str(z)) for name, a, z in rows])

# %% [markdown]
# ## Test yourself
#
# ```{exercise}
# :label: moe-half
#
# At which batch size does a step touch half of the experts, under uniform routing?
# ```
#
# ````{solution-start} moe-half
# :class: dropdown
# ````

# %%
half = next(b for b in range(1, 10_000) if experts_touched(E, k, b) >= E / 2)
table("experts touched|at a batch of", [(f"half of {E}", half)])

# %% [markdown]
# ````{solution-end}
# ````
#
# ```{exercise}
# :label: moe-collapse
#
# If all tokens go to the same experts, what is the load violation, and what is it at perfect balance?
# ```
#
# ````{solution-start} moe-collapse
# :class: dropdown
# ````

# %%
same = expert_counts(torch.arange(k).expand(100, k), E)
table("load|violation", [("collapsed", round(max_violation(same).item(), 3)), ("balanced", 0.0)])

# %% [markdown]
# ````{solution-end}
# ````
#
# ## References
#
# Fine-grained and shared experts: {cite}`deepseekmoe`; device-limited routing: {cite}`v2`; sigmoid affinities, the
# selection bias and the node limit: {cite}`v3` and {cite}`lossfree`; hash layers and the clamp: {cite}`v4`; one bias a
# modality: {cite}`v41`; the balancer: {cite}`eplb`.
