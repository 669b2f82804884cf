# %% [markdown]
# # DSpark: drafts in blocks
#
# A decoding step reads the weights to write one token. Reading them for six positions costs nearly the same, if
# somebody would only say which tokens to try. A drafter does: it proposes the next few, the model checks them all in
# one step, and keeps those that it might have written itself.
#
# Three questions follow. How can a guess be kept without bending what the model would have said? How does one cheap
# pass draft words that fit together? And how many guesses are worth checking when other requests wait for the same
# machine? Each answer in this chapter is executed: the laws are enumerated, not sampled, wherever they can be.

# %% tags=["hide-input"]
import json
import math
from functools import partial
from itertools import product

import numpy as np
import torch
from dsv41_edu import checkpoint
from dsv41_edu.accounting import active, cache_bytes, totals, touched
from dsv41_edu.benchmarks import harness
from dsv41_edu.claims import check, cite
from dsv41_edu.config import preset
from dsv41_edu.dspark import scheduler
from dsv41_edu.dspark import simulation as sim
from dsv41_edu.dspark.calibration import calibration_error, fit_temperatures, survivals
from dsv41_edu.dspark.exact import output_law, target_law
from dsv41_edu.dspark.heads import GatedMarkovHead, MarkovHead, RecurrentHead
from dsv41_edu.dspark.losses import acceptance, distance, dspark_loss
from dsv41_edu.dspark.scheduler import Delayed, fill, schedule, step_rates, survival, throughput
from dsv41_edu.dspark.verification import (
    BLOCK,
    TOKEN_BY_TOKEN,
    Rule,
    block_chances,
    block_verify,
    leading,
    rejection_verify,
    sample,
)
from dsv41_edu.experiments import mini_drafter
from dsv41_edu.experiments import text as small_text
from dsv41_edu.experiments.mini import heldout
from dsv41_edu.figures import dspark as draw
from dsv41_edu.figures import dspark_serving as serving
from dsv41_edu.figures.benchmarks import measured, registers, timings
from dsv41_edu.figures.glue import say
from dsv41_edu.figures.tables import table
from dsv41_edu.generate import MINI, Summary, generate, stream
from dsv41_edu.generations import plan
from dsv41_edu.model import Transformer
from dsv41_edu.training import initialise
from kernels.admission import fused_schedule
from kernels.launches import count_launches
from kernels.markov import fused_markov
from kernels.verify import fused_verify

torch.set_num_threads(1)  # small work: more threads only wait for one another
torch.manual_seed(0)  # of modules' first weights
config = preset("v41_flash")
g, V, rank = config.dspark_block_size, config.vocab_size, config.dspark_markov_rank
RULES = {"token by token": TOKEN_BY_TOKEN, "by the block": BLOCK}


