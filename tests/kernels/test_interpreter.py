"""The interpreter against numbers rounded here, from the definition of each format.

First casts: each pattern of the small formats, and around each border between two neighbours, where rounding is
decided. Then `tl.dot` against float64, and what must be refused. Last, that each of these checks fails without
the fix that it is for.
"""

import importlib.util
import sys
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from kernels.launch import INTERPRETED, tl
from tests.kernels.toy_kernels import add, as_columns, convert, count_up, fused, matmul, rmsnorm, total

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")

BLOCK = 65536
BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALVES = [torch.bfloat16, torch.float16]
SMALL = [*HALVES, E4M3, E5M2]

# Each format: bits of its mantissa, bias of its exponent, and the code of its largest number.
FORMATS = {torch.bfloat16: (7, 127, 0x7F7F), torch.float16: (10, 15, 0x7BFF), E4M3: (3, 7, 0x7E), E5M2: (2, 15, 0x7B)}


def cast(x, dtype, rounding=None):
    y = torch.empty(x.shape, dtype=dtype)
    convert[(-(-len(x) // BLOCK),)](x, y, len(x), BLOCK=BLOCK, ROUNDING=rounding)
    return y


def codes(x):
    return x.view(BITS[x.element_size()]).to(torch.int64)


def table(dtype):
    """The numbers of a format from zero up, in float64, and one more, the first that is too large for it."""
    mantissa_bits, bias, largest = FORMATS[dtype]
    code = np.arange(largest + 2)
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    mantissa += np.where(exponent > 0, 1 << mantissa_bits, 0)
    return np.ldexp(mantissa.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)


def rounded(x, dtype):
    """The code of the nearest number, the even one of two: 8-bit formats saturate, the others overflow."""
    numbers = table(dtype)
    magnitude = np.minimum(x.double().abs().numpy(), numbers[-1])
    above = np.searchsorted(numbers, magnitude)
    below = np.maximum(above - 1, 0)
    up, down = numbers[above] - magnitude, magnitude - numbers[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    if dtype.itemsize == 1:
        code = np.minimum(code, len(numbers) - 2)
    return torch.from_numpy(code) + torch.signbit(x).long() * (1 << (8 * dtype.itemsize - 1))


def borders(dtype):
    """Every number of a format, the float32 midway to the next and both neighbours of that, with either sign."""
    numbers = table(dtype)
    midway = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    edges = [np.nextafter(midway, np.float32(0)), midway, np.nextafter(midway, np.float32(np.inf))]
    x = np.concatenate([numbers[:-1].astype(np.float32), *edges, np.float32([7e4, 3e38, np.inf])])
    return torch.from_numpy(np.concatenate([x, -x]))


def patterns(dtype):
    """Every bit pattern of a format."""
    return torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32).to(BITS[dtype.itemsize]).view(dtype)


def check_rounding(dtype):
    x = borders(dtype)
    assert torch.equal(codes(cast(x, dtype)), rounded(x, dtype))


@pytest.mark.parametrize("dtype", SMALL)
def test_float32_rounds_to_the_nearest_even(dtype):
    check_rounding(dtype)


@pytest.mark.parametrize("dtype", SMALL)
def test_casts_agree_with_torch(dtype):
    x = borders(dtype)
    x = x if dtype in HALVES else x[x.abs() <= torch.finfo(dtype).max]
    assert torch.equal(codes(cast(x, dtype)), codes(x.to(dtype)))


@pytest.mark.parametrize("dtype", SMALL)
def test_every_pattern_widens_exactly(dtype):
    x = patterns(dtype)
    finite = x.float().isfinite()
    magnitude = torch.from_numpy(table(dtype)[:-1]).float()
    assert torch.equal(codes(cast(x, torch.float32)[finite]), codes(torch.cat([magnitude, -magnitude])))
    for wide in (torch.float32, torch.float64):
        assert torch.allclose(cast(x, wide), x.to(wide), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("source", "dtype"), product([E4M3, E5M2], HALVES))
def test_float8_widens_to_16_bits(source, dtype):
    x = patterns(source)
    assert torch.allclose(cast(x, dtype).float(), x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("source", "dtype"),
    [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, E4M3), (torch.float16, E4M3)],
)
def test_every_16_bit_pattern_narrows_once(source, dtype):
    x = patterns(source)
    x = x[~x.isnan()]
    assert torch.equal(codes(cast(x, dtype)), rounded(x, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_float64_narrows_as_in_torch(dtype):
    x = torch.from_numpy(np.random.default_rng(0).normal(size=10_000)) * 2.0 ** torch.arange(-20, 20).repeat(250)
    assert torch.equal(codes(cast(x, dtype)), codes(x.to(dtype)))


@pytest.mark.parametrize("source", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool])
def test_integers_to_bfloat16(source):
    x = torch.arange(-70_000, 70_000).to(source)
    assert torch.equal(codes(cast(x, torch.bfloat16)), rounded(x.float(), torch.bfloat16))


def test_other_casts_are_untouched():
    x = torch.tensor([-3.7, 0.0, 2.5, 100.9])
    assert cast(x, torch.int32).tolist() == [-3, 0, 2, 100]
    assert cast(x.bfloat16(), torch.int32).tolist() == [-3, 0, 2, 101]
    assert cast(torch.tensor([-1, 5, 2**40]), torch.float32).tolist() == [-1, 5, 2**40]
    assert cast(torch.tensor([-1, 5, 300]), torch.uint8).tolist() == [255, 5, 44]


@pytest.mark.parametrize(("source", "dtype"), [*product([torch.float32], SMALL), *product(HALVES, [E4M3])])
def test_nan_stays_nan(source, dtype):
    x = torch.tensor([np.nan, -np.nan, 1.0]).to(source)
    assert cast(x, dtype).float().isnan().tolist() == [True, True, False]


def test_a_block_that_was_broadcast_and_transposed_is_cast_in_place():
    x, y = torch.arange(4.0), torch.empty(4, 4, dtype=torch.bfloat16)
    as_columns[(1,)](x, y, N=4)
    assert torch.equal(y, x[:, None].expand(4, 4).bfloat16())


@pytest.mark.parametrize(
    ("source", "dtype", "rounding", "message"),
    [
        (torch.bfloat16, E5M2, None, "the cast from bf16 to fp8e5 has no exact model here: cast through float32"),
        (torch.float16, E5M2, None, "from fp16 to fp8e5"),
        (torch.float64, E4M3, None, "from fp64 to fp8e4nv"),
        (E4M3, E5M2, None, "from fp8e4nv to fp8e5"),
        (torch.float32, torch.bfloat16, "rtz", "only rounding to nearest even"),
    ],
)
def test_what_has_no_exact_model_is_refused(source, dtype, rounding, message):
    with pytest.raises(InterpreterError, match=message):
        cast(torch.ones(8).to(source), dtype, rounding)


def test_rounding_to_nearest_even_may_be_asked_for():
    assert cast(torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8]), torch.bfloat16, "rtne").tolist() == [1, 1 + 2.0**-6]


def product_of(a, b, sums=tl.float32, out=torch.float32, precision="ieee"):
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=out)
    matmul[(1,)](a, b, c, m, n, k, M=16, N=16, K=32, PRECISION=precision, SUMS=sums)
    return c


