"""What the drafter learns: the token, the target's whole law, and how often it will be right.

    w_k = exp(-(k - 1) / decay)            draft k only matters where those before it stand
    L1 = sum_v |p_v - q_v|                 q: the draft's law, p: the target's
    acceptance = 1 - L1 / 2 = sum_v min(p_v, q_v)
                                           the exact chance that a draft from q stands against p
    loss = 0.1 * -log q(token) + 0.9 * L1 + BCE(confidence, acceptance)
                                           each a mean weighted by w over all drafts of the batch

p and the acceptance that confidence is to learn are constants: the backbone is frozen, and the drafter must not be
pulled towards laws that are easy to foresee. Source: DSpark 3.4, eq 7-10.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CROSS_ENTROPY, L1, CONFIDENCE = 0.1, 0.9, 1.0


class Loss(NamedTuple):
    """Scalars: the loss, and the three means that it weighs."""

    total: Tensor
    cross_entropy: Tensor
    l1: Tensor
    confidence: Tensor


def distance(p: Tensor, q: Tensor) -> Tensor:
    """L1 distance of laws [..., V]: [...], 0 to 2."""
    return (p - q).abs().sum(-1)


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Chance that a draft from q stands against p, [...] of laws [..., V]: what they have in common."""
    return torch.minimum(p, q).sum(-1)


def dspark_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    tokens: Tensor,
    confidence_logits: Tensor,
    mask: Tensor,
    decay: float | None = None,
) -> Loss:
    """Loss of blocks of g drafts, in at least fp32.

    draft_logits, target_logits: [..., g, V], of draft k and of the target after the same tokens; tokens: int
    [..., g], what followed in the text; confidence_logits: [..., g]; mask: bool or 0 and 1 [..., g], the drafts that
    count; the tokens of others may be any number. decay: g in the paper and here, 4 with g = 7 in its repository.
    Where nothing counts the loss is 0. Raises ValueError for shapes, ids out of range, a decay that isn't positive.
    """
    shape = draft_logits.shape[:-1]
    if target_logits.shape != draft_logits.shape or {tokens.shape, confidence_logits.shape, mask.shape} != {shape}:
        raise ValueError(
            f"draft_logits {list(draft_logits.shape)}, target_logits {list(target_logits.shape)}, tokens "
            f"{list(tokens.shape)}, confidence_logits {list(confidence_logits.shape)}, mask {list(mask.shape)}: "
            "expected [..., g, V] twice and [..., g] three times"
        )
    g = shape[-1]
    decay = g if decay is None else decay
    if not decay > 0:
        raise ValueError(f"decay = {decay}: expected a positive number of drafts")
    tokens = tokens.long().where(mask.bool(), 0)
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < draft_logits.shape[-1]:
        raise ValueError(
            f"tokens from {tokens.min()} to {tokens.max()}: expected ids from 0 to {draft_logits.shape[-1] - 1}"
        )
    draft, target, confidence = (
        x.to(torch.promote_types(x.dtype, torch.float32))
        for x in (draft_logits, target_logits.detach(), confidence_logits)
    )
    w = mask * torch.exp(-torch.arange(g, dtype=draft.dtype, device=draft.device) / decay)

    def mean(terms: Tensor) -> Tensor:
        return (w * terms).sum() / w.sum().clamp(min=torch.finfo(w.dtype).tiny)

    apart = distance(target.softmax(-1), draft.softmax(-1))
    goal = (1 - apart / 2).detach().clamp(min=0)
    cross_entropy = mean(F.cross_entropy(draft.flatten(0, -2), tokens.flatten(), reduction="none").view(shape))
    l1 = mean(apart)
    bce = mean(F.binary_cross_entropy_with_logits(confidence, goal.to(confidence.dtype), reduction="none"))
    return Loss(CROSS_ENTROPY * cross_entropy + L1 * l1 + CONFIDENCE * bce, cross_entropy, l1, bce)
