"""How a number is stored: every block format of the checkpoint and of the caches, both ways.

Notable here:
- an element is payload times scale, and there are two payloads: E4M3 (one byte) and E2M1 (one nibble);
- a scale is a power of two held as its exponent alone (E8M0), except that the compressed latent's is E4M3;
- the scale is rounded first and the values are divided by the *rounded* scale, so both sides agree on it;
- exponents are read from the float's bits (frexp): a float log2 may miss at exact powers of two;
- encoding works in float32 (float64 for float64 input) and carries no gradient.

| format                            | payload              | block   | scale | amax floor |
|-----------------------------------|----------------------|---------|-------|------------|
| fp8_rows: Engram row, window      | E4M3 [..., n]        | 32      | E8M0  | 1e-4       |
| fp8_tiles: FP8 weight             | E4M3 [..., out, in]  | 32 x 32 | E8M0  | 1e-4       |
| mxfp4: expert weight, index key   | int8 [..., n/2]      | 32      | E8M0  | 6 * 2^-126 |
| latent_fp4: compressed latent     | int8 [..., n/2]      | 16      | E4M3  | 6 * 2^-9   |

Sources: DeepSeek-V4.1-Flash checkpoint layout; its official inference code (floors, cache formats); OCP
Microscaling Formats (MX) v1.0 (E8M0, E2M1); OCP 8-bit floating point, saturating conversion (E4M3).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
E4M3_MAX, E2M1_MAX = 448.0, 6.0
# value of each code; the top bit of the nibble is the sign
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

BLOCK, LATENT_BLOCK = 32, 16
FP8_FLOOR = 1e-4
MXFP4_FLOOR = 6 * 2.0**-126
LATENT_FLOOR = 6 * 2.0**-9  # the least scale is E4M3's least positive value, so no scale is zero

_REAL = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _check_dtype(name: str, dtype: torch.dtype, *expected: torch.dtype) -> None:
    if dtype not in expected:
        raise TypeError(f"{name}: expected {' or '.join(map(str, expected))}, got {dtype}")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _real(x: Tensor, name: str = "x") -> Tensor:
    _check_dtype(name, x.dtype, *_REAL)
    return x.detach().to(_wide(x.dtype))


def _blocked_shape(name: str, x: Tensor, block: int) -> tuple[int, ...]:
    if x.ndim == 0 or x.shape[-1] % block:
        raise ValueError(f"{name}: expected shape [..., multiple of {block}], got {tuple(x.shape)}")
    return (*x.shape[:-1], x.shape[-1] // block)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as E8M0, for exponents -127..127: the byte is exponent + 127, so it is exact."""
    return (exponent + 127).to(torch.uint8).view(E8M0)


def _nearest(x: Tensor, mantissa_bits: int, least_exponent: int, largest: float) -> Tensor:
    """round(x / step) * step, step = 2^(max(floor(log2|x|), least_exponent) - mantissa_bits), |x| <= largest.

    Neighbours are one step apart and even multiples have even mantissas, so round's ties are the format's.
    Not torch's cast: from float64 it goes through float32 and rounds twice.
    """
    x = x.clamp(-largest, largest)
    exponent = torch.frexp(x).exponent - 1
    step = _power_of_two(exponent.clamp(min=least_exponent) - mantissa_bits).to(x.dtype)
    return torch.round(x / step) * step


def e4m3_encode(x: Tensor) -> Tensor:
    """Clamp to +-448, then nearest E4M3 value, ties to even mantissa.

    x: float [...]. Returns float8_e4m3fn [...]. Infinities saturate, NaN stays NaN, -0.0 keeps its sign.
    Raises TypeError for a dtype that isn't float. Source: OCP 8-bit floating point, saturating conversion.
    """
    return _nearest(_real(x), mantissa_bits=3, least_exponent=-6, largest=E4M3_MAX).to(E4M3)


