"""What a model is, read from its official `config.json` and checked before anything is built on it.

    config = ModelConfig.from_json("config.json")      # V2 to V4.1, nested or flat layout
    config = preset("v41_flash")                       # the same, from a file shipped in `configs/`
    wider = config.replace(hidden_size=6144)           # checked again

Fields keep the names of the official files. A mechanism that a generation lacks has `None` in its
fields. Fields that are known to change nothing here go to `metadata`; fields that nobody knows are kept
in `unknown`, and every command that reads a config names them.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from dsv41_edu import config_rules

PRESETS = ("v41_flash", "v4_flash", "v4_pro", "v32", "v3", "v2", "deepseekmoe_16b", "mini")
SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max


class ConfigError(ValueError):
    """A config that can't be used; `problems` holds one sentence for each fault found."""

    def __init__(self, source: str, problems: list[str]):
        self.problems = problems
        super().__init__("\n  ".join([f"{source}: {len(problems)} problem(s) in the config", *problems]))


@dataclass(frozen=True)
class RopeScaling:
    """YaRN: positions beyond the original length are interpolated by `factor` (model report, appendix)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    rope_type: str = "yarn"
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclass(frozen=True)
class Quantization:
    """How the checkpoint's matrices are stored: FP8 tiles of `weight_block_size`, their scales' format."""

    weight_block_size: tuple[int, ...]
    quant_method: str = "fp8"
    activation_scheme: str = "dynamic"
    scale_fmt: str | None = None
    fmt: str | None = None
    expert_dtype: str | None = None


@dataclass(frozen=True)
class VisionConfig:
    """The image encoder: a plain ViT whose patches are merged `downsample_ratio` x `downsample_ratio`."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None = None
    model_type: str | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One model of the family. All sizes are counts of channels, heads, experts, layers or tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    num_key_value_heads: int | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    initializer_range: float = 0.02
    rope_scaling: RopeScaling | None = None
    quantization_config: Quantization | None = None
    vision_config: VisionConfig | None = None

    # experts: every generation has them
    moe_intermediate_size: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    scoring_func: str | None = None
    topk_method: str | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: float = 1.0
    swiglu_limit: float | None = None
    aux_loss_alpha: float | None = None
    seq_aux: bool | None = None
    n_group: int | None = None
    topk_group: int | None = None
    num_hash_layers: int | None = None

    # the first layers of the older generations hold one dense FFN instead
    intermediate_size: int | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1

    # attention: multi-head latent (V2 to V3.2), then one latent for all heads (V4, V4.1)
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    head_dim: int | None = None
    o_lora_rank: int | None = None
    o_groups: int | None = None
    sliding_window: int | None = None
    compress_ratios: tuple[int, ...] | None = None  # per layer: 0 window only, else tokens per entry
    compress_rope_theta: float | None = None
    kv_source_layer_ids: tuple[int, ...] | None = None
    index_source_layer_ids: tuple[int, ...] | None = None
    index_n_heads: int | None = None
    index_head_dim: int | None = None
    index_topk: int | None = None
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int | None = None
    candidate_block_size: int | None = None

    # residual streams
    hc_mult: int | None = None
    hc_sinkhorn_iters: int | None = None
    hc_eps: float | None = None

    # n-gram memory
    engram_layer_ids: tuple[int, ...] | None = None
    engram_num_embeddings: tuple[int, ...] | None = None
    engram_max_ngram_size: int | None = None
    engram_vocab_size: int | None = None
    engram_n_heads: int | None = None
    engram_head_dim: int | None = None
    engram_pad_token_id: int | None = None
    engram_compressed_vocab_size: int | None = None

    # drafter
    num_nextn_predict_layers: int = 0
    dspark_block_size: int | None = None
    dspark_noise_token_id: int | None = None
    dspark_target_layer_ids: tuple[int, ...] | None = None
    dspark_markov_rank: int | None = None
    dspark_markov_head_type: str | None = None  # vanilla, the released one; or gated, rnn
    dspark_n_routed_experts: int | None = None
    dspark_num_experts_per_tok: int | None = None

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    image_token_id: int | None = None

    metadata: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    unknown: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        """Raises ConfigError with every fault of types, sizes, ids and lists (`config_rules`)."""
        problems = _type_problems(self) or config_rules.problems(self)
        if problems:
            raise ConfigError(self.model_type, problems)

    @classmethod
    def from_json(cls, path: str | Path) -> "ModelConfig":
        """Read an official `config.json`. Raises ConfigError, or OSError where there is no such file."""
        try:
            data = json.loads(
                Path(path).read_text(encoding="utf-8"),
                object_pairs_hook=_refuse_duplicates,
                parse_constant=_refuse_constant,
            )
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a field given twice, NaN
            raise ConfigError(str(path), [f"expected a JSON document: {error}"]) from None
        return cls.from_dict(data, source=str(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "config") -> "ModelConfig":
        """Build from the parsed document, flat or with a nested `text_config`. Raises ConfigError."""
        if not isinstance(data, dict):
            raise ConfigError(source, [f"expected a JSON object, got {type(data).__name__}"])
        problems: list[str] = []
        values = _flatten(data, problems)
        family = values["model_type"] = str(values.get("model_type")).removesuffix("_text")
        if family not in config_rules.REQUIRED:
            problems.append(f"model_type = {family!r}: expected one of {sorted(config_rules.REQUIRED)}")
        problems += [
            f"{name} is missing: {family} needs it"
            for name in config_rules.REQUIRED.get(family, ())
            if name not in values
        ]
        known = {f.name for f in dataclasses.fields(cls)} - {"metadata", "unknown"}
        unknown = {k: v for k, v in values.items() if k not in known | config_rules.METADATA}
        kept = {k: _parse(hint, k, values[k], unknown, problems) for k, hint in _hints(cls) if k in values}
        if problems:
            raise ConfigError(source, problems)
        metadata = {k: v for k, v in values.items() if k in config_rules.METADATA}
        try:
            return cls(**kept, metadata=metadata, unknown=unknown)
        except ConfigError as error:
            raise ConfigError(source, error.problems) from None

    def replace(self, **changes: Any) -> "ModelConfig":
        """The same model with some fields changed, checked whole again. Raises ConfigError, TypeError."""
        return dataclasses.replace(self, **changes)

    @property
    def fp8_tile(self) -> int:
        """Side of the square of an FP8 matrix that shares one scale; 32 where the file doesn't say."""
        return self.quantization_config.weight_block_size[0] if self.quantization_config else 32

    @property
    def decoder_start(self) -> int:
        """First layer that a prompt token need not run: the last one to create a global cache (V4.1)."""
        return self.kv_source_layer_ids[-1]


def preset(name: str) -> ModelConfig:
    """A model by name, from the configs shipped with the package. Raises KeyError on another name."""
    if name not in PRESETS:
        raise KeyError(f"no preset {name!r}: expected one of {', '.join(PRESETS)}")
    return ModelConfig.from_json(Path(__file__).parent / "configs" / f"{name}.json")


def _flatten(data: dict, problems: list[str]) -> dict:
    """One flat dict: V4.1 keeps the language model's fields in `text_config`, the others have no such part."""
    text = data.get("text_config", {})
    if not isinstance(text, dict):
        problems.append(f"text_config = {text!r}: expected an object")
        text = {}
    outer = {k: v for k, v in data.items() if k != "text_config"}
    if isinstance(text.get("model_type"), str):
        text = {**text, "model_type": text["model_type"].removesuffix("_text")}
    problems += [
        f"{k} = {outer[k]!r} beside text_config.{k} = {text[k]!r}: expected one value"
        for k in outer.keys() & text.keys()
        if outer[k] != text[k]
    ]
    return {**outer, **text}


def _parse(hint: Any, name: str, value: Any, unknown: dict, problems: list[str]) -> Any:
    """Lists to tuples, objects to their dataclass; the checks of single values follow in `_type_problems`."""
    part = next((a for a in (hint, *get_args(hint)) if dataclasses.is_dataclass(a)), None)
    if part is None or value is None:
        return tuple(value) if isinstance(value, list) else value
    if not isinstance(value, dict):
        problems.append(f"{name} = {value!r}: expected an object")
        return None
    value = {"rope_type" if k == "type" else k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    fields = {f.name: f for f in dataclasses.fields(part)}
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in value]
    problems += [f"{name}.{n} is missing" for n in missing]
    unknown.update({f"{name}.{k}": v for k, v in value.items() if k not in fields})
    return None if missing else part(**{k: v for k, v in value.items() if k in fields})


def _type_problems(part: Any, prefix: str = "") -> list[str]:
    """A sentence for each field whose value isn't of its annotated type, nested parts included."""
    found = []
    for name, hint in _hints(type(part)):
        value = getattr(part, name)
        if dataclasses.is_dataclass(value):
            found += _type_problems(value, f"{prefix}{name}.")
        elif not any(_fits(value, option, name) for option in _options(hint)):
            expected = " or ".join(_WORDS.get(get_origin(o) or o, o.__name__) for o in _options(hint))
            if name in config_rules.MAY_BE_ZERO:
                expected = expected.replace("positive", "non-negative")
            found.append(f"{prefix}{name} = {_short(value)}: expected {expected}")
    return found


_WORDS = {
    int: "a positive integer",
    float: "a positive finite number",
    bool: "true or false",
    str: "a string",
    tuple: "a list of non-negative integers",
    type(None): "null",
}


def _fits(value: Any, option: Any, name: str) -> bool:
    if get_origin(option) is tuple:
        return isinstance(value, tuple) and all(type(v) is int and v >= 0 for v in value)
    if option in (int, float):
        kinds = (int,) if option is int else (int, float)
        least = 0 if name in config_rules.MAY_BE_ZERO else 1 if option is int else SMALLEST
        return type(value) in kinds and least <= value <= LARGEST  # false for NaN
    return type(value) is option


def _options(hint: Any) -> tuple:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


@cache
def _hints(cls: type) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in get_type_hints(cls).items() if k not in ("metadata", "unknown")]


def _short(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict:
    names = [name for name, _ in pairs]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"field given twice: {', '.join(twice)}")
    return dict(pairs)


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")
