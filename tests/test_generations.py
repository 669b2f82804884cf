"""Older generations: the totals of their released shards, and the library's own models on the meta device."""

from collections import Counter
from math import prod

import pytest
import torch

from dsv41_edu.config import preset
from dsv41_edu.generations import plan
from dsv41_edu.tensors import tensor_plan

# tensors and stored elements (scales included, two FP4 codes as one) of the released checkpoints' headers
RELEASED = {
    "v2": (29_102, 235_741_434_880),
    "v3": (91_991, 684_531_386_000),
    "v4_pro": (145_116, 861_608_274_846),
    "deepseekmoe_16b": (5_466, 16_375_728_128),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_checkpoints_to_the_unit(name):
    tensors = plan(preset(name))
    assert (len(tensors), sum(prod(t.shape) for t in tensors)) == RELEASED[name]
    assert len({t.name for t in tensors}) == len(tensors)
    assert all(type(n) is int for t in tensors for n in t.shape)


def test_v4_flash_of_april_had_one_prediction_layer():
    """The July refresh in `configs/` has a DSpark drafter, whose tensors nobody described: it is left out."""
    july = preset("v4_flash")
    april = plan(july.replace(dspark_block_size=None))
    assert (len(april), sum(prod(t.shape) for t in april)) == (69_187, 158_069_433_298)
    assert not [t for t in plan(july) if t.group.startswith("drafter")]


def test_v3_dtypes_to_the_unit():
    elements = Counter()
    for t in plan(preset("v3")):
        elements[t.dtype] += prod(t.shape)
    assert elements == {"BF16": 3_918_786_560, "F8_E4M3": 680_571_043_840, "F32": 41_555_600}


def test_layers_of_the_prediction_blocks_follow_the_last():
    assert {t.layer for t in plan(preset("v4_pro")) if t.name.startswith("mtp.0.")} == {61}
    assert {t.layer for t in plan(preset("v3")) if t.group.startswith("drafter")} == {61}


def test_grouped_query_heads_and_cut_tiles():
    c = preset("deepseekmoe_16b").replace(num_key_value_heads=4)
    by_name = {t.name: t.shape for t in plan(c)}
    assert by_name["model.layers.0.self_attn.k_proj.weight"] == (512, 2048)
    assert by_name["model.layers.0.self_attn.q_proj.weight"] == (2048, 2048)
    scales = {t.name: t.shape for t in plan(preset("v3").replace(kv_lora_rank=500))}
    assert scales["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"] == (256, 4)


def test_v41_is_the_same_plan():
    assert plan(preset("mini")) == tensor_plan(preset("mini"))


def library_elements(name: str, **changes) -> int:
    """Parameters of the same config in `transformers`, built without storage."""
    import transformers

    c = preset(name)
    fields = {f: getattr(c, f) for f in c.__dataclass_fields__ if isinstance(getattr(c, f), (int, float, str, bool))}
    fields |= {"rope_scaling": None, "q_lora_rank": c.q_lora_rank}
    fields.pop("model_type")
    config = transformers.CONFIG_MAPPING[c.model_type](**(fields | changes))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["v2", "v3", "v32"])
def test_parity_with_the_library(name):
    """Backbone alone: the library has no prediction layer, and keeps the selection bias as a buffer."""
    tensors = [t for t in plan(preset(name)) if not t.group.startswith("drafter")]
    biases = sum(t.parameters for t in tensors if t.name.endswith("e_score_correction_bias"))
    assert library_elements(name) == sum(t.parameters for t in tensors) - biases
