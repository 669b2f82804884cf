"""Training the model: two losses that don't meet, and a bias that follows the load.

    language loss     cross-entropy of the next token
    indexer's loss    KL(a, softmax(scores)), averaged over tokens and summed over the index layers
                      a: attention on the entries, summed over heads and the layers that share the choice, normalised

The indexer reads detached inputs and its choice has no gradient, so each loss trains parameters of its own. While the
model is `dense` every layer reads all entries and the teacher is whole; after that it is what was chosen, and so are
the scores compared. The teacher is the softmax over window, entries and sink together, of which the entries' part is
taken. This is V3.2's and V4's schedule; V4.1's isn't published. Sources: V3.2 report 2.1.1; V4 report; V3 2.1.2.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.attention.cache import Chunk
from dsv41_edu.attention.sparse_attention import named
from dsv41_edu.checkpoint import codec, planned
from dsv41_edu.drafter import Drafter
from dsv41_edu.layer import Layer
from dsv41_edu.model import Transformer
from dsv41_edu.moe.balance import expert_counts, update_bias
from dsv41_edu.shards import DTYPES
from dsv41_edu.tensors import Tensor as Planned


@torch.no_grad()
def initialise(model: Transformer | Drafter, seed: int) -> None:
    """First weights of a model or a drafter, from the seed alone.

    Matrices at std 1/sqrt(inputs), embeddings and tables at 0.02, norms at 1. Seams start mixing a little (residual
    logits of +-2, scales 0.01): with the logits of +-8 of `Seam` four streams would stay four copies in a short
    training.
    """
    generator = torch.Generator().manual_seed(seed)
    n = model.config.hc_mult
    for name, p in model.named_parameters():
        if name.endswith(("_base", "_scale")):
            continue
        if p.ndim == 1 or "engram.q_weight" in name or "engram.k_weight" in name:
            p.fill_(0.0 if name.endswith(("bias", "attn_sink")) else 1.0)
        else:
            table = name.endswith(("embed.weight", "image_start", "image_end", "image_newline"))
            p.normal_(std=0.02 if table else p.shape[-1] ** -0.5, generator=generator)
    for layer in (m for m in model.modules() if isinstance(m, Layer)):
        for base, scale in ((layer.hc_attn_base, layer.hc_attn_scale), (layer.hc_ffn_base, layer.hc_ffn_scale)):
            base.zero_()
            base[:n] = torch.tensor([2.0] + [-2.0] * (n - 1))
            base[2 * n :] = 2 * torch.eye(n).flatten()
            scale.fill_(0.01)
        for bias in (layer.ffn.gate.bias, layer.ffn.gate.bias_vl):
            bias.zero_()


def groups(model: nn.Module, decay: float, table_rate: float = 5.0) -> list[dict]:
    """Parameters for AdamW: weight decay on matrices alone; Engram's tables at `table_rate` times the rate, `times`.

    None on norms, sinks and the seams' own parameters, which decay would draw to mixing evenly. Engram's key and
    query weights have a row a stream and count as matrices.
    """
    matrices, others, tables = [], [], []
    for name, p in model.named_parameters():
        if "engram.embed" in name:
            tables.append(p)
        else:
            (others if p.ndim == 1 or "hc_" in name else matrices).append(p)
    return [
        {"params": matrices, "weight_decay": decay, "times": 1.0},
        {"params": others, "weight_decay": 0.0, "times": 1.0},
        {"params": tables, "weight_decay": 0.0, "times": table_rate},
    ]


def rate(step: int, steps: int, warm_up: int) -> float:
    """The learning rate of a step, counted from 0, over the highest: a rise, flat to half, a line down to 0.05."""
    half = steps // 2
    return min(1.0, (step + 1) / warm_up) * (1 - 0.95 * max(0, step - half) / (steps - half))


def set_rate(optimizer: torch.optim.Optimizer, highest: float, step: int, steps: int, warm_up: int) -> None:
    """The rate of a step for each of `groups`, where `highest` is that of those with `times` 1."""
    for group in optimizer.param_groups:
        group["lr"] = highest * group["times"] * rate(step, steps, warm_up)


def language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean nats a token: logits [B, S, V], targets int64 [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def indexer_loss(chunk: Chunk) -> Tensor:
    """The indexers' loss of a pass with `teach=True`, summed over the index layers."""
    return sum(teach(chunk.scores[i], chunk.mass[i], chunk.indices[i]) for i in chunk.mass)


