"""How many drafts of each request are worth verifying: each costs the whole batch a little of its speed.

    survival    a_r,j = c_r,1 ... c_r,j                       how likely draft j is reached and accepted
    tokens      theta(b) = (R + the b largest a) * rate(R + b)     a second, of R requests with b drafts verified
    fill        b drafts by falling survival, then smaller j, then smaller r: always a prefix of each request

    algorithm 1      b grows while theta does, and stops at the first b that doesn't raise it
    global search    the b of the largest theta, the smallest of equals
    delayed          B = R + b by global search from confidences two steps old, filled by the current survivals

rate(B) is steps a second with B positions in the batch. Algorithm 1 never looks behind the slot that it decides on,
so the decision to verify a draft says nothing of its value, and the output keeps its law; on a staircase it is stuck
at the first edge. A global search over the current confidences sees what drafts were drawn, and bends the output. An
old budget can't: it was fixed before they were. Sources: DSpark 3.2.2, algorithm 1; 5.2.
"""

from collections import deque

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

FLOOR = 1e-6  # a draft that survives less often is never verified
DELAY = 2  # steps from a confidence to the budget that it makes


def fuse(confidence: ArrayLike | Tensor) -> bool:
    """Whether the fused kernels serve: for a tensor on a GPU."""
    return isinstance(confidence, Tensor) and confidence.is_cuda


def survival(confidence: ArrayLike) -> np.ndarray:
    """Chance that a draft and all before it are accepted, fp64 [R, g]: the running product of confidence [R, g].

    confidence: chances, the sigmoid of the head's logits. Raises ValueError for its shape or numbers outside 0 to 1.
    """
    confidence = np.asarray(confidence, dtype=np.float64)
    if confidence.ndim != 2:
        raise ValueError(f"confidence {list(confidence.shape)}: expected [R, g]")
    right = (confidence >= 0) & (confidence <= 1)
    if not right.all():
        raise ValueError(
            f"confidence holds {confidence[~right][0]}: expected chances, the sigmoid of the head's logits"
        )
    survivals = confidence.copy()
    for j in range(1, confidence.shape[1]):
        survivals[:, j] *= survivals[:, j - 1]
    return survivals


def theta(survivals: np.ndarray, step_rate: np.ndarray) -> np.ndarray:
    """Tokens a second with b = 0, 1, ... drafts verified, the best of survivals [R, g] first.

    b ends where the survivals reach the floor, or the table of `schedule` its last position.
    """
    R, falling = len(survivals), -np.sort(-survivals[survivals >= FLOOR])
    tokens = np.concatenate([[float(R)], falling]).cumsum()
    rates = step_rate[R : R + len(tokens)]
    return tokens[: len(rates)] * rates


