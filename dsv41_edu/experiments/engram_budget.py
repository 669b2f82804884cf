"""How much memory: loss against the share of the sparse budget given to it, and against the size of the table.

    total  = all parameters
    sparse = (E - k) experts a layer that a token does not choose + (rows - columns) rows that it does not read
    active = total - sparse
    share  = rows' part of sparse

"share": total and active are equal to the parameter. An expert with its router row is exactly 388 rows, so experts
turn into rows whole; wkv and gate weights are active, and so is what stands in their place at share 0 (`engram_lm`).
Not equal: the router scores all its experts, so an arm with few does less arithmetic; and primes leave some rows
unread (`rows_unread`). "rows": the table grows, the rest stays. Three seeds an arm; differences are taken seed by
seed, since a seed's runs share batches. Writes book/data/engram_budget.json. Source: Engram 3.1, 3.2.
"""

import dataclasses
import json
import math
import statistics
import time
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from dsv41_edu.experiments.engram_lm import EngramLM, Setup, train
from dsv41_edu.experiments.small_moe import evaluate, spread

RESULT = Path(__file__).parents[2] / "book" / "data" / "engram_budget.json"
SETUP = Setup()
SPARE = 40  # experts a layer beyond the active ones, at share 0
ARMS = {"share": (0.0, 0.1, 0.25, 0.5, 0.75, 0.9), "rows": (512, 2048, 8192, 32768, 131072)}
SEEDS = (0, 1, 2)
EVERY = 10  # steps between two points of a curve


def jobs() -> list[tuple[str, float, int]]:
    """The runs, each the arguments of `run`."""
    return [(kind, value, seed) for kind, values in ARMS.items() for value in values for seed in SEEDS]


def setup_of(kind: str, value: float, base: Setup = SETUP) -> Setup:
    """The sizes of an arm. Raises ValueError for an unknown kind and for a share that isn't whole experts."""
    if kind == "rows":
        return dataclasses.replace(base, table_rows=value)
    if kind != "share":
        raise ValueError(f"kind = {kind!r}: expected one of {', '.join(ARMS)}")
    moved = round(value * SPARE)
    if not 0 <= moved <= SPARE or not math.isclose(moved, value * SPARE):
        raise ValueError(f"share = {value}: expected 0 to 1 in steps of {1 / SPARE}, an expert a layer")
    rows = moved * base.layers * expert_parameters(base) // base.row_width
    return dataclasses.replace(
        base, n_experts=base.top_k + SPARE - moved, table_rows=rows + base.columns if moved else 0
    )


def expert_parameters(setup: Setup) -> int:
    """Of an expert and its router row."""
    return 3 * setup.hidden_size * setup.expert_width + setup.hidden_size


def budget(setup: Setup) -> dict[str, int]:
    """`total` and `active` parameters of the model itself, its `table` parameters, and `rows_unread`."""
    model = EngramLM(setup)
    total = sum(p.numel() for p in model.parameters())
    sparse = (setup.n_experts - setup.top_k) * setup.layers * expert_parameters(setup)
    found = {"total": total, "active": total - sparse, "table": 0, "rows_unread": 0}
    if model.memory:
        found["table"] = model.memory.table.weight.numel()
        found["active"] -= found["table"] - setup.columns * setup.row_width
        found["rows_unread"] = setup.table_rows - model.memory.hash.rows[0]
    return found


def run(kind: str, value: float, seed: int, base: Setup = SETUP) -> dict:
    """One training. heldout_loss: nats a token, over all the held-out text; duration_s: of one thread's processor.

    curve: the loss of every EVERY-th step, from step 0. Raises what `setup_of` raises.
    """
    start = time.process_time()
    setup = setup_of(kind, value, base)
    model = EngramLM(setup, seed)
    losses = list(train(model, setup, seed))
    nats, bits, _ = evaluate(model, setup)
    return {
        "kind": kind,
        "value": value,
        "seed": seed,
        "heldout_loss": round(nats, 4),
        "bits_per_byte": round(bits, 4),
        "duration_s": round(time.process_time() - start, 1),
        "curve": [round(loss, 4) for loss in losses[::EVERY]],
    }


