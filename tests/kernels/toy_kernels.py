"""Small kernels for the tests of the ground that the real ones stand on, and ways to build some of them."""

from kernels.aot import Build
from kernels.launch import tl, triton


@triton.jit
def convert(x, y, n, BLOCK: tl.constexpr, ROUNDING: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < n)
    tl.store(y + i, values.to(y.dtype.element_ty, fp_downcast_rounding=ROUNDING), mask=i < n)


@triton.jit
def rmsnorm(x, weight, y, d, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * d + i, mask=i < d, other=0.0).to(tl.float32)
    scale = tl.rsqrt((values * values).sum(0) / d + eps)
    gain = tl.load(weight + i, mask=i < d, other=0.0).to(tl.float32)
    tl.store(y + row * d + i, (values * scale * gain).to(y.dtype.element_ty), mask=i < d)


@triton.jit
def matmul(
    a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr
):
    """c = a @ b, all row-major, in one program that walks along k."""
    rows = tl.arange(0, M)[:, None]
    columns = tl.arange(0, N)[None, :]
    sums = tl.zeros((M, N), SUMS)
    for start in range(0, k, K):
        across = start + tl.arange(0, K)[None, :]
        down = start + tl.arange(0, K)[:, None]
        left = tl.load(a + rows * k + across, mask=(rows < m) & (across < k), other=0.0)
        right = tl.load(b + down * n + columns, mask=(down < k) & (columns < n), other=0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION, out_dtype=SUMS)
    tl.store(c + rows * n + columns, sums.to(c.dtype.element_ty), mask=(rows < m) & (columns < n))


@triton.jit
def as_columns(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    rows = tl.broadcast_to(tl.load(x + i)[None, :], (N, N))
    tl.store(y + i[:, None] * N + i[None, :], tl.trans(rows).to(y.dtype.element_ty))


@triton.jit
def copy_tile(x, y, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """Block pointers know their bounds: the mask of each access is made from them."""
    source = tl.make_block_ptr(x, (rows, columns), (columns, 1), (0, 0), (R, C), (1, 0))
    target = tl.make_block_ptr(y, (rows, columns), (columns, 1), (0, 0), (R, C), (1, 0))
    tl.store(target, tl.load(source, boundary_check=(0, 1)), boundary_check=(0, 1))


@triton.jit
def histogram(values, counts, lock, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    bins = tl.load(values + i, mask=i < n, other=0)
    tl.atomic_cas(lock, 0, 1)
    tl.atomic_add(counts + bins, 1, mask=i < n)


@triton.jit
def count_up(y, n):
    steps = 0
    for _ in range(n):
        steps += 1
    tl.store(y, steps)


@triton.jit
def add(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i) + tl.load(x + i))


@triton.jit
def fused(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.fma(tl.load(x + i), tl.load(x + i), tl.load(x + i)))


@triton.jit
def total(x, y, BLOCK: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, BLOCK))))


@triton.jit
def words(x, y, n, BLOCK: tl.constexpr):
    """Read bytes four at a time."""
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x.to(tl.pointer_type(tl.int32)) + i, mask=i < n), mask=i < n)


NORM = {"x": "*bf16", "weight": "*bf16", "y": "*bf16", "d": "i32", "eps": "fp32"}
MATMUL = {"c": "*fp32", "m": "i32", "n": "i32", "k": "i32"}
BFLOAT16 = MATMUL | {"a": "*bf16", "b": "*bf16"}
FLOAT8 = MATMUL | {"a": "*fp8e4nv", "b": "*fp8e4nv", "n": "i32:16", "k": "i32:16"}
TILE = {"M": 64, "N": 64, "K": 128, "PRECISION": "ieee", "SUMS": tl.float32}
CROWDED = {"M": 64, "N": 128, "K": 16, "PRECISION": "ieee", "SUMS": tl.float32}

BUILDS = [
    Build("rmsnorm", rmsnorm, NORM, {"BLOCK": 4096}),
    Build("rmsnorm_divisible", rmsnorm, NORM | {"d": "i32:16"}, {"BLOCK": 4096}),
    Build("rmsnorm_wide", rmsnorm, NORM, {"BLOCK": 4096}, num_warps=8, targets=["sm_90"]),
    Build("matmul_float8", matmul, FLOAT8, TILE, targets=["sm_90", "sm_100", "gfx942"]),
    Build("matmul_one_stage", matmul, FLOAT8, TILE, num_stages=1, targets=["sm_90"]),
    Build("matmul_crowded", matmul, BFLOAT16, CROWDED, num_warps=1, targets=["sm_90", "gfx942"]),
]
