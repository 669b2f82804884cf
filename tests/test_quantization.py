"""The formats against tables built here from their definitions, in exact fractions.

First one number (every byte, every nibble, every midpoint), then the scales at and around their edges, then
whole blocks against a slow exact encoder, then what that can't say: order of rounding, bad input, layout, and
the published vectors.
"""

import re
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise
from math import copysign, inf, isnan, nan, nextafter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dsv41_edu import quantization as q

VECTORS = load_file(Path(__file__).parent / "vectors" / "quantisation.safetensors")
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
WIDE = [torch.float32, torch.float64]


# The oracle: ascending tables of the values from zero up. The index is the code: even index, even mantissa.
def e4m3_value(byte: int) -> Fraction:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    return Fraction(8 + mantissa if exponent else mantissa, 8) * Fraction(2) ** (max(exponent, 1) - 7)


def e2m1_value(code: int) -> Fraction:
    exponent, mantissa = code >> 1 & 3, code & 1
    return Fraction(2 + mantissa if exponent else mantissa, 2) * Fraction(2) ** (max(exponent, 1) - 1)


E4M3_TABLE = [e4m3_value(byte) for byte in range(127)]
E2M1_TABLE = [e2m1_value(code) for code in range(8)]


def nearest_index(magnitude: Fraction, table: list[Fraction]) -> int:
    above = min(bisect_left(table, magnitude), len(table) - 1)
    return min((max(above - 1, 0), above), key=lambda i: (abs(table[i] - magnitude), i % 2))


def code_of(x: float, scale: Fraction, table: list[Fraction]) -> int:
    sign = len(table) + len(table) % 2  # 8 for E2M1; 128 for E4M3, whose index 127 is NaN
    return nearest_index(abs(Fraction(x)) / scale, table) + sign * (copysign(1, x) < 0)


def least_power_of_two(amax: Fraction, largest: int) -> int:
    exponent = -127
    while largest * Fraction(2) ** exponent < amax:
        exponent += 1
    return exponent


def largest_magnitude(block: list[float]) -> Fraction:
    return max(abs(Fraction(x)) for x in block)


def u8(x: torch.Tensor) -> list:
    return x.view(torch.uint8).tolist()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def stored(values: list[int] | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.uint8).view(dtype)


ALL_BYTES = torch.arange(256, dtype=torch.uint8)


