"""Trains the miniature on the shipped text and writes its checkpoint: python -m dsv41_edu.experiments.mini

Every mechanism is on but images: the text has none, so the vision tower and `bias_vl` stay as they began. Until
`dense` of the steps every layer reads all entries and the indexers learn from whole attention; then they choose. In
the last steps, from `as_stored` on, each forward pass uses the numbers that the checkpoint will hold.

The run is one sequence of numbers: stopped and started again it ends in the same weights on the same machine. State
and curves lie in `--folder` until it ends; then the weights go to dsv41_edu/data/mini, the curves to book/data.
"""

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from dsv41_edu import checkpoint
from dsv41_edu.config import preset
from dsv41_edu.engram.vocabulary import CompressedVocabulary
from dsv41_edu.experiments import text
from dsv41_edu.model import Transformer
from dsv41_edu.moe.balance import max_violation
from dsv41_edu.training import (
    Loads,
    evaluate,
    groups,
    indexer_loss,
    initialise,
    language_loss,
    rounded,
    set_dropout,
    set_rate,
)  # fmt: skip

WEIGHTS = Path(__file__).parents[1] / "data" / "mini"
CURVES = Path(__file__).parents[2] / "book" / "data" / "mini.json"
FOLDER = Path("_build/mini")


@dataclass(frozen=True)
class Setup:
    """Training of the miniature."""

    seed: int = 0
    steps: int = 1600
    batch: int = 16  # sequences
    context: int = 256  # tokens
    learning_rate: float = 3e-3
    warm_up: int = 100  # steps
    decay: float = 0.1
    clip: float = 1.0
    table_rate: float = 1.0  # of Engram's tables, over the rest's: at the report's 5 a text this small is memorised
    dropout: tuple[float, float] = (0.1, 0.3)  # of sublayers' outputs, of Engram's rows
    dense: float = 0.6  # part of the steps in which every entry is read
    as_stored: float = 0.85  # from here on weights are rounded as stored
    bias_speed: tuple[float, float] = (0.01, 0.001)  # at the first step and the last, a line between
    threads: int = 2


def miniature() -> Transformer:
    """The model with its token map, weights not yet set."""
    vocabulary = CompressedVocabulary.of(text.tokenizer())
    return Transformer(preset("mini"), torch.from_numpy(vocabulary.map), drafter=False)


def batch(setup: Setup, step: int) -> Tensor:
    """Rows int64 [B, context + 1] from random places of the training text, by seed and step alone."""
    ids, generator = text.tokens("train"), torch.Generator().manual_seed(setup.seed * 1_000_003 + step)
    at = torch.randint(len(ids) - setup.context, (setup.batch, 1), generator=generator)
    return ids[at + torch.arange(setup.context + 1)]


