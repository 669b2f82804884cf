"""Rotary positions against public vectors, printed frequencies, and plain complex numbers."""

import cmath
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv41_edu.attention.rope import frequencies, layer_frequencies, rotate, turns
from dsv41_edu.config import RopeScaling, preset

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "rotary.json").read_text())["cases"]
V = load_file(VECTORS / "rotary.safetensors")
V41 = preset("v41_flash")


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def case_frequencies(case):
    if not case["original_length"]:
        return frequencies(case["width"], case["base"])
    scaling = RopeScaling(case["factor"], case["beta_fast"], case["beta_slow"], case["original_length"])
    return frequencies(case["width"], case["base"], scaling)


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c["case"]))
def test_public_vectors(case):
    n = f"case{case['case']}."
    freqs, positions = case_frequencies(case), V[n + "positions"].long()
    assert freqs.dtype == torch.float64
    assert (freqs / V[n + "freqs"] - 1).abs().max() < 1e-13
    rotated = rotate(V[n + "x"].double(), turns(positions, freqs, torch.float64).unsqueeze(1))
    assert (rotated - V[n + "rotated"]).abs().max() < 1e-9
    single = rotate(V[n + "x"], turns(positions, freqs, torch.float32).unsqueeze(1))
    assert single.dtype == torch.float32
    assert (single - V[n + "rotated"]).abs().max() < 5e-6, "angles formed in float64, also at position 1,048,575"


def test_the_fact_sheets_frequencies():
    f = layer_frequencies(V41, 1)
    printed = {0: 1, 1: 0.687656022, 15: 0.00363553858, 16: 0.002265625, 20: 0.000296977778}
    printed |= {24: 1.953125e-05, 25: 5.37231267e-06, 31: 5.68052904e-07}
    assert [f[j].item() for j in printed] == pytest.approx(list(printed.values()), rel=1e-8)


def test_base_and_scaling_go_by_the_layers_ratio():
    window, first, second = (layer_frequencies(V41, ratio) for ratio in (0, 1, 2))
    assert torch.equal(first, second)
    assert torch.equal(window, frequencies(64, 10000))
    assert window[31].item() == pytest.approx(10000 ** (-62 / 64))
    assert first[31].item() == pytest.approx(160000 ** (-62 / 64) / 16)


def test_a_ramp_without_width_is_a_step():
    """Where both betas round to one pair, the pairs below keep their frequency and the others are divided."""
    scaling = RopeScaling(factor=8.0, beta_fast=1.0, beta_slow=1.0, original_max_position_embeddings=1024)
    low = 16 * math.log(1024 / (2 * math.pi)) / (2 * math.log(10000))
    assert low == pytest.approx(4.42, abs=0.01)
    ratio = frequencies(16, 10000.0, scaling) / frequencies(16, 10000.0)
    assert ratio.tolist() == pytest.approx([1] * 5 + [1 / 8] * 3)
    whole = RopeScaling(factor=8.0, beta_fast=1e9, beta_slow=1e9, original_max_position_embeddings=1024)
    ratio = frequencies(16, 10000.0, whole) / frequencies(16, 10000.0)
    assert ratio.tolist() == pytest.approx([1] + [1 / 8] * 7), "bounds below the first pair are cut to it"
    long = RopeScaling(factor=8.0, beta_fast=1.0, beta_slow=1e-9, original_max_position_embeddings=1024)
    ratio = frequencies(16, 10000.0, long) / frequencies(16, 10000.0)
    ramp = [max(0, j - 4) / (15 - 4) for j in range(8)]
    assert ratio.tolist() == pytest.approx([1 - r * 7 / 8 for r in ramp]), "and those above to the last channel"


def test_neighbours_turn_as_complex_numbers():
    x, freqs, positions = drawn(3, 10), frequencies(6, 100.0), torch.tensor([0, 3, 7])
    y = rotate(x, turns(positions, freqs, torch.float64))
    assert torch.equal(y[:, :4], x[:, :4]), "the first channels stay"
    for row, t in enumerate(positions.tolist()):
        for j in range(3):
            a, b = x[row, 4 + 2 * j : 6 + 2 * j].tolist()
            turned = complex(a, b) * cmath.exp(1j * t * 100.0 ** (-2 * j / 6))
            assert y[row, 4 + 2 * j : 6 + 2 * j].tolist() == pytest.approx([turned.real, turned.imag])


def test_products_know_distances_alone_and_the_conjugate_turns_back():
    t, freqs = torch.arange(0, 50, 7), frequencies(16, 10000.0)
    q, k = drawn(1, 16).expand(len(t), -1), drawn(1, 16, seed=1).expand(len(t), -1)
    late, turn, five = (turns(at, freqs, torch.float64) for at in (t + 5, t, t * 0 + 5))
    products = (rotate(q, late) * rotate(k, turn)).sum(-1)
    torch.testing.assert_close(products, (rotate(q, five) * k).sum(-1))
    assert (products - (q * k).sum(-1)).abs().min() > 0.1
    torch.testing.assert_close(rotate(rotate(q, turn), turn.conj()), q)


def test_dtypes():
    positions, freqs = torch.tensor([1_048_575]), layer_frequencies(V41, 1)
    assert turns(positions, freqs, torch.float64).dtype == torch.complex128
    for dtype, error in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        turn, x = turns(positions, freqs, dtype), drawn(1, 64, dtype=dtype)
        exact = rotate(x.double(), turns(positions, freqs, torch.float64))
        assert (turn.dtype, rotate(x, turn).dtype) == (torch.complex64, dtype)
        assert ((rotate(x, turn) - exact).abs() <= error * (1 + exact.abs())).all()