# One number.
@pytest.mark.parametrize("dtype", FLOATS)
def test_e4m3_decodes_every_byte(dtype):
    got = q.e4m3_decode(ALL_BYTES.view(q.E4M3), dtype)
    assert got.dtype == dtype
    for byte, x in enumerate(got.tolist()):
        if byte & 127 == 127:
            assert isnan(x)
        else:
            assert Fraction(x) == (-1) ** (byte >> 7) * E4M3_TABLE[byte & 127]
            assert copysign(1, x) == (-1) ** (byte >> 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_e8m0_is_exact_both_ways_for_every_byte(dtype):
    got = q.e8m0_decode(ALL_BYTES.view(q.E8M0), dtype)
    assert got.dtype == dtype
    assert [Fraction(x) for x in got[:255].tolist()] == [Fraction(2) ** (byte - 127) for byte in range(255)]
    assert isnan(got[255])
    assert same_bits(q.e8m0_encode(got), ALL_BYTES.view(q.E8M0))


@pytest.mark.parametrize(
    "value", [0.0, -1.0, 3.0, inf, -inf, 1.5 * 2.0**127, 2.0**-128, 2.0**128, nextafter(1, 2)], ids=str
)
def test_e8m0_refuses_what_is_no_power_of_two(value):
    with pytest.raises(ValueError, match=f"scales: expected powers of two .*, got {re.escape(str(value))}$"):
        q.e8m0_encode(torch.tensor([1.0, nan, value], dtype=torch.float64))


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp4_decodes_and_encodes_every_code(dtype):
    codes = torch.arange(16, dtype=torch.uint8)
    got = q.fp4_decode(codes, dtype)
    assert got.dtype == dtype
    expected = [(-1) ** (code >> 3) * float(E2M1_TABLE[code & 7]) for code in range(16)]
    assert got.tolist() == expected == list(q.E2M1_VALUES)
    assert got.signbit().tolist() == [code >= 8 for code in range(16)]
    assert same_bits(q.fp4_encode(got), codes)


@pytest.mark.parametrize("dtype", FLOATS)
def test_e4m3_encodes_every_value_back(dtype):
    numbers = ALL_BYTES[(ALL_BYTES & 127) != 127]
    assert u8(q.e4m3_encode(q.e4m3_decode(numbers.view(q.E4M3), dtype))) == numbers.tolist()


ENCODERS = {"e4m3": (q.e4m3_encode, E4M3_TABLE), "fp4": (q.fp4_encode, E2M1_TABLE)}


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", ENCODERS)
def test_midpoints_go_to_the_even_mantissa_and_their_neighbours_do_not(name, dtype):
    encode, table = ENCODERS[name]
    middles = torch.tensor([float(a + b) / 2 for a, b in pairwise(table)], dtype=dtype)
    up, down = (torch.nextafter(middles, torch.tensor(x, dtype=dtype)) for x in (inf, -inf))
    pairs = range(len(middles))
    sign = 128 if name == "e4m3" else 8
    assert u8(encode(middles)) == [i + i % 2 for i in pairs]
    assert u8(encode(down)) == list(pairs)
    assert u8(encode(up)) == [i + 1 for i in pairs]
    assert u8(encode(-middles)) == [i + i % 2 + sign for i in pairs]


@pytest.mark.parametrize("name", ENCODERS)
@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(-500, 500) | st.floats(-7, 7) | st.floats(-0.03125, 0.03125, width=32)))
def test_drawn_numbers_go_to_the_nearest_value(name, xs):
    encode, table = ENCODERS[name]
    assert u8(encode(torch.tensor(xs, dtype=torch.float64))) == [code_of(x, Fraction(1), table) for x in xs]


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_number_saturates(dtype):
    x = torch.tensor([448, 460, 464, 480, 6e4, inf], dtype=dtype)
    assert u8(q.e4m3_encode(torch.cat([x, -x]))) == [0x7E] * 6 + [0xFE] * 6
    x = torch.tensor([6, 7, 8, 449, 6e4, inf], dtype=dtype)
    assert u8(q.fp4_encode(torch.cat([x, -x]))) == [7] * 6 + [15] * 6


def test_zeros_and_values_that_round_to_zero_keep_their_sign():
    x = torch.tensor([0.0, 1e-30, 2.0**-10, -0.0, -1e-30, -(2.0**-10)])
    assert u8(q.e4m3_encode(x)) == [0, 0, 0, 128, 128, 128]
    assert u8(q.fp4_encode(x)) == [0, 0, 0, 8, 8, 8]


def test_nan_stays_in_e4m3_and_is_refused_by_fp4():
    assert q.e4m3_encode(torch.tensor([nan, 1.0])).float().isnan().tolist() == [True, False]
    with pytest.raises(ValueError, match=r"^x: .*got NaN"):
        q.fp4_encode(torch.tensor([1.0, nan]))


def test_the_even_index_is_in_the_low_nibble():
    packed = q.pack_nibbles(torch.tensor([[1, 2, 15, 8], [0, 15, 7, 0]], dtype=torch.uint8))
    assert packed.dtype == torch.int8
    assert u8(packed) == [[0x21, 0x8F], [0xF0, 0x07]]
    assert q.unpack_nibbles(packed).tolist() == [[1, 2, 15, 8], [0, 15, 7, 0]]


