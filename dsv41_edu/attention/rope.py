"""Rotary positions: pairs of adjacent channels, the last ones of a vector, turned by an angle that grows with t.

    f_j = base^(-2j/width)                                  j = 0 ... width/2 - 1
    YaRN: f_j (1 - ramp_j) + f_j/factor ramp_j              ramp from 0 at `low` to 1 at `high`
    low, high = width ln(L0 / (beta 2 pi)) / (2 ln base)    beta_fast rounded down, beta_slow rounded up
    (x_2j + i x_2j+1)  <-  (x_2j + i x_2j+1) e^(i t f_j)

Layers with a window alone take the small base without YaRN, all others the large one with it, for every branch alike.
One latent is key and value, so what attention returns is turned back at the query's position. No temperature.
Sources: YaRN 3.2; V4.1 official inference code.
"""

import math
from functools import cache

import torch
from torch import Tensor

from dsv41_edu.config import ModelConfig, RopeScaling


@cache
def frequencies(width: int, base: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians a position, float64 [width/2], of the pairs of `width` channels. Made once: do not write into it."""
    plain = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    if scaling is None:
        return plain
    low, high = (
        width * math.log(scaling.original_max_position_embeddings / (beta * 2 * math.pi)) / (2 * math.log(base))
        for beta in (scaling.beta_fast, scaling.beta_slow)
    )
    low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float64, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def layer_frequencies(config: ModelConfig, ratio: int) -> Tensor:
    """Those of a layer by its compression ratio, 0 for a window alone."""
    if ratio == 0:
        return frequencies(config.qk_rope_head_dim, config.rope_theta)
    return frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)


def turns(positions: Tensor, freqs: Tensor, dtype: torch.dtype) -> Tensor:
    """e^(i t f), complex [..., width/2], of positions, integers [...]: complex128 for float64, else complex64.

    The angle is formed in float64: in float32 position 1,048,575 would be off by 0.03 radian.
    """
    angle = positions.unsqueeze(-1).to(torch.float64) * freqs.to(positions.device)
    turn = torch.polar(torch.ones_like(angle), angle)
    return turn if dtype == torch.float64 else turn.to(torch.complex64)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """x [..., D], its last channels turned by `turn` [..., width/2], in at least fp32; `turn.conj()` turns back."""
    still, moved = x.split([x.shape[-1] - 2 * turn.shape[-1], 2 * turn.shape[-1]], dim=-1)
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.view_as_complex(moved.to(wide).unflatten(-1, (-1, 2)).contiguous())
    return torch.cat([still, torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)], dim=-1)
