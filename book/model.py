# %% [markdown]
# # The whole model
#
# All the parts, assembled. The same few hundred lines are the full model, built from its config without memory and
# counted to the unit, and a miniature with every mechanism that was really trained and writes. What holds the book
# together is one question: what does a token touch?

# %% tags=["hide-input"]
import json

import torch
from dsv41_edu import checkpoint
from dsv41_edu.accounting import touched
from dsv41_edu.attention.attention import nearest, role
from dsv41_edu.attention.indexer import select
from dsv41_edu.benchmarks import gpu
from dsv41_edu.claims import check
from dsv41_edu.config import preset
from dsv41_edu.experiments import indexer, mini, mini_peers, text
from dsv41_edu.experiments.switches import SWITCHES, without
from dsv41_edu.figures import model as draw
from dsv41_edu.figures.benchmarks import measured, registers, timings
from dsv41_edu.figures.glue import say
from dsv41_edu.figures.tables import refused, table
from dsv41_edu.generate import MINI, Summary, generate
from dsv41_edu.model import Transformer
from dsv41_edu.tensors import tensor_plan
from dsv41_edu.training import evaluate, teach
from kernels.launches import count_launches

torch.set_num_threads(1)  # small work: more threads only wait for one another
torch.manual_seed(0)  # of modules' first weights
config = preset("v41_flash")
full = Transformer(config, device="meta")

# %% [markdown]
# ## The cost
#
# One token of decoding passes every layer. It multiplies a small part of the weights it passes, and looks up a little
# of what is only read:

# %%
stations = {
    "embedding row": ("embedding",),
    "n-gram rows": ("Engram tables",),
    "n-gram projections": ("Engram projections",),
    "seams (mHC)": ("mHC",),
    "attention": ("attention",),
    "compressor, indexer": ("compressor", "indexer"),
    "router": ("router",),
    "routed experts": ("routed experts",),
    "shared experts": ("shared experts",),
    "head": ("head",),
}
sums = touched(config)
draw.journey(
    [
        (n, sum(sums[g].matrices for g in gs) / 1e6, sum(sums[g].nbytes for g in gs) / 1e6)
        for n, gs in stations.items()
    ]
)

# %% [markdown]
# ## The idea
#
# Every layer has the same form: two seams between the residual streams and a sublayer, attention first, then experts.
# What differs is what its attention may read, and whether the n-gram memory speaks before it.
#
# ```{literalinclude} ../dsv41_edu/layer.py
# :pyobject: Layer.forward
# ```

# %%
check(
    "mod.layers",
    [
        len(full.layers),
        2 * len(full.layers),
        sum(hasattr(layer.ffn, "experts") for layer in full.layers),
        *(i for i, layer in enumerate(full.layers) if layer.engram is not None),
    ],
)

# %%
routed, shared = config.n_routed_experts, config.n_shared_experts
check("mod.seven_of_385", [config.num_experts_per_tok + shared, routed + shared])

# %% [markdown]
# The modules' names are the checkpoint's. Built on torch's "meta" device the model has every tensor and no memory, so
# it can be held against the tensor plan, name for name and shape for shape:

# %%
plan = [t for t in tensor_plan(config) if t.use != "scale"]
state = full.state_dict()
shapes = {t.name: (*t.shape[:-1], t.shape[-1] * (2 if t.dtype == "I8" else 1)) for t in plan}
same = shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
table(
    "tensors|parameters|names and shapes as in the plan",
    [(len(state), sum(t.numel() for t in state.values()), same)],
)

# %% [markdown]
# ## Attention in brief
#
# One latent of a few hundred channels is key and value of all heads. Each layer keeps those of the last tokens, its
# window. Four layers also compress: they make one entry of one or two tokens, and an indexer chooses which entries a
# query reads. All other layers reuse what the nearest such layer below them made.
#
# ```{literalinclude} ../dsv41_edu/attention/attention.py
# :pyobject: Attention.forward
# ```
#
# The roles, computed from the config:

# %%
roles = {}
for layer in range(config.num_hidden_layers):
    key = role(config, layer), config.compress_ratios[layer]
    roles.setdefault(key, []).append(layer)
shown = []
for (name, ratio), layers in roles.items():
    makers = (
        sorted({nearest(config.kv_source_layer_ids, i) for i in layers}) if ratio else ["none"]
    )
    lists = (", ".join(map(str, ids)) for ids in (layers, makers))
    shown.append((name, ratio or "no entries", *lists))
table("role|tokens an entry|layers|entries made by", shown)

# %% [markdown]
# The miniature has all the roles. What one query of it really reads, in a text that nobody trained on:

# %%
small = checkpoint.load(MINI, dtype=torch.float64).eval()
tiny, rows = small.config, torch.cat(mini.heldout(256, 4))
with torch.no_grad():
    run = small.run(rows[:1, :-1])
