"""The attention of one layer: low-rank queries, one latent as key and value, a window, and what others compressed.

    qr  = q_norm(wq_a x)             q = rotate(wq_b qr)          [T, H, D]
    c   = rotate(kv_norm(wkv x))     into the layer's window      [T, D]
    o   = attention(q; window, chosen entries, sink)              scale D^-1/2
    z_g = wo_a[g] rotate_back(o)_g   y = wo_b z                   heads in groups, each with its own rows of wo_a

A layer's role is by its id: a source of entries has a `compressor`; an index layer an `indexer`; any other reads the
entries and the choice of the nearest source below it. Sources: V4.1 report 2.2, 2.3; official inference code.
"""

import torch
from torch import Tensor, nn

from dsv41_edu.attention.cache import Chunk
from dsv41_edu.attention.compressor import Compressor
from dsv41_edu.attention.indexer import Indexer, candidate_blocks, hide, index_scores, select
from dsv41_edu.attention.rope import rotate
from dsv41_edu.attention.sparse_attention import banded_attention, sparse_attention
from dsv41_edu.config import ModelConfig
from dsv41_edu.quantization import indexer_round_trip, latent_round_trip, window_round_trip


def nearest(ids: tuple[int, ...], layer: int) -> int | None:
    """The largest of the ids that isn't above the layer, if any."""
    return max((i for i in ids if i <= layer), default=None)


def role(config: ModelConfig, layer: int) -> str:
    """ "window", "full" (makes entries and chooses), "reindex" (chooses among another's) or "reuse"."""
    if config.compress_ratios[layer] == 0:
        return "window"
    if layer in config.kv_source_layer_ids:
        return "full"
    return "reindex" if layer in config.index_source_layer_ids else "reuse"


