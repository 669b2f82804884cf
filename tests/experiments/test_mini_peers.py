"""The miniature's peers: as many active parameters, no look ahead, trained by the same recipe."""

import json
from dataclasses import replace

import torch

from dsv41_edu.config import preset
from dsv41_edu.experiments import mini_peers
from dsv41_edu.experiments.mini_peers import SHORT, Dense, active, train_dense

MINI = preset("mini")


def test_active_parameters_by_hand():
    """Of the miniature: what one token multiplies, layer by layer."""
    c, d = MINI, MINI.hidden_size
    H, D = c.num_attention_heads, c.head_dim
    attention = (
        d * c.q_lora_rank + c.q_lora_rank * H * D + d * D + H * D * c.o_lora_rank + c.o_groups * c.o_lora_rank * d
    )
    experts = (c.num_experts_per_tok + c.n_shared_experts) * 3 * d * c.moe_intermediate_size + d * c.n_routed_experts
    seams = 2 * (2 * c.hc_mult + c.hc_mult**2) * c.hc_mult * d
    layers = c.num_hidden_layers * (attention + experts + seams)
    gated, plain = 2 * d * D, d * D  # compressors at ratio 2 and 1
    asks = c.q_lora_rank * c.index_n_heads * c.index_head_dim + d * c.index_n_heads
    indexers = 3 * asks + 2 * D * c.index_head_dim
    memory = 2 * (c.hc_mult + 1) * 3 * c.engram_n_heads * c.engram_head_dim * d  # a key for each stream, a value
    head = c.vocab_size * d
    assert active(c) == layers + gated + plain + indexers + memory + head


def test_a_dense_model_of_that_size():
    model = Dense(MINI, 0)
    multiplied = sum(p.numel() for n, p in model.named_parameters() if p.ndim > 1 and n != "embedding.weight")
    assert abs(multiplied / active(MINI) - 1) < 0.01
    ids = torch.arange(12).unsqueeze(0)
    changed = ids.clone()
    changed[0, 7] = 99
    with torch.no_grad():
        moved = (model(ids) - model(changed)).abs().amax(-1)[0] > 0
    assert moved.tolist() == [False] * 7 + [True] * 5
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), Dense(MINI, 0).parameters(), strict=True))
    assert not torch.equal(model.head.weight, Dense(MINI, 1).head.weight)


def test_it_learns(monkeypatch):
    seen = []
    monkeypatch.setattr(
        mini_peers, "language_loss", lambda *a, real=mini_peers.language_loss: seen.append(real(*a)) or seen[-1]
    )
    train_dense(replace(SHORT, steps=8, batch=2, context=24, warm_up=2))
    assert seen[-1] < seen[0] - 0.3


def test_the_result(monkeypatch, tmp_path):
    monkeypatch.setattr(mini_peers, "RESULT", tmp_path / "peers.json")
    monkeypatch.setattr(mini_peers, "trigram_bits", lambda tokens=None: 1.5 if tokens is None else 1.75)
    assert len(mini_peers.jobs()) == 6
    mini_peers.write(
        [{"name": name, "seed": seed, "bits": seed + (name == "dense")} for name, seed in mini_peers.jobs()]
    )
    found = json.loads((tmp_path / "peers.json").read_text())
    assert found["mini"] == [2.0, 2.0]
    assert found["dense"] == [3.0, 2.0]
    assert found["trigram"] == {"all of the text": 1.5, "as many tokens": 1.75}
    assert found["tokens"] == SHORT.steps * SHORT.batch * SHORT.context
