"""The one place that imports Triton for kernels and decides how they run: compiled, or interpreted in numpy.

A kernel file says `from kernels.launch import tl, triton`, so the decision is made before its `@triton.jit`.
It falls on the interpreter where torch sees no GPU (CUDA or ROCm) or where TRITON_INTERPRET=1 asks for it, but
never in the process that compiles ahead of time, which has DSV41_AOT=1. Whether something else has imported
Triton before, as every model class of transformers does, makes no difference.
"""

import os

import torch
import triton
import triton.language as tl

from kernels import interpreter

__all__ = ["INTERPRETED", "tl", "triton"]

INTERPRETED: bool = os.environ.get("DSV41_AOT") != "1" and (
    triton.knobs.runtime.interpret or not torch.cuda.is_available()
)

if INTERPRETED:
    triton.knobs.runtime.interpret = True
    interpreter.install()
