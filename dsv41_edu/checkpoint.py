"""The official checkpoint, saved and loaded: tensors by the modules' names, in the dtypes of the tensor plan.

    save:  values -> encode(decode(encode(values))) -> shards
    load:  headers held against the plan -> memory foreseen -> shards -> decode -> the model's own storage

Encoding twice makes the stored bytes depend on the stored values alone: a block's largest value may round down to
where a smaller scale would do, and the second pass takes that scale. The values are those of encoding once, and what
was loaded is saved to the same bytes. Sources: V4.1 checkpoint layout; official inference code (`wo_a` is decoded).
"""

import json
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu import quantization as q
from dsv41_edu.config import ModelConfig
from dsv41_edu.engram.module import Engram
from dsv41_edu.engram.table import EngramTable
from dsv41_edu.engram.vocabulary import CompressedVocabulary
from dsv41_edu.headers import Problem, compare
from dsv41_edu.model import Transformer
from dsv41_edu.moe.experts import Experts, QuantizedExperts
from dsv41_edu.shards import DTYPES, Rows, Shards, document, pieces, replacing, write_shards
from dsv41_edu.tensors import Tensor as Planned
from dsv41_edu.tensors import tensor_plan

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SHOWN = 20  # problems that an error's text names
# FP8 matrices whose values are read beside their product, so they are never kept as stored
READ = (".attn.wo_a", ".engram.wkv")


class CheckpointError(ValueError):
    """A checkpoint, or a model to be saved, that differs from the plan; `problems` holds each difference."""

    def __init__(self, source: str, problems: list[Problem]):
        self.problems = problems
        text = [f"{p.kind}: {p.name}: found {p.found}, expected {p.expected}" for p in problems[:SHOWN]]
        rest = [f"and {len(problems) - SHOWN:,} more"] if len(problems) > SHOWN else []
        super().__init__("\n  ".join([f"{source}: {len(problems):,} difference(s) from the plan", *text, *rest]))


class QuantizedLinear(nn.Module):
    """y = decode(weight, scale) x: an FP8 matrix as stored, E4M3 [out, in] and E8M0, one for a tile of 32 x 32."""

    def __init__(self, weight: Tensor, scale: Tensor):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """[..., out] of x [..., in], in x's dtype."""
        return F.linear(x, q.fp8_tiles_decode(self.weight, self.scale, x.dtype))


