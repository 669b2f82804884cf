"""The scheduler beside a walk over sorted slots, block verification beside the whole batch at once."""

from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from dsv41_edu.benchmarks.harness import Case
from dsv41_edu.dspark.scheduler import FLOOR, schedule
from dsv41_edu.dspark.verification import Verified, block_verify

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
    accepted = ((draws[:, :-1] < a) * torch.arange(1, g + 1)).amax(1)
    weights = torch.cat([left, p[:, -1:]], 1)[torch.arange(B), accepted]
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
