"""The indexer: which compressed entries a query reads.

    k_j  = k_norm(wk g_j)                     g_j: the latent before its rotation
    q_h  = wq_b qr                            qr: the attention's low-rank query
    w_h  = weights_proj x * D^-0.5 H^-0.5
    score(t, j) = sum_h w_h relu(q_h . k_j)   for the entries that t sees
    chosen(t)   = the top_k largest, the lowest j first of equals, in rising order

q and k are rotated as the attention's. The candidate source also cuts the entries into blocks, each worth its largest
score, keeps the best (the newest visible one always), and later index layers choose inside them.
The language-model loss has no gradient for a choice, so what the indexer reads is detached: it learns from a loss of
its own. Sources: V3.2 report 2.1; V4.1 report 2.3; official inference code.
"""

import torch
from torch import Tensor, nn

from dsv41_edu.attention.rope import rotate


def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Scores [B, S, N], in q's dtype but at least fp32, of q [B, S, H, D], k [B, N, D], w [B, S, H]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, w = q.to(wide), k.to(wide), w.to(wide)
    products = q.flatten(1, 2) @ k.transpose(1, 2)  # [B, S H, N]
    return (w.unsqueeze(2) @ products.relu().unflatten(1, q.shape[1:3])).squeeze(2)


def hide(scores: Tensor, seen: Tensor) -> Tensor:
    """Scores [B, S, N] with -inf from entry `seen`, int64 [B, S], on."""
    return scores.masked_fill(torch.arange(scores.shape[-1], device=seen.device) >= seen.unsqueeze(-1), float("-inf"))


def select(scores: Tensor, top_k: int) -> Tensor:
    """The chosen entries, int64 [B, S, min(top_k, N)], rising, -1 after them where fewer have a score above -inf."""
    best = scores.sort(dim=-1, descending=True, stable=True)
    N = scores.shape[-1]
    chosen = best.indices[..., :top_k].masked_fill(best.values[..., :top_k].isneginf(), N).sort(dim=-1).values
    return chosen.masked_fill(chosen == N, -1)


def candidate_blocks(scores: Tensor, seen: Tensor, blocks: int, size: int) -> Tensor:
    """Mask bool [B, S, N] of the entries in the best `blocks` blocks of `size`; the newest one seen is among them.

    scores [B, S, N], -inf where hidden; seen int64 [B, S]: entries from 0 that the query sees.
    """
    N = scores.shape[-1]
    worth = nn.functional.pad(scores, (0, -N % size), value=float("-inf")).unflatten(-1, (-1, size)).amax(-1)
    newest = (seen - 1).unsqueeze(-1) // size  # -1 where nothing is seen: no block
    worth = worth.masked_fill(torch.arange(worth.shape[-1], device=seen.device) == newest, float("inf"))
    chosen = select(worth, blocks)
    kept = torch.zeros(*worth.shape[:-1], worth.shape[-1] + 1, dtype=torch.bool, device=seen.device)
    kept.scatter_(-1, chosen.where(chosen >= 0, worth.shape[-1]), True)  # the last one takes the -1s
    return kept[..., :-1].repeat_interleave(size, dim=-1)[..., :N]


class Indexer(nn.Module):
    """`wq_b` [H D, rank] and `weights_proj` [H, d] to ask; where entries are made also `wk` [D, latent], `k_norm`."""

    def __init__(self, d: int, rank: int, latent: int, heads: int, width: int, norm_eps: float, makes_keys: bool):
        super().__init__()
        self.heads, self.width = heads, width
        self.wq_b = nn.Linear(rank, heads * width, bias=False)
        self.weights_proj = nn.Linear(d, heads, bias=False)
        if makes_keys:
            self.wk = nn.Linear(latent, width, bias=False)
            self.k_norm = nn.RMSNorm(width, norm_eps)

    def keys(self, latents: Tensor, turn: Tensor) -> Tensor:
        """[B, G, D] of latents [B, G, latent] before their rotation; turn [B, G, pairs]."""
        return rotate(self.k_norm(self.wk(latents.detach())), turn)

    def queries(self, x: Tensor, qr: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, S, H, D] and w [B, S, H] of x [B, S, d], qr [B, S, rank], turn [B, S, pairs]."""
        q = self.wq_b(qr.detach()).unflatten(-1, (self.heads, self.width))
        w = self.weights_proj(x.detach()) * (self.width**-0.5 * self.heads**-0.5)
        return rotate(q, turn.unsqueeze(-2)), w
