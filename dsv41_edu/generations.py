"""The same plan for the older generations: DeepSeekMoE-16B, V2, V3, V3.2, V4.

`plan(config)` is the one entry for all of them, V4.1 included. Names are those of the released
checkpoints. A generation's multi-token-prediction layer is in groups that begin with "drafter: ".
Sources: the model reports, the released configs and the headers of their shards.
"""

from collections.abc import Iterator
from functools import lru_cache

from dsv41_edu.config import ModelConfig
from dsv41_edu.tensors import Tensor, block, fp8, tensor_plan


@lru_cache(maxsize=32)
def plan(config: ModelConfig) -> tuple[Tensor, ...]:
    """Every tensor of the checkpoint that `config` describes, of whichever generation."""
    plans = {"deepseek_v41": tensor_plan, "deepseek_v4": _v4}
    return tuple(plans.get(config.model_type, _dense_first)(config))


# ---- V4: latent attention, multi-pass hyper-connections, hash-routed first layers


def _v4(c: ModelConfig) -> Iterator[Tensor]:
    """V4. The drafter of the July refresh (`dspark_*` in its config) is not described: left out."""
    V, d = c.vocab_size, c.hidden_size
    yield Tensor("embed.weight", "BF16", (V, d), "embedding", "rows")
    yield Tensor("head.weight", "BF16", (V, d), "head", "matrix")
    yield Tensor("norm.weight", "BF16", (d,), "norms", "vector")
    yield from _stream_head(c, "", "mHC")
    for layer in range(c.num_hidden_layers):
        prefix = f"layers.{layer}"
        yield from block(c, prefix, c.n_routed_experts, layer)
        if layer < c.num_hash_layers:
            table = (V, c.num_experts_per_tok)
            yield Tensor(f"{prefix}.ffn.gate.tid2eid", "I64", table, "router tables", "table", layer)
        if ratio := c.compress_ratios[layer]:
            yield from _compressor(c, f"{prefix}.attn.compressor", ratio, c.head_dim, "compressor", layer)
        if ratio == 4:  # at ratio 128 every entry is read: nothing to choose
            name, width = f"{prefix}.attn.indexer", c.index_n_heads * c.index_head_dim
            yield from _compressor(c, f"{name}.compressor", ratio, c.index_head_dim, "indexer", layer)
            yield from fp8(f"{name}.wq_b", width, c.q_lora_rank, c.fp8_tile, "indexer", layer)
            yield Tensor(f"{name}.weights_proj.weight", "BF16", (c.index_n_heads, d), "indexer", "matrix", layer)
    if c.dspark_block_size is not None:
        return
    for i in range(c.num_nextn_predict_layers):
        prefix, layer = f"mtp.{i}", c.num_hidden_layers + i
        yield from block(c, prefix, c.n_routed_experts, layer, group="drafter: ")
        yield from _stream_head(c, f"{prefix}.", "drafter: mHC", layer)
        for name in ("e_proj", "h_proj"):
            yield from fp8(f"{prefix}.{name}", d, d, c.fp8_tile, "drafter: projections", layer)
        for name in ("enorm", "hnorm", "norm"):
            yield Tensor(f"{prefix}.{name}.weight", "BF16", (d,), "drafter: norms", "vector", layer)


def _stream_head(c: ModelConfig, prefix: str, group: str, layer: int | None = None) -> Iterator[Tensor]:
    """V4 collapses its streams at the end by a map of its own; V4.1 has no such tensors."""
    n = c.hc_mult
    yield Tensor(f"{prefix}hc_head_fn", "F32", (n, n * c.hidden_size), group, "matrix", layer)
    yield Tensor(f"{prefix}hc_head_base", "F32", (n,), group, "vector", layer)
    yield Tensor(f"{prefix}hc_head_scale", "F32", (1,), group, "vector", layer)


def _compressor(c: ModelConfig, prefix: str, ratio: int, width: int, group: str, layer: int) -> Iterator[Tensor]:
    """Groups of 4 overlap, so each token is projected twice; groups of 128 don't."""
    channels = 2 * width if ratio == 4 else width
    for name in ("wkv", "wgate"):
        shape = (channels, c.hidden_size)
        yield Tensor(f"{prefix}.{name}.weight", "BF16", shape, group, "matrix", layer)
    yield Tensor(f"{prefix}.ape", "F32", (ratio, channels), group, "vector", layer)
    yield Tensor(f"{prefix}.norm.weight", "BF16", (width,), group, "vector", layer)


# ---- DeepSeekMoE-16B to V3.2: a plain residual, dense first layers, then experts


def _dense_first(c: ModelConfig) -> Iterator[Tensor]:
    V, d = c.vocab_size, c.hidden_size
    yield Tensor("model.embed_tokens.weight", "BF16", (V, d), "embedding", "rows")
    yield Tensor("lm_head.weight", "BF16", (V, d), "head", "matrix")
    yield Tensor("model.norm.weight", "BF16", (d,), "norms", "vector")
    for layer in range(c.num_hidden_layers):
        yield from _plain_layer(c, layer, "")
    for layer in range(c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers):
        prefix, norms = f"model.layers.{layer}", "drafter: norms"
        yield from _plain_layer(c, layer, "drafter: ")
        shape = (d, 2 * d)
        yield Tensor(f"{prefix}.eh_proj.weight", "BF16", shape, "drafter: projections", "matrix", layer)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield Tensor(f"{prefix}.{name}.weight", "BF16", (d,), norms, "vector", layer)
        # stored again, equal to the backbone's
        yield Tensor(f"{prefix}.embed_tokens.weight", "BF16", (V, d), "drafter: embedding copy", "rows", layer)
        yield Tensor(f"{prefix}.shared_head.head.weight", "BF16", (V, d), "drafter: head copy", "matrix", layer)


