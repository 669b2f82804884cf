"""DeepSeek-V4.1-Flash from its config: embed, four streams, the layers, one norm, the head.

    X = the token's embedding in every stream
    for each layer: X = layer(X)
    logits = head norm(sum_c pre_c X_c)            pre: what the last seam predicted

A causal encoder-decoder: every layer from `config.decoder_start` on reads entries made by that layer alone, so a
prompt needs the layers below it, and of those above only what the last tokens' windows hold. `replay` runs just that.
Names are the checkpoint's; on device "meta" the model of 763 billion parameters takes no memory.
Sources: V4.1 report 2; official inference code.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.attention.cache import Cache, Chunk
from dsv41_edu.config import ModelConfig
from dsv41_edu.drafter import Draft, Drafter
from dsv41_edu.engram.hashing import WALL, NgramHash
from dsv41_edu.layer import Layer, Residual, first_pass
from dsv41_edu.mhc.seam import single_pass
from dsv41_edu.vision import Aligner, Vision, merged, span


class Run(NamedTuple):
    """What `Transformer.run` returns. S' is S, or the replayed tokens alone."""

    hidden: Tensor  # [B, S', d]: collapsed and normed, the head's input
    last: Tensor  # int64 [B]: where in S' each row's last token stands
    chunk: Chunk
    features: Tensor | None  # [B, S', targets * d]: the streams' mean entering the drafter's target layers


