"""A serving engine under load: what a policy of verifying drafts makes of throughput and of each user's speed.

    a step    R running requests, l_r drafts verified of each; B = R + sum l_r positions
    seconds   overhead + max(bytes / bandwidth, FLOPs / peak)
              bytes = dense + routed (1 - (1 - k/E)^B) + cache; FLOPs = B times those of a position
    tokens    of each request 1 + the drafts accepted before the first failure
              expected for a constant acceptance a and g drafts: 1 + a + ... + a^g = (1 - a^(g+1)) / (1 - a)

While a batch is small, more positions touch more experts; then the weights are all read and positions are free until
the arithmetic is what takes the time: from there on a draft that fails takes a place that another request could use.
Prompts are read elsewhere. Sources: Leviathan et al. 2023 (expected tokens); DSpark 5.2, 5.4.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

Policy = Callable[[np.ndarray], np.ndarray]  # confidence [R, g] -> drafts to verify, int [R]


def expected_tokens(a: float, g: int) -> float:
    """Tokens a step, the one after the drafts included, of g drafts with acceptance a each, 0 to 1."""
    return math.fsum(a**j for j in range(g + 1))


def acceptance_of(tokens: float, g: int) -> float:
    """The constant acceptance that makes so many tokens a step of g drafts: `expected_tokens` inverted.

    Raises ValueError for tokens outside 1 to g + 1.
    """
    if not 1 <= tokens <= g + 1:
        raise ValueError(f"tokens = {tokens}: expected 1 to {g + 1}, with {g} drafts")
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if expected_tokens(middle, g) < tokens else (low, middle)
    return high


@dataclass(frozen=True)
class Roofline:
    """An engine: what a step reads and computes, and how fast it can."""

    dense_bytes: float  # weights that every step reads
    routed_bytes: float  # weights of all routed experts
    routed_share: float  # of them that one position touches, k / E
    position_flops: float
    cached_token_bytes: float  # read of the cache for each token in it
    bandwidth: float  # bytes a second
    peak: float  # FLOPs a second
    overhead: float = 0.0  # seconds a step, the drafter's pass included

    def seconds(self, positions: ArrayLike, cached: float) -> ArrayLike:
        """Of steps with so many positions, an array or one, and cached tokens in all."""
        touched = 1 - (1 - self.routed_share) ** positions
        read = self.dense_bytes + self.routed_bytes * touched + self.cached_token_bytes * cached
        return self.overhead + np.maximum(read / self.bandwidth, self.position_flops * positions / self.peak)


@dataclass(frozen=True)
class Load:
    """The requests. Lengths of answers are geometric, so that how long one still goes on doesn't hang on its age."""

    slots: int  # requests that run at once, at most; others wait
    rate: float = math.inf  # arrivals a second, at random; inf: every slot is always taken
    prompt: int = 1024  # tokens in the cache at the start
    answer: int = 512  # tokens to write, on average

    def __post_init__(self):
        if self.slots < 1 or self.prompt < 0 or self.answer < 1 or not self.rate > 0:
            raise ValueError(f"{self}: expected slots and answer from 1, prompt from 0, a rate above 0")


@dataclass(frozen=True)
class Result:
    """Means over the steps that were counted."""

    throughput: float  # tokens a second, of all requests
    user_speed: float  # tokens a second, of a request while it runs
    verified: float  # positions of a request in a step, the one after its drafts included
    tokens: float  # of a request in a step
    running: float  # requests at a time


def fixed(drafts: int) -> Policy:
    """Always so many; 1 is what a model with one MTP layer does."""
    return lambda confidence: np.full(len(confidence), drafts)


def threshold(least: float) -> Policy:
    """The drafts before the first whose confidence is below `least`."""
    return lambda confidence: (confidence >= least).cumprod(axis=1).sum(axis=1)


def simulate(
    engine: Roofline,
    policy: Policy,
    acceptance: ArrayLike,
    load: Load,
    spread: float = math.inf,
    steps: int = 1000,
    warm_up: int = 100,
    seed: int = 0,
) -> Result:
    """Run an engine for some steps after `warm_up` more that don't count.

    acceptance: [kinds, g], the mean chance that draft j is accepted if those before it were, for each kind of text; a
    request is of one kind, all equally likely. spread: n of the Beta distribution with that mean (as if n earlier
    drafts had been seen) from which each draft's chance comes; inf: all have the mean. The chance itself is the
    confidence that the policy sees, as from a head that is calibrated. All randomness is the seed's.
    Raises ValueError for an acceptance outside 0 to 1, or at 0 or 1 with a finite spread, for steps below 1, a
    warm_up below 0, a spread that isn't positive, and for a policy's lengths outside 0 to g.
    """
    acceptance = np.asarray(acceptance, dtype=np.float64)
    if acceptance.ndim != 2 or not len(acceptance):
        raise ValueError(f"acceptance {list(acceptance.shape)}: expected [kinds, g]")
    varies = spread < math.inf
    inside = (acceptance > 0) & (acceptance < 1) if varies else (acceptance >= 0) & (acceptance <= 1)
    if not inside.all():
        between = "between 0 and 1" if varies else "from 0 to 1"
        raise ValueError(f"acceptance holds {acceptance[~inside][0]}: expected chances {between}")
    if not spread > 0 or steps < 1 or warm_up < 0:
        raise ValueError(f"spread = {spread}, steps = {steps}, warm_up = {warm_up}: expected above 0, from 1, from 0")
    g = acceptance.shape[1]
    arrivals, requests, drafts = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3))
    waiting = math.inf if load.rate == math.inf else 0
    kind, left, cached = (np.zeros(0, dtype=np.int64) for _ in range(3))  # of the running requests
    totals = np.zeros(5)
    for step in range(-warm_up, steps):
        if step == 0:
            totals[:] = 0
        idle = 0.0
        if not len(left) and not waiting:
            idle, waiting = arrivals.exponential(1 / load.rate), 1
        new = int(min(load.slots - len(left), waiting))
        waiting -= new
        kind = np.append(kind, requests.integers(len(acceptance), size=new))
        left = np.append(left, requests.geometric(1 / load.answer, size=new))
        cached = np.append(cached, np.full(new, load.prompt))
        chance = acceptance[kind]
        if varies:
            chance = drafts.beta(spread * chance, spread * (1 - chance))
        lengths = np.asarray(policy(chance))
        if lengths.shape != left.shape or not ((lengths >= 0) & (lengths <= g)).all():
            raise ValueError(f"the policy's lengths {lengths.tolist()}: expected {len(left)} numbers from 0 to {g}")
        stands = (drafts.random(chance.shape) < chance) & (np.arange(g) < lengths[:, None])
        written = np.minimum(1 + stands.cumprod(axis=1).sum(axis=1), left)
        positions = len(left) + int(lengths.sum())
        seconds = float(engine.seconds(positions, int(cached.sum())))
        if load.rate < math.inf:
            waiting += arrivals.poisson(load.rate * seconds)
        totals += idle + seconds, written.sum(), positions, len(left), len(left) * seconds
        left, cached = left - written, cached + written
        kind, left, cached = (x[left > 0] for x in (kind, left, cached))
    elapsed, tokens, verified, request_steps, request_seconds = totals.tolist()
    return Result(
        throughput=tokens / elapsed,
        user_speed=tokens / request_seconds,
        verified=verified / request_steps,
        tokens=tokens / request_steps,
        running=request_seconds / elapsed,
    )
