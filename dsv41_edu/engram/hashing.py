"""From compressed ids to rows of the table: exact in int64, the same for any chunking of a sequence.

    c_i  the compressed id i places back; the pad's before the sequence, and from a wall (an image token) on
    r_1 = c_0 m_0,  r_(i+1) = r_i XOR (c_i m_i)          m_i odd, by layer
    row of order g, head h = (r_g mod p_gh) + offset_gh   p_gh prime, none of them twice in the model

Nothing wraps: m_i < 2^63 / size, so each product of an id below `size` is below 2^63, and so is an XOR of such.
Sources: Engram 2.2; V4.1 report 2.4.2; official inference code.
"""

import numpy as np
import torch
from torch import Tensor

from dsv41_edu.config import ModelConfig

SEED = 10007  # times the layer
WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)  # enough below 3.3e24 (Sorenson and Webster)
WALL = -1  # in look-back: no id of the sequence, nor anything further back


def is_prime(n: int) -> bool:
    """Miller and Rabin's test, exact for any n below 3.3e24. Raises ValueError above."""
    if n >= 3 * 10**24:
        raise ValueError(f"n = {n}: expected less than 3e24, where these witnesses are proved to be enough")
    if n < 2 or any(n % p == 0 for p in WITNESSES):
        return n in WITNESSES
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for a in WITNESSES:
        x = pow(a, odd, n)
        if x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(twos - 1)):
            return False
    return True


def primes_from(n: int, count: int) -> list[int]:
    """The `count` smallest primes that are at least n."""
    found: list[int] = []
    while len(found) < count:
        if is_prime(n):
            found.append(n)
        n += 1
    return found


def multipliers(layer: int, order: int, size: int) -> list[int]:
    """The odd m_0 ... m_(order-1) of an Engram layer, for compressed ids below `size`."""
    bound = (2**63 - 1) // size // 2
    return [2 * int(draw) + 1 for draw in np.random.default_rng(SEED * layer).integers(0, bound, size=order)]


def fuse(ids: Tensor) -> bool:
    """Whether the fused kernel serves: on a GPU."""
    return ids.is_cuda


