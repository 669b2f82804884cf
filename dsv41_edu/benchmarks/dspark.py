"""The scheduler beside a walk over sorted slots, block verification beside the whole batch at once; the kernels."""

from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from dsv41_edu.benchmarks.gpu import GpuCase, Running, contestants, rms
from dsv41_edu.benchmarks.harness import Case
from dsv41_edu.dspark.heads import MarkovHead
from dsv41_edu.dspark.scheduler import FLOOR, schedule
from dsv41_edu.dspark.verification import Verified, block_verify, sample

REQUESTS, DRAFTS = 4096, 5
ROWS, VOCABULARY = 256, 129_280


def walk(confidence: list[list[float]], step_rate: list[float]) -> list[int]:
    """Lengths by algorithm 1, as the paper prints it: a list of all slots, sorted, then one after the other."""
    R, slots = len(confidence), []
    for r, row in enumerate(confidence):
        survival = 1.0
        for j, c in enumerate(row):
            survival *= c
            slots.append((-survival, j, r))
    lengths, B, tau = [0] * R, R, float(R)
    best = tau * step_rate[B]
    for survival, j, r in sorted(slots):
        theta = (tau - survival) * step_rate[B + 1]
        if theta <= best or -survival < FLOOR:
            break
        B, tau, best, lengths[r] = B + 1, tau - survival, theta, j + 1
    return lengths


def at_once(p: Tensor, q: Tensor, drafts: Tensor, draws: Tensor) -> Verified:
    """Block verification as an engine writes it for a GPU: each step over the whole batch, in the laws' dtype."""
    B, g, _ = q.shape
    y = drafts.unsqueeze(-1)
    ratio = (p[:, :-1].gather(-1, y) / q.gather(-1, y)).squeeze(-1)
    w = [torch.ones_like(ratio[:, 0])]
    for i in range(g):
        w.append((w[-1] * ratio[:, i]).clamp(max=1))
    w = torch.stack(w, 1)
    left = (w[:, :-1, None] * p[:, :-1] - q).clamp_(min=0)
    total = left.sum(-1)
    a = torch.cat([total[:, 1:] / (total[:, 1:] + 1 - w[:, 1:-1]), w[:, -1:]], 1).nan_to_num(1.0)
    accepted = ((draws[:, :-1] < a) * torch.arange(1, g + 1, device=p.device)).amax(1)
    weights = torch.cat([left, p[:, -1:]], 1)[torch.arange(B, device=p.device), accepted]
    sums = weights.cumsum(-1)
    following = torch.searchsorted(sums, draws[:, -1:] * sums[:, -1:], right=True).squeeze(-1)
    return Verified(accepted, following)


