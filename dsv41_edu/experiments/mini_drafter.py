"""Trains the miniature's drafter, and ships it beside the miniature: python -m dsv41_edu.experiments.mini_drafter

    lesson   a row of the text, what a drafter reads of the frozen backbone on it, and the backbone's own states
    block    after a random token t of it: y_0 ... y_g from the text, the drafter's laws beside the backbone's
    loss     `dspark_loss`: the token, the whole law, and how often the draft stands

The backbone runs once over the lessons; then each step trains on blocks from them. As an experiment (`jobs`) it
compares what the heads bring, in short trainings: blocks alone, with the Markov head, with the confidence head's loss
as well, and with the two other kinds of Markov head. What is measured is drafted and verified on the held-out text.
Source: DSpark 3.4.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dsv41_edu import checkpoint
from dsv41_edu.attention.cache import ring_positions
from dsv41_edu.attention.rope import layer_frequencies, turns
from dsv41_edu.dspark.calibration import calibration_error, fit_temperatures, reliability, survivals
from dsv41_edu.dspark.losses import CROSS_ENTROPY, L1, Loss, dspark_loss
from dsv41_edu.dspark.verification import rejection_verify
from dsv41_edu.experiments import text
from dsv41_edu.experiments.mini import WEIGHTS, in_rows
from dsv41_edu.experiments.small_moe import spread
from dsv41_edu.generate import Chance, possible
from dsv41_edu.model import Transformer
from dsv41_edu.training import Loads, groups, initialise, rounded, set_rate

DATA = Path(__file__).parents[2] / "book" / "data"
TRAINED, RESULT = DATA / "mini_drafter.json", DATA / "drafter_heads.json"
VARIANTS = ("parallel", "markov", "confidence", "gated", "rnn")
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Setup:
    """Training of a drafter."""

    seed: int = 0
    steps: int = 2500
    lessons: int = 2048  # rows of the training text
    context: int = 256  # tokens
    blocks: int = 256  # a step
    learning_rate: float = 2e-3
    warm_up: int = 40  # steps
    decay: float = 0.1
    clip: float = 1.0
    dropout: float = 0.1
    as_stored: float = 0.85  # from here on weights are rounded as stored
    bias_speed: float = 0.01
    threads: int = 2


SHORT = Setup(steps=200, lessons=192, blocks=96, as_stored=1.0, threads=1)


class Lessons(NamedTuple):
    """Rows of text and what the backbone made of them."""

    ids: Tensor  # int64 [R, S + 1]
    features: Tensor  # [R, S, targets * d]: what the drafter reads
    hidden: Tensor  # [R, S, d]: what the head reads


@torch.no_grad()
def lessons(model: Transformer, rows: Sequence[Tensor]) -> Lessons:
    """Of rows int64 [B, S + 1]."""
    runs = (model.run(ids[:, :-1], features=True) for ids in rows)
    features, hidden = zip(*((run.features, run.hidden) for run in runs), strict=True)
    return Lessons(torch.cat([*rows]), torch.cat(features), torch.cat(hidden))


def block_loss(model: Transformer, given: Lessons, row: Tensor, t: Tensor) -> Loss:
    """Of the blocks after token t of a row, both int64 [B], t at most S - g - 1."""
    c, drafter, rows = model.config, model.mtp, row.unsqueeze(1)
    g = c.dspark_block_size
    cache = model.cache(len(t), int(t.max()) + g + 1)
    cache.lengths = t + 1
    ring = ring_positions(cache.lengths, c.sliding_window).clamp(min=0)  # what is before the text, nobody sees
    x = drafter[0].main_norm(drafter[0].main_proj(given.features[rows, ring]))
    turn = turns(ring, layer_frequencies(c, 0), x.dtype)
    for block in drafter:
        cache.windows[block.attn.layer] = block.attn.latent(x, turn)
    ahead = t.unsqueeze(1) + torch.arange(1, g + 1)
    y, follows = given.ids[rows, ahead], given.ids[rows, ahead + 1]
    noise = torch.full((len(t), g - 1), c.dspark_noise_token_id)
    x = drafter.hidden(torch.cat([y[:, :1], noise], dim=1), cache, model.embed, model.seams, round_trips=False)
    last = drafter[-1]
    hidden = last.norm(x)
    logits = model.logits(hidden) + last.markov_head(y, hidden)
    confidence = last.confidence_head(x, last.markov_head.embed(y))
    with torch.no_grad():
        target = model.logits(given.hidden[rows, ahead])
    return dspark_loss(logits, target, follows, confidence, torch.ones_like(y, dtype=torch.bool))


def train(model: Transformer, given: Lessons, setup: Setup, variant: str = "confidence") -> list[dict]:
    """Curves of a drafter that is trained from the seed on, as one of `VARIANTS`; the backbone stays as it is."""
    drafter, g = model.mtp, model.config.dspark_block_size
    initialise(drafter, setup.seed)
    model.requires_grad_(False)
    drafter.requires_grad_(True).train()
    if variant == "parallel":
        drafter[-1].markov_head.head.weight.requires_grad_(False).zero_()
    for block in drafter:
        block.dropout.p = setup.dropout
    trained, loads, curves = [p for p in drafter.parameters() if p.requires_grad], Loads([*drafter]), []
    optimizer = torch.optim.AdamW(groups(drafter, setup.decay), lr=setup.learning_rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(setup.seed)
    last = given.hidden.shape[1] - g - 1
    for step in tqdm(range(setup.steps), unit="step", desc=variant):
        set_rate(optimizer, setup.learning_rate, step, setup.steps, setup.warm_up)
        row = torch.randint(len(given.ids), (setup.blocks,), generator=generator)
        t = torch.randint(last + 1, (setup.blocks,), generator=generator)

        def backward(row: Tensor = row, t: Tensor = t) -> Loss:
            loss = block_loss(model, given, row, t)
            optimizer.zero_grad()
            without = CROSS_ENTROPY * loss.cross_entropy + L1 * loss.l1
            (loss.total if variant == "confidence" else without).backward()
            return loss

        with torch.random.fork_rng():  # dropout draws from torch's own generator
            torch.manual_seed(setup.seed * 1_000_003 + step)
            if step < setup.as_stored * setup.steps:
                loss = backward()
            else:
                with rounded(model):
                    loss = backward()
        nn.utils.clip_grad_norm_(trained, setup.clip)
        optimizer.step()
        loads.update(setup.bias_speed)
        curves.append({name: value.item() for name, value in loss._asdict().items()})
    drafter.eval()
    return curves


class Trial(NamedTuple):
    """Blocks that were drafted and verified: how many drafts stood, int64 [N], and the confidence logits [N, g]."""

    accepted: Tensor
    confidence: Tensor

    def stood(self) -> Tensor:
        """bool [N, g]: all of the first k drafts."""
        return self.accepted.unsqueeze(1) > torch.arange(self.confidence.shape[1])


@torch.no_grad()
def trial(model: Transformer, ids: Tensor, starts: Sequence[int], temperature: float, seed: int = 0) -> Trial:
    """A block after each of `starts` tokens of every row of text, int64 [R, S], verified token by token."""
    chance, cache = Chance(temperature, seed, len(ids), rejection_verify), model.cache(len(ids), ids.shape[1] + 16)
    found, before = [], 0
    for start in starts:
        run = model.run(ids[:, before:start], cache, features=True)
        cache.commit(run.chunk, torch.full((len(ids),), start - before))
        draft = chance.draft(model, ids[:, start], cache)
        target = possible(model, model.run(draft.ids, cache).hidden)
        found.append((chance.verify(target, draft.ids[:, 1:], draft.logits).accepted, draft.confidence))
        before = start
    return Trial(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def measured(model: Transformer, rows: int | None = 128, every: int = 16) -> dict:
    """On the held-out text: drafts that stand, by place and in the mean, drawn and greedy; how well it is foreseen.

    So many rows of it, a block after `every` tokens. Temperatures are fitted on every other block, errors are those
    of the rest.
    """
    ids, starts = torch.cat(in_rows("heldout", 256, rows)), range(32, 240, every)
    drawn, greedy = (trial(model, ids, starts, temperature) for temperature in (1.0, 0.0))
    stood = drawn.stood()
    reached = torch.cat([torch.ones(len(stood), 1, dtype=torch.bool), stood[:, :-1]], dim=1)
    fitted = fit_temperatures(drawn.confidence[::2], stood[::2])
    return {
        "blocks": len(stood),
        "acceptance": (stood.sum(0) / reached.sum(0)).tolist(),
        "accepted": float(drawn.accepted.double().mean()),
        "greedy_accepted": float(greedy.accepted.double().mean()),
        "temperatures": fitted,
        "calibration": {
            name: calibration(survivals(drawn.confidence[1::2], temperatures), stood[1::2])
            for name, temperatures in (("before", [1.0] * len(fitted)), ("after", fitted))
        },
    }


def calibration(survival: Tensor, stood: Tensor) -> dict:
    """Errors of each place, and the diagram of all places together."""
    count, predicted, observed = reliability(survival.flatten(), stood.flatten())
    bins = [
        {"predicted": p, "observed": o, "count": n}
        for n, p, o in zip(count.tolist(), predicted.tolist(), observed.tolist(), strict=True)
        if n
    ]
    return {"errors": [calibration_error(s, e) for s, e in zip(survival.T, stood.T, strict=True)], "bins": bins}


def with_drafter(head: str | None = None) -> Transformer:
    """The shipped miniature with a drafter whose weights are not yet set, its Markov head of that kind."""
    shipped = checkpoint.load(WEIGHTS, dtype=torch.float32)
    model = Transformer(shipped.config.replace(dspark_markov_head_type=head), shipped.token_map)
    backbone = {name: t for name, t in shipped.state_dict().items() if not name.startswith("mtp.")}
    model.load_state_dict(model.state_dict() | backbone)
    return model.eval()


def jobs() -> list[tuple[str, int]]:
    """Variant and seed of each run."""
    return [(variant, seed) for variant in VARIANTS for seed in SEEDS]


def run(variant: str, seed: int) -> dict:
    """What a short training ends in."""
    setup, model = replace(SHORT, seed=seed), with_drafter(variant if variant in ("gated", "rnn") else None)
    train(model, lessons(model, in_rows("train", setup.context, setup.lessons)), setup, variant)
    return {"variant": variant, **measured(model, rows=48)}


def write(results: list[dict]) -> None:
    """The result file: of each variant the mean over the seeds and twice the standard deviation."""
    data = {"setup": asdict(SHORT), "seeds": len(SEEDS), "blocks": results[0]["blocks"], "variants": {}}
    for variant in VARIANTS:
        found = [r for r in results if r["variant"] == variant]
        data["variants"][variant] = {
            "accepted": spread([r["accepted"] for r in found]),
            "greedy_accepted": spread([r["greedy_accepted"] for r in found]),
            "acceptance": [spread(list(place)) for place in zip(*(r["acceptance"] for r in found), strict=True)],
        }
    RESULT.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def digest(folder: Path) -> str:
    """SHA-256 of a checkpoint's shards, in the order of their names."""
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.glob("*.safetensors")))).hexdigest()


def main() -> None:
    setup = Setup()
    torch.set_num_threads(setup.threads)
    began, model = time.monotonic(), with_drafter()
    curves = train(model, lessons(model, in_rows("train", setup.context, setup.lessons)), setup)
    checkpoint.save(model, WEIGHTS, tokenizer=text.tokenizer())
    shipped = checkpoint.load(WEIGHTS, dtype=torch.float32)
    result = {
        "setup": asdict(setup),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began),
        "sha256": digest(WEIGHTS),
        "parameters": sum(p.numel() for p in shipped.mtp.parameters()),
        "curves": {name: [c[name] for c in curves[::10]] for name in Loss._fields},
        **measured(shipped, rows=None, every=4),
    }
    TRAINED.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{result['accepted']:.2f} drafts of {shipped.config.dspark_block_size} stand, greedy "
          f"{result['greedy_accepted']:.2f}; {WEIGHTS}")  # fmt: skip


if __name__ == "__main__":
    main()
