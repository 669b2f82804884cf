"""What earlier tokens leave for later ones, and the chunk of new tokens that reads it.

    window of a layer        the latents of the last W positions, a ring: position p stands in slot p mod W
    entries of a source      one latent, and one index key, for each whole group of `ratio` tokens, in order
    open group of a source   what its tokens brought, until it is whole

A forward pass leaves all this as it found it (new entries go behind the last whole group, where nobody looks), and
`commit` makes the first so many of its tokens part of the past: as many as a verifier accepts, other numbers in other
rows. So a chunk of prompt, one token and a block of drafts are one case. Source: V4.1 report 2.3, 3.2.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv41_edu.attention.rope import layer_frequencies, turns
from dsv41_edu.config import ModelConfig


class Cache:
    """Room for `batch` sequences of up to `capacity` tokens; `lengths`, int64 [B], says how many are committed."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        """Raises ValueError for a batch or capacity below 1, or a capacity beyond what the config allows."""
        if batch < 1 or not 1 <= capacity <= config.max_position_embeddings:
            raise ValueError(
                f"batch = {batch}, capacity = {capacity}: expected at least one sequence, "
                f"and 1 to {config.max_position_embeddings} tokens"
            )
        c, at = config, {"dtype": dtype, "device": device}
        self.capacity, self.ratios = capacity, {s: c.compress_ratios[s] for s in c.kv_source_layer_ids}
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.windows = [torch.zeros(batch, c.sliding_window, c.head_dim, **at) for _ in c.compress_ratios]
        self.entries, self.keys, self.open = {}, {}, {}
        for source, r in self.ratios.items():
            self.entries[source] = torch.zeros(batch, capacity // r + 1, c.head_dim, **at)
            self.keys[source] = torch.zeros(batch, capacity // r + 1, c.index_head_dim, **at)
            wide = torch.promote_types(dtype, torch.float32)
            self.open[source] = torch.zeros(batch, r - 1, 2, c.head_dim, dtype=wide, device=device)
        # compressed ids, -1 for what no n-gram reaches across
        self.history = torch.full((batch, c.engram_max_ngram_size - 1), -1, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held here, whatever the lengths are."""
        parts = [self.lengths, self.history, *self.windows]
        return sum(t.nbytes for t in (*parts, *self.entries.values(), *self.keys.values(), *self.open.values()))

    def write(self, source: int, start: Tensor, entries: Tensor, keys: Tensor) -> None:
        """Put what a source made, [B, G, *] each, in place of its groups from start // ratio on, start int64 [B]."""
        rows = torch.arange(len(start), device=start.device).unsqueeze(1)
        at = (start // self.ratios[source]).unsqueeze(1) + torch.arange(entries.shape[1], device=start.device)
        for held, new in ((self.entries[source], entries), (self.keys[source], keys)):
            held[rows, at] = new.to(held.dtype)

    def commit(self, chunk: "Chunk", counts: Tensor) -> None:
        """Keep the first counts[b] tokens of row b of a chunk that was run on this cache, int64 [B]. 0 keeps none.

        Of several chunks that were run from here any one may be kept. Raises ValueError for a count that the chunk
        doesn't have, a part of a replayed prompt, or a chunk that began elsewhere.
        """
        if chunk.cache is not self or not torch.equal(chunk.start, self.lengths):
            raise ValueError(
                f"chunk that starts at {chunk.start.tolist()}: expected one that was run on this cache, "
                f"after its {self.lengths.tolist()} tokens"
            )
        S = chunk.positions.shape[1]
        fits = counts.shape == self.lengths.shape and not counts.is_floating_point()
        if not fits or counts.min() < 0 or counts.max() > S:
            raise ValueError(f"counts = {counts.tolist()}: expected {len(self.lengths)} integers from 0 to {S}")
        end, rows = self.lengths + counts, torch.arange(len(counts), device=counts.device).unsqueeze(1)
        for start, latents in chunk.latents.values():
            stop = start + latents.shape[1]
            if ((end > stop) | (end < stop) & (start > chunk.start)).any():
                raise ValueError(f"counts = {counts.tolist()}: expected the whole prompt, its end alone was replayed")
        for source, made in chunk.made.items():
            self.write(source, chunk.start, *made)
        for layer, (start, latents) in chunk.latents.items():
            ring = self.windows[layer]
            new = ring_positions(end, ring.shape[1]) - start.unsqueeze(1)  # place in the chunk, or older
            fresh = latents[rows, new.clamp(0, latents.shape[1] - 1)]
            self.windows[layer] = torch.where((new >= 0).unsqueeze(-1), fresh, ring)
        for source, projected in chunk.projected.items():
            r = self.ratios[source]
            if r == 1:
                continue
            both = torch.cat([self.open[source], projected], dim=1)
            place = torch.arange(r - 1, device=counts.device)
            # where the group open at `end` began, counted in the chunk; r - 1 tokens stand before it in `both`
            begins = (end // r * r - self.lengths).unsqueeze(1) + place
            phase = (self.lengths % r).unsqueeze(1)
            at = torch.where(begins >= 0, begins + r - 1, begins + phase)
            self.open[source] = both[rows, at.clamp(0, both.shape[1] - 1)]
        if chunk.compressed is not None:
            long = torch.cat([self.history, chunk.compressed], dim=1)
            self.history = long[rows, counts.unsqueeze(1) + torch.arange(self.history.shape[1], device=counts.device)]
        self.lengths = end


def ring_positions(end: Tensor, W: int) -> Tensor:
    """The position in each slot, int64 [B, W], of a ring into which positions below end [B] went; negative: none."""
    last = (end - 1).unsqueeze(1)
    return last - (last - torch.arange(W, device=end.device)) % W


@dataclass
class Chunk:
    """The tokens of one forward pass, what the layers tell each other about them, and what a commit will need.

    start int64 [B]: the position of each row's first token. positions int64 [B, S].
    """

    config: ModelConfig
    start: Tensor
    positions: Tensor
    dtype: torch.dtype
    cache: Cache | None = None
    round_trips: bool = False  # the values that a deployed cache would give back
    dense: bool = False  # read every entry that a token sees, as in the warm-up of an indexer
    teach: bool = False  # gather what the indexer is to learn
    fresh: bool = True  # no window reaches back before the chunk: a sequence's first tokens, or a replay
    entries: dict[int, Tensor] = field(default_factory=dict)  # by source layer [B, N, D]
    keys: dict[int, Tensor] = field(default_factory=dict)
    indices: dict[int, Tensor] = field(default_factory=dict)  # by index layer [B, S, K]
    scores: dict[int, Tensor] = field(default_factory=dict)  # by index layer [B, S, N], -inf where hidden
    mass: dict[int, Tensor] = field(default_factory=dict)  # by index layer: attention on entries, heads summed
    candidates: Tensor | None = None
    latents: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by layer: start, [B, S, D]
    projected: dict[int, Tensor] = field(default_factory=dict)  # by source layer
    compressed: Tensor | None = None  # ids, -1 for images
    turned: dict[int, Tensor] = field(default_factory=dict)  # by ratio, and below: the same in every layer
    seen: Tensor | None = None
    made: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by source layer: new entries and keys

    @classmethod
    def of(cls, config: ModelConfig, shape: torch.Size, dtype, device, cache: Cache | None = None, **options):
        """New tokens [B, S], after those of the cache. Raises ValueError where they don't fit into it."""
        B, S = shape
        start = torch.zeros(B, dtype=torch.int64, device=device) if cache is None else cache.lengths
        if cache is not None and (len(start) != B or int(start.max()) + S > cache.capacity):
            raise ValueError(
                f"{B} x {S} tokens after {start.tolist()}: expected {len(start)} rows and at most "
                f"{cache.capacity} tokens in each"
            )
        positions = start.unsqueeze(1) + torch.arange(S, device=device)
        return cls(config, start, positions, dtype, cache, fresh=not bool(start.any()), **options)

    def tail(self, lengths: Tensor, size: int) -> "Chunk":
        """The last `size` of each row's `lengths` tokens, as a chunk that sees no window before itself.

        It shares what the source layers published. Rows shorter than that start at their first token.
        """
        start = self.start + (lengths - size).clamp(min=0)
        positions = start.unsqueeze(1) + torch.arange(size, device=start.device)
        return Chunk(
            self.config, start, positions, self.dtype, None, self.round_trips, self.dense, self.teach, True,
            self.entries, self.keys, self.indices, self.scores, self.mass, None,
            self.latents, self.projected, self.compressed,
        )  # fmt: skip

    def turn(self, ratio: int, positions: Tensor | None = None) -> Tensor:
        """Rotations, complex [B, S, pairs], of a layer of this ratio; by default at the chunk's own positions."""
        if positions is not None:
            return turns(positions, layer_frequencies(self.config, ratio), self.dtype)
        if ratio not in self.turned:
            self.turned[ratio] = self.turn(ratio, self.positions)
        return self.turned[ratio]

    def window(self, layer: int, latents: Tensor) -> tuple[Tensor, Tensor]:
        """The ring and the chunk's own latents [B, S, D], as one array [B, W + S, D], and what each token sees of it.

        That is int64 [B, S, W], -1 for what is before the sequence. A fresh chunk has its own latents alone.
        """
        if self.seen is None:
            W = self.config.sliding_window
            p = self.positions.unsqueeze(-1) - torch.arange(W - 1, -1, -1, device=self.start.device)
            own = p - self.start.view(-1, 1, 1)
            self.seen = own.clamp(min=-1) if self.fresh else torch.where(own >= 0, own + W, p % W).where(p >= 0, -1)
        if self.fresh:
            return latents, self.seen
        return torch.cat([self.cache.windows[layer], latents], dim=1), self.seen

    def publish(self, source: int, projected: Tensor, entries: Tensor, keys: Tensor) -> None:
        """What a source layer made of the groups from start // ratio on: [B, G, D] and [B, G, index width]."""
        self.projected[source] = projected
        if self.cache is None:
            self.entries[source], self.keys[source] = entries, keys
            return
        self.made[source] = entries, keys
        self.cache.write(source, self.start, entries, keys)
        whole = int(self.start.max() + self.positions.shape[1]) // self.config.compress_ratios[source]
        self.entries[source] = self.cache.entries[source][:, :whole]
        self.keys[source] = self.cache.keys[source][:, :whole]

    def open_group(self, source: int) -> tuple[Tensor | None, Tensor | None]:
        """What waits for a source's next entry, and how many tokens of it there are in each row."""
        if self.cache is None:
            return None, None
        r = self.config.compress_ratios[source]
        return self.cache.open[source][:, :, : 1 if r == 1 else 2], self.start % r
