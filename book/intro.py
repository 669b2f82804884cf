# %% [markdown]
# # DeepSeek-V4.1-Flash, executable
#
# This book takes apart everything in DeepSeek-V4.1-Flash that is not attention, and puts it together again as code
# that runs. Every number on these pages was computed by the package beside them, from the model's own config; what
# can't be computed here is marked as cited.

# %% tags=["hide-input"]
from dsv41_edu.accounting import headline
from dsv41_edu.claims import STATUSES, results, score
from dsv41_edu.config import preset
from dsv41_edu.figures.glue import say
from dsv41_edu.figures.model_map import model_map
from dsv41_edu.figures.tables import table

config = preset("v41_flash")
figures = headline(config)
say(
    backbone=f"{figures['backbone'] / 1e9:.0f} billion",
    tables=f"{figures['tables'] / 1e9:.0f} billion",
)
say(
    active=f"{figures['active, decode'] / 1e9:.0f} billion",
    layers=config.num_hidden_layers,
    streams=config.hc_mult,
)
model_map(config)

# %% [markdown]
# ## The model on one page
#
# Token ids do two things at once. They pick an embedding, which is copied into {glue:text}`streams` residual
# streams; and their last few, hashed, pick rows of two large tables, long before those rows are needed. The streams
# pass {glue:text}`layers` layers. In each, a *seam* collapses them to one vector for attention and mixes the result
# back, and a second seam does the same for the experts: a router sends each token to a few narrow networks out of
# hundreds. The lower half makes one compressed cache that the whole upper half reads, so a prompt token can stop
# half way. At the end a small drafter guesses several tokens ahead, and the model checks them all in one step.
#
# Of {glue:text}`backbone` parameters, and {glue:text}`tables` more in tables, a decoded token multiplies
# {glue:text}`active`. The five mechanisms that make that possible are the five chapters:
#
# 1. **{doc}`Parameter accounting <accounting>`**: what is stored, and what a token touches of it.
# 2. **Experts and routing**: many narrow experts, and how to keep them all busy.
# 3. **Hyper-connections**: several residual streams that mix without exploding.
# 4. **Engram**: memory that is looked up by n-gram, not multiplied.
# 5. **DSpark**: drafting a block of tokens, and losing nothing by it.
#
# A last chapter assembles the full model and runs it.
#
# ## How to read
#
# Read the pages, or run them: each is a notebook whose cells import the package, and the package's modules read like
# the equations on the page. `make lab` opens them. A card like *verified* or *differs* under a cell holds a figure
# of the source article against ours; {doc}`notation` says what the letters mean.
#
# ## The score so far
#
# The {doc}`claims ledger <ledger>` holds every figure that the article states. This is what became of them:

# %%
counts = score(results())
table(
    "chapter|" + "|".join(STATUSES),
    [(chapter, *row.values()) for chapter, row in counts.items()],
)

# %% [markdown]
# *Pending* claims wait for their chapter. A figure that *differs* is a finding, with its reason beside it, never a
# calculation bent until it agrees.