def test_every_byte_unpacks_to_its_two_nibbles_from_int8_and_uint8():
    for packed in (ALL_BYTES, ALL_BYTES.view(torch.int8)):
        codes = q.unpack_nibbles(packed)
        assert codes.tolist() == [nibble for byte in range(256) for nibble in (byte % 16, byte // 16)]
        assert same_bits(q.pack_nibbles(codes), ALL_BYTES.view(torch.int8))
        assert q.unpack_nibbles(packed[:3]).tolist() == [0, 0, 1, 0, 2, 0]


# The scales.
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize(("largest", "exponents"), [(448, range(-127, 120)), (6, range(-127, 126))])
def test_the_scale_steps_just_above_each_power_of_two(largest, exponents, dtype):
    edges = torch.tensor([largest * 2.0**k for k in exponents], dtype=dtype)
    up, down = (torch.nextafter(edges, torch.tensor(x, dtype=dtype)) for x in (inf, 0))
    floor = 1e-45  # the least float32: out of the way
    assert u8(q.power_of_two_scale(edges, largest, floor)) == [k + 127 for k in exponents]
    assert u8(q.power_of_two_scale(down, largest, floor)) == [k + 127 for k in exponents]
    assert u8(q.power_of_two_scale(up, largest, floor)) == [k + 128 for k in exponents]


@settings(derandomize=True, deadline=None)
@given(st.floats(1e-4, 3e38), st.sampled_from([6, 448]))
def test_the_scale_is_the_least_power_of_two_that_suffices(amax, largest):
    got = q.power_of_two_scale(torch.tensor([amax], dtype=torch.float64), largest, 1e-4)
    assert u8(got) == [least_power_of_two(Fraction(amax), largest) + 127]


@pytest.mark.parametrize("amax", [inf, nan, 448 * 2.0**127 * 1.01], ids=str)
def test_an_amax_without_a_scale_is_refused(amax):
    assert u8(q.power_of_two_scale(torch.tensor([448 * 2.0**127], dtype=torch.float64), 448, 1e-4)) == [254]
    with pytest.raises(ValueError, match=r"amax: expected finite, at most 448"):
        q.power_of_two_scale(torch.tensor([1.0, amax], dtype=torch.float64), 448, 1e-4)


def test_a_scale_below_the_least_byte_is_refused():
    assert u8(q.power_of_two_scale(torch.tensor([6 * 2.0**-127]), 6, 1e-45)) == [0]
    with pytest.raises(ValueError, match="amax"):
        q.power_of_two_scale(torch.tensor([6 * 2.0**-128]), 6, 1e-45)


ROW_FORMATS = {
    # encode, decode, block, payload's table
    "fp8_rows": (q.fp8_rows_encode, q.fp8_rows_decode, 32, E4M3_TABLE),
    "mxfp4": (q.mxfp4_encode, q.mxfp4_decode, 32, E2M1_TABLE),
    "latent_fp4": (q.latent_fp4_encode, q.latent_fp4_decode, 16, E2M1_TABLE),
}


def one_block(format: str, amax: float) -> torch.Tensor:
    x = torch.zeros(ROW_FORMATS[format][2])
    x[3] = -amax
    return x


@pytest.mark.parametrize(
    ("format", "amax", "byte"),
    [
        ("fp8_rows", 0.0, 127 - 22),
        ("fp8_rows", 1e-5, 127 - 22),
        ("fp8_rows", 1e-4, 127 - 22),
        ("fp8_rows", 448 * 2.0**-22, 127 - 22),
        ("fp8_rows", 450 * 2.0**-22, 127 - 21),
        ("mxfp4", 0.0, 1),
        ("mxfp4", 2.0**-149, 1),
        ("mxfp4", 5.9 * 2.0**-126, 1),
        ("mxfp4", 6 * 2.0**-126, 1),
        ("mxfp4", 6.1 * 2.0**-126, 2),
        ("latent_fp4", 0.0, 1),
        ("latent_fp4", 5.9 * 2.0**-9, 1),
        ("latent_fp4", 6 * 2.0**-9, 1),
        ("latent_fp4", 8.99 * 2.0**-9, 1),
        ("latent_fp4", 9 * 2.0**-9, 2),  # a tie: 1.5 least steps, to the even mantissa
        ("latent_fp4", 15 * 2.0**-9, 2),  # 2.5, again
        ("latent_fp4", 15.01 * 2.0**-9, 3),
        ("latent_fp4", 6.0, 0x38),
        ("latent_fp4", 6 * 448.0, 0x7E),
        ("latent_fp4", 1e6, 0x7E),
    ],
)
def test_floors_and_ceilings_of_the_scales(format, amax, byte):
    _, scales = ROW_FORMATS[format][0](one_block(format, amax))
    assert u8(scales) == [byte]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", ROW_FORMATS)
def test_zero_blocks_come_back_as_zeros_with_their_signs(format, dtype):
    encode, decode, *_ = ROW_FORMATS[format]
    x = torch.tensor([0.0, -0.0], dtype=dtype).repeat(3, 32)
    assert same_bits(decode(*encode(x), dtype), x)


# Whole blocks against the exact encoder.
def exact_scale(format: str, block: list[float]) -> tuple[int, Fraction]:
    """The scale's byte and value."""
    amax = largest_magnitude(block)
    if format == "latent_fp4":
        byte = nearest_index(max(amax, Fraction(6, 512)) / 6, E4M3_TABLE)
        return byte, E4M3_TABLE[byte]
    largest, floor = (448, Fraction(1, 10000)) if format == "fp8_rows" else (6, 6 / Fraction(2) ** 126)
    exponent = least_power_of_two(max(amax, floor), largest)
    return exponent + 127, Fraction(2) ** exponent


def exact_encode(format: str, row: list[float]) -> tuple[list[int], list[int]]:
    """Bytes of the payload and of the scales, without a float on the way."""
    _, _, size, table = ROW_FORMATS[format]
    codes, scales = [], []
    for start in range(0, len(row), size):
        block = row[start : start + size]
        byte, scale = exact_scale(format, block)
        scales.append(byte)
        codes += [code_of(x, scale, table) for x in block]
    if table is E2M1_TABLE:
        codes = [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return codes, scales


@st.composite
def rows(draw, dtype):
    """64 channels whose two halves have their own magnitude, from the subnormals to the largest."""
    width = 32 if dtype == torch.float32 else 64
    halves = []
    for _ in range(2):
        unit = 2.0 ** draw(st.integers(-140, 120) | st.integers(-12, 12))
        xs = draw(st.lists(st.floats(-8, 8, width=width), min_size=1, max_size=32))
        halves += [xs[i % len(xs)] * unit for i in range(32)]
    return torch.tensor(halves, dtype=dtype)


@pytest.mark.parametrize("format", ROW_FORMATS)
@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.sampled_from(WIDE).flatmap(rows))
def test_drawn_rows_encode_as_exact_arithmetic_says(format, x):
    payload, scales = ROW_FORMATS[format][0](x)
    assert (u8(payload), u8(scales)) == exact_encode(format, x.tolist())


@pytest.mark.parametrize("format", ROW_FORMATS)
@settings(derandomize=True, deadline=None, max_examples=60)
@given(rows(torch.float32))
def test_decoding_is_within_half_a_step_unless_the_scale_saturates(format, x):
    encode, decode, block, _ = ROW_FORMATS[format]
    payload, scales = encode(x)
    got, x = decode(payload, scales, torch.float64), x.double()
    scale = scales.double().repeat_interleave(block)
    relative, least = (2.0**-4, 2.0**-10) if format == "fp8_rows" else (2.0**-2, 2.0**-2)
    inside = x.abs() <= 6 * scale if format == "latent_fp4" else torch.ones_like(x, dtype=torch.bool)
    assert ((got - x).abs() <= torch.maximum(x.abs() * relative, scale * least))[inside].all()
    assert torch.equal(got[~inside].abs(), 6 * scale[~inside])


@pytest.mark.parametrize("shape", [(70, 96), (33, 65), (1, 1), (32, 32)])
def test_tiles_share_a_scale_and_ragged_ones_are_cut(shape):
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
    payload, scales = q.fp8_tiles_encode(weight)
    down, across = -(-shape[0] // 32), -(-shape[1] // 32)
    assert payload.shape == shape
    assert scales.shape == (down, across)
    decoded = q.fp8_tiles_decode(payload, scales, torch.float64)
    for i in range(down):
        for j in range(across):
            here = slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32)
            tile = weight[here].flatten().tolist()
            byte, scale = exact_scale("fp8_rows", tile)
            assert u8(scales[i, j]) == byte
            codes = [code_of(x, scale, E4M3_TABLE) for x in tile]
            assert u8(payload[here].flatten()) == codes
            values = [(-1) ** (code >> 7) * scale * E4M3_TABLE[code & 127] for code in codes]
            assert [Fraction(x) for x in decoded[here].flatten().tolist()] == values


def test_each_scale_reaches_its_own_tile():
    # out before in: four scales that differ, each seen where its tile is
    payload = torch.ones(33, 40).to(q.E4M3)
    got = q.fp8_tiles_decode(payload, stored([[127, 128], [129, 130]], q.E8M0))
    expected = torch.empty(33, 40)
    expected[:32, :32], expected[:32, 32:], expected[32:, :32], expected[32:, 32:] = 1, 2, 4, 8
    assert torch.equal(got, expected)


def test_values_are_divided_by_the_rounded_scale():
    # The other order (quantise by amax / largest, then round the scale) gives 448, 6 and code 2 here.
    x = torch.zeros(32)
    x[0] = 240
    assert q.window_round_trip(x)[0] == 240
    x[0] = 5
    assert q.indexer_round_trip(x)[0] == 4
    x[0], x[1] = 6.3, 1.26  # scale E4M3(1.05) = 1
    assert q.latent_round_trip(x)[:2].tolist() == [6, 1.5]


ROUND_TRIPS = {
    "fp8_rows": q.window_round_trip,
    "mxfp4": q.indexer_round_trip,
    "latent_fp4": q.latent_round_trip,
}


def mixture(shape: tuple[int, ...] = (6, 5, 128)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


@pytest.mark.parametrize("unit", [1, 2.0**-25])  # the small one: float16 can't hold its scales
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", ROW_FORMATS)
def test_round_trip_is_decode_of_encode_keeps_the_dtype_and_settles(format, dtype, unit):
    encode, decode, *_ = ROW_FORMATS[format]
    x = (unit * mixture()).to(dtype)
    once = ROUND_TRIPS[format](x)
    assert same_bits(once, decode(*encode(x), dtype))
    assert same_bits(once, decode(*encode(x.double()), torch.float64).to(dtype))
    assert unit < 1 or not torch.equal(once, x)
    assert same_bits(ROUND_TRIPS[format](once), once)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(rows(torch.float64))
def test_a_second_round_trip_changes_nothing(x):
    for format, round_trip in ROUND_TRIPS.items():
        once = round_trip(x)
        if format == "latent_fp4":  # but for the subnormal scale of the next test
            once = once[(q.latent_fp4_encode(x)[1].double() != 2.0**-8).repeat_interleave(16)]
        assert torch.equal(round_trip(once), once)


def test_the_latent_round_trip_is_not_idempotent_at_one_subnormal_scale():
    # amax / 6 = 1.6 least steps rounds to 2; amax / scale = 4.8 rounds to 4, and 8 / 6 rounds down to 1 step
    x = one_block("latent_fp4", 9.6 * 2.0**-9)
    once = q.latent_round_trip(x)
    assert once[3] == -8 * 2.0**-9
    assert q.latent_round_trip(once)[3] == -6 * 2.0**-9


def test_a_cached_entry_takes_the_bytes_that_the_model_states():
    for encode, width, expected in [(q.latent_fp4_encode, 512, 288), (q.mxfp4_encode, 128, 68)]:
        assert sum(part.nbytes for part in encode(torch.ones(width))) == expected


def test_each_block_has_its_own_scale():
    x = torch.cat([torch.full((32,), 1.0), torch.full((32,), 1000.0)])
    assert u8(q.fp8_rows_encode(x)[1]) == [127 - 8, 127 + 2]
    assert u8(q.mxfp4_encode(x)[1]) == [127 - 2, 127 + 8]
    assert q.latent_fp4_encode(x)[1].tolist() == [0.171875] * 2 + [160.0] * 2


def test_subnormal_products_are_exact_in_float32():
    payload, scales = stored([[0x01] * 32], q.E4M3), stored([[0]], q.E8M0)
    assert q.fp8_rows_decode(payload, scales).unique().tolist() == [2.0**-136]
    assert q.mxfp4_decode(stored([[0x11] * 16], torch.int8), scales).unique().tolist() == [2.0**-128]


# What has no value, or no scale.
@pytest.mark.parametrize("encode", [q.fp8_rows_encode, q.fp8_tiles_encode])
def test_a_nan_marks_only_its_own_fp8_element(encode):
    x = 1e-3 * mixture((64, 64))
    clean_payload, clean_scales = encode(x.index_put((torch.tensor(7), torch.tensor(9)), torch.tensor(0.0)))
    x[7, 9] = nan
    payload, scales = encode(x)
    assert same_bits(scales, clean_scales)
    assert payload.float().isnan().nonzero().tolist() == [[7, 9]]
    payload.view(torch.uint8)[7, 9] = 0
    assert same_bits(payload, clean_payload)


@pytest.mark.parametrize("encode", [q.mxfp4_encode, q.latent_fp4_encode])
def test_a_nan_is_refused_by_the_fp4_blocks(encode):
    with pytest.raises(ValueError, match=r"^x: .*got NaN"):
        encode(torch.tensor([nan] + [1.0] * 31))


@pytest.mark.parametrize("infinity", [inf, -inf])
@pytest.mark.parametrize(
    ("encode", "name"),
    [
        (q.fp8_rows_encode, "x"),
        (q.fp8_tiles_encode, "weight"),
        (q.mxfp4_encode, "x"),
        (q.latent_fp4_encode, "x"),
        (q.window_round_trip, "x"),
        (q.indexer_round_trip, "x"),
        (q.latent_round_trip, "x"),
    ],
)
def test_an_infinity_is_refused_by_every_block_format(encode, name, infinity):
    x = torch.ones(32, 32)
    x[3, 4] = infinity
    with pytest.raises(ValueError, match=f"^{name}: expected finite values, got an infinity"):
        encode(x)


def test_a_float64_beyond_the_scales_is_refused():
    with pytest.raises(ValueError, match=r"amax: expected finite, at most 448.0 \* 2\^127, got 1e\+300"):
        q.fp8_rows_encode(torch.full((32,), 1e300, dtype=torch.float64))


def test_a_nan_scale_makes_its_block_nan_and_no_other():
    block = torch.arange(64) < 32
    e8m0, e4m3 = stored([[255, 127]], q.E8M0), stored([[0x7F, 0xFF, 0x38, 0x38]], q.E4M3)
    fp8, fp4 = torch.ones(1, 64).to(q.E4M3), torch.full((1, 32), 0x22, dtype=torch.uint8)
    assert torch.equal(q.fp8_rows_decode(fp8, e8m0).isnan()[0], block)
    assert torch.equal(q.fp8_tiles_decode(fp8, e8m0).isnan()[0], block)
    assert torch.equal(q.mxfp4_decode(fp4, e8m0).isnan()[0], block)
    assert torch.equal(q.latent_fp4_decode(fp4, e4m3).isnan()[0], block)


# Bad input.
FP8, E8, NIBBLES = (
    torch.zeros(4, 64).to(q.E4M3),
    stored([[127, 127]] * 4, q.E8M0),
    torch.zeros(4, 32, dtype=torch.int8),
)
E4 = torch.ones(4, 4).to(q.E4M3)
INTEGERS = torch.ones(4, 64, dtype=torch.int64)


@pytest.mark.parametrize(
    "encode",
    [
        q.e4m3_encode,
        q.fp4_encode,
        q.fp8_rows_encode,
        q.mxfp4_encode,
        q.latent_fp4_encode,
        q.window_round_trip,
        q.indexer_round_trip,
        q.latent_round_trip,
    ],
)
@pytest.mark.parametrize("x", [INTEGERS, FP8, INTEGERS.bool()], ids=["int64", "e4m3", "bool"])
def test_only_floats_are_encoded(encode, x):
    with pytest.raises(TypeError, match=rf"^x: expected torch.bfloat16 .* got {x.dtype}$"):
        encode(x)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: q.fp8_tiles_encode(INTEGERS), TypeError, "weight: expected .* got torch.int64"),
        (lambda: q.e8m0_encode(INTEGERS), TypeError, "scales: expected .* got torch.int64"),
        (lambda: q.power_of_two_scale(INTEGERS, 6, 1.0), TypeError, "amax: expected .* got torch.int64"),
        (lambda: q.e4m3_decode(NIBBLES), TypeError, "payload: expected torch.float8_e4m3fn, got"),
        (lambda: q.e8m0_decode(FP8), TypeError, "scales: expected torch.float8_e8m0fnu, got"),
        (lambda: q.e4m3_decode(FP8, torch.int8), TypeError, "dtype: expected .* got torch.int8"),
        (lambda: q.e8m0_decode(E8, torch.int8), TypeError, "dtype: expected .* got torch.int8"),
        (lambda: q.fp4_decode(INTEGERS), TypeError, "codes: expected torch.uint8, got torch.int64"),
        (lambda: q.fp4_decode(INTEGERS.byte(), torch.int8), TypeError, "dtype: expected .* got torch.int8"),
        (lambda: q.fp4_decode(16 * INTEGERS.byte()), ValueError, r"codes: expected 0\.\.15, got 16"),
        (lambda: q.pack_nibbles(INTEGERS), TypeError, "codes: expected torch.uint8, got torch.int64"),
        (lambda: q.pack_nibbles(200 * INTEGERS.byte()), ValueError, r"codes: expected 0\.\.15, got 200"),
        (lambda: q.pack_nibbles(INTEGERS.byte()[:, :63]), ValueError, r"codes: .*of 2\], got \(4, 63\)"),
        (lambda: q.pack_nibbles(INTEGERS.byte()[0, 0]), ValueError, r"codes: .*multiple of 2\], got \(\)"),
        (
            lambda: q.unpack_nibbles(INTEGERS),
            TypeError,
            "packed: expected torch.int8 or torch.uint8, got torch.int64",
        ),
        (lambda: q.unpack_nibbles(NIBBLES[0, 0]), ValueError, r"packed: .*got \(\)"),
        (lambda: q.fp8_rows_encode(torch.ones(4, 48)), ValueError, r"x: .*of 32\], got \(4, 48\)"),
        (lambda: q.fp8_rows_encode(torch.ones(())), ValueError, r"x: .*of 32\], got \(\)"),
        (lambda: q.mxfp4_encode(torch.ones(4, 48)), ValueError, r"x: .*of 32\], got \(4, 48\)"),
        (lambda: q.latent_fp4_encode(torch.ones(4, 40)), ValueError, r"x: .*of 16\], got \(4, 40\)"),
        (lambda: q.fp8_tiles_encode(torch.ones(32)), ValueError, r"weight: .*out, in\], got \(32,\)"),
        (lambda: q.fp8_rows_decode(NIBBLES, E8), TypeError, "payload: expected torch.float8_e4m3fn, got"),
        (lambda: q.fp8_rows_decode(FP8, FP8), TypeError, "scales: expected torch.float8_e8m0fnu, got"),
        (lambda: q.fp8_rows_decode(FP8, E8, torch.int8), TypeError, "dtype: expected .* got torch.int8"),
        (lambda: q.fp8_rows_decode(FP8[:, :48], E8), ValueError, r"payload: .*of 32\], got \(4, 48\)"),
        (lambda: q.fp8_rows_decode(FP8[0, 0], E8), ValueError, r"payload: .*of 32\], got \(\)"),
        (lambda: q.fp8_rows_decode(FP8, E8[:, :1]), ValueError, r"scales: expected .*\(4, 2\), got \(4, 1\)"),
        (lambda: q.fp8_rows_decode(FP8, E8[:1]), ValueError, r"scales: expected .*\(4, 2\), got \(1, 2\)"),
        (lambda: q.fp8_tiles_decode(FP8, E8), ValueError, r"scales: expected .*\(1, 2\), got \(4, 2\)"),
        (lambda: q.fp8_tiles_decode(FP8[0], E8), ValueError, r"payload: expected .*out, in\], got \(64,\)"),
        (lambda: q.fp8_tiles_decode(NIBBLES, E8[:1]), TypeError, "payload: expected torch.float8_e4m3fn"),
        (lambda: q.mxfp4_decode(FP8, E8), TypeError, "payload: expected torch.int8 or torch.uint8, got"),
        (lambda: q.mxfp4_decode(NIBBLES, E4), TypeError, "scales: expected torch.float8_e8m0fnu, got"),
        (lambda: q.mxfp4_decode(NIBBLES[:, :24], E8), ValueError, r"payload: .*of 16\], got \(4, 24\)"),
        (lambda: q.mxfp4_decode(NIBBLES, E8.repeat(1, 2)), ValueError, r"scales: .*\(4, 2\), got \(4, 4\)"),
        (lambda: q.latent_fp4_decode(NIBBLES, E8), TypeError, "scales: expected torch.float8_e4m3fn, got"),
        (lambda: q.latent_fp4_decode(NIBBLES[:, :12], E4), ValueError, r"payload: .*of 8\], got \(4, 12\)"),
        (lambda: q.latent_fp4_decode(NIBBLES, E4[:, :2]), ValueError, r"scales: .*\(4, 4\), got \(4, 2\)"),
    ],
)
def test_bad_input_names_the_argument_and_what_came(call, error, message):
    with pytest.raises(error, match=f"^{message}"):
        call()


