"""The image tower against public vectors, plain loops, and what a picture's span looks like in the text."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_models import SEEING, VECTORS, drawn, drawn_ids, drawn_model

from dsv41_edu.attention.rope import frequencies
from dsv41_edu.config import VisionConfig, preset
from dsv41_edu.vision import Aligner, Vision, merged, span, span_length, turn_halves

CASE = json.loads((VECTORS / "vision.json").read_text())["config"]
V = load_file(VECTORS / "vision.safetensors")
ROWS, COLUMNS = CASE["grid_rows"], CASE["grid_columns"]
SMALL = VisionConfig(
    num_hidden_layers=CASE["layers"],
    hidden_size=CASE["hidden"],
    num_attention_heads=CASE["heads"],
    intermediate_size=CASE["intermediate"],
    patch_size=CASE["patch"],
    rope_theta=CASE["rope_theta"],
    downsample_ratio=CASE["downsample"],
    max_image_tokens=64,
    min_pixels=1,
)


def public_tower(dtype):
    """Encoder and aligner with the vectors' weights, and the patches."""
    towers = Vision(SMALL), Aligner(SMALL, CASE["out"])
    for tower, start in zip(towers, ("vision.", "aligner."), strict=True):
        tower.load_state_dict({n.removeprefix(start): w for n, w in V.items() if n.startswith(start)})
        tower.to(dtype).requires_grad_(False)
    return *towers, V["patches"].to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_public_vectors(dtype, tolerance):
    vision, aligner, patches = public_tower(dtype)
    found = {}
    for module, name in zip((vision.patch_embed, *vision.blocks), ("patch_embed", "block0", "block1"), strict=True):
        module.register_forward_hook(lambda _, __, out, name=name: found.update({f"{name}_out": out}))
    found["vit_out"] = vision(patches, ROWS, COLUMNS)
    found["unfolded"] = aligner.merge(found["vit_out"], ROWS, COLUMNS)
    found["aligned"] = aligner(found["vit_out"], ROWS, COLUMNS)
    for name, ours in found.items():
        assert ours.shape == V[name].shape
        assert (ours - V[name]).abs().max() < tolerance, name


def test_every_patch_sees_every_other_and_knows_its_place():
    vision, _, patches = public_tower(torch.float64)
    out, moved = vision(patches, ROWS, COLUMNS), patches.clone()
    moved[17] += 0.1
    assert ((vision(moved, ROWS, COLUMNS) - out).abs().amax(-1) > 0).all()
    other_grid = vision(patches, COLUMNS, ROWS)
    assert ((other_grid - out).abs().amax(-1) > 1e-6).all(), "the same patches in 7 rows of 5"


def test_attention_depends_on_distances_in_rows_and_in_columns():
    vision, _, _ = public_tower(torch.float64)
    attention, x, freqs = vision.blocks[0].attn, drawn(6, 32), frequencies(8, 10000.0)
    place = torch.cartesian_prod(torch.arange(2), torch.arange(3))

    def out(places):
        return attention(x, (places.unsqueeze(-1) * freqs).flatten(1))

    torch.testing.assert_close(out(place + torch.tensor([4, 9])), out(place))
    for stretched in (place * torch.tensor([2, 1]), place * torch.tensor([1, 2]), place.flip(1)):
        assert (out(stretched) - out(place)).abs().max() > 1e-4


def test_halves_turn_against_each_other():
    x, angle = drawn(2, 3, 8), drawn(3, 4, seed=1)
    y = turn_halves(x, angle)
    as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(3, 4).double(), angle)
    torch.testing.assert_close(y, torch.cat([as_complex.real, as_complex.imag], dim=-1))
    assert turn_halves(x.bfloat16(), angle).dtype == torch.bfloat16


@pytest.mark.parametrize(("rows", "columns"), [(6, 9), (4, 5), (1, 1), (3, 7)])
def test_patches_are_merged_by_place(rows, columns):
    """Token (i, j) holds channel by channel its 3 x 3 patches row by row, zeros where the grid has ended."""
    aligner, x = Aligner(SMALL, 40), drawn(rows * columns, 32)
    h, w = merged(SMALL, rows, columns)
    tokens = aligner.merge(x, rows, columns)
    assert tokens.shape == (h * w, 9 * 32)
    for i in range(h):
        for j in range(w):
            for a in range(3):
                for b in range(3):
                    row, column = 3 * i + a, 3 * j + b
                    inside = row < rows and column < columns
                    expected = x[row * columns + column] if inside else torch.zeros(32).double()
                    assert torch.equal(tokens[i * w + j, 3 * a + b :: 9], expected)


def test_the_span_of_an_image():
    tokens = torch.arange(6).view(6, 1)
    rows = span(tokens, 2, 3, torch.tensor([-1]), torch.tensor([-2]), torch.tensor([-3]))
    assert rows.flatten().tolist() == [-1, 0, 1, 2, -2, 3, 4, 5, -2, -3]
    assert len(rows) == span_length(2, 3)


def test_a_picture_in_the_text():
    """Every row of the span stands for a token of the image's id, in order, and each of them moves what follows."""
    model = drawn_model(SEEING)
    rows = model.image_rows(drawn(20, 3, 14, 14), 4, 5)
    n = span_length(2, 2)
    assert rows.shape == (n, SEEING.hidden_size)
    assert torch.equal(
        rows[[0, 3, 6, 7]],
        torch.stack([model.image_start, model.image_newline, model.image_newline, model.image_end]),
    )
    ids = drawn_ids(SEEING, 1, 12).repeat(n + 1, 1)
    ids[:, 2 : 2 + n] = SEEING.image_token_id
    each = rows.repeat(n + 1, 1, 1)
    each[torch.arange(n), torch.arange(n)] += 0.5
    logits = model(ids, image_rows=each.flatten(0, 1))
    moved = (logits[:n] - logits[n]).abs().amax(-1) > 1e-12
    for i in range(n):
        assert not moved[i, : 2 + i].any()
        assert moved[i, 2 + i : 12].all()
    swapped = model(ids[:1], image_rows=rows.flip(0))
    assert (swapped - logits[n]).abs().amax() > 1e-3


# ---- bad input


def test_grids_that_dont_fit_are_refused():
    vision, _, patches = public_tower(torch.float32)
    for rows, columns in ((0, 35), (35, 0), (-5, -7)):
        with pytest.raises(ValueError, match=f"rows = {rows}, columns = {columns}: expected one patch at least"):
            vision(patches, rows, columns)
    with pytest.raises(ValueError, match=r"patches of shape \[35, 3, 4, 4\]: expected \[36, 3, 4, 4\] for 6 x 6"):
        vision(patches, 6, 6)
    with pytest.raises(ValueError, match=r"patches of shape \[35, 3, 4\]: expected \[35, 3, 4, 4\]"):
        vision(patches[..., 0], 5, 7)


def test_an_image_of_too_many_tokens_is_refused():
    v = preset("v41_flash").vision_config
    side = int(v.max_image_tokens**0.5) * v.downsample_ratio
    assert merged(v, side, side) == (side // 3, side // 3)
    with pytest.raises(
        ValueError, match=f"{side} x {side + 1} patches: expected at most {v.max_image_tokens} tokens"
    ):
        merged(v, side, side + 1)


def test_a_model_without_vision_says_so():
    model = drawn_model(SEEING.replace(vision_config=None))
    with pytest.raises(ValueError, match="vision_config = None: expected a config with a vision tower"):
        model.image_rows(drawn(20, 3, 14, 14), 4, 5)
