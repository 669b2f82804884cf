"""What a trained memory is used for: its gate on phrases and by n-gram frequency, and the loss without it.

One model a seed, three seeds. Its gate is read on held-out verses and at every held-out token. Then the memory is
switched off at inference, every gate 0, and the loss of each next token is compared with that before, for two pairs
of groups that no one picks by hand:

    formulas   the token completes a 3-gram that the training text has FREQUENT times or more
    names      the token lies in a capitalised word after a small letter or a comma, and a space: names within a
               sentence, and the first words of what someone says

A gate is a token's own; the memory it lets in was read for the n-gram that ends there, and helps with the *next*
token. Nothing was trained again without memory, so a loss says what this model leans on, not what it needs.
Writes book/data/engram_use.json. Source: Engram 6.3, 6.5.
"""

import dataclasses
import json
import re
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv41_edu.experiments import text
from dsv41_edu.experiments.engram_lm import EngramLM, Setup, compress, gates, train
from dsv41_edu.experiments.engram_zipf import counts_in
from dsv41_edu.experiments.small_moe import spread

RESULT = Path(__file__).parents[2] / "book" / "data" / "engram_use.json"
SETUP = Setup(table_rows=32768, steps=700)
SEEDS = (0, 1, 2)
FREQUENT = 10
NAME = re.compile(r"(?<=[a-z,;] )[A-Z][A-Za-z]+")
PHRASES = ("LORD of hosts", "children of Israel", "house of the LORD")
LONGEST = 40  # tokens of a passage
BINS = (0, 1, 10, 100, 1000)  # the least count of each
ORDERS = (2, 3)


def name_mask(ids: Tensor) -> Tensor:
    """bool [N]: whether any letter of a token lies in a name, as NAME finds them in the text of ids [N]."""
    pieces = [text.tokenizer().decode([i]) for i in ids.tolist()]
    whole = "".join(pieces)
    inside = torch.zeros(len(whole) + 1, dtype=torch.int64)
    for name in NAME.finditer(whole):
        inside[name.start() + 1 : name.end() + 1] = 1
    ends, letters = torch.tensor([len(piece) for piece in pieces]).cumsum(0), inside.cumsum(0)
    return letters[ends] > letters[F.pad(ends, (1, -1))]


def passage(phrase: str) -> Tensor:
    """Ids [1, T] of the first held-out verse of at most LONGEST tokens that has the phrase. Raises ValueError."""
    for verse in (verse for chapter in text.chapters("heldout") for verse in chapter.splitlines()):
        ids = text.tokenizer().encode(verse, add_special_tokens=False).ids
        if phrase in verse and len(ids) <= LONGEST:
            return torch.tensor([ids])
    raise ValueError(f"phrase = {phrase!r}: expected in a held-out verse of at most {LONGEST} tokens")


@torch.no_grad()
def token_losses(model: EngramLM, inputs: Tensor, targets: Tensor, memory: bool) -> Tensor:
    """Nats of each target, fp32 [W, T]; with every gate 0 unless `memory`."""
    mask = torch.full_like(inputs, memory, dtype=torch.bool)
    parts = zip(inputs.split(16), targets.split(16), mask.split(16), strict=True)
    return torch.cat([F.cross_entropy(model(x, m).transpose(1, 2), y, reduction="none") for x, y, m in parts])


def windows(setup: Setup) -> tuple[Tensor, Tensor]:
    """The held-out text as inputs and targets, each int64 [W, context]."""
    ids = text.tokens("heldout")
    n = (len(ids) - 1) // setup.context * setup.context
    return ids[:n].view(-1, setup.context), ids[1 : n + 1].view(-1, setup.context)


def target_groups(shape: torch.Size) -> dict[str, Tensor]:
    """bool [W, T] of the held-out targets, for each group."""
    ids = text.tokens("heldout")
    frequent = counts_in(text.tokens("train"), ids, 3) >= FREQUENT
    names = name_mask(ids)
    groups = {"all": torch.ones_like(names), "formulas": frequent, "other than formulas": ~frequent}
    groups |= {"names": names, "other than names": ~names}
    return {name: mask[1 : shape.numel() + 1].view(shape) for name, mask in groups.items()}


