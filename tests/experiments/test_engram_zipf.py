"""Counts, ranks and served reads are those of a plain dictionary; the stored file is what a run gives."""

from collections import Counter

import pytest
import torch

from dsv41_edu.experiments import engram_zipf, text
from dsv41_edu.experiments.engram_lm import compress, ngram_hash
from dsv41_edu.experiments.engram_zipf import ORDERS, SIZES, counts_in, keys, ranks, run, served

CORPUS, READS = 3_000, 2_000  # tokens


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def grams(ids, order):
    ids = ids.tolist()
    return [tuple(ids[i : i + order]) for i in range(len(ids) - order + 1)]


@pytest.fixture(scope="module")
def splits():
    return [compress(text.tokens(split)[:n]) for split, n in zip(text.SPLITS, (CORPUS, READS), strict=True)]


@pytest.mark.parametrize("order", ORDERS)
def test_counts_and_keys_by_hand(splits, order):
    corpus, ids = splits
    known = Counter(grams(corpus, order))
    expected = [0] * (order - 1) + [known[g] for g in grams(ids, order)]
    assert counts_in(corpus, ids, order).tolist() == expected
    assert max(expected) > 10
    assert 0 in expected[order:]
    assert len(keys(corpus, order).unique()) == len(known)


def test_counts_of_ids_beyond_all_that_are_known():
    assert counts_in(torch.tensor([1, 2, 1, 2]), torch.tensor([1, 2, 2047, 2047]), 2).tolist() == [0, 2, 0, 0]


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_by_hand(splits, order):
    counts = sorted(Counter(grams(splits[0], order)).values(), reverse=True)
    found = ranks(splits[0], order)
    assert (found["distinct"], found["once"]) == (len(counts), counts.count(1))
    assert found["rank"] == [2**i for i in range(len(found["rank"]))]
    assert found["rank"][-1] <= len(counts) < 2 * found["rank"][-1]
    assert found["count"] == [counts[r - 1] for r in found["rank"]]


def test_slope_of_an_exact_power(monkeypatch):
    monkeypatch.setattr(engram_zipf, "LINE", (1, 199))
    ids = torch.cat([torch.full((round(20000 / r) + 1,), r) for r in range(1, 200)])  # "r r" is there 20000 / r times
    assert ranks(ids, 2)["slope"] == pytest.approx(-1, abs=0.001)


def test_served_by_hand(splits):
    """No two n-grams of so short a text share a row: a dictionary of n-grams gives the same."""
    ngrams = ngram_hash(4, 1, 16_000_000)
    hot_from, reads = (ngrams(ids[None])[0][0, :, 0] for ids in splits)
    sizes = (1, 10, 300, 10**6)
    for column, order in enumerate(ORDERS):
        padded = [torch.cat([torch.full((order - 1,), 2), ids]) for ids in splits]  # the pad before the sequence
        corpus, read = (Counter(grams(ids, order)) for ids in padded)
        # the most frequent first, the lower row first of equals
        row_of = dict(zip(grams(padded[0], order), hot_from[:, column].tolist(), strict=True))
        ranked = sorted(corpus, key=lambda g: (-corpus[g], row_of[g]))
        expected = [sum(read[g] for g in ranked[:size]) / READS for size in sizes]
        assert served(hot_from[:, column], reads[:, column], sizes) == [pytest.approx(e, abs=1e-5) for e in expected]
        assert expected == sorted(expected)
        assert expected[0] > 0


def test_served_without_ties():
    hot_from, reads = torch.tensor([5, 5, 5, 8, 8, 9]), torch.tensor([5, 8, 8, 8, 9, 7, 7, 7])
    assert served(hot_from, reads, (1, 2, 3, 10)) == [1 / 8, 4 / 8, 5 / 8, 5 / 8]


def test_stored_file_is_what_a_run_gives():
    found, stored = run(), engram_zipf.read()
    for result in (found, stored):
        assert result.pop("duration_s") > 0
        assert result.pop("torch")
    assert found == stored
    assert stored["sizes"] == list(SIZES)


def test_writes_one_result(tmp_path, monkeypatch):
    monkeypatch.setattr(engram_zipf, "RESULT", tmp_path / "result.json")
    engram_zipf.write([{"a": 1}])
    assert engram_zipf.read() == {"a": 1}
    assert engram_zipf.jobs() == [()]
