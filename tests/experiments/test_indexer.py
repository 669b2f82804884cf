"""The planted task: what is asked, what an oracle chooses, and what is measured of a small training."""

import json
from dataclasses import replace

import pytest
import torch

from dsv41_edu.experiments import indexer
from dsv41_edu.experiments.indexer import LAYER, Setup, measure, rows, sizes, train
from dsv41_edu.model import Transformer
from dsv41_edu.training import initialise

SMALL = Setup(keys=12, values=8, pairs=10, asked=4, top_k=2, batch=6, steps=6, warm_up=2)


def test_every_answer_stands_once_among_the_pairs():
    setup = Setup(batch=5)
    ids = rows(setup, torch.Generator().manual_seed(0))
    assert ids.shape == (5, 2 * (setup.pairs + setup.asked))
    for row in ids.tolist():
        pairs = dict(zip(row[: 2 * setup.pairs : 2], row[1 : 2 * setup.pairs : 2], strict=True))
        assert len(pairs) == setup.pairs
        asked = list(zip(row[2 * setup.pairs :: 2], row[2 * setup.pairs + 1 :: 2], strict=True))
        assert all(pairs[key] == value for key, value in asked)
        assert len(set(asked)) == setup.asked
        assert all(key < setup.keys <= value < setup.keys + setup.values for key, value in asked)
    assert max(ids.flatten()) < sizes(setup).image_token_id


def test_measures():
    """Of a model whose attention goes to one entry alone, and whose indexer is made to know it, or not."""
    config = sizes(SMALL)
    model = Transformer(config, torch.arange(config.vocab_size))
    initialise(model, 0)
    found = measure(model.eval(), SMALL, 0)
    assert set(found) == {"all", "indexer", "random", "newest", "oracle"}
    assert found["oracle"]["overlap"] == pytest.approx(1)
    assert all(found["oracle"]["attention"] >= found[name]["attention"] for name in ("indexer", "random", "newest"))
    attn = model.layers[LAYER].attn
    chosen, scored = [], attn.choose

    def told(x, qr, turn, chunk):
        """Scores by what attention did when all was read, in nats."""
        found = scored(x, qr, turn, chunk)
        chunk.scores[LAYER] = torch.where(chunk.scores[LAYER].isneginf(), float("-inf"), (masses + 1e-30).log())
        chosen.append(found)
        return found

    ids = rows(SMALL, torch.Generator().manual_seed(1000))
    with torch.no_grad():
        masses = model.run(ids, dense=True, teach=True).chunk.mass[LAYER]
    attn.choose = told
    knowing = measure(model, SMALL, 0)
    assert knowing["indexer"]["overlap"] == pytest.approx(1)
    assert knowing["indexer"]["kl"] == pytest.approx(0, abs=1e-5)
    assert knowing["random"]["kl"] > 0.001
    assert knowing["indexer"]["attention"] == pytest.approx(found["oracle"]["attention"], rel=1e-5)
    assert chosen


def test_a_training_in_small():
    losses = [measure(train(replace(SMALL, steps=steps), 0), SMALL, 0)["indexer"]["kl"] for steps in (1, 12)]
    assert all(0 <= loss < 10 for loss in losses)
    again = measure(train(replace(SMALL, steps=12), 0), SMALL, 0)["indexer"]["kl"]
    assert again == losses[1]


def test_the_result(monkeypatch, tmp_path):
    monkeypatch.setattr(indexer, "RESULT", tmp_path / "indexer.json")
    found = [{"found": {"all": {"right": r}}, "seconds": 1.0} for r in (0.5, 0.6, 0.7)]
    indexer.write(found)
    result = json.loads((tmp_path / "indexer.json").read_text())
    assert result["found"] == {"all": {"right": [0.6, 0.2]}}
    assert result["seconds"] == 3
    assert indexer.jobs() == [(1,), (2,), (3,)]
