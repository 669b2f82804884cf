# %% [markdown]
# # Parameter accounting
#
# A checkpoint of nearly half a terabyte produces one token after another, and each token reads a fiftieth of it. This
# chapter asks one question of every byte: **does a token touch it?** All answers are sums over one list, the tensor
# plan, that follows from the model's `config.json` alone. The plan is held against the released files, name by name
# and byte by byte, before anything is concluded from it.
#
# You will see which definition makes each figure in circulation true: the printed sizes of the backbone and of its
# part that is no expert can't both be read the same way, and one size that is often quoted is a sum of roundings.

# %% tags=["hide-input"]
from fractions import Fraction

from dsv41_edu.accounting import (
    active,
    backbone,
    cache_bytes,
    engram_rows,
    expert,
    flops,
    grand_total,
    headline,
    remainder,
    totals,
    touched,
    window_bytes,
)
from dsv41_edu.claims import check
from dsv41_edu.config import preset
from dsv41_edu.figures import accounting as draw
from dsv41_edu.figures.glue import say
from dsv41_edu.figures.tables import table
from dsv41_edu.generations import plan
from dsv41_edu.headers import file_size

B, M, GiB = 10**9, 10**6, 2**30
config = preset("v41_flash")
tensors = plan(config)
whole = grand_total(tensors)
say(
    tensors=whole.tensors,
    parameters=whole.parameters,
    nbytes=whole.nbytes,
    gib=round(whole.nbytes / GiB, 2),
)

# %% [markdown]
# ## The cost
#
# From the config follow {glue:text}`tensors` tensors with {glue:text}`parameters` parameters in
# {glue:text}`nbytes` bytes, {glue:text}`gib` GiB. Here is where they live.

# %% tags=["hide-input"]
draw.treemap(config)

# %% [markdown]
# Two things own the model: narrow experts, and tables that are read but never multiplied. What most people picture as
# "the transformer", attention and embeddings, is the small corner.
#
# ## The idea: one list, four uses
#
# Every tensor is used in one of four ways, and the use decides what it costs.
#
# | use | what a token does with it | arithmetic | example |
# |---|---|---|---|
# | matrix | multiplies its activation | 2 FLOPs a parameter | `attn.wq_a`, one expert's `w1` |
# | vector | scales or shifts channels | next to none | norms, biases, attention sinks |
# | rows | looks a few up | none | embedding, Engram tables |
# | scale | belongs to a quantised payload | none | one byte for 32 weights |
#
# "Active parameters" on a model card are the matrices that one token meets. A look-up is not counted, or the
# embedding and the tables would be active in every token.
#
# ## Shapes
#
# One layer of the plan, with its experts folded to the first:

# %%
layer = [t for t in tensors if t.name.startswith("layers.20.") and ".scale" not in t.name]
first = [t for t in layer if ".experts." not in t.name or ".experts.0." in t.name]
table(
    "name|dtype|shape|use|group",
    [(t.name, t.dtype, str(list(t.shape)), t.use, t.group) for t in first],
)

# %% [markdown]
# Layer 20 is one of four that make the global cache: it alone has a `compressor` with no gate (groups of one token
# have nothing to weigh) and an `indexer` that owns keys.
#
# ## Build it
#
# The plan is a generator that reads like the table above. This is the part that a layer and a drafter block share:
#
# ```{literalinclude} ../dsv41_edu/tensors.py
# :pyobject: block
# ```
#
# A quantised matrix is two tensors. FP4 stores two codes in a byte, so its stored width is half its real one; this
# is the first thing that goes wrong when people count a checkpoint:
#
# ```{literalinclude} ../dsv41_edu/tensors.py
# :pyobject: fp4
# ```
#
# ## Check it: one expert
#
# An expert is a SwiGLU network of three matrices, and it is *narrow*: less than half as wide as the residual stream.

# %%
one = expert(config)
check("acc.expert_params", one.parameters)

# %%
check("acc.expert_params_m", Fraction(one.parameters, M))

# %%
check(
    "acc.expert_rel_width",
    Fraction(config.moe_intermediate_size, config.hidden_size),
)

