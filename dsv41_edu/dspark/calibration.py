"""Making confidences mean what they say: a temperature for each position, fitted from left to right.

    survival at k     s_k = sigmoid(c_1 / T_1) ... sigmoid(c_k / T_k)
    event             the first k drafts were all accepted
    error             sum over bins of probability: n_bin / N * | mean s_k - share of events |
    T_k               the one of a grid with the smallest error, T_1 ... T_k-1 being fixed; the first of equals

The scheduler adds survivals up, so it is they that must be right, not the single confidences. Source: DSpark 3.2.2.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BINS = 15
GRID = torch.logspace(-1, 1, 41, dtype=torch.float64)


class Diagram(NamedTuple):
    """Of each bin: how many fall into it, int64; mean probability and share of events, fp64, NaN for an empty one."""

    count: Tensor
    predicted: Tensor
    observed: Tensor


def reliability(probability: Tensor, event: Tensor, bins: int = BINS) -> Diagram:
    """Equal bins of 0 to 1, each with its upper edge; 0 is in the first. Both [N], event bool or 0 and 1.

    Raises ValueError for shapes, no samples, bins below 1, probabilities outside 0 to 1 or other events.
    """
    p, y = probability.double(), event.double()
    if p.ndim != 1 or p.shape != y.shape or not len(p):
        raise ValueError(f"probability {list(p.shape)}, event {list(y.shape)}: expected two equal [N], N >= 1")
    if bins < 1:
        raise ValueError(f"bins = {bins}: expected 1 or more")
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"probability from {p.min()} to {p.max()}: expected numbers from 0 to 1")
    if not ((y == 0) | (y == 1)).all():
        raise ValueError(f"event from {y.min()} to {y.max()}: expected 0 or 1")
    index = (p * bins).ceil().long().sub(1).clamp(min=0)
    count = torch.bincount(index, minlength=bins)
    predicted, observed = (torch.zeros(bins, dtype=torch.float64).index_add(0, index, x) / count for x in (p, y))
    return Diagram(count, predicted, observed)


def calibration_error(probability: Tensor, event: Tensor, bins: int = BINS) -> float:
    """Expected calibration error, 0 to 1, of `reliability`'s bins; arguments and errors as there."""
    count, predicted, observed = reliability(probability, event, bins)
    return float((count * (predicted - observed).abs()).nansum() / count.sum())


def survivals(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """s, fp64 [N, g], of confidence logits [N, g] and a temperature for each position.

    Raises ValueError for shapes or temperatures that aren't positive and finite.
    """
    if logits.ndim != 2 or logits.shape[1] != len(temperatures):
        raise ValueError(f"logits {list(logits.shape)}, {len(temperatures)} temperatures: expected [N, g] and g")
    if not all(0 < T < math.inf for T in temperatures):
        raise ValueError(f"temperatures = {list(temperatures)}: expected positive, finite numbers")
    return (logits.double() / torch.tensor(temperatures, dtype=torch.float64)).sigmoid().cumprod(-1)


def fit_temperatures(logits: Tensor, accepted: Tensor, grid: Sequence[float] = GRID.tolist()) -> list[float]:
    """T_1 ... T_g by sequential scaling.

    logits: [N, g], the confidence head's; accepted: bool or 0 and 1 [N, g], whether the first k drafts were all
    accepted. Raises ValueError for shapes, an `accepted` that rises along a row, and as `reliability`.
    """
    if accepted.shape != logits.shape:
        raise ValueError(f"logits {list(logits.shape)}, accepted {list(accepted.shape)}: expected two equal [N, g]")
    if (accepted[:, 1:].long() > accepted[:, :-1].long()).any():
        raise ValueError("accepted rises along a row: expected whether all of the first k drafts were accepted")
    found, before = [], torch.ones(len(logits), dtype=torch.float64)
    for k in range(logits.shape[1]):
        tried = [before * (logits[:, k].double() / T).sigmoid() for T in grid]
        errors = [calibration_error(survival, accepted[:, k]) for survival in tried]
        best = errors.index(min(errors))
        found.append(grid[best])
        before = tried[best]
    return found
