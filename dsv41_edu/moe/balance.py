"""Keeping the experts equally busy: a bias that follows the load, and the losses that came before it.

    f_e = E / (k T) * #{tokens that chose e}          1 for every e under equal load; no gradient
    P_e = mean over tokens of e's affinity            the gradient's only way in
    loss = alpha * sum_e f_e P_e                      sequence-wise (V3), per expert, device, link (V1, V2)

    b_e <- b_e + speed * sign(mean(c) - c_e)          loss-free: c counts a finished step's choices

The bias needs no gradient and bends no weight, so it replaced all the losses but the sequence-wise one. Order
within a step: route with the old bias, train, update. The update sees only finished steps: with the counts of the
sequence in hand, the choice of a token would depend on later tokens. Throughout, id -1 in `indices` is padding:
no expert is charged, but the token still counts in T. A token chooses an expert at most once.

Sources: DeepSeekMoE (V1) eq 12-17; V2 2.2.3, eq 23-31; V3 2.1.2; Wang et al. 2024 (loss-free, MaxVio).
"""

import math

import torch
from torch import Tensor

SPEED = 0.001  # of the bias, a step
STARVED = 0.1  # of the mean load


def expert_counts(indices: Tensor, n_experts: int) -> Tensor:
    """How often each expert was chosen: int64 [E] for indices, int64 or int32 [..., k], -1 = none.

    For counts per modality, count each modality's rows apart and stack. Raises ValueError for an id outside
    -1 to E - 1, TypeError for a dtype.
    """
    _check_indices(indices, n_experts)
    return torch.bincount(indices[indices >= 0].long(), minlength=n_experts)


def update_bias(bias: Tensor, counts: Tensor, speed: float = SPEED) -> Tensor:
    """The bias after a step, same shape and dtype, outside the graph: up where underloaded, down where overloaded.

    bias: fp32 or fp64 [..., E]; counts: int or float, same shape, summed over all ranks. Each row moves by its own
    counts: V4.1 stacks text and image in [2, E]. A count equal to the mean (exactly, for whole numbers) leaves its
    bias as it is, so zero tokens change nothing. speed: 0.001 in V3 (0 at the end), V4 and V4.1.
    Raises ValueError for shapes, counts or speed that are negative or not finite, TypeError for dtypes: in bf16 a
    step of 0.001 vanishes from 0.5 on. Sources: Wang et al. 2024, algorithm 1; V3 4.2; V4.1 2.1.1.
    """
    _check_real("bias", bias)
    counts = _wide_counts(counts)
    if bias.shape != counts.shape:
        raise ValueError(f"bias {list(bias.shape)}, counts {list(counts.shape)}: expected equal shapes [..., E]")
    if not 0 <= speed < math.inf:
        raise ValueError(f"speed = {speed}: expected a finite number from 0 up")
    behind = counts.sum(-1, keepdim=True) - counts.shape[-1] * counts  # E (mean - c), without a division
    return bias.detach() + speed * behind.sign().to(bias.dtype)


def load_fractions(indices: Tensor, n_experts: int) -> Tensor:
    """f, fp64 [..., E]: each expert's load over the mean load, for each sequence of indices [..., T, k].

    Zeros for no tokens. Raises as `expert_counts`.
    """
    _check_indices(indices, n_experts)
    if indices.ndim < 2 or not indices.shape[-1]:
        raise ValueError(f"indices {list(indices.shape)}: expected [..., T, k], k >= 1")
    *batch, tokens, k = indices.shape
    rows = indices.long().reshape(*batch, tokens * k)
    counts = torch.zeros(*batch, n_experts + 1, dtype=torch.float64, device=indices.device)
    rows = rows.where(rows >= 0, n_experts)  # a bin for the padding, dropped again
    counts = counts.scatter_add(-1, rows, torch.ones_like(rows, dtype=torch.float64))[..., :-1]
    return counts * (n_experts / max(1, tokens * k))


def sequence_loss(affinity: Tensor, indices: Tensor, alpha: float) -> Tensor:
    """alpha * sum_e f_e P_e of each sequence, averaged over the sequences: a scalar in affinity's dtype.

    affinity: fp32 or fp64 [..., T, E], positive; each token's are normalised to sum 1 before P is taken. indices:
    int [..., T, k]. alpha: 1e-4 in V3, V4 and V4.1. Loss 0 for no tokens. Equal load costs alpha, whatever P is.
    Raises ValueError for shapes, ids out of range or a token whose affinities don't have a positive, finite sum,
    TypeError for dtypes. Source: V3 2.1.2.
    """
    _check_pair(affinity, indices)
    total = affinity.sum(-1, keepdim=True)
    if not ((total > 0) & (total < math.inf)).all():
        raise ValueError("affinity: expected a positive, finite sum for each token, to normalise by")
    return _weighted(load_fractions(indices, affinity.shape[-1]), _mean_tokens(affinity / total), alpha)


def expert_loss(affinity: Tensor, indices: Tensor, alpha: float) -> Tensor:
    """alpha * sum_e f_e P_e over all the batch's tokens, affinities as they are (they come from a softmax).

    affinity [..., E], indices [..., k], dtypes, errors and no tokens as in `sequence_loss`. alpha: 0.001 in
    DeepSeekMoE-16B, 0.003 in V2. Sources: DeepSeekMoE eq 12-14, V2 eq 23-25.
    """
    f, p = _batch_terms(affinity, indices)
    return _weighted(f, p, alpha)


