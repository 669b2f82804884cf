"""Verification of drafted blocks, token by token or by the block, in four kernels that give the reference's answers.

    law_sums  of each tile of 4096 ids, p and q added up: the laws' totals, by which they are normalised
    weights   of each row, w_i = min(1, w_i-1 p_i-1(y_i) / q_i-1(y_i)) and which places are still open
    rests     of each open place i and tile, max(w_i p_i - q_i, 0) added up
    pick      of each row, tau and the next token: a tile by its sum, an id in the tile

    token by token   tau is known from the tests in `weights`, w = 1; the one place open is tau
    block            a place with w_i = 1 passes its test for sure, and w_n alone decides on n: open are the last
                     place of w = 1 and those behind it, and none where n passes. `pick` tests the others by
                     a_i = S_i / (S_i + 1 - w_i), S_i the sum of i's rests, and takes the largest i that passes

So a row of n drafts reads (2n + 1) V elements of p and q for the totals, then 2 V for each open place, of which none
is written, and a tile of two laws for the id. Between the kernels lie three numbers for each place and tile.

All is computed in fp64, as in the reference, whatever p and q are: on a GPU made for it their way from memory takes
longer. The order of sums is fixed, tile by tile, and a row's results depend on that row alone. They are the
reference's but for that order, and for w / total, one factor here: exact where sums are, else within 1e-15. Without
fused multiply-adds: where p and q are the same bits, nothing must be left.
Sources: as `dsv41_edu.dspark.verification`, the reference.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.launch import tl, triton
from kernels.markov import draw
from kernels.operands import check_operands

TILE = 4096


@triton.jit
def total(sums, TILES, SLOTS: tl.constexpr):
    """Of one place, its tiles added up."""
    tile = tl.arange(0, SLOTS)
    return tl.sum(tl.load(sums + tile, mask=tile < TILES, other=0.0))


@triton.jit
def rest(p, q, v, p_V, q_V, p_scale, q_scale):
    """max(p_scale p - q_scale q, 0) at ids v, fp64, of the first p_V of p and q_V of q."""
    target = tl.load(p + v, mask=v < p_V, other=0.0).to(tl.float64) * p_scale
    left = target - tl.load(q + v, mask=v < q_V, other=0.0).to(tl.float64) * q_scale
    return tl.where(left > 0, left, 0.0)


@triton.jit
def law_sums(p, q, lengths, p_sums, q_sums, G, V, TILES, p_row, p_place, q_row, q_place, TILE: tl.constexpr):
    """p_sums, q_sums: fp64 [B, G + 1, TILES], NaN where an entry is negative."""
    at = tl.program_id(0).to(tl.int64)
    row, i = at // (G + 1), at % (G + 1)
    n = tl.load(lengths + row)
    if i <= n:
        v = tl.program_id(1) * TILE + tl.arange(0, TILE)
        target = tl.load(p + row * p_row + i * p_place + v, mask=v < V, other=0.0).to(tl.float64)
        drafted = tl.load(q + row * q_row + i * q_place + v, mask=v < tl.where(i < n, V, 0), other=0.0).to(tl.float64)
        place = at * TILES + tl.program_id(1)
        tl.store(p_sums + place, tl.sum(tl.where(target >= 0, target, float("nan"))))
        tl.store(q_sums + place, tl.sum(tl.where(drafted >= 0, drafted, float("nan"))))


@triton.jit
def weights(
    p, q, drafts, lengths, u, p_sums, q_sums, totals, w, places, B, G, TILES, p_row, p_place, q_row, q_place,
    BY_BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """totals: fp64 [2, B, G + 1], of p and of q; w: fp64 [B, G + 1]; places: int64 [2, B], the open ones, to and fro.

    What stands behind a row's length isn't written.
    """
    row = tl.program_id(0).to(tl.int64)
    n, at = tl.load(lengths + row), row * (G + 1)
    first = tl.zeros((), tl.int64)
    before = tl.full((), 1.0, tl.float64)
    tl.store(w + at, before)
    for i in range(n):
        i = tl.cast(i, tl.int64)
        y = tl.load(drafts + row * G + i).to(tl.int64)
        p_total, q_total = total(p_sums + at * TILES, TILES, SLOTS), total(q_sums + at * TILES, TILES, SLOTS)
        tl.store(totals + at, p_total)
        tl.store(totals + B * (G + 1) + at, q_total)
        target = tl.load(p + row * p_row + i * p_place + y).to(tl.float64) / p_total
        drafted = tl.load(q + row * q_row + i * q_place + y).to(tl.float64) / q_total
        chance = tl.minimum(before * target / drafted, 1.0)
        passes = tl.load(u + row * (G + 1) + i) < chance
        at += 1
        if BY_BLOCK:
            before = chance
            first = tl.where((chance == 1.0) | (passes & (i == n - 1)), i + 1, first)
        else:
            first += (passes & (first == i)).to(tl.int64)
        tl.store(w + at, before)
    tl.store(totals + at, total(p_sums + at * TILES, TILES, SLOTS))
    tl.store(places + row, first)
    tl.store(places + B + row, n if BY_BLOCK else tl.minimum(first + 1, n))


@triton.jit
def rests(
    p, q, totals, w, places, rest_sums, B, G, V, TILES, p_row, p_place, q_row, q_place, TILE: tl.constexpr
):  # fmt: skip
    """rest_sums: fp64 [B, G + 1, TILES], at the open places."""
    row, i = tl.program_id(0).to(tl.int64) // G, tl.program_id(0).to(tl.int64) % G
    if (i >= tl.load(places + row)) & (i < tl.load(places + B + row)):
        at = row * (G + 1) + i
        p_scale, q_scale = tl.load(w + at) / tl.load(totals + at), 1.0 / tl.load(totals + B * (G + 1) + at)
        v = tl.program_id(1) * TILE + tl.arange(0, TILE)
        left = rest(p + row * p_row + i * p_place, q + row * q_row + i * q_place, v, V, V, p_scale, q_scale)
        tl.store(rest_sums + at * TILES + tl.program_id(1), tl.sum(left))


@triton.jit
def pick(
    p, q, lengths, u, totals, w, places, p_sums, rest_sums, accepted, following, B, G, V, TILES,
    p_row, p_place, q_row, q_place, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """accepted, following: int64 [B]."""
    row = tl.program_id(0).to(tl.int64)
    n, tau, end = tl.load(lengths + row), tl.load(places + row), tl.load(places + B + row)
    first = row * (G + 1)
    for i in range(tau + 1, end):
        S = total(rest_sums + (first + i) * TILES, TILES, SLOTS)
        weight = S + (1.0 - tl.load(w + first + i))
        chance = tl.where(weight > 0, S / weight, 1.0)
        tau = tl.where(tl.load(u + first + i - 1) < chance, i, tau)
    tl.store(accepted + row, tau)

    at, slot = first + tau, tl.arange(0, SLOTS)
    mass = tl.load(rest_sums + at * TILES + slot, mask=slot < tl.where(tau < n, TILES, 0), other=0.0)
    has_q = tl.sum(mass) > 0  # behind the last draft nothing was drawn; and rounding may leave nothing, then p stands
    p_scale = tl.where(has_q, tl.load(w + at), 1.0) / tl.load(totals + at)
    q_scale = 1.0 / tl.load(totals + B * (G + 1) + at, mask=has_q, other=1.0)
    mass = tl.where(has_q, mass, tl.load(p_sums + at * TILES + slot, mask=slot < TILES, other=0.0) * p_scale)
    target = tl.load(u + first + n) * tl.sum(mass)
    tile = draw(mass, slot, target)
    v = tile * TILE + tl.arange(0, TILE)
    p, q, q_V = p + row * p_row + tau * p_place, q + row * q_row + tau * q_place, tl.where(has_q, V, 0)
    left = rest(p, q, v, V, q_V, p_scale, q_scale)
    tl.store(following + row, draw(left, v, target - tl.sum(tl.where(slot < tile, mass, 0.0))).to(tl.int64))


def fused_verify(
    p: Tensor, q: Tensor, drafts: Tensor, lengths: Tensor, u: Tensor, by_block: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted drafts and next tokens, int64 [B] each, as `block_verify` or `rejection_verify` of the reference.

    p [B, g + 1, V] and q [B, g, V]: each fp32 or fp64, of adjacent ids; other dimensions have any stride. drafts:
    int64 or int32 [B, g]; lengths: int64 [B], from 0 to g, what lies behind them is never looked at; u: fp64
    [B, g + 1] in [0, 1).

    Values aren't checked here, which would make a GPU wait. Instead the third result holds the laws' totals, fp64
    [2, B, g + 1], of p and of q: near 1 for a law, NaN where an entry is negative, 1 behind a row's length. From what
    is no law come results in range, and no more.

    Raises ValueError for shapes, strides, devices; TypeError for dtypes.
    """
    if p.dim() != 3 or q.dim() != 3 or p.shape[1] != q.shape[1] + 1 or p.shape[2] == 0:
        raise ValueError(f"p {list(p.shape)}, q {list(q.shape)}: expected [B, g + 1, V] and [B, g, V], V from 1")
    B, g, V = p.shape[0], q.shape[1], p.shape[2]
    floats, integers = (torch.float32, torch.float64), (torch.int64, torch.int32)
    expected = {"p": (p, (B, g + 1, V), floats), "q": (q, (B, g, V), floats), "drafts": (drafts, (B, g), integers)}
    expected |= {"lengths": (lengths, (B,), (torch.int64,)), "u": (u, (B, g + 1), (torch.float64,))}
    check_operands(expected, ("p", "q"), "ids")

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=p.device)

    tiles = triton.cdiv(V, TILE)
    accepted, following = empty(torch.int64, B), empty(torch.int64, B)
    totals = empty(torch.float64, 2, B, g + 1).fill_(1)
    p_sums, q_sums, rest_sums = (empty(torch.float64, B, g + 1, tiles) for _ in range(3))
    w, places = empty(torch.float64, B, g + 1), empty(torch.int64, 2, B)
    if B == 0:
        return accepted, following, totals
    drafts, lengths, u = drafts.contiguous(), lengths.contiguous(), u.contiguous()
    strides = *p.stride()[:2], *q.stride()[:2]
    wide = {"TILE": TILE, "num_warps": 8, "enable_fp_fusion": False}
    slots = {"SLOTS": triton.next_power_of_2(tiles)}
    law_sums[(B * (g + 1), tiles)](p, q, lengths, p_sums, q_sums, g, V, tiles, *strides, **wide)
    weights[(B,)](
        p, q, drafts, lengths, u, p_sums, q_sums, totals, w, places, B, g, tiles, *strides,
        BY_BLOCK=by_block, num_warps=1, **slots,
    )  # fmt: skip
    if g:
        rests[(B * g, tiles)](p, q, totals, w, places, rest_sums, B, g, V, tiles, *strides, **wide)
    pick[(B,)](
        p, q, lengths, u, totals, w, places, p_sums, rest_sums, accepted, following, B, g, V, tiles, *strides,
        **wide, **slots,
    )  # fmt: skip
    return accepted, following, totals


def _builds() -> list[Build]:
    """Blocks of V4.1: 129,280 ids, so 32 tiles."""
    sizes = dict.fromkeys(("B", "G", "TILES"), "i32")
    sizes |= dict.fromkeys(("V", "p_row", "p_place", "q_row", "q_place"), "i32:16")
    scratch = dict.fromkeys("u p_sums q_sums rest_sums totals w".split(), "*fp64")
    integers = dict.fromkeys("drafts lengths places accepted following".split(), "*i64")
    builds = []
    for dtype in ("fp32", "fp64"):
        types = sizes | scratch | integers | {"p": f"*{dtype}", "q": f"*{dtype}"}
        for kernel, how, warps in (
            (law_sums, {"TILE": TILE}, 8),
            (weights, {"BY_BLOCK": True, "SLOTS": 32}, 1),
            (rests, {"TILE": TILE}, 8),
            (pick, {"TILE": TILE, "SLOTS": 32}, 8),
        ):
            signature = {name: types[name] for name in kernel.arg_names if name not in how}
            builds.append(Build(f"{kernel.__name__}_{dtype}", kernel, signature, how, warps))
    return builds


BUILDS = _builds()
