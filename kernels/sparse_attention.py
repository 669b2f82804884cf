"""Attention of many heads to one latent that is key and value, over the rows that indices name, in one kernel.

    a_s = scale q_h . c_s                                 s over the rows named, -1 names none
    m   = max(sink_h, max_s a_s)                          the sink isn't scaled
    o_h = sum_s e^(a_s - m) c_s / (sum_s e^(a_s - m) + e^(sink_h - m))        where nothing is named, 0

The form for tokens that read a cache (one, a chunk, a block of drafts) and for prompts on a GPU. It has no backward:
training uses the masked form, `banded_attention` of `dsv41_edu.attention.sparse_attention`.

A program has one token and 16 heads. It walks over the token's K indices in blocks, the window's and then the
entries', gathers the rows of a block and uses them twice, as keys and as values: scores and weights live and die in
registers. The softmax is the running one. m starts at the sink and the sum of weights at e^(sink - m) = 1; where a
block has a larger score, sum and output shrink by e^(old m - m). So nothing overflows, and a token that names nothing
is no case of its own. A token with n rows named costs ceil(H / 16) programs, which run side by side, so that all but
the first find the rows in the cache: each reads n D elements of rows and K indices; together they read H D of q and H
sinks, and write H D.

In bf16 the weights enter the second product as two bf16 numbers each, high and low, 16 bits together: as good as fp32
weights once the output is rounded, and still for the matrix units. (The official kernel rounds them to the 8 bits of
one. Then outputs near zero, where a sum cancels, are off by more than their last place.) So each output is the
reference's but for the order of sums. Sources: V4.1 report 2.3; official inference code.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.launch import tl, triton
from kernels.operands import check_operands

BLOCK_H = 16  # the fewest rows of a product


@triton.jit
def sparse_attention(
    q, window, window_indices, entries, entry_indices, sink, out,
    S, H, D, W, N, window_K, entry_K, scale,
    q_batch, q_token, q_head, window_batch, window_row, entries_batch, entries_row,
    OPERAND: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """out [B S, H, D]; without entries their pointers are None and entry_K = 0."""
    blocks = tl.cdiv(H, BLOCK_H)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    batch = token // S
    head = (tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    q += batch * q_batch + token % S * q_token + head.to(tl.int64) * q_head
    queries, o = (), ()
    for i in tl.static_range(CHUNKS):
        channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
        queries += (tl.load(q + channel, mask=(head < H) & (channel < D), other=0.0).to(OPERAND),)
        o += (tl.zeros((BLOCK_H, CHUNK), tl.float32),)
    m = tl.load(sink + head, mask=head < H, other=0.0).to(tl.float32)
    total = tl.full((BLOCK_H, 1), 1.0, tl.float32)

    for start in range(0, window_K + entry_K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        name = window_indices + token * window_K + k
        if entries is not None:
            of_window = k < window_K
            name = tl.where(of_window, name, entry_indices + token * entry_K + k - window_K)
        index = tl.load(name, mask=k < window_K + entry_K, other=-1).to(tl.int64)
        row, rows = window + batch * window_batch + index * window_row, W
        if entries is not None:
            row = tl.where(of_window, row, entries + batch * entries_batch + index * entries_row)
            rows = tl.where(of_window, W, N)
        named = (index >= 0) & (index < rows)
        scores = tl.zeros((BLOCK_H, BLOCK_K), tl.float32)
        latents = ()
        for i in tl.static_range(CHUNKS):
            channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
            tile = tl.load(row[:, None] + channel, mask=named[:, None] & (channel < D), other=0.0)
            latents += (tile.to(OPERAND),)
            scores = tl.dot(queries[i], tl.trans(latents[i]), scores, input_precision="ieee")
        scores = tl.where(named[None, :], scores * scale, float("-inf"))
        larger = tl.maximum(m, tl.max(scores, 1, keep_dims=True))
        shrink = tl.exp(m - larger)
        m = larger
        p = tl.exp(scores - m)
        total = total * shrink + tl.sum(p, 1, keep_dims=True)
        high = p.to(OPERAND)
        low = (p - high.to(tl.float32)).to(OPERAND)  # 0 in fp32
        added = ()
        for i in tl.static_range(CHUNKS):
            part = tl.dot(high, latents[i], o[i] * shrink, input_precision="ieee")
            if high.dtype == tl.bfloat16:
                part = tl.dot(low, latents[i], part)
            added += (part,)
        o = added

    place = out + (token * H + head) * D
    for i in tl.static_range(CHUNKS):
        channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
        tl.store(place + channel, (o[i] / total).to(out.dtype.element_ty), mask=(head < H) & (channel < D))


def blocks(dtype: torch.dtype, D: int) -> dict[str, object]:
    """What a launch fixes: as many rows at a time as leave the registers room for 16 x 512 sums on every target."""
    chunk = min(128, max(16, triton.next_power_of_2(D)))
    how = {"BLOCK_H": BLOCK_H, "CHUNK": chunk, "CHUNKS": triton.cdiv(D, chunk)}
    if dtype == torch.float32:  # no matrix units: for tests more than for speed
        return how | {"OPERAND": tl.float32, "BLOCK_K": 16, "num_warps": 8}
    return how | {"OPERAND": tl.bfloat16, "BLOCK_K": 32, "num_warps": 4}


def fused_sparse_attention(
    q: Tensor,
    window: Tensor,
    window_indices: Tensor,
    entries: Tensor | None,
    entry_indices: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """[B, S, H, D] in q's dtype: as `sparse_attention` of the reference, without gradients.

    q [B, S, H, D], window [B, W, D] and entries [B, N, D] are all bf16 or all fp32, of D channels that are adjacent,
    made for D up to 512; other dimensions have any stride, so entries may be the filled part of a longer buffer.
    window_indices and entry_indices: both int64 or int32 [B, S, *], in any order, negative where they name nothing.
    sink: bf16 or fp32 [H], finite. Entries and their indices are both None for a layer that has a window alone.
    A token's bits depend on its own rows and indices alone.

    Raises ValueError for shapes, strides, devices, or indices beyond the rows on a CPU; TypeError for dtypes. Indices
    on a GPU aren't waited for: one beyond the rows names nothing there.
    """
    _check(q, window, window_indices, entries, entry_indices, sink)
    B, S, H, D = q.shape
    out = torch.empty((B, S, H, D), dtype=q.dtype, device=q.device)
    window_indices, N, entry_K, entry_strides = window_indices.contiguous(), 0, 0, (0, 0)
    if entries is not None:
        entry_indices = entry_indices.contiguous()
        N, entry_K, entry_strides = entries.shape[1], entry_indices.shape[2], entries.stride()[:2]
    # fmt: off
    # the heads of a token vary fastest: its programs run side by side and find its rows in the cache
    sparse_attention[(B * S * triton.cdiv(H, BLOCK_H),)](
        q, window, window_indices, entries, entry_indices, sink.contiguous(), out,
        S, H, D, window.shape[1], N, window_indices.shape[2], entry_K, float(scale),
        *q.stride()[:3], *window.stride()[:2], *entry_strides, **blocks(q.dtype, D),
    )
    # fmt: on
    return out


def _check(
    q: Tensor,
    window: Tensor,
    window_indices: Tensor,
    entries: Tensor | None,
    entry_indices: Tensor | None,
    sink: Tensor,
) -> None:
    if q.dim() != 4 or q.shape[2] == 0 or q.shape[3] == 0:
        raise ValueError(f"q of shape {list(q.shape)}: expected [B, S, H, D], H and D from 1")
    if q.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"q is {q.dtype}: expected torch.bfloat16 or torch.float32")
    if (entries is None) != (entry_indices is None):
        raise ValueError("entries and entry_indices: expected both or none")
    B, S, H, D = q.shape
    expected = {
        "q": (q, (B, S, H, D), (q.dtype,)),
        "window": (window, (B, "*", D), (q.dtype,)),
        "window_indices": (window_indices, (B, S, "*"), (torch.int64, torch.int32)),
        "entries": (entries, (B, "*", D), (q.dtype,)),
        "entry_indices": (entry_indices, (B, S, "*"), (window_indices.dtype,)),
        "sink": (sink, (H,), (torch.float32, torch.bfloat16)),
    }
    check_operands(expected, ("q", "window", "entries"))
    if q.device.type == "cpu":
        for name, indices, rows in (
            ("window_indices", window_indices, window), ("entry_indices", entry_indices, entries),
        ):  # fmt: skip
            if rows is not None and indices.numel() and int(indices.max()) >= rows.shape[1]:
                raise ValueError(f"{name} up to {int(indices.max())}: expected below {rows.shape[1]}, or negative")


def _builds() -> list[Build]:
    """The attention of V4.1: 64 heads of 512 channels, a window of 128 and 512 entries, or a window alone."""
    of_16 = "H D window_K entry_K q_batch q_token q_head window_batch window_row entries_batch entries_row"
    sizes = dict.fromkeys(of_16.split(), "i32:16") | dict.fromkeys(("S", "W", "N"), "i32")
    builds = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        how = blocks(dtype, 512)
        warps = how.pop("num_warps")
        types = sizes | dict.fromkeys(("q", "window", "entries", "out"), f"*{name}")
        types |= {"window_indices": "*i64", "entry_indices": "*i64", "sink": "*fp32", "scale": "fp32"}
        builds.append(Build(f"sparse_attention_{name}", sparse_attention, types, how, warps))
    alone = dict.fromkeys(("entries", "entry_indices"))
    types = {name: kind for name, kind in builds[0].signature.items() if name not in alone}
    return [*builds, Build("window_attention_bf16", sparse_attention, types, builds[0].constexprs | alone, 4)]


BUILDS = _builds()
