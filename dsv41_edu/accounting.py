"""What does a token touch? Parameters, bytes, FLOPs and cache of a model: sums over its tensor plan.

    python -m dsv41_edu.accounting [config.json] [--json] [--checkpoint DIR]

A *matrix* parameter multiplies an activation, once a token: two FLOPs. A *vector* (norm, bias, sink) scales
or shifts channels and is counted apart. A *row* is looked up. "Active parameters" in the model cards are the
matrices that a token meets: no embedding, no table. Sources: model card, technical report section 2.
"""

import argparse
import json
import re
import sys
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from dsv41_edu.config import PRESETS, ConfigError, ModelConfig, preset
from dsv41_edu.generations import plan
from dsv41_edu.headers import Problem, compare
from dsv41_edu.tensors import Tensor

EXPERTS = ("routed experts", "shared experts")
NOT_BACKBONE = "Engram tables"
PHASES = ("decode", "prefill")
USES = ("matrix", "vector", "rows")


class Sum(NamedTuple):
    """Tensors, the parameters they hold and their bytes, scales included."""

    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0


class Touched(NamedTuple):
    """What one token touches of a group: parameters by use, and all bytes read, scales included."""

    matrices: int = 0
    vectors: int = 0
    rows: int = 0
    nbytes: int = 0


def totals(tensors: tuple[Tensor, ...], key: str = "group") -> dict[str, Sum]:
    """Sums by `group`, `dtype` or `use`, in the plan's order."""
    sums: dict[str, Sum] = {}
    for t in tensors:
        name = getattr(t, key)
        had = sums.get(name, Sum())
        sums[name] = Sum(had.tensors + 1, had.parameters + t.parameters, had.nbytes + t.nbytes)
    return sums


def grand_total(tensors: tuple[Tensor, ...]) -> Sum:
    """All tensors, parameters and bytes."""
    return Sum(len(tensors), sum(t.parameters for t in tensors), sum(t.nbytes for t in tensors))