at = 200
seen = {f"layer {0}, window": (1, [])}
for layer, chosen in run.chunk.indices.items():
    name = f"layer {layer}, {role(tiny, layer)}, ratio {tiny.compress_ratios[layer]}"
    seen[name] = tiny.compress_ratios[layer], [e for e in chosen[0, at].tolist() if e >= 0]
draw.sees(at, tiny.sliding_window, seen)

# %% [markdown]
# ### How an indexer learns
#
# The loss of the next token has no gradient for a choice, so an indexer has a loss of its own: its scores' softmax is
# drawn to where attention went, summed over the heads and the layers that share the choice. At first every layer
# reads all entries; then only what is chosen, and so does the lesson. Does it find what attention looks for? In a
# planted task a small model is asked for the value that once followed a key, far outside the window; one entry of all
# has it. The same trained weights, with entries chosen in four ways:

# %%
planted = json.loads(indexer.RESULT.read_text())
task, chance = planted["setup"], 1 / planted["setup"]["values"]
shown = []
for name in ("all", "oracle", "indexer", "random", "newest"):
    of = planted["found"][name]
    parts = (of.get(number) for number in ("right", "attention", "overlap", "kl"))
    shown.append((name, *("" if v is None else f"{v[0]:.3f} ± {v[1]:.3f}" for v in parts)))
say(seeds=planted["seeds"], pairs=task["pairs"], top_k=task["top_k"], chance=f"{chance:.3f}")
table("entries read|right answers|attention caught|of the oracle's|KL, nats", shown)

# %% [markdown]
# Rows of {glue:text}`pairs` pairs and more, {glue:text}`top_k` entries read; {glue:text}`seeds` seeds, mean and two
# standard deviations. Guessing is right at {glue:text}`chance`. The oracle takes the entries that have most attention
# when all are read; "random" in the last column has equal scores.
#
# ## The miniature
#
# Eight layers, all mechanisms on but images, trained on the text of this book's other experiments and shipped in the
# official layout: FP4 experts, FP8 matrices, tables of FP8 rows. In the last part of the training every forward pass
# used the rounded weights, so storing them loses next to nothing.

# %%
trained = json.loads(mini.CURVES.read_text())
steps = trained["setup"]["steps"]
heldout = [(i + 1, c["heldout"]) for i, c in enumerate(trained["curves"]) if "heldout" in c]
marks = {
    "entries chosen": round(steps * trained["setup"]["dense"]),
    "weights rounded": round(steps * trained["setup"]["as_stored"]),
}
draw.curves([c["loss"] for c in trained["curves"]], heldout, marks)

# %%
bits = trained["bits_per_byte"]
peers = json.loads(mini_peers.RESULT.read_text())
say(
    parameters=trained["parameters"],
    tokens_m=f"{trained['tokens'] / 1e6:.1f}",
    minutes=round(trained["seconds"] / 60),
    epochs=f"{trained['tokens'] / len(text.tokens('train')):.1f}",
    bits=f"{bits['as stored']:.3f}",
    trigram=f"{peers['trigram']['all of the text']:.3f}",
)

# %%
table(
    "on the held-out chapters|bits a byte",
    [
        ("the miniature, as trained", f"{bits['trained']:.3f}"),
        ("the miniature, as stored", f"{bits['as stored']:.3f}"),
        (
            "a trigram (Witten and Bell) of the whole training text",
            f"{peers['trigram']['all of the text']:.3f}",
        ),
    ],
)

# %% [markdown]
# {glue:text}`parameters` parameters saw {glue:text}`tokens_m` million tokens, {glue:text}`epochs` times the text, in
# {glue:text}`minutes` minutes of two cores: {glue:text}`bits` bits a byte, where the trigram needs
# {glue:text}`trigram`. The stored curve is of that run; this is a slice of it, computed now from the stored weights:

# %%
again = evaluate(small, mini.heldout(256, 16))
table("nats a token on 16 rows of held-out text", [(f"{again:.3f}",)])

# %% [markdown]
# A dense transformer of as many active parameters, trained alike on the same batches, and the miniature with the same
# short schedule, three seeds each (mean and two standard deviations):

# %%
table(
    "short training|bits a byte|plus or minus",
    [(name, *(f"{v:.3f}" for v in peers[name])) for name in ("mini", "dense")]
    + [("trigram of as many tokens", f"{peers['trigram']['as many tokens']:.3f}", "")],
)

# %%
(mine, my_spread), (dense, its_spread) = peers["mini"], peers["dense"]
apart = abs(mine - dense) > my_spread + its_spread
say(
    beside="a difference shows" if apart else "no difference is seen",
    behind="better" if max(mine, dense) < peers["trigram"]["as many tokens"] else "worse",
)

