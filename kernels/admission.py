"""How many drafts of each request to verify, for a whole batch on the GPU, with no answer from the host.

    survival   a_r,j = c_r,1 ... c_r,j                          fp64, in the order of j: the reference's bits
    rank       of a slot (r, j), the slots before it: of larger a, or as large and of smaller j, or of smaller r too
    rate       theta(b) = (R + the b largest a) * step_rate(R + b),  b up to the last a >= 1e-6 and the table's end
    length     of a request, its slots of rank below b*;  b* the first b that theta doesn't grow after, or its maximum

Triton has no sort of many numbers, and a batch needs no general one: as each slot knows which come before it, its
place is a count. So each of N = R g slots is compared with all, in tiles of 64 by 64: N^2 comparisons in registers,
4e8 for 4096 requests of 5 drafts, and no exchange between programs. Ranks are a permutation, so each survival is
written to a place of its own, and there are no atomics. Slots below the floor rank last. Along a request survivals
never rise and equal ones keep the order of j, so what has rank below b* is a prefix.

One program adds the ranked survivals up, 1024 at a time: its sums have another order than the reference's running
ones. So theta differs by 1e-15 of itself, which shows only where two rates are that close. Read and written: N of c,
of a and of its ranked copy, N (N / 64 + 1) of a again, N ranks, N + 1 rates; each program of the last kernel reads
all rates. Sources: as `dsv41_edu.dspark.scheduler`, the reference.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.launch import tl, triton

FLOOR = tl.constexpr(1e-6)
BLOCK, WIDE = 64, 1024


@triton.jit
def survivals(confidence, slots, R, G, BLOCK: tl.constexpr):
    """slots: fp64 [G, R], of confidence [R, G]."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.full((BLOCK,), 1.0, tl.float64)
    for j in range(G):
        c = tl.load(confidence + r * G + j, mask=r < R, other=0.0).to(tl.float64)
        a *= tl.where((c >= 0) & (c <= 1), c, 0.0)
        tl.store(slots + j * R + r, a, mask=r < R)


@triton.jit
def rank(slots, ranks, falling, N, BLOCK: tl.constexpr):
    """ranks: int32 [N]; falling: fp64 [N], the slots by rank."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(slots + mine, mask=mine < N, other=0.0)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        other = start + tl.arange(0, BLOCK)
        b = tl.load(slots + other, mask=other < N, other=-1.0)
        first = (b[None, :] > a[:, None]) | ((b[None, :] == a[:, None]) & (other[None, :] < mine[:, None]))
        before += tl.sum(first.to(tl.int32), 1)
    tl.store(ranks + mine, before, mask=mine < N)
    tl.store(falling + before, a, mask=mine < N)


@triton.jit
def rates(falling, step_rate, theta, R, N, POSITIONS, WIDE: tl.constexpr):
    """theta: fp64 [N + 1], -inf for drafts that aren't worth it or have no room."""
    tokens, floor = tl.cast(R, tl.float64), tl.full((), FLOOR, tl.float64)  # compared as a number it would be fp32
    tl.store(theta, tokens * tl.load(step_rate + R))
    for start in range(0, N, WIDE):
        k = start + tl.arange(0, WIDE)
        a = tl.load(falling + k, mask=k < N, other=0.0)
        rate = tl.load(step_rate + R + 1 + k, mask=(a >= floor) & (R + 1 + k < POSITIONS), other=float("-inf"))
        tl.store(theta + 1 + k, (tokens + tl.cumsum(a)) * rate, mask=k < N)
        tokens += tl.sum(a)


