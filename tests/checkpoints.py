"""Small checkpoints in the released layout: numbered shards, an index, each Engram module in a shard of its own."""

import copy
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsv41_edu.config import ModelConfig
from dsv41_edu.tensors import Tensor, tensor_plan

TORCH_DTYPES = {
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
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


def shard_names(n: int) -> list[str]:
    return [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]


def layout(config: ModelConfig, body_shards: int = 2) -> dict[str, list[Tensor]]:
    """Shard name to its tensors: the body cut in equal parts, then one shard for each Engram module."""
    plan = tensor_plan(config)
    engrams = [f"layers.{layer}.engram." for layer in config.engram_layer_ids]
    body = [t for t in plan if not t.name.startswith(tuple(engrams))]
    step = -(-len(body) // body_shards)
    parts = [body[i : i + step] for i in range(0, len(body), step)]
    parts += [[t for t in plan if t.name.startswith(prefix)] for prefix in engrams]
    return dict(zip(shard_names(len(parts)), parts, strict=True))


def write_checkpoint(folder: Path, config: ModelConfig, preset: str) -> Path:
    """Random bytes of the right dtype and shape; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(CONFIGS / f"{preset}.json", folder / "config.json")
    generator = torch.Generator().manual_seed(0)
    weight_map, total = {}, 0
    for file, tensors in layout(config).items():
        data = {}
        for t in tensors:
            raw = torch.randint(0, 256, (t.nbytes,), dtype=torch.uint8, generator=generator)
            data[t.name] = raw.view(TORCH_DTYPES[t.dtype]).reshape(t.shape)
            weight_map[t.name] = file
            total += t.nbytes
        save_file(data, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
