"""Official files are read whole; bad ones are refused with field, value and expectation."""

import copy
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_edu.config import PRESETS, ConfigError, ModelConfig, preset

CONFIGS = Path(__file__).parents[1] / "dsv41_edu" / "configs"
V41 = json.loads((CONFIGS / "v41_flash.json").read_text())


def changed(path: str, value) -> dict:
    """The official V4.1 file with one field set (or dropped, where value is ...)."""
    data = copy.deepcopy(V41)
    *parents, last = path.split(".")
    place = data
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


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
    ("text_config.hidden_size", 5121, "hidden_size = 5121: expected a multiple of 32"),
    ("text_config.hidden_size", None, "hidden_size = None: expected a positive integer"),
    ("text_config.hidden_size", ..., "hidden_size is missing: deepseek_v41 needs it"),
    ("text_config.hc_mult", 0, "hc_mult = 0: expected a positive integer"),
    ("text_config.hc_mult", None, "hc_mult = None: expected a value, deepseek_v41 needs it"),
    ("text_config.rms_norm_eps", 0, "rms_norm_eps = 0: expected a positive finite number"),
    ("text_config.rms_norm_eps", 10**400, "expected a positive finite number"),
    ("text_config.norm_topk_prob", 1, "norm_topk_prob = 1: expected true or false"),
    ("text_config.scoring_func", "relu", "scoring_func = 'relu': expected one of"),
    ("text_config.topk_method", "random", "topk_method = 'random': expected one of"),
    ("text_config.hidden_act", "gelu", "hidden_act = 'gelu': expected 'silu'"),
    ("text_config.attention_bias", True, "attention_bias = True: expected false"),
    ("text_config.tie_word_embeddings", True, "tie_word_embeddings = True: expected false"),
    ("text_config.num_experts_per_tok", 385, "num_experts_per_tok = 385: expected at most n_routed_experts 384"),
    ("text_config.dspark_num_experts_per_tok", 129, "expected at most dspark_n_routed_experts 128"),
    ("text_config.o_groups", 7, "o_groups = 7: expected a divisor of num_attention_heads 64"),
    ("text_config.num_key_value_heads", 2, "num_key_value_heads = 2: expected 1"),
    ("text_config.head_dim", 500, "head_dim = 500: expected a multiple of 32"),
    ("text_config.qk_rope_head_dim", 63, "qk_rope_head_dim = 63: expected even"),
    (
        "text_config.qk_rope_head_dim",
        256,
        "qk_rope_head_dim = 256: expected even, at most head_dim and index_head_dim",
    ),
    ("text_config.compress_ratios", [0] * 42, "expected 43 entries, one a layer and drafter block, got 42"),
    ("text_config.compress_ratios", 2, "compress_ratios = 2: expected a list of non-negative integers"),
    ("text_config.compress_ratios", [0, "2"], "expected a list of non-negative integers"),
    ("text_config.compress_ratios", [0] * 43, "compress_ratios[2] = 0: expected the ratio of its source"),
    ("text_config.compress_ratios", [0, 0] + [2] * 18 + [1] * 23, "expected 0 for the drafter's blocks"),
    ("text_config.kv_source_layer_ids", [2, 8, 20, 14], "expected distinct ascending layers below"),
    (
        "text_config.kv_source_layer_ids",
        [2, 8, 14, 40],
        "expected distinct ascending layers below num_hidden_layers 40",
    ),
    ("text_config.kv_source_layer_ids", [], "expected distinct ascending layers"),
    (
        "text_config.kv_source_layer_ids",
        [2, 8, 14, 21],
        "index_source_layer_ids = [2, 8, 14, 20, 24, 28, 32, 36]: expected all",
    ),
    (
        "text_config.index_source_layer_ids",
        [1, 2, 8, 14, 20],
        "expected all of kv_source_layer_ids [2, 8, 14, 20], and no",
    ),
    ("text_config.candidate_source_layer_id", 14, "candidate_source_layer_id = 14: expected the last of"),
    ("text_config.candidate_topk_blocks", 10, "index_topk = 512: expected at most 73"),
    ("text_config.engram_layer_ids", [1, 40], "engram_layer_ids = [1, 40]: expected distinct ascending layers"),
    ("text_config.engram_num_embeddings", [384006168], "expected 2 entries, one for each engram_layer_ids"),
    ("text_config.engram_num_embeddings", [384006168, 3], "expected at least 384000000 rows each"),
    ("text_config.engram_max_ngram_size", 1, "engram_max_ngram_size = 1: expected at least 2"),
    ("text_config.engram_head_dim", 250, "engram_head_dim = 250: expected a multiple of 32"),
    ("text_config.engram_compressed_vocab_size", 129281, "expected at most vocab_size 129280"),
    ("text_config.engram_pad_token_id", 129280, "engram_pad_token_id = 129280: expected an id below vocab_size"),
    ("text_config.dspark_noise_token_id", -1, "dspark_noise_token_id = -1: expected a non-negative integer"),
    (
        "text_config.dspark_target_layer_ids",
        [38, 37, 39],
        "dspark_target_layer_ids = [38, 37, 39]: expected distinct",
    ),
    ("text_config.rope_scaling", [], "rope_scaling = []: expected an object"),
    ("text_config.rope_scaling.factor", ..., "rope_scaling.factor is missing"),
    ("text_config.rope_scaling.factor", -1, "rope_scaling.factor = -1: expected a positive finite number"),
    ("quantization_config.weight_block_size", [32, 64], "weight_block_size = [32, 64]: expected two equal sizes"),
    ("vision_config.num_attention_heads", 15, "vision_config.num_attention_heads = 15: expected a divisor"),
    ("vision_config.hidden_size", ..., "vision_config.hidden_size is missing"),
    ("text_config", 3, "text_config = 3: expected an object"),
    ("model_type", "llama", "model_type = 'llama' beside text_config.model_type = 'deepseek_v41'"),
    ("text_config.model_type", 4, "expected one of ['deepseek', 'deepseek_v2'"),
    ("bos_token_id", 129280, "bos_token_id = 129280: expected an id below vocab_size 129280"),
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