def _plain_layer(c: ModelConfig, layer: int, group: str) -> Iterator[Tensor]:
    d, prefix = c.hidden_size, f"model.layers.{layer}"
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{prefix}.{name}.weight", "BF16", (d,), f"{group}norms", "vector", layer)
    attention = _multi_head if c.kv_lora_rank is None else _multi_head_latent
    yield from attention(c, f"{prefix}.self_attn", f"{group}attention", layer)
    if c.model_type == "deepseek_v32":
        yield from _indexer_v32(c, f"{prefix}.self_attn.indexer", f"{group}indexer", layer)
    if layer < c.first_k_dense_replace:
        yield from _ffn(c, f"{prefix}.mlp", c.intermediate_size, f"{group}dense FFN", layer)
        return
    E = c.n_routed_experts
    yield Tensor(f"{prefix}.mlp.gate.weight", "BF16", (E, d), f"{group}router", "matrix", layer)
    if c.topk_method == "noaux_tc":
        name = f"{prefix}.mlp.gate.e_score_correction_bias"
        yield Tensor(name, "F32", (E,), f"{group}router", "vector", layer)
    for expert in range(E):
        name = f"{prefix}.mlp.experts.{expert}"
        yield from _ffn(c, name, c.moe_intermediate_size, f"{group}routed experts", layer)
    shared = c.n_shared_experts * c.moe_intermediate_size
    yield from _ffn(c, f"{prefix}.mlp.shared_experts", shared, f"{group}shared experts", layer)


def _multi_head(c: ModelConfig, prefix: str, group: str, layer: int) -> Iterator[Tensor]:
    d, width = c.hidden_size, c.hidden_size // c.num_attention_heads
    kv = (c.num_key_value_heads or c.num_attention_heads) * width
    for name, out, in_ in (("q_proj", d, d), ("k_proj", kv, d), ("v_proj", kv, d), ("o_proj", d, d)):
        yield from _matrix(c, f"{prefix}.{name}", out, in_, group, layer)


def _multi_head_latent(c: ModelConfig, prefix: str, group: str, layer: int) -> Iterator[Tensor]:
    """One latent of kv_lora_rank channels, from which every head makes its own key and value."""
    d, heads, rank = c.hidden_size, c.num_attention_heads, c.kv_lora_rank
    query = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
    if c.q_lora_rank:
        yield from _matrix(c, f"{prefix}.q_a_proj", c.q_lora_rank, d, group, layer)
        yield Tensor(f"{prefix}.q_a_layernorm.weight", "BF16", (c.q_lora_rank,), group, "vector", layer)
        yield from _matrix(c, f"{prefix}.q_b_proj", query, c.q_lora_rank, group, layer)
    else:
        yield from _matrix(c, f"{prefix}.q_proj", query, d, group, layer)
    yield from _matrix(c, f"{prefix}.kv_a_proj_with_mqa", rank + c.qk_rope_head_dim, d, group, layer)
    yield Tensor(f"{prefix}.kv_a_layernorm.weight", "BF16", (rank,), group, "vector", layer)
    out = heads * (c.qk_nope_head_dim + c.v_head_dim)
    yield from _matrix(c, f"{prefix}.kv_b_proj", out, rank, group, layer)
    yield from _matrix(c, f"{prefix}.o_proj", d, heads * c.v_head_dim, group, layer)


def _indexer_v32(c: ModelConfig, prefix: str, group: str, layer: int) -> Iterator[Tensor]:
    width = c.index_head_dim
    yield from _matrix(c, f"{prefix}.wq_b", c.index_n_heads * width, c.q_lora_rank, group, layer)
    yield from _matrix(c, f"{prefix}.wk", width, c.hidden_size, group, layer)
    for name in ("weight", "bias"):  # a LayerNorm, the only one of the family
        yield Tensor(f"{prefix}.k_norm.{name}", "F32", (width,), group, "vector", layer)
    shape = (c.index_n_heads, c.hidden_size)
    yield Tensor(f"{prefix}.weights_proj.weight", "BF16", shape, group, "matrix", layer)


def _ffn(c: ModelConfig, prefix: str, width: int, group: str, layer: int) -> Iterator[Tensor]:
    d = c.hidden_size
    for name, out, in_ in (("gate_proj", width, d), ("up_proj", width, d), ("down_proj", d, width)):
        yield from _matrix(c, f"{prefix}.{name}", out, in_, group, layer)


def _matrix(c: ModelConfig, name: str, out: int, in_: int, group: str, layer: int) -> Iterator[Tensor]:
    """V3 and V3.2 store their matrices in FP8 with one F32 scale a 128 x 128 tile; the older ones in BF16."""
    if c.quantization_config is None:
        yield Tensor(f"{name}.weight", "BF16", (out, in_), group, "matrix", layer)
        return
    tiles = (-(-out // c.fp8_tile), -(-in_ // c.fp8_tile))
    yield Tensor(f"{name}.weight", "F8_E4M3", (out, in_), group, "matrix", layer)
    yield Tensor(f"{name}.weight_scale_inv", "F32", tiles, group, "scale", layer)
