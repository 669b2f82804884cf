# %% [markdown]
# # Residual streams: hyper-connections, mHC and the single pass
#
# A plain residual network keeps one vector per token and adds to it. Hyper-connections keep several, and learn how a
# sublayer reads them, how it writes to them, and how they mix. Left free, that mixing explodes with depth; held to a
# polytope it cannot. And since every seam touches all streams, how often they go through memory decides what it costs.
#
# This chapter runs the maps of the official code, measures the explosion and its cure, and walks through a kernel that
# reads and writes each stream once.

# %% tags=["hide-input"]
import itertools
import math

import numpy as np
import torch
from dsv41_edu.claims import check, cite
from dsv41_edu.config import preset
from dsv41_edu.experiments import mhc_depth
from dsv41_edu.figures import mhc as draw
from dsv41_edu.figures.benchmarks import measured, registers, timings
from dsv41_edu.figures.glue import say
from dsv41_edu.figures.tables import table
from dsv41_edu.mhc import traffic
from dsv41_edu.mhc.hyper_connections import HyperConnection
from dsv41_edu.mhc.seam import Seam, coefficients, collapse, expand, one_hot, single_pass
from dsv41_edu.mhc.sinkhorn import birkhoff, largest_error, sinkhorn, sinkhorn_paper
from kernels.counting import count_traffic
from kernels.launches import count_launches
from kernels.multi_pass import four_pass, two_pass
from kernels.seam import fused_single_pass
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

torch.set_num_threads(1)  # small work: more threads only wait for one another
torch.manual_seed(0)  # of modules' first weights
config = preset("v41_flash")
DTYPES = dict(bfloat16=torch.bfloat16, float32=torch.float32)
n, d, iterations = config.hc_mult, config.hidden_size, config.hc_sinkhorn_iters
say(n=n, d=f"{d:,}", seams=traffic.seams(config), iterations=iterations)