def summary(runs: list[dict]) -> list[dict]:
    """A row for each arm, over the seeds as [mean, 2 standard deviations].

    `minus_first` is the held-out loss less that of the same seed's first arm: no memory, or the smallest table.
    """
    rows = []
    for kind, values in ARMS.items():
        losses = {(r["value"], r["seed"]): r["heldout_loss"] for r in runs if r["kind"] == kind}
        seeds = dict.fromkeys(seed for _, seed in losses)
        for value in values:
            mine = [losses[value, seed] for seed in seeds]
            gained = [losses[value, seed] - losses[values[0], seed] for seed in seeds]
            rows.append({"kind": kind, "value": value, "heldout_loss": spread(mine), "minus_first": spread(gained)})
    return rows


def fit(rows: list[float], losses: list[float]) -> dict[str, float]:
    """The power law loss = scale * rows^exponent by least squares of the logarithms.

    residual: of the losses, root mean square, in nats; r2: of the logarithms, 1 for a perfect line.
    """
    x, y = np.log(rows), np.log(losses)
    exponent, offset = np.polyfit(x, y, 1)
    line = exponent * x + offset
    residual = np.sqrt(np.mean((np.exp(line) - losses) ** 2))
    r2 = 1 - ((y - line) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    return {
        "scale": round(float(np.exp(offset)), 4),
        "exponent": round(float(exponent), 5),
        "residual": round(float(residual), 5),
        "r2": round(float(r2), 4),
    }


def fits(runs: list[dict]) -> dict:
    """`mean`: the fit through the seeds' mean losses; `exponent`: of each seed's own, [mean, 2 sd]."""
    losses = {(r["value"], r["seed"]): r["heldout_loss"] for r in runs if r["kind"] == "rows"}
    rows, seeds = ARMS["rows"], dict.fromkeys(seed for _, seed in losses)
    exponents = [fit(rows, [losses[value, seed] for value in rows])["exponent"] for seed in seeds]
    means = [statistics.mean(losses[value, seed] for seed in seeds) for value in rows]
    return {
        "mean": fit(rows, means),
        "exponent": [round(statistics.mean(exponents), 5), round(2 * statistics.stdev(exponents), 5)],
    }


def document(runs: list[dict]) -> dict:
    """The whole result file."""
    arms = []
    for kind, values in ARMS.items():
        for value in values:
            s = setup_of(kind, value)
            sizes = {"n_experts": s.n_experts, "table_rows": s.table_rows, **budget(s)}
            arms.append({"kind": kind, "value": value, **sizes})
    setup = {
        **dataclasses.asdict(SETUP),
        "spare_experts": SPARE,
        "seeds": list(SEEDS),
        "curve_every": EVERY,
        "torch": torch.__version__,
        "duration_s": round(sum(r["duration_s"] for r in runs), 1),
    }
    return {"setup": setup, "fit": fits(runs), "arms": arms, "summary": summary(runs), "runs": runs}


def write(runs: list[dict]) -> None:
    """Write the result file, a run a line."""
    made = document(runs)
    parts = [f'"{name}": {json.dumps(made[name])}' for name in ("setup", "fit")]
    for name in ("arms", "summary", "runs"):
        parts.append(f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in made[name]) + "\n]")
    RESULT.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


def read() -> dict:
    """The stored result file."""
    return json.loads(RESULT.read_text(encoding="utf-8"))


def slice_run(kind: str = "share", value: float = 0.25, seed: int = 0, steps: int = 21) -> list[float]:
    """The first points of a run's curve, again, in a few seconds; on the same processor the stored ones exactly."""
    setup = setup_of(kind, value)
    losses = list(islice(train(EngramLM(setup, seed), setup, seed), steps))
    return [round(loss, 4) for loss in losses[::EVERY]]


def agrees(piece: list[float], stored: dict, tolerance: float = 0.02) -> bool:
    """Whether a slice's points lie within this many nats of the stored run's: another processor sums otherwise."""
    return all(abs(mine - theirs) <= tolerance for mine, theirs in zip(piece, stored["curve"], strict=False))