# %% [markdown]
# What a token sees is the routed experts it is sent to and the shared one; what the layer owns is all of them. That
# ratio is the whole point of a sparse layer.

# %%
seen = (config.num_experts_per_tok + config.n_shared_experts) * config.moe_intermediate_size
check("acc.token_width", seen)

# %%
check("acc.token_rel_width", Fraction(seen, config.hidden_size))

# %%
owned = (config.n_routed_experts + config.n_shared_experts) * config.moe_intermediate_size
check("acc.owned_rel_width", Fraction(owned, config.hidden_size))

# %% [markdown]
# ## Check it: the whole model
#
# Group by group, with the scales counted in the bytes and not in the parameters:

# %%
groups = totals(tensors)
table(
    "group|tensors|parameters|bytes",
    [(name, *s) for name, s in groups.items()] + [("all", *whole)],
)

# %%
check("acc.routed_total", Fraction(groups["routed experts"].parameters, B))

# %%
check("acc.shared_total", Fraction(groups["shared experts"].parameters, B))

# %%
assert groups["embedding"] == groups["head"]  # untied: the same size, stored twice
check("acc.embedding", Fraction(groups["embedding"].parameters, B))

# %%
check("acc.engram_params", Fraction(groups["Engram tables"].parameters, B))

# %% [markdown]
# The *backbone* is everything but the tables and the drafter. Whether it includes the image encoder can't be told
# from its printed size. The remainder, once the experts are taken away, does tell: it prints as stated only
# **without** the encoder. So the two figures that are usually quoted together use two definitions.

# %%
core = grand_total(backbone(tensors)).parameters
vision = groups["vision"].parameters
rest = remainder(tensors)
table(
    "definition|with vision|without",
    [
        ("backbone", core, core - vision),
        (
            "backbone less experts",
            sum(rest.values()) + vision,
            sum(rest.values()),
        ),
    ],
)

# %%
check("acc.backbone", Fraction(core, B))

# %%
check("acc.remainder", Fraction(sum(rest.values()), B))

# %% [markdown]
# The article doesn't itemise that remainder. The plan does:

# %%
table(
    "part of the remainder|parameters",
    sorted(rest.items(), key=lambda kv: -kv[1]) + [("all", sum(rest.values()))],
)

# %% [markdown]
# ## Check it: bytes
#
# The headers of the released shards give five dtypes. The plan reproduces every count and every byte of them:

# %%
dtypes = totals(tensors, "dtype")
table(
    "stored dtype|tensors|bytes|GiB",
    [(name, s.tensors, s.nbytes, round(s.nbytes / GiB, 3)) for name, s in dtypes.items()]
    + [("all", whole.tensors, whole.nbytes, round(whole.nbytes / GiB, 3))],
)

# %% [markdown]
# ### Which bytes are "the experts"?
#
# A serving recipe prints one size for them. Four readings of the same words:

# %%
payload = {t: s.nbytes for t, s in totals(tuple(t for t in tensors if t.dtype == "I8")).items()}
scaled = {name: groups[name].nbytes for name in payload}
backbone_experts, drafter_experts = payload
experts_gib = {
    "FP4 payload, backbone and drafter": sum(payload.values()) / GiB,
    "FP4 payload, backbone": payload[backbone_experts] / GiB,
    "payload and scales, backbone": scaled[backbone_experts] / GiB,
    "payload and scales, backbone and drafter": sum(scaled.values()) / GiB,
}
experts = check("acc.experts_gib", experts_gib["FP4 payload, backbone and drafter"])
experts

# %% tags=["hide-input"]
draw.readings(experts_gib, stated=float(experts.claim.value))

# %% [markdown]
# For the tables the same source counts *with* scales. Without them they would be
# {glue:text}`tables_bare` GiB, which is what its memory table prints in another row.

# %%
tables = [t for t in tensors if t.group == "Engram tables"]
say(tables_bare=round(sum(t.nbytes for t in tables if t.use == "rows") / GiB, 1))
check("acc.engram_gib", Fraction(sum(t.nbytes for t in tables), GiB))

