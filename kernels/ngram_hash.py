"""The rows that each position of a sequence reads from the n-gram memory, in one kernel, exact in int64.

    c_i  the id i places back; the pad's before the sequence, and from a wall (an image token) on
    r_1 = c_0 m_0,  r_(i+1) = r_i XOR (c_i m_i)          m_i odd, by layer
    row of order g, head h = (r_g mod p_gh) + offset_gh

A program has 32 positions of one layer, and all its columns: for each position and layer `order` ids are read, and
the rows written. The last position of a sequence sees what the next chunk will look back at, and writes that too.

Products stay below 2^63, as `dsv41_edu.engram.hashing`, the reference, makes sure of, so that nothing wraps. Should
an id be too large for that, the sign bit is cleared: a row is always one of its column. Sources: Engram 2.2; V4.1
report 2.4.2; official inference code.
"""

import torch
from torch import Tensor

from kernels.aot import Build
from kernels.hyper_connections import check
from kernels.launch import tl, triton

WALL = -1
BLOCK_T = 32


@triton.jit
def ngram_hash(
    ids,  # [B, S]
    text_mask,  # bool [B, S] or None
    history,  # [B, ORDER - 1] or None
    multipliers,  # [L, ORDER]
    primes,  # [L, COLUMNS]
    offsets,  # [L, COLUMNS]
    rows,  # [B, S, L, COLUMNS], written
    next_history,  # [B, ORDER - 1], written
    pad,
    T,  # B S
    S,
    ids_row,
    mask_row,
    ORDER: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,  # COLUMNS up to a power of two
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    layer = tl.program_id(1)
    column = tl.arange(0, PADDED)
    here, is_column = token < T, column < COLUMNS
    sequence, at = token // S, token % S
    furthest = 1 + column // (COLUMNS // (ORDER - 1))  # how far back a column looks

    mixed = tl.zeros((BLOCK_T, PADDED), tl.int64)
    in_sight = here
    for i in tl.static_range(ORDER):
        place = at - i
        inside = here & (place >= 0)
        seen = tl.load(ids + sequence * ids_row + place, mask=inside, other=-1)
        if text_mask is not None:
            is_text = tl.load(text_mask + sequence * mask_row + place, mask=inside, other=0) != 0
            seen = tl.where(is_text, seen, -1)
        if history is not None:
            before = history + sequence * (ORDER - 1) + (ORDER - 1) + place
            seen = tl.where(place < 0, tl.load(before, mask=here & (place < 0), other=-1), seen)
        if i < ORDER - 1:
            after = next_history + sequence * (ORDER - 1) + (ORDER - 2 - i)
            tl.store(after, seen, mask=here & (at == S - 1) & (layer == 0))
        in_sight = in_sight & (seen >= 0)
        product = tl.where(in_sight, seen, pad) * tl.load(multipliers + layer * ORDER + i)
        mixed ^= tl.where((furthest >= i)[None, :], product[:, None], 0)

    prime = tl.load(primes + layer * COLUMNS + column, mask=is_column, other=1)[None, :]
    offset = tl.load(offsets + layer * COLUMNS + column, mask=is_column, other=0)[None, :]
    place = (token[:, None] * tl.num_programs(1) + layer) * COLUMNS + column[None, :]
    row = (mixed & 0x7FFFFFFFFFFFFFFF) % prime + offset
    tl.store(rows + place, row, mask=here[:, None] & is_column[None, :])


def fused_ngram_hash(
    ids: Tensor,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad: int,
    text_mask: Tensor | None = None,
    history: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows int64 [B, S, L, columns], offsets included, and the history for the next chunk, int64 [B, order - 1].

    As `NgramHash` of the reference, whose multipliers [L, order], primes and offsets [L, columns], and pad these are.
    ids: compressed, int64 [B, S]; text_mask: bool [B, S], False for image tokens; both with any stride from sequence
    to sequence. history: int64 [B, order - 1] of the chunk before, -1 where there was nothing to see.

    Raises ValueError for shapes, strides, devices, a negative pad, and on a CPU for ids whose products don't fit;
    TypeError for dtypes. Ids on a GPU aren't waited for: there a negative id is taken for a wall, and one too large
    gets rows that mean nothing.
    """
    if ids.dim() != 2:
        raise ValueError(f"ids of shape {list(ids.shape)}: expected [B, S]")
    if multipliers.dim() != 2 or len(multipliers) == 0 or multipliers.shape[1] < 2:
        raise ValueError(
            f"multipliers of shape {list(multipliers.shape)}: expected [L, order], L from 1, order from 2"
        )
    (B, S), (L, order) = ids.shape, multipliers.shape
    if primes.dim() != 2 or primes.shape[1] == 0 or primes.shape[1] % (order - 1):
        raise ValueError(f"primes of shape {list(primes.shape)}: expected [{L}, a multiple of {order - 1}]")
    columns, device, int64 = primes.shape[1], ids.device, torch.int64
    for name, tensor, dtype in (("ids", ids, int64), ("text_mask", text_mask, torch.bool)):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}: expected {dtype}")
        if tensor.shape != (B, S) or (S > 1 and tensor.stride(1) != 1):
            raise ValueError(
                f"{name} of shape {list(tensor.shape)}, strides {tensor.stride()}: expected {[B, S]}, "
                "a sequence's positions adjacent"
            )
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}: expected {device}, where ids are")
    check(device, multipliers=(multipliers, (L, order), int64), history=(history, (B, order - 1), int64))
    check(device, primes=(primes, (L, columns), int64), offsets=(offsets, (L, columns), int64))
    if pad < 0:
        raise ValueError(f"pad = {pad}: expected a compressed id, from 0")
    if device.type == "cpu":
        _check_values(ids, multipliers, primes, pad, history)

    rows = torch.empty((B, S, L, columns), dtype=int64, device=device)
    next_history = torch.empty((B, order - 1), dtype=int64, device=device)
    if S == 0:
        return rows, next_history.fill_(WALL) if history is None else next_history.copy_(history)
    # fmt: off
    ngram_hash[(triton.cdiv(B * S, BLOCK_T), L)](
        ids, text_mask, history, multipliers, primes, offsets, rows, next_history,
        pad, B * S, S, ids.stride(0), 0 if text_mask is None else text_mask.stride(0),
        ORDER=order, COLUMNS=columns, PADDED=triton.next_power_of_2(columns), BLOCK_T=BLOCK_T,
    )
    # fmt: on
    return rows, next_history


def _check_values(ids: Tensor, multipliers: Tensor, primes: Tensor, pad: int, history: Tensor | None) -> None:
    for name, tensor in {"multipliers": multipliers, "primes": primes}.items():
        if int(tensor.min()) < 1:
            raise ValueError(f"{name} from {tensor.min()}: expected 1 or more")
    largest = (2**63 - 1) // int(multipliers.max())
    if pad > largest:
        raise ValueError(f"pad = {pad}: expected at most {largest}, so that no product passes 2^63")
    for name, tensor, least in (("ids", ids, 0), ("history", history, WALL)):
        if tensor is None or not tensor.numel():
            continue
        if int(tensor.min()) < least or int(tensor.max()) > largest:
            raise ValueError(
                f"{name} from {tensor.min()} to {tensor.max()}: expected compressed ids, {least} to {largest}, "
                "so that no product passes 2^63"
            )


def _builds() -> list[Build]:
    """The hash of V4.1: orders 2, 3 and 4 with 8 heads each, in 2 layers."""
    names = ("ids", "history", "multipliers", "primes", "offsets", "rows", "next_history")
    signature = dict.fromkeys(names, "*i64") | {"text_mask": "*i1"}
    signature |= dict.fromkeys(("pad", "T", "S", "ids_row", "mask_row"), "i32")
    how = {"ORDER": 4, "COLUMNS": 24, "PADDED": 32, "BLOCK_T": BLOCK_T}
    plain = {name: kind for name, kind in signature.items() if name not in ("text_mask", "history")}
    return [
        Build("ngram_hash", ngram_hash, signature, how),
        Build("ngram_hash_text", ngram_hash, plain, how | {"text_mask": None, "history": None}),
    ]


BUILDS = _builds()
