"""How kernels run is decided once: from the machine and the environment, and whatever was imported before."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from kernels import interpreter, launch

ROOT = Path(launch.__file__).parents[1]


def run(code):
    """Run Python code in a fresh process that hasn't been told to interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("gpu", "asked", "ahead", "interpreted"),
    [
        (False, False, "", True),
        (False, True, "", True),
        (True, False, "", False),
        (True, True, "", True),
        (False, False, "1", False),
        (True, True, "1", False),
        (False, False, "0", True),
    ],
)
def test_the_decision(monkeypatch, gpu, asked, ahead, interpreted):
    installed = []
    monkeypatch.setattr(interpreter, "install", lambda: installed.append(True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", asked)
    monkeypatch.setenv("DSV41_AOT", ahead)
    monkeypatch.setattr(launch, "INTERPRETED", launch.INTERPRETED)  # so that it is put back
    importlib.reload(launch)
    assert launch.INTERPRETED is interpreted
    assert triton.knobs.runtime.interpret == (interpreted or asked)
    assert installed == [True] * interpreted


NORM = """
import torch
from tests.kernels.toy_kernels import rmsnorm
from kernels.launch import INTERPRETED
x, y = torch.tensor([[3.0, 4.0]]), torch.empty(1, 2)
rmsnorm[(1,)](x, torch.ones(2), y, 2, 0.0, BLOCK=2)
print(INTERPRETED, *(y[0] * 12.5**0.5).round().tolist())
"""

MODEL = """
import sys
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
assert "triton" in sys.modules
sizes = dict(vocab_size=8, hidden_size=16, num_hidden_layers=1, index_n_heads=1, index_head_dim=8, index_topk=2)
heads = dict(num_attention_heads=2, head_dim=8, qk_rope_head_dim=4, q_lora_rank=4, o_groups=1, o_lora_rank=4)
experts = dict(n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=4)
model = DeepseekV4ForCausalLM(DeepseekV4Config(**sizes, **heads, **experts))
print(*model(torch.arange(4)[None]).logits.shape)
"""


@pytest.mark.skipif(not launch.INTERPRETED, reason="kernels are compiled here")
@pytest.mark.parametrize(
    ("code", "printed"),
    [
        (NORM + MODEL, ["True", "3.0", "4.0", "1", "4", "8"]),
        (MODEL + NORM, ["1", "4", "8", "True", "3.0", "4.0"]),
    ],
)
def test_transformers_and_this_package_live_together(code, printed):
    """transformers looks for a package named `kernels`, and its model classes import Triton."""
    assert run(code) == printed
