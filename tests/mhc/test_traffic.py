"""The formulas in units of d, and what they say of the model."""

import pytest

from dsv41_edu.config import preset
from dsv41_edu.mhc import traffic


@pytest.mark.parametrize("n", range(1, 9))
def test_in_units_of_d(n):
    for d in (1, 64, 5120):
        assert traffic.floor(n, d) == (2 * n + 2) * d
        assert traffic.two_pass(n, d) == (3 * n + 2) * d
        assert traffic.separate(n, d) == (4 * n + 4) * d


def test_seams_of_each_preset():
    assert traffic.seams(preset("v41_flash")) == 80
    assert traffic.seams(preset("mini")) == 2 * preset("mini").num_hidden_layers
