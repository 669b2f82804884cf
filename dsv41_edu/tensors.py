"""The tensor plan of V4.1: the name, dtype and shape of every tensor in the checkpoint, from the config.

Shapes of matrices are [out, in] as stored; y = M x. Names are the module names of the official inference
code. Everything else that counts (parameters, bytes, what a token touches) is a sum over this list.

| format | payload | scales |
|---|---|---|
| FP4 | I8 [out, in/2], two E2M1 codes a byte, the even input in the low nibble | E8M0 [out, in/32] |
| FP8 | F8_E4M3 [out, in] | E8M0 [ceil(out/32), ceil(in/32)], one a tile |
| Engram rows | F8_E4M3 [rows, 256] | E8M0 [rows, 8] |

Source: the headers of the released shards; their totals are in `tests/test_tensors.py`.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from dsv41_edu.config import ModelConfig

DTYPE_BYTES = {"I64": 8, "F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
SCALE_BLOCK = 32  # input channels under one scale of an FP4 row or an Engram row


class Tensor(NamedTuple):
    """One tensor of a checkpoint.

    `use` says what a token does with it: `matrix` multiplies an activation, `vector` is added or scales
    channels (norms, biases, sinks), `rows` is looked up, `scale` belongs to a payload, `table` holds integers.
    `layer` is None outside the layers; the drafter's block i is layer num_hidden_layers + i.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    group: str
    use: str
    layer: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def parameters(self) -> int:
        """Learned numbers: a byte of packed FP4 holds two, a scale or an integer table none."""
        return 0 if self.use in ("scale", "table") else prod(self.shape) * (2 if self.dtype == "I8" else 1)


def tensor_plan(config: ModelConfig) -> tuple[Tensor, ...]:
    """Every tensor of a V4.1 checkpoint. Raises ValueError for another generation (see `generations`)."""
    if config.model_type != "deepseek_v41":
        raise ValueError(f"model_type = {config.model_type!r}: expected 'deepseek_v41'")
    return (*_root(config), *_layers(config), *_drafter(config), *_vision(config))


def _root(c: ModelConfig) -> Iterator[Tensor]:
    V, d = c.vocab_size, c.hidden_size
    yield Tensor("embed.weight", "BF16", (V, d), "embedding", "rows")
    yield Tensor("head.weight", "BF16", (V, d), "head", "matrix")
    yield Tensor("norm.weight", "BF16", (d,), "norms", "vector")


def _layers(c: ModelConfig) -> Iterator[Tensor]:
    for layer in range(c.num_hidden_layers):
        prefix = f"layers.{layer}"
        yield from block(c, prefix, c.n_routed_experts, layer)
        yield from _global_attention(c, f"{prefix}.attn", layer)
        if layer in c.engram_layer_ids:
            rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
            yield from _engram(c, f"{prefix}.engram", rows, layer)


def block(c: ModelConfig, prefix: str, n_experts: int, layer: int, group: str = "") -> Iterator[Tensor]:
    """What a layer and a drafter block have in common: attention, two seams, router, experts, norms.

    `group` is put before the names of the groups.
    """
    d, heads, D = c.hidden_size, c.num_attention_heads, c.head_dim
    attention = f"{group}attention"
    grouped_in = heads * D // c.o_groups  # wo_a is block diagonal: each group of heads has its own rows
    for name, out, in_ in (
        ("wq_a", c.q_lora_rank, d),
        ("wq_b", heads * D, c.q_lora_rank),
        ("wkv", D, d),
        ("wo_a", c.o_groups * c.o_lora_rank, grouped_in),
        ("wo_b", d, c.o_groups * c.o_lora_rank),
    ):
        yield from fp8(f"{prefix}.attn.{name}", out, in_, c.fp8_tile, attention, layer)
    yield Tensor(f"{prefix}.attn.q_norm.weight", "BF16", (c.q_lora_rank,), attention, "vector", layer)
    yield Tensor(f"{prefix}.attn.kv_norm.weight", "BF16", (D,), attention, "vector", layer)
    yield Tensor(f"{prefix}.attn.attn_sink", "F32", (heads,), attention, "vector", layer)
    for name in ("attn_norm", "ffn_norm"):
        yield Tensor(f"{prefix}.{name}.weight", "BF16", (d,), f"{group}norms", "vector", layer)

    n = c.hc_mult
    coefficients = n * n + 2 * n  # residual map, input map, output map
    for seam in ("hc_attn", "hc_ffn"):
        yield Tensor(f"{prefix}.{seam}_fn", "F32", (coefficients, n * d), f"{group}mHC", "matrix", layer)
        yield Tensor(f"{prefix}.{seam}_base", "F32", (coefficients,), f"{group}mHC", "vector", layer)
        yield Tensor(f"{prefix}.{seam}_scale", "F32", (3,), f"{group}mHC", "vector", layer)

    yield Tensor(f"{prefix}.ffn.gate.weight", "BF16", (n_experts, d), f"{group}router", "matrix", layer)
    for bias in router_biases(c, layer):
        yield Tensor(f"{prefix}.ffn.gate.{bias}", "F32", (n_experts,), f"{group}router", "vector", layer)
    width = c.moe_intermediate_size
    for expert in range(n_experts):
        for name, out, in_ in (("w1", width, d), ("w2", d, width), ("w3", width, d)):
            yield from fp4(f"{prefix}.ffn.experts.{expert}.{name}", out, in_, f"{group}routed experts", layer)
    shared = width * c.n_shared_experts
    for name, out, in_ in (("w1", shared, d), ("w2", d, shared), ("w3", shared, d)):
        name = f"{prefix}.ffn.shared_experts.{name}"
        yield from fp8(name, out, in_, c.fp8_tile, f"{group}shared experts", layer)


