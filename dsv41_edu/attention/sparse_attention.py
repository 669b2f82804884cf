"""Attention of many heads to one latent that is key and value, over a few entries and a sink.

    a_s = scale q_h . c_s                                        s over the entries named, -1 names none
    p_s = exp(a_s - m) / (sum_s exp(a_s - m) + exp(sink_h - m))  m the largest a_s; the sink isn't scaled
    o_h = sum_s p_s c_s                                          where nothing is named, 0

Entries lie in two arrays: the window's latents and the compressed entries. Source: official inference code.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def gather(entries: Tensor, indices: Tensor) -> Tensor:
    """Rows [B, S, K, D] of entries [B, N, D] named by indices, int64 [B, S, K]; -1 gives row 0."""
    return entries[torch.arange(len(entries), device=entries.device).view(-1, 1, 1), indices.clamp(min=0)]


def softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """p [B, S, H, K] of scores, -inf where there is nothing, and sinks [H]."""
    sinks = sink.to(scores.dtype).expand(scores.shape[:-1]).unsqueeze(-1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]


def sparse_attention(
    q: Tensor,
    window: Tensor,
    window_indices: Tensor,
    entries: Tensor | None,
    entry_indices: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """[B, S, H, D] of q [B, S, H, D], window [B, W, D], entries [B, N, D], indices int64 [B, S, *], sink [H].

    No entries and no indices of them for a layer that has a window alone. In at least fp32, returned in q's dtype.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    kv, indices = gather(window, window_indices), window_indices
    if entries is not None:
        kv = torch.cat([kv, gather(entries, entry_indices)], dim=2)
        indices = torch.cat([indices, entry_indices], dim=2)
    kv = kv.to(wide)
    scores = (q.to(wide) * scale @ kv.transpose(-1, -2)).masked_fill((indices < 0).unsqueeze(2), float("-inf"))
    return (softmax_with_sink(scores, sink) @ kv).to(q.dtype)


def named(indices: Tensor, N: int) -> Tensor:
    """Mask bool [B, S, N] of what indices, int64 [B, S, K], name; -1 names nothing."""
    mask = torch.zeros(*indices.shape[:-1], N + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, indices.where(indices >= 0, N), True)[..., :-1]


def banded_attention(
    q: Tensor,
    latents: Tensor,
    W: int,
    entries: Tensor | None,
    entry_indices: Tensor | None,
    sink: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """The same for the first S tokens of a sequence, by products of matrices, and p [B, S, H, N] of the entries.

    latents [B, S, D]: token t sees those of t - W + 1 to t. Queries go in blocks of W, each beside its own and the
    block before it, and meet all entries, with a mask: nothing is copied for each query. The form for prompts and to
    train with.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    S, H = q.shape[1:3]
    pad, blocks = -S % W, -(-S // W)
    q = q.to(wide) * scale
    kv = F.pad(latents.to(wide), (0, 0, W, pad)).unflatten(1, (blocks + 1, W))
    kv = torch.cat([kv[:, :-1], kv[:, 1:]], dim=2)  # [B, blocks, 2W, D]
    near = F.pad(q, (0, 0, 0, 0, 0, pad)).unflatten(1, (blocks, W)).flatten(2, 3) @ kv.transpose(2, 3)
    i, j = torch.arange(W, device=q.device).unsqueeze(1), torch.arange(2 * W, device=q.device)
    first = torch.arange(blocks, device=q.device).view(-1, 1, 1) == 0
    hidden = (j <= i) | (j > i + W) | (first & (j < W))  # [blocks, W, 2W]
    near = near.unflatten(2, (W, H)).masked_fill(hidden.unsqueeze(2), float("-inf")).flatten(1, 2)[:, :S]
    parts = [near, sink.to(wide).expand(*near.shape[:3]).unsqueeze(-1)]
    if entries is not None:
        entries = entries.to(wide)
        far = (q.flatten(1, 2) @ entries.transpose(1, 2)).unflatten(1, (S, H))
        parts.append(far.masked_fill(~named(entry_indices, entries.shape[1]).unsqueeze(2), float("-inf")))
    p = torch.cat(parts, dim=-1).softmax(-1)
    p_near = F.pad(p[..., : 2 * W], (0, 0, 0, 0, 0, pad)).unflatten(1, (blocks, W)).flatten(2, 3)
    o = (p_near @ kv).unflatten(2, (W, H)).flatten(1, 2)[:, :S]
    if entries is None:
        return o.to(latents.dtype), None
    p_far = p[..., 2 * W + 1 :]
    return (o + (p_far.flatten(1, 2) @ entries).unflatten(1, (S, H))).to(latents.dtype), p_far
