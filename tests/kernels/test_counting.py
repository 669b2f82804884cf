"""Counts are exact for every kind of access, and an access to anything else is refused before it is made."""

import pytest
import torch
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder

from kernels import counting
from kernels.counting import ACCESSES, Traffic, count_traffic
from kernels.launch import INTERPRETED, tl
from tests.kernels.toy_kernels import convert, copy_tile, histogram, matmul, rmsnorm, words

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


def copy(x, y, n=None):
    n = len(x) if n is None else n
    convert[(-(-n // 64),)](x, y, n, BLOCK=64, ROUNDING=None)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000])
def test_lanes_that_are_masked_off_do_not_count(n):
    x, y = torch.ones(n), torch.empty(n, dtype=torch.bfloat16)
    with count_traffic(x=x, y=y) as traffic:
        copy(x, y)
    assert traffic == {"x": Traffic(n, 0, 4 * n, 0), "y": Traffic(0, n, 0, 2 * n)}
    assert traffic.total == Traffic(n, n, 4 * n, 2 * n)


def test_what_the_block_allocates_counts_by_dtype():
    x = torch.ones(70)
    with count_traffic(x=x) as traffic:
        for y in (torch.empty(70), torch.empty_like(x), x.new_empty(70), torch.empty(70, dtype=torch.bfloat16)):
            copy(x, y)
    assert traffic == {
        "x": Traffic(280, 0, 1120, 0),
        "allocated float32": Traffic(0, 210, 0, 840),
        "allocated bfloat16": Traffic(0, 70, 0, 140),
    }


def test_what_was_allocated_before_is_still_refused():
    x, y = torch.ones(70), torch.empty(70)
    with pytest.raises(InterpreterError), count_traffic(x=x):
        copy(x, y)


def test_each_program_loads_the_weight_again():
    x, weight, y = torch.ones(5, 13), torch.ones(13, dtype=torch.float16), torch.empty(5, 13)
    with count_traffic(x=x, weight=weight, y=y) as traffic:
        rmsnorm[(5,)](x, weight, y, 13, 1e-6, BLOCK=16)
    assert traffic == {"x": Traffic(65, 0, 260, 0), "weight": Traffic(65, 0, 130, 0), "y": Traffic(0, 65, 0, 260)}


def test_blocks_of_two_dimensions_and_dot():
    m, n, k = 13, 11, 70
    a, b, c = torch.ones(m, k).bfloat16(), torch.ones(k, n).bfloat16(), torch.empty(m, n)
    with count_traffic(a=a, b=b, c=c) as traffic:
        matmul[(1,)](a, b, c, m, n, k, M=16, N=16, K=32, PRECISION="ieee", SUMS=tl.float32)
    assert (c == k).all()
    assert [traffic[name].loaded for name in "abc"] == [m * k, k * n, 0]
    assert traffic.total == Traffic(m * k + k * n, m * n, 2 * (m * k + k * n), 4 * m * n)


def test_block_pointers_with_bounds():
    x, y = torch.rand(5, 6), torch.empty(5, 6)
    with count_traffic(x=x, y=y) as traffic:
        copy_tile[(1,)](x, y, 5, 6, R=8, C=8)
    assert torch.equal(x, y)
    assert traffic.total == Traffic(30, 30, 120, 120)


def test_an_atomic_operation_loads_and_stores():
    values, counts = torch.tensor([0, 2, 2]), torch.zeros(3, dtype=torch.int32)
    lock = torch.zeros(1, dtype=torch.int32)
    with count_traffic(values=values, counts=counts, lock=lock) as traffic:
        histogram[(2,)](values, counts, lock, 3, BLOCK=4)
    assert counts.tolist() == [2, 0, 4]
    assert traffic == {"values": Traffic(6, 0, 48, 0), "counts": Traffic(6, 6, 24, 24), "lock": Traffic(2, 2, 8, 8)}


def test_launches_add_up_and_nest():
    x, y = torch.ones(3), torch.empty(3)
    with count_traffic(x=x, y=y) as outer:
        copy(x, y)
        with count_traffic(x=x, y=y) as inner:
            copy(x, y, 2)
        copy(x, y, 1)
    copy(x, y)
    assert (outer["x"].loaded, inner["x"].loaded) == (6, 2)


def test_bools_are_bytes():
    x, y = torch.tensor([True, False, True]), torch.empty(3, dtype=torch.bool)
    with count_traffic(x=x, y=y) as traffic:
        copy(x, y)
    assert traffic.total == Traffic(3, 3, 3, 3)
    assert y.tolist() == [True, False, True]


def test_an_element_is_as_wide_as_its_pointer():
    x, y = torch.arange(16, dtype=torch.uint8), torch.empty(3, dtype=torch.int32)
    with count_traffic(x=x[:11], y=y) as traffic:
        words[(1,)](x, y, 2, BLOCK=4)
    assert traffic["x"] == Traffic(2, 0, 8, 0)
    with pytest.raises(InterpreterError, match="loads 4 bytes at byte 8 of 'x'"), count_traffic(x=x[:11], y=y):
        words[(1,)](x, y, 3, BLOCK=4)  # the last word has a byte too many
    with pytest.raises(InterpreterError, match="loads 4 bytes at byte 4 of 'x'"):  # noqa: SIM117
        with count_traffic(x=x.view(2, 8)[:, :7], y=y):
            words[(1,)](x, y, 2, BLOCK=4)


def test_what_names_share_counts_for_the_first():
    x, y = torch.ones(8), torch.empty(8)
    with count_traffic(head=x[:3], x=x, y=y) as traffic:
        copy(x, y)
    assert [traffic[name].loaded for name in traffic] == [3, 5, 0]


@pytest.mark.parametrize("counted", [slice(0, 5), slice(3, 8)])
def test_a_store_outside_is_refused_before_it_is_made(counted):
    x, buffer = torch.ones(8), torch.full((8,), 7.0)
    offset = -12 if counted.start else 20
    message = rf"program \(0, 0, 0\) stores 4 bytes at byte {offset} of 'y', which has no element there; counted: "
    with pytest.raises(InterpreterError, match=message + r"\['x', 'y'\]"), count_traffic(x=x, y=buffer[counted]):
        copy(x, buffer)
    assert (buffer == 7).all()


def test_a_load_outside_names_the_program_and_the_nearest_tensor():
    buffer = torch.zeros(2000)
    parts = {"low": buffer[:600], "high": buffer[900:1000], "y": buffer[1000:]}
    with pytest.raises(InterpreterError, match=r"program \(9, 0, 0\) loads 4 bytes at byte 2400 of 'low'"):  # noqa: SIM117
        with count_traffic(**parts):
            copy(buffer, parts["y"], 620)
    with pytest.raises(InterpreterError, match="at byte -400 of 'high'"), count_traffic(**parts):
        copy(buffer[800:], parts["y"], 100)


def test_a_gap_in_a_view_is_outside():
    whole = torch.ones(4, 6)
    view, y = whole[:, :5], torch.empty(24)
    with count_traffic(view=view, y=y) as traffic:
        copy(whole[1], y, 5)
    assert traffic["view"].loaded == 5
    with pytest.raises(InterpreterError, match="at byte 20 of 'view', which has no element there"):  # noqa: SIM117
        with count_traffic(view=view, y=y):
            copy(whole, y, 6)


def test_an_expanded_view_is_one_row():
    row, y = torch.ones(6), torch.empty(6)
    with count_traffic(x=row.expand(4, 6), y=y) as traffic:
        copy(row, y)
    assert traffic["x"].loaded == 6


def test_an_empty_tensor_has_no_element():
    x = torch.ones(1)
    for shape in [(0,), (0, 0), (3, 0), (0, 3)]:
        with pytest.raises(InterpreterError, match="has no element there"), count_traffic(x=x.new_empty(shape)):
            copy(x, x)


def test_nothing_stays_behind():
    methods = [getattr(InterpreterBuilder, name) for name in ACCESSES]
    x, y = torch.ones(8), torch.empty(8)
    with pytest.raises(InterpreterError), count_traffic(x=x):
        copy(x, y)
    assert [getattr(InterpreterBuilder, name) for name in ACCESSES] == methods


def test_what_cannot_be_counted_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="needs tensors, all on the CPU"), count_traffic():
        pass
    with (
        pytest.raises(ValueError, match="all on the CPU"),
        count_traffic(x=torch.ones(3), y=torch.ones(3).to("meta")),
    ):
        pass
    monkeypatch.setattr(counting, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="but here they are compiled"), count_traffic(x=torch.empty(3)):
        pass
