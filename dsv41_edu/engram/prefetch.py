"""Rows fetched while the layers before them compute: the ids are known before the forward pass, so the rows are too.

    request(rows)      at once; one thread reads, in the order of the requests
    ... the first layer ...
    wait()             the values, or the error that the read met

A read spends its time in the disk and in copies, both outside Python's lock. Source: the Engram paper.
"""

from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from dsv41_edu.engram.table import EngramTable


class Request:
    """Rows on their way."""

    def __init__(self, future: Future):
        self.future = future

    def wait(self) -> Tensor:
        """The values, as `EngramTable.read` returns them, or what it raised, with the traceback of the read."""
        return self.future.result()


class Prefetcher:
    """Reads rows of a table in a thread of its own, which ends by `close`, by leaving `with`, or without its owner.

    Requests made before are answered in each case.
    """

    def __init__(self, table: EngramTable):
        self.table, self.closed = table, False
        # the pool's thread ends when nobody holds the pool: only this object does
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engram-prefetch")

    def request(self, rows: Tensor) -> Request:
        """Start to read row ids, int64 [...], which may be overwritten at once. Raises RuntimeError after `close`."""
        if self.closed:
            raise RuntimeError(f"rows of shape {list(rows.shape)} requested: expected no request after close")
        return Request(self.pool.submit(self.table.read, rows.clone()))

    def close(self) -> None:
        """Answer what was requested, then end the thread. May be called again."""
        self.closed = True
        self.pool.shutdown()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