def normal(*shape, seed=0):
    """Standard normal numbers in float64, the same on every machine."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def laws(V, depth, seed, sharpness=1.0):
    """Of each prefix of 0, 1, ..., depth - 1 tokens a law of the next one."""
    return [
        (sharpness * normal(*(V,) * (i + 1), seed=seed + i)).softmax(-1) for i in range(depth)
    ]


def fp64(values):
    return torch.tensor(values, dtype=torch.float64)


# %% [markdown]
# ## The cost: one reading, one token
#
# At a batch of one, a step takes the time of reading what the token touches. Six positions touch more experts than
# one, but no more of the rest, so each further position is cheaper than the first; in a large batch all experts are
# read anyway, and further positions are free until the arithmetic takes longer than the reading:

# %%
per_token, held = touched(config), totals(plan(config))
routed = held["routed experts"].nbytes
dense = sum(t.nbytes for group, t in per_token.items() if group != "routed experts")
keys = sum(v for part, v in cache_bytes(config).items() if part.startswith("index key"))
node = dict(bandwidth=8 * 0.6 * 4.8e12, peak=8 * 0.3 * 1.98e15)  # 8 H200, at shares of their best
share = config.num_experts_per_tok / config.n_routed_experts
engine = sim.Roofline(
    dense, routed, share, 2 * active(config), float(keys), overhead=2e-3, **node
)
batches = [1, 6, 256, 6 * 256]
times = [engine.seconds(b, 0) for b in batches]
table("positions|ms a step|ms a position", [
    (b, f"{1e3 * t:.2f}", f"{1e3 * t / b:.3f}") for b, t in zip(batches, times, strict=True)
])  # fmt: skip

# %% [markdown]
# (The bytes and FLOPs are the plan's. The node, the shares of its bandwidth and peak that are reached, and the fixed
# time of a step, the drafter's pass in it, are assumptions of this page.)
#
# If each draft stands with chance $a$, and a draft counts only where all before it stand, a step of $g$ drafts gives
# $1 + a + \dots + a^g = (1 - a^{g+1}) / (1 - a)$ tokens: one is always the model's own. Against a simulation that
# knows nothing of the formula:

# %%
FREE = sim.Roofline(1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)  # a second a step, whatever it does
chances, slots, steps = [0.3, 0.5, 0.7, 0.8, 0.9], 200, 200
long = sim.Load(slots, answer=10**9)


def counted(a, g):
    return sim.simulate(FREE, sim.fixed(g), [[a] * g], long, steps=steps).tokens


formula = {n: [(1 - a ** (n + 1)) / (1 - a) for a in chances] for n in (1, 3, g)}
dots = {n: [counted(a, n) for a in chances] for n in formula}
draw.expected(formula, chances, dots)

# %%
within = []
for n in formula:
    for a, mean, found in zip(chances, formula[n], dots[n], strict=True):
        squares = sum((2 * j + 1) * a**j for j in range(n + 1))  # the mean of tokens squared
        within.append(abs(found - mean) < 5 * math.sqrt((squares - mean**2) / (slots * steps)))
check("dsp.expected_tokens", all(within))

# %% [markdown]
# V3 {cite}`v3` had one such guess: its multi-token-prediction layer, kept from pre-training. A step with it reads one
# more layer, and the head once more. With the acceptance that its report measured, and the reading of the plan:

# %%
v3, accepted = preset("v3"), (0.85, 0.90)  # measured by the report, inputs here
embedding_copy = "drafter: embedding copy"
extra = 0
for t in plan(v3):
    if t.group.startswith("drafter") and t.use == "matrix" and t.group != embedding_copy:
        used = v3.num_experts_per_tok / v3.n_routed_experts if "routed" in t.group else 1
        extra += t.parameters * used
speeds = [sim.expected_tokens(a, 1) / (1 + extra / active(v3)) for a in accepted]
say(
    mtp_share=f"{extra / active(v3):.1%}", mtp_low=f"{speeds[0]:.2f}", mtp_high=f"{speeds[1]:.2f}"
)
check("dsp.mtp_acceptance", [*(100 * a for a in accepted), sum(speeds) / 2])

# %% [markdown]
# (The layer is {glue:text}`mtp_share` of what a token meets; the speed-up lies between {glue:text}`mtp_low` and
# {glue:text}`mtp_high`, with every other cost of a step left out.)
#
# ## The idea: a block at once, then a cheap chain
#
# To draft more with layers like V3's, one chains them: a pass for each draft, each a delay. DFlash {cite}`dflash`
# drafts the whole block in one pass of a small bidirectional network, which sees the model's own states as context.
# The price is that no draft knows what was drawn before it. DSpark {cite}`dspark` keeps the one pass and adds what is
# missing as a small matrix product from each draft to the next, and a chance with each draft.

# %%
draw.lineage(g)

# %% [markdown]
# ## Shapes

# %%
draw.block(config)

# %%
blocks, targets = config.num_nextn_predict_layers, config.dspark_target_layer_ids
experts = [config.dspark_n_routed_experts, config.dspark_num_experts_per_tok]
check("dsp.drafter_shape", [blocks, config.sliding_window, *experts, g, targets[0], targets[-1]])

# %%
markov = [t for t in plan(config) if "markov_head" in t.name]
assert {t.parameters for t in markov} == {V * rank}
check("dsp.markov_params", markov[0].parameters / 1e6)

# %% [markdown]
# ## Build it: the drafter
#
# Only the model's own tokens leave something behind: for each of them the drafter puts a latent into the ring of each
# of its blocks. What it drafts it forgets. So a rejected draft costs nothing to undo.
#
# ```{literalinclude} ../dsv41_edu/drafter.py
# :pyobject: Drafter.hidden
# ```
#
# ```{literalinclude} ../dsv41_edu/drafter.py
# :pyobject: Drafter.forward
# ```
#
# One pass over the block, then a loop that takes a row of $E$ and a product with $H$ for each draft. Counted, on a
# miniature of the whole model with the block of the large one:

# %%
mini = preset("mini").replace(dspark_block_size=g)
model = Transformer(mini, torch.arange(mini.vocab_size) % mini.engram_compressed_vocab_size)
with torch.no_grad():
    initialise(model, seed=0)
model = model.double().eval().requires_grad_(False)
ids = torch.from_numpy(np.random.default_rng(1).integers(3, 2000, (1, 24)))
cache = model.cache(1, 40)
cache.commit(model.run(ids[:, :18], cache, features=True).chunk, torch.tensor([18]))

# %%
calls, vectors = [], []
last = model.mtp[-1]
hooks = [layer.register_forward_hook(lambda *_: calls.append("block")) for layer in model.mtp]
hooks.append(last.norm.register_forward_hook(lambda *_: calls.append("head")))
hooks.append(
    last.markov_head.head.register_forward_hook(lambda _, a, out: vectors.append(out.shape))
)
model.draft(ids[:, 18], cache)
for hook in hooks:
    hook.remove()
one_pass = calls == ["block"] * mini.num_nextn_predict_layers + ["head"]
assert one_pass
assert set(vectors) == {(1, mini.vocab_size)}  # a product with one vector each
say(markov_share=f"1/{config.hidden_size // rank}")
check("dsp.markov_cost", len(vectors))

# %% [markdown]
# Each is {glue:text}`markov_share` of the head's product for one position. And who sees whom? We change one input at a
# time and see which rows of the block move: first in the drafter, then in the model that verifies.


# %%
def states(ids):
    """Of rows of ids: the drafter's states of a block at positions 18 to 22, and the model's that verifies it."""
    cache, lengths = model.cache(len(ids), 40), torch.full((len(ids),), 18)
    cache.commit(model.run(ids[:, :18], cache, features=True).chunk, lengths)
    drafting = model.mtp.hidden(ids[:, 18:23], cache, model.embed, model.seams, False)
    return {"drafting": drafting, "verifying": model.run(ids[:, 18:23], cache).hidden}


context = 8
changed = (
    ids.repeat(context + g, 1) + 40 * torch.eye(24, dtype=torch.int64)[18 - context : 18 + g]
)
before, after = states(ids), states(changed)
moved = {
    k: ((after[k] - x).abs().amax(-1) > 1e-9).T.numpy() for k, x in before.items()
}  # more than rounding
assert moved["drafting"].all()
assert np.array_equal(moved["verifying"][:, context:], np.tri(g, dtype=bool))
draw.influence(moved, context)

# %% [markdown]
# ## Build it: the Markov head
#
# Somebody asks for help, and the text goes on "of course" or "no problem", each half of the time. A drafter whose
# two rows don't know one another learns for the first row that *of* and *no* are equally likely, and for the second
# that *course* and *problem* are. Both are right, and "of problem" comes out as often as "of course". The head:
#
# ```{literalinclude} ../dsv41_edu/dspark/heads.py
# :pyobject: MarkovHead
# ```
#
# Both are trained here, on pairs drawn from that text, with the loss that the drafter is trained with:
# cross-entropy, the distance of the laws, and the confidence's own.

# %%
words, ASK = ["of", "course", "no", "problem", "?"], 4
target = [
    fp64([0.5, 0, 0.5, 0, 0]),
    torch.full((5, 5), 0.2).double(),
    torch.full((5,) * 3, 0.2).double(),
]
target[1][0], target[1][2] = fp64([0, 1, 0, 0, 0]), fp64([0, 0, 0, 1, 0])


# %%
def trained(markov, steps=300, pairs=64):
    """Laws of a drafter of two rows: base logits, and with `markov` the head."""
    draws = torch.Generator().manual_seed(0)
    base, head = torch.nn.Parameter(torch.zeros(2, 5).double()), MarkovHead(5, 2).double()
    with torch.no_grad():
        head.embed.weight.copy_(normal(5, 2)), head.head.weight.copy_(normal(5, 2, seed=1))
    optimizer = torch.optim.Adam([base, *head.parameters()], lr=0.05)
    for _ in range(steps):
        first = sample(target[0].expand(pairs, 5), torch.rand(pairs, generator=draws).double())
        text = torch.stack([torch.full_like(first, ASK), first, first + 1], 1)
        logits = base.expand(pairs, 2, 5) + markov * head(text[:, :2])
        wanted = (
            torch.stack([target[0].expand(pairs, 5), target[1][first]], 1).clamp(min=1e-9).log()
        )
        loss = dspark_loss(
            logits, wanted, text[:, 1:], torch.zeros(pairs, 2).double(), torch.ones(pairs, 2)
        )
        optimizer.zero_grad(), loss.total.backward(), optimizer.step()
    after = markov * head(torch.tensor([ASK, *range(5)])).detach()
    return [(base[0].detach() + after[0]).softmax(-1), (base[1].detach() + after[1:]).softmax(-1)]


# %%
drafters = {"drafted apart": trained(markov=False), "with the Markov head": trained(markov=True)}
pairs = {f"{words[a]} {words[b]}": (a, b) for a, b in ((0, 1), (2, 3), (0, 3), (2, 1))}
joint = {name: q[0][:, None] * q[1] for name, q in {"the text": target, **drafters}.items()}
draw.continuations({n: {p: j[at].item() for p, at in pairs.items()} for n, j in joint.items()})

# %%
rows = []
for name, q in drafters.items():
    rows.append(
        (name, *(f"{output_law(rule, target, q).expected:.2f}" for rule in RULES.values()))
    )
table("drafts accepted, of two|token by token|by the block", rows)

# %% [markdown]
# The table isn't sampled: it adds up all drafts and all outcomes of their tests. A rank of two was enough for five
# words; the large model's head has the rank of the diagram above.
#
# ### Heads that see more
#
# The paper's code has two more kinds, which the released model doesn't use. One has a gate that reads the block's
# state $h_i$, so the head can keep still where the context knows better; one carries a state $s_i$ along the block,
# so it knows every draft before, not the last alone:
#
# $$
# \begin{aligned}
# \text{gated:}\quad & v_i = \sigma\big(G\,[h_i, E_{y_i}] + b\big) \odot E_{y_i} \\
# \text{recurrent:}\quad & (a, c, o) = J\,[s_i, E_{y_i}, h_i] + b, \qquad v_i = \tanh o \\
# & s_{i+1} = \sigma(a) \odot s_i + (1 - \sigma(a)) \odot \tanh c
# \end{aligned}
# $$
#
# ```{literalinclude} ../dsv41_edu/dspark/heads.py
# :pyobject: RecurrentHead
# ```
#
# Where would it matter? Where a word hangs on one that isn't its neighbour: "either this or", "neither this nor". All
# three learn these two texts, and the chance of the right last word is what they end with:

# %%
said = torch.tensor([[0, 1, 2], [3, 1, 4]])  # either this or, neither this nor
asked = torch.full((2, 1), 5)


def learned(head, steps=300):
    """The chance of each text's last word after its first two, with a base that has no context, h = 0."""
    with torch.no_grad():
        for i, weight in enumerate(head.double().parameters()):
            weight.copy_(normal(*weight.shape, seed=i))
    base = torch.nn.Parameter(torch.zeros(3, 6).double())
    so_far, h = torch.cat([asked, said[:, :2]], 1), torch.zeros(2, 3, 1).double()
    optimizer = torch.optim.Adam([base, *head.parameters()], lr=0.05)
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy((base + head(so_far, h)).mT, said)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    return (base + head(so_far, h)).softmax(-1)[[0, 1], 2, said[:, 2]].tolist()