def device_loss(affinity: Tensor, indices: Tensor, n_devices: int, alpha: float) -> Tensor:
    """alpha * sum_i f'_i P'_i over devices i: f' is the mean of f over a device's experts, P' the sum of P.

    Expert e lives on device e // (E / n_devices): the balance asked for is that of devices, not of experts.
    As `expert_loss` otherwise; ValueError too where the devices don't divide the experts. alpha: 0.05 in V2.
    Sources: DeepSeekMoE eq 15-17, V2 eq 26-28.
    """
    f, p = _batch_terms(affinity, indices)
    per_device = (n_devices, _per_device(len(f), n_devices))
    return _weighted(f.view(per_device).mean(-1), p.view(per_device).sum(-1), alpha)


def communication_loss(affinity: Tensor, indices: Tensor, n_devices: int, most: int, alpha: float) -> Tensor:
    """alpha * sum_i f''_i P''_i: f''_i = D / (M T) * #{tokens sent to device i}, P'' the sum of P.

    A token goes once to each device that holds one of its experts, at most to M = `most` of the D (3 of 8 in V2).
    As `device_loss` otherwise; ValueError too for M outside 1 to D. alpha: 0.02 in V2. Source: V2 eq 29-31.
    """
    f, p = _batch_terms(affinity, indices)
    size = _per_device(len(f), n_devices)
    if not 1 <= most <= n_devices:
        raise ValueError(f"most = {most}: expected 1 to {n_devices}, the devices")
    rows = indices.long().flatten(0, -2)
    home = torch.where(rows >= 0, rows // size, n_devices)  # a column for the padding, dropped again
    sent = torch.zeros(len(rows), n_devices + 1, dtype=torch.float64, device=p.device).scatter(1, home, 1.0)[:, :-1]
    received = sent.sum(0) * (n_devices / (most * max(1, len(rows))))
    return _weighted(received, p.view(n_devices, size).sum(-1), alpha)


def max_violation(counts: Tensor) -> Tensor:
    """(max - mean) / mean of the load, fp64 [...] for counts [..., E]; 0 for no tokens. Source: Wang et al. 2024.

    0 is balance; E / k - 1 is collapse, all tokens with the same k experts. Raises ValueError for counts that are
    negative or not finite, TypeError for their dtype; so do the two below.
    """
    return _relative(counts).amax(-1)


def variation(counts: Tensor) -> Tensor:
    """Coefficient of variation of the load, fp64 [...]: standard deviation (over E) / mean; 0 for no tokens."""
    return _relative(counts).square().mean(-1).sqrt()


def starved_share(counts: Tensor) -> Tensor:
    """Share of experts, fp64 [...], whose load is below a tenth of the mean; 0 for no tokens."""
    return (_relative(counts) < STARVED - 1).double().mean(-1)


def _relative(counts: Tensor) -> Tensor:
    """Load over mean load, less 1; zeros for no tokens."""
    counts = _wide_counts(counts).double()
    mean = counts.mean(-1, keepdim=True)
    return torch.where(mean > 0, (counts - mean) / mean, 0.0)


def _weighted(f: Tensor, p: Tensor, alpha: float) -> Tensor:
    loss = (f.to(p.dtype) * p).sum(-1)
    return alpha * loss.sum() / max(1, loss.numel())


def _batch_terms(affinity: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """f and P, both [E], over all the tokens."""
    _check_pair(affinity, indices)
    return load_fractions(indices.flatten(0, -2), affinity.shape[-1]), _mean_tokens(affinity.flatten(0, -2))


def _mean_tokens(affinity: Tensor) -> Tensor:
    return affinity.sum(-2) / max(1, affinity.shape[-2])


def _per_device(n_experts: int, n_devices: int) -> int:
    if n_devices < 1 or n_experts % n_devices:
        raise ValueError(f"n_devices = {n_devices}: expected a divisor of the {n_experts} experts")
    return n_experts // n_devices


def _wide_counts(counts: Tensor) -> Tensor:
    """int64, or fp64 where the counts come as floats. Raises TypeError for bool or complex, ValueError below 0."""
    if counts.dtype == torch.bool or counts.is_complex():
        raise TypeError(f"counts is {counts.dtype}: expected int or float")
    if counts.ndim < 1 or counts.shape[-1] < 1:
        raise ValueError(f"counts of shape {list(counts.shape)}: expected [..., E]")
    if not ((counts >= 0) & (counts < math.inf)).all():
        raise ValueError("counts: expected finite numbers from 0 up")
    return counts.double() if counts.is_floating_point() else counts.long()


def _check_real(name: str, value: Tensor) -> None:
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} is {value.dtype}: expected float32 or float64")


def _check_pair(affinity: Tensor, indices: Tensor) -> None:
    _check_real("affinity", affinity)
    if affinity.ndim < 2 or affinity.shape[:-1] != indices.shape[:-1]:
        raise ValueError(
            f"affinity {list(affinity.shape)}, indices {list(indices.shape)}: expected [..., T, E] and [..., T, k]"
        )


def _check_indices(indices: Tensor, n_experts: int) -> None:
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"indices is {indices.dtype}: expected int64 or int32")
    if indices.ndim < 1 or n_experts < 1:
        raise ValueError(f"indices {list(indices.shape)}, n_experts = {n_experts}: expected [..., k] and E >= 1")
    if indices.numel() and (int(indices.min()) < -1 or int(indices.max()) >= n_experts):
        raise ValueError(f"indices from {indices.min()} to {indices.max()}: expected -1 (none) to {n_experts - 1}")
