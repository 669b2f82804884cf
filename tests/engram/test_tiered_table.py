"""What reads count, tiers that change no value, and what is refused."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from dsv41_edu.engram import table
from dsv41_edu.engram.table import Counts, EngramTable, TieredTable, most_frequent
from tests.engram.test_table import EVERY, PAYLOAD, ROWS, SCALE, SCALES, TABLE, WEIGHT, WIDTH, bits, stored

drawn = settings(derandomize=True, deadline=None, max_examples=50)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The same rows in a file."""
    path = tmp_path_factory.mktemp("shard") / "table.safetensors"
    save_file({WEIGHT: PAYLOAD, SCALE: SCALES}, path)
    return path


@pytest.fixture
def stored_table(path):
    return EngramTable.open(path, 1, ROWS, WIDTH)


# Counting.
def test_counts_of_memory_and_file(stored_table):
    rows = torch.tensor([[5, 5, 7], [9, 7, 5]])
    for read_from, hits, misses in [
        (EngramTable.of(PAYLOAD, SCALES), 3, 0),
        (stored_table, 0, 3),
        (TieredTable(stored_table, torch.tensor([7, 8])), 1, 2),
        (TieredTable(EngramTable.of(PAYLOAD, SCALES), torch.tensor([7, 8])), 3, 0),
    ]:
        for n in (1, 2):  # a second read counts anew
            read_from.read(rows)
            c = read_from.counts
            assert (c.asked, c.rows, c.hits, c.misses) == (6 * n, 3 * n, hits * n, misses * n)
            assert (c.memory_bytes, c.disk_bytes) == (66 * hits * n, 66 * misses * n)
        read_from.read(rows[:0])
        assert read_from.counts.asked == 12


def test_a_read_of_many_parts(stored_table, monkeypatch):
    monkeypatch.setattr(table, "PART", 3)
    rows = torch.arange(ROWS).flip(0)
    for found in (TABLE, stored_table, TieredTable(stored_table, torch.arange(0, ROWS, 2))):
        for n in (ROWS, ROWS - 1, ROWS - 2):  # the last part whole or not
            assert torch.equal(bits(found.read(rows[:n])), bits(EVERY[rows[:n]]))


def test_a_row_of_the_release_takes_264_bytes():
    table = EngramTable.of(*stored(50, 256))
    table.read(torch.arange(24))
    assert repr(table.counts.row_bytes) == "264"
    assert table.counts.memory_bytes == 6_336


def test_a_refused_read_counts_nothing():
    table = EngramTable.of(PAYLOAD, SCALES)
    with pytest.raises(ValueError, match="rows from"):
        table.read(torch.tensor([1, ROWS]))
    assert (table.counts.asked, table.counts.rows) == (0, 0)


class SlowCounts(Counts):
    """Lets other threads run between a count's reading and its writing."""

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        time.sleep(0.001)
        return value