def teach(scores: Tensor, mass: Tensor, indices: Tensor) -> Tensor:
    """KL(a, softmax(scores)) over the entries read, a mean over the tokens that read some.

    scores and mass [B, S, N], indices int64 [B, S, K].
    """
    read = named(indices, scores.shape[-1]) & ~scores.isneginf()
    some = read.any(-1)
    scores, mass, read = scores[some], mass[some], read[some]
    if not len(scores):
        return scores.sum()
    a = mass / mass.sum(-1, keepdim=True).clamp(min=1e-20)
    log_p = scores.masked_fill(~read, float("-inf")).log_softmax(-1).masked_fill(~read, 0.0)
    return (torch.xlogy(a, a) - a * log_p).sum(-1).mean()


class Loads:
    """Which experts the gates chose in the last forward pass, and the update that follows from it."""

    def __init__(self, layers: Iterable[Layer]):
        self.gates = [layer.ffn.gate for layer in layers]
        self.indices: list[Tensor] = [torch.empty(0)] * len(self.gates)
        for i, gate in enumerate(self.gates):
            gate.register_forward_hook(lambda _, args, out, i=i: self.indices.__setitem__(i, out[1]))

    def counts(self) -> Tensor:
        """int64 [layers, E]."""
        return torch.stack([expert_counts(i, g.n_experts) for g, i in zip(self.gates, self.indices, strict=True)])

    @torch.no_grad()
    def update(self, speed: float) -> Tensor:
        """Move every text bias by its layer's counts, which are returned; without images no `bias_vl` moves."""
        counts = self.counts()
        for gate, c in zip(self.gates, counts, strict=True):
            gate.bias.copy_(update_bias(gate.bias, c, speed))
        return counts


def stored(name: str, p: Tensor, plan: dict[str, Planned]) -> Tensor:
    """What a checkpoint gives back of a parameter, by its name in the model."""
    owner, _, last = name.rpartition(".")
    if last in ("w13", "w2"):  # stacked: as each expert's own
        name = f"{owner}.w2.weight" if "shared" in owner else f"{owner}.0.w2.weight"
    if name.removesuffix("weight") + "scale" in plan:
        encode, decode, _ = codec(plan[name])
        return decode(*encode(p), p.dtype)
    return p.to(DTYPES[plan[name].dtype]).to(p.dtype)


@contextmanager
def rounded(model: Transformer) -> Iterator[None]:
    """In the block the weights that learn are what would be stored; after it as before, with their gradients.

    So a step trains the number behind the rounding by the gradient at the rounded one (straight through).
    """
    plan = {t.name: t for t in planned(model.config)}
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = {p: p.detach().clone() for p in learning.values()}
    with torch.no_grad():
        for name, p in learning.items():
            p.copy_(stored(name, p, plan))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in kept.items():
                p.copy_(value)


def set_dropout(model: Transformer, layers: float, memory: float) -> None:
    """Dropout of the sublayers' outputs and of what Engram reads; it acts in `model.train()` alone."""
    for layer in model.layers:
        layer.dropout.p = layers
        if layer.engram is not None:
            layer.engram.dropout.p = memory


@torch.no_grad()
def evaluate(model: Transformer, rows: Iterable[Tensor]) -> float:
    """Mean nats a token of rows int64 [B, S + 1], dropout off, entries chosen as in use."""
    was, losses, tokens = model.training, 0.0, 0
    model.eval()
    for ids in rows:
        targets = ids[:, 1:]
        losses += float(language_loss(model(ids[:, :-1]), targets)) * targets.numel()
        tokens += targets.numel()
    model.train(was)
    return losses / tokens