def random_operands(dtype, m=13, n=11, k=100):
    draw = np.random.default_rng(1).normal
    return [torch.from_numpy(draw(size=shape)).float().to(dtype) for shape in ((m, k), (k, n))]


def check_dot(dtype):
    a, b = random_operands(dtype)
    bound = 100 * 2.0**-24 * (a.double().abs() @ b.double().abs())  # of any order of summation in float32
    assert ((product_of(a, b) - a.double() @ b.double()).abs() <= bound).all()
    a, b = ((x.float() * 4).clamp(-8, 8).round().to(dtype) for x in (a, b))  # every sum is exact
    assert torch.equal(product_of(a, b), a.float() @ b.float())


@pytest.mark.parametrize("dtype", [torch.float32, *SMALL])
def test_dot_multiplies_values_and_sums_in_float32(dtype):
    check_dot(dtype)


def test_dot_rounds_once_to_float16():
    a = torch.zeros(1, 64, dtype=torch.float16)
    a[0, 0] = a[0, 32] = 1
    a[0, 33] = 2048  # from here on float16 has even numbers only: 2049 would round to 2048, and once more with 1
    assert product_of(a, torch.ones(64, 1, dtype=torch.float16), tl.float16, torch.float16).item() == 2050


def test_dot_of_float64_and_of_integers():
    a, b = random_operands(torch.float64)
    assert torch.allclose(product_of(a, b, tl.float64, torch.float64), a @ b, rtol=0, atol=1e-13)
    a, b = ((x * 40).to(torch.int8) for x in (a, b))
    assert torch.equal(product_of(a, b, tl.int32, torch.int32), a.int() @ b.int())