def test_several_threads_count_every_read():
    table = EngramTable.of(PAYLOAD, SCALES)
    table.counts = SlowCounts(66)
    threads = [threading.Thread(target=lambda: [table.read(torch.arange(10)) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (table.counts.asked, table.counts.hits) == (200, 200)


# Tiers.
@drawn
@given(
    st.lists(st.integers(0, ROWS - 1), max_size=30),
    st.lists(st.integers(0, ROWS - 1), max_size=2 * ROWS),
    st.booleans(),
)
def test_tiers_change_no_value(path, rows, hot_rows, in_memory):
    behind = TABLE if in_memory else EngramTable.open(path, 1, ROWS, WIDTH)
    tiered = TieredTable(behind, torch.tensor(hot_rows, dtype=torch.int64))
    rows = torch.tensor(rows, dtype=torch.int64)
    assert torch.equal(bits(tiered.read(rows)), bits(EVERY[rows]))
    hits = len(set(rows.tolist()) & set(hot_rows))
    distinct = len(rows.unique())
    assert (tiered.counts.hits, tiered.counts.misses) == ((distinct, 0) if in_memory else (hits, distinct - hits))


@pytest.mark.parametrize("capacity", [0, 1, 7, ROWS, ROWS + 5])
def test_any_capacity_answers_right(stored_table, capacity):
    rows = torch.arange(ROWS).repeat(2)
    tiered = TieredTable(stored_table, most_frequent(rows, capacity))
    assert torch.equal(bits(tiered.read(rows)), bits(EVERY[rows]))
    assert tiered.counts.hits == min(capacity, ROWS)
    assert tiered.counts.misses == ROWS - tiered.counts.hits


def test_hot_rows_are_really_held(stored_table):
    """They answer although the table behind has lost them."""
    behind = EngramTable.of(PAYLOAD.clone(), SCALES.clone())
    tiered = TieredTable(behind, torch.tensor([3, 30]))
    behind.payload[:] = 0
    assert torch.equal(tiered.read(torch.tensor([30, 3])), EVERY[[30, 3]])
    assert not tiered.read(torch.tensor([4])).any()


def test_filling_a_tier_counts_nothing():
    behind = EngramTable.of(PAYLOAD, SCALES)
    tiered = TieredTable(behind, torch.arange(5))
    assert behind.counts.rows == tiered.counts.rows == 0


def test_the_most_frequent_rows():
    rows = torch.tensor([[9, 4, 4], [7, 9, 1]])
    assert most_frequent(rows, 2).tolist() == [4, 9]
    assert most_frequent(rows, 3).tolist() == [4, 9, 1]
    assert most_frequent(rows, 100).tolist() == [4, 9, 1, 7]
    assert most_frequent(rows, 0).tolist() == []
    many = torch.randint(0, 1_000, (5_000,), generator=torch.Generator().manual_seed(4))
    counts = torch.bincount(many, minlength=1_000).tolist()
    assert most_frequent(many, 1_000).tolist() == sorted(
        (r for r in range(1_000) if counts[r]), key=lambda r: (-counts[r], r)
    )
    with pytest.raises(ValueError, match="capacity = -1: expected at least 0 rows"):
        most_frequent(rows, -1)


# What is refused.
@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (torch.tensor([0, ROWS]), ValueError, "rows from 0 to 40: expected 0 to 39"),
        (torch.tensor([[5, -1]]), ValueError, "rows from -1 to 5: expected 0 to 39"),
        (torch.tensor([1], dtype=torch.int32), TypeError, r"rows are torch\.int32: expected torch\.int64"),
        (torch.tensor([1.0]), TypeError, r"rows are torch\.float32"),
        (torch.tensor([True]), TypeError, r"rows are torch\.bool"),
    ],
)
def test_bad_rows(rows, error, message):
    with pytest.raises(error, match=message):
        TABLE.read(rows)
    with pytest.raises(error, match=message):
        TieredTable(TABLE, rows)


@pytest.mark.parametrize(
    ("payload", "scales", "error", "message"),
    [
        (PAYLOAD.float(), SCALES, TypeError, r"payload is torch\.float32: expected torch\.float8_e4m3fn"),
        (PAYLOAD, SCALES.view(torch.uint8), TypeError, r"scales is torch\.uint8: expected torch\.float8_e8m0fnu"),
        (PAYLOAD[:, :48], SCALES, ValueError, r"payload of shape \[40, 48\]: expected \[rows, a multiple of 32\]"),
        (PAYLOAD[:0], SCALES[:0], ValueError, r"payload of shape \[0, 64\]"),
        (PAYLOAD[0], SCALES[0], ValueError, r"payload of shape \[64\]"),
        (PAYLOAD, SCALES[:39], ValueError, r"scales of shape \[39, 2\]: expected \[40, 2\], one for 32 channels"),
        (PAYLOAD, SCALES[:, :1], ValueError, r"scales of shape \[40, 1\]: expected \[40, 2\]"),
    ],
)
def test_bad_tensors(payload, scales, error, message):
    with pytest.raises(error, match=message):
        EngramTable.of(payload, scales)
