"""Which drafts stand, and the token after them, so that the output follows the target's law exactly.

    y_1 ... y_n            the drafts; y_i was drawn from q_i-1, and p_i is the target's law after i of them
    u_1 ... u_n+1          uniform in [0, 1), and independent of what drew the drafts

    greedy                 y_i stands if it is the likeliest under p_i-1, up to the first that isn't
    token by token         a_i = min(1, p_i-1(y_i) / q_i-1(y_i));   tau = the drafts before the first u_i >= a_i
    block                  w_0 = 1;   w_i = min(1, w_i-1 p_i-1(y_i) / q_i-1(y_i))
                           S_i = sum_x max(w_i p_i(x) - q_i(x), 0)
                           a_i = S_i / (S_i + 1 - w_i), 1 for 0 / 0;   a_n = w_n
                           tau = the largest i with u_i < a_i, 0 for none
    next token             from max(w_tau p_tau - q_tau, 0), normalised; w = 1 token by token; q_n = 0: nothing was
                           drawn there

A rejected draft came too often, so the next token comes from what is left of p. Token by token decides before it has
seen the later drafts; the block decides with all of them in hand, and keeps more. Sources: Leviathan et al. 2023;
Sun et al. 2024 (block verification); DSpark 2.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 1 << 17  # numbers of each law that are fp64 at a time: its passes find them in a core's cache
TOLERANCE = 1e-4  # of a law's sum: a softmax in fp32 over a large vocabulary misses 1 by up to a tenth of it

Draws = Tensor | Sequence[torch.Generator]


def fuse(p: Tensor) -> bool:
    """Whether the fused kernels serve: on a GPU. They compute in fp64, too."""
    return p.is_cuda


class Verified(NamedTuple):
    """int64 [B] each: how many drafts stand, and the token that follows them."""

    accepted: Tensor
    next: Tensor


class Rule(NamedTuple):
    """What makes a verifier: the chances of its tests, and what it makes of their outcomes."""

    chances: Callable[[Sequence[Tensor], Sequence[Tensor], Tensor], tuple[Tensor, Tensor]]  # see `token_chances`
    count: Callable[[Tensor], Tensor]  # bool [B, n] -> tau [B]


def token_chances(p: Sequence[Tensor], q: Sequence[Tensor], drafts: Tensor) -> tuple[Tensor, Tensor]:
    """a [B, n] and w [B, n + 1] token by token; p and q: a law [B, V] for each place, drafts int64 [B, n]."""
    a = (_of(p, drafts) / _of(q, drafts)).clamp(max=1)
    return a, a.new_ones(len(a), drafts.shape[1] + 1)


def block_chances(p: Sequence[Tensor], q: Sequence[Tensor], drafts: Tensor) -> tuple[Tensor, Tensor]:
    """a [B, n] and w [B, n + 1] by the block; arguments of `token_chances`."""
    w = block_weights(_of(p, drafts), _of(q, drafts))
    a = w[:, 1:].clone()
    for i in range(1, drafts.shape[1]):
        a[:, i - 1] = block_chance(p[i], q[i], w[:, i])
    return a, w


def block_weights(target: Tensor, drawn: Tensor) -> Tensor:
    """w [B, n + 1] from what the laws give to the drafts, p_i-1(y_i) and q_i-1(y_i), fp64 [B, n] each."""
    w = target.new_ones(len(target), target.shape[1] + 1)
    for i in range(target.shape[1]):
        w[:, i + 1] = (w[:, i] * target[:, i] / drawn[:, i]).clamp(max=1)
    return w


def block_chance(p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """a [B] of a place that isn't the last, from its laws [B, V] and its w [B]."""
    S = (w.unsqueeze(1) * p).sub_(q).clamp_(min=0).sum(1)
    rest = S + (1 - w)
    return torch.where(rest > 0, S / rest, 1.0)


def leading(passed: Tensor) -> Tensor:
    """How many pass before the first that doesn't, int64 [...] of bool [..., n]."""
    return passed.long().cumprod(-1).sum(-1)


def last(passed: Tensor) -> Tensor:
    """The place, from 1, of the last that passes, 0 for none: int64 [...] of bool [..., n]."""
    return passed.shape[-1] - leading(~passed.flip(-1))


TOKEN_BY_TOKEN, BLOCK = Rule(token_chances, leading), Rule(block_chances, last)


def residual(p: Tensor, q: Tensor, w: Tensor) -> Tensor:
    """max(w p - q, 0), not normalised, [B, V]; w [B]. p itself where rounding leaves nothing."""
    left = (w.unsqueeze(-1) * p).sub_(q).clamp_(min=0)
    nothing = left.amax(-1) == 0
    left[nothing] = p[nothing]
    return left