# %% [markdown]
# Between the two {glue:text}`beside` at this length, and both are {glue:text}`behind` than a trigram that counted as
# many tokens: a count needs no epochs. What the long training buys is in the table above.

# %% [markdown]
# What its indexers learned, on tokens late in held-out rows, one layer a line; in brackets what as many random entries
# would catch:

# %%
single = checkpoint.load(MINI, dtype=torch.float32).eval()
few = mini.heldout(256, 8)
draw_noise = torch.Generator().manual_seed(0)
with torch.no_grad():
    read = single.run(few[0][:, :-1], dense=True, teach=True).chunk
shown, late, k = [], slice(192, None), tiny.index_topk
for layer, mass in read.mass.items():
    scores = read.scores[layer]
    noise = torch.rand(scores.shape, generator=draw_noise)
    best, mine, any_k = (
        select(w.where(~scores.isneginf(), -torch.inf), k) for w in (mass, scores, noise)
    )
    kl = teach(*(of[layer][:, late] for of in (read.scores, read.mass, read.indices)))
    ours, random = (indexer.caught(mass, chosen, best, late) for chosen in (mine, any_k))
    shown.append((layer, f"{kl:.3f}", *(f"{ours[n]:.3f} ({random[n]:.3f})" for n in ours)))
table("layer|KL, nats|attention caught|of the oracle's", shown)

# %% [markdown]
# ## It reads and writes

# %%
tokenizer, took = text.tokenizer(), Summary()
prompt = [tiny.bos_token_id, *tokenizer.encode("In the beginning", add_special_tokens=False).ids]
written = generate(small, [prompt], 60, temperature=0.7, seed=2, summary=took)
print(tokenizer.decode([*prompt, *written[0]]))

# %%
table(
    "prompt tokens|tokens written|experts touched|of|Engram rows read|bytes of cache",
    [
        (took.prompt_tokens, took.tokens, int(took.touched.sum()), took.touched.numel())
        + (took.rows_read, took.cache_bytes)
    ],
)

# %% [markdown]
# The same from a terminal: `python -m dsv41_edu.generate --prompt "In the beginning" --temperature 0.7 --seed 2`.
#
# ## What each mechanism contributes
#
# Switch one off in the trained model, change nothing else, and read the held-out text again. This says what the
# trained model leans on, not what a model trained without the mechanism would have learned:

# %%
base = evaluate(single, few)
draw.contributions([(name, evaluate(without(single, name), few) - base) for name in SWITCHES])

# %% [markdown]
# ## Prefill against decode
#
# However a text is cut into a prompt and single tokens, the logits are those of one pass over all of it. A forward
# pass only reads the cache; `commit` makes as many of its tokens part of the past as are wanted.

# %%
ids = rows[1:2, :120]
with torch.no_grad():
    whole = small(ids)
    cache, parts = small.cache(1, 120), []
    for piece in ids.split([70, 1, 1, 33, 1, 14], dim=1):
        parts.append(small(piece, cache))
pieces_agree = bool((torch.cat(parts, 1) - whole).abs().max() < 1e-9)

# %% [markdown]
# A causal encoder-decoder needs less for a prompt. The layers from the decoder's first on read entries of that layer
# alone, so a prompt token stops there; only the last window of tokens runs on, to fill the decoder's windows. Up to a
# window's length nothing is cut and nothing changes. Beyond it the decoder's windows can't look behind the replay's
# start, and the logits differ a little:


# %%
def difference(n):
    """Of the last logits: bounded replay against the full pass, for a prompt of n tokens."""
    prompt = rows[2:3, :n]
    with torch.no_grad():
        replayed = small.run(prompt, small.cache(1, n), replay=True)
        last = small.logits(replayed.hidden[:, -1])
        return float((last - small(prompt)[:, -1]).abs().max())


