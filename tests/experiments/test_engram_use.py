"""Names and formulas are what a reader would mark; the ablation is the loss with every gate 0; bins by hand."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

from dsv41_edu.experiments import engram_use, text
from dsv41_edu.experiments.engram_lm import EngramLM, Setup, compress, gates, train
from dsv41_edu.experiments.engram_use import (
    BINS,
    FREQUENT,
    PHRASES,
    SEEDS,
    SETUP,
    ablation,
    gate_by_count,
    name_mask,
    passage,
    run,
    target_groups,
    token_losses,
    windows,
)

TINY = Setup(hidden_size=32, context=16, batch=2, steps=3, warm_up=2, row_width=8, table_rows=600)
HELDOUT = 3203  # tokens


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def short(monkeypatch):
    """A short held-out text; the training text stays whole."""
    train, heldout = text.tokens("train"), text.tokens("heldout")[:HELDOUT]
    monkeypatch.setattr(text, "tokens", lambda split: {"train": train, "heldout": heldout}[split])


@pytest.fixture
def loud():
    """A model whose memory says as much as the rest, and whose gates differ."""
    model = EngramLM(TINY, 0)
    with torch.no_grad():
        model.memory.table.weight *= 50
    return model


def encode(verse):
    return torch.tensor(text.tokenizer().encode(verse, add_special_tokens=False).ids)


def test_names_are_capitalised_words_within_a_sentence():
    ids = encode("And the LORD said unto Moses, Come up to me, Aaron. Then I saw Nebuchadnezzar.\nHe is")
    mask = name_mask(ids)
    named = "".join(text.tokenizer().decode([i]) for i in ids[mask].tolist())
    assert named.split() == ["LORD", "Moses", "Come", "Aaron", "Nebuchadnezzar"]
    pieces = [text.tokenizer().decode([i]) for i in ids[mask].tolist()]
    assert len(pieces) > 5  # a long name is several tokens, all of them in it
    assert name_mask(torch.tensor([0, *ids, 1])).tolist() == [False, *mask.tolist(), False]  # bos and eos are none


def test_passages_hold_their_phrase():
    for phrase in PHRASES:
        ids = passage(phrase)
        assert phrase in text.tokenizer().decode(ids[0].tolist())
        assert 1 < ids.shape[1] <= engram_use.LONGEST
    with pytest.raises(ValueError, match="phrase = 'LORD of toasts': expected in a held-out verse of at most 40"):
        passage("LORD of toasts")


def test_groups_by_hand(short):
    ids = text.tokens("heldout").tolist()
    train = text.tokens("train").tolist()
    known = Counter(zip(train, train[1:], train[2:], strict=False))
    shape = torch.Size((200, 16))
    groups = target_groups(shape)
    frequent = [at >= 2 and known[tuple(ids[at - 2 : at + 1])] >= FREQUENT for at in range(1, 3201)]
    assert groups["formulas"].flatten().tolist() == frequent
    assert 0.1 < groups["formulas"].double().mean() < 0.6
    assert groups["names"].flatten().tolist() == name_mask(text.tokens("heldout"))[1:3201].tolist()
    assert groups["all"].all()
    for name in ("formulas", "names"):
        assert torch.equal(groups[name], ~groups[f"other than {name}"])


def test_ablation_is_the_loss_without_gates(short, loud):
    inputs, targets = windows(TINY)
    assert inputs.shape == (200, 16)
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    assert torch.equal(inputs.flatten(), text.tokens("heldout")[:3200])
    for memory in (True, False):
        expected = F.cross_entropy(loud(inputs, None if memory else inputs < 0).flatten(0, 1), targets.flatten())
        assert token_losses(loud, inputs, targets, memory).mean().item() == pytest.approx(expected.item(), rel=1e-5)
    found, mask = ablation(loud, TINY), target_groups(inputs.shape)["names"]
    assert found["all"]["tokens"] == 3200 == found["names"]["tokens"] + found["other than names"]["tokens"]
    off = token_losses(loud, inputs, targets, False)
    assert found["names"]["off"] == pytest.approx(off[mask].mean().item(), abs=1e-4)
    assert abs(found["names"]["on"] - found["names"]["off"]) > 1e-3
    with torch.no_grad():
        loud.memory.table.weight.zero_()  # a memory that says nothing is worth nothing
    assert all(group["on"] == group["off"] for group in ablation(loud, TINY).values())


def test_gate_by_count_by_hand(short, loud):
    inputs = windows(TINY)[0]
    train, ids = compress(text.tokens("train")).tolist(), compress(inputs).flatten().tolist()
    found = gates(loud, inputs).flatten().tolist()
    by_order = gate_by_count(loud, TINY)
    for order in (2, 3):
        known = Counter(zip(*(train[i:] for i in range(order)), strict=False))
        bins = [[] for _ in BINS]
        for at in range(len(ids)):
            if at % 16 >= 2:
                count = known[tuple(ids[at - order + 1 : at + 1])]
                bins[max(b for b, least in enumerate(BINS) if count >= least)].append(found[at])
        assert by_order[str(order)]["tokens"] == [len(b) for b in bins]
        assert by_order[str(order)]["gate"] == [pytest.approx(sum(b) / len(b), abs=1e-4) for b in bins]


def test_a_small_experiment_from_runs_to_file(short, tmp_path, monkeypatch):
    monkeypatch.setattr(engram_use, "RESULT", tmp_path / "result.json")
    tiny = dataclasses.replace(TINY, context=64)
    runs = [run(seed, tiny) for seed in (0, 1)]
    engram_use.write(runs)
    assert engram_use.read() == json.loads(json.dumps(engram_use.document(runs)))
    assert {**run(1, tiny), "duration_s": 0} == {**runs[1], "duration_s": 0}
    model = EngramLM(tiny, 1)
    list(train(model, tiny, 1))
    gate = gates(model, passage(PHRASES[2]))[0].tolist()
    assert runs[1]["passages"][2] == [pytest.approx(g, abs=1e-4) for g in gate]
    found = engram_use.summary(runs)
    first, second = (r["ablation"]["all"]["off"] - r["ablation"]["all"]["on"] for r in runs)
    assert found["ablation"]["all"]["increase"][0] == pytest.approx((first + second) / 2, abs=1e-4)
    for at, kept in enumerate(found["passages"]):
        assert "".join(kept["tokens"]) == text.tokenizer().decode(passage(PHRASES[at])[0].tolist())
        assert kept["gates"][3] == pytest.approx(
            (runs[0]["passages"][at][3] + runs[1]["passages"][at][3]) / 2, abs=1e-4
        )


def test_stored_file_is_whole():
    stored = engram_use.read()
    assert [(r["seed"],) for r in stored["runs"]] == engram_use.jobs()
    assert [r["seed"] for r in stored["runs"]] == list(SEEDS)
    assert stored["summary"] == json.loads(json.dumps(engram_use.summary(stored["runs"])))
    fields = json.loads(json.dumps(dataclasses.asdict(SETUP)))
    assert stored["setup"] == {**stored["setup"], **fields, "frequent": FREQUENT, "bins": list(BINS)}
    assert engram_use.RESULT.stat().st_size < 200_000
