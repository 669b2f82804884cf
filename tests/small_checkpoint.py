"""A model of half a million numbers with each part of the large one, to be saved and loaded."""

from pathlib import Path

import torch
from small_models import drawn

from dsv41_edu.config import ModelConfig, preset
from dsv41_edu.engram.hashing import NgramHash
from dsv41_edu.model import Transformer

# rank 72 gives ragged tiles
CONFIG = preset("mini").replace(
    vocab_size=512,
    image_token_id=510,
    dspark_noise_token_id=511,
    hidden_size=64,
    moe_intermediate_size=32,
    q_lora_rank=72,
    n_routed_experts=3,
    dspark_n_routed_experts=2,
    num_hidden_layers=5,
    compress_ratios=(0, 0, 2, 1, 1, 0, 0),
    kv_source_layer_ids=(2, 3),
    index_source_layer_ids=(2, 3, 4),
    candidate_source_layer_id=3,
    dspark_target_layer_ids=(2, 3, 4),
    engram_layer_ids=(1, 3),
    engram_vocab_size=500,
    engram_num_embeddings=tuple(NgramHash((1, 3), 4, 2, 500, 400, 2).rows),
    engram_compressed_vocab_size=400,
)


def small_model(drafter: bool = False, config: ModelConfig = CONFIG) -> Transformer:
    """Weights and router biases from seeds, in fp32."""
    model = Transformer(config, torch.arange(512) % 400, drafter=drafter).eval().requires_grad_(False)
    for i, tensor in enumerate(model.state_dict().values()):
        tensor.copy_(drawn(*tensor.shape, seed=i) * tensor.shape[-1] ** -0.5)
    return model


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
