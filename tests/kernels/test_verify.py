"""The fused verifiers against the rules in fractions, against the reference, and for what they read.

Laws of eighths and uniforms of 64ths make every tie one in fp64, where sums are exact in any order. Large
vocabularies take several tiles, with uniforms far from any edge. Outputs start as NaN and as numbers out of range.
"""

import mmap

import pytest
import torch
from hypothesis import given, settings

from dsv41_edu.dspark import verification
from dsv41_edu.dspark.verification import block_verify, rejection_verify
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.launch import INTERPRETED
from kernels.launches import count_launches
from kernels.verify import TILE, fused_verify
from tests.dspark.test_verification import RULES, batches, by_the_rules, packed, random_batch
from tests.kernels.test_experts import SHARED
from tests.kernels.test_gate import DEVICE, poison

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
rules = pytest.mark.parametrize("name", RULES)
NAN = float("nan")
FP32, FP64 = torch.float32, torch.float64


def fused(name, *given):
    return fused_verify(*(x.to(DEVICE) for x in given), by_block=name == "block")


def case(B, g, V, dtype=FP32, seed=0):
    """p, q, drafts, lengths, u; poison behind each row's length."""
    p, q, drafts, lengths = random_batch(B, g, V, dtype, sharpness=2, seed=seed)
    u = torch.rand(B, g + 1, dtype=FP64, generator=torch.Generator().manual_seed(seed + 1))
    for b, n in enumerate(lengths.tolist()):
        p[b, n + 1 :], q[b, n:], drafts[b, n:], u[b, n + 1 :] = NAN, NAN, -(10**9), NAN
    return p, q, drafts, lengths, u


def checked(name, given):
    accepted, following, totals = (x.cpu() for x in fused(name, *given))
    expected = RULES[name][1](*given)
    assert torch.equal(accepted, expected.accepted)
    assert torch.equal(following, expected.next)
    for law, found in zip(given[:2], totals, strict=True):
        wanted = law.double().sum(-1).nan_to_num(1.0)
        torch.testing.assert_close(found[:, : law.shape[1]], wanted, rtol=1e-14, atol=0)
    return accepted, following


@settings(derandomize=True, deadline=None, max_examples=8)
@given(batches)
def test_it_follows_the_rules_in_fractions(batch):
    V, batch = batch
    for name in RULES:
        accepted, following, _ = fused(name, *packed(V, batch))
        expected = [by_the_rules(name, *row)[:2] for row in batch]
        assert list(zip(accepted.tolist(), following.tolist(), strict=True)) == expected


@rules
@pytest.mark.parametrize(
    ("B", "g", "V", "dtype"),
    [(20, 4, 3, FP32), (2, 1, TILE, FP64), (6, 5, 2 * TILE + 77, FP32), (2, 0, 9, FP32)],
)
def test_it_is_the_reference_on_ragged_blocks(name, B, g, V, dtype, monkeypatch):
    intact = poison_all(monkeypatch)
    accepted, _ = checked(name, case(B, g, V, dtype))
    assert B < 20 or len(accepted.unique()) > 2
    intact()