@cache
def laws() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p, q near it, drafts and draws of ROWS blocks, fp32: 1.5 GB, made when first needed."""
    g = torch.Generator().manual_seed(0)
    p = torch.randn(ROWS, DRAFTS + 1, VOCABULARY, generator=g)
    q = torch.empty(ROWS, DRAFTS, VOCABULARY)
    for row in range(ROWS):
        q[row] = (p[row, :-1] + 0.3 * torch.randn(DRAFTS, VOCABULARY, generator=g)).softmax(-1)
        p[row] = p[row].softmax(-1)
    drafts = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(ROWS, DRAFTS)
    return p, q, drafts, torch.rand(ROWS, DRAFTS + 1, generator=g)


def cases() -> list[Case]:
    """Lengths for many requests; which drafts stand of a large batch at the real vocabulary."""
    confidence = np.random.default_rng(0).beta(4, 1, (REQUESTS, DRAFTS))
    step_rate = 1 / (1 + np.arange(REQUESTS * (DRAFTS + 1) + 1) / (4 * REQUESTS))

    def ours():
        p, q, drafts, draws = laws()
        return block_verify(p, q, drafts, None, draws)

    schedulers = {
        "ours": partial(schedule, confidence, step_rate),
        "global search": partial(schedule, confidence, step_rate, early_stop=False),
        "plain walk": partial(walk, confidence.tolist(), step_rate.tolist()),
    }
    verifiers = {"ours, fp64": ours, "whole batch at once": lambda: at_once(*laws())}
    return [
        Case("dspark.schedule", f"{REQUESTS} requests, {DRAFTS} drafts each", schedulers),
        Case("dspark.verify", f"{ROWS} blocks of {DRAFTS} drafts, V={VOCABULARY}, fp32 CPU", verifiers),
    ]


# ---- on a GPU


def gpu_cases(dry: bool) -> list[GpuCase]:
    """A step of the Markov head, greedy and drawn; block verification; the scheduler."""
    V, rank = (300, 24) if dry else (VOCABULARY, 256)
    cases = []
    for B in (3,) if dry else (1, 256):
        for name, temperature in (("likeliest", 0.0), ("drawn", 0.7)):
            work = f"base fp32 [{B}, {V}], E and H bf16 [{V}, {rank}], temperature {temperature}"
            cases.append(GpuCase(f"markov.{name}.{B}", work, partial(_markov, B, V, rank, temperature)))
    for B in (3,) if dry else (16, ROWS):
        work = f"p fp32 [{B}, {DRAFTS + 1}, {V}], q fp32 [{B}, {DRAFTS}, {V}]"
        cases.append(GpuCase(f"verify.block.{B}", work, partial(_verify, B, V)))
    for R in (3,) if dry else (256, REQUESTS):
        work = f"confidence fp64 [{R}, {DRAFTS}], step_rate fp64 [{R * (DRAFTS + 1) + 1}]"
        cases.append(GpuCase(f"schedule.{R}", work, partial(_schedule, R)))
    return cases


def _markov(B: int, V: int, rank: int, temperature: float, device: torch.device) -> Running:
    from kernels.markov import fused_markov

    g = torch.Generator(device).manual_seed(0)
    with torch.device(device):
        head = MarkovHead(V, rank).bfloat16().requires_grad_(False)
        for weight in head.parameters():
            weight.normal_(std=rank**-0.25, generator=g)
        base, tokens = torch.randn(B, V, generator=g), torch.randint(0, V, (B,), generator=g)
        u = torch.rand(B, dtype=torch.float64, generator=g) if temperature else None

    def eager(base, tokens, u):
        logits = base + head(tokens)
        if u is None:
            return logits.argmax(-1), None
        return sample((logits.double() / temperature).softmax(-1), u), logits

    weights = head.embed.weight, head.head.weight
    ours = partial(fused_markov, base, tokens, *weights, temperature, u)

    def error():
        ids, logits = ours()
        exact = base.double() + weights[0][tokens].double() @ weights[1].double().T
        if u is None:
            return {"ids_equal": (ids == exact.argmax(-1)).double().mean().item()}
        wanted = sample((exact / temperature).softmax(-1), u)
        return {"ids_equal": (ids == wanted).double().mean().item(), "rms": rms(logits, exact)}

    moved = 2 * V * rank + 2 * B * rank + 4 * B * V * (1 if u is None else 2) + 16 * B
    return Running(contestants(ours, eager, (base, tokens, u), device), error, moved, 2 * B * V * rank)


def _verify(B: int, V: int, device: torch.device) -> Running:
    from kernels.verify import fused_verify

    g = torch.Generator(device).manual_seed(0)
    with torch.device(device):
        logits = torch.randn(B, DRAFTS + 1, V, generator=g)
        q = (logits[:, :-1] + 0.3 * torch.randn(B, DRAFTS, V, generator=g)).softmax(-1)
        p = logits.softmax(-1)
        drafts = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(B, DRAFTS)
        lengths, u = torch.full((B,), DRAFTS), torch.rand(B, DRAFTS + 1, dtype=torch.float64, generator=g)
    ours = partial(fused_verify, p, q, drafts, lengths, u, by_block=True)
    sides = contestants(ours, at_once, (p, q, drafts, u), device)

    def error():
        some = slice(0, None, max(1, B // 16))
        exact = at_once(*(x / x.sum(-1, True) for x in (p[some].double(), q[some].double())), drafts[some], u[some])
        pairs = zip(("accepted_equal", "next_equal"), ours(), exact, strict=False)
        return {name: (found[some] == wanted).double().mean().item() for name, found, wanted in pairs}

    moved = 4 * (p.numel() + q.numel()) + 8 * (drafts.numel() + u.numel() + 3 * B)
    return Running(sides, error, moved, 5 * q.numel())


def by_sorting(confidence: Tensor, step_rate: Tensor) -> Tensor:
    """Lengths by algorithm 1 in torch alone, on any device, which is never waited for."""
    R, g = confidence.shape
    slots = confidence.cumprod(1).T.flatten()  # in the order of equals
    falling, order = slots.sort(descending=True, stable=True)
    theta = (falling.cumsum(0) + R) * step_rate[R + 1 : R + 1 + R * g]
    theta = torch.cat([R * step_rate[R : R + 1], theta.where(falling >= FLOOR, float("-inf"))])
    budget = (theta[1:] > theta[:-1]).long().cumprod(0).sum()
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(R * g, device=order.device))
    return (ranks < budget).view(g, R).sum(0)


def _schedule(R: int, device: torch.device) -> Running:
    from kernels.admission import fused_schedule

    confidence = np.random.default_rng(0).beta(4, 1, (R, DRAFTS))
    step_rate = 1 / (1 + np.arange(R * (DRAFTS + 1) + 1) / (4 * R))
    given = tuple(torch.from_numpy(x).to(device) for x in (confidence, step_rate))
    ours = partial(fused_schedule, *given)

    def error():
        return {"equal": float((ours().cpu().numpy() == schedule(confidence, step_rate)).mean())}

    moved = 8 * (confidence.size + step_rate.size + R)
    return Running(contestants(ours, by_sorting, given, device), error, moved, 3 * confidence.size)