OLDER = [
    ("v3", {"n_group": 7}, "n_group = 7: expected a divisor of n_routed_experts 256"),
    ("v3", {"topk_group": 9}, "topk_group = 9: expected 1 to n_group 8"),
    ("v3", {"num_experts_per_tok": 129}, "num_experts_per_tok = 129: expected at most 128, the kept groups' experts"),
    ("v3", {"kv_lora_rank": None}, "kv_lora_rank = None: expected a value, deepseek_v3 needs it"),
    ("v3", {"first_k_dense_replace": 62}, "first_k_dense_replace = 62: expected at most num_hidden_layers 61"),
    ("v4_flash", {"num_hash_layers": 44}, "num_hash_layers = 44: expected at most num_hidden_layers"),
    ("v4_flash", {"compress_ratios": (0,) * 43}, "expected 44 entries"),
]


@pytest.mark.parametrize(("name", "changes", "message"), OLDER)
def test_rules_of_older_generations(name, changes, message):
    with pytest.raises(ConfigError) as caught:
        preset(name).replace(**changes)
    assert message in str(caught.value)


def test_limits_themselves_are_allowed():
    assert preset("v3").replace(num_experts_per_tok=128, topk_group=4).num_experts_per_tok == 128
    assert preset("v3").replace(topk_group=8, first_k_dense_replace=61, q_lora_rank=None).q_lora_rank is None
    assert preset("v41_flash").replace(index_topk=2048 * 8 - 7).index_topk == 16377
    assert preset("v41_flash").replace(num_experts_per_tok=384, dspark_num_experts_per_tok=128)
    assert preset("v41_flash").replace(engram_compressed_vocab_size=129280, bos_token_id=129279)
    assert preset("v4_flash").replace(num_hash_layers=43)


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
