"""Counting what would be launched on a GPU: eager operations and Triton kernels, the same way.

An operation that torch dispatches counts as one launch unless it launches nothing: a view, an allocation, a number
read back to the host. A composite operation counts by its parts, as it runs. A Triton kernel counts as one, whatever
its grid. Operations that a library fuses or splits on a GPU may differ by a few from this count.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from kernels.launch import INTERPRETED

ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")
TO_HOST = ("aten::_local_scalar_dense",)


def launches(operation) -> bool:
    """Whether an operation of torch (an OpOverload) runs a kernel."""
    returned = [value.alias_info for value in operation._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    return not is_view and operation._schema.name not in ALLOCATIONS + TO_HOST


class _Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if launches(operation):
            self.counts[operation._schema.name.removeprefix("aten::")] += 1
        return operation(*args, **(kwargs or {}))


@contextmanager
def count_launches() -> Iterator[Counter]:
    """Count the launches in the block by operation or kernel name; `.total()` is their number.

    Raises RuntimeError where kernels are compiled: there a profiler counts what really runs.
    """
    if not INTERPRETED:
        raise RuntimeError("launches are counted while kernels are interpreted, but here they are compiled")
    mode, run = _Dispatched(), GridExecutor.__call__

    def launch(executor: GridExecutor, *args, **kwargs) -> None:
        before = Counter(mode.counts)
        run(executor, *args, **kwargs)
        mode.counts.clear()  # what the interpreter itself asks of torch
        mode.counts.update(before + Counter([executor.fn.__name__]))

    with mock.patch.object(GridExecutor, "__call__", launch), mode:
        yield mode.counts
