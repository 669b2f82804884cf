"""The fused hash against the reference: equal in every bit, for any chunking, walls and sequence starts included.

Rows start as -7 inside larger buffers whose margins must stay as they were.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv41_edu.config import preset
from dsv41_edu.engram.hashing import NgramHash
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.launch import INTERPRETED
from kernels.ngram_hash import fused_ngram_hash
from tests.kernels.test_gate import DEVICE, poison

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "engram_hash.json").read_text())["cases"]
RELEASE = NgramHash.of(preset("v41_flash"), pad=2)
SMALL = NgramHash((1, 4), order=4, heads=2, first=53, size=97, pad=72)
ODD = NgramHash((1, 2, 9), order=3, heads=5, first=1000, size=50, pad=0)


def tables(hash):
    return [table.to(DEVICE) for table in (hash.multipliers, hash.primes, hash.offsets)]


def fused(hash, ids, text_mask=None, history=None):
    return fused_ngram_hash(ids, *tables(hash), hash.pad, text_mask, history)


def case(hash, B, S, seed=0):
    """Ids, a mask with about a third images, and a history with walls."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, hash.size, (B, S), generator=g)
    history = torch.randint(-1, hash.size, (B, hash.order - 1), generator=g)
    history[torch.rand(history.shape, generator=g) < 0.3] = -1
    return [tensor.to(DEVICE) for tensor in (ids, torch.rand(B, S, generator=g) > 0.3, history)]


def check(hash, *given):
    ours, expected = fused(hash, *given), hash(*(None if x is None else x.cpu() for x in given))
    for part, reference in zip(ours, expected, strict=True):
        assert part.dtype == torch.int64
        assert torch.equal(part.cpu(), reference)
    return ours


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_public_vectors(case):
    stored = load_file(VECTORS / "engram_hash.safetensors", device=DEVICE)
    v = {name.split(".")[1]: t.long() for name, t in stored.items() if name.startswith(f"case{case['case']}.")}
    ids = v["input_ids"] if case["case"] == 0 else v["token_map"][v["input_ids"]]
    constants = v["multipliers"], v["primes"].flatten(1), v["offsets"], int(v["token_map"][2])
    assert torch.equal(fused_ngram_hash(ids, *constants)[0], v["rows_no_images"])
    assert torch.equal(fused_ngram_hash(ids, *constants, v["text_mask"].bool())[0], v["rows_with_images"])


def test_worked_rows():
    rows = fused(RELEASE, torch.tensor([[10, 20, 30, 99091]], device=DEVICE))[0][0, :, :, [0, 7, 8, 16, 23]]
    assert rows[0, 0].tolist() == [9400104, 114349277, 128026094, 261350200, 382122658]
    assert rows[3, 0].tolist() == [7617624, 113499312, 136337546, 268174913, 380488656]
    assert rows[0, 1].tolist() == [11315085, 116830007, 135395884, 269973942, 379075217]
    assert rows[3, 1].tolist() == [9829951, 112496383, 134278766, 257003151, 371686070]


@pytest.mark.parametrize("S", [0, 1, 2, 13, 17, 63])
@pytest.mark.parametrize("hash", [RELEASE, ODD], ids=["release", "odd"])
def test_rows_and_history_are_exact(hash, S, monkeypatch):
    intact = poison(monkeypatch)
    ids, text_mask, history = case(hash, 2, S, seed=S)
    check(hash, ids)
    check(hash, ids, text_mask, history)
    intact()


def test_a_mask_and_a_history_alone():
    ids, text_mask, history = case(ODD, 2, 6)
    check(ODD, ids, text_mask)
    check(ODD, ids, None, history)


@pytest.mark.parametrize(("B", "S"), [(0, 5), (1, 512), (37, 1)])
def test_other_sizes(B, S):
    check(SMALL, *case(SMALL, B, S))


def test_the_largest_products():
    """All bits below the sign take part; the same with multipliers as large as the size allows."""
    top = torch.full((1, 40), RELEASE.size - 1, device=DEVICE)
    top[0, ::3] = 0
    check(RELEASE, top)
    hash = NgramHash((1, 2), order=4, heads=2, first=2**40, size=97, pad=96)
    hash.multipliers[:] = (2**63 - 1) // 97 - torch.arange(8).view(2, 4)
    check(hash, torch.arange(97, device=DEVICE).flip(0)[None])


