"""What a config of each generation must hold: required fields, and rules between fields.

`problems(config)` returns one sentence a fault: field, value, what was expected.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv41_edu.config import ModelConfig

_EXPERTS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads max_position_embeddings rms_norm_eps rope_theta "
    "moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok scoring_func norm_topk_prob"
).split()
_DENSE = "intermediate_size first_k_dense_replace".split()
_GROUPS = "n_group topk_group topk_method routed_scaling_factor".split()
_MLA = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim".split()
_INDEXER = "index_n_heads index_head_dim index_topk".split()
_LATENT = (
    "head_dim qk_rope_head_dim q_lora_rank o_lora_rank o_groups sliding_window compress_ratios compress_rope_theta "
    "hc_mult hc_sinkhorn_iters hc_eps swiglu_limit routed_scaling_factor rope_scaling"
).split()
_V41 = (
    "kv_source_layer_ids index_source_layer_ids candidate_source_layer_id candidate_topk_blocks "
    "candidate_block_size engram_layer_ids engram_num_embeddings engram_max_ngram_size engram_vocab_size "
    "engram_n_heads engram_head_dim engram_pad_token_id engram_compressed_vocab_size num_nextn_predict_layers "
    "dspark_block_size dspark_noise_token_id dspark_target_layer_ids dspark_markov_rank dspark_n_routed_experts "
    "dspark_num_experts_per_tok"
).split()

REQUIRED = {
    "deepseek": _EXPERTS + _DENSE,
    "deepseek_v2": _EXPERTS + _DENSE + _GROUPS + _MLA,
    "deepseek_v3": _EXPERTS + _DENSE + _GROUPS + _MLA,
    "deepseek_v32": _EXPERTS + _DENSE + _GROUPS + _MLA + _INDEXER,
    "deepseek_v4": _EXPERTS + _LATENT + _INDEXER + ["num_hash_layers"],
    "deepseek_v41": _EXPERTS + _LATENT + _INDEXER + _V41,
}

# fields of the official files that change neither a shape nor a computation here
METADATA = frozenset(
    "architectures auto_map dtype torch_dtype transformers_version use_cache attention_dropout ep_size "
    "pretraining_tp expert_dtype".split()
)

MAY_BE_ZERO = frozenset(
    "first_k_dense_replace num_hash_layers num_nextn_predict_layers n_shared_experts bos_token_id eos_token_id "
    "pad_token_id image_token_id engram_pad_token_id dspark_noise_token_id candidate_source_layer_id "
    "aux_loss_alpha".split()
)

TOKEN_IDS = "bos_token_id eos_token_id pad_token_id image_token_id engram_pad_token_id dspark_noise_token_id".split()


class _Faults(list):
    def check(self, holds: bool, config: "ModelConfig", name: str, expected: str) -> None:
        if not holds:
            value = getattr(config, name)
            value = list(value) if isinstance(value, tuple) else value
            self.append(f"{name} = {value!r}: expected {expected}")


def problems(c: "ModelConfig") -> list[str]:
    """Every rule that the config breaks, as sentences; all fields have their right types already."""
    if c.model_type not in REQUIRED:
        return [f"model_type = {c.model_type!r}: expected one of {sorted(REQUIRED)}"]
    optional = {"q_lora_rank"} if c.model_type.startswith(("deepseek_v2", "deepseek_v3")) else set()
    empty = [n for n in REQUIRED[c.model_type] if getattr(c, n) is None and n not in optional]
    if empty:
        return [f"{n} = None: expected a value, {c.model_type} needs it" for n in empty]
    faults = _Faults()
    for name in TOKEN_IDS:
        value = getattr(c, name)
        faults.check(value is None or value < c.vocab_size, c, name, f"an id below vocab_size {c.vocab_size}")
    faults.check(c.hidden_act == "silu", c, "hidden_act", "'silu'")
    faults.check(not c.attention_bias, c, "attention_bias", "false: no model of the family has one")
    faults.check(not c.tie_word_embeddings, c, "tie_word_embeddings", "false: the head is a matrix of its own")
    if c.quantization_config:
        tile = c.quantization_config.weight_block_size
        if len(tile) != 2 or tile[0] != tile[1] or tile[0] < 1:
            faults.append(f"quantization_config.weight_block_size = {list(tile)}: expected two equal sizes")
    _experts(c, faults)
    if c.model_type in ("deepseek_v4", "deepseek_v41"):
        _latent_attention(c, faults)
    if c.model_type == "deepseek_v41" and not faults:
        _v41(c, faults)
    return faults


def _experts(c: "ModelConfig", faults: _Faults) -> None:
    scores = ("softmax", "sigmoid", "sqrtsoftplus")
    faults.check(c.scoring_func in scores, c, "scoring_func", f"one of {scores}")
    methods = (None, "greedy", "group_limited_greedy", "noaux_tc")
    faults.check(c.topk_method in methods, c, "topk_method", f"one of {methods[1:]}")
    n = c.n_routed_experts
    faults.check(c.num_experts_per_tok <= n, c, "num_experts_per_tok", f"at most n_routed_experts {n}")
    faults.check(c.moe_layer_freq == 1, c, "moe_layer_freq", "1: every layer after the dense ones has experts")
    dense_ok = c.first_k_dense_replace <= c.num_hidden_layers
    faults.check(dense_ok, c, "first_k_dense_replace", f"at most num_hidden_layers {c.num_hidden_layers}")
    if c.n_group:
        faults.check(n % c.n_group == 0, c, "n_group", f"a divisor of n_routed_experts {n}")
        kept = c.topk_group or 0
        faults.check(1 <= kept <= c.n_group, c, "topk_group", f"1 to n_group {c.n_group}")
        room = kept * (n // c.n_group)
        faults.check(
            c.num_experts_per_tok <= room,
            c,
            "num_experts_per_tok",
            f"at most {room}, the kept groups' experts",
        )
    if c.num_hash_layers:
        faults.check(c.num_hash_layers <= c.num_hidden_layers, c, "num_hash_layers", "at most num_hidden_layers")


def _latent_attention(c: "ModelConfig", faults: _Faults) -> None:
    """V4 and V4.1: one latent of `head_dim` channels is key and value of every head."""
    heads = c.num_attention_heads
    faults.check(heads % c.o_groups == 0, c, "o_groups", f"a divisor of num_attention_heads {heads}")
    faults.check(c.num_key_value_heads in (None, 1), c, "num_key_value_heads", "1: the heads share one latent")
    for name in ("head_dim", "index_head_dim", "hidden_size", "moe_intermediate_size"):
        faults.check(getattr(c, name) % 32 == 0, c, name, "a multiple of 32, the block of the stored scales")
    rope = c.qk_rope_head_dim
    fits = rope % 2 == 0 and rope <= min(c.head_dim, c.index_head_dim)
    faults.check(fits, c, "qk_rope_head_dim", "even, at most head_dim and index_head_dim")
    layers = c.num_hidden_layers + c.num_nextn_predict_layers
    given = len(c.compress_ratios)
    # V4's files list more blocks of the drafter than num_nextn_predict_layers says
    right = given == layers if c.model_type == "deepseek_v41" else given >= layers
    faults.check(right, c, "compress_ratios", f"{layers} entries, one a layer and drafter block, got {given}")
    dspark = c.dspark_target_layer_ids
    if dspark is not None:
        faults.check(_layer_ids(dspark, c), c, "dspark_target_layer_ids", _LAYER_IDS.format(c.num_hidden_layers))


_LAYER_IDS = "distinct ascending layers below num_hidden_layers {}"


def _layer_ids(ids: tuple[int, ...], c: "ModelConfig") -> bool:
    return bool(ids) and list(ids) == sorted(set(ids)) and ids[-1] < c.num_hidden_layers


def _v41(c: "ModelConfig", faults: _Faults) -> None:
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        faults.check(_layer_ids(getattr(c, name), c), c, name, _LAYER_IDS.format(c.num_hidden_layers))
    if faults:
        return
    ratios, sources = c.compress_ratios, c.kv_source_layer_ids
    indexed = c.index_source_layer_ids
    in_index = set(sources) <= set(indexed) and indexed[0] >= sources[0]
    expected = f"all of kv_source_layer_ids {list(sources)}, and no layer below them"
    faults.check(in_index, c, "index_source_layer_ids", expected)
    for layer in range(c.num_hidden_layers):
        source = max((s for s in sources if s <= layer), default=None)
        reads = ratios[layer] > 0
        if reads != (source is not None) or (reads and ratios[layer] != ratios[source]):
            faults.append(
                f"compress_ratios[{layer}] = {ratios[layer]}: expected the ratio of its source, the nearest "
                f"kv_source_layer_ids at or below it ({source}), or 0 where there is none"
            )
            break
    if any(ratios[c.num_hidden_layers :]):
        faults.append(
            f"compress_ratios = {list(ratios)}: expected 0 for the drafter's blocks, which have a window only"
        )
    candidate = c.candidate_source_layer_id
    expected = f"the last of kv_source_layer_ids, {sources[-1]}"
    faults.check(candidate == sources[-1], c, "candidate_source_layer_id", expected)
    blocks, size = c.candidate_topk_blocks, c.candidate_block_size
    least = blocks * size - (size - 1)
    faults.check(
        least >= c.index_topk,
        c,
        "index_topk",
        f"at most {least}, the entries sure to lie in the candidate blocks",
    )

    tables = len(c.engram_layer_ids)
    given = len(c.engram_num_embeddings)
    faults.check(given == tables, c, "engram_num_embeddings", f"{tables} entries, one for each engram_layer_ids")
    faults.check(c.engram_max_ngram_size >= 2, c, "engram_max_ngram_size", "at least 2")
    rows = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_vocab_size
    few = f"at least {rows} rows each: orders x heads x engram_vocab_size"
    faults.check(min(c.engram_num_embeddings, default=0) >= rows, c, "engram_num_embeddings", few)
    faults.check(c.engram_head_dim % 32 == 0, c, "engram_head_dim", "a multiple of 32, the block of the rows' scales")
    small = c.engram_compressed_vocab_size <= c.vocab_size
    faults.check(small, c, "engram_compressed_vocab_size", f"at most vocab_size {c.vocab_size}")

    enough = c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts
    expected = f"at most dspark_n_routed_experts {c.dspark_n_routed_experts}"
    faults.check(enough, c, "dspark_num_experts_per_tok", expected)
    heads = ("vanilla", "gated", "rnn")
    faults.check(c.dspark_markov_head_type in (None, *heads), c, "dspark_markov_head_type", f"one of {heads}")
    if vision := c.vision_config:
        width = vision.hidden_size / vision.num_attention_heads
        if width % 4:
            faults.append(
                f"vision_config.num_attention_heads = {vision.num_attention_heads}: expected a divisor of "
                f"hidden_size {vision.hidden_size} that leaves heads a multiple of 4 wide"
            )