def save(
    model: Transformer,
    folder: str | Path,
    *,
    shard_bytes: int = 5 * 10**9,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a checkpoint: config.json, shards of about `shard_bytes`, their index, tokenizer.json if one is given.

    A model without a drafter gives a checkpoint without `mtp.*`. Beside the model some rows of one tensor are in
    memory at a time. An older checkpoint in the folder is replaced whole or not at all (`shards.replacing`).
    Raises CheckpointError for tensors that aren't those of the config and for a value that isn't finite,
    FileExistsError for a folder with other files in it, OSError for a full disk.
    """
    folder, state, plan = Path(folder).resolve(), held(model), planned(model.config)
    if model.mtp is None:
        plan = without_drafter(plan)
    if problems := differences(state, plan):
        raise CheckpointError("model", problems)
    scales = {t.name: t for t in plan if t.use == "scale"}
    with replacing(folder, [CONFIG] if tokenizer is None else [CONFIG, TOKENIZER]) as new:
        text = json.dumps(document(model.config), indent=2) + "\n"
        (new / CONFIG).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(str(new / TOKENIZER))
        write_shards(new, plan, shard_bytes, lambda t: stored_rows(t, scales.get(scale_of(t.name)), state))


def load(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    keep: bool = False,
    tables: str = "memory",
    device: torch.device | str = "cpu",
) -> Transformer:
    """The model of a checkpoint in the official layout, without a drafter where there is no `mtp.*`.

    dtype: of the weights, bfloat16, float32 or float64; what is stored in F32 stays at least that. keep: quantised
    matrices stay as stored, and are decoded on the way. tables: "memory", the Engram's rows in `dtype`, or "mapped",
    rows read from the shard as they are asked for. With a tokenizer.json in the folder the model has its token map;
    else `set_token_map` is the caller's. Every header is held against the plan before a weight is read.
    Raises CheckpointError for tensors that aren't those of the config and for values that aren't finite (NaN is what
    a scale byte of 255 means; a mapped table isn't read), ConfigError, MemoryError before anything is allocated for
    a model that the device can't hold, ValueError for options and tokenizers that don't fit, OSError, also for a
    folder that is replaced meanwhile.
    """
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"dtype = {dtype}: expected torch.bfloat16, torch.float32 or torch.float64")
    if tables not in ("memory", "mapped"):
        raise ValueError(f"tables = {tables!r}: expected 'memory' or 'mapped'")
    folder = Path(folder)
    opened = folder.stat().st_ino
    config = ModelConfig.from_json(folder / CONFIG)
    plan = plan_of(folder, config)
    model = skeleton(config, plan, dtype, keep, tables)
    if (folder / TOKENIZER).exists():
        model.set_token_map(read_token_map(folder / TOKENIZER, config))
    available, needed = available_memory(device), nbytes(model)
    if available is not None and needed > available:
        least = nbytes(skeleton(config, plan, torch.bfloat16, keep=True, tables="mapped"))
        raise MemoryError(
            f"{folder}: dtype = {dtype}, keep = {keep}, tables = {tables!r} need {needed / 2**30:,.1f} GiB, "
            f"{available / 2**30:,.1f} GiB available on {device}; bfloat16, keep = True and tables = 'mapped' "
            f"need {least / 2**30:,.1f} GiB"
        )
    model.to_empty(device=device)
    shards = Shards(folder)
    fill(held(model), plan, shards)
    if tables == "mapped":
        for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
            path, _ = shards.places[f"layers.{layer}.engram.embed.weight"]
            model.layers[layer].engram.table = EngramTable.open(path, layer, rows, config.engram_head_dim)
    if folder.stat().st_ino != opened:  # else weights of two checkpoints could mix
        raise OSError(f"{folder}: replaced by another checkpoint while it was read")
    return model


def planned(config: ModelConfig) -> list[Planned]:
    """The tensor plan. Raises ValueError for another generation, and for FP8 tiles that aren't 32 x 32."""
    plan = list(tensor_plan(config))
    if config.fp8_tile != q.BLOCK:
        raise ValueError(f"weight_block_size = {config.fp8_tile}: expected {q.BLOCK}")
    return plan


def without_drafter(plan: list[Planned]) -> list[Planned]:
    """The backbone's tensors."""
    return [t for t in plan if not t.name.startswith("mtp.")]


def scale_of(name: str) -> str:
    """Where the scales of `X.weight` would be."""
    return name.removesuffix("weight") + "scale"


def codec(t: Planned) -> tuple[Callable, Callable, int]:
    """How a quantised tensor is encoded and decoded, and how many of its rows share a row of scales."""
    if t.dtype == "I8":
        return q.mxfp4_encode, q.mxfp4_decode, 1
    if t.use == "rows":
        return q.fp8_rows_encode, q.fp8_rows_decode, 1
    return q.fp8_tiles_encode, q.fp8_tiles_decode, q.BLOCK


def held(model: nn.Module) -> dict[str, Tensor | np.ndarray]:
    """A model's tensors by their names in a checkpoint, as views; kept pairs under two names, a table's as bytes."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            for w in ("w1", "w2", "w3"):
                for stacked, part in (("payload", "weight"), ("scale", "scale")):
                    for e, matrix in enumerate(state.pop(f"{name}.{w}_{stacked}")):
                        owner = name if name.endswith("shared_experts") else f"{name}.{e}"
                        state[f"{owner}.{w}.{part}"] = matrix
        elif isinstance(module, Engram) and module.table is not None:
            state[f"{name}.embed.weight"], state[f"{name}.embed.scale"] = module.table.payload, module.table.scales
    return state


def differences(state: dict[str, Tensor | np.ndarray], plan: list[Planned]) -> list[Problem]:
    """Between what a model holds and what is to be saved: scales are made where the model has values."""
    found = []
    for t in plan:
        if t.name not in state:
            if t.use != "scale":
                found.append(Problem("missing", t.name, "", "nothing", f"{list(t.shape)}"))
            continue
        packed = t.dtype == "I8" and scale_of(t.name) in state
        shape = t.shape if t.dtype != "I8" or packed else (*t.shape[:-1], 2 * t.shape[-1])
        if tuple(state[t.name].shape) != shape:
            found.append(Problem("shape", t.name, "", f"{list(state[t.name].shape)}", f"{list(shape)}"))
    extra = state.keys() - {t.name for t in plan}
    return found + [Problem("extra", n, "", f"{list(state[n].shape)}", "nothing") for n in sorted(extra)]


def stored_rows(t: Planned, scale: Planned | None, state: dict[str, Tensor | np.ndarray]) -> Rows:
    """What is written of a tensor, and with a payload that has to be made its scales."""
    if t.name not in state:
        return  # scales: they come with their payload
    for rows in pieces(t.shape):
        values = state[t.name][rows]
        if isinstance(values, np.ndarray):
            yield t, rows.start, torch.from_numpy(values.copy()).view(DTYPES[t.dtype])
        elif scale is None or scale.name in state:
            yield t, rows.start, finite(t, values.cpu().to(DTYPES[t.dtype]))
        else:
            encode, decode, height = codec(t)
            payload, scales = encode(decode(*encode(finite(t, values.cpu()))))
            yield t, rows.start, payload
            yield scale, rows.start // height, scales


def finite(t: Planned, values: Tensor) -> Tensor:
    """The values. Raises CheckpointError where one of them is infinite or no number."""
    # torch calls each E8M0 finite
    bad = ~(values.float() if values.dtype.itemsize == 1 else values).isfinite()
    if bad.any():
        found = f"{values[bad][0].item()}, one of {int(bad.sum()):,}"
        raise CheckpointError("values", [Problem("not finite", t.name, "", found, "finite numbers")])
    return values


def plan_of(folder: Path, config: ModelConfig) -> list[Planned]:
    """The plan of what is there, a drafter or none of it. Raises CheckpointError with every difference."""
    plan = planned(config)
    backbone, problems = without_drafter(plan), compare(folder, plan)
    drafter = {t.name for t in plan} - {t.name for t in backbone}
    if drafter <= {p.name for p in problems if p.kind == "missing"}:
        plan, problems = backbone, [p for p in problems if p.kind != "missing" or p.name not in drafter]
    if problems:
        raise CheckpointError(str(folder), problems)
    return plan


def read_token_map(tokenizer: Path, config: ModelConfig) -> Tensor:
    """Compressed ids [V]. Raises ValueError for a tokenizer that isn't the config's."""
    vocabulary = CompressedVocabulary.cached(tokenizer, config.vocab_size)
    if vocabulary.size != config.engram_compressed_vocab_size:
        raise ValueError(
            f"{tokenizer}: {vocabulary.size} compressed ids, expected engram_compressed_vocab_size "
            f"{config.engram_compressed_vocab_size}"
        )
    return torch.from_numpy(vocabulary.map)


def skeleton(config: ModelConfig, tensors: list[Planned], dtype: torch.dtype, keep: bool, tables: str) -> Transformer:
    """The model of a plan on "meta", each tensor in the form and dtype that loading gives it."""
    plan = {t.name: t for t in tensors}
    model = Transformer(config, device="meta", drafter=any(name.startswith("mtp.") for name in plan))
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        wide = name in plan and plan[name].dtype == "F32"
        tensor.data = tensor.data.to(torch.promote_types(dtype, torch.float32) if wide else dtype)

    def pair(name: str, *stack: int) -> list[Tensor]:
        parts = plan[f"{name}.weight"], plan[f"{name}.scale"]
        return [torch.empty(*stack, *t.shape, dtype=DTYPES[t.dtype], device="meta") for t in parts]

    for name, module in list(model.named_modules()) if keep else ():
        if isinstance(module, Experts):
            first, count = name if name.endswith("shared_experts") else f"{name}.0", len(module.w2)
            matrices = {w: pair(f"{first}.{w}", count) for w in ("w1", "w2", "w3")}
            model.set_submodule(name, QuantizedExperts(module.limit, **matrices))
        elif isinstance(module, nn.Linear) and f"{name}.scale" in plan and not name.endswith(READ):
            model.set_submodule(name, QuantizedLinear(*pair(name)))
    if tables == "mapped":
        for layer in config.engram_layer_ids:
            model.layers[layer].engram.embed = None
    return model


def available_memory(device: torch.device | str) -> int | None:
    """Bytes that a device has to give, None where the system doesn't say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    system = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable: +(\d+) kB", system.read_text(), re.M) if system.exists() else None
    return None if found is None else 1024 * int(found[1])


def nbytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(t.nbytes for t in chain(model.parameters(), model.buffers()))


def fill(state: dict[str, Tensor], plan: list[Planned], shards: Shards) -> None:
    """Write the shards' values into a model's tensors (`held`), those of the plan that it has."""
    scales = {t.name: t for t in plan if t.use == "scale"}
    for t in plan:
        scale = scales.get(scale_of(t.name))
        for rows in pieces(t.shape) if t.name in state else ():
            values = shards.read(t, rows)
            if scale is not None and scale.name not in state:
                _, decode, height = codec(t)
                tiles = slice(rows.start // height, -(-rows.stop // height))
                values = decode(values, shards.read(scale, tiles), state[t.name].dtype)
            state[t.name][rows].copy_(finite(t, values))