def e4m3_decode(payload: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(-1)^s 2^(e-7) (1 + m/8), or (-1)^s 2^-6 m/8 where e = 0; bytes 0x7F and 0xFF are NaN.

    payload: float8_e4m3fn [...]. Returns dtype [...], exact. Raises TypeError. Source: as e4m3_encode.
    """
    _check_dtype("payload", payload.dtype, E4M3)
    _check_dtype("dtype", dtype, *_REAL)
    return payload.to(dtype)


def e8m0_encode(scales: Tensor) -> Tensor:
    """byte = log2(scale) + 127; NaN is byte 255.

    scales: float [...], powers of two from 2^-127 to 2^127. Returns float8_e8m0fnu [...]. Raises TypeError,
    and ValueError for any other value, which torch's own cast would round silently. Source: OCP MX v1.0.
    """
    scales = _real(scales, "scales")
    mantissa, exponent = torch.frexp(scales)  # a power of two is 0.5 * 2^exponent
    exponent, nan = exponent - 1, scales.isnan()
    bad = ~nan & ((mantissa != 0.5) | (exponent.abs() > 127))
    if bad.any():
        raise ValueError(f"scales: expected powers of two from 2^-127 to 2^127, got {scales[bad][0].item()}")
    return _power_of_two(exponent.masked_fill(nan, 128))


def e8m0_decode(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(byte - 127); byte 255 is NaN.

    scales: float8_e8m0fnu [...]. Returns dtype [...], exact but in float16, which ends at 2^-24 and 2^15
    (2^-127 is subnormal in float32 and bfloat16). Raises TypeError. Source: OCP MX v1.0.
    """
    _check_dtype("scales", scales.dtype, E8M0)
    _check_dtype("dtype", dtype, *_REAL)
    return scales.to(dtype)


def fp4_encode(x: Tensor) -> Tensor:
    """Code of the nearest of E2M1_VALUES, ties to even mantissa.

    x: float [...]. Returns uint8 [...], 0..15. Beyond +-6, infinity too, saturates; -0.0 and a small negative
    value are code 8. Raises TypeError, and ValueError for NaN, which E2M1 can't hold. Source: OCP MX v1.0.
    """
    x = _real(x)
    if x.isnan().any():
        raise ValueError("x: expected numbers, got NaN, which E2M1 cannot hold")
    x = _nearest(x, mantissa_bits=1, least_exponent=0, largest=E2M1_MAX)
    magnitude = torch.bucketize(x.abs().contiguous(), torch.tensor(E2M1_VALUES[:8]).to(x))
    return (magnitude + 8 * x.signbit()).to(torch.uint8)


def _check_codes(codes: Tensor) -> None:
    _check_dtype("codes", codes.dtype, torch.uint8)
    if (codes > 15).any():
        raise ValueError(f"codes: expected 0..15, got {codes.max().item()}")


def fp4_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E2M1_VALUES[code].

    codes: uint8 [...], 0..15. Returns dtype [...], exact. Raises TypeError, ValueError. Source: OCP MX v1.0.
    """
    _check_codes(codes)
    _check_dtype("dtype", dtype, *_REAL)
    return torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)[codes.int()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """byte i = codes[2i] + 16 codes[2i + 1]: the even index is in the low nibble.

    codes: uint8 [..., n], 0..15, n even. Returns int8 [..., n/2], the checkpoint's I8.
    Raises TypeError, ValueError. Source: DeepSeek-V4.1-Flash checkpoint layout.
    """
    _check_codes(codes)
    _blocked_shape("codes", codes, 2)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.int8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """codes[2i] = byte i mod 16, codes[2i + 1] = byte i div 16.

    packed: int8 or uint8 [..., n/2]. Returns uint8 [..., n]. Raises TypeError, ValueError.
    Source: DeepSeek-V4.1-Flash checkpoint layout.
    """
    _check_dtype("packed", packed.dtype, torch.int8, torch.uint8)
    _blocked_shape("packed", packed, 1)
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def power_of_two_scale(amax: Tensor, largest: float, floor: float) -> Tensor:
    """2^ceil(log2(max(amax, floor) / largest)): the least power of two that brings amax within largest.

    amax: float [...]; largest: of the payload, 448 or 6; floor: above 0. Returns float8_e8m0fnu [...].
    Raises TypeError, and ValueError for an amax that isn't finite or needs a scale beyond 2^127.
    Source: official inference code.
    """
    amax = _real(amax, "amax").clamp(min=floor)
    (mantissa, exponent), (m, e) = torch.frexp(amax), math.frexp(largest)
    # amax / largest = (mantissa / m) 2^(exponent - e), and mantissa / m lies strictly between 1/2 and 2
    exponent = exponent - e + (mantissa > m).int()
    bad = ~amax.isfinite() | (exponent.abs() > 127)
    if bad.any():
        raise ValueError(f"amax: expected finite, at most {largest} * 2^127, got {amax[bad][0].item()}")
    return _power_of_two(exponent)


def _magnitude(x: Tensor, name: str = "x") -> Tensor:
    # NaN marks its own element alone; an infinity would take the scale, and with it the whole block
    if x.isinf().any():
        raise ValueError(f"{name}: expected finite values, got an infinity, for which a block has no scale")
    return x.abs().nan_to_num(nan=0.0)


def _row_amax(x: Tensor, block: int) -> Tensor:
    _blocked_shape("x", x, block)
    return _magnitude(x).unflatten(-1, (-1, block)).amax(-1)


def _spread(scales: Tensor, x: Tensor, block: int, dim: int = -1) -> Tensor:
    """Each scale over the block of x that it belongs to, in x's dtype; a ragged last block is cut."""
    return scales.to(x.dtype).repeat_interleave(block, dim).narrow(dim, 0, x.shape[dim])


def _spread_tiles(scales: Tensor, x: Tensor) -> Tensor:
    return _spread(_spread(scales, x, BLOCK, -2), x, BLOCK, -1)


def _check_stored(payload: Tensor, payload_dtypes, scales: Tensor, scale_dtype, shape, dtype) -> None:
    _check_dtype("payload", payload.dtype, *payload_dtypes)
    _check_dtype("scales", scales.dtype, scale_dtype)
    _check_dtype("dtype", dtype, *_REAL)
    if scales.shape != shape:
        raise ValueError(f"scales: expected the payload's {shape}, got {tuple(scales.shape)}")


# Each pair keeps leading dimensions. TypeError is for a dtype, ValueError for a shape or an infinity.
# Products are exact in float64, and in float32 but for overflow at 2^128; narrower dtypes round once.


def fp8_rows_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """scale = 2^ceil(log2(max(amax, 1e-4) / 448)) per 32 channels; payload = E4M3(x / scale).

    x: float [..., n]. Returns float8_e4m3fn [..., n] and float8_e8m0fnu [..., n/32]; a NaN stays where it is.
    Raises TypeError, ValueError. Source: checkpoint layout (Engram rows), official inference code (window).
    """
    x = _real(x)
    scales = power_of_two_scale(_row_amax(x, BLOCK), E4M3_MAX, FP8_FLOOR)
    return e4m3_encode(x / _spread(scales, x, BLOCK)), scales


def fp8_rows_decode(payload: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """payload * scale of its 32 channels; a NaN scale makes them NaN.

    Shapes as fp8_rows_encode returns them. Returns dtype [..., n]. Raises TypeError, ValueError.
    """
    _check_stored(payload, (E4M3,), scales, E8M0, _blocked_shape("payload", payload, BLOCK), dtype)
    values = payload.to(_wide(dtype))
    return (values * _spread(scales, values, BLOCK)).to(dtype)


def _matrix_shape(name: str, x: Tensor) -> tuple[int, ...]:
    if x.ndim < 2:
        raise ValueError(f"{name}: expected shape [..., out, in], got {tuple(x.shape)}")
    return tuple(x.shape)


def fp8_tiles_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As fp8_rows_encode, with one scale per 32x32 tile; the last tiles may be ragged.

    weight: float [..., out, in]. Returns float8_e4m3fn [..., out, in] and float8_e8m0fnu
    [..., ceil(out/32), ceil(in/32)]. Raises TypeError, ValueError. Source: checkpoint layout (FP8 weights).
    """
    weight = _real(weight, "weight")
    *_, rows, columns = _matrix_shape("weight", weight)
    tiles = F.pad(_magnitude(weight, "weight"), (0, -columns % BLOCK, 0, -rows % BLOCK))
    amax = tiles.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).amax((-3, -1))
    scales = power_of_two_scale(amax, E4M3_MAX, FP8_FLOOR)
    return e4m3_encode(weight / _spread_tiles(scales, weight)), scales


def fp8_tiles_decode(payload: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """payload * scale of its tile.

    Shapes as fp8_tiles_encode returns them. Returns dtype [..., out, in]. Raises TypeError, ValueError.
    """
    *lead, rows, columns = _matrix_shape("payload", payload)
    shape = (*lead, -(-rows // BLOCK), -(-columns // BLOCK))
    _check_stored(payload, (E4M3,), scales, E8M0, shape, dtype)
    values = payload.to(_wide(dtype))
    return (values * _spread_tiles(scales, values)).to(dtype)


def mxfp4_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6)) per 32 channels; payload = E2M1(x / scale), packed.

    x: float [..., n]. Returns int8 [..., n/2] and float8_e8m0fnu [..., n/32]. Raises TypeError, ValueError
    (NaN too). Source: checkpoint layout (expert weights), official inference code (index keys, queries).
    """
    x = _real(x)
    scales = power_of_two_scale(_row_amax(x, BLOCK), E2M1_MAX, MXFP4_FLOOR)
    return pack_nibbles(fp4_encode(x / _spread(scales, x, BLOCK))), scales


def mxfp4_decode(payload: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E2M1_VALUES[code] * scale of its 32 channels.

    Shapes as mxfp4_encode returns them; the payload may be uint8 too. Returns dtype [..., n].
    Raises TypeError, ValueError.
    """
    shape = _blocked_shape("payload", payload, BLOCK // 2)
    _check_stored(payload, (torch.int8, torch.uint8), scales, E8M0, shape, dtype)
    values = fp4_decode(unpack_nibbles(payload), _wide(dtype))
    return (values * _spread(scales, values, BLOCK)).to(dtype)


def latent_fp4_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """scale = E4M3(max(amax, 6 * 2^-9) / 6) per 16 channels; payload = E2M1(x / scale), packed.

    x: float [..., n]. Returns int8 [..., n/2] and float8_e4m3fn [..., n/16]. The scale saturates at 448, so x
    does at 2688. Raises TypeError, ValueError (NaN too). Source: official inference code (latent cache).
    """
    x = _real(x)
    scales = e4m3_encode(_row_amax(x, LATENT_BLOCK).clamp(min=LATENT_FLOOR) / E2M1_MAX)
    return pack_nibbles(fp4_encode(x / _spread(scales, x, LATENT_BLOCK))), scales


def latent_fp4_decode(payload: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E2M1_VALUES[code] * scale of its 16 channels.

    Shapes as latent_fp4_encode returns them; the payload may be uint8 too. Returns dtype [..., n].
    Raises TypeError, ValueError.
    """
    shape = _blocked_shape("payload", payload, LATENT_BLOCK // 2)
    _check_stored(payload, (torch.int8, torch.uint8), scales, E4M3, shape, dtype)
    values = fp4_decode(unpack_nibbles(payload), _wide(dtype))
    return (values * _spread(scales, values, LATENT_BLOCK)).to(dtype)


def window_round_trip(x: Tensor) -> Tensor:
    """What the window cache keeps of latents x, float [..., n]: FP8, blocks of 32. Same shape and dtype."""
    return fp8_rows_decode(*fp8_rows_encode(x), x.dtype)


def indexer_round_trip(x: Tensor) -> Tensor:
    """What is left of index keys or queries x, float [..., n]: FP4, blocks of 32. Same shape and dtype."""
    return mxfp4_decode(*mxfp4_encode(x), x.dtype)


def latent_round_trip(x: Tensor) -> Tensor:
    """What the cache keeps of compressed latents x, float [..., n]: FP4, blocks of 16. Same shape, dtype."""
    return latent_fp4_decode(*latent_fp4_encode(x), x.dtype)
