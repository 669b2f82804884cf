"""The coefficient step of a seam in one kernel, and its backward in another: the tiny kernels between the large ones.

    P, q = sums over the splits                      of fn v and of v^2, v the streams flattened to n d
    m    = P r,  r = rsqrt(q / (n d) + norm_eps)     a = m scale + base, a scale each for pre, post and comb
    pre  = sigmoid(a) + eps    post = 2 sigmoid(a)    comb = sinkhorn(a)

The kernels that project streams cut the channels into S splits, so as to keep a GPU busy with few tokens, and write
partials [S, T, n^2 + 2n + 1]. Here they are added in the order of s; no atomics, and a token's bits don't depend on
the others. The gradient of P and q is the same for each split:

    dP = da scale r        dq = -r^2 / (2 n d) sum(da scale m)        dscale = sum(da m)        dbase = sum(da)

The last two sum over tokens: each program of 32 writes its part, and torch adds the parts in a fixed order.
Sources: mHC 4; V4.1 report 2.4.1; official inference code; `dsv41_edu.mhc.seam`, the reference.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.launch import tl, triton
from kernels.sinkhorn import BLOCK_T, sinkhorn_backward_tile, sinkhorn_tile, square_tile


@triton.jit
def sigmoid(a):
    return 1.0 / (1.0 + tl.exp(-a))


@triton.jit
def add_splits(partials, place, real, splits, apart):
    """What lies at `place` in each of the splits, added in their order."""
    total = tl.load(partials + place, mask=real, other=0.0)
    for _ in range(1, splits):
        partials += apart
        total += tl.load(partials + place, mask=real, other=0.0)
    return total


@triton.jit
def row_tile(T, width, n: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr):
    """Where this program's rows of n numbers lie, tokens `width` apart, and which of them are there: [BLOCK_T, N]."""
    token, k = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None], tl.arange(0, N)[None, :]
    return token.to(tl.int64) * width + k, (token < T) & (k < n)


@triton.jit
def normalised_products(
    partials, T, splits, apart, channels, norm_eps, n: tl.constexpr, N: tl.constexpr, BLOCK_T: tl.constexpr
):
    """m of pre, post and comb, tiles [B, N], [B, N] and [B, N, N], and r [B, 1]; all 0 for tokens past T."""
    C: tl.constexpr = n * n + 2 * n + 1
    row, is_row = row_tile(T, C, n, N, BLOCK_T)
    square, is_square = square_tile(T, C, n, N, BLOCK_T)
    last, is_token = row_tile(T, C, 1, 1, BLOCK_T)
    q = add_splits(partials + C - 1, last, is_token, splits, apart)
    r = tl.where(is_token, tl.rsqrt(q / channels + norm_eps), 0.0)
    pre = add_splits(partials, row, is_row, splits, apart) * r
    post = add_splits(partials + n, row, is_row, splits, apart) * r
    comb = add_splits(partials + 2 * n, square, is_square, splits, apart) * r[:, :, None]
    return pre, post, comb, r


@triton.jit
def logits_tile(pre, post, comb, base, scale, n: tl.constexpr):
    """m scale + base of tiles of m: pre, post [B, N], comb [B, N, N]."""
    j, k = tl.arange(0, pre.shape[1])[:, None], tl.arange(0, pre.shape[1])[None, :]
    pre = pre * tl.load(scale) + tl.load(base + k, mask=k < n, other=0.0)
    post = post * tl.load(scale + 1) + tl.load(base + n + k, mask=k < n, other=0.0)
    base_comb = tl.load(base + 2 * n + j * n + k, mask=(j < n) & (k < n), other=0.0)
    return pre, post, comb * tl.load(scale + 2) + base_comb[None, :, :]


@triton.jit
def coefficients_tile(pre, post, comb, base, scale, n: tl.constexpr, ITERATIONS: tl.constexpr, eps):
    """pre, post [B, N], comb [B, N, N] of tiles of m of these shapes; what is beyond n means nothing."""
    pre, post, comb = logits_tile(pre, post, comb, base, scale, n)
    return sigmoid(pre) + eps, 2.0 * sigmoid(post), sinkhorn_tile(comb, n, ITERATIONS, eps)


