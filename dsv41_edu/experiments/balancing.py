"""Experts without balancing, with an auxiliary loss, and with the loss-free bias, side by side.

Four arms from the same weights on the same batches, three seeds each. Load is measured by MaxVio, (max - mean) / mean
of a batch's counts, averaged over the layers; 0 is balance and E/k - 1 collapse. Differences between arms are taken
seed by seed, since a seed's runs share everything but the arm. Writes book/data/moe_balancing.json.

Source of the arms and the measure: Wang et al. 2024 (loss-free balancing).
"""

import dataclasses
import json
import statistics
import time
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from dsv41_edu.experiments.small_moe import Balancing, Setup, SmallMoE, Step, evaluate, train
from dsv41_edu.moe.balance import max_violation, starved_share

RESULT = Path(__file__).parents[2] / "book" / "data" / "moe_balancing.json"
SETUP = Setup()
ARMS = {
    "none": Balancing(),
    "auxiliary, weak": Balancing(alpha=1e-3),
    "auxiliary, strong": Balancing(alpha=1e-2),
    "loss-free": Balancing(speed=(0.01, 0.001)),
}
SEEDS = (0, 1, 2)
EVERY = 10  # steps between two points of a curve
MAP_ROWS = 32  # of the load map, each the mean of equally many steps
FIGURES = ("heldout_loss", "bits_per_byte", "maxvio", "starved", "heldout_maxvio")  # summed up over the seeds
LAST = 0.1  # share of the steps that end figures are taken over


def jobs() -> list[tuple[str, int]]:
    """The runs, each the arguments of `run`."""
    return [(arm, seed) for seed in SEEDS for arm in ARMS]


def run(arm: str, seed: int, setup: Setup = SETUP) -> dict:
    """One training and what is kept of it; floats rounded to 4 digits after the point.

    duration_s: processor seconds of one thread. maxvio, starved: means over the last tenth of the steps. curves: a
    point every EVERY steps, from step 0. load_map: [MAP_ROWS][E], share of the first layer's choices, sum 1 a row.
    """
    start = time.process_time()
    model = SmallMoE(setup, seed)
    steps = list(train(model, setup, ARMS[arm], seed))
    nats, bits, heldout_counts = evaluate(model, setup)
    counts = torch.stack([step.counts for step in steps])  # [steps, layers, E]
    last = counts[-round(LAST * len(steps)) :]
    return {
        "arm": arm,
        "seed": seed,
        "duration_s": round(time.process_time() - start, 1),
        "heldout_loss": round(nats, 4),
        "bits_per_byte": round(bits, 4),
        "maxvio": round(max_violation(last).mean().item(), 4),
        "starved": round(starved_share(last).mean().item(), 4),
        "heldout_maxvio": round(max_violation(heldout_counts).mean().item(), 4),
        **curves(steps),
        "load_map": _rounded(_load_map(counts[:, 0])),
    }


def curves(steps: list[Step]) -> dict:
    """`loss` and `maxvio` of every EVERY-th step."""
    kept = steps[::EVERY]
    maxvio = max_violation(torch.stack([step.counts for step in kept])).mean(-1)  # over layers
    return {"loss": [round(step.loss, 4) for step in kept], "maxvio_curve": _rounded(maxvio)}


def _load_map(counts: Tensor) -> Tensor:
    """fp64 [rows, E] of counts [steps, E]."""
    rows = torch.stack([part.sum(0) for part in counts.tensor_split(MAP_ROWS)]).double()
    return rows / rows.sum(-1, keepdim=True)


def summary(runs: list[dict]) -> dict:
    """For each arm and figure the mean and two standard deviations over the seeds, [mean, 2 sd].

    `loss_minus_none` is the held-out loss less that of the same seed without balancing.
    """
    none = {r["seed"]: r["heldout_loss"] for r in runs if r["arm"] == "none"}
    found = {}
    for arm in ARMS:
        mine = [r for r in runs if r["arm"] == arm]
        figures = {key: [r[key] for r in mine] for key in FIGURES}
        figures["loss_minus_none"] = [r["heldout_loss"] - none[r["seed"]] for r in mine]
        found[arm] = {
            key: [round(statistics.mean(values), 4), round(2 * statistics.stdev(values), 4)]
            for key, values in figures.items()
        }
    return found


def document(runs: list[dict]) -> dict:
    """The whole result file."""
    setup = {
        **dataclasses.asdict(SETUP),
        "arms": {name: dataclasses.asdict(arm) for name, arm in ARMS.items()},
        "seeds": list(SEEDS),
        "affinity": SETUP.config.scoring_func,
        "parameters": sum(p.numel() for p in SmallMoE(SETUP).parameters()),
        "curve_every": EVERY,
        "torch": torch.__version__,
        "duration_s": round(sum(r["duration_s"] for r in runs), 1),
    }
    return {"setup": setup, "summary": summary(runs), "runs": runs}


def write(runs: list[dict]) -> None:
    """Write the result file, a run a line."""
    made = document(runs)
    parts = [f'"setup": {json.dumps(made["setup"])}', f'"summary": {json.dumps(made["summary"])}']
    parts.append('"runs": [\n' + ",\n".join(json.dumps(r) for r in runs) + "\n]")
    RESULT.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


def read() -> dict:
    """The stored result file."""
    return json.loads(RESULT.read_text(encoding="utf-8"))


def slice_run(arm: str = "loss-free", seed: int = 0, steps: int = 21) -> dict:
    """The first `steps` steps of a run, again: the first points of its two curves, in a second or two."""
    return curves(list(islice(train(SmallMoE(SETUP, seed), SETUP, ARMS[arm], seed), steps)))


def agrees(piece: dict, stored: dict, loss: float = 0.02, maxvio: float = 0.5) -> bool:
    """Whether a slice's points lie within these tolerances of the stored run's.

    Not to the digit: another processor sums in another order, and a router turns the last bit into another choice.
    Weights nudged by one part in a million moved these points by up to 0.007 and 0.22.
    """
    return all(
        abs(mine - theirs) <= tolerance
        for key, tolerance in (("loss", loss), ("maxvio_curve", maxvio))
        for mine, theirs in zip(piece[key], stored[key], strict=False)
    )


def _rounded(values: Tensor) -> list:
    return [_rounded(v) if v.ndim else round(v.item(), 4) for v in values]