# Layout.
@pytest.mark.parametrize("format", [*ROW_FORMATS, "fp8_tiles"])
def test_no_rows_no_work_and_any_layout(format):
    encode, decode = getattr(q, f"{format}_encode"), getattr(q, f"{format}_decode")
    for shape in [(0, 64), (3, 0, 64), (4, 0)]:
        assert decode(*encode(torch.zeros(shape))).shape == shape

    x = mixture((64, 96, 3)).permute(2, 1, 0)
    assert not x.is_contiguous()
    payload, scales = encode(x)
    expected = encode(x.contiguous())
    assert same_bits(payload.contiguous(), expected[0])
    assert same_bits(scales.contiguous(), expected[1])
    assert same_bits(encode(x[1])[0].contiguous(), expected[0][1].contiguous())  # alone as among others

    backwards = [part.mT.contiguous().mT for part in expected]
    assert not backwards[0].is_contiguous()
    assert same_bits(decode(*backwards).contiguous(), decode(*expected))


def test_no_gradient_and_the_input_is_left_alone():
    x = mixture()
    before = x.clone()
    for round_trip in ROUND_TRIPS.values():
        assert not round_trip(x.requires_grad_()).requires_grad
    assert torch.equal(x, before)


def test_stored_types_pass_through_safetensors(tmp_path):
    parts = {}
    for name in ("fp8_rows", "fp8_tiles", "mxfp4", "latent_fp4"):
        encode = getattr(q, f"{name}_encode")
        parts[f"{name}.weight"], parts[f"{name}.scale"] = encode(mixture((40, 64)))
    save_file(parts, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(same_bits(loaded[name], part) for name, part in parts.items())
    assert {str(part.dtype) for part in parts.values()} == {
        "torch.float8_e4m3fn",
        "torch.float8_e8m0fnu",
        "torch.int8",
    }


# The published vectors, bit for bit.
@pytest.mark.parametrize(
    ("name", "decode", "payload_dtype"),
    [
        ("fp4", q.mxfp4_decode, torch.int8),
        ("fp8", q.fp8_tiles_decode, q.E4M3),
        ("engram_row", q.fp8_rows_decode, q.E4M3),
    ],
)
def test_vectors_decode(name, decode, payload_dtype):
    payload = VECTORS[f"{name}.bytes"].view(payload_dtype)
    scales = VECTORS[f"{name}.scale_bytes"].view(q.E8M0)
    assert same_bits(decode(payload, scales, torch.float64), VECTORS[f"{name}.values"])


def test_vectors_of_all_codes():
    assert same_bits(q.e4m3_decode(ALL_BYTES.view(q.E4M3), torch.float64), VECTORS["fp8.all_256"])
    assert same_bits(q.fp4_decode(torch.arange(16, dtype=torch.uint8), torch.float64), VECTORS["e2m1.all_16"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_vectors_of_the_round_trips(dtype):
    x = VECTORS["rt.x"].to(dtype)  # the inputs are bfloat16 values
    assert same_bits(q.window_round_trip(x).float(), VECTORS["rt.fp8_32_e8m0"])
    assert same_bits(q.indexer_round_trip(x).float(), VECTORS["rt.fp4_32_e8m0"])
    assert same_bits(q.latent_round_trip(x).float(), VECTORS["rt.fp4_16_e4m3"])
    exponents = q.fp8_rows_encode(x)[1].view(torch.uint8).int() - 127
    assert same_bits(exponents, VECTORS["rt.fp8_scale_exponent"])