# %%
kinds_of_head = {
    "vanilla": MarkovHead(6, 2), "gated": GatedMarkovHead(6, 2, 1), "rnn": RecurrentHead(6, 2, 1),
}  # fmt: skip
rows = []
for kind, head in kinds_of_head.items():
    planned = plan(config.replace(dspark_markov_head_type=kind))
    size = sum(t.parameters for t in planned if "markov_head" in t.name)
    rows.append((kind, f"{size:,}", *(f"{chance:.2f}" for chance in learned(head))))
table("head|parameters, official size|or, after either this|nor, after neither this", rows)

# %% [markdown]
# Without a context the gate has nothing to go by. Which head helps a real drafter is measured below.
#
# ## Build it: confidence
#
# With each draft comes a chance that it will stand, given that those before it do. What should it learn? A draft $y$
# drawn from $q$ is kept with chance $\min(1, p(y) / q(y))$, as we will see, so the chance that it stands, before it
# is drawn, is
#
# $$
# \sum_y q(y) \min(1, p(y) / q(y)) = \sum_y \min(p(y), q(y)) = 1 - \tfrac12 \sum_y |p(y) - q(y)|.
# $$
#
# It is known in training, where both laws are at hand, so the head learns a number rather than a coin's outcome:
#
# ```{literalinclude} ../dsv41_edu/dspark/heads.py
# :pyobject: ConfidenceHead
# ```

# %%
equal = []
for seed in range(200):
    V_, sharpness = 2 + seed % 20, (0.3, 1.0, 3.0, 10.0)[seed % 4]
    (p,), (q,) = laws(V_, 1, 2 * seed, sharpness), laws(V_, 1, 9999 + seed, sharpness)
    stands = output_law(TOKEN_BY_TOKEN, [p, p.expand(V_, V_)], [q]).accepted[1]
    both = acceptance(p, q), 1 - distance(p, q) / 2
    equal += [abs(stands - other).item() < 1e-12 for other in both]
check("dsp.confidence_target", all(equal))

# %% [markdown]
# The scheduler below multiplies confidences along a block, and a product of small lies is a big one. So each place
# gets a temperature, fitted from left to right on what was really accepted:
#
# ```{literalinclude} ../dsv41_edu/dspark/calibration.py
# :pyobject: fit_temperatures
# ```
#
# A made-up head shows what it mends. Its drafts stand with chances that it knows, but it is too sure of each, by a
# factor on the logit:

