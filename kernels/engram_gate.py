"""The gate of the n-gram memory in one kernel, and its backward in another: each stream and each key pass once.

    dot_c  = d^-1/2 <rms(X_c) * q_c, rms(k_c) * kw_c>       rms(x) = x f,  f = rsqrt(mean(x^2) + norm_eps)
    gate_c = sigmoid(sgn(dot_c) sqrt(max(|dot_c|, 1e-6)))   sgn by the sign bit; 0 where the token is of an image
    X'_c   = X_c + gate_c u                                 in fp32, rounded to X's dtype

A program has 2 tokens, all their channels and one stream after another: u, and X_c until dot_c is known, stay in
registers, so through memory go (3n + 1) d elements a token. The weights, read once for 2 tokens, come from the cache.

With a_c = grad gate_c + <grad X'_c, u>, D_c = a_c gate_c (1 - gate_c) / (2 sqrt|dot_c|), 0 below the floor, and
A_c = D_c d^-1/2 f_X f_k the gradients are

    grad X_c = grad X'_c + A_c q_c kw_c k_c - D_c dot_c f_X^2 X_c / d       grad u = sum_c gate_c grad X'_c
    grad k_c =             A_c q_c kw_c X_c - D_c dot_c f_k^2 k_c / d
    grad q_c = kw_c S_c    grad kw_c = q_c S_c    S_c = sum over tokens of A_c X_c k_c

The forward keeps dot, f_X and f_k, so that the backward has only <grad X'_c, u> left to sum over channels:

    scalars   for each 2 tokens                    grad X', u        -> the gate, A and what X_c and k_c are times
    spread    for each 8 tokens and 128 channels   grad X', X, k     -> grad X, grad k, grad u and this part of S

Together (6n + 2) d elements a token. A program of `spread` takes every 16th tile of tokens, and torch adds the 16
parts of S: no atomics, so two runs are equal to the bit. The rounding of X' counts as the identity.
Sources: V4.1 report 2.4.2; official inference code; `dsv41_edu.engram.gate`, the reference.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.aot import Build
from kernels.launch import tl, triton
from kernels.operands import check_operands

BLOCK_T = 2  # tokens of a program that has all channels
SPREAD_T, SPREAD_D = 8, 128  # tokens and channels of a program of `spread`
PROGRAMS = 16  # parts of S
WARPS = 8


@triton.jit
def load_channels(row, d, mask, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """A tuple of CHUNKS tiles, as stored: the d channels from `row`, pointers [B, 1], on."""
    tiles = ()
    for i in tl.static_range(CHUNKS):
        channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
        tiles += (tl.load(row + channel, mask=mask & (channel < d), other=0.0),)
    return tiles


@triton.jit
def text_tile(text_mask, token, here):
    """1 where a token is of text, 0 where it is of an image."""
    text = tl.where(here, 1.0, 0.0)
    if text_mask is not None:
        text = tl.where(tl.load(text_mask + token, mask=here, other=0) != 0, 1.0, 0.0)
    return text


@triton.jit
def gate_of(dot, text):
    """The gate, its slope by dot, both 0 where text is 0; and dot at an exact zero counts by its sign bit."""
    size = tl.abs(dot)
    root = tl.sqrt(tl.where(size < 1e-6, 1e-6, size))  # NaN stays NaN
    power = tl.exp(-root)  # at most 1
    large, small = 1.0 / (1.0 + power), power / (1.0 + power)
    gate = tl.where(dot.to(tl.int32, bitcast=True) < 0, small, large)
    return gate * text, tl.where(size < 1e-6, 0.0, large * small / (2.0 * root)) * text


@triton.jit
def add_memory(
    streams, keys, value, q_weight, k_weight, text_mask, new, gates, kept,
    T, d, norm_eps, streams_row, stream_stride, keys_row, key_stride, value_row,
    N: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """new [T, N, d], gates fp32 [T, N] and kept fp32 [T, N, 3]: dot, f_X and f_k."""
    token = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    here = token < T
    text = text_tile(text_mask, token, here)
    u = load_channels(value + token * value_row, d, here, CHUNK, CHUNKS)
    for c in tl.static_range(N):
        row = streams + token * streams_row + c * tl.cast(stream_stride, tl.int64)
        x = load_channels(row, d, here, CHUNK, CHUNKS)
        products = tl.zeros((BLOCK_T, CHUNK), tl.float32)
        of_x = tl.zeros((BLOCK_T, CHUNK), tl.float32)
        of_k = tl.zeros((BLOCK_T, CHUNK), tl.float32)
        for i in tl.static_range(CHUNKS):
            channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
            at = keys + token * keys_row + c * tl.cast(key_stride, tl.int64) + channel
            k = tl.load(at, mask=here & (channel < d), other=0.0).to(tl.float32)
            q_part = tl.load(q_weight + c * d + channel, mask=channel < d, other=0.0).to(tl.float32)
            k_part = tl.load(k_weight + c * d + channel, mask=channel < d, other=0.0).to(tl.float32)
            v = x[i].to(tl.float32)
            products += v * q_part * k_part * k
            of_x += v * v
            of_k += k * k
        x_factor = tl.rsqrt(tl.sum(of_x, 1, keep_dims=True) / d + norm_eps)
        k_factor = tl.rsqrt(tl.sum(of_k, 1, keep_dims=True) / d + norm_eps)
        # products were added to 0, as torch adds: of -0 alone the sum is +0
        dot = tl.sum(products, 1, keep_dims=True) * x_factor * k_factor / tl.sqrt(d * 1.0)
        gate, _ = gate_of(dot, text)
        place = token * N + c
        tl.store(gates + place, gate, mask=here)
        tl.store(kept + place * 3, dot, mask=here)
        tl.store(kept + place * 3 + 1, x_factor, mask=here)
        tl.store(kept + place * 3 + 2, k_factor, mask=here)
        for i in tl.static_range(CHUNKS):
            channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
            added = x[i].to(tl.float32) + gate * u[i].to(tl.float32)
            tl.store(new + place * d + channel, added.to(new.dtype.element_ty), mask=here & (channel < d))


@triton.jit
def scalars(
    grad_new, grad_gates, value, text_mask, kept, factors, T, d, value_row,
    N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """factors fp32 [T, N, 4]: the gate, A, and D dot f^2 / d for X and for k.

    grad_new [T, N, d] and grad_gates fp32 [T, N]: either may be None.
    """
    token = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    here = token < T
    text = text_tile(text_mask, token, here)
    products = ()
    for _ in tl.static_range(N):
        products += (tl.zeros((BLOCK_T, CHUNK), tl.float32),)
    if grad_new is not None:
        for start in range(0, d, CHUNK):
            channel = start + tl.arange(0, CHUNK)[None, :]
            mask = here & (channel < d)
            u = tl.load(value + token * value_row + channel, mask=mask, other=0.0).to(tl.float32)
            added = ()
            for c in tl.static_range(N):
                g = tl.load(grad_new + (token * N + c) * d + channel, mask=mask, other=0.0).to(tl.float32)
                added += (products[c] + g * u,)
            products = added
    for c in tl.static_range(N):
        place = token * N + c
        dot = tl.load(kept + place * 3, mask=here, other=0.0)
        x_factor = tl.load(kept + place * 3 + 1, mask=here, other=0.0)
        k_factor = tl.load(kept + place * 3 + 2, mask=here, other=0.0)
        gate, slope = gate_of(dot, text)
        of_gate = tl.sum(products[c], 1, keep_dims=True)
        if grad_gates is not None:
            of_gate += tl.load(grad_gates + place, mask=here, other=0.0)
        of_dot = of_gate * slope
        tl.store(factors + place * 4, gate, mask=here)
        tl.store(factors + place * 4 + 1, of_dot / tl.sqrt(d * 1.0) * x_factor * k_factor, mask=here)
        tl.store(factors + place * 4 + 2, of_dot * dot * x_factor * x_factor / d, mask=here)
        tl.store(factors + place * 4 + 3, of_dot * dot * k_factor * k_factor / d, mask=here)


@triton.jit
def spread(
    grad_new, streams, keys, q_weight, k_weight, factors, of_streams, of_keys, of_value, parts,
    T, d, streams_row, stream_stride, keys_row, key_stride,
    N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """of_streams, of_keys [T, N, d], of_value [T, d], parts fp32 [programs, N, d] of S; grad_new may be None."""
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    inside = channel < d
    total = ()
    for _ in tl.static_range(N):
        total += (tl.zeros((BLOCK_T, BLOCK_D), tl.float32),)
    for tile in range(tl.program_id(0), tl.cdiv(T, BLOCK_T), tl.num_programs(0)):
        token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
        here = token < T
        mask = here & inside
        of_u = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        added = ()
        for c in tl.static_range(N):
            place = token * N + c
            along = tl.load(factors + place * 4 + 1, mask=here, other=0.0)
            x_part = tl.load(factors + place * 4 + 2, mask=here, other=0.0)
            k_part = tl.load(factors + place * 4 + 3, mask=here, other=0.0)
            row = streams + token * streams_row + c * tl.cast(stream_stride, tl.int64)
            x = tl.load(row + channel, mask=mask, other=0.0).to(tl.float32)
            row = keys + token * keys_row + c * tl.cast(key_stride, tl.int64)
            k = tl.load(row + channel, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(q_weight + c * d + channel, mask=inside, other=0.0).to(tl.float32)
            weight *= tl.load(k_weight + c * d + channel, mask=inside, other=0.0).to(tl.float32)
            of_x = along * weight * k - x_part * x
            of_k = along * weight * x - k_part * k
            if grad_new is not None:
                g = tl.load(grad_new + place * d + channel, mask=mask, other=0.0).to(tl.float32)
                of_x += g
                of_u += tl.load(factors + place * 4, mask=here, other=0.0) * g
            tl.store(of_streams + place * d + channel, of_x.to(of_streams.dtype.element_ty), mask=mask)
            tl.store(of_keys + place * d + channel, of_k.to(of_keys.dtype.element_ty), mask=mask)
            added += (total[c] + along * x * k,)
        total = added
        tl.store(of_value + token * d + channel, of_u.to(of_value.dtype.element_ty), mask=mask)
    for c in tl.static_range(N):
        at = parts + (tl.program_id(0).to(tl.int64) * N + c) * d + channel
        tl.store(at, tl.sum(total[c], 0, keep_dims=True), mask=inside)


def _chunks(d: int) -> dict[str, int]:
    chunk = min(1024, triton.next_power_of_2(d))
    return {"CHUNK": chunk, "CHUNKS": triton.cdiv(d, chunk)}


class _AddMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, text_mask, norm_eps, streams, keys, value, q_weight, k_weight):
        (T, n, d), device = streams.shape, streams.device
        new = torch.empty((T, n, d), dtype=streams.dtype, device=device)
        gates = torch.empty((T, n), dtype=torch.float32, device=device)
        kept = torch.empty((T, n, 3), dtype=torch.float32, device=device)
        strides = *streams.stride()[:2], *keys.stride()[:2], value.stride(0)
        add_memory[(triton.cdiv(T, BLOCK_T),)](
            streams, keys, value, q_weight, k_weight, text_mask, new, gates, kept, T, d, norm_eps, *strides,
            N=n, **_chunks(d), BLOCK_T=BLOCK_T, num_warps=WARPS,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(streams, keys, value, q_weight, k_weight, text_mask, kept)
        return new, gates

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_new, grad_gates):
        streams, keys, value, q_weight, k_weight, text_mask, kept = ctx.saved_tensors
        (T, n, d), device = streams.shape, streams.device
        grad_new, grad_gates = (None if grad is None else grad.contiguous() for grad in (grad_new, grad_gates))
        of_streams = torch.empty((T, n, d), dtype=streams.dtype, device=device)
        of_keys = torch.empty((T, n, d), dtype=keys.dtype, device=device)
        of_value = torch.empty((T, d), dtype=value.dtype, device=device)
        factors = torch.empty((T, n, 4), dtype=torch.float32, device=device)
        programs = min(triton.cdiv(T, SPREAD_T), PROGRAMS)
        parts = torch.empty((programs, n, d), dtype=torch.float32, device=device)
        scalars[(triton.cdiv(T, BLOCK_T),)](
            grad_new, grad_gates, value, text_mask, kept, factors, T, d, value.stride(0),
            N=n, CHUNK=_chunks(d)["CHUNK"], BLOCK_T=BLOCK_T, num_warps=WARPS,
        )  # fmt: skip
        # token tiles vary fastest: programs side by side find their channels of the weights in the cache
        spread[(programs, triton.cdiv(d, SPREAD_D))](
            grad_new, streams, keys, q_weight, k_weight, factors, of_streams, of_keys, of_value, parts,
            T, d, *streams.stride()[:2], *keys.stride()[:2], N=n, BLOCK_T=SPREAD_T, BLOCK_D=SPREAD_D, num_warps=WARPS,
        )  # fmt: skip
        total = parts.sum(0)
        of_q, of_k = (total * k_weight).to(q_weight.dtype), (total * q_weight).to(k_weight.dtype)
        return None, None, of_streams, of_keys, of_value, of_q, of_k


def fused_engram_gate(
    streams: Tensor,
    keys: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    text_mask: Tensor | None = None,
    norm_eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """X + gate u [..., n, d] in the streams' dtype, and the gate, fp32 [..., n]: as `add_memory` of the reference.

    streams and keys [..., n, d], n from 1 to 8, value [..., d], weights [n, d]: each bf16 or fp32. Channels are
    adjacent, all else of the first three at any stride, so that keys and value may be views of one projection's
    output [..., (n + 1) d]. text_mask: bool [...], False for image tokens, whose gate is 0. Differentiable once.

    Raises ValueError for shapes, strides, devices and n; TypeError for dtypes. V4.1 report 2.4.2.
    """
    if streams.dim() < 2 or not 1 <= streams.shape[-2] <= 8 or streams.shape[-1] == 0:
        raise ValueError(f"streams of shape {list(streams.shape)}: expected [..., n, d], n from 1 to 8, d from 1")
    *lead, n, d = streams.shape
    real = torch.bfloat16, torch.float32
    expected = {"streams": (streams, (*lead, n, d), real), "keys": (keys, (*lead, n, d), real)}
    expected |= {"value": (value, (*lead, d), real), "q_weight": (q_weight, (n, d), real)}
    expected |= {"k_weight": (k_weight, (n, d), real), "text_mask": (text_mask, (*lead,), (torch.bool,))}
    check_operands(expected, expected.keys() - {"text_mask"})
    T = torch.Size(lead).numel()
    flat = streams.reshape(T, n, d), keys.reshape(T, n, d), value.reshape(T, d)
    weights = q_weight.contiguous(), k_weight.contiguous()
    if text_mask is not None:
        text_mask = text_mask.reshape(T).contiguous()
    new, gates = _AddMemory.apply(text_mask, norm_eps, *flat, *weights)
    return new.view(streams.shape), gates.view(*lead, n)


def _builds() -> list[Build]:
    """The module of V4.1: 4 streams of 5120 channels; keys and value of one projection."""
    plain = dict.fromkeys(("q_weight", "k_weight", "kept", "gates", "grad_gates", "factors", "parts"), "*fp32")
    plain |= {"text_mask": "*i1", "norm_eps": "fp32", "T": "i32"}
    plain |= dict.fromkeys(("d", "streams_row", "stream_stride", "keys_row", "key_stride", "value_row"), "i32:16")
    stored = ("streams", "keys", "value", "new", "grad_new", "of_streams", "of_keys", "of_value")
    chunks = _chunks(5120)
    how = {
        add_memory: {"N": 4, "BLOCK_T": BLOCK_T, **chunks},
        scalars: {"N": 4, "BLOCK_T": BLOCK_T, "CHUNK": chunks["CHUNK"]},
        spread: {"N": 4, "BLOCK_T": SPREAD_T, "BLOCK_D": SPREAD_D},
    }
    builds = []
    for dtype in ("bf16", "fp32"):
        types = plain | dict.fromkeys(stored, f"*{dtype}")
        for kernel, constants in how.items():
            signature = {name: types[name] for name in kernel.arg_names if name not in constants}
            builds.append(Build(f"{kernel.__name__}_{dtype}", kernel, signature, constants, WARPS))
    return builds


BUILDS = _builds()
