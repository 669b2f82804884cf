"""Connections through 48 sublayers: what keeps the composite gain near 1, and what comes of one that explodes.

Four arms from the same sublayers on the same batches, three seeds each: the plain residual, hyper-connections (HC,
dynamic, unconstrained), mHC multi-pass (V4) and mHC single-pass (V4.1). The regimes are alike for HC and mHC:

    ordinary   the dynamic part of all maps times 0.01, as in the papers, and one learning rate for all parameters
    enlarged   the first residual maps times 1.3: HC's A_r = 1.3 I. A seam's exp(logits) too, but its softmax takes
               the factor away, so only HC is run
    hot        the dynamic part times 1, and connections learn 10 times as fast as the rest
    extreme    the same, 100 times as fast

Gradients are clipped in all of them. Gains are means over the first window of the held-out text. Writes
book/data/mhc_depth.json. Sources of the arms: Hyper-Connections 2, mHC 4, V4.1 report 2.4.1; of the gain: mHC 3.1.
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv41_edu.experiments import text
from dsv41_edu.experiments.mhc_stack import ARMS, Regime, Setup, Stack, composite, gains, mixing, residual_maps
from dsv41_edu.experiments.small_moe import batches, descend, spread

RESULT = Path(__file__).parents[2] / "book" / "data" / "mhc_depth.json"
SETUP = Setup()
REGIMES = {
    "ordinary": Regime(),
    "enlarged": Regime(factor=1.3),
    "hot": Regime(scale=1.0, rate=10.0),
    "extreme": Regime(scale=1.0, rate=100.0),
}
SEEDS = (0, 1, 2)
EVERY = 4  # steps that make one point of a curve
WINDOWS = 128  # of the held-out text, for the last loss
PEAKS = ("gradient_norm", "forward", "backward", "forward_single", "backward_single", "mixing")  # of curves


def jobs() -> list[tuple[str, str, int]]:
    """The runs, each the arguments of `run`."""
    arms = {"ordinary": ARMS, "enlarged": ARMS[1:2], "hot": ARMS[1:], "extreme": ARMS[1:]}
    return [(regime, arm, seed) for regime in REGIMES for arm in arms[regime] for seed in SEEDS]


def train(model: Stack, setup: Setup, regime: Regime, seed: int) -> Iterator[tuple[float, float]]:
    """Train in place: after each step its loss, in nats a token, and its gradient's norm before the clipping."""
    data = batches(setup, seed)
    connections = [p for p in model.connections.parameters() if p.requires_grad]
    rest = [p for name, p in model.named_parameters() if not name.startswith("connections")]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": setup.weight_decay, "times": 1.0},
        {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0, "times": 1.0},
        {"params": connections, "weight_decay": 0.0, "times": regime.rate},
    ]
    optimizer = torch.optim.AdamW(groups, lr=setup.learning_rate, betas=(0.9, 0.95), fused=True)
    for step in range(setup.steps):
        yield descend(model, optimizer, setup, step, next(data))


@torch.no_grad()
def evaluate(model: Stack, setup: Setup) -> float:
    """Nats a token over the first WINDOWS windows of the held-out text."""
    ids = text.tokens("heldout")
    n = WINDOWS * setup.context
    inputs, targets = ids[:n].view(-1, setup.context), ids[1 : n + 1].view(-1, setup.context)
    losses = [
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        for x, y in zip(inputs.split(16), targets.split(16), strict=True)
    ]
    return sum(losses) / n


def measure(model: Stack, setup: Setup) -> dict[str, Tensor]:
    """On the first held-out window, fp64 [sublayers] each: gains of P_l, of R_l alone, and how much R_l mixes."""
    maps = residual_maps(model, text.tokens("heldout")[None, : setup.context])
    forward, backward = gains(composite(maps))
    forward_single, backward_single = gains(maps)
    return {
        "forward": forward,
        "backward": backward,
        "forward_single": forward_single,
        "backward_single": backward_single,
        "mixing": mixing(maps),
    }


def watch(model: Stack, setup: Setup, regime: Regime, seed: int, length: int) -> dict[str, list]:
    """Train and keep the curves, [length] each: a point for every EVERY steps.

    loss: their mean. gradient_norm: their largest. Measures before the first of them: the largest over the
    sublayers, and `_all`, the gains of the product of all maps. Raises ValueError for more points than there are.
    """
    most = math.ceil(setup.steps / EVERY)
    if not 1 <= length <= most:
        raise ValueError(f"length = {length}: expected 1 to {most} points, of {EVERY} steps each")
    training, points = train(model, setup, regime, seed), []
    for _ in range(length):
        found = measure(model, setup)
        losses, norms = zip(*islice(training, EVERY), strict=True)
        point = {"loss": statistics.mean(losses), "gradient_norm": max(norms)}
        point |= {name: values.max() for name, values in found.items()}
        point |= {f"{name}_all": found[name][0] for name in ("forward", "backward")}
        points.append({name: rounded(value) for name, value in point.items()})
    return {name: [point[name] for point in points] for name in points[0]}


