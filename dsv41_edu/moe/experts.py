"""Experts: a clamped SwiGLU each, many of them, and the one that every token shares.

    a = w1 x,  u = w3 x                       w1, w3 [I, d]
    h = silu(min(a, c)) * clamp(u, -c, c) * r   the gate branch is bounded from above alone
    y = w2 h                                  w2 [d, I]

The routing weight r multiplies before the down projection, where it is one number for a narrow vector. Without a
clamp (c is None) and with r after it, this is the expert of every generation up to V3.2: equal in exact
arithmetic. Sources: DeepSeekMoE 3; V4 report 4.2.3; official inference code.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.config import ModelConfig
from dsv41_edu.moe import gate
from dsv41_edu.moe.gate import Gate
from dsv41_edu.quantization import fp8_tiles_decode, mxfp4_decode


def swiglu(a: Tensor, u: Tensor, limit: float | None = None) -> Tensor:
    """silu(min(a, limit)) * clamp(u, -limit, limit) of floats, in fp32 (fp64 for fp64); no clamp without a limit."""
    if limit is not None:
        a, u = a.clamp(max=limit), u.clamp(-limit, limit)
    wide = torch.promote_types(a.dtype, torch.float32)
    return F.silu(a.to(wide)).mul_(u)  # in place: a new buffer costs as much as the product


def expert(
    x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float | None = None, weight: Tensor | None = None
) -> Tensor:
    """One expert on tokens x [T, d]; weight [T] or None. Returns [T, d] in x's dtype, activations in fp32."""
    h = swiglu(F.linear(x, w1), F.linear(x, w3), limit)
    if weight is not None:
        h = h * weight.to(h.dtype).unsqueeze(-1)
    return F.linear(h.to(x.dtype), w2)