# %% [markdown]
# ### A size that doesn't reproduce
#
# The whole checkpoint is quoted with a size that no sum of ours gives, whether of payloads, tensors or files:

# %%
check(
    "acc.checkpoint_gib",
    Fraction(whole.nbytes, GiB),
    why=f"All tensors come to {whole.nbytes / GiB:.2f} GiB: the stated size is rounded up, not to the nearest.",
)

# %% [markdown]
# ### To the byte
#
# The last two shards of the release hold one Engram module each. A safetensors file is eight bytes of length, a JSON
# header, and the data; the header's length follows from the names and shapes. So the size of a file of a hundred
# gigabytes can be foretold from a config of three kilobytes, and it is the released size to the byte. (The order of
# the tensors in the file is inferred. It moves the header by a few bytes, the data by none.)

# %%
shards = []
for n in config.engram_layer_ids:
    module = [t for t in tensors if t.name.startswith(f"layers.{n}.engram.")]
    header, data = file_size(sorted(module, key=lambda t: (t.dtype, t.name)))
    shards.append((n, len(module), header, data, 8 + header + data))
table("shard of layer|tensors|header|data|file", shards)

# %% [markdown]
# ## Check it: what a token touches
#
# A *decode* token goes through all layers and the head. A *prefill* token, one of the prompt, stops half way: the
# upper half of the layers reads one cache that layer 20 makes, so a prompt token needs nothing above it but the two
# small matrices that make its entry in that cache.

# %% tags=["hide-input"]
draw.flow(config)

# %%
decode, prefill = touched(config, "decode"), touched(config, "prefill")
nothing = (0, 0, 0, 0)
table(
    "group|decode: matrices|vectors|rows|bytes|prefill: matrices",
    [(g, *decode[g], prefill.get(g, nothing)[0]) for g in decode]
    + [
        (
            "all",
            *map(sum, zip(*decode.values(), strict=True)),
            active(config, "prefill"),
        )
    ],
)

# %%
in_experts = decode["routed experts"].matrices + decode["shared experts"].matrices
check("acc.decode_expert_active", Fraction(in_experts, B))

# %%
check("acc.decode_other_active", Fraction(active(config) - in_experts, B))

# %%
check("acc.decode_active", Fraction(active(config), B))

# %%
check("acc.prefill_active", Fraction(active(config, "prefill"), B))

# %%
check("acc.prefill_layers", config.decoder_start)

# %% [markdown]
# The printed figures are round, and several definitions print alike. Ours counts every matrix that one text token
# multiplies: the output head belongs to a decode token, the two index-key matrices of a source layer belong to both.
# What the choice moves:

# %%
head = decode["head"].matrices
keys = sum(t.parameters for t in tensors if ".indexer.wk." in t.name)
embedding = groups["embedding"].parameters
table(
    "decode token, definition|parameters",
    [
        ("ours: all matrices", active(config)),
        ("without the index keys' matrices", active(config) - keys),
        ("without the head", active(config) - head),
        ("with the whole embedding", active(config) + embedding),
        (
            "with all rows that are looked up",
            active(config) + sum(t.rows for t in decode.values()),
        ),
    ],
)

# %% [markdown]
# ## Check it: what a token leaves behind
#
# Only the four source layers add to the global cache. A latent is FP4 with an E4M3 scale for 16 channels, an index
# key FP4 with a power-of-two scale for 32, and a source at ratio 2 adds one entry for two tokens.

# %%
cache = cache_bytes(config)
per_token = sum(cache.values())
say(
    per_token=int(per_token),
    cache_gib=round(float(per_token * config.max_position_embeddings / GiB), 2),
)
say(
    context=config.max_position_embeddings,
    window=window_bytes(config),
    layers=config.num_hidden_layers,
)
table(
    "part of the cache|bytes per token",
    [(k, float(v)) for k, v in cache.items()] + [("all", float(per_token))],
)

# %% [markdown]
# That is {glue:text}`per_token` bytes per token, or {glue:text}`cache_gib` GiB for a sequence of
# {glue:text}`context` tokens. The windows don't grow: each of the {glue:text}`layers` layers keeps
# {glue:text}`window` bytes a sequence, however long it gets.
#
# ## Check it: arithmetic
#
# Matrices cost two FLOPs a parameter. Attention costs the same for every context beyond its window and its chosen
# entries. Only one part grows with the context, the scores that choose those entries:

