"""What a token does with the rows it read: keys that are compared with the streams, a value that is added to them.

    e         the 24 rows of a token, side by side                       [columns * width]
    k_1..k_n, u = wkv e                                                  n keys and one value, d each
    dot_c     = d^-1/2 <rms(X_c) * q_weight_c, rms(k_c) * k_weight_c>    rms(x) = x rsqrt(mean(x^2) + norm_eps)
    gate_c    = sigmoid(sgn(dot_c) sqrt(max(|dot_c|, 1e-6)))             sgn by the sign bit: +0 opens, -0 closes
    X_c      <- X_c + gate_c u                                           before the layer's attention

In fp32; the streams are rounded once. An image token gets no value. With unit weights |dot| is at most sqrt(d), so
the gate never closes: at d = 5120 it stays within 0.0002 of 0 and 1. Sources: V4.1 report 2.4.2; official code.
`PaperEngram` is the first paper's form: projections with bias, and a short convolution after the gate.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FLOOR = 1e-6  # of |dot|, so that the root has a finite slope
NORM_EPS = 1e-20


def signed_root_gate(dot: Tensor) -> Tensor:
    """sigmoid of the signed root of dot, elementwise; no gradient where |dot| is below the floor."""
    return torch.copysign(dot.abs().clamp(min=FLOOR).sqrt(), dot).sigmoid()


def similarity(
    streams: Tensor, keys: Tensor, q_weight: Tensor, k_weight: Tensor, norm_eps: float = NORM_EPS
) -> Tensor:
    """dot [..., n] of streams and keys [..., n, d], weights [n, d]; in fp32, or fp64 for fp64."""
    wide = torch.promote_types(streams.dtype, torch.float32)
    x, k = streams.to(wide), keys.to(wide)
    products = (x * q_weight.to(wide) * k_weight.to(wide) * k).sum(-1)
    factors = [torch.rsqrt(v.square().mean(-1) + norm_eps) for v in (x, k)]
    return products * factors[0] * factors[1] * x.shape[-1] ** -0.5


def add_memory(
    streams: Tensor,
    keys: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    text_mask: Tensor | None = None,
    norm_eps: float = NORM_EPS,
) -> tuple[Tensor, Tensor]:
    """X + gate u [..., n, d], and the gate [..., n]: of streams and keys [..., n, d], value [..., d], weights [n, d].

    text_mask: bool [...], False for image tokens, whose gate is 0. Raises ValueError for shapes that don't fit,
    TypeError for a mask of another dtype.
    """
    n, d = streams.shape[-2:]
    expected = {"keys": (keys, streams.shape), "value": (value, (*streams.shape[:-2], d))}
    expected |= {"q_weight": (q_weight, (n, d)), "k_weight": (k_weight, (n, d))}
    if text_mask is not None:
        expected["text_mask"] = text_mask, streams.shape[:-2]
        if text_mask.dtype != torch.bool:
            raise TypeError(f"text_mask is {text_mask.dtype}: expected torch.bool")
    for name, (tensor, shape) in expected.items():
        if tensor.shape != torch.Size(shape):
            raise ValueError(f"{name} of shape {list(tensor.shape)}: expected {list(shape)}")
    gate = signed_root_gate(similarity(streams, keys, q_weight, k_weight, norm_eps))
    if text_mask is not None:
        gate = gate * text_mask.unsqueeze(-1)
    added = streams + gate.unsqueeze(-1) * value.unsqueeze(-2).to(gate.dtype)
    return added.to(streams.dtype), gate


def fuse(streams: Tensor) -> bool:
    """Whether the fused kernels serve: on a GPU, in their dtypes."""
    return streams.is_cuda and streams.dtype in (torch.bfloat16, torch.float32)


class EngramGate(nn.Module):
    """The deployed module behind the table: `wkv` [(n + 1) d, width], `q_weight` and `k_weight` [n, d]."""

    def __init__(self, n: int, d: int, width: int, norm_eps: float = NORM_EPS):
        super().__init__()
        self.n, self.d, self.norm_eps = n, d, norm_eps
        self.wkv = nn.Linear(width, (n + 1) * d, bias=False)
        self.q_weight = nn.Parameter(torch.ones(n, d))
        self.k_weight = nn.Parameter(torch.ones(n, d))

    def forward(self, streams: Tensor, rows: Tensor, text_mask: Tensor | None = None) -> Tensor:
        """Streams [..., n, d] with the memory of rows [..., width] added. Takes what `add_memory` takes."""
        if rows.shape[-1] != self.wkv.in_features:
            raise ValueError(f"rows of shape {list(rows.shape)}: expected {self.wkv.in_features} channels last")
        keys, value = self.wkv(rows).split([self.n * self.d, self.d], dim=-1)
        given = keys.unflatten(-1, (self.n, self.d)), value, self.q_weight, self.k_weight, text_mask, self.norm_eps
        if fuse(streams):
            from kernels.engram_gate import fused_engram_gate

            return fused_engram_gate(streams, *given)[0]
        return add_memory(streams, *given)[0]


class PaperEngram(nn.Module):
    """The first paper's module: a key projection a stream, one value projection, and a causal convolution.

    Y = gate * value, then Y + silu(conv(rms(Y))): depthwise, kernel 4, dilation `order`, zero before training.
    Source: Engram 2.3 and its demo.
    """

    KERNEL, CONV_EPS = 4, 1e-5

    def __init__(self, n: int, d: int, width: int, order: int):
        super().__init__()
        self.n, self.d, self.reach = n, d, (self.KERNEL - 1) * order
        self.keys = nn.Linear(width, n * d)
        self.value = nn.Linear(width, d)
        self.q_weight = nn.Parameter(torch.ones(n, d))
        self.k_weight = nn.Parameter(torch.ones(n, d))
        self.conv_norm = nn.Parameter(torch.ones(n, d))
        self.conv = nn.Conv1d(n * d, n * d, self.KERNEL, groups=n * d, dilation=order, bias=False)
        nn.init.zeros_(self.conv.weight)

    def forward(self, streams: Tensor, rows: Tensor) -> Tensor:
        """Streams [B, S, n, d] with the memory of rows [B, S, width] added."""
        keys = self.keys(rows).unflatten(-1, (self.n, self.d))
        gate = signed_root_gate(similarity(streams, keys, self.q_weight, self.k_weight))
        y = gate.unsqueeze(-1) * self.value(rows).unsqueeze(-2)
        normed = F.rms_norm(y, (self.d,), eps=self.CONV_EPS) * self.conv_norm
        causal = F.pad(normed.flatten(2).transpose(1, 2), (self.reach, 0))
        return streams + y + F.silu(self.conv(causal)).transpose(1, 2).unflatten(-1, (self.n, self.d))
