"""Parts that V4.1 shares with V4, against the public library's V4 on equal weights.

There query heads are normed (left out here), a ratio of 128 reads every entry without an index, and a place in the
group has a bias (zero here): with another ratio that is a source of ours in its dense form. All in float32.
"""

import pytest
import torch
from small_models import drawn
from torch import nn

from dsv41_edu.attention.attention import Attention
from dsv41_edu.attention.cache import Chunk
from dsv41_edu.attention.indexer import Indexer, index_scores
from dsv41_edu.attention.rope import frequencies, layer_frequencies, rotate, turns
from dsv41_edu.config import preset
from dsv41_edu.moe.experts import MoE

library = pytest.importorskip("transformers", reason="parity needs the public library")
v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4", reason="its V4 is not there")

S, FP32 = 21, torch.float32
OURS = preset("mini").replace(
    hidden_size=64,
    sliding_window=5,
    swiglu_limit=0.5,
    rms_norm_eps=1e-6,
    q_lora_rank=32,
    moe_intermediate_size=32,
)


def peer_config(ratio=2):
    c = OURS
    config = library.DeepseekV4Config(
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        head_dim=c.head_dim,
        q_lora_rank=c.q_lora_rank,
        qk_rope_head_dim=c.qk_rope_head_dim,
        o_groups=c.o_groups,
        o_lora_rank=c.o_lora_rank,
        sliding_window=c.sliding_window,
        rms_norm_eps=c.rms_norm_eps,
        index_n_heads=c.index_n_heads,
        index_head_dim=c.index_head_dim,
        moe_intermediate_size=c.moe_intermediate_size,
        n_routed_experts=c.n_routed_experts,
        num_experts_per_tok=c.num_experts_per_tok,
        routed_scaling_factor=c.routed_scaling_factor,
        swiglu_limit=c.swiglu_limit,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "heavily_compressed_attention"],
        mlp_layer_types=["moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": ratio},
        rope_parameters={
            "rope_type": "yarn",
            "factor": c.rope_scaling.factor,
            "beta_fast": c.rope_scaling.beta_fast,
            "beta_slow": c.rope_scaling.beta_slow,
            "original_max_position_embeddings": c.rope_scaling.original_max_position_embeddings,
        },
    )
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def fill(ours, theirs, names):
    """Drawn weights for ours, and the same under their names."""
    with torch.no_grad():
        for i, (name, its) in enumerate(names.items()):
            p = ours.get_parameter(name)
            p.copy_(drawn(*p.shape, seed=i) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 1))
            theirs.get_parameter(its).copy_(p)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_rotary():
    rotary, x, positions = (
        v4.DeepseekV4RotaryEmbedding(peer_config()),
        drawn(2, 3, S, 64, dtype=FP32),
        torch.arange(S),
    )
    for ratio, name in ((0, "main"), (2, "compress")):
        freqs = layer_frequencies(OURS, ratio)
        assert (getattr(rotary, f"{name}_inv_freq") / freqs - 1).abs().max() < 1e-6
        cos, sin = rotary(x, positions.expand(2, -1), layer_type=name)
        turn = turns(positions, freqs, FP32)
        close(rotate(x, turn), v4.apply_rotary_pos_emb(x, cos, sin))
        close(rotate(x, turn.conj()), v4.apply_rotary_pos_emb(x, cos, -sin))
    assert (layer_frequencies(OURS, 2) / frequencies(16, 160000.0) < 0.99).any(), "something is interpolated"


ATTENTION = {
    "wq_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_norm.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv.weight": "kv_proj.weight",
    "kv_norm.weight": "kv_norm.weight",
    "wo_a.weight": "o_a_proj.weight",
    "wo_b.weight": "o_b_proj.weight",
    "attn_sink": "sinks",
}
COMPRESSOR = {
    "compressor.wkv.weight": "compressor.kv_proj.weight",
    "compressor.wgate.weight": "compressor.gate_proj.weight",
    "compressor.norm.weight": "compressor.kv_norm.weight",
}


@pytest.mark.parametrize(("layer", "ratio"), [(0, 0), (2, 2), (2, 3)])
def test_attention(layer, ratio):
    """Of a window alone, and of a source that reads all it sees: sink, grouped output, turn back, groups, YaRN."""
    ratios = [r if r != 2 else ratio for r in OURS.compress_ratios] if ratio else OURS.compress_ratios
    ours = Attention(OURS.replace(compress_ratios=tuple(ratios)), layer)
    config = peer_config(ratio or 2)
    theirs = v4.DeepseekV4Attention(config, 1 if ratio else 0)
    theirs.q_b_norm = nn.Identity()
    fill(ours, theirs, ATTENTION | (COMPRESSOR if ratio else {}))
    x, positions = drawn(2, S, 64, seed=99, dtype=FP32), torch.arange(S).expand(2, -1)
    distance = torch.arange(S).unsqueeze(1) - torch.arange(S)
    mask = torch.zeros(2, 1, S, S).masked_fill((distance < 0) | (distance >= OURS.sliding_window), float("-inf"))
    rotary = v4.DeepseekV4RotaryEmbedding(config)
    embeddings = {name: rotary(x, positions, layer_type=name) for name in ("main", "compress")}
    with torch.no_grad():
        if ratio:
            theirs.compressor.position_bias.zero_()
        expected, _ = theirs(x, embeddings, positions, mask)
        close(ours(x, Chunk.of(ours.config, (2, S), FP32, None, dense=True)), expected)


def test_index_scores():
    indexer, scorer = Indexer(64, 32, 64, 4, 32, 1e-6, makes_keys=True), v4.DeepseekV4IndexerScorer(peer_config())
    fill(indexer, scorer, {"weights_proj.weight": "weights_proj.weight"})
    x, k = drawn(2, S, 64, dtype=FP32), drawn(2, 9, 32, seed=1, dtype=FP32)
    turn = turns(torch.arange(S), frequencies(16, 10000.0), FP32)
    with torch.no_grad():
        q, w = indexer.queries(x, drawn(2, S, 32, seed=2, dtype=FP32), turn)
        close(index_scores(q, k, w), scorer(q, k, x))


def test_router_and_experts():
    """A whole block: affinities, a bias that chooses and doesn't weigh, clamped experts, the shared one."""
    ours, theirs = MoE(OURS), v4.DeepseekV4SparseMoeBlock(peer_config(), 0)
    with torch.no_grad():
        for i, p in enumerate(ours.parameters()):
            p.copy_(drawn(*p.shape, seed=i) * p.shape[-1] ** -0.5)
        ours.gate.bias.copy_(drawn(OURS.n_routed_experts, seed=50))
        theirs.gate.weight.copy_(ours.gate.weight)
        theirs.gate.e_score_correction_bias.copy_(ours.gate.bias)
        theirs.experts.gate_up_proj.copy_(ours.experts.w13)
        theirs.experts.down_proj.copy_(ours.experts.w2)
        w1, w3 = ours.shared_experts.w13[0].chunk(2)
        for name, w in (("gate_proj", w1), ("up_proj", w3), ("down_proj", ours.shared_experts.w2[0])):
            getattr(theirs.shared_experts, name).weight.copy_(w)
        x = drawn(2, S, 64, seed=99, dtype=FP32)
        close(ours(x), theirs(x))
        weights, indices = ours.gate(x)
        _, their_weights, their_indices = theirs.gate(x)
        order = their_indices.view_as(indices).argsort(-1)
        assert torch.equal(indices.sort(-1).values, their_indices.view_as(indices).gather(-1, order))
        close(weights.gather(-1, indices.argsort(-1)), their_weights.view_as(weights).gather(-1, order))
