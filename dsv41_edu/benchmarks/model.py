"""The assembled model: prompt and decode beside the public library's V4 of equal sizes, context, loading, "meta".

Both have four layers of the same width, heads, experts and window. The library's V4 reads entries of 4 tokens with an
indexer in two layers; ours entries of 2 and 1 in three, and an Engram. Weights are random: time depends on shapes.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from dsv41_edu import checkpoint
from dsv41_edu.attention.indexer import hide, index_scores
from dsv41_edu.attention.sparse_attention import sparse_attention
from dsv41_edu.benchmarks.gpu import GpuCase, Running, contestants, rms
from dsv41_edu.benchmarks.harness import Case, Skip
from dsv41_edu.config import ModelConfig, preset
from dsv41_edu.experiments import text
from dsv41_edu.generate import MINI, generate
from dsv41_edu.model import Transformer

PROMPT = 512
PROMPT_TEXT, WRITTEN = "In the beginning", 120


def sizes() -> ModelConfig:
    """Four layers: a window alone, a source at ratio 2, one that reuses it, a source at ratio 1."""
    return preset("mini").replace(
        hidden_size=512, moe_intermediate_size=256, num_hidden_layers=4, num_attention_heads=8, head_dim=64,
        qk_rope_head_dim=32, q_lora_rank=128, o_lora_rank=64, o_groups=2, n_routed_experts=16, num_experts_per_tok=2,
        sliding_window=64, compress_ratios=(0, 2, 2, 1), kv_source_layer_ids=(1, 3), index_source_layer_ids=(1, 3),
        candidate_source_layer_id=3, candidate_topk_blocks=64, index_n_heads=4, index_head_dim=32, index_topk=64,
        engram_layer_ids=(1, 3), num_nextn_predict_layers=0, dspark_target_layer_ids=(1, 2, 3), vision_config=None,
    )  # fmt: skip


def library(c: ModelConfig) -> torch.nn.Module:
    """The public library's V4 of these sizes. Raises Skip without the library."""
    try:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    except ImportError:
        raise Skip("transformers is not installed") from None
    names = (
        "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim "
        "qk_rope_head_dim q_lora_rank o_lora_rank o_groups n_routed_experts n_shared_experts num_experts_per_tok "
        "sliding_window index_n_heads index_head_dim index_topk max_position_embeddings hc_mult"
    ).split()
    kinds = ["sliding_attention", "compressed_sparse_attention"] * 2
    config = DeepseekV4Config(
        **{n: getattr(c, n) for n in names}, num_key_value_heads=1, layer_types=kinds, num_hash_layers=0
    )
    return DeepseekV4ForCausalLM(config).eval()


def ours(c: ModelConfig) -> Transformer:
    """The model with a token map that needs no tokenizer."""
    return Transformer(c, torch.arange(c.vocab_size) % c.engram_compressed_vocab_size).eval()


def decoder(model: Transformer, context: int) -> Callable:
    """One token after so many; the cache is left as it was."""
    ids = torch.arange(context).unsqueeze(0) % 2000  # none of them an image
    with torch.no_grad():
        cache = model.cache(1, context + 8)
        cache.commit(model.run(ids, cache).chunk, torch.tensor([context]))
    return torch.no_grad()(lambda: model.logits(model.run(ids[:, :1], cache).hidden))


def library_decoder(peer: torch.nn.Module, ids: torch.Tensor) -> Callable:
    """One token a call; its cache grows by it."""
    with torch.no_grad():
        cache = peer(ids, use_cache=True, logits_to_keep=1).past_key_values
    return torch.no_grad()(lambda: peer(ids[:, :1], cache=cache, use_cache=True))


def lazily(build: Callable[[], Callable]) -> Callable:
    """A contestant that is built when it is first called, which is its warm-up."""
    built = cache(build)
    return lambda: built()()


def writer(load: Callable[[], Transformer], speculate: bool) -> Callable:
    """The shipped miniature writing on, with compiled seams."""
    model = load()
    model.compile_seams()
    prompt = [model.config.bos_token_id, *text.tokenizer().encode(PROMPT_TEXT, add_special_tokens=False).ids]
    return partial(generate, model, [prompt], WRITTEN, speculate=speculate)


