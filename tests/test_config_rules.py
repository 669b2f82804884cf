"""Rules between fields: sizes that must divide, ids in range, lists of the right length."""

from dataclasses import replace

import pytest
from checkpoints import changed

from dsv41_edu.config import ConfigError, ModelConfig, preset

BAD = [
    ("text_config.hidden_size", 5121, "hidden_size = 5121: expected a multiple of 32"),
    ("text_config.scoring_func", "relu", "scoring_func = 'relu': expected one of"),
    ("text_config.topk_method", "random", "topk_method = 'random': expected one of"),
    ("text_config.hidden_act", "gelu", "hidden_act = 'gelu': expected 'silu'"),
    ("text_config.attention_bias", True, "attention_bias = True: expected false"),
    ("text_config.tie_word_embeddings", True, "tie_word_embeddings = True: expected false"),
    ("text_config.num_experts_per_tok", 385, "num_experts_per_tok = 385: expected at most n_routed_experts 384"),
    ("text_config.dspark_num_experts_per_tok", 129, "expected at most dspark_n_routed_experts 128"),
    ("text_config.dspark_markov_head_type", "gru", "= 'gru': expected one of ('vanilla', 'gated', 'rnn')"),
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
    (
        "text_config.dspark_target_layer_ids",
        [38, 37, 39],
        "dspark_target_layer_ids = [38, 37, 39]: expected distinct",
    ),
    ("quantization_config.weight_block_size", [32, 64], "weight_block_size = [32, 64]: expected two equal sizes"),
    ("vision_config.num_attention_heads", 15, "vision_config.num_attention_heads = 15: expected a divisor"),
    ("text_config.model_type", 4, "expected one of ['deepseek', 'deepseek_v2'"),
    ("bos_token_id", 129280, "bos_token_id = 129280: expected an id below vocab_size 129280"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD, ids=[f"{p}={str(v)[:20]}" for p, v, _ in BAD])
def test_bad_fields_are_refused_by_name(path, value, message):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(path, value))
    assert message in str(caught.value)


OLDER = [
    ("v3", {"n_group": 7}, "n_group = 7: expected a divisor of n_routed_experts 256"),
    ("v3", {"topk_group": 9}, "topk_group = 9: expected 1 to n_group 8"),
    ("v3", {"num_experts_per_tok": 129}, "num_experts_per_tok = 129: expected at most 128, the kept groups' experts"),
    ("v3", {"kv_lora_rank": None}, "kv_lora_rank = None: expected a value, deepseek_v3 needs it"),
    ("v3", {"first_k_dense_replace": 62}, "first_k_dense_replace = 62: expected at most num_hidden_layers 61"),
    ("v3", {"topk_group": None}, "topk_group = None"),
    ("v3", {"topk_method": "x"}, "expected one of ('greedy', 'group_limited_greedy', 'noaux_tc')"),
    ("v41_flash", {"candidate_source_layer_id": 14}, "expected the last of kv_source_layer_ids, 20"),
    (
        "v41_flash",
        {"compress_ratios": (0, 0) + (2,) * 18 + (1,) * 20 + (0, 1, 0)},
        "expected 0 for the drafter's blocks",
    ),
    ("v41_flash", {"engram_num_embeddings": ()}, "expected 2 entries, one for each engram_layer_ids"),
    ("v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2: expected 1"),
    ("v4_flash", {"num_hash_layers": 44}, "num_hash_layers = 44: expected at most num_hidden_layers"),
    ("v4_flash", {"compress_ratios": (0,) * 43}, "expected 44 entries"),
]


@pytest.mark.parametrize(("name", "changes", "message"), OLDER)
def test_rules_of_older_generations(name, changes, message):
    with pytest.raises(ConfigError) as caught:
        preset(name).replace(**changes)
    assert message in str(caught.value)


def test_limits_themselves_are_allowed():
    v41, v3 = preset("v41_flash"), preset("v3")
    assert v3.replace(num_experts_per_tok=128, topk_group=4).num_experts_per_tok == 128
    assert v3.replace(topk_group=8, first_k_dense_replace=61, q_lora_rank=None).q_lora_rank is None
    assert v3.replace(topk_group=1).topk_group == 1
    assert v3.replace(quantization_config=replace(v3.quantization_config, weight_block_size=(1, 1))).fp8_tile == 1
    assert v41.replace(index_topk=2048 * 8 - 7).index_topk == 16377
    assert v41.replace(num_experts_per_tok=384, dspark_num_experts_per_tok=128)
    assert v41.replace(engram_compressed_vocab_size=129280, bos_token_id=129279)
    assert v41.replace(index_source_layer_ids=v41.kv_source_layer_ids)
    assert v41.replace(qk_rope_head_dim=128)
    assert v41.replace(engram_max_ngram_size=2, engram_num_embeddings=(8 * 16_000_000,) * 2)
    assert preset("v4_flash").replace(num_hash_layers=43)
    assert preset("v4_flash").replace(compress_ratios=(0,) * 44)
