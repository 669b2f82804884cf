"""Triton's interpreter, made an exact oracle.

The interpreter runs a kernel program by program in numpy, which has neither bfloat16 nor float8: it holds their
bits as unsigned integers and, in Triton 3.6.0, computes with them wrongly and without a word. `install` replaces
these private names, which is why Triton is pinned exactly:

- `InterpreterBuilder.cast_impl` and `create_fp_to_fp`: every cast between floats rounds to nearest even as torch
  does, which takes float64 through float32. (The original cuts bfloat16 off, gets 2 to 5% of float8 wrong and casts
  an integer to the bits of a bfloat16.) To float8 it saturates, as NVIDIA's instructions do; NaN stays NaN.
- `InterpreterBuilder.create_dot`: bfloat16, float16 and float8 operands are multiplied as float32 values and
  summed in float32. (The original multiplies the bits of bfloat16.)
- `InterpreterBuilder.binary_op`, `create_fma` and `ReduceScanOpInterface.check_tensor`: arithmetic, comparisons,
  reductions and scans of bfloat16 and float8 are refused. (The original computes with the bits.)
- `_patch_lang_tensor`: `range(n)` with an `n` of run time works under numpy 2.4 and later.
- `GridExecutor.__call__`: numpy says nothing of infinities and NaN, which are ordinary in lanes that are masked off.
- `JITFunction.__call__` and the methods of `tl.tensor`: what was decorated while Triton was imported, such as
  `tl.sum`, before it was told to interpret, is interpreted all the same.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    GridExecutor,
    InterpretedFunction,
    InterpreterBuilder,
    ReduceScanOpInterface,
    TensorHandle,
)
from triton.runtime.jit import JITFunction

FLOATS = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
HELD_AS_BITS = {tl.bfloat16: torch.uint16, tl.float8e4nv: torch.uint8, tl.float8e5: torch.uint8}

# What Triton compiles to an instruction that rounds to nearest even; it has other, cruder code for the rest.
FLOAT8_FROM = {tl.float8e4nv: (tl.float32, tl.float16, tl.bfloat16), tl.float8e5: (tl.float32,)}

original_cast = InterpreterBuilder.cast_impl
original_dot = InterpreterBuilder.create_dot


def cast(self: InterpreterBuilder, source: TensorHandle, to: tl.dtype) -> TensorHandle:
    old, new = source.dtype.scalar, to.scalar
    if old.is_int() and new == tl.bfloat16:
        source, old = original_cast(self, source, tl.float32), tl.float32
    if not (old.is_floating() and new.is_floating()):
        return original_cast(self, source, to)
    if old not in FLOAT8_FROM.get(new, FLOATS):
        raise NotImplementedError(f"the cast from {old} to {new} has no exact model here: cast through float32")
    values = torch.from_numpy(np.array(source.data)).view(FLOATS[old])
    if new in FLOAT8_FROM:
        # torch itself saturates in some versions and on some CPUs only.
        largest = torch.finfo(FLOATS[new]).max
        values = values.float().clamp(-largest, largest)
    values = values.to(FLOATS[new])
    return TensorHandle(values.view(HELD_AS_BITS.get(new, values.dtype)).numpy(), new)


def cast_rounding(self: InterpreterBuilder, source: TensorHandle, to: tl.dtype, rounding: object) -> TensorHandle:
    if rounding not in (None, ir.ROUNDING_MODE.RTNE):
        raise NotImplementedError("only rounding to nearest even has an exact model here")
    return cast(self, source, to)


def dot(
    self: InterpreterBuilder,
    a: TensorHandle,
    b: TensorHandle,
    sums: TensorHandle,
    precision: object,
    *options: object,
) -> TensorHandle:
    if a.dtype == tl.float32 and precision == ir.INPUT_PRECISION.TF32:
        raise NotImplementedError("tl.dot rounds float32 to TF32, not modelled here: give input_precision='ieee'")
    if a.dtype != tl.float16 and a.dtype not in HELD_AS_BITS:
        return original_dot(self, a, b, sums, precision, *options)
    a, b, wide = (cast(self, operand, tl.float32) for operand in (a, b, sums))
    return cast(self, original_dot(self, a, b, wide, precision, *options), sums.dtype)


def refuse_bits(dtypes: list[tl.dtype]) -> None:
    for dtype in dtypes:
        if dtype.scalar in HELD_AS_BITS:
            raise TypeError(f"arithmetic on {dtype.scalar} has no exact model here: cast to float32 first")


def on_numbers(operation: Callable) -> Callable:
    def checked(self, *operands):
        refuse_bits([operand.dtype for operand in operands if isinstance(operand, TensorHandle)])
        return operation(self, *operands)

    return checked


def install() -> None:
    """Put the interpreter right, for this process and for good."""
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = cast_rounding
    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.binary_op = on_numbers(InterpreterBuilder.binary_op)
    InterpreterBuilder.create_fma = on_numbers(InterpreterBuilder.create_fma)

    original_check = ReduceScanOpInterface.check_tensor
    original_patch = interpreter._patch_lang_tensor

    def check_tensor(self, inputs):
        original_check(self, inputs)
        refuse_bits([tensor.dtype for tensor in inputs])

    def patch_lang_tensor(tensor, scope):
        original_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    ReduceScanOpInterface.check_tensor = check_tensor
    interpreter._patch_lang_tensor = patch_lang_tensor
    GridExecutor.__call__ = np.errstate(all="ignore")(GridExecutor.__call__)

    interpreted = functools.cache(InterpretedFunction)
    JITFunction.__call__ = lambda self, *args, **kwargs: interpreted(self.fn)(*args, **kwargs)
    for name, member in list(vars(tl.tensor).items()):
        if isinstance(member, JITFunction):
            setattr(tl.tensor, name, functools.partialmethod(member))
