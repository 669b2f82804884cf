"""Does an indexer find what attention is looking for? A planted task, far beyond the window.

    row      k_1 v_1 ... k_P v_P, then some of the keys again in another order, each before its value
    asked    the value after a key that came before: of all entries (a pair is one) a single one has it

A small model learns it as the miniature learns its text: at first reading every entry, while the indexer learns
where attention went; then reading what the indexer chooses. In the end the same weights answer with the indexer's
choice, with a random one, with the newest entries, and with the oracle's: the entries that had most of the attention
when all were read. Writes book/data/indexer.json. Sources: V3.2 report 2.1.1; V4 report (joint softmax as a teacher).
"""

import copy
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.attention.indexer import select
from dsv41_edu.attention.sparse_attention import named
from dsv41_edu.config import ModelConfig, preset
from dsv41_edu.experiments.small_moe import spread
from dsv41_edu.experiments.switches import choose_by
from dsv41_edu.model import Transformer
from dsv41_edu.training import Loads, groups, indexer_loss, initialise, set_rate, teach

RESULT = Path(__file__).parents[2] / "book" / "data" / "indexer.json"
SEEDS = (1, 2, 3)
LAYER = 1  # the one that makes entries and chooses


@dataclass(frozen=True)
class Setup:
    """The task and the training."""

    keys: int = 64  # that there are
    values: int = 32
    pairs: int = 32  # of a row
    asked: int = 16
    top_k: int = 4
    batch: int = 32
    steps: int = 500
    dense: float = 0.6  # part of the steps in which every entry is read
    learning_rate: float = 5e-3
    warm_up: int = 30  # steps


def sizes(setup: Setup) -> ModelConfig:
    """Three layers: a window of two pairs, a source of entries of two tokens, one that reads them again."""
    return preset("mini").replace(
        vocab_size=128, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=3, head_dim=32,
        qk_rope_head_dim=8, q_lora_rank=32, n_routed_experts=4, sliding_window=4, compress_ratios=(0, 2, 2),
        kv_source_layer_ids=(LAYER,), index_source_layer_ids=(LAYER,), candidate_source_layer_id=LAYER,
        candidate_topk_blocks=64, index_topk=setup.top_k, engram_layer_ids=(0,), engram_num_embeddings=(1618,),
        engram_vocab_size=256, engram_compressed_vocab_size=128, num_nextn_predict_layers=0,
        dspark_target_layer_ids=(1, 2), dspark_noise_token_id=127, image_token_id=126, vision_config=None,
    )  # fmt: skip


def rows(setup: Setup, generator: torch.Generator) -> Tensor:
    """Ids int64 [batch, 2 (pairs + asked)]: keys from 0, values after the keys."""
    B = setup.batch
    keys = torch.rand(B, setup.keys, generator=generator).argsort(-1)[:, : setup.pairs]
    values = setup.keys + torch.randint(setup.values, keys.shape, generator=generator)
    pairs = torch.stack([keys, values], dim=-1)
    again = torch.rand(B, setup.pairs, generator=generator).argsort(-1)[:, : setup.asked]
    return torch.cat([pairs, pairs[torch.arange(B).unsqueeze(1), again]], dim=1).flatten(1)


def train(setup: Setup, seed: int) -> Transformer:
    """The model, trained from the seed on."""
    config = sizes(setup)
    model = Transformer(config, torch.arange(config.vocab_size))
    initialise(model, seed)
    with torch.no_grad():
        model.embed.weight.mul_(50)  # a std of 1: what later layers compare is tokens, not what layers added to them
    loads = Loads(model.layers)
    optimizer = torch.optim.AdamW(groups(model, 0.1, 1.0), lr=setup.learning_rate, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    for step in range(setup.steps):
        set_rate(optimizer, setup.learning_rate, step, setup.steps, setup.warm_up)
        ids = rows(setup, generator)
        run = model.run(ids, dense=step < setup.dense * setup.steps, teach=True)
        asked = slice(2 * setup.pairs, None, 2)
        logits, targets = model.logits(run.hidden[:, asked]), ids[:, 2 * setup.pairs + 1 :: 2]
        optimizer.zero_grad()
        (F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + indexer_loss(run.chunk)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loads.update(0.01)
    return model.eval()


@torch.no_grad()
def measure(model: Transformer, setup: Setup, seed: int) -> dict[str, dict[str, float]]:
    """Of each way to choose: right answers, and, where it is asked, attention caught and overlap with the oracle.

    "all" reads every entry. KL: of the indexer's scores, in nats, and of scores that are all equal.
    """
    ids = rows(setup, torch.Generator().manual_seed(1000 + seed))
    asked, targets = slice(2 * setup.pairs, None, 2), ids[:, 2 * setup.pairs + 1 :: 2]
    whole = model.run(ids, dense=True, teach=True)
    scores, mass, every = (of[LAYER] for of in (whole.chunk.scores, whole.chunk.mass, whole.chunk.indices))
    hidden = scores.isneginf()
    noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed))
    worth = {
        "indexer": scores,
        "random": noise.masked_fill(hidden, float("-inf")),
        "newest": torch.arange(scores.shape[-1]).expand(scores.shape).float().masked_fill(hidden, float("-inf")),
        "oracle": mass.masked_fill(hidden, float("-inf")),
    }
    chosen = {name: select(w, setup.top_k) for name, w in worth.items()}

    def right(run) -> float:
        return (model.logits(run.hidden[:, asked]).argmax(-1) == targets).double().mean().item()

    found = {"all": {"right": right(whole)}}
    for name, indices in chosen.items():
        other = copy.deepcopy(model)
        choose_by(other, lambda _, indices=indices: indices)
        found[name] = {"right": right(other.run(ids)), **caught(mass, indices, chosen["oracle"], asked)}
    for name, s in (("indexer", scores), ("random", torch.zeros_like(scores).masked_fill(hidden, float("-inf")))):
        found[name]["kl"] = teach(s[:, asked], mass[:, asked], every[:, asked]).item()
    return found


def caught(mass: Tensor, chosen: Tensor, best: Tensor, tokens: slice) -> dict[str, float]:
    """Share of the attention that went to the chosen entries, and of the best ones that are among them.

    mass: [B, S, N], attention on the entries when all are read; chosen, best: int64 [B, S, K]; tokens: of S.
    """
    mine, oracle = (named(indices, mass.shape[-1])[:, tokens] for indices in (chosen, best))
    there = mass[:, tokens]
    return {
        "attention": ((there * mine).sum() / there.sum()).item(),
        "overlap": ((mine & oracle).sum() / oracle.sum()).item(),
    }


def jobs() -> list[tuple[int]]:
    """The seeds."""
    return [(seed,) for seed in SEEDS]


def run(seed: int) -> dict:
    """What the training with a seed ends in."""
    began, setup = time.monotonic(), Setup()
    return {"found": measure(train(setup, seed), setup, seed), "seconds": time.monotonic() - began}


def write(results: list[dict]) -> None:
    """The result file: of each number the mean over the seeds and twice the standard deviation."""
    first = results[0]["found"]
    found = {
        name: {number: spread([r["found"][name][number] for r in results]) for number in numbers}
        for name, numbers in first.items()
    }
    seconds = round(sum(r["seconds"] for r in results))
    data = {"setup": asdict(Setup()), "seeds": len(SEEDS), "seconds": seconds, "found": found}
    RESULT.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