def normal(*shape, seed=0):
    """Standard normal numbers in float64, the same on every machine."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


# %% [markdown]
# ## The cost, and the idea: more than one stream
#
# Two places for the norm of a residual block, two diseases. Before the sublayer (pre-norm), the stream grows with
# depth and each layer adds relatively less: neighbours become alike. After the addition (post-norm), each layer
# rescales all that came before, and the shortcut from an early layer to the last, for values and for gradients, fades
# as the product of these factors. Both on random sublayers:


# %%
def stack(post_norm, layers=48, width=64):
    """Streams of a random residual stack, and the factor of the shortcut from each of them to the last."""
    streams, factors = [normal(64, width)], []
    for i in range(layers):
        w = normal(width, width, seed=i + 1) * width**-0.5
        y = streams[-1] + torch.tanh(F.rms_norm(streams[-1], (width,)) @ w)
        factors.append(1 / y.square().mean().sqrt().item() if post_norm else 1.0)
        streams.append(F.rms_norm(y, (width,)) if post_norm else y)
    return streams, np.cumprod([1.0, *factors[::-1]])[::-1].tolist()


streams, pre_norm = stack(post_norm=False)
alike = [F.cosine_similarity(a, b).mean().item() for a, b in itertools.pairwise(streams)]
draw.seesaw(alike, {"pre-norm": pre_norm, "post-norm": stack(post_norm=True)[1]})

# %% [markdown]
# Hyper-connections {cite}`hc` widen the residual instead: $n$ streams $X_1 \dots X_n$ of the hidden size. A sublayer
# reads a weighted sum of them, its output is given to each with a weight, and between the two they mix:
#
# $$
# z = \sum_c \mathrm{pre}_c X_c, \qquad
# X'_k = \mathrm{post}_k F(z) + \sum_j \mathrm{comb}_{jk} X_j .
# $$

# %%
draw.seam(n, d)

# %% [markdown]
# With one stream and all maps 1 that is the plain residual. It is also the only choice that the constraint below
# leaves for one stream, since the only doubly stochastic matrix of one number is 1:

# %%
x, out = normal(5, 1, 8), normal(5, 8, seed=1)
ones, unit = torch.ones(5, 1).double(), torch.ones(5, 1, 1).double()
plain = torch.equal(collapse(x, ones), x[:, 0]) and torch.equal(
    expand(out, x, ones, unit)[:, 0], x[:, 0] + out
)
check("mhc.identity_at_one", plain and bool((sinkhorn_paper(50 * normal(1000, 1, 1)) == 1).all()))

# %% [markdown]
# The maps are numbers made from the streams by a small projection, plus learned constants. The projection's part
# starts at a hundredth, so that a fresh seam is nearly the plain residual and departs from it as it learns:

# %%
check("mhc.starts_as_residual", round(Seam(n, 8).scale[0].item(), 6))

# %% [markdown]
# What it costs is small. In the first paper's model, a mixture of 64 experts with 8 active, the connections add almost
# no parameters. FLOPs are counted as torch counts them, matrix products alone, on both sides; the products with the
# input and output maps are elementwise and would add a fifth.


# %%
def olmoe(d=2048, layers=16, expert=1024, active=8, experts=64, vocab=50304):
    """Parameters that a token uses in OLMoE-1B-7B: attention, router, chosen experts, head (its paper)."""
    return layers * (4 * d * d + experts * d + active * 3 * d * expert) + vocab * d


connection = HyperConnection(n=4, d=2048)
added = 2 * 16 * sum(p.numel() for p in connection.parameters())
check("mhc.hc_param_cost", 100 * added / olmoe())

# %%
with FlopCounterMode(display=False) as counter, torch.no_grad():
    connection(torch.zeros(1, 4, 2048), lambda z: z)
check("mhc.hc_flop_cost", 100 * 2 * 16 * counter.get_total_flops() / (2 * olmoe()))

# %%
cite("mhc.hc_speed")

# %% [markdown]
# ## The explosion
#
# From layer $l$ to layer $m$ a stream passes the product of the residual maps between them. Nothing in a free map
# keeps that product near 1. Take maps that are the identity plus a little noise, as training leaves them, and follow
# the *composite gain*: the largest absolute row sum of the product. Beside it, the same noise in the logits of maps
# that Sinkhorn makes doubly stochastic.


# %%
def composite_gain(maps):
    """Largest absolute row sum of the product of maps [L, n, n], after each of them."""
    product, gains = torch.eye(maps.shape[-1], dtype=maps.dtype), []
    for each in maps:
        product = product @ each
        gains.append(product.abs().sum(-1).max().item())
    return gains


L = traffic.seams(config)
noise = [0.2 * normal(L, n, n, seed=s) for s in range(5)]
free = [composite_gain(torch.eye(n) + e) for e in noise]
held = [composite_gain(sinkhorn(3 * torch.eye(n) + e)) for e in noise]
draw.gains(
    {"free maps": free, "doubly stochastic maps": held},
    range(1, L + 1),
    "seams passed",
    "composite gain",
    "The gain of free maps grows exponentially with depth; that of doubly stochastic maps stays at one.",
    "Gain of the product of residual maps: mean and range of five draws.",
)

# %% [markdown]
# ## The polytope
#
# mHC {cite}`mhc` projects the residual map onto the doubly stochastic matrices: no entry negative, all rows and
# columns summing to 1. These form a polytope whose corners are the permutations of the streams. Sinkhorn's
# iteration, which normalises rows and columns in turn {cite}`sinkhorn`, walks any positive matrix into it:

# %%
paths = []
for seed in range(5):
    logits = 1.6 * normal(3, 3, seed=seed)
    start = 3 * logits.exp() / logits.exp().sum()
    paths.append(torch.stack([start] + [sinkhorn_paper(logits, i) for i in range(1, 8)]).numpy())
draw.polytope(paths)

# %% [markdown]
# ```{literalinclude} ../dsv41_edu/mhc/sinkhorn.py
# :pyobject: sinkhorn_paper
# ```
#
# Three properties make it the right set. No direction is amplified, since the spectral norm is at most 1; the set is
# closed under products, so neither are many layers; and each matrix is a convex combination of permutations
# {cite}`birkhoff`, so what the streams hold together is only passed around.

# %%
many = sinkhorn_paper(2 * normal(500, n, n), iterations=500)
norms = torch.linalg.matrix_norm(many, ord=2)
check("mhc.spectral_norm", round(norms.max().item(), 12))

# %%
products = torch.linalg.multi_dot(list(many[:L]))
sums = torch.cat(
    [(many[:250] @ many[250:]).sum(dim) for dim in (-1, -2)] + [products.sum(-1)[None]]
)
doubly = torch.allclose(sums, torch.ones_like(sums), rtol=0, atol=1e-12)
check("mhc.closed_under_product", doubly and bool((products >= 0).all()))


# %%
def rebuilt(matrix):
    """Whether the matrix is its Birkhoff decomposition, with weights that sum to 1."""
    weights, corners = birkhoff(matrix)
    again = torch.zeros_like(matrix)
    for w, p in zip(weights, corners, strict=True):
        again[torch.arange(n), p] += w
    return torch.allclose(again, matrix, atol=1e-12) and abs(weights.sum().item() - 1) < 1e-12


X = normal(n, 64, seed=5)
kept = torch.allclose((many.mT @ X).mean(1), X.mean(0).expand(500, -1), atol=1e-12)
check("mhc.birkhoff", kept and all(rebuilt(m) for m in many[:50]))

# %%
weights, corners = birkhoff(sinkhorn_paper(normal(n, n)))
table(
    "weight|stream i goes to",
    [(f"{w:.4f}", p.numpy()) for w, p in zip(weights, corners, strict=True)],
)

# %% [markdown]
# ## Check it: the article's demonstration
#
# A seeded matrix of logits, exponentiated, its rows and columns normalised in turn. The columns come last, so their
# sums are exact; the largest error of a row sum shows how far the iteration went:

# %%
generator = np.random.default_rng(0)
logits, X = (torch.from_numpy(generator.standard_normal(s)) for s in ((4, 4), (4, 8)))
check("mhc.sinkhorn_rows", [largest_error(sinkhorn_paper(logits, i), -1) for i in (1, 5, 20)])

# %%
M = sinkhorn_paper(logits, 20)
powers = torch.linalg.matrix_power(M, L)
check("mhc.sinkhorn_norm", [torch.linalg.matrix_norm(m, ord=2).item() for m in (M, powers)])

# %%
after = (M @ X).mean(0)
assert torch.allclose(after, X.mean(0), atol=1e-12)
check("mhc.mean_conserved", after[:4].tolist())

# %% [markdown]
# ## The deployed form
#
# What runs in the model differs in three ways: a softmax in place of the exponential and the first normalisation of
# the rows, so that no logit overflows; an eps after it and in every division; and the columns last, as above.
#
# ```{literalinclude} ../dsv41_edu/mhc/sinkhorn.py
# :pyobject: sinkhorn
# ```

# %%
check("mhc.sinkhorn_iters", iterations)


# %%
def shown(error):
    return f"{error:.1e}" if error > 1e-15 else "rounding"


rows = []
for i in (1, 5, 20):
    pair = sinkhorn_paper(logits, i), sinkhorn(logits, i)
    rows.append((i, *(shown(largest_error(m, dim)) for m in pair for dim in (-1, -2))))
table("iterations|paper, rows|paper, columns|deployed, rows|deployed, columns", rows)

# %% [markdown]
# The columns miss 1 by the eps, whatever the iterations; the rows only converge. How fast depends on how far apart
# the logits are. The sum over a column is what makes each new stream a mixture of the old ones, with weights that sum
# to 1: that holds always. The sum over a row is what conserves the mean over the streams: that holds as far as the
# iteration went, and with large logits it doesn't:

# %%
scales = {str(s): s * normal(4, 4) for s in (1, 3, 10, 30)}
errors = {
    s: [largest_error(sinkhorn_paper(x, i), -1) for i in range(1, 41)] for s, x in scales.items()
}
draw.convergence(errors, iterations)

# %% [markdown]
# ## Build it: the maps of a seam
#
# ```{literalinclude} ../dsv41_edu/mhc/seam.py
# :pyobject: coefficients
# ```
#
# Per seam it takes the streams of {glue:text}`n` times {glue:text}`d` channels to three maps, by one matrix whose
# columns belong to `pre`, `post` and `comb`:

# %%
seam = Seam(n, 32).double()
with torch.no_grad():
    seam.fn.copy_(normal(*seam.fn.shape, seed=7) / n / 32**0.5)
    seam.base.copy_(normal(*seam.base.shape, seed=8))
    seam.scale.fill_(1)
check("mhc.columns", seam.base.numel())

# %%
pre, post, comb = seam.coefficients(normal(3, n, 32, seed=9))
shapes = [(name, list(m.shape)) for name, m in dict(pre=pre, post=post, comb=comb).items()]
table("map|shape for 3 tokens", shapes)

# %% [markdown]
# The input map is a sigmoid, the output map twice a sigmoid, so neither can be negative and cancel what another
# stream says, whatever the logits:


# %%
def non_negative(scale):
    """Whether pre and post of extreme products are within their bounds."""
    wild = seam.fn.detach(), scale * seam.base.detach(), scale * torch.ones(3).double()
    pre, post, _ = coefficients(normal(100, n, 32, seed=10), *wild)
    return bool(((pre >= 0) & (pre <= 1 + 1e-5)).all() and ((post >= 0) & (post <= 2)).all())


check("mhc.input_output_maps", all(non_negative(s) for s in (0.0, 1.0, -50.0, 1e4)))

# %% [markdown]
# ## The shift by one seam
#
# In V4 a seam computes its three maps from the streams and uses all three: the streams must be there before `pre` is,
# so they are read twice. V4.1 lets a seam collapse with the `pre` that the *previous* seam predicted, and shifts
# nothing else. Then, while the new streams are being made, everything that the next sublayer's input needs is known.

# %%
draw.shift()

# %% [markdown]
# Proved by running both: the formulas, with the seam from which each map is taken spelled out as a lag, against the
# order in which a kernel works, from one sublayer's output to the next one's input. The first seam collapses with
# stream 0 alone, which is the embedding; the last collapse uses the last seam's `pre`, so V4.1 needs no head mix.


# %%
def fresh(seed):
    """A seam with parameters of order 1, so that its maps differ from token to token."""
    seam = Seam(n, 32).double()
    with torch.no_grad():
        seam.fn.copy_(normal(*seam.fn.shape, seed=seed) / (n * 32) ** 0.5)
        seam.base.copy_(normal(*seam.base.shape, seed=50 + seed))
        seam.scale.fill_(1)
    return seam.requires_grad_(False)


def sublayer(s):
    """A fixed nonlinear F for seam s."""
    return lambda z: torch.tanh(z @ normal(32, 32, seed=100 + s) / 32**0.5)


# %%
def by_lags(streams, seams, lags):
    """Streams after all seams, and the head's input; lags: how many seams ago pre, post, comb were made."""
    plain = streams.new_ones(len(streams), n), torch.eye(n).double().expand(len(streams), n, n)
    maps = [(one_hot(streams, torch.float64), *plain)]
    for s, seam in enumerate(seams):
        maps.append(seam.coefficients(streams))
        pre, post, comb = (maps[-1 - lag][i] for i, lag in enumerate(lags))
        streams = expand(sublayer(s)(collapse(streams, pre)), streams, post, comb)
    return streams, collapse(streams, maps[-1][0])


