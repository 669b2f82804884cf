"""Each switch takes away what its name says, in a copy."""

import pytest
import torch
from small_models import CONFIG, drawn_ids, drawn_model, public_model

from dsv41_edu.experiments.switches import SWITCHES, without

IDS = drawn_ids(CONFIG, 1, 40)


@pytest.fixture(scope="module")
def model():
    return public_model()


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_changes_the_copy_alone(model, name):
    if name == "selection bias":
        for layer in model.layers:
            layer.ffn.gate.bias.copy_(torch.linspace(-1, 1, CONFIG.n_routed_experts))
    before = model(IDS)
    changed = without(model, name)
    assert not torch.allclose(changed(IDS), before, atol=1e-3)
    assert torch.equal(model(IDS), before)


def test_without_memory_the_tables_are_of_no_matter():
    model = drawn_model(CONFIG)
    off = without(model, "n-gram memory")
    before = off(IDS)
    for layer in off.layers:
        if layer.engram is not None:
            layer.engram.embed.weight.zero_()
    assert torch.equal(off(IDS), before)


def test_without_entries_nothing_beyond_the_windows_is_seen():
    model = without(without(public_model(), "all compressed entries"), "n-gram memory")
    other = IDS.clone()
    other[0, 0] = (other[0, 0] + 1) % 200
    moved = (model(IDS) != model(other)).any(-1)[0].nonzero().flatten().tolist()
    reach = CONFIG.num_hidden_layers * (CONFIG.sliding_window - 1)
    assert moved
    assert max(moved) <= reach


def test_a_window_of_one_leaves_each_token_to_itself():
    model = without(without(public_model(), "all compressed entries"), "n-gram memory")
    alone = without(model, "the window, but for the token itself")
    whole = alone(IDS)
    for token in (3, 30):  # turned there and back: its place is of no matter
        torch.testing.assert_close(alone(IDS[:, token : token + 1])[0, 0], whole[0, token], atol=1e-9, rtol=0)


def test_unmixed_streams_pass_whole():
    model = without(public_model(), "mixing of the streams")
    *_, comb = model.seams[0](
        torch.randn(1, 4, 64, dtype=torch.float64),
        torch.rand(1, 4, dtype=torch.float64),
        model.layers[0].hc_attn_fn,
        model.layers[0].hc_attn_base,
        model.layers[0].hc_attn_scale,
    )
    assert torch.equal(comb, torch.eye(4, dtype=torch.float64).unsqueeze(0))


def test_another_name_is_refused():
    with pytest.raises(KeyError, match="attention"):
        without(public_model(), "attention")
