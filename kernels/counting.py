"""Counting what a kernel loads and stores, element by element, while the interpreter runs it.

Every access of the interpreter goes through four methods of its `InterpreterBuilder`, which see each address.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels.launch import INTERPRETED


@dataclass
class Traffic:
    """What kernels read and wrote: elements as wide as the pointer says, and bytes. An atomic does both."""

    loaded: int = 0
    stored: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0


class TrafficByName(dict[str, Traffic]):
    """The traffic of each named tensor."""

    @property
    def total(self) -> Traffic:
        return Traffic(*map(sum, zip(*(astuple(traffic) for traffic in self.values()), strict=True)))


# Each access to memory: where its pointers and its mask stand among the arguments, whether it loads and stores.
ACCESSES = {
    "create_masked_load": (0, 1, True, False),
    "create_masked_store": (0, 2, False, True),
    "create_atomic_rmw": (1, 3, True, True),
    "create_atomic_cas": (0, None, True, True),
}


class _Allocations(TorchDispatchMode):
    """Keeps the uninitialised tensors that the block makes, such as a kernel's outputs."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        allocates = operation._schema.name in ("aten::empty", "aten::empty_like", "aten::new_empty")
        if allocates and result.numel():  # the interpreter makes empty ones that it then points at arguments
            self.tensors.append(result)
        return result


def element_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Tell for each byte between a tensor's first and last whether it's in an element; a view may have gaps."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = np.zeros(max(last + 1, 0), dtype=bool)
    np.lib.stride_tricks.as_strided(elements, tensor.shape, tensor.stride())[...] = True
    return elements.repeat(tensor.element_size())


@contextmanager
def count_traffic(**tensors: torch.Tensor) -> Iterator[TrafficByName]:
    """Count what interpreted kernels load from and store to each of these tensors, which are on the CPU.

        with count_traffic(x=x, y=y) as traffic:
            kernel[grid](x, y, n)
        assert traffic["x"].loaded == n and traffic["y"].stored == n and traffic.total.loaded_bytes == 4 * n

    Each lane counts each time, unless it is masked off. What two of the tensors share counts for the first. What
    the block itself allocates uninitialised, as a kernel's outputs are, counts by dtype, as "allocated float32".
    Raises RuntimeError where kernels are compiled, and ValueError without tensors and for one on another device.
    An access to anything but an element of all these raises IndexError before it is made; it reaches the
    caller of the kernel as Triton's InterpreterError.
    """
    if not INTERPRETED:
        raise RuntimeError("traffic is counted while kernels are interpreted, but here they are compiled")
    if not tensors or any(tensor.device.type != "cpu" for tensor in tensors.values()):
        raise ValueError("count_traffic needs tensors, all on the CPU: of others the interpreter makes copies")
    traffic = TrafficByName((name, Traffic()) for name in tensors)
    regions = [(name, tensor.data_ptr(), element_bytes(tensor)) for name, tensor in tensors.items()]
    made = _Allocations()

    def count(builder: InterpreterBuilder, pointers: TensorHandle, mask: object, loads: bool, stores: bool) -> None:
        unmasked = True if mask is None else np.asarray(mask.data).astype(bool)  # a handle's data, or an array's
        addresses = pointers.data[np.broadcast_to(unmasked, pointers.data.shape)].astype(np.int64)
        width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        for tensor in made.tensors:
            name = f"allocated {str(tensor.dtype).removeprefix('torch.')}"
            traffic.setdefault(name, Traffic())
            regions.append((name, tensor.data_ptr(), element_bytes(tensor)))
        made.tensors.clear()
        for name, start, is_element in regions:
            first = addresses - start
            inside = (first >= 0) & (first + width <= len(is_element))
            inside[inside] = is_element[first[inside]] & is_element[first[inside] + width - 1]
            lanes = int(inside.sum())
            traffic[name].loaded += lanes * loads
            traffic[name].stored += lanes * stores
            traffic[name].loaded_bytes += lanes * loads * width
            traffic[name].stored_bytes += lanes * stores * width
            addresses = addresses[~inside]
        if addresses.size:
            stray = int(addresses[0])
            nearest, start, _ = min(regions, key=lambda r: max(r[1] - stray, stray - r[1] - len(r[2])))
            raise IndexError(
                f"program {builder.grid_idx} {'stores' if stores else 'loads'} {width} bytes at byte "
                f"{stray - start} of {nearest!r}, which has no element there; counted: {[*traffic]}"
            )

    def counted(name: str) -> Callable:
        pointers, mask, loads, stores = ACCESSES[name]
        original = getattr(InterpreterBuilder, name)

        def access(self: InterpreterBuilder, *operands: object, **options: object) -> object:
            count(self, operands[pointers], None if mask is None else operands[mask], loads, stores)
            return original(self, *operands, **options)

        return access

    with made, mock.patch.multiple(InterpreterBuilder, **{name: counted(name) for name in ACCESSES}):
        yield traffic