def fill(survivals: np.ndarray, budget: int) -> np.ndarray:
    """The lengths, int64 [R], that the `budget` best drafts of survivals [R, g] make."""
    R, worth = len(survivals), survivals[survivals >= FLOOR]
    budget = min(budget, len(worth))
    if budget <= 0:
        return np.zeros(R, dtype=np.int64)
    last = np.partition(worth, -budget)[-budget]
    chosen = survivals > last
    # of those that equal the last one in, the first by j, then by r
    equal = np.flatnonzero((survivals == last).T)[: budget - np.count_nonzero(chosen)]
    chosen[equal % R, equal // R] = True
    return sum(chosen.T, np.zeros(R, dtype=np.int64))  # by columns: numpy takes long over short rows


def schedule(
    confidence: ArrayLike | Tensor, step_rate: ArrayLike | Tensor | None, early_stop: bool = True
) -> np.ndarray | Tensor:
    """The drafts of each request to verify, int64 [R], by algorithm 1, or without `early_stop` by the global search.

    confidence: [R, g], chances. step_rate: fp [N], steps a second with 0, 1, ..., N - 1 positions in the batch, those
    after the drafts counted; no more than N - 1 can run. None: no cost is known, all drafts are verified. No requests
    have no lengths. The global search is lossless only over confidences that don't know these drafts: see `Delayed`.
    Of tensors on a GPU the lengths are one there; their values aren't checked, for which the host would have to wait.
    Raises ValueError for a rate that isn't positive and finite, fewer positions than requests, and as `survival`.
    """
    if step_rate is not None and fuse(confidence):
        from kernels.admission import fused_schedule

        return fused_schedule(confidence, step_rate, early_stop)
    survivals = survival(confidence)
    if step_rate is None:
        return np.full(len(survivals), survivals.shape[1])
    rates = theta(survivals, _checked(step_rate, len(survivals)))
    return fill(survivals, _first_drop(rates) if early_stop else int(np.argmax(rates)))


class Delayed:
    """The production form, a state that lives from step to step.

    The budget is a number of positions in the batch, so that it stays at the edge of a stair while requests come and
    go. The first steps, which have no confidence that is old enough, go by algorithm 1.
    """

    def __init__(self, step_rate: ArrayLike):
        """step_rate: as in `schedule`; raises as it does."""
        self.step_rate = _checked(step_rate, 0)
        self.positions: deque[int] = deque()  # budgets of the last steps, the oldest first

    def __call__(self, confidence: ArrayLike) -> np.ndarray:
        """The drafts of each request to verify now, int64 [R], of confidence [R, g]; raises as `schedule`."""
        survivals = survival(confidence)
        rates = theta(survivals, _checked(self.step_rate, len(survivals)))
        self.positions.append(len(survivals) + int(np.argmax(rates)))
        if len(self.positions) <= DELAY:
            return fill(survivals, _first_drop(rates))
        return fill(survivals, self.positions.popleft() - len(survivals))


def throughput(confidence: ArrayLike, lengths: ArrayLike, step_rate: ArrayLike) -> float:
    """Tokens a second, on average, with these lengths: (R + the survivals verified) * rate. Raises as `schedule`."""
    survivals, lengths = survival(confidence), np.asarray(lengths)
    verified = survivals[np.arange(survivals.shape[1]) < lengths[:, None]]
    positions = len(lengths) + len(verified)
    return float((len(lengths) + verified.sum()) * _checked(step_rate, positions)[positions])


def step_rates(positions: ArrayLike, seconds: ArrayLike, staircase: bool = False) -> np.ndarray:
    """A table for `schedule`, fp64 [N], from measured steps: seconds of rising numbers of positions, N - 1 the last.

    Between two measured sizes a step takes what lies between them; or, on a `staircase`, as long as the larger, as
    where batches are padded to the sizes that were captured. Below the first size it takes as long as that one.
    Raises ValueError for sizes that don't rise from 1 up or seconds that aren't positive and finite.
    """
    positions, seconds = np.asarray(positions), np.asarray(seconds, dtype=np.float64)
    if positions.ndim != 1 or positions.shape != seconds.shape or not len(positions):
        raise ValueError(f"positions {list(positions.shape)}, seconds {list(seconds.shape)}: expected two equal [n]")
    if positions[0] < 1 or not (np.diff(positions) > 0).all():
        raise ValueError(f"positions = {positions.tolist()}: expected numbers that rise, from 1 up")
    if not ((seconds > 0) & (seconds < np.inf)).all():
        raise ValueError(f"seconds = {seconds.tolist()}: expected positive, finite numbers")
    batch = np.arange(positions[-1] + 1)
    if staircase:
        return 1 / seconds[np.searchsorted(positions, batch)]
    return 1 / np.interp(batch, positions, seconds)


def _first_drop(rates: np.ndarray) -> int:
    """The last number of drafts before the one that doesn't raise the rate."""
    return int(np.append(rates[1:] > rates[:-1], False).argmin())


def _checked(step_rate: ArrayLike, requests: int) -> np.ndarray:
    step_rate = np.asarray(step_rate, dtype=np.float64)
    if step_rate.ndim != 1 or len(step_rate) <= requests:
        raise ValueError(
            f"step_rate {list(step_rate.shape)}: expected [N] with N > {requests}, the positions of the batch"
        )
    right = (step_rate > 0) & (step_rate < np.inf)
    if not right.all():
        wrong = int(right.argmin())
        raise ValueError(f"step_rate[{wrong}] = {step_rate[wrong]}: expected positive, finite steps a second")
    return step_rate
