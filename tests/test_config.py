"""Official files are read whole; bad ones are refused with field, value and expectation."""

import hashlib
import json

import pytest
from checkpoints import CONFIGS, V41, changed
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_edu.config import PRESETS, ConfigError, ModelConfig, preset


def test_shipped_files_are_the_official_bytes():
    digests = {
        p: hashlib.sha256((CONFIGS / f"{p}.json").read_bytes()).hexdigest()[:8] for p in ("v41_flash", "v4_flash")
    }
    assert digests == {"v41_flash": "8be45ce0", "v4_flash": "6c8f3d2d"}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_reads_without_unknown_fields(name):
    config = preset(name)
    assert config.unknown == {}
    assert preset(name) == config
    assert hash(preset(name)) == hash(config)


def test_values_and_nested_parts():
    c = preset("v41_flash")
    assert (c.hidden_size, c.n_routed_experts, c.scoring_func) == (5120, 384, "sqrtsoftplus")
    assert c.compress_ratios == (0, 0) + (2,) * 18 + (1,) * 20 + (0, 0, 0)
    assert c.rope_scaling.factor == 16
    assert c.rope_scaling.rope_type == "yarn"
    assert c.quantization_config.weight_block_size == (32, 32)
    assert c.vision_config.intermediate_size == 2816
    assert c.vision_config.max_wh_ratio is None
    assert c.metadata["transformers_version"] == "5.6.0"
    assert (c.decoder_start, c.fp8_tile) == (20, 32)
    v3 = preset("v3")
    assert (v3.n_group, v3.topk_group, v3.scoring_func, v3.aux_loss_alpha) == (8, 4, "sigmoid", 0.001)
    assert (v3.fp8_tile, preset("v2").quantization_config) == (128, None)


def test_the_flat_layout_and_its_model_type_are_read():
    flat = {**V41["text_config"], "image_token_id": 129264}
    c = ModelConfig.from_dict(flat)
    assert c.model_type == "deepseek_v41"
    assert c.vision_config is None
    assert c.fp8_tile == 32


def test_fields_that_a_file_leaves_out():
    left_out = "tie_word_embeddings attention_bias initializer_range num_nextn_predict_layers".split()
    data = json.loads((CONFIGS / "v4_pro.json").read_text())
    c = ModelConfig.from_dict({k: v for k, v in data.items() if k not in left_out})
    assert (c.tie_word_embeddings, c.attention_bias, c.initializer_range, c.num_nextn_predict_layers) == (
        False,
        False,
        0.02,
        0,
    )
    assert (c.first_k_dense_replace, c.moe_layer_freq, c.n_group) == (0, 1, None)
    assert preset("deepseekmoe_16b").routed_scaling_factor == 1.0
    assert "metadata" not in repr(c)


def test_long_values_are_cut_in_messages():
    for length, shown in ((78, "x" * 78), (79, "x" * 76 + "...")):
        with pytest.raises(ConfigError) as caught:
            ModelConfig.from_dict(changed("text_config.hidden_size", "x" * length))
        assert f"hidden_size = '{shown}" in str(caught.value)
        assert ("..." in str(caught.value)) == (length == 79)


def test_unknown_fields_are_kept_with_their_place():
    data = changed("text_config.mystery", {"a": 1})
    data["vision_config"]["colour"] = "red"
    data["another"] = 7
    c = ModelConfig.from_dict(data)
    assert c.unknown == {"mystery": {"a": 1}, "vision_config.colour": "red", "another": 7}


BAD = [
    ("text_config.hidden_size", -5120, "hidden_size = -5120: expected a positive integer"),
    ("text_config.hidden_size", "5120", "hidden_size = '5120': expected a positive integer"),
    ("text_config.hidden_size", True, "hidden_size = True: expected a positive integer"),
    ("text_config.hidden_size", 5120.0, "hidden_size = 5120.0: expected a positive integer"),
    ("text_config.hidden_size", None, "hidden_size = None: expected a positive integer"),
    ("text_config.hidden_size", ..., "hidden_size is missing: deepseek_v41 needs it"),
    ("text_config.hc_mult", 0, "hc_mult = 0: expected a positive integer"),
    ("text_config.hc_mult", None, "hc_mult = None: expected a value, deepseek_v41 needs it"),
    ("text_config.rms_norm_eps", 0, "rms_norm_eps = 0: expected a positive finite number"),
    ("text_config.rms_norm_eps", 10**400, "expected a positive finite number"),
    ("text_config.norm_topk_prob", 1, "norm_topk_prob = 1: expected true or false"),
    ("text_config.compress_ratios", 2, "compress_ratios = 2: expected a list of non-negative integers"),
    ("text_config.compress_ratios", [0, "2"], "expected a list of non-negative integers"),
    ("text_config.dspark_noise_token_id", -1, "dspark_noise_token_id = -1: expected a non-negative integer"),
    ("text_config.rope_scaling", [], "rope_scaling = []: expected an object"),
    ("text_config.rope_scaling.factor", ..., "rope_scaling.factor is missing"),
    ("text_config.rope_scaling.factor", -1, "rope_scaling.factor = -1: expected a positive finite number"),
    ("vision_config.hidden_size", ..., "vision_config.hidden_size is missing"),
    ("text_config", 3, "text_config = 3: expected an object"),
    ("model_type", "llama", "model_type = 'llama' beside text_config.model_type = 'deepseek_v41'"),
    ("hidden_size", 4096, "hidden_size = 4096 beside text_config.hidden_size = 5120: expected one value"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD, ids=[f"{p}={str(v)[:20]}" for p, v, _ in BAD])
def test_bad_fields_are_refused_by_name(path, value, message):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(path, value))
    assert message in str(caught.value)


def test_all_faults_are_told_at_once():
    data = changed("text_config.hidden_size", -1)
    data["text_config"]["vocab_size"] = "many"
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(data)
    assert len(caught.value.problems) == 2
    assert "2 problem(s)" in str(caught.value)


FILES = {
    "truncated": '{"model_type": "deepseek_v41"',
    "array": "[1, 2]",
    "not-a-number": '{"model_type": "deepseek_v41", "rms_norm_eps": NaN}',
    "twice": '{"model_type": "deepseek_v3", "vocab_size": 1, "vocab_size": 2}',
    "deep": "[" * 100_000,
    "empty": "",
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_config_are_refused_with_their_path(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(FILES[name])
    with pytest.raises(ConfigError, match=r"config\.json.*\n"):
        ModelConfig.from_json(path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="expected a JSON document"):
        ModelConfig.from_json(tmp_path / "config.json")
    with pytest.raises(FileNotFoundError):
        ModelConfig.from_json(tmp_path / "none.json")


def test_presets_are_named():
    with pytest.raises(KeyError, match=r"no preset 'v5': expected one of v41_flash"):
        preset("v5")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.sampled_from(sorted(V41["text_config"])), json_values)
def test_any_value_in_any_field_is_read_or_refused(name, value):
    """No other exception ever, and what is accepted is what was given."""
    try:
        config = ModelConfig.from_dict(changed(f"text_config.{name}", value))
    except ConfigError:
        return
    if name in config.metadata:
        assert config.metadata[name] == value or value != value
    elif name not in ("model_type", "rope_scaling"):
        assert getattr(config, name) == (tuple(value) if isinstance(value, list) else value)