def split_expert(w1: Tensor, w2: Tensor, w3: Tensor, m: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Fine-grained segmentation: m experts of width I/m whose outputs sum to the wide one's.

    Each channel of the hidden layer works alone, so any partition of the channels is a partition of the sum:
    same parameters, same FLOPs. Raises ValueError where m doesn't divide the width. Source: DeepSeekMoE 3.1.
    """
    if m < 1 or w1.shape[0] % m:
        raise ValueError(f"m = {m}: expected a divisor of the width {w1.shape[0]}")
    return list(zip(w1.chunk(m), w2.chunk(m, dim=1), w3.chunk(m), strict=True))


def check_routing(x: Tensor, weights: Tensor, indices: Tensor) -> None:
    """x [T, d], weights and indices [T, k]. Raises ValueError for other shapes, TypeError for dtypes."""
    if x.dim() != 2 or weights.shape != indices.shape or indices.dim() != 2 or len(indices) != len(x):
        raise ValueError(
            f"x {list(x.shape)}, weights {list(weights.shape)}, indices {list(indices.shape)}: "
            "expected [T, d], [T, k], [T, k]"
        )
    if not weights.is_floating_point() or indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"weights {weights.dtype}, indices {indices.dtype}: expected a float and an integer type")


def sort_pairs(indices: Tensor, n_experts: int) -> tuple[Tensor, Tensor]:
    """The T x k pairs by expert: their order, int64 [T k], and how many each expert has, int64 [E].

    Raises ValueError for an id outside 0 to E - 1.
    """
    experts, order = indices.flatten().sort(stable=True)
    if len(experts) and not 0 <= int(experts[0]) <= int(experts[-1]) < n_experts:
        raise ValueError(f"indices from {experts[0]} to {experts[-1]}: expected 0 to {n_experts - 1}")
    return order, experts.bincount(minlength=n_experts)


def experts_loop(
    x: Tensor, weights: Tensor, indices: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, limit: float | None = None
) -> Tensor:
    """The equation: y_t = sum over the k chosen of expert_e(x_t, r). x [T, d]; w1, w3 [E, I, d]; w2 [E, d, I].

    Each expert's output is rounded to x's dtype and summed in fp32, by rising expert id.
    """
    check_routing(x, weights, indices)
    _, counts = sort_pairs(indices, len(w1))
    y = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for e in counts.nonzero().flatten().tolist():  # the rest add nothing
        token, slot = torch.where(indices == e)
        y = y.index_add(0, token, expert(x[token], w1[e], w2[e], w3[e], limit, weights[token, slot]).to(y.dtype))
    return y.to(x.dtype)


class Experts(nn.Module):
    """E routed experts, w1 and w3 stored as one matrix [E, 2I, d] so that a token's two products are one.

    The grouped form: the T x k pairs are sorted by expert, each expert multiplies its contiguous rows, and each
    token sums its k rows in the order of its choice, so two runs are equal to the bit.
    """

    def __init__(self, n_experts: int, hidden_size: int, width: int, limit: float | None = None):
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(n_experts, 2 * width, hidden_size))
        self.w2 = nn.Parameter(torch.empty(n_experts, hidden_size, width))
        self.limit = limit
        nn.init.normal_(self.w13, std=hidden_size**-0.5)
        nn.init.normal_(self.w2, std=width**-0.5)

    @classmethod
    def of(cls, experts: Sequence[tuple[Tensor, Tensor, Tensor]], limit: float | None = None) -> "Experts":
        """From the w1, w2, w3 of each expert."""
        width, hidden_size = experts[0][0].shape
        made = cls(len(experts), hidden_size, width, limit).to(experts[0][0])
        with torch.no_grad():
            made.w13.copy_(torch.stack([torch.cat([w1, w3]) for w1, _, w3 in experts]))
            made.w2.copy_(torch.stack([w2 for _, w2, _ in experts]))
        return made

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """Sum over each token's experts: x [T, d], weights [T, k], indices [T, k] -> [T, d] in x's dtype."""
        if gate.fuse(x):
            w1, w3 = self.w13.chunk(2, dim=1)
            return fused(x, weights, indices, w1, self.w2, w3, self.limit)
        check_routing(x, weights, indices)
        T, k = indices.shape
        if len(self.w13) == k == 1 and not indices.any():  # a shared expert: nothing to sort
            a, u = F.linear(x, self.w13[0]).chunk(2, dim=-1)
            h = swiglu(a, u, self.limit).mul_(weights)
            return F.linear(h.to(x.dtype), self.w2[0])
        order, counts = sort_pairs(indices, len(self.w13))
        rows = F.embedding(order // k, x)  # x[order // k], but faster, forward and backward
        a, u = grouped_linear(rows, self.w13, counts).chunk(2, dim=-1)
        h = swiglu(a, u, self.limit)
        h = h.mul_(weights.flatten()[order].to(h.dtype).unsqueeze(-1))
        out = grouped_linear(h.to(x.dtype), self.w2, counts)
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(T * k, device=x.device))
        return F.embedding(back.view(T, k), out).sum(1)  # torch sums bf16 in fp32, and rounds once


def fused(*arguments) -> Tensor:
    """The Triton kernels, imported where they serve: elsewhere there may be no Triton."""
    from kernels.experts import fused_experts

    return fused_experts(*arguments)


def grouped_linear(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    """Rows of x [N, in], sorted by expert, times their expert's matrix w [E, out, in]; counts int [E] sum to N."""
    aligned = all(n * w.element_size() % 16 == 0 for n in w.shape[1:])
    if w.dtype != torch.float64 and aligned:  # what torch's grouped product takes
        return F.grouped_mm(x, w.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    return torch.cat([F.linear(rows, m) for rows, m in zip(x.split(counts.tolist()), w, strict=True)])


class QuantizedExperts(nn.Module):
    """Routed experts as the checkpoint stores them, decoded on the way: only the experts that a batch chose.

    `w1`, `w2`, `w3` are pairs of stacked payload and scales: MXFP4 (int8 [E, out, in/2] and E8M0 [E, out, in/32])
    or FP8 (E4M3 [E, out, in] and E8M0 [E, ceil(out/32), ceil(in/32)]).
    """

    def __init__(self, limit: float | None, **matrices: tuple[Tensor, Tensor]):
        super().__init__()
        self.limit = limit
        for name in ("w1", "w2", "w3"):
            payload, scales = matrices[name]
            self.register_buffer(f"{name}_payload", payload)
            self.register_buffer(f"{name}_scale", scales)

    def decode(self, name: str, e: int, dtype: torch.dtype) -> Tensor:
        """One matrix [out, in] of one expert."""
        payload, scales = getattr(self, f"{name}_payload")[e], getattr(self, f"{name}_scale")[e]
        fp4 = payload.dtype in (torch.int8, torch.uint8)
        return (mxfp4_decode if fp4 else fp8_tiles_decode)(payload, scales, torch.float32).to(dtype)

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """As `Experts.forward`."""
        if gate.fuse(x):
            pairs = ((getattr(self, f"{n}_payload"), getattr(self, f"{n}_scale")) for n in ("w1", "w2", "w3"))
            return fused(x, weights, indices, *pairs, self.limit)
        check_routing(x, weights, indices)
        _, counts = sort_pairs(indices, len(self.w1_payload))
        y = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        for e in counts.nonzero().flatten().tolist():
            token, slot = torch.where(indices == e)
            w1, w2, w3 = (self.decode(name, e, x.dtype) for name in ("w1", "w2", "w3"))
            y.index_add_(0, token, expert(x[token], w1, w2, w3, self.limit, weights[token, slot]).to(y.dtype))
        return y.to(x.dtype)


class MoE(nn.Module):
    """Gate, routed experts and the shared expert of one layer: [..., d] -> [..., d]."""

    def __init__(self, config: ModelConfig, layer: int = 0, drafter: bool = False):
        super().__init__()
        c = config
        self.gate = Gate(c, layer, drafter)
        self.experts = Experts(self.gate.n_experts, c.hidden_size, c.moe_intermediate_size, c.swiglu_limit)
        width = c.n_shared_experts * c.moe_intermediate_size
        self.shared_experts = Experts(1, c.hidden_size, width, c.swiglu_limit)

    def forward(self, x: Tensor, image_mask: Tensor | None = None, token_ids: Tensor | None = None) -> Tensor:
        """Routed outputs summed in fp32, the shared expert's added, rounded to x's dtype. Takes what `Gate` takes."""
        weights, indices = self.gate(x, image_mask, token_ids)
        flat = x.flatten(0, -2)
        routed = self.experts(flat, weights.flatten(0, -2), indices.flatten(0, -2))
        always = indices.new_zeros(len(flat), 1)
        shared = self.shared_experts(flat, weights.new_ones(len(flat), 1), always)
        return (routed + shared).view(x.shape)
