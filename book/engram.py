# %% [markdown]
# # Engram: memory by n-gram
#
# "Diana, Princess of Wales" is six tokens that mean one thing, and a transformer spends its first layers finding that
# out again each time it reads them. Engram {cite}`engram` looks it up instead: the last tokens are hashed to rows of a
# huge table, and gates decide how much of what stands there is added to the streams. Nothing is multiplied with the
# table; a token reads a few rows of it, and their addresses follow from the token ids alone.
#
# Here the real thing can be exact: the real tokenizer, the real primes, the very rows of the official tables for any
# text. Only their content is left out.

# %% tags=["hide-input"]
import itertools
import math
import re
import unicodedata

import numpy as np
import torch
from dsv41_edu.accounting import active
from dsv41_edu.claims import check, cite
from dsv41_edu.config import preset
from dsv41_edu.engram.gate import add_memory, signed_root_gate
from dsv41_edu.engram.hashing import NgramHash, is_prime, primes_from
from dsv41_edu.engram.prefetch import Prefetcher
from dsv41_edu.engram.table import EngramTable, TieredTable, most_frequent
from dsv41_edu.engram.vocabulary import NORMALISE, CompressedVocabulary, real_tokenizer
from dsv41_edu.experiments import engram_budget, engram_use, engram_zipf
from dsv41_edu.figures import engram as draw
from dsv41_edu.figures.benchmarks import latencies, measured, registers, timings
from dsv41_edu.figures.glue import say
from dsv41_edu.figures.tables import refused, table
from dsv41_edu.generations import plan
from dsv41_edu.quantization import fp8_rows_encode
from kernels.engram_gate import fused_engram_gate
from kernels.engram_rows import fused_engram_rows
from kernels.ngram_hash import fused_ngram_hash

torch.set_num_threads(1)  # small work: more threads only wait for one another
torch.manual_seed(0)  # of modules' first weights
config = preset("v41_flash")
tensors = {t.name: t for t in plan(config)}
rows, width = config.engram_num_embeddings, config.engram_head_dim
layers, heads = config.engram_layer_ids, config.engram_n_heads
orders = config.engram_max_ngram_size - 1
parts = {
    l: [tensors[f"layers.{l}.engram.embed.{p}"] for p in ("weight", "scale")] for l in layers
}
nbytes = {l: [t.nbytes for t in pair] for l, pair in parts.items()}
say(
    both_gib=f"{sum(map(sum, nbytes.values())) / 2**30:.0f}",
    first_layer=layers[0],
    last_layer=layers[1],
)

# %% [markdown]
# ## The cost
#
# Two modules, before the attention of layers {glue:text}`first_layer` and {glue:text}`last_layer`, each with a table of
# its own. Together they hold more than a third of the model's bytes, and a token reads about a dozen kibibytes of them.

# %%
check("eng.module_params", math.prod(parts[layers[0]][0].shape) / 1e9)

# %%
check("eng.module_bytes", [b / 1e9 for b in nbytes[layers[0]]])

# %%
check("eng.total_gib", sum(map(sum, nbytes.values())) / 2**30)

# %%
sizes = [(f"layer {l}", rows[i], *nbytes[l], sum(nbytes[l])) for i, l in enumerate(layers)]
table("table|rows|payload, bytes|scales, bytes|together", sizes)

