"""Attention of many heads to one latent that is key and value, over a few entries and a sink.

    a_s = scale q_h . c_s                                        s over the entries named, -1 names none
    p_s = exp(a_s - m) / (sum_s exp(a_s - m) + exp(sink_h - m))  m the largest a_s; the sink isn't scaled
    o_h = sum_s p_s c_s                                          where nothing is named, 0

Entries lie in two arrays: the window's latents and the compressed entries. Source: official inference code.
"""

import torch
from torch import Tensor


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
    scores = (q.to(wide) @ kv.transpose(-1, -2) * scale).masked_fill((indices < 0).unsqueeze(2), float("-inf"))
    return (softmax_with_sink(scores, sink) @ kv).to(q.dtype)


def named(indices: Tensor, N: int) -> Tensor:
    """Mask bool [B, S, N] of what indices, int64 [B, S, K], name; -1 names nothing."""
    mask = torch.zeros(*indices.shape[:-1], N + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, indices.where(indices >= 0, N), True)[..., :-1]


def masked_attention(
    q: Tensor,
    window: Tensor,
    window_indices: Tensor,
    entries: Tensor | None,
    entry_indices: Tensor | None,
    sink: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same by two products of matrices over all entries, and p [B, S, H, W + N]: for many queries at once.

    The form to train with: nothing is copied for each query, and an index's teacher needs p.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    kv, mask = window, named(window_indices, window.shape[1])
    if entries is not None:
        kv = torch.cat([kv, entries], dim=1)
        mask = torch.cat([mask, named(entry_indices, entries.shape[1])], dim=2)
    kv, S, H = kv.to(wide), q.shape[1], q.shape[2]
    scores = (q.to(wide).flatten(1, 2) @ kv.transpose(1, 2) * scale).unflatten(1, (S, H))
    p = softmax_with_sink(scores.masked_fill(~mask.unsqueeze(2), float("-inf")), sink)
    return (p.flatten(1, 2) @ kv).unflatten(1, (S, H)).to(q.dtype), p