def backbone(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the model cards call the backbone: everything but the Engram tables and the drafter."""
    return tuple(t for t in tensors if not t.group.startswith("drafter") and t.group != NOT_BACKBONE)


def remainder(tensors: tuple[Tensor, ...]) -> dict[str, int]:
    """Parameters of the backbone's groups that are neither experts nor vision."""
    sums = totals(backbone(tensors))
    return {group: s.parameters for group, s in sums.items() if group not in (*EXPERTS, "vision")}


def expert(config: ModelConfig) -> Sum:
    """One routed expert: three matrices."""
    of_one = re.compile(r".*\.experts\.0\.")
    first = min(t.layer for t in plan(config) if t.group == "routed experts")
    return grand_total(tuple(t for t in plan(config) if t.layer == first and of_one.match(t.name)))


def touched(config: ModelConfig, phase: str = "decode") -> dict[str, Touched]:
    """Groups to what one text token touches. `phase`: "decode" (with the head) or "prefill" (without).

    A prompt token of V4.1 runs the layers below `decoder_start`, and of that layer only what makes the
    global cache. Raises ValueError for another phase.
    """
    if phase not in PHASES:
        raise ValueError(f"phase = {phase!r}: expected one of {PHASES}")
    return dict(_touched(config, phase))


@lru_cache(maxsize=32)
def _touched(config: ModelConfig, phase: str) -> tuple[tuple[str, Touched], ...]:
    sums: dict[tuple[str, int], list[int]] = {}  # whole numbers: a share is divided once, at the end
    for t in plan(config):
        share, whole = _share(config, t, phase)
        if share:
            row = sums.setdefault((t.group, whole), [0, 0, 0, 0])
            row[3] += t.nbytes * share
            if t.use in USES:
                row[USES.index(t.use)] += t.parameters * share
    found: dict[str, Touched] = {}
    for (group, whole), row in sums.items():
        found[group] = Touched(*(had + n // whole for had, n in zip(found.get(group, Touched()), row, strict=True)))
    return tuple(found.items())


def _share(c: ModelConfig, t: Tensor, phase: str) -> tuple[int, int]:
    """How much of a tensor one text token reads, as numerator and denominator."""
    if t.group == "routed experts" and (phase == "decode" or t.layer < _prompt_layers(c)):
        return c.num_experts_per_tok, c.n_routed_experts
    if t.group.startswith("drafter") or t.group == "vision" or t.name.endswith("bias_vl"):
        return 0, 1
    if phase == "prefill":
        if t.group == "head" or t.name == "norm.weight":
            return 0, 1
        if t.layer is not None and t.layer >= _prompt_layers(c):
            makes_cache = any(
                part in t.name for part in (".compressor.", ".indexer.wk.", ".indexer.k_norm.", ".attn_norm.")
            )
            return int(makes_cache and t.layer == c.decoder_start), 1
    if t.group == "Engram tables":
        return engram_rows(c), t.shape[0]
    return (1, t.shape[0]) if t.use in ("rows", "table") else (1, 1)


def _prompt_layers(c: ModelConfig) -> int:
    """Layers that a prompt token runs in full."""
    return c.decoder_start if c.model_type == "deepseek_v41" else c.num_hidden_layers


def engram_rows(config: ModelConfig) -> int:
    """Rows that a token reads from one table: every order, every head."""
    return (config.engram_max_ngram_size - 1) * config.engram_n_heads


def active(config: ModelConfig, phase: str = "decode") -> int:
    """The model cards' "activated parameters": matrices that one text token multiplies by."""
    return sum(t.matrices for t in touched(config, phase).values())


def cache_bytes(config: ModelConfig) -> dict[str, Fraction]:
    """Bytes of the global cache of V4.1 that one more token adds, per part and source layer.

    Latents are FP4 with an E4M3 scale for 16 channels, index keys FP4 with an E8M0 scale for 32
    (technical report 2.3). A source at ratio r adds one entry every r tokens.
    """
    latent = Fraction(config.head_dim, 2) + Fraction(config.head_dim, 16)
    key = Fraction(config.index_head_dim, 2) + Fraction(config.index_head_dim, 32)
    return {
        f"{part}, layer {layer}": size / config.compress_ratios[layer]
        for layer in config.kv_source_layer_ids
        for part, size in (("latent", latent), ("index key", key))
    }


def window_bytes(config: ModelConfig) -> int:
    """Bytes of one layer's window ring of a sequence: FP8 latents with an E8M0 scale for 32 channels."""
    return config.sliding_window * (config.head_dim + config.head_dim // 32)


def flops(config: ModelConfig, context: int) -> dict[str, int]:
    """FLOPs of one V4.1 decode token that sees `context` tokens, itself among them; a multiply-add counts 2.

    Raises ValueError for a context below 1.
    """
    if context < 1:
        raise ValueError(f"context = {context}: expected at least 1 token, the one being decoded")
    c, attention, indexer = config, 0, 0
    for layer in range(c.num_hidden_layers):
        ratio = c.compress_ratios[layer]
        visible = context // ratio if ratio else 0
        entries = min(context, c.sliding_window) + min(visible, c.index_topk)
        attention += 2 * 2 * c.num_attention_heads * c.head_dim * entries  # scores, then the weighted sum
        if layer in c.index_source_layer_ids:
            if layer > c.candidate_source_layer_id:
                visible = min(visible, c.candidate_topk_blocks * c.candidate_block_size)
            indexer += 2 * c.index_n_heads * c.index_head_dim * visible
    n = c.hc_mult
    seam = 2 * c.hidden_size * (n + n * n + n)  # collapse n streams, mix n into n, add the output to n
    return {
        "matrices": 2 * active(c),
        "attention over window and entries": attention,
        "index scores": indexer,
        "residual streams": 2 * c.num_hidden_layers * seam,
    }


def headline(config: ModelConfig) -> dict[str, int]:
    """The figures that a model card prints, from the plan: total and active parameters."""
    tensors = plan(config)
    lookups = sum(t.parameters for t in tensors if t.group == NOT_BACKBONE)
    return {
        "backbone": sum(t.parameters for t in backbone(tensors)),
        "tables": lookups,
        "drafter": sum(t.parameters for t in tensors if t.group.startswith("drafter")),
        "active, decode": active(config, "decode"),
        "active, prefill": active(config, "prefill"),
    }


def report(config: ModelConfig) -> dict:
    """Everything above for one model, as plain numbers."""
    tensors = plan(config)
    found = {
        "model_type": config.model_type,
        "unknown_fields": sorted(config.unknown),
        "total": grand_total(tensors)._asdict(),
        "groups": {k: s._asdict() for k, s in totals(tensors).items()},
        "dtypes": {k: s._asdict() for k, s in totals(tensors, "dtype").items()},
        "headline": headline(config),
        "touched": {phase: {k: t._asdict() for k, t in touched(config, phase).items()} for phase in PHASES},
    }
    if config.model_type == "deepseek_v41":
        found["cache_bytes_per_token"] = float(sum(cache_bytes(config).values()))
        found["window_bytes_per_layer"] = window_bytes(config)
        found["flops_at_full_context"] = flops(config, config.max_position_embeddings)
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns 0, 1 where a checkpoint differs from the plan, 2 for input that can't be used."""
    parser = argparse.ArgumentParser("dsv41_edu.accounting", description="Parameters, bytes and FLOPs of a model.")
    parser.add_argument(
        "config", nargs="?", help=f"a config.json, or one of {', '.join(PRESETS)} (default v41_flash)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--checkpoint", metavar="DIR", help="hold the headers of DIR's safetensors against the plan")
    args = parser.parse_args(arguments)
    own = Path(args.checkpoint or "", "config.json")
    name = args.config or (str(own) if args.checkpoint and own.exists() else "v41_flash")
    try:
        config = preset(name) if name in PRESETS else ModelConfig.from_json(name)
        problems = None if args.checkpoint is None else compare(args.checkpoint, plan(config))
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        found = report(config)
        if problems is not None:
            found["checkpoint"] = [p._asdict() for p in problems]
        print(json.dumps(found, indent=1))
    else:
        for field in sorted(config.unknown):
            print(f"unknown field kept: {field} = {config.unknown[field]!r:.60}")
        print(_text(config) if problems is None else _differences(problems, plan(config)))
    return 1 if problems else 0


def _text(config: ModelConfig) -> str:
    """The report as aligned tables."""
    found = report(config)
    lines = [_table("group", "tensors parameters bytes".split(), found["groups"], found["total"])]
    lines.append(_table("dtype", "tensors parameters bytes".split(), found["dtypes"], found["total"]))
    for phase, groups in found["touched"].items():
        whole = {k: sum(g[k] for g in groups.values()) for k in Touched._fields}
        lines.append(_table(f"a {phase} token touches", "matrices vectors rows bytes".split(), groups, whole))
    rows = {k: {"": v} for k, v in found["headline"].items()}
    rows |= {f"FLOPs, {k}": {"": v} for k, v in found.get("flops_at_full_context", {}).items()}
    if "cache_bytes_per_token" in found:
        rows["cache bytes per token"] = {"": round(found["cache_bytes_per_token"])}
        rows["window bytes per layer and sequence"] = {"": found["window_bytes_per_layer"]}
    return "\n\n".join([*lines, _table("figure", [""], rows)])


def _table(title: str, columns: list[str], rows: dict[str, dict], total: dict | None = None) -> str:
    rows = rows | ({"total": total} if total else {})
    cells = [[title, *columns]] + [[name, *(f"{v:,}" for v in row.values())] for name, row in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]).rstrip()
        for row in cells
    )


def _differences(problems: list[Problem], tensors: tuple[Tensor, ...]) -> str:
    """Each difference once; names that differ only in their numbers share a line, with their count."""
    if not problems:
        return f"the checkpoint agrees with the plan: {len(tensors):,} tensors"
    alike: dict[tuple, list[Problem]] = {}
    for p in problems:
        alike.setdefault((p.kind, re.sub(r"\d+", "*", p.name), p.found, p.expected), []).append(p)
    text = []
    for (kind, pattern, found, expected), same in alike.items():
        name = same[0].name if len(same) == 1 else f"{pattern} ({len(same):,} tensors)"
        text.append(f"{kind}: {name}: found {found}, expected {expected}")
    return "\n".join([*text, f"{len(problems):,} differences from the plan (--json lists each)"])


if __name__ == "__main__":
    sys.exit(main())