def router_biases(c: ModelConfig, layer: int) -> tuple[str, ...]:
    """V4.1 keeps one selection bias per modality, V4 one, and a layer routed by a hash table none."""
    if c.model_type == "deepseek_v41":
        return ("bias", "bias_vl")
    return () if layer < c.num_hash_layers else ("bias",)


def _global_attention(c: ModelConfig, prefix: str, layer: int) -> Iterator[Tensor]:
    """Only a source layer makes compressed entries and index keys; only an index layer asks for them."""
    d, D, heads, width = c.hidden_size, c.head_dim, c.index_n_heads, c.index_head_dim
    if layer in c.kv_source_layer_ids:
        # a group of one token has nothing to weigh: no gate at ratio 1
        for name in ("wkv", "wgate") if c.compress_ratios[layer] > 1 else ("wkv",):
            name = f"{prefix}.compressor.{name}.weight"
            yield Tensor(name, "BF16", (D, d), "compressor", "matrix", layer)
        yield Tensor(f"{prefix}.compressor.norm.weight", "BF16", (D,), "compressor", "vector", layer)
        yield Tensor(f"{prefix}.indexer.wk.weight", "BF16", (width, D), "indexer", "matrix", layer)
        yield Tensor(f"{prefix}.indexer.k_norm.weight", "BF16", (width,), "indexer", "vector", layer)
    if layer in c.index_source_layer_ids:
        yield from fp8(f"{prefix}.indexer.wq_b", heads * width, c.q_lora_rank, c.fp8_tile, "indexer", layer)
        yield Tensor(f"{prefix}.indexer.weights_proj.weight", "BF16", (heads, d), "indexer", "matrix", layer)