def rejection_verify(p: Tensor, q: Tensor, drafts: Tensor, lengths: Tensor | None, draws: Draws) -> Verified:
    """Token by token, in fp64.

    p: fp32 or fp64 [B, g + 1, V], the target's laws; q: [B, g, V], those that the drafts were drawn from; drafts: int
    [B, g]. lengths: int64 [B], the drafts of each row, g each if None; what lies behind them is never looked at.
    draws: the u, fp [B, g + 1], or a generator for each row, which gives its row's length + 1 numbers, so that a row
    in a batch is what it would be alone. A generator may have drawn the drafts before: it moves on. One seeded afresh
    like theirs is no independent one. g = 0 and length 0 draw the next token from p alone.

    Raises TypeError for dtypes, ValueError for shapes, lengths, laws that are negative, not finite or don't sum to 1,
    ids out of range, draws outside [0, 1), and for a draft that q doesn't allow: it was drawn from another law.
    """
    return _verify(False, p, q, drafts, lengths, draws)


def block_verify(p: Tensor, q: Tensor, drafts: Tensor, lengths: Tensor | None, draws: Draws) -> Verified:
    """By the block, in fp64: keeps at least as many drafts on average. Arguments and errors of `rejection_verify`."""
    return _verify(True, p, q, drafts, lengths, draws)


def greedy_verify(
    p: Tensor, q: Tensor | None, drafts: Tensor, lengths: Tensor | None, draws: Draws | None = None
) -> Verified:
    """The likeliest token at each place, the lowest id of equals, as greedy decoding gives it.

    p: [B, g + 1, V], float, probabilities or logits; q and draws are the other verifiers', nothing is drawn here.
    Raises as `rejection_verify` for what it reads, and ValueError for a NaN in p.
    """
    lengths = _check_shapes(p, q, drafts, lengths)
    best, ids = p.max(-1)
    inside = torch.arange(drafts.shape[1] + 1, device=p.device) <= lengths.unsqueeze(1)
    if (best.isnan() & inside).any():
        raise ValueError(f"p{_first(best.isnan() & inside)} has a NaN: expected numbers")
    accepted = leading((ids[:, :-1] == drafts) & inside[:, 1:])
    return Verified(accepted, ids.gather(1, accepted.unsqueeze(1)).squeeze(1))