# %%
columns = orders * heads
check("eng.token_module_bytes", [columns * width, columns * width // 32])

# %%
check("eng.token_bytes", len(layers) * columns * (width + width // 32) / 1024)

# %% [markdown]
# The rows are not multiplied, but what they are projected to is:

# %%
wkv = tensors[f"layers.{layers[0]}.engram.wkv.weight"]
check("eng.projection", [wkv.shape[1], wkv.shape[0]])

# %%
check("eng.projection_params", wkv.shape[0] * wkv.shape[1] / 1e6)

# %%
gflop = len(layers) * 2 * wkv.shape[0] * wkv.shape[1] / 1e9, 2 * active(config) / 1e9
check("eng.token_gflop", list(gflop))

# %%
check("eng.order_width", heads * width)

# %%
cite("eng.benchmarks")

# %%
cite("eng.swap")

# %% [markdown]
# ## The vocabulary
#
# First, spellings that mean the same should share a memory. Each token's text is normalised, and tokens with equal
# texts share one compressed id:
#
# ```{literalinclude} ../dsv41_edu/engram/vocabulary.py
# :start-at: NORMALISE =
# :end-before: class CompressedVocabulary
# ```

# %%
tokenizer = real_tokenizer()
vocabulary = CompressedVocabulary.of(tokenizer)
check("eng.vocab", [len(vocabulary.map), vocabulary.size])

# %%
reduction = 100 * (1 - vocabulary.size / len(vocabulary.map))
check("eng.vocab_reduction", reduction)

# %%
check("eng.paper_reduction", reduction)

# %% [markdown]
# The size alone proves little: a map of the right size can be another one, and then every row is wrong. So the map has
# a digest, which an engine can compare. The ids that most tokens share:

# %%
shared = np.bincount(vocabulary.map).argsort(kind="stable")[::-1][:5]
most = [
    [tokenizer.id_to_token(int(i)) for i in np.flatnonzero(vocabulary.map == c)] for c in shared
]
table("tokens with this id|some of them", [(len(m), "  ".join(m[:6])) for m in most])

# %%
table("digest of the map (SHA-256)", [(vocabulary.digest,)])

# %% [markdown]
# The article's demonstration simplifies: it collapses all white space, knows no partial UTF-8, and numbers by sorted
# order from 1, with 0 for padding. Three spellings of one phrase become the same three ids:


# %%
def simplified(text):
    """The article's normaliser."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if not unicodedata.combining(c))
    return re.sub(r"\s+", " ", text.lower()).strip()


spellings = ["The", " the", "THE", "Cat", " cat", "sat", " Sat"]
numbered = {t: i for i, t in enumerate(sorted({simplified(s) for s in spellings}), 1)}
phrases = [["The", " cat", "sat"], [" the", "Cat", " Sat"], ["THE", " cat", " Sat"]]
found = {tuple(numbered[simplified(w)] for w in p) for p in phrases}
assert len(found) == 1
check("eng.demo_ids", list(found.pop()))

# %% [markdown]
# Where do the two differ on the real vocabulary? The deployed rules keep a lone space apart from nothing, keep
# partial characters apart, and know only four kinds of white space:

# %%
texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(len(vocabulary.map))]
differ = [i for i, t in enumerate(texts) if (NORMALISE.normalize_str(t) or t) != simplified(t)]
partial = sum("\ufffd" in t for t in texts)
groups = len({simplified(t) for t in texts})
rows_of = [("partial UTF-8, kept apart", partial), ("normalised otherwise", len(differ))]
table(
    "tokens of the real vocabulary|number",
    [*rows_of, ("ids left by the simplified rules", groups)],
)

# %% [markdown]
# ## The hash
#
# ```{literalinclude} ../dsv41_edu/engram/hashing.py
# :pyobject: NgramHash.hash
# ```
#
# Each head has its own modulus, a prime, which is also its number of rows. The search starts at the configured size
# and never takes a prime twice, not even in the other layer:

# %%
pad = int(vocabulary.compress(config.engram_pad_token_id))
hasher = NgramHash.of(config, pad)
check("eng.ranges", hasher.primes.shape[1])

# %%
check("eng.first_prime", hasher.primes[0, 0].item())

# %%
check("eng.prime_sums", hasher.rows)

# %%
distinct = len(set(hasher.primes.flatten().tolist()))
assert all(map(is_prime, hasher.primes.flatten().tolist()))
check("eng.primes_distinct", distinct)

# %%
check("eng.total_rows", sum(rows) / 1e6)

# %% [markdown]
# Nothing wraps. The multipliers are drawn below the bound at which a product could reach the sign bit, so the modulus
# of int64 numbers is the same in Python, torch and C:

# %%
largest = int(hasher.multipliers.max()) * (vocabulary.size - 1)
assert largest < 2**63
table("largest product, of 2^63", [(f"{largest / 2**63:.4f}",)])

# %% [markdown]
# Now type a text of your own, and see its rows in the official tables:

# %%
text = "Diana, Princess of Wales, met the press."

# %%
encoded = tokenizer.encode(text, add_special_tokens=False)
ids = torch.from_numpy(vocabulary.compress(encoded.ids))[None]
found, _ = hasher(ids)
shown = [tokenizer.decode([i]) for i in encoded.ids]
first = found[0, :, 0]
lines = zip(shown, encoded.ids, ids[0].tolist(), first.tolist(), strict=True)
table(
    "token|id|compressed|2-gram row, head 0|3-gram row, head 0|4-gram row, head 0",
    [(repr(t)[1:-1], i, c, r[0], r[heads], r[2 * heads]) for t, i, c, r in lines],
)

# %%
draw.pipeline(shown[:5], ids[0, :5].tolist(), columns, width, config.hc_mult, config.hidden_size)

# %% [markdown]
# Since the addresses depend on ids alone, they can be computed, and their rows fetched, before the forward pass. And
# they don't depend on how a sequence is cut: chunks of any size, with the history of the chunk before, give the same
# rows. An image is a wall that no n-gram crosses; it hides only the few tokens behind it.


# %%
def chunked(ids, mask, cuts):
    """Rows of a sequence that arrives in pieces."""
    history, pieces = None, []
    for a, b in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True):
        rows, history = hasher(ids[:, a:b], mask[:, a:b], history)
        pieces.append(rows)
    return torch.cat(pieces, 1)


generator = np.random.default_rng(0)
many = torch.from_numpy(generator.integers(0, vocabulary.size, (4, 64)))
mask = torch.from_numpy(generator.random((4, 64)) > 0.1)
whole, _ = hasher(many, mask)
cuts = [sorted(generator.integers(0, 65, k).tolist()) for k in range(20)]
check("eng.addresses_known_early", all(torch.equal(chunked(many, mask, c), whole) for c in cuts))

# %% [markdown]
# ## Check it: the article's demonstration
#
# Three multipliers, three moduli, and the phrase's ids. The printed rows come out, with Python's unbounded integers:

# %%
m = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
moduli = 16000057, 16000073, 16000093
back = 2, 1, 3  # the newest id first
mixed = back[0] * m[0] ^ back[1] * m[1] ^ back[2] * m[2]
check("eng.demo_rows", [mixed % p for p in moduli])

# %%
factors = {p: next((q for q in range(2, math.isqrt(p) + 1) if p % q == 0), p) for p in moduli}
why = "; ".join(f"{p:,} = {q:,} x {p // q:,}" for p, q in factors.items() if q < p)
check(
    "eng.demo_moduli_prime", [is_prime(p) for p in moduli], why=f"two of the three are not: {why}"
)

# %% [markdown]
# In the 64 bits of a real machine the demonstration's products wrap, and its rows are others. The deployed multipliers
# are bounded so that they can't:

# %%
unsigned = mixed % 2**64
signed = unsigned - 2**64 * (unsigned >= 2**63)
rows_of = [(f"{p:,}", mixed % p, unsigned % p, signed % p) for p in moduli]
table("modulus|unbounded|64 bits, unsigned|64 bits, signed", rows_of)

# %% [markdown]
# ## Why primes, why several heads
#
# A table row is shared by all n-grams that hash to it. In one head, a large set of n-grams collides often, as often as
# chance has it. Two n-grams that collide in one head almost never collide in another, so that together the heads tell
# them apart:

# %%
N = 200_000
grams = np.unique(generator.integers(0, vocabulary.size, (N, 4)), axis=0)
hashed = hasher.hash(torch.from_numpy(grams))[:, 0].numpy()
trigram = hashed[:, heads : 2 * heads]
pairs = len(grams) * (len(grams) - 1) / 2


def collisions(keys):
    """Pairs of n-grams with equal keys."""
    _, counts = np.unique(keys, axis=0, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


expected = pairs / hasher.primes[0, heads].item()
counted = [collisions(trigram[:, :k]) for k in (1, 2, heads)]
within = abs(counted[0] - expected) < 5 * expected**0.5
check("eng.nearly_unique", within and counted[1] <= 1 and counted[2] == 0)

# %%
rows_of = [
    ("one head", counted[0], f"{expected:.0f}"),
    ("two heads", counted[1], f"{expected / 1.6e7:.1e}"),
]
table(
    f"collisions among {len(grams):,} 3-grams|counted|expected",
    [*rows_of, ("eight heads", counted[2], "none")],
)

# %% [markdown]
# Give all heads the same modulus and they are one head eight times over. Give them powers of two and they see only low
# bits, so that a smaller head's row follows from a larger one's:

# %%
raw = hasher.multipliers[0, :3].numpy() * grams[:, :3]
r = raw[:, 0] ^ raw[:, 1] ^ raw[:, 2]
powers = 2 ** np.array([24, 23, 22, 21, 20, 19, 18, 17])
near = np.array(primes_from(2**17, 8))
cases = {"one modulus": np.full(8, near[0]), "powers of two": powers, "primes": near}
rows_of = [(name, collisions(r[:, None] % moduli)) for name, moduli in cases.items()]
table("small heads with|collisions in all eight", rows_of)

# %% [markdown]
# ## The gate
#
# ```{literalinclude} ../dsv41_edu/engram/gate.py
# :pyobject: signed_root_gate
# ```
#
# The root spreads what a plain sigmoid would saturate. Its sign is the sign bit's, so plus and minus zero differ, and
# the floor makes the gate jump at zero:

# %%
dots = torch.linspace(-80, 80, 401).double()
limit = config.hidden_size**0.5
draw.gate_curve(
    dots.tolist(),
    {"signed root": signed_root_gate(dots).tolist(), "plain sigmoid": dots.sigmoid().tolist()},
    limit,
)

# %%
zeros = torch.tensor([0.0, -0.0]).double()
ends = torch.tensor([-limit, limit]).double()
rows_of = [
    ("+0", zeros[0]),
    ("-0", zeros[1]),
    ("least, unit weights", ends[0]),
    ("most", ends[1]),
]
table("dot|gate", [(name, f"{signed_root_gate(x).item():.6f}") for name, x in rows_of])

# %% [markdown]
# Does it close when the memory contradicts the context? The more the key opposes the stream the less is added, and
# with large weights the gate tends to zero. But with unit weights the dot is bounded, and a closed gate still lets a
# few ten-thousandths of the value through. It is never zero:

# %%
against = -torch.logspace(-3, 5, 200).double()
falls = signed_root_gate(against)
closes = bool((falls.diff() <= 0).all()) and falls[-1].item() < 1e-100
check("eng.gate_closes", closes)

# %% [markdown]
# ## Does it help? Trained evidence
#
# A small language model with real experts and a real hash, on the shipped text. First the question that the paper
# asks: of the parameters that a token does not use, how many should be table rows, how many experts? Total and active
# parameters are equal to the unit in all arms; an expert turns into rows whole.

# %%
budget = engram_budget.read()
setup, points = budget["setup"], {"share": [], "rows": []}
for kind in points:
    points[kind] = [r for r in budget["summary"] if r["kind"] == kind]


def by_seed(kind):
    """Held-out losses [points][seeds]."""
    mine = {
        (r["value"], r["seed"]): r["heldout_loss"] for r in budget["runs"] if r["kind"] == kind
    }
    return [[mine[p["value"], s] for s in setup["seeds"]] for p in points[kind]]


draw.seeds(
    {"held-out loss": by_seed("share")},
    [p["value"] for p in points["share"]],
    "share of the sparse budget given to memory",
    "Held-out loss against the share of the sparse budget that is memory, three seeds a point.",
    "Experts or rows, at equal total and active parameters.",
)

# %%
rows_of = [
    (
        f"{p['value']:.0%}",
        f"{p['heldout_loss'][0]:.3f}",
        f"{p['minus_first'][0]:+.3f} ± {p['minus_first'][1]:.3f}",
    )
    for p in points["share"]
]
table("share given to memory|held-out loss|less none, seed by seed (2 sd)", rows_of)

# %%
losses = [p["heldout_loss"][0] for p in points["share"]]
best = min(points["share"], key=lambda p: p["heldout_loss"][0])
turns = (
    best["value"] < points["share"][-1]["value"]
    and -best["minus_first"][0] > best["minus_first"][1]
)
why = "the loss falls up to the largest share tried: memory helps so small a model on so small a text, no turn seen"
check("eng.u_shape", [losses[0], min(losses)], holds=turns, why=None if turns else why)

# %% [markdown]
# Second, a larger table with everything else fixed. The paper finds a power law over two orders of magnitude:

# %%
fit = budget["fit"]["mean"]
draw.seeds(
    {"held-out loss": by_seed("rows")},
    [p["value"] for p in points["rows"]],
    "rows of the table",
    "Held-out loss against the rows of the table, on a logarithmic axis.",
    "A larger table, all else equal.",
    logx=True,
)

# %%
say(exponent=f"{fit['exponent']:.4f}", r2=f"{fit['r2']:.3f}")
falls = all(a[0] > b[0] for a, b in itertools.pairwise(p["heldout_loss"] for p in points["rows"]))
check("eng.power_law", fit["exponent"], holds=falls and fit["r2"] > 0.9)

# %% [markdown]
# (Exponent {glue:text}`exponent`, with {glue:text}`r2` of the variance of the logarithms on the line. The points bend
# around it: what these runs show is that the loss keeps falling, not that the law is exact.) What does a
# trained memory do? Its gate at each token of a held-out verse: the memory read at a token is that of the n-gram which
# ends there.

# %%
use = engram_use.read()
verse = use["summary"]["passages"][0]
draw.passage(verse["tokens"], verse["gates"])

# %% [markdown]
# Over all held-out tokens, by how often the training text has the n-gram that ends there: from ten times on, the more
# often it was met, the wider the gate opens for what was learned of it.

# %%
least = [*use["setup"]["bins"]]
named = [
    "never",
    *(f"{a} to {b - 1}" for a, b in itertools.pairwise(least[1:])),
    f"{least[-1]} up",
]
table(
    "n-gram|" + "|".join(named),
    [
        (f"{order}-grams", *(f"{mean:.2f} ± {two_sd:.2f}" for mean, two_sd in row))
        for order, row in use["summary"]["gate_by_count"].items()
    ],
)

# %% [markdown]
# (Mean gate and two standard deviations over the seeds.) And the loss with every gate shut, on the tokens that complete
# a frequent phrase of the training text, on names, and on the rest. Nothing was trained again: it says what this model
# leans on, not what it needs.

# %%
rows_of = []
for name, row in use["summary"]["ablation"].items():
    on, off, more = (row[key] for key in ("on", "off", "increase"))
    rows_of.append((name, f"{on[0]:.3f}", f"{off[0]:.3f}", f"{more[0]:+.3f} ± {more[1]:.3f}"))
table("tokens|loss|memory off|increase (2 sd)", rows_of)

# %%
cite("eng.ablation")

# %%
cite("eng.best_layer")

# %% [markdown]
# The first steps of one run again, so that a stale file is noticed:

# %%
stored = next(
    r for r in budget["runs"] if (r["kind"], r["value"], r["seed"]) == ("share", 0.25, 0)
)
live = engram_budget.agrees(engram_budget.slice_run(), stored)
assert live, "book/data/engram_budget.json is stale: make experiments"

# %% [markdown]
# ## Serve it: where the table may live
#
# The tables hold {glue:text}`both_gib` GiB, and a token needs a few rows of them, known in advance. They may lie in
# the memory of the host or on a disk, if the rows come in time:

# %%
cite("eng.host_cost")

# %% [markdown]
# N-grams follow Zipf's law: few are most of the text. Rows chosen on the training text, and the share of the reads of
# held-out text that they serve:

# %%
zipf = engram_zipf.read()
served = {f"{order}-grams": row["served"] for order, row in zipf["by_order"].items()}
draw.tiers(served, zipf["sizes"])

# %%
tier = zipf["sizes"].index(30_000)
share = sum(row["served"][tier] for row in zipf["by_order"].values()) / len(zipf["by_order"])
held = 3 * zipf["sizes"][tier] / sum(row["distinct"] for row in zipf["by_order"].values())
say(tier_share=f"{share:.0%}", tier_rows=f"{held:.0%}")
check("eng.zipf_tiers", share > 0.5 and held < 0.1)

# %% [markdown]
# A tier of {glue:text}`tier_rows` of the rows serves {glue:text}`tier_share` of the reads, pairs far more than
# 4-grams. The package has the three places: in memory, in a shard of the official layout that is never loaded, and
# tiered, with the same answers from each:

# %%
payload, scales = fp8_rows_encode(torch.from_numpy(generator.standard_normal((4096, 256))))
cold = EngramTable.of(payload, scales)
asked = torch.from_numpy(generator.zipf(1.3, 2000) % 4096)
hot = TieredTable(cold, most_frequent(asked[:1000], 64))
with Prefetcher(hot) as prefetcher:
    request = prefetcher.request(asked)
    same = torch.equal(request.wait(), cold.read(asked))
table("prefetched from 64 hot rows of 4096|value", [("equal to a direct read", str(same))])

# %% [markdown]
# Measured on a file of several gigabytes, in memory, and prefetched behind a product of matrices; with the hash beside
# the published demonstration's way to do it:

# %%
say(measured=measured("engram."))
timings("engram.")

# %% [markdown]
# On {glue:text}`measured`. What a single look-up waits for, when the system holds the file's pages (warm) and when it
# has to ask the disk (cold). Memory is what the process grew by: the rows asked for, and nothing of the file.

# %%
say(latency_measured=measured("latency.engram"))
latencies("latency.engram")

# %% [markdown]
# On {glue:text}`latency_measured`.
#
# ## Fuse it
#
# Three kernels: the hash; the gather, which decodes a row's bytes on the way; and the gate, forward and backward, which
# reads streams, keys and value once. Held against the references, exact where they are integers or bytes:

# %%
T = 5
ids = torch.from_numpy(generator.integers(0, hasher.size, (1, T)))
parts_of = hasher.multipliers, hasher.primes, hasher.offsets
hashes = torch.equal(fused_ngram_hash(ids, *parts_of, pad)[0], hasher(ids)[0])
some = torch.from_numpy(generator.integers(0, 4096, (T, 24)))
gathered = fused_engram_rows(payload, scales, some)
exact = torch.equal(gathered, cold.read(some).flatten(1))
X, K = (torch.from_numpy(generator.standard_normal((T, 4, 64))).float() for _ in range(2))
u, q, w = (
    torch.from_numpy(generator.standard_normal(s)).float() for s in ((T, 64), (4, 64), (4, 64))
)
fused, ours = fused_engram_gate(X, K, u, q, w), add_memory(X, K, u, q, w)
close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(fused, ours, strict=True))
named = ("hash, exact", hashes), ("rows, to the bit", exact), ("gate, to 1e-5", close)
table("fused and reference|agree", [(name, str(found)) for name, found in named])

# %%
registers("ngram_hash", "engram_rows", "engram_gate")

# %% [markdown]
# ## Break it
#
# Faults that were really made. A token id in place of its compressed id hashes to other rows, and its products may
# overflow; a negative id, such as padding, would be read from the end of the map. Both are refused here:


# %%
tries = {
    "an uncompressed id": lambda: hasher(torch.tensor([[129_279]])),
    "a negative id": lambda: vocabulary.compress([-1]),
    "a row of another table": lambda: cold.read(torch.tensor([4096])),
}
table("given|answer", [(name, refused(call)) for name, call in tries.items()])

# %% [markdown]
# ## Test yourself
#
# ```{exercise}
# :label: engram-wall
#
# How many tokens after an image can't see past it?
# ```
#
# ````{solution-start} engram-wall
# :class: dropdown
# ````

# %%
line = torch.arange(12)[None]
wall = torch.ones(1, 12, dtype=torch.bool)
wall[0, 4] = False
hidden = (hasher(line, wall)[0] != hasher(line)[0]).flatten(2).any(-1)[0]
table(
    "positions with other rows than without the image",
    [(str(hidden.nonzero().flatten().tolist()),)],
)

# %% [markdown]
# ````{solution-end}
# ````
#
# ## References
#
# The module, its scaling and its ablations: {cite}`engram`; the deployed form: {cite}`v41`; storage formats: {cite}`mx`.
