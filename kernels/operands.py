"""What a kernel's wrapper says of operands that it doesn't take."""

from collections.abc import Collection

import torch
from torch import Tensor

Expected = dict[str, tuple[Tensor | None, tuple[int | str, ...], tuple[torch.dtype, ...]]]


def check_operands(expected: Expected, adjacent: Collection[str], what: str = "channels") -> None:
    """Hold tensors by name against their shapes ("*": any size) and dtypes; None passes.

    adjacent: the names whose last dimension, of `what`, must lie without gaps. All must be where the first one is.
    Raises TypeError for dtypes, ValueError for shapes, strides, devices.
    """
    first, (lead, *_) = next(iter(expected.items()))
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} is {tensor.dtype}: expected {' or '.join(map(str, dtypes))}")
        if tensor.dim() != len(shape) or any(s not in ("*", n) for s, n in zip(shape, tensor.shape, strict=True)):
            raise ValueError(f"{name} of shape {list(tensor.shape)}: expected [{', '.join(map(str, shape))}]")
        if name in adjacent and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: expected its {what} adjacent")
        if tensor.device != lead.device:
            verb = "are" if first.endswith("s") else "is"
            raise ValueError(f"{name} is on {tensor.device}: expected {lead.device}, where {first} {verb}")