def test_equal_ids():
    check(SMALL, torch.full((2, 9), 5, device=DEVICE))
    check(SMALL, torch.zeros((2, 9), dtype=torch.int64, device=DEVICE))


# ---- look-back


def test_an_image_hides_only_the_three_tokens_behind_it():
    ids = torch.arange(10, 22, device=DEVICE)[None]
    mask = torch.ones(1, 12, dtype=torch.bool, device=DEVICE)
    mask[0, 4:6] = False
    rows = check(SMALL, ids, mask)[0]
    differs = (rows != fused(SMALL, ids)[0]).flatten(2).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4), (5, 5, 6), (2, 9), (0, 11, 12, 13, 14)])
def test_any_chunking_gives_the_same_rows(cuts):
    ids, mask, _ = case(SMALL, 2, 15)
    whole, last = fused(SMALL, ids, mask)
    history, parts = None, []
    for start, end in itertools.pairwise([0, *cuts, 15]):
        rows, history = fused(SMALL, ids[:, start:end], mask[:, start:end], history)
        parts.append(rows)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(history, last)


# ---- the same again


def test_two_runs_are_equal_and_a_sequence_alone_equals_the_sequence_in_a_batch():
    given = case(SMALL, 5, 9)
    rows, history = fused(SMALL, *given)
    assert torch.equal(rows, fused(SMALL, *given)[0])
    for b in (0, 4):
        alone, its_history = fused(SMALL, *(x[b : b + 1] for x in given))
        assert torch.equal(alone[0], rows[b])
        assert torch.equal(its_history[0], history[b])


def test_sequences_may_be_apart_and_positions_may_not():
    ids, mask, history = case(SMALL, 3, 8)
    apart = torch.cat([ids, ids + 1], 1)[:, :8], torch.cat([mask, ~mask, ~mask], 1)[:, :8]
    assert torch.equal(fused(SMALL, *apart, history)[0], fused(SMALL, ids, mask, history)[0])
    same = ids[:1].expand(3, 8)
    assert torch.equal(fused(SMALL, same)[0][2], fused(SMALL, ids[:1])[0][0])
    with pytest.raises(ValueError, match=r"ids of shape \[3, 8\], strides \(1, 3\): .* positions adjacent"):
        fused(SMALL, ids.T.contiguous().T)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
def test_what_is_read_and_written():
    """`order` ids a position and layer, less at the start; the rows once; the history for the next chunk once."""
    B, S, L, columns = 2, 21, 2, 24
    ids, mask, history = case(RELEASE, B, S)
    ids = torch.cat([ids, ids], 1)[:, :S]  # beyond a sequence's end lies what must not be read
    multipliers, primes, offsets = tables(RELEASE)
    named = dict(ids=ids, mask=mask, multipliers=multipliers, primes=primes, offsets=offsets, history=history)
    with count_traffic(**named) as traffic:
        fused_ngram_hash(ids, multipliers, primes, offsets, RELEASE.pad, mask, history)
    of_ids = L * B * (S + S - 1 + S - 2 + S - 3)
    assert traffic["ids"] == Traffic(of_ids, 0, 8 * of_ids, 0)
    assert traffic["mask"] == Traffic(of_ids, 0, of_ids, 0)
    assert traffic["history"].loaded == L * B * (1 + 2 + 3)
    programs = 2 * L
    assert traffic["primes"].loaded == traffic["offsets"].loaded == programs * columns
    assert traffic["multipliers"].loaded == programs * 4
    written = B * S * L * columns + B * 3
    assert traffic["allocated int64"] == Traffic(0, written, 0, 8 * written)


# ---- bad input