@triton.jit
def finish(
    partials, base, scale, pre, post, comb, T, splits, apart, channels, eps, norm_eps,
    n: tl.constexpr, N: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """pre, post [T, n] and comb [T, n, n] of partials [splits, T, n^2 + 2n + 1]; channels = n d."""
    m_pre, m_post, m_comb, _ = normalised_products(partials, T, splits, apart, channels, norm_eps, n, N, BLOCK_T)
    a, b, c = coefficients_tile(m_pre, m_post, m_comb, base, scale, n, ITERATIONS, eps)
    row, is_row = row_tile(T, n, n, N, BLOCK_T)
    square, is_square = square_tile(T, n * n, n, N, BLOCK_T)
    tl.store(pre + row, a, mask=is_row)
    tl.store(post + row, b, mask=is_row)
    tl.store(comb + square, c, mask=is_square)


@triton.jit
def finish_backward(
    grad_pre, grad_post, grad_comb, partials, base, scale, grad, sums,
    T, splits, apart, channels, eps, norm_eps,
    n: tl.constexpr, N: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """grad [T, n^2 + 2n + 1] of P and q; sums [programs, n^2 + 2n + 3]: this program's part for base and scale."""
    pre, post, comb, r = normalised_products(partials, T, splits, apart, channels, norm_eps, n, N, BLOCK_T)
    a_pre, a_post, a_comb = logits_tile(pre, post, comb, base, scale, n)
    row, is_row = row_tile(T, n, n, N, BLOCK_T)
    square, is_square = square_tile(T, n * n, n, N, BLOCK_T)
    d_pre, d_post, d_comb = tl.zeros_like(pre), tl.zeros_like(post), tl.zeros_like(comb)  # of the logits
    if grad_pre is not None:
        d_pre = tl.load(grad_pre + row, mask=is_row, other=0.0) * sigmoid(a_pre) * sigmoid(-a_pre)
    if grad_post is not None:
        d_post = tl.load(grad_post + row, mask=is_row, other=0.0) * 2.0 * sigmoid(a_post) * sigmoid(-a_post)
    if grad_comb is not None:
        given = tl.load(grad_comb + square, mask=is_square, other=0.0)
        d_comb = sinkhorn_backward_tile(given, a_comb, n, ITERATIONS, eps)

    C: tl.constexpr = n * n + 2 * n + 1
    j, k = tl.arange(0, N)[:, None], tl.arange(0, N)
    sums += tl.program_id(0) * (C + 2)
    tl.store(sums + k, tl.sum(d_pre, 0), mask=k < n)
    tl.store(sums + n + k, tl.sum(d_post, 0), mask=k < n)
    tl.store(sums + 2 * n + j * n + k[None, :], tl.sum(d_comb, 0), mask=(j < n) & (k < n)[None, :])
    along_pre, along_post, along_comb = d_pre * pre, d_post * post, d_comb * comb
    tl.store(sums + C - 1, tl.sum(along_pre))
    tl.store(sums + C, tl.sum(along_post))
    tl.store(sums + C + 1, tl.sum(along_comb))

    scale_pre, scale_post, scale_comb = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2)
    grad_r = tl.sum(along_pre * scale_pre + along_post * scale_post + tl.sum(along_comb, 1) * scale_comb, 1)
    row, _ = row_tile(T, C, n, N, BLOCK_T)
    square, _ = square_tile(T, C, n, N, BLOCK_T)
    last, is_token = row_tile(T, C, 1, 1, BLOCK_T)
    tl.store(grad + row, d_pre * scale_pre * r, mask=is_row)
    tl.store(grad + n + row, d_post * scale_post * r, mask=is_row)
    tl.store(grad + 2 * n + square, d_comb * scale_comb * r[:, :, None], mask=is_square)
    tl.store(grad + C - 1 + last, grad_r[:, None] * r * r * -0.5 / channels, mask=is_token)


def check(device: torch.device, **expected: tuple[Tensor | None, tuple[int, ...], torch.dtype]) -> None:
    """Each is (tensor or None, its shape, its dtype). Raises ValueError and TypeError for the first that isn't so."""
    for name, (tensor, shape, dtype) in expected.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}: expected {dtype}")
        if tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} of shape {list(tensor.shape)}, strides {tensor.stride()}: expected {list(shape)}, contiguous"
            )
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}: expected {device}")


