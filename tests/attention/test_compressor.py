"""The compressor against public vectors, number by number, and cut anywhere inside a group."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_models import drawn

from dsv41_edu.attention.compressor import Compressor, compress

V = load_file(Path(__file__).parents[1] / "vectors" / "attention.safetensors")


def random_compressor(ratio, d=6, D=4, norm_eps=1e-20):
    made = Compressor(d, D, ratio, norm_eps).double().requires_grad_(False)
    for i, p in enumerate(made.parameters()):
        p.copy_(drawn(*p.shape, seed=i))
    return made


def public_compressor(ratio, dtype):
    """With the weights of the vectors, and their input."""
    start = f"compressor0_ratio{ratio}."
    made = Compressor(24, 32, ratio, 1e-20).to(dtype)
    names = dict(made.named_parameters())
    made.load_state_dict({name: V[start + name].to(dtype) for name in names})
    return made.requires_grad_(False), V[start + "x"].to(dtype), V[start + "latents"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("ratio", [1, 2])
def test_public_vectors(ratio, dtype, tolerance):
    compressor, x, expected = public_compressor(ratio, dtype)
    latents = compressor(compressor.project(x))
    assert latents.shape == expected.shape, "the group that is open at the end gives none"
    assert (latents - expected).abs().max() < tolerance


@pytest.mark.parametrize("ratio", [2, 3])
def test_number_by_number(ratio):
    compressor, x = random_compressor(ratio, norm_eps=0.1), drawn(1, 7, 6, seed=9)
    latents = compressor(compressor.project(x))[0]
    assert latents.shape == (7 // ratio, 4)
    for j in range(7 // ratio):
        mixed = []
        for c in range(4):
            group = x[0, j * ratio : (j + 1) * ratio]
            weights = [math.exp(compressor.wgate.weight[c] @ token) for token in group]
            values = [float(compressor.wkv.weight[c] @ token) for token in group]
            mixed.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
        size = math.sqrt(sum(m * m for m in mixed) / 4 + 0.1)
        expected = [m / size * w for m, w in zip(mixed, compressor.norm.weight.tolist(), strict=True)]
        assert latents[j].tolist() == pytest.approx(expected)


def test_one_token_a_group_has_no_weights():
    compressor = random_compressor(1)
    assert not hasattr(compressor, "wgate")
    u = drawn(2, 3, 1, 4)
    assert torch.equal(compress(u), u[..., 0, :])


def test_every_channel_has_weights_of_its_own():
    """A large score takes its channel from one token, and leaves the others mixed in halves."""
    u = torch.tensor([[[1.0, 1.0], [3.0, 3.0]]])
    s = torch.tensor([[[50.0, 0.0], [0.0, 0.0]]])
    assert compress(u, s).tolist() == [[1.0, 2.0]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 7), min_size=2, max_size=2), st.integers(1, 8))
def test_a_chunk_goes_on_where_the_open_group_stopped(ratio, before, S):
    """Rows whose group has another number of tokens, each as if it had been given whole."""
    compressor = random_compressor(ratio)
    x = drawn(2, max(before) + S, 6, seed=S)
    phase = torch.tensor(before) % ratio
    waiting = torch.full((2, ratio - 1, 1 if ratio == 1 else 2, 4), float("nan"), dtype=torch.float64)
    chunk = torch.stack([x[row, n : n + S] for row, n in enumerate(before)])
    for row, n in enumerate(before):
        left = compressor.project(x[row : row + 1, n - phase[row] : n])[0]
        waiting[row, : len(left)] = left
    latents = compressor(compressor.project(chunk), waiting, phase)
    for row, n in enumerate(before):
        whole = compressor(compressor.project(x[row : row + 1, : n + S]))[0, n // ratio :]
        assert latents.shape[1] >= len(whole)
        torch.testing.assert_close(latents[row, : len(whole)], whole)


def test_groups_are_weighed_in_fp32():
    compressor, x, expected = public_compressor(2, torch.bfloat16)
    projected = compressor.project(x)
    assert projected.dtype == torch.float32
    assert (projected[..., 0, :] - x.double() @ compressor.wkv.weight.double().T).abs().max() < 1e-5
    assert (projected[..., 1, :] - x.double() @ compressor.wgate.weight.double().T).abs().max() < 1e-5
    latents = compressor(projected)
    assert latents.dtype == torch.bfloat16
    assert (latents - expected).abs().max() < 0.06