def _engram(c: ModelConfig, prefix: str, rows: int, layer: int) -> Iterator[Tensor]:
    """A table of hashed n-gram rows, and the projection of a token's rows to n keys and one value."""
    d, n, width = c.hidden_size, c.hc_mult, c.engram_head_dim
    columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * width
    scales = (rows, width // SCALE_BLOCK)
    yield Tensor(f"{prefix}.embed.weight", "F8_E4M3", (rows, width), "Engram tables", "rows", layer)
    yield Tensor(f"{prefix}.embed.scale", "F8_E8M0", scales, "Engram tables", "scale", layer)
    yield from fp8(f"{prefix}.wkv", (n + 1) * d, columns, c.fp8_tile, "Engram projections", layer)
    for name in ("q_weight", "k_weight"):
        yield Tensor(f"{prefix}.{name}", "BF16", (n, d), "Engram projections", "vector", layer)


def _drafter(c: ModelConfig) -> Iterator[Tensor]:
    """DSpark: blocks with fewer experts, the backbone's embedding and head, and four small parts."""
    V, d, rank = c.vocab_size, c.hidden_size, c.dspark_markov_rank
    blocks, first = c.num_nextn_predict_layers, c.num_hidden_layers
    for i in range(blocks):
        yield from block(c, f"mtp.{i}", c.dspark_n_routed_experts, first + i, group="drafter: ")
    if not blocks:
        return
    targets, last = len(c.dspark_target_layer_ids), first + blocks - 1
    yield Tensor("mtp.0.main_norm.weight", "BF16", (d,), "drafter: norms", "vector", first)
    yield from fp8("mtp.0.main_proj", d, targets * d, c.fp8_tile, "drafter: main projection", first)
    end = f"mtp.{blocks - 1}"
    yield Tensor(f"{end}.norm.weight", "BF16", (d,), "drafter: norms", "vector", last)
    markov = "drafter: Markov head"
    yield Tensor(f"{end}.markov_head.embed.weight", "BF16", (V, rank), markov, "rows", last)
    yield Tensor(f"{end}.markov_head.head.weight", "BF16", (V, rank), markov, "matrix", last)
    if c.dspark_markov_head_type == "gated":
        yield Tensor(f"{end}.markov_head.gate_proj.weight", "BF16", (rank, d + rank), markov, "matrix", last)
        yield Tensor(f"{end}.markov_head.gate_proj.bias", "BF16", (rank,), markov, "vector", last)
    if c.dspark_markov_head_type == "rnn":
        yield Tensor(f"{end}.markov_head.joint_proj.weight", "BF16", (3 * rank, 2 * rank + d), markov, "matrix", last)
        yield Tensor(f"{end}.markov_head.joint_proj.bias", "BF16", (3 * rank,), markov, "vector", last)
    name = f"{end}.confidence_head.proj.weight"
    yield Tensor(name, "BF16", (1, d + rank), "drafter: confidence head", "matrix", last)


def _vision(c: ModelConfig) -> Iterator[Tensor]:
    """A ViT in BF16 and the two matrices that align a merged patch with the residual stream."""
    v, d = c.vision_config, c.hidden_size
    if v is None:
        return
    h, wide = v.hidden_size, v.hidden_size * v.downsample_ratio**2

    def linear(name: str, out: int, in_: int, bias: bool) -> Iterator[Tensor]:
        yield Tensor(f"{name}.weight", "BF16", (out, in_), "vision", "matrix")
        if bias:
            yield vector(f"{name}.bias", out)

    def vector(name: str, size: int) -> Tensor:
        return Tensor(name, "BF16", (size,), "vision", "vector")

    for name in ("image_start", "image_end", "image_newline"):
        yield vector(name, d)
    yield from linear("vision.patch_embed.proj", h, 3 * v.patch_size**2, bias=True)
    for i in range(v.num_hidden_layers):
        prefix = f"vision.blocks.{i}"
        yield from linear(f"{prefix}.attn.wqkv", 3 * h, h, bias=True)
        yield from linear(f"{prefix}.attn.wo", h, h, bias=True)
        yield from linear(f"{prefix}.mlp.w1", 2 * v.intermediate_size, h, bias=False)
        yield from linear(f"{prefix}.mlp.w2", h, v.intermediate_size, bias=False)
        yield vector(f"{prefix}.norm1.weight", h)
        yield vector(f"{prefix}.norm2.weight", h)
    yield vector("vision.norm.weight", h)
    yield from linear("aligner.w1", d, wide, bias=True)
    yield from linear("aligner.w2", d, d, bias=True)


def fp8(name: str, out: int, in_: int, tile: int, group: str, layer: int | None) -> Iterator[Tensor]:
    """An FP8 matrix and its power-of-two scales, one a `tile` x `tile` square (the last ones may be cut)."""
    yield Tensor(f"{name}.weight", "F8_E4M3", (out, in_), group, "matrix", layer)
    yield Tensor(f"{name}.scale", "F8_E8M0", (-(-out // tile), -(-in_ // tile)), group, "scale", layer)


def fp4(name: str, out: int, in_: int, group: str, layer: int | None) -> Iterator[Tensor]:
    """An FP4 matrix, two codes a byte, and its scales, one for 32 input channels of a row."""
    yield Tensor(f"{name}.weight", "I8", (out, in_ // 2), group, "matrix", layer)
    yield Tensor(f"{name}.scale", "F8_E8M0", (out, in_ // SCALE_BLOCK), group, "scale", layer)