IDS = torch.tensor([[1, 2]], device=DEVICE)
GOOD = dict(zip(("ids", "multipliers", "primes", "offsets", "pad"), (IDS, *tables(SMALL), 72), strict=True))
VALUES = [
    (dict(ids=IDS[0]), r"ids of shape \[2\]: expected \[B, S\]"),
    (dict(multipliers=GOOD["multipliers"][0]), r"multipliers of shape \[4\]: expected \[L, order\]"),
    (dict(multipliers=GOOD["multipliers"][:, :1]), r"multipliers of shape \[2, 1\]: .* order from 2"),
    (dict(primes=GOOD["primes"][:, :5]), r"primes of shape \[2, 5\]: expected \[2, a multiple of 3\]"),
    (dict(primes=GOOD["primes"][:1]), r"primes of shape \[1, 6\], .*: expected \[2, 6\], contiguous"),
    (dict(offsets=GOOD["offsets"].T.contiguous().T), r"offsets of shape \[2, 6\], .*: expected .*, contiguous"),
    (dict(text_mask=IDS[:, :1] > 0), r"text_mask of shape \[1, 1\], .*: expected \[1, 2\]"),
    (dict(history=IDS), r"history of shape \[1, 2\], .*: expected \[1, 3\]"),
    (dict(pad=-1), "pad = -1: expected a compressed id"),
    (dict(ids=IDS.to("meta")), "multipliers is on cpu: expected meta|multipliers is on cuda.*: expected meta"),
    (dict(text_mask=(IDS > 0).to("meta")), "text_mask is on meta: expected .*, where ids are"),
]
ON_A_CPU = [
    (dict(ids=IDS - 2), "ids from -1 to 0: expected compressed ids, 0 to"),
    (dict(ids=IDS * 2**58), "ids from .*: expected compressed ids, .* so that no product passes 2"),
    (dict(history=torch.tensor([[-2, 1, 1]])), "history from -2 to 1: expected compressed ids, -1 to"),
    (dict(history=torch.tensor([[-1, 1, 2**60]])), "history from -1 to .*: expected compressed ids"),
    (dict(pad=2**60), "pad = .*: expected at most"),
    (dict(primes=GOOD["primes"] * 0), "primes from 0: expected 1 or more"),
    (dict(multipliers=GOOD["multipliers"] * 0), "multipliers from 0: expected 1 or more"),
]
TYPES = [
    (dict(ids=IDS.int()), r"ids is torch\.int32: expected torch\.int64"),
    (dict(text_mask=IDS), r"text_mask is torch\.int64: expected torch\.bool"),
    (dict(primes=GOOD["primes"].int()), r"primes is torch\.int32: expected torch\.int64"),
    (dict(history=torch.zeros(1, 3, device=DEVICE)), r"history is torch\.float32: expected torch\.int64"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [(c, ValueError, m) for c, m in VALUES + (ON_A_CPU if DEVICE == "cpu" else [])]
    + [(c, TypeError, m) for c, m in TYPES],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        fused_ngram_hash(**GOOD | change)


def test_uncompressed_ids_of_the_release_are_refused():
    """129,279 times the largest multiplier of layer 14 passes 2^63."""
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="ids from 2 to 129279: expected compressed ids, 0 to 111637"):
            fused(RELEASE, torch.tensor([[2, 129_279]]))


def test_no_row_leaves_its_column_whatever_the_ids(monkeypatch):
    """As on a GPU, where ids are not waited for."""
    monkeypatch.setattr("kernels.ngram_hash._check_values", lambda *given: None)
    ids = torch.tensor([[2**62 + 12345, -5, 2**63 - 1, 96, -(2**63), 129_279, 3]], device=DEVICE)
    rows = fused(RELEASE, ids)[0]
    offsets, primes = RELEASE.offsets.to(DEVICE), RELEASE.primes.to(DEVICE)
    assert (rows >= offsets).all()
    assert (rows < offsets + primes).all()
    assert torch.equal(rows[:, 6], fused(RELEASE, ids[:, 5:])[0][:, 1]), "a negative id is a wall"


def test_it_fits_every_target_at_the_official_size():
    reports = compile_all(["kernels.ngram_hash"])
    assert {report.target for report in reports} == {*TARGETS}
    assert all(report.spilled == report.stack_bytes == 0 for report in reports)
