"""One step of the Markov head: the previous draft's row, its product, the choice of the next draft, in two kernels.

    l_v   = base_v + H_v . E[y]                       fp32, E and H [V, r]
    greedy         y' = the v of the largest l, the lowest of equals
    temperature T  y' = the first v whose cumulative weight exceeds u times their sum;  weight e^(l_v / T) in fp64

The first kernel has a program for each tile of 128 (32 in fp32) ids. It keeps its rows of H and lets the batch pass,
16 tokens at a time, so H, by far the largest operand of a small batch, is read once. What leaves it for a tile and a
token is one int64 that orders by logit and then by the lower id, or the tile's largest logit and its sum of weights.
The second kernel has a program for each token: it takes the best tile, or draws a tile by the sums and an id in it.

Of B tokens: V r elements of H and B V of base are read once, B r of E and B ids by each tile. Greedy writes no
logits, but a key for each tile, and the id. A draw must write them, B V: they make the law that its verifier will
test it against. It has a largest and a sum for each tile besides, and reads one tile of each token again. Each
token's bits depend on itself alone. Weights are fp64, as for `sample` of `dsv41_edu.dspark.verification`, so that
what is drawn is what is tested; only the order of the sums is another. Sources: DSpark 3.2; V4.1 official code.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.gate import sort_keys
from kernels.launch import tl, triton
from kernels.operands import check_operands

BLOCK_B = 16  # the fewest columns of a product


@triton.jit
def draw(weights, ids, target):
    """The first of the ids with a weight whose cumulative weight exceeds target; if rounding hides it, the last one.

    weights, ids: vectors, the ids from 0 up. Of no weights at all it is 0.
    """
    last = tl.max(tl.where(weights > 0, ids, 0))
    return tl.min(tl.where((weights > 0) & (tl.cumsum(weights) > target), ids, last))


@triton.jit
def markov(
    base, tokens, embed, head, keys, largest, sums, logits, B, V, r, base_row, embed_row, head_row,
    temperature: tl.float64, OPERAND: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """keys int64 [B, tiles], or without it largest fp32 and sums fp64 [B, tiles], logits fp32 [B, V]."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    v = (tile * BLOCK_V + tl.arange(0, BLOCK_V))[:, None]
    real = v < V
    columns = ()
    for i in tl.static_range(CHUNKS):
        channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
        column = tl.load(head + v.to(tl.int64) * head_row + channel, mask=real & (channel < r), other=0.0)
        columns += (column.to(OPERAND),)
    for start in range(0, B, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)
        here, wide = b < B, b.to(tl.int64)
        token = tl.load(tokens + b, mask=here, other=-1).to(tl.int64)
        known = here & (token >= 0) & (token < V)
        products = tl.zeros((BLOCK_V, BLOCK_B), tl.float32)
        for i in tl.static_range(CHUNKS):
            channel = i * CHUNK + tl.arange(0, CHUNK)[None, :]
            row = tl.load(
                embed + token[:, None] * embed_row + channel, mask=known[:, None] & (channel < r), other=0.0
            )
            products = tl.dot(columns[i], tl.trans(row.to(OPERAND)), products, input_precision="ieee")
        there = real & here[None, :]
        l = products + tl.load(base + wide[None, :] * base_row + v, mask=there, other=0.0)
        if keys is not None:
            tl.store(keys + wide * tiles + tile, tl.max(sort_keys(l, real, v), 0), mask=here)
        else:
            tl.store(logits + wide[None, :] * V + v, l, mask=there)
            top = tl.max(tl.where(real, l, float("-inf")), 0)
            finite = tl.where(top == float("-inf"), 0.0, top)  # a tile of -inf alone has sum 0, not NaN
            powers = tl.exp((l.to(tl.float64) - finite[None, :].to(tl.float64)) / temperature)
            tl.store(largest + wide * tiles + tile, top, mask=here)
            tl.store(sums + wide * tiles + tile, tl.sum(tl.where(real, powers, 0.0), 0), mask=here)


@triton.jit
def likeliest(keys, ids, tiles, SLOTS: tl.constexpr):
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    best = tl.max(tl.load(keys + row * tiles + slot, mask=slot < tiles, other=-9223372036854775808))
    tl.store(ids + row, 2147483647 - (best & 0xFFFFFFFF))


@triton.jit
def drawn(
    largest, sums, logits, u, ids, V, tiles, temperature: tl.float64, SLOTS: tl.constexpr, BLOCK_V: tl.constexpr
):
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS)
    tops = tl.load(largest + row * tiles + slot, mask=slot < tiles, other=float("-inf")).to(tl.float64)
    top = tl.max(tops)
    mass = tl.load(sums + row * tiles + slot, mask=slot < tiles, other=0.0) * tl.exp((tops - top) / temperature)
    target = tl.load(u + row) * tl.sum(mass)
    tile = draw(mass, slot, target)
    v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    l = tl.load(logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float64)
    target -= tl.sum(tl.where(slot < tile, mass, 0.0))
    tl.store(ids + row, draw(tl.exp((l - top) / temperature), v, target).to(tl.int64))


