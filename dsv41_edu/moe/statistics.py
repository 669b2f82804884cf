"""How many experts a batch touches, and what reading their weights costs.

A token picks k of E experts. If every choice is equally likely, an expert escapes B independent tokens with
probability (1 - k/E)^B, so a batch touches, on average and exactly,

    E (1 - (1 - k/E)^B)

Skewed routing: expert of rank r = 1..E has popularity p_r ~ 1 / r^s, and a token draws k different experts one after
the other, each time by popularity among those left. The same law is a race: expert e arrives after an exponential
time of rate p_e, the first k are chosen. Stop the race at a fixed time c instead, where k arrivals are expected, and
inclusion has a closed form, pi_e = 1 - exp(-c p_e); then sum_e 1 - (1 - pi_e)^B. Fixing the time in place of the
number is the one approximation; it vanishes at s = 0, and `experts_touched_zipf_simulated` runs the race itself.

Weight traffic of a decode step is the touched experts' bytes: it grows with the batch until all are touched, and
then a larger batch is free of it.

Sources: the article's table of batches; Rosen 1972 (successive sampling, the fixed time).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np


def experts_touched(n_experts: int, active: int, batch: int) -> float:
    """Mean number of different experts that `batch` tokens touch, each with `active` of `n_experts` at random.

    Exact. Raises ValueError for active outside 1 to n_experts or a negative batch.
    """
    _check(n_experts, active, [batch])
    return n_experts * (1 - (1 - active / n_experts) ** batch)


def experts_touched_simulated(
    n_experts: int, active: int, batches: Sequence[int], draws: int = 200, seed: int = 0
) -> list[float]:
    """The same by simulation, mean of `draws` batches of each size.

    One `default_rng(seed)` serves all sizes in their order, and each token is one `choice(..., replace=False)`: with
    E = 384, k = 6 and sizes 1, 8, 64, 256, 1024 this gives the article's 6.0, 45.7, 243.8, 377.1, 384.0. Raises as
    `experts_touched`, and for draws below 1.
    """
    _check(n_experts, active, batches, draws)
    rng = np.random.default_rng(seed)

    def touched(batch: int) -> int:
        hit = np.zeros(n_experts, dtype=bool)
        for _ in range(batch):
            hit[rng.choice(n_experts, size=active, replace=False)] = True
        return int(hit.sum())

    return [sum(touched(batch) for _ in range(draws)) / draws for batch in batches]


def popularity(n_experts: int, exponent: float) -> np.ndarray:
    """Zipf's law, fp64 [E]: p of rank r proportional to 1 / r^exponent, sum 1; uniform for exponent 0.

    Raises ValueError for an exponent below 0 or above 32: such experts would never be met.
    """
    if not 0 <= exponent <= 32:
        raise ValueError(f"exponent = {exponent}: expected 0 to 32")
    p = np.arange(1, n_experts + 1) ** -float(exponent)
    return p / p.sum()


def inclusion(n_experts: int, active: int, exponent: float) -> np.ndarray:
    """pi, fp64 [E]: how likely a token is to pick each expert, by falling popularity; the sum is `active`.

    Approximate, see the module. c solves sum_e 1 - exp(-c p_e) = k by Newton's method: the sum is concave in c and
    below k at c = k, so the steps rise to the root and never pass it. Raises as `experts_touched_zipf`.
    """
    _check(n_experts, active, [])
    p = popularity(n_experts, exponent)
    if active == n_experts:  # everyone arrives, at c = infinity
        return np.ones(n_experts)
    c, step = float(active), math.inf
    while step > 1e-12 * c:
        step = (active + np.expm1(-c * p).sum()) / (p * np.exp(-c * p)).sum()
        c += step
    return -np.expm1(-c * p)


def experts_touched_zipf(n_experts: int, active: int, batch: int, exponent: float) -> float:
    """Mean number of different experts touched under a skew of p_r ~ 1 / r^exponent: approximate, exact at 0.

    At 384 experts, 6 active, it is above the simulation by at most 0.5% for exponents up to 1, 1.3% for 2.
    Raises as `popularity` and `experts_touched`.
    """
    _check(n_experts, active, [batch])
    return float((1 - (1 - inclusion(n_experts, active, exponent)) ** batch).sum())


def experts_touched_zipf_simulated(
    n_experts: int, active: int, batches: Sequence[int], exponent: float, draws: int = 200, seed: int = 0
) -> list[float]:
    """The same by simulation, without the approximation: mean of `draws` batches of each size, one generator."""
    _check(n_experts, active, batches, draws)
    rng, p = np.random.default_rng(seed), popularity(n_experts, exponent)

    def touched(batch: int) -> int:
        arrival = rng.exponential(size=(batch, n_experts)) / p
        return len(np.unique(np.argpartition(arrival, active - 1, axis=1)[:, :active]))

    return [sum(touched(batch) for _ in range(draws)) / draws for batch in batches]


def weight_bytes_per_step(expert_bytes: float, touched: float, shared_bytes: float = 0) -> float:
    """Bytes of expert weights that one layer's decode step reads: the touched routed experts and the shared one."""
    return expert_bytes * touched + shared_bytes


def memory_bound_batch(
    n_experts: int, active: int, expert_params: int, expert_bytes: int, flops_per_s: float, bytes_per_s: float
) -> int:
    """The least batch at which the routed experts' arithmetic takes as long as reading their weights.

    2 * expert_params * active * B FLOPs at `flops_per_s` against expert_bytes * experts_touched(B) at `bytes_per_s`,
    under uniform routing. Below it a step's time is set by the weights alone. Time for FLOPs over time for bytes
    rises with B, so bisection finds the batch; it is at most the one at which reading all E experts takes as long.
    Raises ValueError for a size or rate that isn't positive and finite, and as `experts_touched`.
    """
    _check(n_experts, active, [])
    if not all(0 < x < math.inf for x in (expert_params, expert_bytes, flops_per_s, bytes_per_s)):
        raise ValueError("expert_params, expert_bytes, flops_per_s, bytes_per_s: expected positive finite numbers")
    seconds_per_token = 2 * expert_params * active / flops_per_s
    seconds_per_expert = expert_bytes / bytes_per_s
    most = math.ceil(n_experts * seconds_per_expert / seconds_per_token)

    def computes_longer(batch: int) -> bool:
        return seconds_per_token * batch >= seconds_per_expert * experts_touched(n_experts, active, batch)

    return 1 + bisect_left(range(1, most), True, key=computes_longer)


def _check(n_experts: int, active: int, batches: Sequence[int], draws: int = 1) -> None:
    if not 1 <= active <= n_experts:
        raise ValueError(f"active = {active}: expected 1 to {n_experts}, the experts there are")
    if any(batch < 0 for batch in batches):
        raise ValueError(f"batches {list(batches)}: expected 0 tokens or more")
    if draws < 1:
        raise ValueError(f"draws = {draws}: expected at least 1")