def run(regime: str, arm: str, seed: int, setup: Setup = SETUP) -> dict:
    """One training and what is kept of it; numbers rounded to 5 digits, None for one that isn't finite.

    duration_s: processor seconds of one thread. heldout_loss: nats a token. `max_` and a curve: its largest, or
    the measure after the last step where that is larger. layers: measures after the last step, [sublayers] each.
    """
    start = time.process_time()
    model = Stack(setup, arm, seed, REGIMES[regime])
    curves = watch(model, setup, REGIMES[regime], seed, math.ceil(setup.steps / EVERY))
    layers = {name: [rounded(v) for v in values] for name, values in measure(model, setup).items()}
    return {
        "regime": regime,
        "arm": arm,
        "seed": seed,
        "heldout_loss": rounded(evaluate(model, setup)),
        **{f"max_{name}": largest(curves[name] + layers.get(name, [])) for name in PEAKS},
        "duration_s": round(time.process_time() - start, 1),
        "curves": curves,
        "layers": layers,
    }


def rounded(value: float | Tensor) -> float | None:
    """To 5 digits, so that exploding gains stay short; None, for JSON has no word for it, where it isn't finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def largest(values: list[float | None]) -> float | None:
    """The largest finite one."""
    return max((v for v in values if v is not None), default=None)


def summary(runs: list[dict]) -> list[dict]:
    """A row for each regime and arm, over the seeds: losses as [mean, 2 standard deviations], peaks as [least, most].

    `loss_minus_plain` is the held-out loss less that of the same seed's plain residual.
    """
    plain = {r["seed"]: r["heldout_loss"] for r in runs if r["arm"] == "plain"}
    rows = []
    for regime, arm in dict.fromkeys((r["regime"], r["arm"]) for r in runs):
        mine = [r for r in runs if (r["regime"], r["arm"]) == (regime, arm)]
        losses = {r["seed"]: r["heldout_loss"] for r in mine}
        row = {"regime": regime, "arm": arm, "heldout_loss": None, "loss_minus_plain": None}
        if None not in losses.values():
            row["heldout_loss"] = spread(list(losses.values()))
            row["loss_minus_plain"] = spread([loss - plain[seed] for seed, loss in losses.items()])
        for name in (f"max_{curve}" for curve in PEAKS):
            row[name] = [min(r[name] for r in mine), max(r[name] for r in mine)]
        rows.append(row)
    return rows


def document(runs: list[dict]) -> dict:
    """The whole result file."""
    setup = {
        **dataclasses.asdict(SETUP),
        "regimes": {name: dataclasses.asdict(regime) for name, regime in REGIMES.items()},
        "seeds": list(SEEDS),
        "parameters": {arm: sum(p.numel() for p in Stack(SETUP, arm).parameters()) for arm in ARMS},
        "curve_every": EVERY,
        "heldout_windows": WINDOWS,
        "torch": torch.__version__,
        "duration_s": round(sum(r["duration_s"] for r in runs), 1),
    }
    return {"setup": setup, "summary": summary(runs), "runs": runs}


def write(runs: list[dict]) -> None:
    """Write the result file, a run a line."""
    made = document(runs)
    parts = [f'"setup": {json.dumps(made["setup"])}']
    for name in ("summary", "runs"):
        parts.append(f'"{name}": [\n' + ",\n".join(json.dumps(row, allow_nan=False) for row in made[name]) + "\n]")
    RESULT.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


def read() -> dict:
    """The stored result file."""
    return json.loads(RESULT.read_text(encoding="utf-8"))


def slice_run(regime: str = "ordinary", arm: str = "HC", seed: int = 0, length: int = 2) -> dict[str, list]:
    """The first points of a run's curves, again, in a few seconds; on the same processor the stored ones exactly."""
    return watch(Stack(SETUP, arm, seed, REGIMES[regime]), SETUP, REGIMES[regime], seed, length)


def agrees(piece: dict[str, list], stored: dict, tolerance: float = 0.01) -> bool:
    """Whether a slice's points lie within this share of the stored run's.

    Not to the digit: another processor sums in another order. Weights nudged by one part in a million moved the
    first four points by up to 0.0001 of their value; but HC in the hot regimes is chaotic, and its gains moved by
    0.9 of theirs: hold slices of the other runs against the file.
    """
    return all(
        math.isclose(mine, theirs, rel_tol=tolerance)
        for name in piece
        for mine, theirs in zip(piece[name], stored["curves"][name], strict=False)
    )
