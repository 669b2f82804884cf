# %% [markdown]
# # The claims ledger
#
# Every figure and every checkable statement of the source article, once, with what became of it. Sort by a column's
# head, filter by chapter, status or a word, and follow a claim to the cell that checks it. The statuses are read from
# the outputs of the executed pages; nobody typed them.
#
# ## The score

# %% tags=["hide-input"]
from dsv41_edu.claims import STATUSES, results, score
from dsv41_edu.figures.ledger import ledger_table
from dsv41_edu.figures.tables import table

claims = results()
table(
    "chapter|" + "|".join(STATUSES),
    [(chapter, *row.values()) for chapter, row in score(claims).items()],
)

# %% [markdown]
# ## All claims

# %% tags=["hide-input", "full-width"]
ledger_table(claims)

# %% [markdown]
# The same list for machines: `python -m dsv41_edu.claims --json`.