# %%
rng = np.random.default_rng(3)
true = torch.from_numpy(rng.beta(4, 2, (20_000, g)))
boast = true.logit() * 2
stood = torch.from_numpy(rng.random(true.shape)) < true
stood = stood.long().cumprod(-1).bool()
found = fit_temperatures(boast, stood)
table("place|temperature|error before|after", [
    (k + 1, f"{found[k]:.2f}", *(f"{100 * calibration_error(survivals(boast, T)[:, k], stood[:, k]):.1f}%"
                                 for T in ([1.0] * g, found)))
    for k in range(g)
])  # fmt: skip

# %% [markdown]
# ## Check it: nothing is lost
#
# The model ran on the anchor and all drafts at once, so it has its own law after each of them. The classical rule
# {cite}`leviathan` takes the drafts one by one. A token that the drafter gives too often is kept so often as to set
# that right; the first that fails is replaced by a draw from what is left of the model's law, and ends the step.
# Block verification {cite}`blockverification` tests them with all in hand:
#
# ```{literalinclude} ../dsv41_edu/dspark/verification.py
# :language: text
# :start-at: y_1 ... y_n
# :end-before: A rejected draft
# ```
#
# ```{literalinclude} ../dsv41_edu/dspark/verification.py
# :pyobject: block_weights
# ```
#
# ```{literalinclude} ../dsv41_edu/dspark/verification.py
# :pyobject: block_chance
# ```
#
# Is the output's law the model's? Over a small vocabulary it can be written down, with no sampling: all drafts, all
# outcomes of the tests, all next tokens, weighted with their chances. First token by token, then, with the real
# verifier, by drawing many blocks and a test of the counts.