def poison_all(monkeypatch):
    """As `poison`, for sizes given one by one or as a tuple."""
    intact = poison(monkeypatch)
    guarded = torch.empty

    def empty(shape, *more, **options):
        return guarded((shape, *more) if isinstance(shape, int) else shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    return intact


@rules
def test_each_dtype_of_a_law_is_its_own(name):
    p, q, *rest = case(5, 3, 40, FP64)
    for dtypes in ((FP32, FP64), (FP64, FP32)):
        checked(name, (p.to(dtypes[0]), q.to(dtypes[1]), *rest))


@rules
def test_no_id_without_weight_at_the_ends(name):
    """u = 0 takes the first id that has weight, the u below 1 the last one; zeros stand before, behind, in a tile."""
    V = 3 * TILE
    p = torch.zeros(2, 2, V)
    p[:, :, [TILE + 5, TILE + 9, TILE + 4000]] = torch.tensor([0.25, 0.5, 0.25])
    q = torch.zeros(2, 1, V)
    q[:, :, [TILE + 5, TILE + 9]] = torch.tensor([0.75, 0.25])
    drafts, lengths = torch.full((2, 1), TILE + 5), torch.tensor([1, 1])
    below = 1 - 2**-53
    for u, accepted, following in (
        ([[0.9, 0.0], [0.9, below]], [0, 0], [TILE + 9, TILE + 4000]),
        ([[0.1, 0.0], [0.1, below]], [1, 1], [TILE + 5, TILE + 4000]),
    ):
        found = fused(name, p, q, drafts, lengths, torch.tensor(u, dtype=FP64))
        assert (found[0].tolist(), found[1].tolist()) == (accepted, following)


@interpreted
def test_a_sure_place_in_the_middle_is_never_passed_by():
    """w = 1 at place 2 of 3: its test needs no sum, those before it need none at all, and place 3 still counts."""
    half, even = [0.5, 0.5, 0.0, 0.0], [0.25] * 4
    p = torch.tensor([[even, half, even, half]] * 2, dtype=FP64)
    q = torch.tensor([[half, even, half]] * 2, dtype=FP64)
    drafts, lengths = torch.tensor([[0, 1, 0]] * 2), torch.tensor([3, 3])
    u = torch.tensor([[0.9, 0.9, 0.4, 0.6], [0.9, 0.9, 0.6, 0.6]], dtype=FP64)
    given = dict(p=p, q=q, drafts=drafts, lengths=lengths, u=u)
    with count_traffic(**given) as traffic:
        accepted, following, _ = fused_verify(**given, by_block=True)
    assert accepted.tolist() == [3, 2]
    assert following.tolist() == [1, 3]
    assert traffic["q"].loaded == 2 * 3 * 4 + 2 * 3 + 4 + 4, "totals, drafts, place 2 of the second row, its tile"


@rules
def test_what_is_no_law_shows_in_its_total_and_stays_in_range(name):
    p, q, drafts, lengths, u = case(4, 3, 50)
    lengths, drafts = torch.full((4,), 3), drafts.clamp(min=0)
    p, q, u = p.nan_to_num(0.02), q.nan_to_num(0.02), u.nan_to_num(0.5)
    p[0, 1, 7], p[2, 0, 0], q[3, 0] = NAN, float("inf"), 0
    for law in (p[3, 2], q[1, 2]):  # the sum stays 1
        law[3:5] += torch.tensor([-0.5, 0.5])
    accepted, following, totals = fused(name, p, q, drafts, lengths, u)
    wrong = ~((totals - 1).abs() <= 1e-4)
    assert wrong.nonzero().tolist() == [[0, 0, 1], [0, 2, 0], [0, 3, 2], [1, 1, 2], [1, 3, 0]]
    assert ((accepted >= 0) & (accepted <= 3)).all()
    assert ((following >= 0) & (following < 50)).all()


@rules
def test_two_runs_are_equal_and_a_row_alone_equals_the_row_in_a_batch(name):
    given = case(6, 4, TILE + 100, seed=2)
    found = fused(name, *given)
    assert all(map(torch.equal, fused(name, *given), found))
    for b, n in ((4, 4), (3, 3)):
        p, q, drafts, _, u = (x[b : b + 1] for x in given)
        alone = fused(name, p[:, : n + 1], q[:, :n], drafts[:, :n], torch.tensor([n]), u[:, : n + 1])
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone[:2], found[:2], strict=True))
        assert torch.equal(alone[2][:, 0], found[2][:, b, : n + 1])


def test_views_of_longer_buffers():
    p, q, drafts, lengths, u = given = case(5, 3, 33)
    wide = torch.full((9, 5, 64), NAN)
    wide[:4, :, :33] = p.transpose(0, 1)
    apart = wide[:4, :, :33].transpose(0, 1), q.transpose(0, 1).contiguous().transpose(0, 1)
    others = drafts.T.contiguous().T.int(), lengths, u.T.contiguous().T
    assert all(map(torch.equal, fused("block", *apart, *others), fused("block", *given)))


