"""The figures of the accounting chapter draw the plan's numbers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_edu.accounting import active
from dsv41_edu.config import preset
from dsv41_edu.figures import accounting as draw
from dsv41_edu.figures.model_map import layer_role, model_map

MINI = preset("mini")


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.floats(0.1, 10), st.floats(0.1, 10))
def test_squarify_fills_the_rectangle_with_the_right_areas(sizes, w, h):
    sizes = sorted(sizes, reverse=True)
    boxes = draw.squarify(sizes, 1, 2, w, h)
    for size, (x, y, bw, bh) in zip(sizes, boxes, strict=True):
        assert bw * bh == pytest.approx(size / sum(sizes) * w * h)
        assert x >= 1 - 1e-9
        assert y >= 2 - 1e-9
        assert x + bw <= 1 + w + 1e-6
        assert y + bh <= 2 + h + 1e-6
    for i, (x, y, bw, bh) in enumerate(boxes):
        for X, Y, W, H in boxes[i + 1 :]:
            apart = x + bw <= X + 1e-6 or x + 1e-6 >= X + W or y + bh <= Y + 1e-6 or y + 1e-6 >= Y + H
            assert apart


def test_squarify_of_the_paper():
    """Bruls, Huizing, van Wijk: 6, 6, 4, 3, 2, 2, 1 in a 6 x 4 rectangle."""
    boxes = draw.squarify([6, 6, 4, 3, 2, 2, 1], 0, 0, 6, 4)
    assert boxes[0] == pytest.approx((0, 0, 3, 2))
    assert boxes[1] == pytest.approx((0, 2, 3, 2))
    assert boxes[2] == pytest.approx((3, 0, 12 / 7, 7 / 3))
    assert boxes[3] == pytest.approx((3 + 12 / 7, 0, 9 / 7, 7 / 3))


def test_data_of_the_figures():
    assert sum(draw.treemap(MINI).data.values()) == 10_012_420
    flow = draw.flow(MINI).data
    assert sum(flow["decode"].values()) == active(MINI)
    assert sum(flow["prefill"].values()) == active(MINI, "prefill")
    by_context = draw.flops_by_context(MINI).data
    assert by_context["contexts"][-1] == MINI.max_position_embeddings
    assert draw.generations({"V3": preset("v3")}).data["V3"][0] == 671_026_419_200
    assert draw.readings({"a": 2.0, "b": 3.0}, 3.0).data == {"stated": 3.0, "a": 2.0, "b": 3.0}


def test_numbers_in_words():
    assert [draw.billions(n) for n in (543.6e9, 661_913_600, 78_673_920)] == ["544 B", "0.662 B", "78.7 M"]


def test_layer_roles_of_the_released_model():
    c = preset("v41_flash")
    roles = [layer_role(c, layer) for layer in range(40)]
    assert {r: roles.count(r) for r in set(roles)} == {"window": 2, "source": 4, "index": 4, "reuse": 30}
    assert [i for i, r in enumerate(roles) if r == "index"] == [24, 28, 32, 36]
    assert model_map(c).data["rows"] == 24
    assert model_map(MINI).data["streams"] == 4