def finish_coefficients(
    partials: Tensor,
    base: Tensor,
    scale: Tensor,
    n: int,
    d: int,
    iterations: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [T, n], post [T, n] and comb [T, n, n], fp32, of a seam's partial products: the coefficient step.

    partials [S, T, n^2 + 2n + 1]: for each split of the n d channels its part of fn v, rows for pre, post, then
    comb by its first index, and last its part of the sum of v^2. base [n^2 + 2n], scale [3]. All fp32 and
    contiguous. Raises ValueError for shapes, strides, devices, n outside 1 to 8, and without an iteration;
    TypeError for dtypes. mHC 4; official inference code.
    """
    how = _step(partials, base, scale, n, iterations)
    T, device = partials.shape[1], partials.device
    pre, post, comb = (
        torch.empty(shape, dtype=torch.float32, device=device) for shape in ((T, n), (T, n), (T, n, n))
    )
    numbers = T, len(partials), partials.stride(0), n * d, eps, norm_eps
    finish[(triton.cdiv(T, BLOCK_T),)](partials, base, scale, pre, post, comb, *numbers, **how)
    return pre, post, comb


def finish_coefficients_backward(
    grad_pre: Tensor | None,
    grad_post: Tensor | None,
    grad_comb: Tensor | None,
    partials: Tensor,
    base: Tensor,
    scale: Tensor,
    n: int,
    d: int,
    iterations: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [T, n^2 + 2n + 1] of each split's partials, [n^2 + 2n] of base and [3] of scale, all fp32.

    grad_pre [T, n], grad_post [T, n] and grad_comb [T, n, n]: fp32 of any strides, or None for an output that wasn't
    used. The rest is what `finish_coefficients` was given. Raises what it raises.
    """
    how = _step(partials, base, scale, n, iterations)
    T, C, device = *partials.shape[1:], partials.device
    grads = [None if grad is None else grad.contiguous() for grad in (grad_pre, grad_post, grad_comb)]
    shapes = {"grad_pre": (T, n), "grad_post": (T, n), "grad_comb": (T, n, n)}
    check(device, **{k: (grad, shapes[k], torch.float32) for k, grad in zip(shapes, grads, strict=True)})
    programs = triton.cdiv(T, BLOCK_T)
    grad = torch.empty((T, C), dtype=torch.float32, device=device)
    sums = torch.empty((programs, C + 2), dtype=torch.float32, device=device)
    numbers = T, len(partials), partials.stride(0), n * d, eps, norm_eps
    finish_backward[(programs,)](*grads, partials, base, scale, grad, sums, *numbers, **how)
    grad_base, grad_scale = sums.sum(0).split([C - 1, 3])
    return grad, grad_base, grad_scale


def _step(partials: Tensor, base: Tensor, scale: Tensor, n: int, iterations: int) -> dict[str, int]:
    """What a launch of the step fixes, if its input is right."""
    if not 1 <= n <= 8:
        raise ValueError(f"n = {n}: expected 1 to 8 streams")
    if iterations < 1:
        raise ValueError(f"iterations = {iterations}: expected 1 or more")
    C = n * n + 2 * n + 1
    if partials.dim() != 3 or len(partials) == 0:
        raise ValueError(f"partials of shape {list(partials.shape)}: expected [S, T, {C}] with S from 1")
    expected = {"partials": (partials, (*partials.shape[:2], C)), "base": (base, (C - 1,)), "scale": (scale, (3,))}
    check(partials.device, **{name: (*pair, torch.float32) for name, pair in expected.items()})
    return {"n": n, "N": triton.next_power_of_2(n), "ITERATIONS": iterations, "BLOCK_T": BLOCK_T}


def _builds() -> list[Build]:
    """The official size: 4 streams, 20 iterations."""
    inputs = dict.fromkeys(("partials", "base", "scale"), "*fp32")
    sizes = dict.fromkeys(("T", "splits", "apart"), "i32") | {"channels": "i32:16", "eps": "fp32", "norm_eps": "fp32"}
    forward = dict.fromkeys(("pre", "post", "comb"), "*fp32")
    backward = dict.fromkeys(("grad_pre", "grad_post", "grad_comb", "grad", "sums"), "*fp32")
    how = {"n": 4, "N": 4, "ITERATIONS": 20, "BLOCK_T": BLOCK_T}
    return [
        Build("finish", finish, inputs | forward | sizes, how),
        Build("finish_backward", finish_backward, inputs | backward | sizes, how),
    ]


BUILDS = _builds()