class Transformer(nn.Module):
    """The backbone with its vision tower, and `mtp`, the drafter, or None."""

    def __init__(
        self,
        config: ModelConfig,
        token_map: Tensor | None = None,
        round_trips: bool = False,
        device: torch.device | str | None = None,
        drafter: bool = True,
    ):
        """token_map: compressed ids, integers [V], of the token ids; needed to run. round_trips: round as a deployed
        cache does. drafter: with the blocks that draft, if the config has some. Raises ValueError for another
        generation's config or a map that doesn't fit it.
        """
        super().__init__()
        c = self.config = config
        if c.model_type != "deepseek_v41":
            raise ValueError(f"model_type = {c.model_type!r}: expected 'deepseek_v41'")
        self.round_trips = round_trips
        with torch.device(device or "cpu"):
            self.embed = nn.Embedding(c.vocab_size, c.hidden_size)
            self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
            self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
            self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
            self.mtp = Drafter(c) if drafter and c.num_nextn_predict_layers else None
            if c.vision_config is not None:
                self.vision, self.aligner = Vision(c.vision_config), Aligner(c.vision_config, c.hidden_size)
                for name in ("image_start", "image_newline", "image_end"):
                    self.register_parameter(name, nn.Parameter(torch.zeros(c.hidden_size)))
        self.token_map = self.hasher = None
        self.seams = first_pass, single_pass
        if token_map is not None:
            self.set_token_map(token_map)

    def set_token_map(self, token_map: Tensor) -> None:
        """Compressed ids, integers [V], of the token ids. Raises ValueError for another size or ids out of range."""
        c = self.config
        if token_map.is_floating_point() or token_map.shape != (c.vocab_size,):
            shape = list(token_map.shape)
            raise ValueError(f"token_map {token_map.dtype} of shape {shape}: expected integers [{c.vocab_size}]")
        size = c.engram_compressed_vocab_size
        if not 0 <= int(token_map.min()) <= int(token_map.max()) < size:
            raise ValueError(f"token_map from {token_map.min()} to {token_map.max()}: expected 0 to {size - 1}")
        self.token_map = token_map.to(torch.int64)
        self.hasher = NgramHash.of(c, int(self.token_map[c.engram_pad_token_id]))

    def compile_seams(self) -> None:
        """Let torch.compile make one loop of what lies between two sublayers: on CPU twice as fast, to rounding."""
        self.seams = tuple(torch.compile(f, dynamic=False) for f in (first_pass, single_pass))

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding, which the streams and the cache share."""
        return self.embed.weight.dtype

    def cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for this model."""
        return Cache(self.config, batch, capacity, self.dtype, self.embed.weight.device)

    def image_rows(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """What stands in place of the embeddings of an image's span, [span, d]; patches [rows columns, 3, p, p].

        Raises ValueError for another number or size of patches, or a model without vision.
        """
        if self.config.vision_config is None:
            raise ValueError("vision_config = None: expected a config with a vision tower")
        h, w = merged(self.config.vision_config, rows, columns)
        tokens = self.aligner(self.vision(patches, rows, columns), rows, columns)
        return span(tokens, h, w, self.image_start, self.image_newline, self.image_end)

    def check(self, ids: Tensor, lengths: Tensor | None, image_rows: Tensor | None) -> None:
        """Raises TypeError for ids that aren't int64; ValueError for shapes, ids, lengths or rows that don't fit."""
        c = self.config
        if ids.dtype != torch.int64:
            raise TypeError(f"ids are {ids.dtype}: expected torch.int64")
        if ids.dim() != 2 or not ids.numel():
            raise ValueError(f"ids of shape {list(ids.shape)}: expected [B, S], one token at least")
        if not 0 <= int(ids.min()) <= int(ids.max()) < c.vocab_size:
            raise ValueError(f"ids from {ids.min()} to {ids.max()}: expected 0 to {c.vocab_size - 1}")
        if lengths is not None:
            fits = lengths.dtype == torch.int64 and lengths.shape == ids.shape[:1]
            if not fits or not 1 <= int(lengths.min()) <= int(lengths.max()) <= ids.shape[1]:
                raise ValueError(
                    f"lengths = {lengths.tolist()}: expected {len(ids)} of int64, from 1 to {ids.shape[1]}"
                )
        if self.token_map is None:
            raise ValueError("token_map: expected the compressed ids of the tokens, without them no n-gram has rows")
        images = 0 if c.image_token_id is None else int((ids == c.image_token_id).sum())
        given = [0, c.hidden_size] if image_rows is None else list(image_rows.shape)
        if given != [images, c.hidden_size]:
            raise ValueError(
                f"image_rows of shape {given}: expected {[images, c.hidden_size]}, "
                f"one for each token {c.image_token_id}"
            )

    def run(
        self,
        ids: Tensor,
        cache: Cache | None = None,
        lengths: Tensor | None = None,
        image_rows: Tensor | None = None,
        replay: bool = False,
        features: bool = False,
        dense: bool = False,
        teach: bool = False,
    ) -> Run:
        """New tokens, int64 [B, S], after those of the cache, which is left to `Cache.commit`.

        lengths: int64 [B], the tokens that each row really has; what follows them is ignored. image_rows: [images'
        tokens, d], in place of the embeddings of `image_token_id`. replay: run the decoder on the last window's
        tokens alone. features: what a drafter reads, which it then remembers. dense, teach: see `Chunk`. Raises what
        `check` raises, and ValueError for a replay or a lesson that doesn't begin a sequence.
        """
        c, device = self.config, ids.device
        self.check(ids, lengths, image_rows)
        lengths = torch.full((len(ids),), ids.shape[1], device=device) if lengths is None else lengths
        chunk = Chunk.of(
            c, ids.shape, self.dtype, device, cache, round_trips=self.round_trips, dense=dense, teach=teach
        )
        if replay and not chunk.fresh:
            raise ValueError("replay: expected an empty cache, the decoder's windows begin with the replayed tokens")
        if teach and not chunk.fresh:
            raise ValueError("teach: expected an empty cache, an indexer learns from whole sequences")
        x, image_mask = self.embed(ids), None
        if image_rows is not None:
            image_mask = ids == c.image_token_id
            x = x.masked_scatter(image_mask.unsqueeze(-1), image_rows.to(x.dtype))
        rows = self.engram_rows(ids, image_mask, chunk)
        residual = Residual(x, c.hc_mult, (c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps), self.seams)
        means, last, whole = [], lengths - 1, chunk
        for i, layer in enumerate(self.layers):
            if layer.engram is not None:
                layer.add_memory(residual, rows[i], image_mask)
            if replay and i == c.decoder_start:
                layer.attn.publish(layer.attn_norm(residual.collapsed()), whole)
                chunk = whole.tail(lengths, min(c.sliding_window, ids.shape[1]))
                at = chunk.positions - whole.start.unsqueeze(1)
                last = lengths.clamp(max=at.shape[1]) - 1
                residual.take(at)
                each = torch.arange(len(at), device=device).unsqueeze(1)
                rows = {layer: r[each, at] for layer, r in rows.items()}
                means = [m[each, at] for m in means]
                image_mask = None if image_mask is None else image_mask.gather(1, at)
            if features and i in c.dspark_target_layer_ids:
                means.append(residual.streams.mean(-2))
            residual = layer(residual, chunk, image_mask)
        means = torch.cat(means, -1) if means else None
        if features and self.mtp is not None:
            self.mtp.remember(means, chunk)
        return Run(self.norm(residual.collapsed()), last, whole, means)

    def draft(
        self,
        tokens: Tensor,
        cache: Cache,
        temperature: float = 0.0,
        u: Tensor | None = None,
        logits: Callable[[Tensor], Tensor] | None = None,
    ) -> Draft:
        """What the drafter proposes after `tokens`, int64 [B], which the cache doesn't have yet; see `Drafter`.

        The cache must have been filled by runs with `features`. The likeliest tokens at temperature 0; above it drawn
        by u, fp64 [B, g] in [0, 1). logits: of hidden states, by default `self.logits`.
        """
        given = tokens, cache, self.embed, logits or self.logits, temperature, u
        return self.mtp(*given, self.seams, self.round_trips)

    def engram_rows(self, ids: Tensor, image_mask: Tensor | None, chunk: Chunk) -> dict[int, Tensor]:
        """Rows int64 [B, S, columns] of each Engram layer: known before the first layer runs."""
        compressed = self.token_map.to(ids.device)[ids]
        history = None if chunk.cache is None else chunk.cache.history
        text_mask = None if image_mask is None else ~image_mask
        rows, _ = self.hasher(compressed, text_mask, history)
        chunk.compressed = compressed if image_mask is None else compressed.masked_fill(image_mask, WALL)
        return dict(zip(self.hasher.layers, rows.unbind(2), strict=True))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of [..., d], in fp32 (fp64 for fp64)."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return F.linear(hidden.to(wide), self.head.weight.to(wide))

    def forward(
        self,
        ids: Tensor,
        cache: Cache | None = None,
        lengths: Tensor | None = None,
        image_rows: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V] of ids, int64 [B, S]; where there is a cache the tokens are committed to it. As `run`."""
        run = self.run(ids, cache, lengths, image_rows)
        if cache is not None:
            cache.commit(run.chunk, run.last + 1)
        return self.logits(run.hidden)