# %%
def by_passes(streams, seams):
    """V4.1 in the order of the fused kernel; after the last sublayer nothing is projected."""
    z, (pre, post, comb) = streams[:, 0], seams[0].coefficients(streams)
    for s, seam in enumerate(seams[1:]):
        following = seam.fn, seam.base, seam.scale
        # the new streams are collapsed with the pre that was made before them
        done = single_pass(sublayer(s)(z), streams, post, comb, pre, *following)
        streams, z, pre, post, comb = done
    streams = expand(sublayer(len(seams) - 1)(z), streams, post, comb)
    return streams, collapse(streams, pre)


def by_seams(streams, seams, shifted):
    """As the model is built: each seam around its sublayer, with the pending map or without."""
    pending = one_hot(streams, torch.float64)
    for s, seam in enumerate(seams):
        streams, pending = seam(streams, sublayer(s), pending if shifted else None)
    return streams, collapse(streams, pending)


# %%
def close(a, b):
    return all(torch.allclose(x, y, rtol=1e-12, atol=1e-12) for x, y in zip(a, b, strict=True))


embedding = normal(6, 32, seed=12).unsqueeze(1).expand(-1, n, -1)
seams = [fresh(s) for s in range(8)]
formula = by_lags(embedding, seams, (1, 0, 0))
same = close(formula, by_passes(embedding, seams)) and close(
    formula, by_seams(embedding, seams, True)
)
multi = close(by_lags(embedding, seams, (0, 0, 0)), by_seams(embedding, seams, False))
wrong = [
    close(formula, by_lags(embedding, seams, lags)) for lags in ((0, 0, 0), (1, 1, 0), (1, 0, 1))
]
check("mhc.single_pass_shift", same and multi and not any(wrong))