def ablation(model: EngramLM, setup: Setup) -> dict[str, dict]:
    """For each group how many `tokens`, and their mean loss in nats with the memory `on` and `off`."""
    inputs, targets = windows(setup)
    on, off = (token_losses(model, inputs, targets, memory) for memory in (True, False))
    return {
        name: {
            "tokens": int(mask.sum()),
            "on": round(on[mask].mean().item(), 4),
            "off": round(off[mask].mean().item(), 4),
        }
        for name, mask in target_groups(inputs.shape).items()
    }


def gate_by_count(model: EngramLM, setup: Setup) -> dict[str, dict]:
    """For each order the `tokens` and the mean `gate` of each of BINS, by the training count of a token's n-gram.

    The first tokens of a window are left out: their n-grams begin with the pad.
    """
    inputs, skip = windows(setup)[0], setup.order - 1
    found = torch.cat([gates(model, x) for x in inputs.split(16)])[:, skip:]
    train_ids, ids = (compress(text.tokens(split)) for split in text.SPLITS)
    by_order = {}
    for order in ORDERS:
        counts = counts_in(train_ids, ids, order)[: inputs.numel()].view(inputs.shape)[:, skip:]
        bins = torch.bucketize(counts.contiguous(), torch.tensor(BINS), right=True) - 1
        masks = [bins == b for b in range(len(BINS))]
        by_order[str(order)] = {
            "tokens": [int(mask.sum()) for mask in masks],
            "gate": [round(found[mask].mean().item(), 4) for mask in masks],
        }
    return by_order


def jobs() -> list[tuple[int]]:
    """The runs, each the arguments of `run`."""
    return [(seed,) for seed in SEEDS]


def run(seed: int, setup: Setup = SETUP) -> dict:
    """One training, and what its memory is used for. passages: the gate at each token; duration_s: of one thread."""
    start = time.process_time()
    model = EngramLM(setup, seed)
    for _ in train(model, setup, seed):
        pass
    return {
        "seed": seed,
        "ablation": ablation(model, setup),
        "gate_by_count": gate_by_count(model, setup),
        "passages": [[round(g, 4) for g in gates(model, passage(phrase))[0].tolist()] for phrase in PHRASES],
        "duration_s": round(time.process_time() - start, 1),
    }


def summary(runs: list[dict]) -> dict:
    """Over the seeds: losses, their `increase` without memory and gates by count as [mean, 2 standard deviations].

    passages: tokens and mean gates.
    """
    losses = {}
    for name in runs[0]["ablation"]:
        mine = [r["ablation"][name] for r in runs]
        losses[name] = {key: spread([m[key] for m in mine]) for key in ("on", "off")}
        losses[name]["increase"] = spread([m["off"] - m["on"] for m in mine])
    by_count = {}
    for order in runs[0]["gate_by_count"]:
        bins = zip(*(r["gate_by_count"][order]["gate"] for r in runs), strict=True)
        by_count[order] = [spread(list(values)) for values in bins]
    passages = []
    for at, phrase in enumerate(PHRASES):
        tokens = [text.tokenizer().decode([i]) for i in passage(phrase)[0].tolist()]
        mean = torch.tensor([r["passages"][at] for r in runs]).mean(0)
        passages.append({"phrase": phrase, "tokens": tokens, "gates": [round(g, 4) for g in mean.tolist()]})
    return {"ablation": losses, "gate_by_count": by_count, "passages": passages}


def document(runs: list[dict]) -> dict:
    """The whole result file."""
    setup = {
        **dataclasses.asdict(SETUP),
        "seeds": list(SEEDS),
        "frequent": FREQUENT,
        "bins": list(BINS),
        "torch": torch.__version__,
        "duration_s": round(sum(r["duration_s"] for r in runs), 1),
    }
    return {"setup": setup, "summary": summary(runs), "runs": runs}


def write(runs: list[dict]) -> None:
    """Write the result file, a run a line."""
    made = document(runs)
    parts = [f'"{name}": {json.dumps(made[name])}' for name in ("setup", "summary")]
    parts.append('"runs": [\n' + ",\n".join(json.dumps(r) for r in runs) + "\n]")
    RESULT.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


def read() -> dict:
    """The stored result file."""
    return json.loads(RESULT.read_text(encoding="utf-8"))