def blocks(dtype: torch.dtype, r: int) -> dict[str, object]:
    """What a launch of the first kernel fixes."""
    chunk = min(128, max(16, triton.next_power_of_2(r)))
    how = {"BLOCK_B": BLOCK_B, "CHUNK": chunk, "CHUNKS": triton.cdiv(r, chunk), "num_warps": 8}
    if dtype == torch.float32:  # no matrix units: for tests more than for speed
        return how | {"OPERAND": tl.float32, "BLOCK_V": 32}
    return how | {"OPERAND": tl.bfloat16, "BLOCK_V": 128}


def fused_markov(
    base: Tensor, tokens: Tensor, embed: Tensor, head: Tensor, temperature: float = 0.0, u: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The next drafts, int64 [B], and the logits fp32 [B, V] that they were drawn from, None at temperature 0.

    base: fp32 [B, V], logits without the head; tokens: int64 or int32 [B], what precedes; embed, head: [V, r], both
    bf16 or both fp32, made for r up to 256. All of these have adjacent columns and rows at any stride. u: fp64 [B]
    in [0, 1), for a temperature above 0. NaN is never chosen before a number.

    Raises ValueError for shapes, strides, devices, temperatures, u without a draw or none for one, and for tokens out
    of range on a CPU; on a GPU, which would have to be waited for, such a token adds nothing. TypeError for dtypes.
    """
    if base.dim() != 2 or embed.dim() != 2 or 0 in (base.shape[1], embed.shape[1]):
        raise ValueError(f"base {list(base.shape)}, embed {list(embed.shape)}: expected [B, V] and [V, r], from 1")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature = {temperature}: expected a finite number from 0 up")
    if (u is None) == (temperature > 0):
        raise ValueError(f"temperature = {temperature}, u {'not ' * (u is None)}given: expected u for a draw alone")
    (B, V), r = base.shape, embed.shape[1]
    expected = {
        "base": (base, (B, V), (torch.float32,)),
        "tokens": (tokens, (B,), (torch.int64, torch.int32)),
        "embed": (embed, (V, r), (torch.bfloat16, torch.float32)),
        "head": (head, (V, r), (embed.dtype,)),
        "u": (u, (B,), (torch.float64,)),
    }
    check_operands(expected, ("base", "embed", "head"), "columns")
    if base.device.type == "cpu" and B and not 0 <= int(tokens.min()) <= int(tokens.max()) < V:
        raise ValueError(f"tokens from {tokens.min()} to {tokens.max()}: expected ids from 0 to {V - 1}")

    how = blocks(embed.dtype, r)
    tiles = triton.cdiv(V, how["BLOCK_V"])
    slots = triton.next_power_of_2(tiles)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=base.device)

    ids, keys, largest, sums, logits = empty(torch.int64, B), None, None, None, None
    if temperature == 0:
        keys = empty(torch.int64, B, tiles)
    else:
        largest, sums = (empty(t, B, tiles) for t in (torch.float32, torch.float64))
        logits = empty(torch.float32, B, V)
    if B == 0:
        return ids, logits
    strides = base.stride(0), embed.stride(0), head.stride(0)
    markov[(tiles,)](
        base, tokens.contiguous(), embed, head, keys, largest, sums, logits, B, V, r, *strides, temperature, **how
    )
    if temperature == 0:
        likeliest[(B,)](keys, ids, tiles, SLOTS=slots)
    else:
        drawn[(B,)](
            largest, sums, logits, u.contiguous(), ids, V, tiles, temperature, SLOTS=slots, BLOCK_V=how["BLOCK_V"]
        )
    return ids, logits


def _builds() -> list[Build]:
    """The head of V4.1: 129,280 ids, rank 256."""
    sizes = {"B": "i32", "temperature": "fp64"} | dict.fromkeys("V r base_row embed_row head_row".split(), "i32:16")
    outputs = {"keys": "*i64", "largest": "*fp32", "sums": "*fp64", "logits": "*fp32"}
    builds = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        how = blocks(dtype, 256)
        warps = how.pop("num_warps")
        given = sizes | {"base": "*fp32", "tokens": "*i64", "embed": f"*{name}", "head": f"*{name}"}
        for kind, written in (("likeliest", ["keys"]), ("drawn", ["largest", "sums", "logits"])):
            types = given | {n: outputs[n] for n in written}
            absent = dict.fromkeys(outputs.keys() - types.keys())
            builds.append(Build(f"markov_{kind}_{name}", markov, types, how | absent, warps))
    second = {"largest": "*fp32", "sums": "*fp64", "logits": "*fp32", "u": "*fp64", "ids": "*i64"}
    second |= {"V": "i32:16", "tiles": "i32", "temperature": "fp64"}
    return [
        *builds,
        Build("likeliest", likeliest, {"keys": "*i64", "ids": "*i64", "tiles": "i32"}, {"SLOTS": 1024}),
        Build("drawn", drawn, second, {"SLOTS": 1024, "BLOCK_V": 128}),
    ]


BUILDS = _builds()
