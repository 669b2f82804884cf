"""The small language model with a hashed n-gram memory before its second layer, and its training.

    e  = the rows that the last 2 and 3 compressed ids hash to, side by side      [columns * row_width] = [d]
    x <- x + gate u        gate and u of e and x, as `EngramGate` with one stream, before layer 1's attention

Hash, compressed vocabulary, gate and experts are the project's own; the table is fp32 and trained. A model without
memory has a dense network in its place, x <- x + w2 silu(w1 norm(x) + b1) + b2 with square w1 and w2: 2 d^2 + 3 d
parameters, exactly as many as a token uses of the memory (wkv 2 d^2, gate weights 2 d, rows d). The loss-free bias
keeps the experts busy. As in the report, the table learns at 5 times the rate, without weight decay.
Sources: V4.1 report 2.4.2; Engram 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.engram.gate import EngramGate, add_memory
from dsv41_edu.engram.hashing import NgramHash, primes_from
from dsv41_edu.engram.vocabulary import CompressedVocabulary
from dsv41_edu.experiments import small_moe, text
from dsv41_edu.experiments.small_moe import SmallMoE, Watch, batches, descend
from dsv41_edu.moe.balance import update_bias

LAYER = 1  # whose attention the memory comes before, counted from 0


@dataclass(frozen=True)
class Setup(small_moe.Setup):
    """Sizes and training. Runs that are compared differ in `n_experts` and `table_rows` alone."""

    context: int = 64  # tokens
    batch: int = 16  # sequences
    steps: int = 350
    table_rows: int = 0  # 0: no memory
    order: int = 3  # of the longest n-gram
    row_heads: int = 2  # of each order
    row_width: int = 16
    table_rate: float = 5.0  # learning rate of the table, over that of the rest
    bias_speed: tuple[float, float] = (0.01, 0.001)  # of the loss-free bias, at the first step and the last

    @property
    def columns(self) -> int:
        """Rows that a token reads."""
        return (self.order - 1) * self.row_heads


@cache
def vocabulary() -> CompressedVocabulary:
    """That of the shipped tokenizer."""
    return CompressedVocabulary.of(text.tokenizer())


def compress(ids: Tensor) -> Tensor:
    """Compressed ids of token ids, both int64 of any shape."""
    return torch.from_numpy(vocabulary().compress(ids.numpy()))


def ngram_hash(order: int, heads: int, first: int) -> NgramHash:
    """The hash of layer 1 over the compressed vocabulary, primes from `first` on."""
    return NgramHash((LAYER,), order, heads, first, vocabulary().size, int(vocabulary().map[text.PAD]))


def first_prime(rows: int, columns: int) -> int:
    """Where to begin so that the primes of `columns` heads fill `rows` rows as far as they can.

    Raises ValueError where there are too few rows.
    """
    for first in range(rows // columns, 1, -1):
        if sum(primes_from(first, columns)) <= rows:
            return first
    raise ValueError(f"table_rows = {rows}: expected at least {sum(primes_from(2, columns))} for {columns} heads")


class Memory(nn.Module):
    """Hash, table [table_rows, row_width] and gate; the primes leave the table's last few rows unread."""

    def __init__(self, setup: Setup):
        super().__init__()
        with torch.device("cpu"):  # no parameters: numbers, even where the rest is shapes alone
            self.hash = ngram_hash(setup.order, setup.row_heads, first_prime(setup.table_rows, setup.columns))
        self.table = nn.Embedding(setup.table_rows, setup.row_width)
        self.gate = EngramGate(1, setup.hidden_size, setup.columns * setup.row_width)

    def rows(self, ids: Tensor) -> Tensor:
        """Row ids int64 [B, T, columns] of token ids int64 [B, T]."""
        return self.hash(compress(ids))[0].squeeze(2)

    def forward(self, x: Tensor, ids: Tensor, text_mask: Tensor | None = None) -> Tensor:
        """x [B, T, d] with the memory of ids [B, T] added; none of it where text_mask, bool [B, T], is False."""
        rows = self.table(self.rows(ids)).flatten(2)
        return self.gate(x.unsqueeze(2), rows, text_mask).squeeze(2)


class Dense(nn.Module):
    """What stands in the memory's place without one: [..., d] to [..., d]."""

    def __init__(self, d: int):
        super().__init__()
        self.norm, self.w1, self.w2 = nn.RMSNorm(d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(F.silu(self.w1(self.norm(x))))


class EngramLM(SmallMoE):
    """Ids int64 [B, T] to logits fp32 [B, T, V]. Its weights depend on `seed` alone."""

    def __init__(self, setup: Setup, seed: int = 0):
        super().__init__(setup, seed)
        with torch.device("meta"):  # shapes alone: the modules' own random numbers are never drawn
            self.memory = Memory(setup) if setup.table_rows else None
            self.dense = None if setup.table_rows else Dense(setup.hidden_size)
        beside = (self.memory or self.dense).to_empty(device="cpu")
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in beside.named_parameters():
                if name.endswith(("norm.weight", "q_weight", "k_weight")):
                    p.fill_(1)
                elif name.endswith("bias"):
                    p.zero_()
                else:
                    p.normal_(std=0.02 if name == "table.weight" else p.shape[-1] ** -0.5, generator=generator)

    def forward(self, ids: Tensor, text_mask: Tensor | None = None) -> Tensor:
        """text_mask: bool [B, T], False where the memory is off, its gate being 0."""
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        for layer, block in enumerate(self.blocks):
            if layer == LAYER:
                x = self.memory(x, ids, text_mask) if self.memory else self.dense(x)
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def gates(model: EngramLM, ids: Tensor) -> Tensor:
    """The gate at each token of ids [B, T], fp32 [B, T]."""
    seen = []
    hook = model.memory.gate.register_forward_pre_hook(lambda gate, args: seen.append((gate, *args[:2])))
    model(ids)
    hook.remove()
    gate, streams, rows = seen[0]
    key, value = gate.wkv(rows).chunk(2, dim=-1)
    return add_memory(streams, key.unsqueeze(2), value, gate.q_weight, gate.k_weight)[1].squeeze(2)


def parameter_groups(model: EngramLM, setup: Setup) -> list[dict]:
    """AdamW's groups: matrices with weight decay; norms and gate weights without; the table faster, without."""
    groups = [
        {"params": [], "weight_decay": setup.weight_decay, "times": 1.0},
        {"params": [], "weight_decay": 0.0, "times": 1.0},
        {"params": [], "weight_decay": 0.0, "times": setup.table_rate},
    ]
    for name, p in model.named_parameters():
        if name == "memory.table.weight":
            groups[2]["params"].append(p)
        else:
            groups[p.ndim == 1 or name.endswith(("q_weight", "k_weight"))]["params"].append(p)
    return [group for group in groups if group["params"]]


def train(model: EngramLM, setup: Setup, seed: int) -> Iterator[float]:
    """Train in place: the loss of each step, in nats a token; stop asking for steps to stop early."""
    watch, data = Watch(model), batches(setup, seed)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, setup), lr=setup.learning_rate, betas=(0.9, 0.95), fused=True
    )
    first, last = setup.bias_speed
    for step in range(setup.steps):
        loss, _ = descend(model, optimizer, setup, step, next(data))
        speed = first * (last / first) ** (step / (setup.steps - 1))
        for gate, counts in zip(watch.gates, watch.counts(), strict=True):
            gate.bias.copy_(update_bias(gate.bias, counts, speed))
        yield loss
