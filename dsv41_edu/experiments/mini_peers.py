"""The miniature beside a dense transformer of as many active parameters, trained alike, and beside a trigram.

The dense model: pre-norm blocks of rotary attention and SwiGLU as wide as makes its parameters, but for the
embedding, those that a token multiplies in the miniature. Same text, batches, optimizer and schedule, three seeds
each, shorter than the miniature's own training (`mini`), so that the spread can be seen.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsv41_edu.attention.rope import frequencies, rotate, turns
from dsv41_edu.config import ModelConfig, preset
from dsv41_edu.experiments import text
from dsv41_edu.experiments.mini import Setup, Training, batch, bits_per_byte, heldout, miniature
from dsv41_edu.experiments.small_moe import spread
from dsv41_edu.experiments.trigram import Trigram
from dsv41_edu.tensors import tensor_plan
from dsv41_edu.training import evaluate, groups, language_loss, set_rate

RESULT = Path(__file__).parents[2] / "book" / "data" / "mini_peers.json"
SHORT = Setup(steps=200, batch=8, warm_up=40, as_stored=1.0, threads=1)
SEEDS = (1, 2, 3)
HEADS = 4


def active(config: ModelConfig) -> int:
    """Parameters that a token multiplies in the backbone, the head's too: all matrices, of the experts the chosen."""
    plan = [t for t in tensor_plan(config) if t.use == "matrix" and t.group != "vision" and "drafter" not in t.group]
    share = config.num_experts_per_tok / config.n_routed_experts
    return round(sum(t.parameters * (share if t.group == "routed experts" else 1) for t in plan))


class Block(nn.Module):
    """x + attention(norm x), then x + w2 (silu(w1 norm x) * w3 norm x)."""

    def __init__(self, d: int, width: int):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.w1, self.w3 = nn.Linear(d, width, bias=False), nn.Linear(d, width, bias=False)
        self.w2 = nn.Linear(width, d, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, turn), rotate(k, turn)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Dense(nn.Module):
    """Ids int64 [B, S] to logits fp32 [B, S, V]; weights by the seed alone."""

    def __init__(self, config: ModelConfig, seed: int):
        super().__init__()
        d, L, V = config.hidden_size, config.num_hidden_layers, config.vocab_size
        width = round((active(config) - V * d - L * 4 * d * d) / (3 * L * d))
        self.embedding, self.norm, self.head = nn.Embedding(V, d), nn.RMSNorm(d), nn.Linear(d, V, bias=False)
        self.blocks = nn.ModuleList(Block(d, width) for _ in range(L))
        self.freqs = frequencies(d // HEADS, config.rope_theta)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim > 1:
                    p.normal_(std=0.02 if name == "embedding.weight" else p.shape[-1] ** -0.5, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        x, turn = self.embedding(ids), turns(torch.arange(ids.shape[1]), self.freqs, torch.float32)
        for block in self.blocks:
            x = block(x, turn)
        return self.head(self.norm(x))


def train_dense(setup: Setup) -> Dense:
    """By the miniature's recipe."""
    model = Dense(preset("mini"), setup.seed)
    optimizer = torch.optim.AdamW(
        groups(model, setup.decay, setup.table_rate), lr=setup.learning_rate, betas=(0.9, 0.95)
    )
    for step in range(setup.steps):
        set_rate(optimizer, setup.learning_rate, step, setup.steps, setup.warm_up)
        ids = batch(setup, step)
        optimizer.zero_grad()
        language_loss(model(ids[:, :-1]), ids[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
        optimizer.step()
    return model


def jobs() -> list[tuple[str, int]]:
    """Model and seed of each run."""
    return [(name, seed) for name in ("mini", "dense") for seed in SEEDS]


def run(name: str, seed: int) -> dict:
    """Bits a byte of the held-out text after a short training."""
    setup = replace(SHORT, seed=seed)
    if name == "dense":
        model = train_dense(setup)
    else:
        training = Training(setup, miniature())
        training.model.compile_seams()
        while training.step < setup.steps:
            training.advance()
        model = training.model
    return {"name": name, "seed": seed, "bits": bits_per_byte(evaluate(model, heldout(setup.context, 64)))}


@cache
def trigram_bits(tokens: int | None = None) -> float:
    """Bits a byte of the trigram that has counted the training text, or its first tokens alone."""
    model = Trigram(text.tokens("train")[:tokens].tolist(), text.VOCAB_SIZE)
    return bits_per_byte(model.nats(text.tokens("heldout").tolist()))


def write(results: list[dict]) -> None:
    """The result file."""
    seen = SHORT.steps * SHORT.batch * SHORT.context
    data = {
        "steps": SHORT.steps,
        "tokens": seen,
        "active": active(preset("mini")),
        "dense_parameters": sum(p.numel() for p in Dense(preset("mini"), 0).parameters()),
        "trigram": {"all of the text": trigram_bits(), "as many tokens": trigram_bits(seen)},
    }
    for name in ("mini", "dense"):
        data[name] = spread([r["bits"] for r in results if r["name"] == name])
    RESULT.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