W = tiny.sliding_window
lengths = [W // 4, W // 2, W, W + 1, W + 8, 2 * W, 3 * W, 4 * W, 6 * W]
differences = [difference(n) for n in lengths]
draw.replayed(lengths, differences)

# %%
uncut = [d for n, d in zip(lengths, differences, strict=True) if n <= W]
cut = [d for n, d in zip(lengths, differences, strict=True) if n > W]
check("mod.prefill_equals_decode", pieces_agree and max(uncut) < 1e-9 and min(cut) > 1e-9)

# %% [markdown]
# What a prompt of the full model saves is in the accounting chapter. Here, launches of one decode token, counted as
# a GPU would see them in the eager form, station by station:


# %%
def launched():
    """Launches of one decode token in the eager form, by station."""
    spent, before = {}, []
    with torch.no_grad(), count_launches() as seen:
        for layer in single.layers:
            for name in ("attn", "ffn"):
                module = getattr(layer, name)
                module.register_forward_pre_hook(lambda *_: before.append(seen.total()))
                module.register_forward_hook(
                    lambda *_, name=name: spent.setdefault(name, []).append(
                        seen.total() - before.pop()
                    )
                )
        single.run(ids[:, :1], single.cache(1, 8))
    layers = sum(map(sum, spent.values()))
    return {
        "attention, all layers": sum(spent["attn"]),
        "experts, all layers": sum(spent["ffn"]),
        "seams, memory, head": seen.total() - layers,
    }


# %%
table("station|launches, miniature, eager", list(launched().items()))

# %% [markdown]
# ## Speculation changes nothing
#
# The drafter was the last chapter's subject; here only its promise is checked. Greedy decoding with it writes the very
# tokens that it writes without, for each row of a batch:

# %%
prompts = [rows[i, :n].tolist() for i, n in ((0, 30), (1, 7), (3, 61))]
plain = generate(small, prompts, 40)
drafted = generate(small, prompts, 40, speculate=True)
check("mod.speculation_lossless", plain == drafted)

# %% [markdown]
# ## On a GPU
#
# The same modules run there, with the Triton kernels of `kernels/` in the places of the reference functions: gate,
# experts, seams, n-gram gate, attention and index scores. This cell runs on a GPU where there is one, in fp32, and
# holds the logits against those of the CPU in float64:

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
there = checkpoint.load(MINI, dtype=torch.float32, device=device).eval()
with torch.no_grad():
    away = (there(ids.to(device)).cpu() - small(ids)).abs().max()
table("logits within 0.001 of float64", [(bool(away < 1e-3),)])

# %% [markdown]
# The two kernels of attention, compiled ahead of time for real targets at the official sizes; nothing spills:

# %%
registers("sparse_attention", "index_scores")

# %% [markdown]
# `make gpu` holds every kernel at official sizes against float64 and times it. The last such run:

# %%
recorded = {"machine": {"date": "none recorded yet", "gpu": "none"}}
if gpu.RESULTS.exists():
    recorded = json.loads(gpu.RESULTS.read_text())
table("recorded|GPU", [(recorded["machine"]["date"], recorded["machine"]["gpu"])])

# %% [markdown]
# ## Speed
#
# Beside the public library's V4 with as many layers of equal sizes, and what a longer context costs a decode token:

# %%
say(speed_on=measured("model"))
timings("model")

# %% [markdown]
# Times of {glue:text}`speed_on`.
#
# ## Break it
#
# Mistakes that leave a model which looks alive. What they do to the miniature's loss:


# %%
def broken(change):
    """The loss of a changed copy, above the model's own."""
    model = checkpoint.load(MINI, dtype=torch.float32).eval()
    change(model)
    return f"{evaluate(model, few) - base:+.3f}"


def transposed(model):
    """comb read by its other index."""

    def other(seam):
        def run(*arguments):
            *rest, comb = seam(*arguments)
            return *rest, comb.transpose(-1, -2)

        return run

    model.seams = tuple(map(other, model.seams))


# %%
def one_base(model):
    """The window layers' rotary base in every layer."""
    model.config = model.config.replace(compress_rope_theta=model.config.rope_theta)


def raw_ids(model):
    """Token ids hashed without compression."""
    size = model.config.engram_compressed_vocab_size
    model.set_token_map(torch.arange(model.config.vocab_size) % size)


mistakes = {
    "comb read by its other index": transposed,
    "one rotary base in all layers": one_base,
    "n-grams of uncompressed ids": raw_ids,
}
table("mistake|nats a token", [(name, broken(change)) for name, change in mistakes.items()])

# %% [markdown]
# What is asked of it wrongly is refused before anything runs:


# %%
too_long = [0] * tiny.max_position_embeddings
tries = {
    "an empty prompt": lambda: generate(small, [[]], 5),
    "a prompt without room": lambda: generate(small, [too_long], 5),
    "an id out of range": lambda: generate(small, [[tiny.vocab_size]], 5),
    "half an image": lambda: generate(small, [[tiny.image_token_id] * 2], 5, images=[[]]),
}
table("given|answer", [(name, refused(call)) for name, call in tries.items()])

# %% [markdown]
# ## Test yourself
#
# ```{exercise}
# :label: model-groups
#
# A layer at ratio 2 runs tokens one by one. Which positions see an entry that the position before didn't?
# ```
#
# ````{solution-start} model-groups
# :class: dropdown
# ````

# %%
positions = range(10)
new = [t for t in positions if (t + 1) // 2 > t // 2]
table("positions that see a new entry at ratio 2", [(", ".join(map(str, new)),)])

# %% [markdown]
# ````{solution-end}
# ````
#
# ## References
#
# Architecture, roles and decoder replay: {cite}`v41`; the indexer and how it is trained: {cite}`v32`.
