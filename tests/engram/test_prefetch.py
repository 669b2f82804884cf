"""Prefetched rows are the rows of a direct read; errors come back to who waits; no thread is left behind."""

import gc
import threading
import traceback

import pytest
import torch
from safetensors.torch import save_file

from dsv41_edu.engram.prefetch import Prefetcher
from dsv41_edu.engram.table import EngramTable, TieredTable
from dsv41_edu.quantization import fp8_rows_encode

ROWS = 100
STORED = fp8_rows_encode(torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0)))
TABLE = EngramTable.of(*STORED)
LONG = 60  # seconds after which a thread that should have moved is taken for stuck


class Gated:
    """A table that answers when told to, and remembers who read what."""

    def __init__(self):
        self.gate, self.begun, self.seen = threading.Event(), threading.Event(), []

    def read(self, rows):
        self.begun.set()
        assert self.gate.wait(LONG), "nobody opened the gate"
        self.seen.append((threading.current_thread().name, rows.tolist()))
        return TABLE.read(rows)


def rows_of(*shape, seed=1):
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))


def workers():
    return [t for t in threading.enumerate() if t.name.startswith("engram-prefetch")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not workers()
    yield
    assert not workers()


@pytest.mark.parametrize("form", ["memory", "mapped", "tiered"])
def test_as_a_direct_read(form, tmp_path):
    table, path = TABLE, tmp_path / "model.safetensors"
    if form != "memory":
        save_file({"layers.1.engram.embed.weight": STORED[0], "layers.1.engram.embed.scale": STORED[1]}, path)
        table = EngramTable.open(path, 1, ROWS, 64)
    if form == "tiered":
        table = TieredTable(table, torch.arange(30))
    with Prefetcher(table) as prefetcher:
        for shape in [(3, 5, 24), (1,), (), (0, 24)]:
            rows = rows_of(*shape)
            found = prefetcher.request(rows).wait()
            assert found.shape == (*shape, 64)
            assert torch.equal(found.view(torch.int16), TABLE.read(rows).view(torch.int16))


def test_a_request_returns_before_its_rows_are_read():
    table = Gated()
    with Prefetcher(table) as prefetcher:
        request = prefetcher.request(torch.tensor([4]))
        assert table.begun.wait(LONG)
        assert table.seen == []  # the read has begun elsewhere, and here the first layer can compute
        table.gate.set()
        assert torch.equal(request.wait(), TABLE.read(torch.tensor([4])))
    name, rows = table.seen[0]
    assert name.startswith("engram-prefetch")
    assert rows == [4]


def test_several_requests_are_answered_in_order():
    table = Gated()
    with Prefetcher(table) as prefetcher:
        requests = [prefetcher.request(torch.tensor([i])) for i in range(8)]
        table.gate.set()
        for i in (7, 0, 3, 3):  # waited for in any order, and twice
            assert torch.equal(requests[i].wait(), TABLE.read(torch.tensor([i])))
    assert [rows for _, rows in table.seen] == [[i] for i in range(8)]
    assert len({name for name, _ in table.seen}) == 1


def test_the_ids_may_be_overwritten_after_the_request():
    table, rows = Gated(), torch.tensor([1, 2])
    with Prefetcher(table) as prefetcher:
        request = prefetcher.request(rows)
        rows.fill_(50)
        table.gate.set()
        assert torch.equal(request.wait(), TABLE.read(torch.tensor([1, 2])))


def test_an_error_surfaces_where_it_is_waited_for():
    with Prefetcher(TABLE) as prefetcher:
        bad, good = prefetcher.request(torch.tensor([ROWS])), prefetcher.request(torch.tensor([0]))
        assert torch.equal(good.wait(), TABLE.read(torch.tensor([0])))  # it stops nothing that follows
        with pytest.raises(ValueError, match="rows from 100 to 100: expected 0 to 99") as caught:
            bad.wait()
    functions = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert functions[0] == "test_an_error_surfaces_where_it_is_waited_for"
    assert functions[-2:] == ["read", "check"]  # the background's own frames


def test_after_close_a_request_is_refused():
    prefetcher = Prefetcher(TABLE)
    request = prefetcher.request(torch.tensor([3]))
    prefetcher.close()
    prefetcher.close()
    assert torch.equal(request.wait(), TABLE.read(torch.tensor([3])))
    with pytest.raises(RuntimeError, match=r"rows of shape \[2, 24\] requested: expected no request after close"):
        prefetcher.request(rows_of(2, 24))


def test_closing_answers_what_was_requested_and_ends_the_thread():
    table = Gated()
    with Prefetcher(table) as prefetcher:
        requests = [prefetcher.request(torch.tensor([i])) for i in range(3)]
        assert len(workers()) == 1
        threading.Timer(0.05, table.gate.set).start()  # opened while `close` waits
    assert not workers()
    assert [rows for _, rows in table.seen] == [[0], [1], [2]]
    assert all(torch.equal(r.wait(), TABLE.read(torch.tensor([i]))) for i, r in enumerate(requests))


def test_an_error_in_the_with_block_is_kept_and_the_thread_ends():
    def first_layer():
        with prefetcher:
            prefetcher.request(torch.tensor([3]))
            raise KeyError("layer")

    prefetcher = Prefetcher(TABLE)
    with pytest.raises(KeyError, match="layer"):
        first_layer()
    assert not workers()


def test_without_its_owner_the_thread_answers_and_ends():
    table = Gated()
    prefetcher = Prefetcher(table)
    requests = [prefetcher.request(torch.tensor([i])) for i in range(3)]
    (worker,) = workers()
    del prefetcher
    gc.collect()
    table.gate.set()
    assert all(torch.equal(r.wait(), TABLE.read(torch.tensor([i]))) for i, r in enumerate(requests))
    worker.join(LONG)
    assert not worker.is_alive()


def test_no_request_no_thread():
    prefetcher = Prefetcher(TABLE)
    assert not workers()
    prefetcher.close()
