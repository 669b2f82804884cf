"""A deep and narrow language model whose connections can be exchanged, and the gain of its residual maps.

    X'_k = sum_j R_jk X_j + what stream k is given of F      R_l [n, n] by (from, to), of one token and sublayer l
    P_l  = R_l R_(l+1) ... R_L                               the last streams hold (P_l)_jk times X_j of before l

    forward gain  = max over k of sum_j |P_jk|     how far a last stream can outgrow the streams of before l
    backward gain = max over j of sum_k |P_jk|     the same of gradients, from the last streams to those of before l

R is the transpose of the paper's residual matrix: the forward gain is the paper's largest absolute row sum, the
backward gain its largest absolute column sum. Both are means over tokens. Source: mHC 3.1.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.experiments import text
from dsv41_edu.mhc.hyper_connections import HyperConnection
from dsv41_edu.mhc.seam import Seam, collapse, one_hot
from dsv41_edu.moe.experts import swiglu

ARMS = ("plain", "HC", "mHC multi-pass", "mHC single-pass")


@dataclass(frozen=True)
class Setup:
    """Sizes and training, the same for all the runs that are compared."""

    hidden_size: int = 48
    layers: int = 24  # of two sublayers each
    heads: int = 4
    width: int = 96  # of the feed-forward sublayer
    streams: int = 4  # of every arm but the plain one
    context: int = 64  # tokens
    batch: int = 4  # sequences
    steps: int = 160
    learning_rate: float = 3e-3
    warm_up: int = 16  # steps; then a line down to 0.05 of the rate
    weight_decay: float = 0.1  # on all matrices but the connections'
    clip: float = 1.0  # of the gradient's norm


@dataclass(frozen=True)
class Regime:
    """How the connections start and how fast they learn, alike for HC and mHC."""

    scale: float = 0.01  # of the maps' dynamic part: s_alpha and s_beta of HC, all three scales of a seam
    rate: float = 1.0  # learning rate of the connections, over that of the rest
    factor: float = 1.0  # times the first residual maps before any constraint: A_r of HC, exp(logits) of a seam


class Attention(nn.Module):
    """Causal attention of a normalised input, fp32 [B, T, d] to [B, T, d]."""

    def __init__(self, setup: Setup):
        super().__init__()
        d = setup.hidden_size
        self.heads, self.norm = setup.heads, nn.RMSNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, T, d/heads]
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A dense SwiGLU of a normalised input, fp32 [B, T, d] to [B, T, d]."""

    def __init__(self, setup: Setup):
        super().__init__()
        d = setup.hidden_size
        self.norm = nn.RMSNorm(d)
        self.w13, self.w2 = nn.Linear(d, 2 * setup.width, bias=False), nn.Linear(setup.width, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, u = self.w13(self.norm(x)).chunk(2, dim=-1)
        return self.w2(swiglu(a, u))


class Stack(nn.Module):
    """Ids int64 [B, T] to logits fp32 [B, T, V]; a seed gives all arms the same sublayers, tables and head.

    All arms start as (nearly) one function, since every stream begins as the embedding, is given each sublayer's
    output whole and hardly mixes. After the last sublayer the streams collapse by the map that is pending
    (single-pass) or by their plain mean (the others: no head mix, so that nothing differs but the connection).
    Raises ValueError for an unknown arm.
    """

    def __init__(self, setup: Setup, arm: str, seed: int = 0, regime: Regime | None = None):
        super().__init__()
        if arm not in ARMS:
            raise ValueError(f"arm = {arm!r}: expected one of {', '.join(ARMS)}")
        d, regime = setup.hidden_size, regime or Regime()
        self.single_pass = arm == "mHC single-pass"
        self.n = 1 if arm == "plain" else setup.streams
        with torch.random.fork_rng(devices=[]):  # what the modules draw for themselves is drawn again below
            self.embedding, self.positions = nn.Embedding(text.VOCAB_SIZE, d), nn.Embedding(setup.context, d)
            kinds = [Attention, FeedForward] * setup.layers
            self.sublayers = nn.ModuleList(kind(setup) for kind in kinds)
            self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, text.VOCAB_SIZE, bias=False)
            if arm == "plain":  # one stream whose maps are the number 1, and stay so
                connections = [HyperConnection(1, d, dynamic=False).requires_grad_(False) for _ in kinds]
            elif arm == "HC":
                connections = [HyperConnection(self.n, d, i, scale=regime.scale) for i in range(len(kinds))]
            else:
                connections = [Seam(self.n, d) for _ in kinds]
            self.connections = nn.ModuleList(connections)
        self._initialise(torch.Generator().manual_seed(seed), regime)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator, regime: Regime) -> None:
        """Tables at std 0.02, matrices at 1/sqrt(inputs), norms at 1; then what the regime says of connections."""
        for name, p in self.named_parameters():
            if p.ndim > 1 and not name.startswith("connections"):
                table = name in ("embedding.weight", "positions.weight")
                p.normal_(std=0.02 if table else p.shape[-1] ** -0.5, generator=generator)
        for connection in self.connections:
            if isinstance(connection, Seam):
                connection.fn.normal_(std=connection.fn.shape[-1] ** -0.5, generator=generator)
                connection.scale.fill_(regime.scale)
                connection.base[2 * self.n :] += math.log(regime.factor)
            else:
                connection.a_r *= regime.factor

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        streams = x.unsqueeze(-2).expand(-1, -1, self.n, -1)
        pending = one_hot(streams)
        for connection, sublayer in zip(self.connections, self.sublayers, strict=True):
            if isinstance(connection, Seam):
                streams, pending = connection(streams, sublayer, pending if self.single_pass else None)
            else:
                streams = connection(streams, sublayer)
        return self.head(self.norm(collapse(streams, pending) if self.single_pass else streams.mean(-2)))


@torch.no_grad()
def residual_maps(model: Stack, ids: Tensor) -> Tensor:
    """R of every sublayer and token as the model runs on ids [B, T]: fp64 [sublayers, B T, n, n]."""
    maps = []

    def see(connection: nn.Module, args: tuple[Tensor, ...]) -> None:
        if isinstance(connection, Seam):
            residual = connection.coefficients(args[0])[2]
        else:
            residual = connection.maps(args[0])[1]
        maps.append(residual.expand(*ids.shape, -1, -1).flatten(0, 1))  # the plain one is the same for all tokens

    hooks = [connection.register_forward_pre_hook(see) for connection in model.connections]
    model(ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(maps).double()


def composite(maps: Tensor) -> Tensor:
    """P_l of every sublayer, from maps R [sublayers, ..., n, n]: the product of R_l and all that follow."""
    products = [maps[-1]]
    for residual in maps[:-1].flip(0):
        products.append(residual @ products[-1])
    return torch.stack(products[::-1])


def gains(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward gain of maps [sublayers, tokens, n, n], by (from, to): each [sublayers]."""
    return tuple(maps.abs().sum(dim).amax(-1).mean(-1) for dim in (-2, -1))


def mixing(maps: Tensor) -> Tensor:
    """Share of the maps' absolute weight that lies between different streams, mean over tokens: [sublayers]."""
    size = maps.abs()
    return (1 - size.diagonal(dim1=-2, dim2=-1).sum(-1) / size.sum((-2, -1))).mean(-1)