@triton.jit
def lengths(theta, ranks, out, R, G, EARLY_STOP: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """out: int64 [R]."""
    N = R * G
    budget, best = N, tl.full((), float("-inf"), tl.float64)
    for start in range(0, N + 1, WIDE):
        b = start + tl.arange(0, WIDE)
        now = tl.load(theta + b, mask=b <= N, other=float("-inf"))
        if EARLY_STOP:
            then = tl.load(theta + b + 1, mask=b < N, other=float("-inf"))
            budget = tl.minimum(budget, tl.min(tl.where(then > now, N, b)))
        else:
            largest = tl.max(now)
            budget = tl.where(largest > best, tl.min(tl.where(now == largest, b, N)), budget)
            best = tl.maximum(best, largest)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int64)
    for j in range(G):
        count += (tl.load(ranks + j * R + r, mask=r < R, other=N) < budget).to(tl.int64)
    tl.store(out + r, count, mask=r < R)


def fused_schedule(confidence: Tensor, step_rate: Tensor, early_stop: bool = True) -> Tensor:
    """The drafts of each request to verify, int64 [R], as `schedule` of the reference, on the tensors' device.

    confidence: fp32 or fp64 [R, g], chances; step_rate: fp64 [N], positive, N - 1 positions the most that can run.
    Both contiguous. Values aren't checked, which would make a GPU wait: a confidence that is no chance counts as 0.
    Raises ValueError for shapes, strides, devices, fewer positions than requests; TypeError for dtypes.
    """
    if confidence.dim() != 2 or not confidence.is_contiguous():
        raise ValueError(f"confidence of shape {list(confidence.shape)}: expected [R, g], contiguous")
    R, g = confidence.shape
    if step_rate.dim() != 1 or len(step_rate) <= R or not step_rate.is_contiguous():
        raise ValueError(f"step_rate of shape {list(step_rate.shape)}: expected [N] with N > {R}, contiguous")
    if confidence.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"confidence is {confidence.dtype}: expected torch.float32 or torch.float64")
    if step_rate.dtype != torch.float64:
        raise TypeError(f"step_rate is {step_rate.dtype}: expected torch.float64")
    if step_rate.device != confidence.device:
        raise ValueError(f"step_rate is on {step_rate.device}: expected {confidence.device}, where confidence is")

    def empty(dtype: torch.dtype, size: int) -> Tensor:
        return torch.empty((size,), dtype=dtype, device=confidence.device)

    out, N = empty(torch.int64, R), R * g
    if R == 0:
        return out
    slots, falling, theta = (empty(torch.float64, size) for size in (N, N, N + 1))
    ranks, of_requests = empty(torch.int32, N), (triton.cdiv(R, BLOCK),)
    if N:
        survivals[of_requests](confidence, slots, R, g, BLOCK=BLOCK)
        rank[(triton.cdiv(N, BLOCK),)](slots, ranks, falling, N, BLOCK=BLOCK)
    rates[(1,)](falling, step_rate, theta, R, N, len(step_rate), WIDE=WIDE)
    lengths[of_requests](theta, ranks, out, R, g, EARLY_STOP=early_stop, BLOCK=BLOCK, WIDE=WIDE)
    return out


def _builds() -> list[Build]:
    """Confidences as the head gives them, fp32; 5 drafts of any number of requests."""
    types = {"confidence": "*fp32", "ranks": "*i32", "out": "*i64"}
    types |= dict.fromkeys(("slots", "falling", "theta", "step_rate"), "*fp64")
    types |= dict.fromkeys(("R", "G", "N", "POSITIONS"), "i32")
    blocks = {"BLOCK": BLOCK, "WIDE": WIDE}
    builds = []
    for name, kernel, options in (
        ("survivals", survivals, {}),
        ("rank", rank, {}),
        ("rates", rates, {}),
        ("lengths_early_stop", lengths, {"EARLY_STOP": True}),
        ("lengths_global", lengths, {"EARLY_STOP": False}),
    ):
        signature = {n: types[n] for n in kernel.arg_names if n in types}
        constants = options | {n: blocks[n] for n in kernel.arg_names if n in blocks}
        builds.append(Build(name, kernel, signature, constants))
    return builds


BUILDS = _builds()
