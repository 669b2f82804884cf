"""One layer: what the residual streams meet. Engram in two layers, a seam with attention, a seam with experts.

    X <- X + memory                    layers with an Engram alone
    X <- seam(X, attn(attn_norm(.)))
    X <- seam(X, ffn(ffn_norm(.)))

Names are those of the checkpoint, where the experts are single matrices; here a layer's experts are stacked, and
their names are made when a state dict is written and read.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dsv41_edu.attention.attention import Attention
from dsv41_edu.attention.cache import Chunk
from dsv41_edu.config import ModelConfig
from dsv41_edu.engram.module import Engram
from dsv41_edu.mhc.seam import Seam, coefficients, collapse, expand, one_hot
from dsv41_edu.moe.experts import Experts, MoE


class Residual:
    """The streams between two sublayers, in the single-pass form: an output waits until the next seam mixes it in."""

    def __init__(self, x: Tensor, n: int, settings: tuple[int, float, float], seams: tuple[Callable, Callable]):
        """n streams of x [..., d]; settings: Sinkhorn's iterations and eps, the norm's eps; seams: the two functions
        below that begin one, after nothing and after a sublayer.
        """
        self.mixed = x.unsqueeze(-2).expand(*x.shape[:-1], n, x.shape[-1]).contiguous()
        self.pending = one_hot(self.mixed, torch.promote_types(x.dtype, torch.float32))
        self.waiting, self.settings = None, settings
        self.first_pass, self.single_pass = seams

    @property
    def streams(self) -> Tensor:
        """[..., n, d], with the last sublayer's output."""
        if self.waiting is not None:
            self.mixed, self.waiting = expand(self.waiting[0], self.mixed, *self.waiting[1:]), None
        return self.mixed

    @streams.setter
    def streams(self, streams: Tensor) -> None:
        self.mixed, self.waiting = streams, None

    def enter(self, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """A sublayer's input [..., d] by the pending map, and the maps that `leave` needs."""
        if self.waiting is None:
            z, self.pending, post, comb = self.first_pass(self.mixed, self.pending, fn, base, scale, *self.settings)
            return z, (post, comb)
        seam = fused if self.mixed.is_cuda and not torch.is_grad_enabled() else self.single_pass
        (out, *ended), self.waiting = self.waiting, None
        made = seam(out, self.mixed, *ended, self.pending, fn, base, scale, *self.settings)
        self.mixed, z, self.pending, post, comb = made
        return z, (post, comb)

    def leave(self, out: Tensor, maps: tuple[Tensor, Tensor]) -> None:
        """Take the sublayer's output [..., d]."""
        self.waiting = (out, *maps)

    def collapsed(self) -> Tensor:
        """The streams' sum by the last seam's map: what the last norm gets."""
        return collapse(self.streams, self.pending)

    def take(self, at: Tensor) -> None:
        """Keep the tokens at [B, S'] of [B, S] alone."""
        rows = torch.arange(len(at), device=at.device).unsqueeze(1)
        self.streams, self.pending = self.streams[rows, at], self.pending[rows, at]


def first_pass(streams: Tensor, pending: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *settings) -> tuple:
    """`single_pass` where no output waits: the collapse [..., d], and pre, post, comb."""
    return collapse(streams, pending), *coefficients(streams, fn, base, scale, *settings)


def fused(out, streams, post, comb, pending, fn, base, scale, iterations, eps, norm_eps) -> tuple[Tensor, ...]:
    """`single_pass` by the Triton kernels, imported where they serve."""
    from kernels.seam import fused_single_pass

    shape = out.shape[:-1]
    flat = [t.flatten(0, len(shape) - 1) for t in (out, streams, post, comb, pending)]
    made = fused_single_pass(*flat, fn, base, scale, iterations=iterations, eps=eps, norm_eps=norm_eps)
    return tuple(getattr(made, name).unflatten(0, shape) for name in ("streams", "z", "pre", "post", "comb"))


class Layer(nn.Module):
    """Layer `layer` of a config, or with `drafter` a block of its drafter (their ids go on after the layers')."""

    def __init__(self, config: ModelConfig, layer: int, drafter: bool = False):
        super().__init__()
        c = config
        self.attn, self.ffn = Attention(c, layer), MoE(c, layer, drafter)
        self.attn_norm, self.ffn_norm = (nn.RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(2))
        for seam in ("hc_attn", "hc_ffn"):
            for name, parameter in Seam(c.hc_mult, c.hidden_size).named_parameters():
                self.register_parameter(f"{seam}_{name}", parameter)
        self.engram = Engram(c, layer) if layer in c.engram_layer_ids else None
        self.dropout = nn.Dropout(0.0)
        for experts in (self.ffn.experts, self.ffn.shared_experts):
            experts.register_state_dict_post_hook(name_experts)
            experts.register_load_state_dict_pre_hook(stack_experts)

    def add_memory(self, residual: Residual, rows: Tensor, image_mask: Tensor | None = None) -> None:
        """What comes before the layer proper where there is an Engram; rows int64 [B, S, columns]."""
        text_mask = None if image_mask is None else ~image_mask
        residual.streams = self.engram(residual.streams, rows, text_mask)

    def forward(self, residual: Residual, chunk: Chunk, image_mask: Tensor | None = None) -> Residual:
        """The residual past this layer's two sublayers; image_mask: bool [B, S], or None for text."""
        z, maps = residual.enter(self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale)
        residual.leave(self.dropout(self.attn(self.attn_norm(z), chunk)), maps)
        z, maps = residual.enter(self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale)
        residual.leave(self.dropout(self.ffn(self.ffn_norm(z), image_mask)), maps)
        return residual


def expert_names(experts: Experts, prefix: str) -> list[str]:
    """What stands before `w1.weight`: numbered, but for the shared expert."""
    return [prefix] if prefix.endswith("shared_experts.") else [f"{prefix}{e}." for e in range(len(experts.w2))]


def name_experts(experts: Experts, state: dict[str, Tensor], prefix: str, _) -> None:
    """Stacked w13 [E, 2I, d] and w2 [E, d, I] to each expert's w1, w2, w3, as views."""
    w13, w2 = state.pop(f"{prefix}w13"), state.pop(f"{prefix}w2")
    for e, name in enumerate(expert_names(experts, prefix)):
        state[f"{name}w1.weight"], state[f"{name}w3.weight"] = w13[e].chunk(2)
        state[f"{name}w2.weight"] = w2[e]


def stack_experts(experts: Experts, state: dict[str, Tensor], prefix: str, *_) -> None:
    """The way back, for those names that are all there; else torch's own error names what is missing."""
    names = expert_names(experts, prefix)
    if all(f"{n}{w}.weight" in state for n in names for w in ("w1", "w2", "w3")):
        w1, w2, w3 = ([state.pop(f"{n}{w}.weight") for n in names] for w in ("w1", "w2", "w3"))
        state[f"{prefix}w13"] = torch.stack([torch.cat(pair) for pair in zip(w1, w3, strict=True)])
        state[f"{prefix}w2"] = torch.stack(w2)