# %% [markdown]
# ## Watched in training
#
# Stacks of {glue:text}`sublayers` sublayers, deep and narrow, trained on the shipped text from the same first weights
# and batches; only the connection differs. Besides the ordinary start, two harsher regimes, alike for both kinds of
# connection: the projected part of the maps starts at full scale instead of a hundredth, and the connections learn
# {glue:text}`hot` or {glue:text}`extreme` times as fast. What follows are means over {glue:text}`n_seeds` seeds.

# %%
trained = mhc_depth.read()
setup = trained["setup"]
runs = {(r["regime"], r["arm"], r["seed"]): r for r in trained["runs"]}
say(sublayers=2 * setup["layers"], n_seeds=len(setup["seeds"]))
say(**{name: f"{setup['regimes'][name]['rate']:g}" for name in ("hot", "extreme")})


def curves(regime, curve, arms=("HC", "mHC multi-pass", "mHC single-pass")):
    """Curves by arm, one a seed; what overflowed is left out."""
    kept = {arm: [runs[regime, arm, s]["curves"][curve] for s in setup["seeds"]] for arm in arms}
    return {
        arm: [[math.nan if v is None else v for v in c] for c in of] for arm, of in kept.items()
    }


def by_regime(regime):
    each = curves(regime, "backward")
    steps = [setup["curve_every"] * i for i in range(len(each["HC"][0]))]
    words = f"Gain over training, {regime} start: free maps grow, mHC stays near one."
    caption = (
        f"Largest composite gain over training, {regime} start: mean and range of the seeds."
    )
    return draw.gains(each, steps, "training step", "composite gain", words, caption)


