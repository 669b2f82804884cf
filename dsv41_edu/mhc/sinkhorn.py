"""Doubly stochastic matrices: how they are made (Sinkhorn), and what they are made of (Birkhoff).

    deployed:  M = softmax(L) over k, + eps;  then columns, rows, columns, ..., columns:  M / (sum + eps)
    paper:     M = exp(L);                    then rows, columns, ..., rows, columns:     M / sum

An iteration is one normalisation of the rows and one of the columns. The softmax is the deployed form's first of
the rows; the columns come last in both, so the columns' sums are 1 to rounding (deployed: to eps), the rows' only
as far as the iterations went. Sources: mHC 4.2; official inference code.
"""

from itertools import permutations

import torch
from torch import Tensor

ITERATIONS, EPS = 20, 1e-6  # hc_sinkhorn_iters, hc_eps


def sinkhorn(logits: Tensor, iterations: int = ITERATIONS, eps: float = EPS) -> Tensor:
    """The deployed form: matrices [..., n, n] of logits [..., n, n], in their dtype, differentiable.

    Any finite logits will do, -inf too; a row with NaN or +inf, or of -inf alone, has no softmax, and its matrix
    is NaN. Raises ValueError without an iteration and for a matrix that isn't square.
    """
    _check(logits, iterations, least=1)
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def sinkhorn_paper(logits: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """The paper's form, without eps: exp(logits) for no iterations. It overflows where a logit passes 88 (fp32).

    Raises ValueError as `sinkhorn` does, and for a negative number of iterations.
    """
    _check(logits, iterations, least=0)
    matrix = logits.exp()
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    return matrix


def _check(logits: Tensor, iterations: int, least: int) -> None:
    if iterations < least:
        raise ValueError(f"iterations = {iterations}: expected {least} or more")
    if logits.dim() < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits of shape {list(logits.shape)}: expected square matrices [..., n, n]")
    if not logits.is_floating_point():
        raise TypeError(f"logits are {logits.dtype}: expected a float type")


def largest_error(matrix: Tensor, dim: int) -> float:
    """The largest |sum - 1| over `dim`: -1 for the rows' sums, -2 for the columns'."""
    return float((matrix.sum(dim) - 1).abs().max())


def birkhoff(matrix: Tensor, tolerance: float = 1e-4) -> tuple[Tensor, Tensor]:
    """A doubly stochastic matrix [n, n], n at most 8, as a convex combination of permutations.

    Returns weights [m], falling as they were taken, and permutations, int64 [m, n]: permutation p stands for the
    matrix with ones at (i, p_i). Each step takes the permutation whose smallest entry is largest, and takes all of
    that entry away, so one more entry is 0: at most (n - 1)^2 + 1 steps (Birkhoff; Marcus and Ree). The sum
    misses the matrix by no more than its row and column sums miss 1, and rounding.
    Raises ValueError for negative or infinite entries, or sums further from 1 than `tolerance`.
    """
    _check(matrix, 0, least=0)
    if matrix.dim() != 2 or len(matrix) > 8:
        raise ValueError(f"matrix of shape {list(matrix.shape)}: expected [n, n], n at most 8")
    errors = largest_error(matrix, -1), largest_error(matrix, -2)
    if not (matrix >= 0).all() or not max(errors) <= tolerance:
        raise ValueError(f"rows and columns miss 1 by {errors}: expected a doubly stochastic matrix")
    n = len(matrix)
    every = torch.tensor(list(permutations(range(n))))
    rest, rows = matrix.double().clone(), torch.arange(n)
    weights, chosen = [], []
    for _ in range((n - 1) ** 2 + 1):
        weight, best = rest[rows, every].amin(-1).max(0)
        if weight <= 0:
            break
        rest[rows, every[best]] -= weight
        weights.append(weight)
        chosen.append(every[best])
    return torch.stack(weights), torch.stack(chosen)
