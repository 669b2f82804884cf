"""The hash against public vectors, the model's own figures, a plain-integer reference, and the faults really made."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41_edu.config import preset
from dsv41_edu.engram.hashing import NgramHash, is_prime

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "engram_hash.json").read_text())["cases"]
V = load_file(VECTORS / "engram_hash.safetensors")
V41 = preset("v41_flash")
RELEASE = NgramHash.of(V41, pad=2)
SMALL = NgramHash((1, 4), order=4, heads=2, first=53, size=97, pad=72)
drawn = settings(derandomize=True, deadline=None, max_examples=60)

# digits after 16,000,000, in the order layer, n-gram order, head
PRIMES = """57 79 81 97 121 129 133 183   189 207 211 253 277 289 307 321   339 381 393 399 403 409 447 463
            477 487 499 507 511 573 609 627   667 669 693 697 711 729 759 769   781 799 813 819 841 877 879 889"""


def reference(hash, ids, mask):
    """Rows [S][L][columns] of one sequence in plain integers, straight from the words of the rule."""
    heads = hash.primes.shape[1] // (hash.order - 1)
    found = []
    for at in range(len(ids)):
        seen, walled = [], False
        for back in range(hash.order):
            walled = walled or at - back < 0 or not mask[at - back]
            seen.append(hash.pad if walled else ids[at - back])
        rows = []
        for layer, m in zip(hash.layers, hash.multipliers.tolist(), strict=True):
            primes, row, start = hash.primes[hash.layers.index(layer)].tolist(), [], 0
            for order in range(2, hash.order + 1):
                mixed = 0
                for i in range(order):
                    mixed ^= seen[i] * m[i]
                for head in range(heads):
                    p = primes[(order - 2) * heads + head]
                    row.append(mixed % p + start)
                    start += p
            rows.append(row)
        found.append(rows)
    return found


# Public vectors and the figures of the release.
@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_public_vectors(case):
    v = {name.split(".")[1]: t.long() for name, t in V.items() if name.startswith(f"case{case['case']}.")}
    ids = v["input_ids"] if case["case"] == 0 else v["token_map"][v["input_ids"]]
    hash = NgramHash(tuple(case["layers"]), case["ng"], case["h"], case["vs"], case["cv"], int(v["token_map"][2]))
    assert torch.equal(hash.multipliers, v["multipliers"])
    assert torch.equal(hash.primes, v["primes"].flatten(1))
    assert torch.equal(hash.offsets, v["offsets"])
    mask = v["text_mask"].bool()
    assert torch.equal(hash(ids)[0], v["rows_no_images"])
    assert torch.equal(hash(ids, mask)[0], v["rows_with_images"])
    assert torch.equal(hash.look_back(ids, mask)[0], v["ngram_ids_with_images"])


def test_the_release():
    assert RELEASE.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert RELEASE.primes.flatten().tolist() == [16_000_000 + int(tail) for tail in PRIMES.split()]
    assert RELEASE.rows == [384_006_168, 384_016_682]


def test_worked_rows():
    rows = RELEASE(torch.tensor([[10, 20, 30, 99091]]))[0][0, [0, 3]][..., [0, 7, 8, 16, 23]]
    assert rows.transpose(0, 1).tolist() == [
        [
            [9400104, 114349277, 128026094, 261350200, 382122658],
            [7617624, 113499312, 136337546, 268174913, 380488656],
        ],
        [
            [11315085, 116830007, 135395884, 269973942, 379075217],
            [9829951, 112496383, 134278766, 257003151, 371686070],
        ],
    ]


def test_the_largest_id_everywhere_does_not_wrap():
    ids = [RELEASE.size - 1] * 6
    assert RELEASE(torch.tensor([ids]))[0][0].tolist() == reference(RELEASE, ids, [True] * 6)


@pytest.mark.parametrize("order", [2, 3])
def test_remainders_are_exact_up_to_the_largest(order, monkeypatch):
    """Multipliers of 1 and ids of any size: a number goes in as it is, and comes out modulo each prime."""
    primes = [2, 3, 5, 7, 53, 65_537, 16_000_057, 2**31 - 1, 2**32 + 15, 2**61 - 1, 2**62 + 135, 2**63 - 25]
    assert all(map(is_prime, primes))
    hash = NgramHash((1,), order, heads=len(primes) // (order - 1), first=2, size=1, pad=0)
    hash.multipliers[:], hash.primes[0], hash.offsets[:] = 1, torch.tensor(primes), 0
    monkeypatch.setattr(hash, "check", lambda *given: None)
    top = 2**63 - 1
    generator = np.random.default_rng(0)
    numbers = {0, 1, top, top - 1, *generator.integers(0, top, 200).tolist()}
    for p in primes:
        multiples = [
            k * p for k in {0, 1, 2, top // p // 2, top // p, *generator.integers(0, top // p + 1, 50).tolist()}
        ]
        numbers |= {m + off for m in multiples for off in (-2, -1, 0, 1, 2) if 0 <= m + off <= top}
    numbers = sorted(numbers)
    seen = torch.zeros(len(numbers), order, dtype=torch.int64)
    seen[:, 0] = torch.tensor(numbers)
    assert hash.hash(seen)[:, 0].tolist() == [[n % p for p in primes] for n in numbers]


# The rule.
@drawn
@given(st.lists(st.tuples(st.integers(0, 96), st.booleans()), max_size=12))
def test_against_plain_integers(sequence):
    ids, mask = [i for i, _ in sequence], [m for _, m in sequence]
    found, _ = SMALL(torch.tensor([ids], dtype=torch.int64).view(1, -1), torch.tensor([mask]).bool().view(1, -1))
    assert found[0].tolist() == reference(SMALL, ids, mask)


def test_columns_stay_in_their_own_range():
    ids = torch.randint(0, SMALL.size, (4, 200), generator=torch.Generator().manual_seed(0))
    rows = SMALL(ids)[0]
    assert (rows >= SMALL.offsets).all()
    assert (rows < SMALL.offsets + SMALL.primes).all()
    assert all((rows[..., layer, :] < SMALL.rows[layer]).all() for layer in range(2))


@drawn
@given(
    st.lists(st.tuples(st.integers(0, 96), st.booleans()), min_size=1, max_size=14),
    st.lists(st.integers(0, 14), max_size=5),
)
def test_any_chunking_gives_the_same_rows(sequence, cuts):
    """Empty chunks too, and a chunk that ends in an image."""
    ids, mask = torch.tensor([[i for i, _ in sequence]]), torch.tensor([[m for _, m in sequence]])
    edges = [0, *sorted(min(cut, len(sequence)) for cut in cuts), len(sequence)]
    history, parts = None, []
    for start, end in itertools.pairwise(edges):
        rows, history = SMALL(ids[:, start:end], mask[:, start:end], history)
        parts.append(rows)
    whole, last = SMALL(ids, mask)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(history, last)


def test_an_image_hides_only_the_three_tokens_behind_it():
    ids = torch.arange(10, 22)[None]
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[0, 4:6] = False
    with_image, without = SMALL(ids, mask)[0], SMALL(ids)[0]
    differs = (with_image != without).flatten(2).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [4, 5, 6, 7, 8]
    # what stands behind the wall reads as at a sequence's start, whatever came before
    assert torch.equal(with_image[:, 6:], SMALL(ids[:, 6:])[0])
    pad = torch.full((1, 1), SMALL.pad)
    assert torch.equal(with_image[:, 4], SMALL(pad)[0][:, 0])


def test_nothing_shows_through_an_image():
    ids, mask = torch.arange(10, 22)[None], torch.ones(1, 12, dtype=torch.bool)
    mask[0, 5] = False
    other = ids.clone()
    other[0, :6] += 50  # the image's own id too
    assert torch.equal(SMALL(ids, mask)[0][:, 5:], SMALL(other, mask)[0][:, 5:])


def test_the_pad_before_the_start_is_the_compressed_one():
    shifted = NgramHash((1, 4), order=4, heads=2, first=53, size=97, pad=2)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    differs = (SMALL(ids)[0] != shifted(ids)[0]).flatten(2).any(-1)[0]
    assert differs.tolist() == [True, True, True, False, False]


def test_rows_of_a_batch_are_independent():
    g = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(0, 97, (5, 9), generator=g), torch.rand(5, 9, generator=g) > 0.3
    rows, history = SMALL(ids, mask)
    for b in range(5):
        alone, its_history = SMALL(ids[b : b + 1], mask[b : b + 1])
        assert torch.equal(alone[0], rows[b])
        assert torch.equal(its_history[0], history[b])


def test_order_of_tokens_matters():
    rows = SMALL(torch.tensor([[3, 4], [4, 3]]))[0][:, 1]
    assert not torch.equal(rows[0], rows[1])


def test_short_sequences():
    assert SMALL(torch.zeros(2, 0, dtype=torch.int64))[0].shape == (2, 0, 2, 6)
    assert SMALL(torch.zeros(0, 3, dtype=torch.int64))[0].shape == (0, 3, 2, 6)
    assert SMALL(torch.tensor([[7]]))[0][0].tolist() == reference(SMALL, [7], [True])


def test_the_least_sizes():
    """One order, one head, one id."""
    least = NgramHash((1,), order=2, heads=1, first=53, size=1, pad=0)
    assert least(torch.zeros(1, 3, dtype=torch.int64))[0].tolist() == [[[[0]]] * 3]


# What is refused.


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        ([[1, 97]], {}, ValueError, "ids from 1 to 97: expected compressed ids, 0 to 96"),
        ([[-1, 3]], {}, ValueError, "ids from -1 to 3: expected compressed ids, 0 to 96"),
        ([[1.0]], {}, TypeError, "ids is torch.float32: expected torch.int64"),
        ([1, 2], {}, ValueError, r"ids of shape \[2\]: expected \[B, S\]"),
        ([[1, 2]], {"text_mask": torch.ones(1, 2)}, TypeError, "text_mask is torch.float32: expected torch.bool"),
        ([[1, 2]], {"text_mask": torch.ones(1, 3).bool()}, ValueError, r"text_mask of shape \[1, 3\]: .*\[1, 2\]"),
        (
            [[1, 2]],
            {"history": torch.zeros(1, 2).long()},
            ValueError,
            r"history of shape \[1, 2\]: expected \[1, 3\]",
        ),
        ([[1, 2]], {"history": torch.full((1, 3), -2)}, ValueError, "history from -2 to -2: .* ids, -1 to 96"),
        ([[1, 2]], {"history": torch.full((1, 3), 97)}, ValueError, "history from 97 to 97: .* ids, -1 to 96"),
        ([[1, 2]], {"history": torch.zeros(1, 3)}, TypeError, "history is torch.float32"),
    ],
)
def test_bad_input(ids, options, error, message):
    with pytest.raises(error, match=message):
        SMALL(torch.tensor(ids), **options)


def test_hash_alone_refuses_uncompressed_ids():
    """129,279 times the largest multiplier passes 2^63: its row would depend on the language's remainder."""
    with pytest.raises(ValueError, match="seen from 2 to 129279: expected compressed ids, 0 to 99091"):
        RELEASE.hash(torch.tensor([129_279, 2, 2, 2]))
    with pytest.raises(ValueError, match=r"seen of shape \[3\]: expected \[..., 4\]"):
        RELEASE.hash(torch.tensor([1, 2, 2]))
    with pytest.raises(TypeError, match=r"seen is torch\.int32"):
        RELEASE.hash(torch.tensor([1, 2, 2, 2], dtype=torch.int32))


def test_a_config_whose_tables_have_other_sizes():
    wrong = V41.replace(engram_num_embeddings=(384_006_168, 384_016_683))
    with pytest.raises(ValueError, match=r"\(384006168, 384016683\): expected \[384006168, 384016682\]"):
        NgramHash.of(wrong, pad=2)
    assert tuple(NgramHash.of(preset("mini"), pad=2).rows) == preset("mini").engram_num_embeddings
    with pytest.raises(ValueError, match="engram_layer_ids = None: expected a config with Engram layers"):
        NgramHash.of(preset("v3"), pad=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": 1}, "order = 1, heads = 2, size = 97"),
        ({"heads": 0}, "heads = 0"),
        ({"size": 0}, "size = 0"),
        ({"layers": ()}, r"layers = \(\): expected some of each"),
        ({"pad": 97}, "pad = 97: expected a compressed id, 0 to 96"),
        ({"pad": -1}, "pad = -1: expected a compressed id"),
    ],
)
def test_bad_sizes(change, message):
    with pytest.raises(ValueError, match=message):
        NgramHash(**{"layers": (1,), "order": 4, "heads": 2, "first": 53, "size": 97, "pad": 2, **change})