class NgramHash:
    """The rows that each position reads: `multipliers` int64 [L, order], `primes` and `offsets` int64 [L, columns].

    Columns: order 2's heads, order 3's, ...; `pad` is a compressed id.
    """

    def __init__(self, layers: tuple[int, ...], order: int, heads: int, first: int, size: int, pad: int):
        """Primes from `first` on, in the order layer, order, head. Raises ValueError for sizes that don't fit."""
        if order < 2 or heads < 1 or size < 1 or not layers:
            raise ValueError(
                f"order = {order}, heads = {heads}, size = {size}, layers = {layers}: expected some of each"
            )
        if not 0 <= pad < size:
            raise ValueError(f"pad = {pad}: expected a compressed id, 0 to {size - 1}")
        self.layers, self.order, self.size, self.pad = layers, order, size, pad
        columns = (order - 1) * heads
        self.multipliers = torch.tensor([multipliers(layer, order, size) for layer in layers])
        self.primes = torch.tensor(primes_from(first, len(layers) * columns)).view(len(layers), columns)
        self.offsets = self.primes.cumsum(1) - self.primes
        self.copies: dict[torch.device, list[Tensor]] = {}

    @classmethod
    def of(cls, config: ModelConfig, pad: int) -> "NgramHash":
        """By a config; `pad`: the compressed id of its `engram_pad_token_id`.

        Raises ValueError for a config without Engram, and where the primes don't fill the tables that it states.
        """
        c = config
        if not c.engram_layer_ids:
            raise ValueError(f"engram_layer_ids = {c.engram_layer_ids}: expected a config with Engram layers")
        made = cls(
            c.engram_layer_ids, c.engram_max_ngram_size, c.engram_n_heads, c.engram_vocab_size,
            c.engram_compressed_vocab_size, pad,
        )  # fmt: skip
        if tuple(made.rows) != c.engram_num_embeddings:
            raise ValueError(
                f"engram_num_embeddings = {c.engram_num_embeddings}: expected {made.rows}, the primes' sums"
            )
        return made

    @property
    def rows(self) -> list[int]:
        """How many rows each layer's table has."""
        return self.primes.sum(1).tolist()

    def start(self, batch: int) -> Tensor:
        """The history before a sequence, int64 [B, order - 1]."""
        return torch.full((batch, self.order - 1), WALL)

    def check(self, name: str, ids: Tensor, least: int = 0) -> None:
        """Raises TypeError for ids that aren't int64, ValueError for any below `least` or not below `size`."""
        if ids.dtype != torch.int64:
            raise TypeError(f"{name} is {ids.dtype}: expected torch.int64")
        above = (ids - least).numpy().view(np.uint64)  # what is below `least` is 2^63 and more
        if above.size and above.max() >= self.size - least:
            raise ValueError(
                f"{name} from {ids.min()} to {ids.max()}: expected compressed ids, {least} to {self.size - 1}"
            )

    def look_back(
        self, ids: Tensor, text_mask: Tensor | None = None, history: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The ids that each position sees, int64 [B, S, order], nearest first, and the history for the next chunk.

        ids: compressed, int64 [B, S]; text_mask: bool [B, S], False for image tokens, which are walls; history: of
        the chunk before (`start`, without one). Raises ValueError for shapes and ids out of range, TypeError for
        dtypes.
        """
        if ids.dim() != 2:
            raise ValueError(f"ids of shape {list(ids.shape)}: expected [B, S]")
        self.check("ids", ids)
        if text_mask is not None:
            if text_mask.dtype != torch.bool:
                raise TypeError(f"text_mask is {text_mask.dtype}: expected torch.bool")
            if text_mask.shape != ids.shape:
                raise ValueError(f"text_mask of shape {list(text_mask.shape)}: expected {list(ids.shape)}")
            ids = ids.masked_fill(~text_mask, WALL)
        history = self.start(len(ids)) if history is None else history
        if history.shape != (len(ids), self.order - 1):
            raise ValueError(f"history of shape {list(history.shape)}: expected [{len(ids)}, {self.order - 1}]")
        self.check("history", history, WALL)
        long = torch.cat([history, ids], dim=1)
        S = ids.shape[1]
        seen = torch.stack([long[:, self.order - 1 - i :][:, :S] for i in range(self.order)])
        hidden = seen == WALL
        for i in range(1, self.order):
            hidden[i] |= hidden[i - 1]
        return seen.masked_fill_(hidden, self.pad).movedim(0, -1), long[:, S:]

    def hash(self, seen: Tensor) -> Tensor:
        """Rows int64 [..., L, columns], offsets included, of the ids that positions see, int64 [..., order].

        Raises TypeError for another dtype, ValueError for another order and for ids out of range.
        """
        if seen.shape[-1] != self.order:
            raise ValueError(f"seen of shape {list(seen.shape)}: expected [..., {self.order}]")
        self.check("seen", seen)
        L, columns = self.primes.shape
        heads = columns // (self.order - 1)
        ids, multipliers, primes, offsets = (
            t.numpy().view(np.uint64)  # nothing is negative here, and unsigned numbers are divided faster
            for t in (seen.reshape(-1, self.order).T, self.multipliers, self.primes, self.offsets)
        )
        rows = np.empty((L, columns, ids.shape[1]), np.uint64)
        for layer in range(L):
            r = ids[0] * multipliers[layer, 0]
            for i in range(1, self.order):
                r ^= ids[i] * multipliers[layer, i]
                for column in range((i - 1) * heads, i * heads):
                    row, p = rows[layer, column], primes[layer, column]
                    np.floor_divide(r, p, row)  # by one number, so numpy multiplies and shifts; for % it divides
                    row *= p
                    np.subtract(r, row, row)
                    row += offsets[layer, column]
        return torch.from_numpy(rows.view(np.int64)).permute(2, 0, 1).reshape(*seen.shape[:-1], L, columns)

    def on(self, device: torch.device) -> list[Tensor]:
        """Multipliers, primes and offsets on a device, copied there once."""
        if device not in self.copies:
            self.copies[device] = [t.to(device) for t in (self.multipliers, self.primes, self.offsets)]
        return self.copies[device]

    def __call__(
        self, ids: Tensor, text_mask: Tensor | None = None, history: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows int64 [B, S, L, columns] and the history for the next chunk; takes what `look_back` takes.

        Ids on a GPU aren't waited for, so there their range isn't checked.
        """
        if fuse(ids):
            from kernels.ngram_hash import fused_ngram_hash

            return fused_ngram_hash(ids, *self.on(ids.device), self.pad, text_mask, history)
        seen, history = self.look_back(ids, text_mask, history)
        return self.hash(seen), history