by_regime("ordinary")

# %%
by_regime("hot")

# %% [markdown]
# The mHC paper saw a composite gain in the thousands on its large model, and held it near one and a half:


# %%
def peak(regime, arm, pick=max):
    """The largest composite gain of an arm's runs, forward or backward."""
    gains = [
        max(r["max_forward"], r["max_backward"])
        for k, r in runs.items()
        if k[:2] == (regime, arm)
    ]
    return pick(gains)


single = "mHC single-pass"
free_gain, held_gain = peak("ordinary", "HC", min), peak("ordinary", single)
check("mhc.unconstrained_gain", peak("ordinary", "HC"), holds=free_gain > 3 * held_gain)

# %%
worst = max(peak(regime, single) for regime in ("ordinary", "hot", "extreme"))
check("mhc.constrained_gain", worst, holds=1 <= worst < n)

# %%
cite("mhc.loss_surge_step")

# %%
cite("mhc.loss_gain")

# %%
cite("mhc.train_overhead")

# %% [markdown]
# And the loss? Against the plain residual of the same seed, with twice the standard deviation over the seeds beside
# it. A difference that is smaller than that is no difference that these runs can see:


# %%
def told(row):
    """A row of the table: loss, difference to plain, what it says."""
    loss, less = row["heldout_loss"], row["loss_minus_plain"]
    if loss is None:
        return row["regime"], row["arm"], "diverged", "", ""
    if row["arm"] == "plain":
        return row["regime"], "plain residual", f"{loss[0]:.3f}", "", ""
    seen = (
        "lower" if less[0] < -less[1] else "higher" if less[0] > less[1] else "no difference seen"
    )
    return row["regime"], row["arm"], f"{loss[0]:.3f}", f"{less[0]:+.3f} ± {less[1]:.3f}", seen


