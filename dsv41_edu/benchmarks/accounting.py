"""Reading a config and counting what it describes, beside how it is done otherwise.

The peer is the public model library on V3, a generation that both know. It counts by building the model on
torch's meta device, without storage; ours lists the tensors.
"""

import json
from pathlib import Path

import torch

from dsv41_edu import config
from dsv41_edu.accounting import grand_total
from dsv41_edu.benchmarks.harness import Case, Skip
from dsv41_edu.generations import plan

V3 = Path(config.__file__).parent / "configs" / "v3.json"


def library_config() -> object:
    try:
        from transformers import DeepseekV3Config
    except ImportError:
        raise Skip("transformers is not installed") from None
    return DeepseekV3Config.from_json_file(V3)


def library_count() -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(library_config()).parameters())


def our_count() -> int:
    read = config.ModelConfig.from_json(V3)
    return grand_total(plan.__wrapped__(read)).parameters  # past the cache


def cases() -> list[Case]:
    """Two cases on V3's official config."""
    return [
        Case(
            "accounting.config",
            "V3's config.json read and checked (ours), read with defaults (library), parsed (json)",
            {
                "ours": lambda: config.ModelConfig.from_json(V3),
                "transformers": library_config,
                "json": lambda: json.loads(V3.read_text()),
            },
        ),
        Case(
            "accounting.count",
            "parameters of V3 from its config.json: ours lists 91,991 tensors with names, dtypes and shapes",
            {"ours": our_count, "transformers on meta": library_count},
        ),
    ]