# %% tags=["hide-input"]
draw.flops_by_context(config)

# %%
contexts = (1, 4096, 65536, config.max_position_embeddings)
spent = {c: flops(config, c) for c in contexts}
table(
    "GFLOP per decoded token|" + "|".join(f"{c:,} token{'s' * (c > 1)}" for c in contexts),
    [(name, *(round(spent[c][name] / B, 3) for c in contexts)) for name in spent[1]],
)

# %% [markdown]
# At the full context the index scores cost {glue:text}`index_over_attention` times as much as attention itself. They
# are computed in the {glue:text}`index_layers` index layers alone, and in {glue:text}`filtered_layers` of these only
# over pre-selected blocks: without that the price would be {glue:text}`unfiltered` GFLOP.

# %%
wide = config.replace(
    candidate_topk_blocks=config.max_position_embeddings // config.candidate_block_size
)
say(unfiltered=round(flops(wide, config.max_position_embeddings)["index scores"] / B, 1))
most = spent[config.max_position_embeddings]
say(
    index_over_attention=round(
        most["index scores"] / most["attention over window and entries"], 1
    )
)
say(index_layers=len(config.index_source_layer_ids))
say(
    filtered_layers=sum(
        n > config.candidate_source_layer_id for n in config.index_source_layer_ids
    )
)

# %% [markdown]
# ## All generations, by the same sums
#
# The plan exists for every generation, from its own config. Each was held against its released headers or the
# public library's model of the same config, to the unit.

# %%
family = {
    "DeepSeekMoE-16B": preset("deepseekmoe_16b"),
    "V2": preset("v2"),
    "V3": preset("v3"),
    "V3.2": preset("v32"),
    "V4-Flash": preset("v4_flash"),
    "V4-Pro": preset("v4_pro"),
    "V4.1-Flash": config,
}
rows = [(name, *headline(c).values()) for name, c in family.items()]
table("model|backbone|tables|drafter|active, decode|active, prefill", rows)

# %% tags=["hide-input"]
draw.generations(family)

# %% [markdown]
# What the model cards print as active isn't always the same sum. DeepSeekMoE's {cite}`deepseekmoe` counts its
# embedding, V2 {cite}`v2` and V3 {cite}`v3` print alike either way, and V4-Pro's {cite}`v4` total fits with its
# prediction layer and without. V4-Flash's drafter is left out here: its config names it, but nobody has described
# its tensors.
#
# ## What if: edit a field and see every figure move
#
# Run this chapter as a notebook and change what you like; the config is checked again, and an impossible one is
# refused with the field's name.

# %%
every = tuple(range(2, config.num_hidden_layers))
what_if = {
    "as released": {},
    "half as many experts, twice as wide": dict(
        n_routed_experts=192, moe_intermediate_size=4608, num_experts_per_tok=3
    ),
    "top 8": dict(num_experts_per_tok=8),
    "one residual stream": dict(hc_mult=1),
    "every layer its own cache": dict(
        kv_source_layer_ids=every,
        index_source_layer_ids=every,
        candidate_source_layer_id=every[-1],
    ),
}

# %%
rows = []
for name, changes in what_if.items():
    c = config.replace(**changes)
    h, cached = headline(c), float(sum(cache_bytes(c).values()))
    rows.append((name, h["backbone"], h["active, decode"], h["active, prefill"], cached))
table("change|backbone|active, decode|active, prefill|cache, bytes per token", rows)

# %% [markdown]
# The second row is the lesson of the next chapter in advance: its routed experts hold the same parameters and cost a
# token the same (what it has more is the shared expert, now twice as wide), but they leave a token far fewer
# combinations to choose from. The last row is why a decoder that shares one cache matters: with a cache per layer a
# token would leave behind many times more, and the prompt would need every layer.
#
# ## Break it
#
# Miscounts that were really made, each a one-line change of the sum above:

