"""Which token moves which: each is moved in turn, and every position of every layer is looked at."""

from functools import cache as once

import pytest
import torch
from small_models import CONFIG, IDS, IO, ODD, OPEN, drawn_ids, drawn_model, public_model, watched

S = 26
MODELS = {"public": CONFIG, "every entry": OPEN, "odd groups": ODD}
CHUNKS = {"whole": [S], "chunks": [9, 1, 1, 6, 1, 8]}


@once
def watched_moves(name, chunks):
    """Rows 0 to S - 1 with one token moved each, row S as it was: what layers and chunk hold, and the config."""
    config = MODELS[name]
    model = drawn_model(ODD) if config is ODD else public_model(config=config)
    ids = drawn_ids(config, 1, S).repeat(S + 1, 1)
    ids[torch.arange(S), torch.arange(S)] = (ids[torch.arange(S), torch.arange(S)] + 100) % 250
    cache = None if chunks == "whole" else model.cache(S + 1, S)
    streams, scores, indices, candidates = [], [], [], []
    for part in ids.split(CHUNKS[chunks], dim=1):
        run, found = watched(model, part, cache)
        streams.append(torch.stack(found["streams_after_layer"]))
        scores.append(run.chunk.scores)
        indices.append(run.chunk.indices)
        candidates.append(run.chunk.candidates)
        if cache is not None:
            cache.commit(run.chunk, torch.full((S + 1,), part.shape[1]))
    held = run.chunk if cache is None else cache
    return torch.cat(streams, dim=2), scores, indices, candidates, held


def moved(values):
    """Bool [S, ...]: whether row t's value is another than the last row's, but for rounding."""
    change = (values[:S] - values[S]).abs().nan_to_num(0)  # -inf in both is no change
    return change > 1e-9


both = pytest.mark.parametrize("chunks", CHUNKS)
earlier = torch.ones(S, S).tril(-1).bool()  # [t, s]: s stands before t
each = pytest.mark.parametrize("name", MODELS)


@each
@both
def test_no_earlier_position_moves_and_later_ones_do(name, chunks):
    streams, *_ = watched_moves(name, chunks)
    for layer, values in enumerate(streams):
        change = moved(values).flatten(2).any(-1)
        assert not (change & earlier).any(), f"layer {layer} sees what comes"
        assert change.diagonal().all(), f"layer {layer} doesn't see the token itself"
        assert change.diagonal(1).all(), f"layer {layer} doesn't see the token before"


@each
@both
def test_no_choice_knows_what_comes(name, chunks):
    """Scores, hidden entries, indices and candidates of earlier queries stay."""
    _, scores, indices, candidates, _ = watched_moves(name, chunks)
    start = 0
    for s, i, c, size in zip(scores, indices, candidates, CHUNKS[chunks], strict=True):
        before = earlier[:, start : start + size]
        for values in (*s.values(), *i.values(), c):
            assert not (moved(values.double()).any(-1) & before).any()
        start += size


@each
@both
def test_an_entry_knows_its_groups_tokens_and_those_before(name, chunks):
    *_, held = watched_moves(name, chunks)
    config = MODELS[name]
    for source in config.kv_source_layer_ids:
        r = config.compress_ratios[source]
        for values in (held.entries[source], held.keys[source]):
            change = moved(values[:, : S // r]).any(-1)
            group = torch.arange(S // r)
            assert not (change & (r * group + r - 1 < torch.arange(S).unsqueeze(1))).any()
            assert all(change[t, t // r] for t in range(S // r * r))


@both
def test_a_window_reaches_as_far_as_it_should(chunks):
    """Layer 0 moves exactly the window's positions; layer 1 adds as much, its memory less."""
    streams, *_ = watched_moves("public", chunks)
    after = torch.arange(S) - torch.arange(S).unsqueeze(1)
    W = CONFIG.sliding_window
    for layer in (0, 1):
        change = moved(streams[layer]).flatten(2).any(-1)
        assert torch.equal(change, (after >= 0) & (after <= (layer + 1) * (W - 1)))


@both
def test_entries_reach_everywhere(chunks):
    """From the first source on every token moves all that come after it, where no choice leaves entries out."""
    streams, *_ = watched_moves("every entry", chunks)
    for values in streams[2:]:
        assert torch.equal(moved(values).flatten(2).any(-1), ~earlier)


def test_a_first_token_alone():
    """Nothing to look back at, no entry yet at ratios above 1."""
    model = public_model()
    for cache in (None, model.cache(2, 4)):
        assert (model(IDS[:, :1], cache) - IO["text.logits"][:, :1]).abs().max() < 1e-10