def fuse(q: Tensor) -> bool:
    """Whether the kernels take these queries: on a GPU, in dtypes they know, and nobody needs their gradients."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float32) and not torch.is_grad_enabled()


def visible_scores(q: Tensor, k: Tensor, w: Tensor, seen: Tensor) -> Tensor:
    """`index_scores` of the entries seen, -inf for the others."""
    if fuse(q):
        from kernels.index_scores import fused_index_scores

        return fused_index_scores(q, k, w, seen)
    return hide(index_scores(q, k, w), seen)


class Attention(nn.Module):
    """By a config and a layer's id; the drafter's block i is layer num_hidden_layers + i. Names as in checkpoints."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        c, self.config, self.layer, self.ratio = config, config, layer, config.compress_ratios[layer]
        d, H, D, eps = c.hidden_size, c.num_attention_heads, c.head_dim, c.rms_norm_eps
        self.wq_a = nn.Linear(d, c.q_lora_rank, bias=False)
        self.q_norm = nn.RMSNorm(c.q_lora_rank, eps)
        self.wq_b = nn.Linear(c.q_lora_rank, H * D, bias=False)
        self.wkv = nn.Linear(d, D, bias=False)
        self.kv_norm = nn.RMSNorm(D, eps)
        self.wo_a = nn.Linear(H * D // c.o_groups, c.o_groups * c.o_lora_rank, bias=False)
        self.wo_b = nn.Linear(c.o_groups * c.o_lora_rank, d, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(H))
        self.compressor = self.indexer = None
        self.source = self.index_source = None
        if self.ratio:
            self.source = nearest(c.kv_source_layer_ids, layer)
            self.index_source = nearest(c.index_source_layer_ids, layer)
        if role(c, layer) == "full":
            self.compressor = Compressor(d, D, self.ratio, eps)
        if role(c, layer) in ("full", "reindex"):
            full = self.compressor is not None
            self.indexer = Indexer(d, c.q_lora_rank, D, c.index_n_heads, c.index_head_dim, eps, full)

    def forward(self, x: Tensor, chunk: Chunk) -> Tensor:
        """[B, S, d] of the chunk's normed input x [B, S, d]."""
        turn = chunk.turn(self.ratio)
        qr = self.q_norm(self.wq_a(x))
        q = rotate(self.wq_b(qr).unflatten(-1, (self.config.num_attention_heads, -1)), turn.unsqueeze(-2))
        latents = self.latent(x, turn, chunk.round_trips)
        chunk.latents[self.layer] = chunk.start, latents
        if self.compressor is not None and self.layer not in chunk.entries:
            self.publish(x, chunk)
        if self.indexer is not None:
            chunk.indices[self.layer] = self.choose(x, qr, turn, chunk)
        o = self.attend(q, latents, chunk)
        return self.project(rotate(o, turn.conj().unsqueeze(-2)))

    def latent(self, x: Tensor, turn: Tensor, round_trips: bool = False) -> Tensor:
        """The window's latents [B, S, D] of x, also of a drafter's context."""
        c = rotate(self.kv_norm(self.wkv(x)), turn)
        return window_round_trip(c) if round_trips else c

    def publish(self, x: Tensor, chunk: Chunk) -> None:
        """Make the entries and index keys that this layer and those after it read."""
        projected = self.compressor.project(x)
        latents = self.compressor(projected, *chunk.open_group(self.layer))
        first = (chunk.start // self.ratio).unsqueeze(1)
        groups = first + torch.arange(latents.shape[1], device=first.device)
        turn = chunk.turn(self.ratio, groups * self.ratio)
        entries, keys = rotate(latents, turn), self.indexer.keys(latents, turn)
        if chunk.round_trips:
            entries, keys = latent_round_trip(entries), indexer_round_trip(keys)
        chunk.publish(self.layer, projected, entries, keys)

    def choose(self, x: Tensor, qr: Tensor, turn: Tensor, chunk: Chunk) -> Tensor:
        """The entries that each token reads, int64 [B, S, K]."""
        c, seen = self.config, (chunk.positions + 1) // self.ratio
        q, w = self.indexer.queries(x, qr, turn)
        if chunk.round_trips:
            q = indexer_round_trip(q)
        scores = chunk.scores[self.layer] = visible_scores(q, chunk.keys[self.source], w, seen)
        if chunk.dense:
            every = torch.arange(scores.shape[-1], device=seen.device)
            return torch.where(every < seen.unsqueeze(-1), every, -1)
        if self.layer == c.candidate_source_layer_id:
            chunk.candidates = candidate_blocks(scores, seen, c.candidate_topk_blocks, c.candidate_block_size)
        elif self.source == c.candidate_source_layer_id:
            scores = scores.masked_fill(~chunk.candidates, float("-inf"))
        return select(scores.detach(), c.index_topk)

    def attend(self, q: Tensor, latents: Tensor, chunk: Chunk) -> Tensor:
        """[B, S, H, D], not yet turned back."""
        entries = indices = None
        if self.ratio:
            entries, indices = chunk.entries[self.source], chunk.indices[self.index_source]
        of_entries = entries, indices, self.attn_sink, self.config.head_dim**-0.5
        if fuse(q):
            from kernels.sparse_attention import fused_sparse_attention

            return fused_sparse_attention(q, *chunk.window(self.layer, latents), *of_entries)
        if not chunk.fresh:
            return sparse_attention(q, *chunk.window(self.layer, latents), *of_entries)
        o, p = banded_attention(q, latents, self.config.sliding_window, *of_entries)
        if chunk.teach and self.ratio:
            chunk.mass[self.index_source] = chunk.mass.get(self.index_source, 0) + p.detach().sum(2)
        return o

    def project(self, o: Tensor) -> Tensor:
        """[B, S, d] of the heads' outputs o [B, S, H, D]: a group of heads at a time, then all together."""
        groups = self.config.o_groups
        o, w = o.flatten(-2).unflatten(-1, (groups, -1)), self.wo_a.weight.unflatten(0, (groups, -1))
        return self.wo_b(torch.einsum("bsgi,gri->bsgr", o, w).flatten(-2))