# %%
stored_elements = sum(t.nbytes if t.dtype == "I8" else t.parameters for t in tensors)
broken = [
    ("the plan", whole.parameters, "what it is"),
    ("a packed byte as one parameter", stored_elements, "half of every expert is gone"),
    ("scales as parameters", whole.parameters + dtypes["F8_E8M0"].nbytes, "none is a weight"),
    ("tables in the backbone", core + groups["Engram tables"].parameters, "never multiplied"),
    ("embedding as active", active(config) + embedding, "one row of it is read"),
]
table("miscount|figure|what is wrong", broken)

# %% [markdown]
# And the other way round, a checkpoint that lies. The command
# `python -m dsv41_edu.accounting --checkpoint DIR` reads the headers of the shards in a folder and names every
# tensor that is missing, extra, misshapen or mistyped, and every file whose header and data don't tile it exactly,
# without loading a weight:
#
# ```{literalinclude} ../dsv41_edu/headers.py
# :pyobject: read_header
# ```
#
# ## Serve it
#
# A decode step at batch one reads each touched byte once. Divided by the bandwidth of memory, that bounds its speed
# from above, before any communication:

# %%
read = sum(t.nbytes for t in decode.values())
say(read_gb=round(read / 1e9, 2), share=f"{read / whole.nbytes:.1%}")
table(
    "memory bandwidth|ms per token at least|tokens per second at most",
    [
        (f"{tb} TB/s", round(read / tb / 1e9, 2), round(tb * 1e12 / read))
        for tb in (1.0, 3.35, 4.8, 8.0)
    ],
)

# %% [markdown]
# {glue:text}`read_gb` GB a token, {glue:text}`share` of the checkpoint. A batch changes the picture: its tokens
# choose different experts, so the experts read grow until all are read, while attention's matrices are read once for
# all. How fast that happens is a question of routing, and the next chapter's.
#
# ## Test yourself
#
# ```{exercise}
# :label: acc-drafter
#
# The drafter has a hundred and twenty-eight experts a block instead of three hundred and eighty-four. What share of
# the checkpoint's bytes does it hold, and how much of it is experts?
# ```
#
# ````{solution-start} acc-drafter
# :class: dropdown
# ````

# %%
drafter_bytes = sum(s.nbytes for g, s in groups.items() if g.startswith("drafter"))
table(
    "question|answer",
    [
        ("share of the checkpoint", f"{drafter_bytes / whole.nbytes:.2%}"),
        ("of that, experts", f"{scaled[drafter_experts] / drafter_bytes:.2%}"),
    ],
)

# %% [markdown]
# ````{solution-end}
# ````
#
# ```{exercise}
# :label: acc-rows
#
# A token reads rows from two Engram tables. How many bytes are that, scales included, and what fraction of the
# tables' rows?
# ```
#
# ````{solution-start} acc-rows
# :class: dropdown
# ````

# %%
n_rows, all_rows = (
    engram_rows(config) * len(config.engram_layer_ids),
    sum(config.engram_num_embeddings),
)
table(
    "question|answer",
    [
        ("bytes", decode["Engram tables"].nbytes),
        ("rows", n_rows),
        ("one row in", round(all_rows / n_rows)),
    ],
)

# %% [markdown]
# ````{solution-end}
# ````
#
# ```{exercise}
# :label: acc-bound
#
# By how much would the checkpoint grow if the experts were stored in BF16, as attention's small parts are?
# ```
#
# ````{solution-start} acc-bound
# :class: dropdown
# ````

# %%
in_bf16 = whole.nbytes + sum(4 * n - scaled[g] for g, n in payload.items())
table(
    "experts in|GiB",
    [
        ("FP4 with scales", round(whole.nbytes / GiB, 1)),
        ("BF16", round(in_bf16 / GiB, 1)),
    ],
)

# %% [markdown]
# ````{solution-end}
# ````
#
# ## References
#
# The config, headers and inference code are those of the release {cite}`v41`; the formats are {cite}`mx` and
# {cite}`safetensors`; the treemap's layout is {cite}`treemap`. What this page checks, and what each check leaves
# open, stands in the {doc}`claims ledger <ledger>`.
