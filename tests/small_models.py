"""Small models with every part of the large one: a public one whose numbers are known, and others with drawn weights.

`vectors/whole_A.*`: 10 layers of width 64, sources at layers 2 and 4 (ratio 2) and 6 (ratio 1, the candidates'),
a window of 8, and all that it computes on two rows of 48 tokens.
"""

import json
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file

from dsv41_edu.attention.cache import Cache
from dsv41_edu.config import ModelConfig, preset
from dsv41_edu.model import Run, Transformer
from dsv41_edu.tensors import tensor_plan

VECTORS = Path(__file__).parent / "vectors"
CASE = json.loads((VECTORS / "whole_A.json").read_text())
CONFIG = ModelConfig.from_dict(CASE["config"])
IO = load_file(VECTORS / "whole_A_io.safetensors")
IDS = IO["text.input_ids"].long()
IMAGE = IO["image.input_ids"].long()
WEIGHTS = {n: w for n, w in load_file(VECTORS / "whole_A_weights.safetensors").items() if not n.startswith("mtp.")}

# three sources of groups of three, two and four tokens, and a window that no group fits
ODD = CONFIG.replace(sliding_window=5, compress_ratios=(0, 0, 3, 3, 2, 2, 4, 4, 4, 4, 0, 0))
# every layer reads every entry that it sees
OPEN = CONFIG.replace(index_topk=48, candidate_topk_blocks=16)
# the miniature with its vision tower, narrower
SEEING = preset("mini").replace(hidden_size=64, moe_intermediate_size=32)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def drawn_ids(config: ModelConfig, rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Int64 [rows, tokens], none of them an image's."""
    high = min(config.vocab_size, config.image_token_id)
    return torch.randint(0, high, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def public_model(dtype: torch.dtype = torch.float64, config: ModelConfig = CONFIG) -> Transformer:
    """That of the public vectors, in evaluation, or with its weights and another config of the same shapes."""
    model = Transformer(config, IO["token_map"], drafter=False).to(dtype)
    model.load_state_dict({name: w.to(dtype) for name, w in WEIGHTS.items()})
    return model.eval().requires_grad_(False)


def bf16_model() -> Transformer:
    """The public one as a checkpoint is: what the plan keeps in F32 stays so."""
    model, wide = public_model(torch.float32), {t.name for t in tensor_plan(CONFIG) if t.dtype == "F32"}
    for name, p in model.named_parameters():
        p.data = p.data if name in wide else p.data.bfloat16()
    return model


def drawn_model(config: ModelConfig, dtype: torch.dtype = torch.float64, drafter: bool = False) -> Transformer:
    """Weights from a seed, none of them at a value where a part of the model would do nothing."""
    token_map = torch.arange(config.vocab_size) % config.engram_compressed_vocab_size
    model = Transformer(config, token_map, drafter=drafter).to(dtype)
    with torch.no_grad():
        for i, (_, p) in enumerate(model.named_parameters()):
            noise = drawn(*p.shape, seed=i)
            p.copy_(noise * p.shape[-1] ** -0.5 if p.dim() > 1 else p.clamp(-1, 1) + 0.3 * noise)
    return model.eval().requires_grad_(False)


def assert_same_cache(cache: Cache, expected: Cache) -> None:
    """Whether two caches hold the same tokens: what lies beyond their lengths, or in no slot yet, is of no matter."""
    assert torch.equal(cache.lengths, expected.lengths)
    assert torch.equal(cache.history, expected.history)
    for row, end in enumerate(cache.lengths.tolist()):
        for layer, (ring, other) in enumerate(zip(cache.windows, expected.windows, strict=True)):
            held = min(end, ring.shape[1])  # below that, slots in order; then all of them
            torch.testing.assert_close(
                ring[row, :held], other[row, :held], msg=lambda m, at=layer: f"layer {at}: {m}"
            )
        for source, r in cache.ratios.items():
            for name, size in (("entries", end // r), ("keys", end // r), ("open", end % r)):
                ours, theirs = (getattr(c, name)[source][row, :size] for c in (cache, expected))
                torch.testing.assert_close(ours, theirs, msg=lambda m, at=(name, source): f"{at}: {m}")


def watched(model: Transformer, *arguments, **options) -> tuple[Run, dict[str, list]]:
    """What `Transformer.run` returns, and by layer what its parts gave: names as in the public vectors."""
    found, handles = defaultdict(list), []

    def watch(name, module, part=lambda out: out):
        handles.append(module.register_forward_hook(lambda _, __, out: found[name].append(part(out))))

    for layer in model.layers:
        watch("streams_after_layer", layer, lambda residual: residual.streams)
        watch("attn_norm_out", layer.attn_norm)
        watch("attn_out", layer.attn)
        watch("ffn_out", layer.ffn)
        watch("router_weights", layer.ffn.gate, lambda out: out[0])
        watch("router_indices", layer.ffn.gate, lambda out: out[1])
    run = model.run(*arguments, **options)
    for handle in handles:
        handle.remove()
    return run, found