def test_dot_of_float32_must_not_round_to_tf32():
    with pytest.raises(InterpreterError, match=r"TF32, not modelled here: give input_precision='ieee'"):
        product_of(*random_operands(torch.float32), precision="tf32")
    assert product_of(*random_operands(torch.bfloat16), precision="tf32").isfinite().all()


@pytest.mark.parametrize(("kernel", "dtype"), product([add, fused, total], [torch.bfloat16, E4M3, E5M2]))
def test_arithmetic_on_bits_is_refused(kernel, dtype):
    with pytest.raises(
        InterpreterError, match=r"arithmetic on (bf16|fp8e4nv|fp8e5) has no exact model here: cast to"
    ):
        kernel[(1,)](torch.ones(8).to(dtype), torch.empty(8).to(dtype), BLOCK=8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_arithmetic_on_numbers_is_not(dtype):
    x, y = torch.arange(8.0).to(dtype), torch.empty(8, dtype=dtype)
    add[(1,)](x, y, BLOCK=8)
    assert torch.equal(y, x + x)
    fused[(1,)](x, y, BLOCK=8)
    assert torch.equal(y, x * x + x)
    total[(1,)](x, y, BLOCK=8)
    assert y[0] == 28


def check_loop():
    y = torch.zeros(1, dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what numpy 2.4 refuses, earlier versions deprecate
        count_up[(1,)](y, 7)
    assert y.item() == 7


def test_a_loop_of_run_time_length():
    check_loop()


def check_silence():
    x = torch.zeros(3, 5)
    y = torch.empty(3, 5)
    rmsnorm[(3,)](x, torch.ones(5), y, 5, 0.0, BLOCK=8)  # zero times infinity
    assert y.isnan().all()


def test_nan_comes_without_a_warning():
    check_silence()


def check_refusal():
    test_arithmetic_on_bits_is_refused(add, torch.bfloat16)
    test_arithmetic_on_bits_is_refused(fused, torch.bfloat16)


def check_reduction():
    test_arithmetic_on_bits_is_refused(total, torch.bfloat16)


@pytest.fixture
def original(monkeypatch):
    """Triton's interpreter as it was installed."""
    name = "triton.runtime.untouched_interpreter"
    spec = importlib.util.spec_from_file_location(name, interpreter.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("owner", "names", "check"),
    [
        ("InterpreterBuilder", ["cast_impl"], lambda: check_rounding(torch.bfloat16)),
        ("InterpreterBuilder", ["cast_impl"], lambda: test_integers_to_bfloat16(torch.int32)),
        ("InterpreterBuilder", ["create_fp_to_fp"], lambda: check_rounding(E4M3)),
        ("InterpreterBuilder", ["create_fp_to_fp"], lambda: check_rounding(E5M2)),
        ("InterpreterBuilder", ["create_fp_to_fp"], lambda: test_every_pattern_widens_exactly(E4M3)),
        ("InterpreterBuilder", ["create_dot"], lambda: check_dot(torch.bfloat16)),
        ("InterpreterBuilder", ["create_dot"], test_dot_rounds_once_to_float16),
        ("InterpreterBuilder", ["binary_op", "create_fma"], check_refusal),
        ("ReduceScanOpInterface", ["check_tensor"], check_reduction),
        ("GridExecutor", ["__call__"], check_silence),
        (None, ["_patch_lang_tensor"], check_loop),
    ],
)
def test_each_fix_is_needed(original, monkeypatch, owner, names, check):
    for name in names:
        old, new = (getattr(module, owner) if owner else module for module in (original, interpreter))
        monkeypatch.setattr(new, name, getattr(old, name))
    with pytest.raises((AssertionError, pytest.fail.Exception, InterpreterError, RuntimeWarning)):
        check()
