"""The indexer's scores of all entries, the hidden ones at -inf, in one kernel.

    score(t, j) = sum_h w_h relu(q_h . k_j)   in fp32, for the entries j < seen(t); -inf for all others

A program has 128 entries (32 in fp32) and up to 16 tokens of one sequence. It reads each key that one of its tokens
sees once, lets the tokens pass one after the other and writes their scores. None of the products, H for each score,
leaves the registers. Where none of its tokens sees an entry it reads `seen` alone, and writes -inf. So the keys are
read once for 16 tokens; a token's q and w, H (D + 1) elements, once for each block of 128 entries where it or one of
its neighbours sees something; S N scores are written.

Each score is summed in the same order wherever its token and entry stand: equal keys have equal scores, and a stable
choice takes the lowest of them. Products of bf16 are exact in fp32. There is no backward: an indexer learns from the
plain form, `index_scores` of `dsv41_edu.attention.indexer`. Sources: V3.2 report 2.1; official inference code.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.launch import tl, triton
from kernels.operands import check_operands

BLOCK_T = 16  # tokens that share what is read of the keys


@triton.jit
def index_scores(
    q, k, w, seen, out, S, H, D, N, q_batch, q_token, q_head, k_batch, k_row,
    OPERAND: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """out fp32 [B, S, N]."""
    batch = tl.program_id(2).to(tl.int64)
    first, start = tl.program_id(0) * BLOCK_T, tl.program_id(1) * BLOCK_N
    token, entry = first + tl.arange(0, BLOCK_T), start + tl.arange(0, BLOCK_N)
    seen += batch * S
    out += batch * S * N + entry
    most = tl.max(tl.load(seen + token, mask=token < S, other=0))
    if start >= most:
        hidden = tl.full((BLOCK_T, BLOCK_N), float("-inf"), tl.float32)
        place = out[None, :] + token.to(tl.int64)[:, None] * N
        tl.store(place, hidden, mask=(token < S)[:, None] & (entry < N)[None, :])
        return

    k += batch * k_batch + entry.to(tl.int64)[:, None] * k_row
    read = ((entry < N) & (entry < most))[:, None]
    keys = ()
    for i in tl.static_range(CHUNKS):
        channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
        keys += (tl.load(k + channel, mask=read & (channel < D), other=0.0).to(OPERAND),)
    head = tl.arange(0, HEADS)
    q += batch * q_batch + head.to(tl.int64)[:, None] * q_head
    w += batch * S * H + head
    for t in range(first, min(first + BLOCK_T, S)):
        t = tl.cast(t, tl.int64)
        products = tl.zeros((BLOCK_N, HEADS), tl.float32)
        for i in tl.static_range(CHUNKS):
            channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
            query = tl.load(q + t * q_token + channel, mask=(head < H)[:, None] & (channel < D), other=0.0)
            products = tl.dot(keys[i], tl.trans(query.to(OPERAND)), products, input_precision="ieee")
        weights = tl.load(w + t * H, mask=head < H, other=0.0).to(tl.float32)
        scores = tl.sum(tl.where(products < 0, 0.0, products) * weights[None, :], 1)  # NaN stays NaN
        scores = tl.where(entry < tl.load(seen + t), scores, float("-inf"))
        tl.store(out + t * N, scores, mask=entry < N)


def blocks(dtype: torch.dtype, H: int, D: int) -> dict[str, object]:
    """What a launch fixes."""
    chunk = min(128, max(16, triton.next_power_of_2(D)))
    how = {"BLOCK_T": BLOCK_T, "HEADS": max(16, triton.next_power_of_2(H))}
    how |= {"CHUNK": chunk, "CHUNKS": triton.cdiv(D, chunk)}
    if dtype == torch.float32:  # no matrix units: for tests more than for speed
        return how | {"OPERAND": tl.float32, "BLOCK_N": 32, "num_warps": 8}
    return how | {"OPERAND": tl.bfloat16, "BLOCK_N": 128, "num_warps": 4}


def fused_index_scores(q: Tensor, k: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    """fp32 [B, S, N]: as `hide(index_scores(q, k, w), seen)` of the reference, without gradients.

    q [B, S, H, D] and k [B, N, D] are both bf16 or both fp32, of channels that are adjacent, made for H up to 64 and
    D up to 128; other dimensions have any stride, so k may be the filled part of a longer buffer. w: bf16 or fp32
    [B, S, H]. seen: int64 or int32 [B, S], entries from 0 on that each token sees. A token's bits depend on the keys
    and on itself alone.

    Raises ValueError for shapes, strides, devices; TypeError for dtypes.
    """
    if q.dim() != 4 or q.shape[2] == 0 or q.shape[3] == 0:
        raise ValueError(f"q of shape {list(q.shape)}: expected [B, S, H, D], H and D from 1")
    if k.dim() != 3:
        raise ValueError(f"k of shape {list(k.shape)}: expected [B, N, D]")
    (B, S, H, D), N = q.shape, k.shape[1]
    floats, integers = (torch.bfloat16, torch.float32), (torch.int64, torch.int32)
    expected = {"q": (q, (B, S, H, D), floats), "k": (k, (B, N, D), (q.dtype,))}
    expected |= {"w": (w, (B, S, H), floats), "seen": (seen, (B, S), integers)}
    check_operands(expected, ("q", "k"))
    out = torch.empty((B, S, N), dtype=torch.float32, device=q.device)
    how = blocks(q.dtype, H, D)
    # tokens vary fastest: programs side by side find their keys in the cache
    index_scores[(triton.cdiv(S, BLOCK_T), triton.cdiv(N, how["BLOCK_N"]), B)](
        q, k, w.contiguous(), seen.contiguous(), out, S, H, D, N, *q.stride()[:3], *k.stride()[:2], **how
    )
    return out


def _builds() -> list[Build]:
    """The indexer of V4.1: 32 heads of 128 channels, up to 2^20 entries."""
    sizes = dict.fromkeys("H D q_batch q_token q_head k_batch k_row".split(), "i32:16") | {"S": "i32", "N": "i32"}
    builds = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        how = blocks(dtype, 32, 128)
        warps = how.pop("num_warps")
        types = sizes | dict.fromkeys(("q", "k", "w"), f"*{name}") | {"seen": "*i64", "out": "*fp32"}
        builds.append(Build(f"index_scores_{name}", index_scores, types, how, warps))
    return builds


BUILDS = _builds()
