"""How uneven n-grams are, and what a hot tier of their rows would serve: counting, without training.

    hot    = the rows that the training text reads most often
    served = share of the held-out text's reads that find their row in hot
    seen   = share of the held-out text's n-grams that the training text has

Each position reads one row for its 2-gram, one for its 3-gram and one for its 4-gram, by the project's hash with
primes of the official size. A row found hot is a read served, though some rows are shared: about one in 25 of a
text's 4-grams has its row with another. Writes book/data/engram_zipf.json. Source: Engram 6.4.
"""

import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dsv41_edu.config import preset
from dsv41_edu.engram.table import most_frequent
from dsv41_edu.experiments import text
from dsv41_edu.experiments.engram_lm import compress, ngram_hash

RESULT = Path(__file__).parents[2] / "book" / "data" / "engram_zipf.json"
ORDERS = (2, 3, 4)
SIZES = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000)  # of the hot tier, in rows
LINE = (10, 3000)  # ranks between which the slope is fitted


def keys(ids: Tensor, order: int) -> Tensor:
    """One number for each n-gram of ids [N], none shared: int64 [N - order + 1]."""
    return sum(ids[order - 1 - i : len(ids) - i] * text.VOCAB_SIZE**i for i in range(order))


def counts_in(corpus: Tensor, ids: Tensor, order: int) -> Tensor:
    """How often corpus [M] holds the n-gram that ends at each position of ids [N]: int64 [N], first places 0."""
    known, counts = keys(corpus, order).unique(return_counts=True)
    mine = keys(ids, order)
    place = torch.searchsorted(known, mine).clamp(max=len(known) - 1)
    return F.pad(torch.where(known[place] == mine, counts[place], 0), (order - 1, 0))


def ranks(ids: Tensor, order: int) -> dict:
    """Counts of the n-grams of ids at rank 1, 2, 4, ...; how many are distinct; the slope on LINE, log-log."""
    counts = keys(ids, order).unique(return_counts=True)[1].sort(descending=True).values
    at = 2 ** torch.arange(int(np.log2(len(counts))) + 1)
    line = np.arange(LINE[0], min(LINE[1], len(counts)) + 1)
    slope = np.polyfit(np.log(line), np.log(counts[line - 1].numpy()), 1, w=line**-0.5)[0]  # each decade alike
    return {
        "distinct": len(counts),
        "once": int((counts == 1).sum()),
        "rank": at.tolist(),
        "count": counts[at - 1].tolist(),
        "slope": round(float(slope), 4),
    }


def served(hot_from: Tensor, reads: Tensor, sizes: tuple[int, ...] = SIZES) -> list[float]:
    """Share of reads [M] that the most frequent rows of hot_from [N] serve, for each size of the tier."""
    ranked = most_frequent(hot_from, max(sizes))
    return [round(torch.isin(reads, ranked[:size]).double().mean().item(), 5) for size in sizes]


def jobs() -> list[tuple[()]]:
    """One run, without arguments."""
    return [()]


def run() -> dict:
    """`by_order`: for each order its `ranks`, `seen` and `served`, of the compressed ids; `sizes`: of the tiers."""
    start = time.process_time()
    train, heldout = (compress(text.tokens(split)) for split in text.SPLITS)
    ngrams = ngram_hash(max(ORDERS), 1, preset("v41_flash").engram_vocab_size)
    rows = [ngrams(ids[None])[0][0, :, 0] for ids in (train, heldout)]  # each [N, orders]
    by_order = {}
    for column, order in enumerate(ORDERS):
        hot_from, reads = (r[:, column] for r in rows)
        by_order[str(order)] = {
            **ranks(train, order),
            "seen": round((counts_in(train, heldout, order) > 0).double().mean().item(), 5),
            "served": served(hot_from, reads),
        }
    return {
        "sizes": list(SIZES),
        "slope_ranks": list(LINE),
        "primes": ngrams.primes[0].tolist(),
        "train_tokens": len(train),
        "heldout_tokens": len(heldout),
        "torch": torch.__version__,
        "duration_s": round(time.process_time() - start, 1),
        "by_order": by_order,
    }


def write(results: list[dict]) -> None:
    """Write the result file."""
    RESULT.write_text(json.dumps(results[0]) + "\n", encoding="utf-8")


def read() -> dict:
    """The stored result file."""
    return json.loads(RESULT.read_text(encoding="utf-8"))