def cases() -> list[Case]:
    """A prompt, a token, a token after longer contexts, the full model without memory, the shipped weights."""
    c, ids = sizes(), torch.arange(PROMPT).unsqueeze(0)
    eager, peer = cache(partial(ours, c)), cache(partial(library, c))

    @cache
    def compiled() -> Transformer:
        model = ours(c)
        model.compile_seams()
        return model

    def prompt(model: Transformer) -> Callable:
        return torch.no_grad()(lambda: model.logits(model.run(ids, model.cache(1, PROMPT)).hidden[:, -1:]))

    def library_prompt() -> Callable:
        return torch.no_grad()(partial(peer(), ids, use_cache=True, logits_to_keep=1))

    prompts = {
        "ours, compiled seams": lazily(lambda: prompt(compiled())),
        "ours": lazily(lambda: prompt(eager())),
        "transformers": lazily(library_prompt),
    }
    tokens = {
        "ours, compiled seams": lazily(lambda: decoder(compiled(), PROMPT)),
        "ours": lazily(lambda: decoder(eager(), PROMPT)),
        "transformers": lazily(lambda: library_decoder(peer(), ids)),
    }
    contexts = {f"context {n}": lazily(partial(lambda n: decoder(eager(), n), n)) for n in (512, 1024, 2048, 4000)}
    shape = f"4 layers d={c.hidden_size} heads={c.num_attention_heads} E={c.n_routed_experts} fp32 CPU"
    flash = preset("v41_flash")
    found = [
        Case("model.prefill", f"{PROMPT} tokens, {shape}", prompts),
        Case("model.decode", f"one token after {PROMPT}, {shape}", tokens),
        Case("model.context", f"one token, {shape}", contexts),
        Case("model.meta", "V4.1-Flash, built without memory", {"ours": partial(Transformer, flash, device="meta")}),
    ]
    if MINI.exists():
        load = partial(checkpoint.load, MINI, dtype=torch.float32)
        found.append(Case("model.load", "the miniature, from its checkpoint", {"ours": load}))
        ways = {"with the drafter": True, "without": False}
        writers = {name: lazily(partial(writer, load, speculate)) for name, speculate in ways.items()}
        found.append(Case("model.draft", f"{WRITTEN} tokens of the miniature after a prompt, greedy, B=1", writers))
    return found


# ---- on a GPU


def gpu_cases(dry: bool) -> list[GpuCase]:
    """Attention to a window and 512 entries, and scores of all entries, of V4.1 with a context of 32,768 tokens."""
    c, N = preset("v41_flash"), 64 if dry else 32_768
    if dry:
        small = {"num_attention_heads": 8, "head_dim": 64, "qk_rope_head_dim": 16, "index_n_heads": 4}
        c = c.replace(index_head_dim=32, index_topk=8, **small)
    cases = []
    for S in (3,) if dry else (1, 64, 1024):
        H, D = c.num_attention_heads, c.head_dim
        work = f"q bf16 [{S}, {H}, {D}], a window of {c.sliding_window} and {c.index_topk} of {N} entries"
        cases.append(GpuCase(f"sparse_attention.{S}", work, partial(_attention, c, S, N)))
    for S in (3,) if dry else (1, 64, 1024):
        work = f"q bf16 [{S}, {c.index_n_heads}, {c.index_head_dim}], keys of {N} entries"
        cases.append(GpuCase(f"index_scores.{S}", work, partial(_scores, c, S, N)))
    return cases


def _drawn(device: torch.device, seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).bfloat16()


def _attention(c: ModelConfig, S: int, N: int, device: torch.device) -> Running:
    from kernels.sparse_attention import fused_sparse_attention

    H, D, W, K = c.num_attention_heads, c.head_dim, c.sliding_window, c.index_topk
    q, window, entries = (_drawn(device, i, 1, n, D) for i, n in enumerate((S * H, W + S, N)))
    near = torch.arange(S, device=device).unsqueeze(1) + torch.arange(1, W + 1, device=device)
    chosen = torch.rand(S, N, generator=torch.Generator(device).manual_seed(3), device=device).topk(K).indices
    sink, scale = torch.zeros(H, device=device), D**-0.5
    arguments = q.view(1, S, H, D), window, near[None], entries, chosen.sort().values[None], sink, scale

    def error():
        some = min(S, 8)  # the float64 form copies each row that a token reads
        first = [a if a.shape[:2] != (1, S) else a[:, :some] for a in arguments[:-1]]
        exact = sparse_attention(*(a.double() if a.is_floating_point() else a for a in first), scale)
        return {"rms": rms(fused_sparse_attention(*first, scale), exact)}

    read = min(S * K, N) + W + S  # rows, each once
    moved = 2 * D * (2 * S * H + read) + 8 * S * (W + K)
    ours = partial(fused_sparse_attention, *arguments)
    return Running(contestants(ours, sparse_attention, arguments, device), error, moved, 4 * S * H * (W + K) * D)


def _scores(c: ModelConfig, S: int, N: int, device: torch.device) -> Running:
    from kernels.index_scores import fused_index_scores

    def eager(q: Tensor, k: Tensor, w: Tensor, seen: Tensor) -> Tensor:
        return hide(index_scores(q, k, w), seen)

    H, D = c.index_n_heads, c.index_head_dim
    q, k, w = _drawn(device, 0, 1, S, H, D), _drawn(device, 1, 1, N, D), _drawn(device, 2, 1, S, H)
    arguments = q, k, w, torch.arange(N - S + 1, N + 1, device=device)[None]

    def error():
        some = min(S, 8)
        first = [a if a.shape[:2] != (1, S) else a[:, :some] for a in arguments]
        found, exact = fused_index_scores(*first), eager(*(a.double() for a in first[:3]), first[3])
        visible = ~exact.isneginf()
        return {"rms": rms(found[visible], exact[visible])}

    moved = 2 * (q.numel() + k.numel() + w.numel()) + 8 * S + 4 * S * N
    ours = partial(fused_index_scores, *arguments)
    return Running(contestants(ours, eager, arguments, device), error, moved, 2 * S * H * D * N)
