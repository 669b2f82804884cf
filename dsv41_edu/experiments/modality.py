"""One bias for text and images together, or one for each: a simulation without training.

Tokens of two modalities, four of text to one of images, come to a gate whose logits prefer other experts for each:
logits = preference of the modality [E] + noise of the token. Loss-free updates move either one bias by the counts of
all tokens or two biases, each by its own modality's counts. The choice and the update are the project's own (`route`,
`update_bias`). Writes book/data/moe_modality.json.

Source of the two biases: V4.1 report 2.1.1.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsv41_edu.moe.balance import expert_counts, max_violation, update_bias
from dsv41_edu.moe.gate import affinity, route

RESULT = Path(__file__).parents[2] / "book" / "data" / "moe_modality.json"
TEXT, IMAGE = 0, 1
EVERY = 5  # steps between two points of a curve
LAST = 0.1  # share of the steps that end loads are taken over


@dataclass(frozen=True)
class Simulation:
    """What is drawn, and how the biases move."""

    n_experts: int = 16
    top_k: int = 2
    tokens: int = 8192  # a step
    image_share: float = 0.2
    preference: float = 1.0  # standard deviation over the experts of a modality's logits
    steps: int = 400
    speed: float = 0.005
    seed: int = 0


SETUP = Simulation()


def simulate(simulation: Simulation, biases: int) -> Tensor:
    """Counts int64 [steps, 2, E] of text and of image tokens, with 1 or 2 biases."""
    s = simulation
    if biases not in (1, 2):
        raise ValueError(f"biases = {biases}: expected 1, for all tokens, or 2, one for each modality")
    generator = torch.Generator().manual_seed(s.seed)
    preference = s.preference * torch.randn(2, s.n_experts, generator=generator)
    modality = (torch.arange(s.tokens) < round(s.image_share * s.tokens)).long()  # images first: order means nothing
    row = modality if biases == 2 else torch.zeros_like(modality)  # the bias that a token is chosen with
    bias, steps = torch.zeros(biases, s.n_experts), []
    for _ in range(s.steps):
        logits = preference[modality] + torch.randn(s.tokens, s.n_experts, generator=generator)
        _, indices = route(affinity(logits, "sqrtsoftplus"), s.top_k, bias=bias[row])
        counts = torch.stack([expert_counts(indices[modality == m], s.n_experts) for m in (TEXT, IMAGE)])
        bias = update_bias(bias, counts if biases == 2 else counts.sum(0, keepdim=True), s.speed)
        steps.append(counts)
    return torch.stack(steps)


def measures(counts: Tensor) -> dict:
    """Of counts [steps, 2, E]: MaxVio of all tokens, of text and of images, a point every EVERY steps; end loads.

    `end_maxvio`: MaxVio of the last tenth's summed counts. `end_load`: their load over its mean, [E]. For each of
    "total", "text" and "image".
    """
    last = counts[-round(LAST * len(counts)) :].sum(0)
    found = {"maxvio": {}, "end_maxvio": {}, "end_load": {}}
    for name, rows in (("total", [TEXT, IMAGE]), ("text", [TEXT]), ("image", [IMAGE])):
        load = last[rows].sum(0).double()
        found["maxvio"][name] = _rounded(max_violation(counts[::EVERY, rows].sum(1)))
        found["end_maxvio"][name] = round(max_violation(load).item(), 4)
        found["end_load"][name] = _rounded(load / load.mean())
    return found


def jobs() -> list[tuple[int]]:
    """The runs, each the arguments of `run`."""
    return [(1,), (2,)]


def run(biases: int, simulation: Simulation = SETUP) -> dict:
    """One simulation's `biases`, `duration_s` (processor seconds) and `measures`."""
    start = time.process_time()
    found = measures(simulate(simulation, biases))
    return {"biases": biases, "duration_s": round(time.process_time() - start, 1), **found}


def document(runs: list[dict]) -> dict:
    """The whole result file."""
    return {
        "setup": {**dataclasses.asdict(SETUP), "curve_every": EVERY, "torch": torch.__version__},
        "runs": runs,
    }


def write(runs: list[dict]) -> None:
    """Write the result file."""
    RESULT.write_text(json.dumps(document(runs)) + "\n", encoding="utf-8")


def read() -> dict:
    """The stored result file."""
    return json.loads(RESULT.read_text(encoding="utf-8"))


def _rounded(values: Tensor) -> list[float]:
    return [round(v, 4) for v in values.tolist()]
