"""A small language model with the project's real experts, and its training.

Token embedding and learned positions; blocks of causal attention and a mixture of experts (`dsv41_edu.moe`), each on
a normalised input; a last norm and a head. Runs that are compared differ in `Balancing` alone: the same seed gives
the same first weights and the same batches. Every random number comes from the seed's own generators.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.config import ModelConfig, preset
from dsv41_edu.experiments import text
from dsv41_edu.moe.balance import expert_counts, sequence_loss, update_bias
from dsv41_edu.moe.experts import MoE


@dataclass(frozen=True)
class Setup:
    """Sizes and training, the same for all the runs that are compared."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    n_experts: int = 16
    top_k: int = 2
    expert_width: int = 32
    context: int = 128  # tokens
    batch: int = 8  # sequences
    steps: int = 1200
    learning_rate: float = 3e-3
    warm_up: int = 50  # steps; then a line down to 0.05 of the rate
    weight_decay: float = 0.1  # on matrices alone
    clip: float = 1.0  # of the gradient's norm

    @property
    def config(self) -> ModelConfig:
        """The miniature with this gate and these experts; its fields for other parts mean nothing here."""
        return preset("mini").replace(
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.expert_width,
            n_routed_experts=self.n_experts,
            num_experts_per_tok=self.top_k,
        )


@dataclass(frozen=True)
class Balancing:
    """What keeps the experts busy: nothing, a loss of strength `alpha`, or a bias that moves by `speed`.

    speed: that of the first step and of the last; in between it falls by the same factor each step.
    """

    alpha: float = 0.0
    speed: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Step:
    """A finished step: cross-entropy in nats a token, without any balance loss, and counts int64 [layers, E]."""

    loss: float
    counts: Tensor


class Block(nn.Module):
    """x + attention(norm x), then x + experts(norm x). x: fp32 [B, T, d]."""

    def __init__(self, setup: Setup):
        super().__init__()
        d = setup.hidden_size
        self.heads = setup.heads
        self.attention_norm, self.moe_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.moe = MoE(setup.config)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, T, d/heads]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.moe_norm(x))


class SmallMoE(nn.Module):
    """Ids int64 [B, T] to logits fp32 [B, T, V]. Its weights depend on `seed` alone."""

    def __init__(self, setup: Setup, seed: int = 0):
        super().__init__()
        d = setup.hidden_size
        with torch.device("meta"):  # shapes alone: the modules' own random numbers are never drawn
            self.embedding, self.positions = nn.Embedding(text.VOCAB_SIZE, d), nn.Embedding(setup.context, d)
            self.blocks = nn.ModuleList(Block(setup) for _ in range(setup.layers))
            self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, text.VOCAB_SIZE, bias=False)
        self.to_empty(device="cpu")
        self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Norms at 1, biases at 0, tables at std 0.02, matrices (the routers' too) at 1/sqrt(inputs)."""
        for name, p in self.named_parameters():
            if p.ndim == 1:
                p.fill_(1)
            else:
                table = name in ("embedding.weight", "positions.weight")
                p.normal_(std=0.02 if table else p.shape[-1] ** -0.5, generator=generator)
        for bias in self.buffers():
            bias.zero_()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Watch:
    """What each layer's gate saw and chose in the last forward pass."""

    def __init__(self, model: SmallMoE):
        self.gates = [block.moe.gate for block in model.blocks]
        self.seen: list[tuple[Tensor, Tensor]] = [()] * len(self.gates)  # inputs [B, T, d], indices [B, T, k]
        for layer, gate in enumerate(self.gates):
            gate.register_forward_hook(lambda _, args, out, layer=layer: self._see(layer, args[0], out[1]))

    def _see(self, layer: int, x: Tensor, indices: Tensor) -> None:
        self.seen[layer] = (x, indices)

    def balance_loss(self, alpha: float) -> Tensor:
        """Sequence-wise, summed over the layers. The scores are computed a second time: they are cheap."""
        return sum(sequence_loss(g.scores(x), i, alpha) for g, (x, i) in zip(self.gates, self.seen, strict=True))

    def counts(self) -> Tensor:
        """int64 [layers, E]."""
        return torch.stack([expert_counts(i, g.n_experts) for g, (_, i) in zip(self.gates, self.seen, strict=True)])


def batches(setup: Setup, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless inputs and targets, each int64 [B, context], from random places of the training text."""
    ids, generator = text.tokens("train"), torch.Generator().manual_seed(seed)
    window = torch.arange(setup.context + 1)
    while True:
        rows = ids[torch.randint(len(ids) - setup.context, (setup.batch, 1), generator=generator) + window]
        yield rows[:, :-1], rows[:, 1:]


def rate(setup: Setup, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    left = 1 - 0.95 * max(0, step - setup.warm_up) / (setup.steps - setup.warm_up)
    return setup.learning_rate * min(1, (step + 1) / setup.warm_up) * left


def descend(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    setup: Setup,
    step: int,
    batch: tuple[Tensor, Tensor],
    penalty: Callable[[], Tensor] | None = None,
) -> tuple[float, float]:
    """One step on inputs and targets [B, T]: its loss, in nats a token, and its gradient's norm before the clipping.

    penalty: added to the loss, asked for after the forward pass. A group's `times` is of the scheduled rate.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate(setup, step) * group.get("times", 1.0)
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    whole = loss + penalty() if penalty else loss
    optimizer.zero_grad()
    whole.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
    optimizer.step()
    return loss.item(), norm.item()


def spread(values: list[float]) -> list[float]:
    """[mean, 2 standard deviations]."""
    return [round(statistics.mean(values), 4), round(2 * statistics.stdev(values), 4)]


def train(model: SmallMoE, setup: Setup, balancing: Balancing, seed: int) -> Iterator[Step]:
    """Train in place, a `Step` at a time; stop asking for steps to stop early."""
    watch, data = Watch(model), batches(setup, seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": setup.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=setup.learning_rate, betas=(0.9, 0.95))
    penalty = partial(watch.balance_loss, balancing.alpha) if balancing.alpha else None
    for step in range(setup.steps):
        loss, _ = descend(model, optimizer, setup, step, next(data), penalty)
        counts = watch.counts()
        if balancing.speed[0]:  # after the step, from the step's own counts
            first, last = balancing.speed
            speed = first * (last / first) ** (step / (setup.steps - 1))
            for gate, count in zip(watch.gates, counts, strict=True):
                gate.bias.copy_(update_bias(gate.bias, count, speed))
        yield Step(loss, counts)


@torch.no_grad()
def evaluate(model: SmallMoE, setup: Setup, windows: int | None = None) -> tuple[float, float, Tensor]:
    """On the held-out chapters in windows of `context`, all or the first few: nats a token, bits a byte, counts.

    Bits a byte take the split's mean bytes a token. counts: int64 [layers, E].
    """
    ids, watch = text.tokens("heldout"), Watch(model)
    n = setup.context * (windows or (len(ids) - 1) // setup.context)
    inputs, targets = ids[:n].view(-1, setup.context), ids[1 : n + 1].view(-1, setup.context)
    total, counts = 0.0, torch.zeros(setup.layers, setup.n_experts, dtype=torch.int64)
    for x, y in zip(inputs.split(16), targets.split(16), strict=True):
        total += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        counts += watch.counts()
    nats = total / n
    return nats, nats / math.log(2) / text.bytes_per_token("heldout"), counts