def sample(weights: Tensor, u: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds u times the total: int64 [B] of fp64 [B, V], u [B] in [0, 1)."""
    sums = weights.cumsum(-1)
    return torch.searchsorted(sums, u.unsqueeze(-1) * sums[:, -1:], right=True).squeeze(-1)


def _verify(by_block: bool, p: Tensor, q: Tensor, drafts: Tensor, lengths: Tensor | None, draws: Draws) -> Verified:
    lengths = _check_shapes(p, q, drafts, lengths)
    if p.dtype not in (torch.float32, torch.float64) or q.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"p is {p.dtype}, q {q.dtype}: expected float32 or float64")
    g = drafts.shape[1]
    inside = torch.arange(g, device=p.device) < lengths.unsqueeze(1)
    drafts = drafts.long().where(inside, 0)
    target, drawn = (laws.gather(2, drafts.unsqueeze(2)).squeeze(2).double() for laws in (p[:, :g], q))
    excluded = inside & (drawn == 0)
    if excluded.any():
        raise ValueError(f"drafts{_first(excluded)} = {drafts[excluded][0]} has q = 0: expected a token drawn from q")
    u = _uniforms(draws, lengths, g)
    if fuse(p):
        return _fused(by_block, p, q, drafts, lengths, u)
    p, q = Laws("p", p, lengths + 1), Laws("q", q, lengths)
    target, drawn = target / p.totals[:, :g], drawn / q.totals
    if by_block:
        w = block_weights(target, drawn)
        accepted = _last_that_passes(p, q, w, lengths, u)
    else:
        w = torch.ones_like(u)
        accepted = leading((u[:, :g] < target / drawn) & inside)
    following = torch.empty_like(accepted)
    for i in range(g + 1):
        for rows in p.pieces((accepted == i) & (lengths > i)):
            following[rows] = sample(residual(p.of(rows, i), q.of(rows, i), w[rows, i]), u[rows, lengths[rows]])
        for rows in p.pieces((accepted == i) & (lengths == i)):
            following[rows] = sample(p.of(rows, i), u[rows, i])
    return Verified(accepted, following)


def _last_that_passes(p: "Laws", q: "Laws", w: Tensor, lengths: Tensor, u: Tensor) -> Tensor:
    """tau [B] by the block, from the last place back: laws before the first that passes needn't be looked at."""
    accepted = torch.zeros_like(lengths)
    for i in range(u.shape[1] - 1, 0, -1):
        a = w[:, i].clone()  # of the last draft it is the chance; and where w = 1, whatever S is
        for rows in p.pieces((accepted == 0) & (lengths > i) & (a < 1)):
            a[rows] = block_chance(p.of(rows, i), q.of(rows, i), w[rows, i])
        accepted[(accepted == 0) & (lengths >= i) & (u[:, i - 1] < a)] = i
    return accepted


def _fused(by_block: bool, p: Tensor, q: Tensor, drafts: Tensor, lengths: Tensor, u: Tensor) -> Verified:
    from kernels.verify import fused_verify

    accepted, following, totals = fused_verify(p, q, drafts, lengths, u, by_block=by_block)
    for name, laws, sums in (("p", p, totals[0]), ("q", q, totals[1])):
        _check_totals(name, laws, sums)
    return Verified(accepted, following)


class Laws:
    """Laws [B, places, V], checked as far as each row's `used`, int64 [B]; normalised when they are asked for."""

    def __init__(self, name: str, laws: Tensor, used: Tensor):
        self.laws = laws
        self.totals = torch.ones(laws.shape[:2], dtype=torch.float64)
        for i in range(laws.shape[1]):
            for rows in self.pieces(used > i):
                given = laws[:, i].index_select(0, rows)
                self.totals[rows, i] = given.double().sum(1).where(given.amin(1) >= 0, torch.nan)
        _check_totals(name, laws, self.totals)

    def pieces(self, chosen: Tensor) -> tuple[Tensor, ...]:
        """The rows, bool [B], that are chosen, as many at a time as fit."""
        rows = chosen.nonzero().squeeze(1)
        return rows.split(max(1, PIECE // self.laws.shape[2])) if len(rows) else ()

    def of(self, rows: Tensor, i: int) -> Tensor:
        """Those of some rows at place i: fp64 [rows, V]."""
        scale = 1 / self.totals[rows, i].unsqueeze(1)  # a division takes three times as long
        return self.laws[:, i].index_select(0, rows).double().mul_(scale)


def _check_totals(name: str, laws: Tensor, totals: Tensor) -> None:
    """totals: fp64 [B, places], NaN where an entry is negative."""
    wrong = ~((totals - 1).abs() <= TOLERANCE)
    if wrong.any():
        row, i = _first(wrong)
        law = laws[row, i]
        raise ValueError(
            f"{name}[{row}, {i}] has sum {law.double().sum():.6g}, smallest entry {law.amin():.6g}: "
            "expected a law, numbers from 0 up with sum 1"
        )


def _of(laws: Sequence[Tensor], ids: Tensor) -> Tensor:
    """What a law [B, V] for each place gives to ids [B, n]: fp64 [B, n]."""
    found = torch.empty(ids.shape, dtype=torch.float64)
    for i in range(ids.shape[1]):
        found[:, i] = laws[i].gather(1, ids[:, i : i + 1]).squeeze(1)
    return found


def _uniforms(draws: Draws, lengths: Tensor, g: int) -> Tensor:
    """u, fp64 [B, g + 1]."""
    if isinstance(draws, Tensor):
        u = draws.double()
        if u.shape != (len(lengths), g + 1):
            raise ValueError(f"draws {list(u.shape)}: expected [B, g + 1] = [{len(lengths)}, {g + 1}]")
    else:
        if len(draws) != len(lengths):
            raise ValueError(f"{len(draws)} generators: expected one for each of {len(lengths)} rows")
        u = torch.zeros(len(lengths), g + 1, dtype=torch.float64)
        for row, (generator, n) in enumerate(zip(draws, lengths.tolist(), strict=True)):
            u[row, : n + 1] = torch.rand(n + 1, generator=generator, dtype=torch.float64)
        u = u.to(lengths.device)
    wrong = ~((u >= 0) & (u < 1)) & (torch.arange(g + 1, device=u.device) <= lengths.unsqueeze(1))
    if wrong.any():
        raise ValueError(f"draws{_first(wrong)} = {u[wrong][0]}: expected a number in [0, 1)")
    return u


def _check_shapes(p: Tensor, q: Tensor | None, drafts: Tensor, lengths: Tensor | None) -> Tensor:
    """The lengths, int64 [B]."""
    shapes = f"p {list(p.shape)}, q {None if q is None else list(q.shape)}, drafts {list(drafts.shape)}"
    if drafts.ndim != 2 or p.ndim != 3 or p.shape[:2] != (drafts.shape[0], drafts.shape[1] + 1) or not p.shape[2]:
        raise ValueError(f"{shapes}: expected p [B, g + 1, V], q [B, g, V], drafts [B, g], V >= 1")
    B, g, V = *drafts.shape, p.shape[2]
    if q is not None and q.shape != (B, g, V):
        raise ValueError(f"{shapes}: expected q [B, g, V] = {[B, g, V]}")
    if drafts.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"drafts is {drafts.dtype}: expected int64 or int32")
    lengths = torch.full((B,), g, device=p.device) if lengths is None else lengths
    if lengths.dtype != torch.int64 or lengths.shape != (B,):
        raise ValueError(f"lengths is {lengths.dtype} {list(lengths.shape)}: expected int64 [B] = [{B}]")
    if not ((lengths >= 0) & (lengths <= g)).all():
        raise ValueError(f"lengths = {lengths.tolist()}: expected 0 to {g}, the drafts of a block")
    wrong = ((drafts < 0) | (drafts >= V)) & (torch.arange(g, device=p.device) < lengths.unsqueeze(1))
    if wrong.any():
        raise ValueError(f"drafts{_first(wrong)} = {drafts[wrong][0]}: expected an id from 0 to {V - 1}")
    return lengths


def _first(wrong: Tensor) -> list[int]:
    return wrong.nonzero()[0].tolist()