# %%
def problem(seed):
    """A target and a drafter, drawn: vocabularies of 2 to 4 tokens, blocks of 1 to 3 drafts."""
    V, g = 2 + seed % 3, 1 + seed // 3 % 3
    sharpness = (0.5, 1.5, 4.0)[seed // 9 % 3]
    return laws(V, g + 1, 10 * seed, sharpness), laws(V, g, 5000 + 10 * seed, sharpness)


problems = [problem(seed) for seed in range(108)]
found = {name: [output_law(rule, *pq) for pq in problems] for name, rule in RULES.items()}
wanted = [target_law(p) for p, _ in problems]
off = {
    name: max((a.tokens - b).abs().max().item() for a, b in zip(results, wanted, strict=True))
    for name, results in found.items()
}
table("verifier|largest error of a chance", [(name, f"{e:.0e}") for name, e in off.items()])

# %%
N, (p0, p1), (q0,) = 40_000, laws(6, 2, 1), laws(6, 1, 77)
draws = torch.rand(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
drafts = sample(q0.expand(N, 6), draws[:, 0])
at = torch.stack([p0.expand(N, 6), p1[drafts]], 1)
verdict = rejection_verify(at, q0.expand(N, 1, 6), drafts[:, None], None, draws[:, 1:])
first = torch.where(verdict.accepted == 1, drafts, verdict.next)
chi2 = ((first.bincount(minlength=6) - N * p0) ** 2 / (N * p0)).sum().item()
naive = ((drafts.bincount(minlength=6) - N * p0) ** 2 / (N * p0)).sum().item()
limit = 20.5  # of chi-square with 5 degrees of freedom, exceeded once in a thousand
say(chi2=f"{chi2:.1f}", naive=f"{naive:,.0f}", limit=limit)
assert naive > limit
check("dsp.rejection_exact", off["token by token"] < 1e-12 and chi2 < limit)

# %% [markdown]
# (The statistic is {glue:text}`chi2` where {glue:text}`limit` would be suspect; for the drafts themselves, unverified,
# it is {glue:text}`naive`.) Now the block's rule on the same problems. It is exact, too, and it never keeps fewer:

# %%
kept = {name: {n: [] for n in (1, 2, 3)} for name in RULES}
for name, results in found.items():
    for (_, q), law in zip(problems, results, strict=True):
        kept[name][len(q)].append(law.expected)
draw.verifiers(*kept.values())

# %%
single, whole = ([law.expected for law in found[name]] for name in RULES)
never_below = all(b >= a - 1e-12 for a, b in zip(single, whole, strict=True))
most = max(b / a for a, b in zip(single, whole, strict=True))
say(block_gain=f"{100 * (most - 1):.0f}%")
check("dsp.block_verification", off["by the block"] < 1e-12 and never_below)

# %% [markdown]
# At best, among these, it keeps {glue:text}`block_gain` more. With one draft both are the same rule.
#
# ## Build it: the scheduler
#
# A verified draft takes a place in the batch. What it brings is its chance to be reached *and* to stand, its
# survival: the product of the confidences up to it. What it costs is that the whole batch's step gets longer. With $R$
# requests, and the drafts taken by falling survival, tokens a second after $b$ of them are $(R + \text{their sum})
# \cdot \text{rate}(R + b)$. Algorithm 1 takes drafts while that grows:

# %%
confidence = np.array([
    [0.95, 0.90, 0.85, 0.80, 0.75],  # code that nearly writes itself
    [0.80, 0.70, 0.60, 0.50, 0.40],
    [0.50, 0.45, 0.40, 0.35, 0.30],  # a poem
])  # fmt: skip
rate = 1 / (1 + 0.12 * np.arange(3 * (g + 1) + 1))  # steps a second by positions in the batch
draw.walk(confidence, rate)

# %% [markdown]
# ```{literalinclude} ../dsv41_edu/dspark/scheduler.py
# :pyobject: schedule
# ```
#
# ```{literalinclude} ../dsv41_edu/dspark/scheduler.py
# :pyobject: fill
# ```
#
# Survival never rises along a block, so the best drafts of a batch are always a beginning of each block, and no draft
# is taken without those before it. For a fixed budget no other choice brings more; all of them are tried here:

# %%
rng, best_of_all = np.random.default_rng(4), []
for R, width in ((1, 4), (2, 3), (3, 2), (3, 3)):
    for _ in range(6):
        s = survival(rng.beta(2, 1, (R, width)))
        best_of_all.append(bool((np.diff(s, axis=1) <= 0).all()))
        choices = list(product(range(width + 1), repeat=R))
        worth = [sum(s[r, :n].sum() for r, n in enumerate(c)) for c in choices]
        for b in range(R * width + 1):
            best = max(w for w, c in zip(worth, choices, strict=True) if sum(c) == b)
            mine = worth[choices.index(tuple(fill(s, b).tolist()))]
            best_of_all.append(abs(mine - best) < 1e-12)
check("dsp.survival_monotone", all(best_of_all))

# %% [markdown]
# ## Break it: a choice that has seen too much
#
# The confidence of a draft knows the draft before it: the Markov head's row is one of its inputs. So a scheduler that
# looks at all confidences, and *then* decides whether the first draft is verified, decides with a hint of what the
# first draft is. Nothing is wrong with either part, and the output is biased. One request, two tokens, one law
# everywhere; the second confidence is sure after the first token and hopeless after the other:

# %%
p, q = [0.7, 0.3], [0.5, 0.5]
target = [fp64(p), fp64([p] * 2), fp64([[p] * 2] * 2)]
draft = [fp64(q), fp64([q] * 2)]
stairs = [2, 1, 0.5, 0.45]  # steps a second with 0, 1, 2, 3 positions in the batch
after = [[0.8, 1.0], [0.8, 0.0]]  # the confidences if the first draft is 0, if it is 1


# %%
def two_steps_old(confidence):
    """The delayed budget, made two steps before from confidences that don't know these drafts."""
    delayed = Delayed(stairs)
    delayed([[0.8, 1.0]]), delayed([[0.5, 0.5]])
    return delayed(confidence)


def first_token(choose):
    """Law of the first token where `choose` decides how many drafts are verified."""
    lengths = torch.tensor([[int(choose([after[y]])[0])] * 2 for y in range(2)])
    return output_law(TOKEN_BY_TOKEN, target, draft, lengths=lengths).tokens.sum((1, 2)).tolist()


# %%
choosers = {
    "whole curve, these confidences": lambda c: schedule(c, stairs, early_stop=False),
    "algorithm 1": lambda c: schedule(c, stairs),
    "delayed budget": two_steps_old,
}
outputs = {"the model alone": p} | {name: first_token(c) for name, c in choosers.items()}
table(
    "law of the first token|0|1", [(n, *(f"{x:.2f}" for x in law)) for n, law in outputs.items()]
)

# %% [markdown]
# When the first draft is 0, the search sees that the second is sure and verifies both. When it is 1, the search gives
# up and lets the model draw a token of its own: half of the ones are thrown back. Algorithm 1 can't do that. It stops
# at the first draft that doesn't pay, before it has looked at what comes behind. Whatever stands there:


# %%
def blind_to_later(rng):
    """Change the confidences of one block from a place on: are the drafts before it chosen as before?"""
    R, width = rng.integers(1, 5), rng.integers(1, 6)
    confidence, r, j = rng.random((R, width)), rng.integers(R), rng.integers(width)
    curve = rng.random(R * (width + 1) + 1) + 0.1
    changed = confidence.copy()
    changed[r, j:] = rng.random(width - j)
    walked = [min(schedule(c, curve)[r], j) for c in (confidence, changed)]
    searched = [min(schedule(c, curve, early_stop=False)[r], j) for c in (confidence, changed)]
    return walked[0] == walked[1], searched[0] == searched[1]


rng = np.random.default_rng(5)
walks, searches = zip(*(blind_to_later(rng) for _ in range(2000)), strict=True)
assert not all(searches)
check("dsp.early_stop_causal", all(walks))

# %% [markdown]
# ## Break it: the staircase
#
# Real engines are fast at the batch sizes that were captured, and pad all others up to the next. The first draft that
# crosses an edge pays for the whole stair, and brings too little to be worth it; the walk stops there and never
# learns that the rest of the stair is free.

# %%
sizes = [8, 16, 32, 48]
confidence = np.tile([0.9, 0.8, 0.7, 0.6, 0.5], (6, 1))
seconds = 0.4 + 0.03 * np.array(sizes)
curves = {
    "smooth": step_rates(sizes, seconds),
    "staircase": step_rates(sizes, seconds, staircase=True),
}
chosen = {
    name: [int(schedule(confidence, c, early_stop=e).sum()) for e in (True, False)]
    for name, c in curves.items()
}
tokens = {name: scheduler.theta(survival(confidence), c) for name, c in curves.items()}
draw.staircase(tokens, *({n: c[i] for n, c in chosen.items()} for i in (0, 1)))

# %%
walked, best = (tokens["staircase"][b] for b in chosen["staircase"])
trapped = chosen["staircase"][0] < chosen["smooth"][0] and best > 1.2 * walked
check("dsp.jagged_curve", bool(trapped and best == tokens["staircase"].max()))

# %% [markdown]
# So the production form splits the decision. *How many* positions comes from a search over the whole curve, made from
# confidences so old that these drafts weren't drawn yet; *which* ones comes from the confidences of now:
#
# ```{literalinclude} ../dsv41_edu/dspark/scheduler.py
# :pyobject: Delayed
# ```
#
# How old? We let the drafter lose its confidence at one step and see at which the total falls. Then the law again,
# over drawn problems whose confidences hang on the drafts in any way they like:

# %%
delayed = Delayed(curves["staircase"])
totals_by_step = [int(delayed(c).sum()) for c in [confidence] * 6 + [confidence / 10] * 4]
delay = totals_by_step[5:].index(min(totals_by_step[5:])) - 1


# %%
def lossless(seed):
    """The output's law with a delayed budget, where confidences are any function of the drafts before."""
    rng, (target, draft) = np.random.default_rng(seed), problem(seed)
    V, g = len(draft[0]), len(draft)
    table_of = [rng.random((V,) * i) for i in range(g)]  # of draft i + 1, given the first i
    rates = rng.random(g + 2) + 0.1
    old = rng.random((2, 1, g))
    lengths = torch.zeros((V,) * g, dtype=torch.int64)
    for y in product(range(V), repeat=g):
        chooser = Delayed(rates)
        chooser(old[0]), chooser(old[1])
        lengths[y] = int(chooser([[float(table_of[i][y[:i]]) for i in range(g)]])[0])
    law = output_law(BLOCK, target, draft, lengths=lengths).tokens
    return (law - target_law(target)).abs().max()


assert max(lossless(seed) for seed in range(27)) < 1e-12
check("dsp.delayed_budget", delay)

# %% [markdown]
# ## Break it: other faults
#
# Each was really made somewhere, and each leaves fluent text behind, so that no reader would notice. The law does:


# %%
def bent(rule=BLOCK, drawn=None):
    """The largest error of a chance over drawn problems, with a fault."""
    worst = 0.0
    for target, draft in problems[3:9]:
        made = None if drawn is None else [drawn(law) for law in draft]
        worst = max(
            worst,
            (output_law(rule, target, draft, drawn=made).tokens - target_law(target)).abs().max(),
        )
    return f"{float(worst):.0e}"


# %%
def own_residual(p, q, drafts):
    a, w = block_chances(p, q, drafts)
    return a, torch.ones_like(w)


faults = {
    "none": bent(),
    "drafts drawn at another temperature than tested": bent(
        drawn=lambda q: (q.log() / 1.1).softmax(-1)
    ),
    "drafts drawn in bf16, tested in fp32": bent(
        drawn=lambda q: q.log().bfloat16().double().softmax(-1)
    ),
    "block tests, but the next token from max(p - q, 0)": bent(Rule(own_residual, BLOCK.count)),
    "block tests, but stopped at the first that fails": bent(Rule(block_chances, leading)),
}
table("fault|largest error of a chance", list(faults.items()))

# %% [markdown]
# ## Trained on our miniature
#
# The miniature of this book has a drafter of its own, trained behind its frozen backbone on the same text. To see what
# each part brings, short trainings leave some out: the blocks alone, the blocks with the Markov head, and with the
# confidence's loss as well; or they put one of the two other heads in the Markov head's place. Each has
# {glue:text}`n_seeds` seeds and {glue:text}`n_blocks` blocks. Drafts are drawn at temperature one after prefixes of
# held-out text, and verified token by token.

# %%
heads = json.loads(mini_drafter.RESULT.read_text())
variants = heads["variants"]
named = dict(
    parallel="drafted apart",
    markov="with the Markov head",
    confidence="and its confidence",
    gated="with the gated head",
    rnn="with the recurrent head",
)
say(n_seeds=heads["seeds"], n_blocks=heads["blocks"])
serving.acceptance_by_place({name: variants[key]["acceptance"] for key, name in named.items()})

# %%
rows = []
for key, name in named.items():
    drawn, greedy = variants[key]["accepted"], variants[key]["greedy_accepted"]
    rows.append((name, *(f"{m:.2f} \u00b1 {s:.2f}" for m, s in (drawn, greedy))))
table("drafts that stand of a block, mean and 2 sd|drawn|greedy", rows)

# %%
base, spread = variants["markov"]["accepted"]
more = [
    abs(mean - base) > max(sd, spread)
    for mean, sd in (variants[key]["accepted"] for key in ("gated", "rnn"))
]
say(other_heads="a difference shows" if any(more) else "no difference shows")

# %% [markdown]
# Between the three kinds of Markov head {glue:text}`other_heads` over the seeds, in trainings as short as these.
#
# The stated lengths count the model's own token, so one is added here, drawn and greedy, without and with the head:

# %%
apart, chained = variants["parallel"], variants["markov"]
lengths = [1 + v[kind][0] for kind in ("accepted", "greedy_accepted") for v in (apart, chained)]
gains = all(chained[kind][0] > apart[kind][0] for kind in ("accepted", "greedy_accepted"))
check(
    "dsp.markov_gain",
    lengths,
    holds=gains,
    why=None
    if gains
    else "behind so small a backbone the head brought nothing that shows over the seeds",
)

# %% [markdown]
# What did the shipped drafter, which was trained for much longer, promise, and what came of it? Over
# {glue:text}`shipped_blocks` blocks it has {glue:text}`shipped_drawn` drafts stand when they are drawn, and
# {glue:text}`shipped_greedy` when they are the likeliest. Temperatures are fitted on one half of the blocks, and judged
# on the other. A head that has learned the chance itself, not a coin's outcome, leaves them little to mend:

# %%
shipped = json.loads(mini_drafter.TRAINED.read_text())
calibrated = shipped["calibration"]
say(
    shipped_blocks=f"{shipped['blocks']:,}",
    shipped_drawn=f"{shipped['accepted']:.2f}",
    shipped_greedy=f"{shipped['greedy_accepted']:.2f}",
)
serving.reliability({name: calibrated[name]["bins"] for name in ("before", "after")})

# %%
rows = [
    (
        k + 1,
        f"{T:.2f}",
        *(f"{100 * calibrated[name]['errors'][k]:.1f}%" for name in ("before", "after")),
    )
    for k, T in enumerate(shipped["temperatures"])
]
table("place|temperature|error before|after", rows)

# %%
mean_error = {n: sum(c["errors"]) / len(c["errors"]) for n, c in calibrated.items()}
mended = mean_error["after"] < 0.9 * mean_error["before"]  # less is noise
check(
    "dsp.calibration",
    100 * mean_error["after"],
    holds=mended,
    why=None
    if mended
    else "our head's own chances are already as good as those that the temperatures make of them",
)

# %% [markdown]
# ### Live
#
# The shipped miniature writes, greedily. Each step drafts a block and verifies it. Turned off, the drafter must change
# no token, and does not:

# %%
small, tokenizer = checkpoint.load(MINI, dtype=torch.float32), small_text.tokenizer()
prompt = [
    small.config.bos_token_id,
    *tokenizer.encode("In the beginning", add_special_tokens=False).ids,
]
took, pieces = Summary(), []
for (new,) in stream(small, [prompt], 60, speculate=True, summary=took):
    pieces += [(token, place < len(new) - 1) for place, token in enumerate(new)]
assert [token for token, _ in pieces] == generate(small, [prompt], 60)[0]
say(live_steps=took.steps, live_tokens=took.tokens)
serving.written_by([(tokenizer.decode([token]), drafted) for token, drafted in pieces])

# %% [markdown]
# {glue:text}`live_tokens` tokens in {glue:text}`live_steps` steps of the backbone after the prompt.
#
# ### What a step costs on a real machine
#
# The scheduler's table is measured, not modelled. Here it is for the miniature and its drafter on two cores, from one
# request with no draft verified to {glue:text}`most_requests` with all of them:

# %%
costs = harness.read("latency.step")[0]["steps"]
say(step_measured=measured("latency.step"), most_requests=costs[-1]["requests"])
serving.step_times(costs)

# %% [markdown]
# Measured on {glue:text}`step_measured`; `python -m dsv41_edu.benchmarks.step_times` measures yours. What does the
# scheduler make of it? The shipped drafter gives its confidences along held-out text, and each choice its tokens a
# second to be expected:

# %%
starts, most = range(32, 240, 32), costs[-1]["requests"]
blocks = mini_drafter.trial(small, torch.cat(heldout(256, most)), starts, temperature=1.0)
promised = blocks.confidence.double().sigmoid().view(len(starts), most, -1).numpy()
rows, mean_length = [], {}
for cost in costs:
    R, rate = cost["requests"], step_rates(cost["positions"], cost["seconds"])
    chosen = {"none": [], "all": [], "algorithm 1": []}
    for c in promised[:, :R]:
        chosen["none"].append((c, np.zeros(R, dtype=int)))
        chosen["all"].append((c, schedule(c, None)))
        chosen["algorithm 1"].append((c, schedule(c, rate)))
    speeds = [np.mean([throughput(c, n, rate) for c, n in pairs]) for pairs in chosen.values()]
    mean_length[R] = np.mean([n for _, n in chosen["algorithm 1"]])
    rows.append((R, f"{mean_length[R]:.1f}", *(f"{speed:,.0f}" for speed in speeds)))
table("requests|verified of each|tokens a second: no drafts|all|algorithm 1", rows)

# %% [markdown]
# Of a block it verifies {glue:text}`length_few` drafts where one request has the machine for itself, and
# {glue:text}`length_many` where {glue:text}`most_requests` share it. The same table steers generation; greedily, no
# choice of lengths may change a token, and none does:

# %%
say(length_few=f"{mean_length[1]:.1f}", length_many=f"{mean_length[most]:.1f}")
cost = costs[1]
rate = step_rates(cost["positions"], cost["seconds"])
prompts = [row.tolist() for row in heldout(64, cost["requests"])[0]]
alone = generate(small, prompts, 24)
for choose in (partial(schedule, step_rate=rate), Delayed(rate)):
    assert generate(small, prompts, 24, speculate=True, scheduler=choose) == alone

# %% [markdown]
# ## Fuse it
#
# Two of these steps stand in the way of every token. The Markov head is one small product after the other, each
# waiting for the draft before it. Verification goes over the whole vocabulary, several times for each place of a
# block. Eagerly, each of their operations is a launch. Both forms, on a small vocabulary, where the kernels run in the
# interpreter (views and allocations aren't counted):

# %%
B, V, r = 4, 50, 4
p, q = normal(B, g + 1, V).softmax(-1), normal(B, g, V, seed=1).softmax(-1)
drafts, u, lengths = q.argmax(-1), torch.full((B, g + 1), 0.5).double(), torch.full((B,), g)
base, token, head = (
    normal(B, V, seed=2).float(),
    drafts[:, 0],
    MarkovHead(V, r).requires_grad_(False),
)
c, curve = torch.from_numpy(confidence), torch.from_numpy(curves["smooth"])
steps = {
    "one link of the chain": (
        lambda: (base + head(token)).argmax(-1),
        lambda: fused_markov(base, token, head.embed.weight, head.head.weight)[0],
    ),
    "block verification": (
        lambda: torch.stack(block_verify(p, q, drafts, lengths, u)),
        lambda: torch.stack(fused_verify(p, q, drafts, lengths, u, True)[:2]),
    ),
}

# %%
kernels = {"markov", "likeliest", "law_sums", "weights", "rests", "pick"}
rows = []
for name, (eager, fused) in steps.items():
    with count_launches() as apart:
        wanted = eager()
    with count_launches() as together:
        got = fused()
    launched = sum(n for kernel, n in together.items() if kernel in kernels)
    rows.append((name, apart.total(), launched, str(torch.equal(wanted, got))))
table("step|launches, eager|kernels, fused|equal", rows)

# %%
same = torch.equal(
    fused_schedule(c, curve), torch.from_numpy(schedule(confidence, curve.numpy()))
)
table("fused schedule and reference|agree", [("lengths, exact", str(same))])

# %% [markdown]
# The verifier's first kernels find the laws' totals, which places are still open, and the sums of what is left there;
# the last one tests and draws. It never sees a place that can't be the outcome:
#
# ```{literalinclude} ../kernels/verify.py
# :pyobject: pick
# ```
#
# The choice of lengths has a kernel, too, so that a step need not wait for the host. It doesn't sort: each draft's
# place in the order is the number of those that come before it.

# %% [markdown]
# At the official sizes, compiled for real targets without one of them at hand, nothing spills:

# %%
registers("markov", "verify", "admission")

# %% [markdown]
# On a CPU: the scheduler beside a walk over a sorted list, and block verification, in fp64 and in pieces that fit a
# core's cache, beside the same written for the whole batch at once:

# %%
say(measured=measured("dspark."))
timings("dspark.")

# %% [markdown]
# Measured on {glue:text}`measured`.

# %% [markdown]
# ## Serve it: what the load does
#
# An engine with many requests, answers of random length, and texts of nine kinds. How often a draft stands for each
# is taken from the accepted lengths that the paper measured for Qwen3-14B, as one constant chance, inputs here; each
# draft's own chance scatters around it, and the confidence knows it. Six policies on the same engine:

# %%
kinds = dict(GSM8K=6.21, MATH=5.74, AIME25=4.94, MBPP=5.26, HumanEval=5.43, LCB=5.02)
kinds |= {"MT-Bench": 3.70, "Alpaca": 3.58, "Arena": 3.13}  # tokens a step of 7 drafts
chance = [[sim.acceptance_of(tokens, 7)] * g for tokens in kinds.values()]

# %%
reading = (dense + routed) / engine.bandwidth  # seconds, once every expert is touched
knee = math.ceil(reading * engine.peak / engine.position_flops)
loads = [8, 32, 128, knee // 8, knee // 4, knee // 2, knee, 2 * knee]


def policies(R, g):
    rate = 1 / engine.seconds(np.arange((g + 1) * R + 1), 1500 * R)
    constant = {f"{n} draft{'s' * (n > 1)}": sim.fixed(n) for n in (1, 3, g)}
    others = {"no drafts": sim.fixed(0), **constant, "threshold": sim.threshold(0.6)}
    return {"scheduler": Delayed(rate), **others}


# %%
def served(chance, loads):
    """Policy to load to result."""
    runs = {}
    for R in loads:
        for name, policy in policies(R, len(chance[0])).items():
            found = sim.simulate(
                engine, policy, chance, sim.Load(R), spread=4.0, steps=100, warm_up=20
            )
            runs.setdefault(name, {})[R] = found
    return runs


runs = served(chance, loads)
draw.load_curves(runs)

# %% [markdown]
# Where the lines of fixed choices cross, the best of them changes. The engine is saturated at the *knee*,
# {glue:text}`knee` positions, where the arithmetic of a step takes as long as its reading. Up to a quarter of that
# many requests, drafts are nearly free and the scheduler takes most of them; at the knee itself each draft takes the
# place of somebody's sure token, and it keeps those that are nearly sure themselves:

# %%
say(knee=knee)
verified_by = {R: found.verified for R, found in runs["scheduler"].items()}
moderate = [verified_by[R] for R in loads if 128 <= R <= knee // 4]
falls = [verified_by[R] for R in loads if R >= 128]
assert falls == sorted(falls, reverse=True)
check("dsp.length_falls_with_load", [min(moderate), max(moderate), verified_by[knee]])

# %% [markdown]
# (Positions are counted, the model's own included. At the smallest loads the scheduler takes a little less than all:
# there every further position touches experts that nobody else reads. Past the knee the length falls on, below what
# is stated.)

# %%
high = 2 * knee
speed = {name: by_load[high].throughput for name, by_load in runs.items()}
loses = speed[f"{g} drafts"] < speed["3 drafts"] < speed["1 draft"] < speed["scheduler"]
rng, never_below = np.random.default_rng(6), []
for R in loads:  # tokens a second to be expected, of the same confidences under each choice
    rate = 1 / engine.seconds(np.arange((g + 1) * R + 1), 1500 * R)
    mean = np.array(chance)[rng.integers(len(chance), size=R)]
    c = rng.beta(4 * mean, 4 * (1 - mean))
    mine = throughput(c, schedule(c, rate), rate)
    never_below += [
        mine >= throughput(c, sim.fixed(n)(c), rate) * (1 - 1e-12) for n in (0, 1, 3, g)
    ]
say(fixed_loss=f"{100 * (1 - speed[f'{g} drafts'] / speed['no drafts']):.0f}%")
check("dsp.static_draft_loses", bool(loses and all(never_below)))

# %% [markdown]
# At twice the knee the whole block, always verified, costs {glue:text}`fixed_loss` of what the engine does without
# any draft. A drafter that is less often right meets that point sooner. Here is the same engine with the chances of
# the miniature's own drafter, place by place, as they were measured above:

# %%
few = [32, knee // 4, knee]
own = served([shipped["acceptance"]], few)
rows = [
    (
        R,
        f"{own['scheduler'][R].verified:.1f}",
        *(f"{by_load[R].throughput:,.0f}" for by_load in own.values()),
    )
    for R in few
]
table("requests|positions of each, scheduler|tokens a second: " + "|".join(own), rows)

# %% [markdown]
# ### Drag the load
#
# The same engine and kinds, with each draft's confidence the mean of its kind. For each load the scheduler's own
# answer is stored in the page:


# %%
def point(copies):
    """One load: so many requests of each kind, and what the scheduler makes of them."""
    c = np.repeat(chance, copies, axis=0)
    R = len(c)
    times = engine.seconds(np.arange((g + 1) * R + 1), 1500 * R)
    lengths = schedule(c, 1 / times)
    B, tokens = R + lengths.sum(), throughput(c, lengths, 1 / times)
    reading = engine.seconds(0, 1500 * R) - engine.overhead  # of what every step reads
    reading += routed * (1 - (1 - share) ** B) / engine.bandwidth
    arithmetic = engine.position_flops * B / engine.peak
    verified = 1 + lengths.reshape(len(chance), copies).mean(1)
    return serving.Point(
        R, verified.tolist(), 1e3 * reading, 1e3 * arithmetic, 1e3 * times[B], tokens, tokens / R
    )


# %%
copies = sorted({round(512 ** (i / 24)) for i in range(25)})
points = [point(n) for n in copies]
crowded = next(i for i, p in enumerate(points) if p.requests > knee / 4)
serving.load_slider(list(kinds), points, most=g + 1, first=crowded)

# %%
serving.verified_by_load(list(kinds), points)

# %% [markdown]
# What a production system gained from all of it is cited; it hangs on traffic that nobody can replay:

# %%
cite("dsp.throughput")

# %%
cite("dsp.user_speed")

# %%
cite("dsp.survival_decay")

# %% [markdown]
# ## Test yourself
#
# ```{exercise}
# :label: dspark-endless
#
# Drafts stand with chance four fifths each. How many tokens a step does a block of five give, and how many an endless
# one?
# ```
#
# ````{solution-start} dspark-endless
# :class: dropdown
# ````

# %%
rows = [(n, f"{sim.expected_tokens(0.8, n):.2f}") for n in (5, 1000)]
table("drafts|tokens a step", rows)

# %% [markdown]
# ````{solution-end}
# ````
#
# ```{exercise}
# :label: dspark-last
#
# The step of a saturated engine takes time in proportion to its positions. Which drafts does the scheduler still
# verify?
# ```
#
# ````{solution-start} dspark-last
# :class: dropdown
# ````

# %%
proportional = 1 / np.arange(
    1, 40
)  # with 0, 1, ... positions, and one position's time for the rest of the step
tries = [schedule([[c] * g] * 4, proportional).sum() for c in (0.5, 0.8, 0.85, 0.99, 1.0)]
table(
    "confidence of all drafts|verified, of 20",
    list(zip((0.5, 0.8, 0.85, 0.99, 1.0), map(int, tries), strict=True)),
)

# %% [markdown]
# ````{solution-end}
# ````
#
# ## References
#
# The drafter, its scheduler and their numbers: {cite}`dspark`; the released form: {cite}`v41`; its forerunners:
# {cite}`v3` and {cite}`dflash`; verification: {cite}`leviathan` and {cite}`blockverification`.
