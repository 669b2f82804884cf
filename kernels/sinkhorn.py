"""Sinkhorn in one kernel: a small matrix stays in registers through all its normalisations, and so does its gradient.

    M = softmax(L) over k, + eps;  then columns, rows, columns, ..., columns:  M / D,  D = sum + eps

Backward, a normalisation Y = X / D takes the gradient g of Y to (g - sum(g X) / D) / D, and the softmax P takes it
to P (g - sum(g P)), whichever logit was the largest. Each needs the matrix that it started from. To keep all 40
takes more registers than there are, so they are computed again: from the start to each 5th iteration, and from there
to those between, which makes 66 iterations of the 19 after the first columns, and no memory.

Matrices are padded from n to N, a power of two, by ones on the diagonal and zeros elsewhere: these meet no other
entry, and no sum of theirs is zero. Sources: mHC 4.2; official inference code; `dsv41_edu.mhc.sinkhorn`, the
reference.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.aot import Build
from kernels.launch import tl, triton

BLOCK_T = 32  # matrices in a program
SEGMENT = tl.constexpr(5)  # iterations between two matrices that the backward computes from the start


@triton.jit
def softmax(logits, n: tl.constexpr):
    """Over the last index of a tile fp32 [B, N, N]; what is beyond n has no part in it, and rows there are NaN."""
    logits = tl.where(tl.arange(0, logits.shape[2])[None, None, :] < n, logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, 2, keep_dims=True))
    return powers / tl.sum(powers, 2, keep_dims=True)


@triton.jit
def padded(matrix, n: tl.constexpr, diagonal):
    """The tile with `diagonal` for the entries (i, i) beyond n and 0 for the others there."""
    j, k = tl.arange(0, matrix.shape[1])[:, None], tl.arange(0, matrix.shape[2])[None, :]
    return tl.where(((j < n) & (k < n))[None, :, :], matrix, tl.where(j == k, diagonal, 0.0)[None, :, :])


@triton.jit
def normalise(matrix, eps, AXIS: tl.constexpr):
    return matrix / (tl.sum(matrix, AXIS, keep_dims=True) + eps)


@triton.jit
def normalise_backward(grad, matrix, eps, AXIS: tl.constexpr):
    """From the gradient of `normalise(matrix)` to the one of `matrix`."""
    denominator = tl.sum(matrix, AXIS, keep_dims=True) + eps
    return (grad - tl.sum(grad * matrix, AXIS, keep_dims=True) / denominator) / denominator


@triton.jit
def iterate(matrix, eps, times):
    for _ in range(times):
        matrix = normalise(normalise(matrix, eps, 2), eps, 1)
    return matrix


@triton.jit
def sinkhorn_tile(logits, n: tl.constexpr, ITERATIONS: tl.constexpr, eps):
    """The matrices of a tile of logits, fp32 [B, N, N] with N >= n a power of two. What is beyond n becomes 0."""
    columns = normalise(padded(softmax(logits, n) + eps, n, 1.0), eps, 1)
    return padded(iterate(columns, eps, ITERATIONS - 1), n, 0.0)


@triton.jit
def sinkhorn_backward_tile(grad, logits, n: tl.constexpr, ITERATIONS: tl.constexpr, eps):
    """The gradient of the logits from that of the matrices, tiles fp32 [B, N, N]; both are 0 beyond n."""
    chances = softmax(logits, n)
    start = padded(chances + eps, n, 1.0)
    columns = normalise(start, eps, 1)
    n_segments: tl.constexpr = (ITERATIONS - 1 + SEGMENT - 1) // SEGMENT
    for s in range(n_segments):
        done = (n_segments - 1 - s) * SEGMENT
        kept = iterate(columns, eps, done)
        length = tl.minimum(SEGMENT, ITERATIONS - 1 - done)
        for i in range(length):
            before = iterate(kept, eps, length - 1 - i)
            grad = normalise_backward(grad, normalise(before, eps, 2), eps, 1)
            grad = normalise_backward(grad, before, eps, 2)
    grad = normalise_backward(grad, start, eps, 1)
    return padded(chances * (grad - tl.sum(grad * chances, 2, keep_dims=True)), n, 0.0)


@triton.jit
def square_tile(T, width, n: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr):
    """Where this program's matrices [n, n] lie, tokens `width` apart, and what of them is there: [BLOCK_T, N, N]."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    j, k = tl.arange(0, N)[None, :, None], tl.arange(0, N)[None, None, :]
    return token.to(tl.int64) * width + j * n + k, (token < T) & (j < n) & (k < n)