def in_rows(split: str, context: int, rows: int | None = None) -> list[Tensor]:
    """A split of the text in rows of `context` predicted tokens, 16 at a time: all rows, or a few spread over it."""
    ids = text.tokens(split)
    whole = ids[: (len(ids) - 1) // context * context + 1]
    found = torch.stack([whole[i : i + context + 1] for i in range(0, len(whole) - 1, context)])
    if rows is not None:
        found = found[torch.linspace(0, len(found) - 1, rows).long()]
    return list(found.split(16))


def heldout(context: int, rows: int | None = None) -> list[Tensor]:
    """`in_rows` of the held-out text."""
    return in_rows("heldout", context, rows)


def bits_per_byte(nats: float) -> float:
    """Of a mean loss on the held-out text, in nats a token."""
    return nats / 0.6931471805599453 / text.bytes_per_token("heldout")


class Training:
    """Model, optimizer and curves at a step."""

    def __init__(self, setup: Setup, model: Transformer):
        self.setup, self.model, self.step = setup, model, 0
        initialise(model, setup.seed)
        set_dropout(model, *setup.dropout)
        self.loads = Loads(model.layers)
        self.optimizer = torch.optim.AdamW(
            groups(model, setup.decay, setup.table_rate), lr=setup.learning_rate, betas=(0.9, 0.95)
        )
        self.curves: list[dict] = []
        self.seconds = 0.0

    def advance(self) -> None:
        """One step."""
        s, model, began = self.setup, self.model, time.monotonic()
        part, ids = self.step / s.steps, batch(self.setup, self.step)
        set_rate(self.optimizer, s.learning_rate, self.step, s.steps, s.warm_up)
        with torch.random.fork_rng():  # dropout draws from torch's own generator
            torch.manual_seed(s.seed * 1_000_003 + self.step)
            if part < s.as_stored:
                losses = self.backward(ids, dense=part < s.dense)
            else:
                with rounded(model):
                    losses = self.backward(ids, dense=False)
        norm = nn.utils.clip_grad_norm_(model.parameters(), s.clip)
        self.optimizer.step()
        fast, slow = s.bias_speed
        counts = self.loads.update(fast + (slow - fast) * part)
        self.seconds += time.monotonic() - began
        worst = float(max_violation(counts).max())
        self.curves.append({"loss": losses[0], "indexer": losses[1], "norm": float(norm), "max_violation": worst})
        self.step += 1

    def backward(self, ids: Tensor, dense: bool) -> tuple[float, float]:
        """Gradients, and the two losses."""
        run = self.model.run(ids[:, :-1], dense=dense, teach=True)
        loss, teaching = language_loss(self.model.logits(run.hidden), ids[:, 1:]), indexer_loss(run.chunk)
        self.optimizer.zero_grad()
        (loss + teaching).backward()
        return loss.item(), teaching.item()

    def tensors(self) -> dict[str, Tensor]:
        """All numbers that the next step depends on."""
        found = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"optimizer.{name}.{key}"] = value
        return {name: t.contiguous() for name, t in found.items()}

    def save(self, folder: Path) -> None:
        """State and curves, the old ones until the new are whole."""
        folder.mkdir(parents=True, exist_ok=True)
        said = {"step": self.step, "seconds": self.seconds, "curves": self.curves, "setup": asdict(self.setup)}
        save_file(self.tensors(), folder / "state.tmp", {"said": json.dumps(said)})
        os.replace(folder / "state.tmp", folder / "state.safetensors")

    def load(self, folder: Path) -> None:
        """Go on where `save` was called. Raises ValueError for another setup's state."""
        with safe_open(folder / "state.safetensors", "pt") as file:
            said = json.loads(file.metadata()["said"])
            if json.dumps(said["setup"]) != json.dumps(asdict(self.setup)):
                raise ValueError(f"{folder}: state of {said['setup']}: expected {asdict(self.setup)}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        model = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
        self.model.load_state_dict(model)
        for name, p in self.model.named_parameters():
            keys = ("step", "exp_avg", "exp_avg_sq")
            if f"optimizer.{name}.step" in tensors:
                self.optimizer.state[p] = {key: tensors[f"optimizer.{name}.{key}"] for key in keys}
        self.step, self.seconds, self.curves = said["step"], said["seconds"], said["curves"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dsv41_edu.experiments.mini", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the state while it trains")
    parser.add_argument("--steps", type=int, default=Setup.steps)
    arguments = parser.parse_args()
    setup = Setup(steps=arguments.steps)
    torch.set_num_threads(setup.threads)
    training = Training(setup, miniature())
    training.model.compile_seams()
    if (arguments.folder / "state.safetensors").exists():
        training.load(arguments.folder)
    few = heldout(setup.context, 32)
    bar = tqdm(total=setup.steps, initial=training.step, unit="step")
    while training.step < setup.steps:
        training.advance()
        bar.update()
        bar.set_postfix(loss=f"{training.curves[-1]['loss']:.3f}")
        if training.step % 100 == 0:
            training.curves[-1]["heldout"] = evaluate(training.model, few)
            training.save(arguments.folder)
    finish(training)


def finish(training: Training) -> None:
    """Ship the weights as stored, and what the training was."""
    model, every = training.model, heldout(training.setup.context)
    before = evaluate(model, every)
    checkpoint.save(model, WEIGHTS, tokenizer=text.tokenizer())
    after = evaluate(checkpoint.load(WEIGHTS, dtype=torch.float32), every)
    tokens = training.setup.steps * training.setup.batch * training.setup.context
    result = {
        "setup": asdict(training.setup),
        "torch": torch.__version__,
        "tokens": tokens,
        "seconds": round(training.seconds),
        "parameters": sum(p.numel() for p in model.parameters()),
        "bits_per_byte": {"trained": bits_per_byte(before), "as stored": bits_per_byte(after)},
        "curves": training.curves,
    }
    CURVES.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{bits_per_byte(before):.4f} bits a byte, {bits_per_byte(after):.4f} as stored; {WEIGHTS}")


if __name__ == "__main__":
    main()