table("start|connection|held-out loss|less plain|so", [told(row) for row in trained["summary"]])

# %% [markdown]
# So small a model hardly needs more streams; a large one gained. Nor does a large gain hurt by itself in so short a
# training: with residual maps enlarged at the start, HC's gain is in the millions, and its loss is the lowest. What
# the runs show is the mechanism: free maps drift to gains that mHC's cannot reach, at the ordinary start already, and
# where they learn fast the gain runs away and the loss goes with it. (At the ordinary start mHC's maps hardly leave
# the identity, so its gain of one says little there; where they learn fast they do mix, and it still stays.) The first steps are trained again right here, so that a stale file is noticed:

# %%
live = mhc_depth.agrees(mhc_depth.slice_run(), runs["ordinary", "HC", 0])
assert live, "book/data/mhc_depth.json is stale: make experiments"

# %% [markdown]
# ## Traffic
#
# A token passes {glue:text}`seams` seams, and at each the streams go through memory. What must move at least: all
# streams and the sublayer's output in, all streams and the next input out.

# %%
check("mhc.seams", traffic.seams(config))

# %%
forms = {
    "single pass": traffic.floor,
    "two passes": traffic.two_pass,
    "separate": traffic.separate,
}
check("mhc.floor", [form(n, d) // d for form in forms.values()])

# %%
draw.traffic(
    {
        "single pass": {"streams": 2 * n, "F's output": 1, "next input": 1},
        "two passes": {"streams": 3 * n, "F's output": 1, "next input": 1},
        "separate": {"streams": 4 * n, "F's output": 1, "next input": 3},
    }
)

# %%
check("mhc.floor_elements", traffic.floor(n, d))

# %%
check("mhc.token_elements", traffic.seams(config) * traffic.floor(n, d) / 1e6)

# %%
bf16 = 2  # bytes
moved = [
    traffic.seams(config) * form(n, d) * bf16 / 2**20
    for form in (traffic.floor, traffic.separate)
]
check("mhc.token_mib", moved)

# %% [markdown]
# Formulas are promises. Here are the three forms as kernels of this package, run in Triton's interpreter, which sees
# every element that they load and store; counted are the streams, the sublayer's output and the next input, not the
# parameters and the few coefficients. (The single pass hands on its next input with the norm's factor beside it: the
# factor is applied after the next product, as `fn`'s own is. The other two apply the norm, which costs the two-pass
# form nothing, since it holds the whole vector, and the separate form two more.)


# %%
def counted(form, T=16, width=64):
    """Elements of bf16 streams, output and input that a form moves per token and channel."""
    streams, out = normal(T, n, width).bfloat16(), normal(T, width, seed=1).bfloat16()
    seam = Seam(n, width).requires_grad_(False)
    pre, post, comb = seam.coefficients(streams)
    shared = dict(post=post, comb=comb, fn=seam.fn, base=seam.base, scale=seam.scale)
    more = {"pending": pre} if form is fused_single_pass else {"norm_weight": torch.ones(width)}
    with count_traffic(out=out, streams=streams, **shared, **more) as seen:
        form(out=out, streams=streams, **shared, **more)
    big = [seen[name] for name in ("out", "streams", "allocated bfloat16")]
    return sum(t.loaded + t.stored for t in big) / (T * width)


check("mhc.floor_counted", [counted(form) for form in (fused_single_pass, two_pass, four_pass)])

# %% [markdown]
# ## Launches
#
# Written naively, a seam is mostly launches: each of the {glue:text}`iterations` iterations is a sum, an addition and
# a division, twice. A serving project counted them before and after fusing:

# %%
cite("mhc.launches_step")

# %%
cite("mhc.launches_layer")

# %%
cite("mhc.launches_share")

# %% [markdown]
# The rows don't add up: they sum to less than the layer's total, since that total is the step's, over the layers, and
# some hundreds of launches lie outside of them; and the share was taken of the rows' sum, not of the total. Counted
# the same way, one of our seams, eager and fused:

# %%
streams, out = normal(4, n, 64).bfloat16(), normal(4, 64, seed=1).bfloat16()
whole = Seam(n, 64).requires_grad_(False)
pre, post, comb = whole.coefficients(streams)
arguments = out, streams, post, comb, pre, whole.fn, whole.base, whole.scale
with count_launches() as eager:
    F.rms_norm(single_pass(*arguments)[1], (64,))
with count_launches() as fused:
    fused_single_pass(*arguments)
seen = [eager.total(), fused.total()]
why = "ours counts the norm and every copy, and adds no eps in place; fused it is three kernels, one for the splits"
check("mhc.launches_seam", seen, why=why)

# %%
rows = [(name, count) for name, count in eager.most_common(8)]
rows += [("all others", eager.total() - sum(count for _, count in rows))]
table("operation of the eager seam|launches", rows)

# %%
steps = traffic.seams(config)
rows = [
    ("a seam", *seen),
    ("a layer", *(2 * x for x in seen)),
    ("a step", *(steps * x for x in seen)),
]
table("launches for|eager|fused", rows)

# %% [markdown]
# ## Fuse it
#
# The kernel that makes the single pass has a tile of tokens and some channels. It loads those channels of the old
# streams and of the sublayer's output once. All the maps that it needs are known before it starts: that is what the
# shift by one seam bought.
#
# ```{literalinclude} ../kernels/seam.py
# :pyobject: mixed
# ```
#
# The new streams are rounded and stored, collapsed with the pending map, and multiplied with `fn` while they are
# still in registers. A tile sees a part of the channels, so its products are parts of sums:
#
# ```{literalinclude} ../kernels/seam.py
# :pyobject: stream
# ```
#
# A second kernel adds the parts in a fixed order, since floating-point atomics would make two runs differ. Splits
# have the same channels whatever the batch, so a token's bits don't depend on who else is in it. The third takes a
# token's products to its maps, all of Sinkhorn's iterations in registers:
#
# ```{literalinclude} ../kernels/sinkhorn.py
# :pyobject: sinkhorn_tile
# ```
#
# Held against the reference in float64, fed the same bits:

# %%
found, exact = fused_single_pass(*arguments), single_pass(*(a.double() for a in arguments))
names = "streams", "z", "pre", "post", "comb"
rows = []
for name, value in zip(names, exact, strict=True):
    ours = getattr(found, name)
    error = ((ours.double() - value).norm() / value.norm()).item()
    bound = 2**-8  # half a step of bf16 is at most 2^-9
    if ours.dtype == torch.float32:  # the maps are of rounded streams, too, but times their scale
        bound *= whole.scale.max().item()
    rows.append((name, str(ours.dtype).removeprefix("torch."), "yes" if error < bound else error))
table("output|dtype|relative error within its bound", rows)

# %% [markdown]
# The backward pass recomputes the new streams from the old ones and the output rather than storing them, and adds the
# gradient of `fn` over tokens in a fixed order too. Compiled for real targets at the official size, nothing spills:

# %%
registers("seam", "seam_backward", "multi_pass", "hyper_connections", "sinkhorn")

# %% [markdown]
# ## Serve it
#
# On a CPU, `torch.compile` makes of the reference what the kernels do on a GPU. Beside the eager reference, the public
# library's V4 seam with the same weights, and the mHC of a package that is widely used:

# %%
say(measured=measured("mhc."))
timings("mhc.seam")

# %% [markdown]
# Measured on {glue:text}`measured`. A training step, forward and backward, needs less memory too,
# since what is cheap is computed again:

# %%
timings("mhc.train")

# %% [markdown]
# ## Break it
#
# Four faults that were really made. The map transposed: with a permutation as map and a sublayer that says nothing,
# the streams must come out permuted, and a transposed map permutes them the other way; equal logits would never show
# it. The eps dropped: a column whose entries all underflow is divided by zero. The maps in bf16: each seam's error is
# small, and the streams pass many. And the wrong map shifted: the output map of the previous seam belongs to another
# sublayer.

# %%
cycle = torch.eye(n).double()[[1, 2, 3, 0]].expand(6, n, n)
streams, silent = normal(6, n, 32, seed=20), torch.zeros(6, 32).double()
right = expand(silent, streams, torch.ones(6, n).double(), cycle)
wrong = expand(silent, streams, torch.ones(6, n).double(), cycle.mT)
moves = lambda after: [int((streams[0] == x).all(-1).int().argmax()) for x in after[0]]  # noqa: E731
column = torch.zeros(n, n).index_fill(1, torch.tensor(2), -200.0)
rows = [("map transposed: stream k was", str(moves(right)), str(moves(wrong)))]
rows += [("no eps: a column of nothing", "finite", str(sinkhorn(column, eps=0.0)[0, 2].item()))]
table("fault|right|wrong", rows)


# %%
def drift(dtype):
    """Relative error of the streams after all seams with maps rounded to a dtype."""
    exact = rough = embedding
    for s in range(traffic.seams(config)):
        seam = seams[s % len(seams)]
        _, post, comb = seam.coefficients(exact)
        exact = expand(sublayer(s)(exact[:, 0]), exact, post, comb)
        _, post, comb = (m.to(dtype).double() for m in seam.coefficients(rough))
        rough = expand(sublayer(s)(rough[:, 0]), rough, post, comb)
    return (rough - exact).norm().item() / exact.norm().item()


# %%
shifts = {
    "input map (right)": (1, 0, 0),
    "output map too": (1, 1, 0),
    "residual map too": (1, 0, 1),
}
base = by_lags(embedding, seams, (1, 0, 0))[1]
rows = [(f"maps in {name}", f"{drift(dtype):.0e}") for name, dtype in DTYPES.items()]
for name, lags in shifts.items():
    head = by_lags(embedding, seams, lags)[1]
    rows.append((f"shifted: {name}", f"{((head - base).norm() / base.norm()).item():.2f}"))
table("what|relative change", rows)

# %% [markdown]
# ## Test yourself
#
# ```{exercise}
# :label: mhc-small
#
# With one stream, how many rows has `fn`, and what does its part for `comb` do?
# ```
#
# ````{solution-start} mhc-small
# :class: dropdown
# ````

# %%
lone = Seam(1, 8).double()
_, _, comb = lone.coefficients(normal(5, 1, 8))
table("rows of fn|comb", [(len(lone.fn), f"{comb.unique().item():.6f}, whatever the logit")])

# %% [markdown]
# ````{solution-end}
# ````
#
# ```{exercise}
# :label: mhc-eight
#
# With eight streams instead of four, how many times more would the seams of a token move?
# ```
#
# ````{solution-start} mhc-eight
# :class: dropdown
# ````

# %%
table("streams|elements of d", [(m, traffic.floor(m, d) // d) for m in (1, 2, 4, 8)])

# %% [markdown]
# ````{solution-end}
# ````
#
# ## References
#
# Hyper-connections: {cite}`hc`; the constraint, its initial values and the gains of a large model: {cite}`mhc`; the
# multi-pass form and its head mix: {cite}`v4`; the single pass: {cite}`v41`; Sinkhorn's iteration: {cite}`sinkhorn`; the
# decomposition into permutations: {cite}`birkhoff`.