@triton.jit
def sinkhorn(
    logits, matrices, T, eps,
    n: tl.constexpr, N: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    place, real = square_tile(T, n * n, n, N, BLOCK_T)
    tile = tl.load(logits + place, mask=real, other=0.0)
    tl.store(matrices + place, sinkhorn_tile(tile, n, ITERATIONS, eps), mask=real)


@triton.jit
def sinkhorn_backward(
    grad, logits, grad_logits, T, eps,
    n: tl.constexpr, N: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    place, real = square_tile(T, n * n, n, N, BLOCK_T)
    given = tl.load(grad + place, mask=real, other=0.0)
    tile = tl.load(logits + place, mask=real, other=0.0)
    tl.store(grad_logits + place, sinkhorn_backward_tile(given, tile, n, ITERATIONS, eps), mask=real)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, iterations: int, eps: float) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iterations, ctx.eps = iterations, eps
        return _launch(sinkhorn, logits, iterations=iterations, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (logits,) = ctx.saved_tensors
        return (
            _launch(sinkhorn_backward, grad.contiguous(), logits, iterations=ctx.iterations, eps=ctx.eps),
            None,
            None,
        )


def _launch(kernel: triton.JITFunction, *inputs: Tensor, iterations: int, eps: float) -> Tensor:
    T, n, _ = inputs[0].shape
    result = torch.empty((T, n, n), dtype=torch.float32, device=inputs[0].device)
    how = {"n": n, "N": triton.next_power_of_2(n), "ITERATIONS": iterations, "BLOCK_T": BLOCK_T}
    kernel[(triton.cdiv(T, BLOCK_T),)](*inputs, result, T, eps, **how)
    return result


def fused_sinkhorn(logits: Tensor, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    """Doubly stochastic matrices [T, n, n] of logits [T, n, n], n from 1 to 8, both fp32; differentiable once.

    Logits of any strides; those that aren't contiguous are copied. Finite ones will do, -inf too; a row with NaN or
    +inf, or of -inf alone, makes its matrix NaN and no other. Raises ValueError for another shape and without an
    iteration, TypeError for another dtype. The deployed form: mHC 4.2, official inference code.
    """
    if logits.dim() != 3 or logits.shape[1] != logits.shape[2] or not 1 <= logits.shape[1] <= 8:
        raise ValueError(f"logits of shape {list(logits.shape)}: expected [T, n, n] with n from 1 to 8")
    if logits.dtype != torch.float32:
        raise TypeError(f"logits are {logits.dtype}: expected torch.float32")
    if iterations < 1:
        raise ValueError(f"iterations = {iterations}: expected 1 or more")
    return _Sinkhorn.apply(logits.contiguous(), iterations, eps)


def _builds() -> list[Build]:
    """The official size: 4 streams, 20 iterations."""
    sizes = {"T": "i32", "eps": "fp32"}
    how = {"n": 4, "N": 4, "ITERATIONS": 20, "BLOCK_T": BLOCK_T}
    forward = {"logits": "*fp32", "matrices": "*fp32"}
    backward = {"grad": "*fp32", "logits": "*fp32", "grad_logits": "*fp32"}
    return [
        Build("sinkhorn", sinkhorn, forward | sizes, how),
        Build("sinkhorn_backward", sinkhorn_backward, backward | sizes, how),
    ]


BUILDS = _builds()
