"""Views, allocations and reads by the host launch nothing; everything else counts once, kernels too."""

from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from kernels import launches
from kernels.launch import INTERPRETED
from kernels.launches import count_launches
from tests.kernels.toy_kernels import convert

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


def test_operations_count_once_each():
    x, w = torch.ones(4, 8), torch.ones(3, 8)
    with count_launches() as counts:
        y = F.linear(x, w)  # a view of w, then one product
        y = (y + 1).sum(-1)
        y.mul_(2)
    assert counts == {"mm": 1, "add": 1, "sum": 1, "mul_": 1}
    assert counts.total() == 4


def test_views_allocations_and_reads_do_not_count():
    x = torch.ones(4, 8)
    with count_launches() as counts:
        x.t().view(8, 4)[1:].unsqueeze(0).expand(2, -1, -1).detach()
        torch.empty(3), x.new_empty(2), torch.empty_like(x), torch.empty_strided((2,), (1,))
        x[0, 0].item()
    assert not counts


def test_a_kernel_is_one_launch_whatever_its_grid():
    x, y = torch.ones(100), torch.empty(100)
    with count_launches() as counts:
        convert[(7,)](x, y, 100, BLOCK=16, ROUNDING=None)
        x + y
        convert[(1,)](x, y, 16, BLOCK=16, ROUNDING=None)
    assert counts == {"convert": 2, "add": 1}


def test_outside_the_block_nothing_counts():
    with count_launches() as counts:
        pass
    torch.ones(2) + 1
    convert[(1,)](torch.ones(2), torch.empty(2), 2, BLOCK=16, ROUNDING=None)
    assert counts.total() == 0


def test_refused_where_kernels_are_compiled():
    refused = pytest.raises(RuntimeError, match="compiled")
    with mock.patch.object(launches, "INTERPRETED", False), refused, count_launches():
        pass