@interpreted
@pytest.mark.parametrize(("name", "far"), [("p", 0), ("p", 1), ("q", 0), ("q", 1)])
def test_addresses_pass_2_to_the_31(name, far):
    """The last row or place lies 2.4e9 numbers on, in memory that is only promised; 32 bits would wrap."""
    memory = mmap.mmap(-1, 10_000_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    given = list(case(3 if far == 0 else 1, 2 if name == "p" else 3, 8))
    given[3] = torch.full_like(given[3], given[2].shape[1])
    given[0], given[1], given[4] = (given[i].nan_to_num(0.125) for i in (0, 1, 4))
    given[2] = given[2].clamp(min=0)
    at = 0 if name == "p" else 1
    stride = (1_200_000_000, 8, 1) if far == 0 else (24, 1_200_000_000, 1)
    placed = torch.frombuffer(memory, dtype=torch.uint8).view(FP32).as_strided(given[at].shape, stride)
    placed.copy_(given[at])
    assert all(map(torch.equal, fused("block", *given[:at], placed, *given[at + 1 :]), fused("block", *given)))


@interpreted
@pytest.mark.parametrize(("u", "opened", "tau"), [(0.0, 0, 3), (0.999, 3, 0), (0.4, 3, 1)])
def test_what_is_read_and_written(u, opened, tau):
    """All of the laws once for the totals, both laws of each open place, a tile of one or two for the id."""
    V, n = TILE + 10, 3
    p, q = torch.zeros(1, n + 1, V), torch.zeros(1, n, V)
    p[..., 0], p[..., V - 1] = 0.5, 0.5
    q[..., 0], q[..., 1] = 0.75, 0.25
    drafts, lengths, draws = torch.zeros(1, n).long(), torch.tensor([n]), torch.full((1, n + 1), u, dtype=FP64)
    if tau == 1:
        draws[0, 1:] = 0.999
    given = dict(p=p, q=q, drafts=drafts, lengths=lengths, u=draws)
    with count_traffic(**given) as traffic, count_launches() as launched:
        accepted, following, _ = fused_verify(**given, by_block=True)
    assert accepted.tolist() == [tau]
    tile = TILE if following.item() < TILE else V - TILE
    at_drafts = n
    assert traffic["p"].loaded == (n + 1) * V + at_drafts + opened * V + tile
    assert traffic["q"].loaded == n * V + at_drafts + opened * V + (tile if tau < n else 0)
    assert traffic["p"].stored == traffic["q"].stored == 0
    tiles = 2
    between = (2 * (n + 1) + opened) * tiles  # sums of p and q of each place and tile, and rests
    assert traffic["allocated float64"].stored == between + (2 * n + 1) + (n + 1), "totals of the laws, w"
    assert traffic["allocated int64"].stored == 2 + 2
    names = {"law_sums", "weights", "rests", "pick"}
    assert {name: count for name, count in launched.items() if name in names} == dict.fromkeys(names, 1)


@interpreted
def test_token_by_token_reads_the_rest_of_one_place():
    p, q, drafts, _, u = case(1, 3, 60)
    p, q, drafts, u = p.nan_to_num(1 / 60), q.nan_to_num(1 / 60), drafts.clamp(min=0), u.nan_to_num()
    given = dict(p=p, q=q, drafts=drafts, lengths=torch.tensor([3]), u=u + 0.999 * (1 - u))
    with count_traffic(**given) as traffic:
        tau = fused_verify(**given, by_block=False)[0].item()
    assert tau < 3
    read = 3 * 60 + 3 + 60 + 60  # totals, drafts, the open place, its only tile again
    assert traffic["q"] == Traffic(read, 0, 4 * read, 0)


# ---- in its place


@rules
def test_the_verifiers_use_it_on_a_gpu(name, monkeypatch):
    given = case(6, 4, 30)
    verify = RULES[name][1]
    expected = verify(*given)
    monkeypatch.setattr(verification, "fuse", lambda p: True)
    monkeypatch.setattr(verification, "Laws", None)  # the reference would fail
    found = verify(*given)
    assert torch.equal(found.accepted, expected.accepted)
    assert torch.equal(found.next, expected.next)


@pytest.mark.parametrize("verify", [block_verify, rejection_verify])
def test_it_refuses_what_the_reference_refuses(verify, monkeypatch):
    p, q, drafts, lengths, u = case(6, 4, 30)
    p[4, 2] *= 1.01
    messages = []
    for fuse in (False, True):
        monkeypatch.setattr(verification, "fuse", lambda p, fuse=fuse: fuse)
        with pytest.raises(ValueError, match=r"p\[4, 2\] has sum 1\.01, smallest entry .*: expected a law") as caught:
            verify(p, q, drafts, lengths, u)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_the_kernels_serve_on_a_gpu_alone():
    assert not verification.fuse(torch.zeros(1))


# ---- bad input

P, Q, Y, N, U = (x.to(DEVICE) for x in case(2, 3, 8))
GOOD = dict(p=P, q=Q, drafts=Y, lengths=N, u=U, by_block=True)
VALUES = [
    (dict(p=P[0]), r"p \[4, 8\], q \[2, 3, 8\]: expected \[B, g \+ 1, V\] and \[B, g, V\]"),
    (dict(p=P[:, :3]), r"p \[2, 3, 8\], q \[2, 3, 8\]: expected"),
    (dict(p=P[..., :0]), r"p \[2, 4, 0\], q .*: expected .* V from 1"),
    (dict(q=Q[..., :7]), r"q of shape \[2, 3, 7\]: expected \[2, 3, 8\]"),
    (dict(drafts=Y[:1]), r"drafts of shape \[1, 3\]: expected \[2, 3\]"),
    (dict(lengths=N[:1]), r"lengths of shape \[1\]: expected \[2\]"),
    (dict(u=U[:, :3]), r"u of shape \[2, 3\]: expected \[2, 4\]"),
    (dict(p=P.mT.contiguous().mT), r"p has strides \(32, 1, 4\): expected its ids adjacent"),
    (dict(u=U.to("meta")), "u is on meta: expected .*, where p is"),
]
TYPES = [
    (dict(p=P.half()), r"p is torch\.float16: expected torch\.float32 or torch\.float64"),
    (dict(drafts=Y.float()), r"drafts is torch\.float32: expected torch\.int64 or torch\.int32"),
    (dict(lengths=N.int()), r"lengths is torch\.int32: expected torch\.int64"),
    (dict(u=U.float()), r"u is torch\.float32: expected torch\.float64"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [(c, ValueError, m) for c, m in VALUES] + [(c, TypeError, m) for c, m in TYPES],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        fused_verify(**GOOD | change)


def test_no_rows():
    assert [x.shape[-1] for x in fused_verify(P[:0], Q[:0], Y[:0], N[:0], U[:0], True)] == [0, 0, 4]


def test_it_fits_every_target_at_the_official_size():
    reports = compile_all(["kernels.verify"])
    assert {report.target for report in reports} == {*TARGETS}
    for report in reports:
        assert report.spilled == report.stack_bytes == 0, report
        assert report.shared_bytes <= SHARED[report.target], report
