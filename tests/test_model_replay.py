"""A prompt whose last window alone runs through the decoder, against the full pass, and one told to forget."""

from itertools import count

import pytest
import torch
from small_models import CONFIG, IDS, drawn, drawn_ids, drawn_model, public_model, watched

from dsv41_edu.attention import attention
from dsv41_edu.attention.sparse_attention import sparse_attention

L, W, DECODER = CONFIG.num_hidden_layers, CONFIG.sliding_window, CONFIG.decoder_start
# memory and a drafter's target on both sides of the decoder's start
MIXED = CONFIG.replace(engram_layer_ids=(1, 7), dspark_target_layer_ids=(3, 7))


@pytest.fixture(scope="module")
def model():
    return public_model()


def forget(monkeypatch, starts):
    """From now on no decoder layer's window reaches below row b's starts[b], whatever else the layers do."""
    real, calls = attention.banded_attention, count()

    def cut(q, latents, width, *rest):
        if next(calls) % L < DECODER:
            return real(q, latents, width, *rest)
        p = torch.arange(q.shape[1]).unsqueeze(1) - torch.arange(width)
        seen = torch.where(p >= starts.view(-1, 1, 1), p, -1)
        return sparse_attention(q, latents, seen, *rest), None

    monkeypatch.setattr(attention, "banded_attention", cut)


@pytest.mark.parametrize("S", [1, 5, W])
def test_up_to_a_window_it_is_the_full_pass(model, S):
    full, replayed = (model.run(IDS[:, :S], features=True, replay=replay) for replay in (False, True))
    assert (full.hidden - replayed.hidden).abs().max() < 1e-12
    assert (full.features - replayed.features).abs().max() < 1e-12
    assert torch.equal(full.last, replayed.last)


@pytest.mark.parametrize("S", [W + 1, 20, 48])
def test_beyond_it_the_decoder_has_forgotten(model, S):
    full, replayed = (model.logits(model.run(IDS[:, :S], replay=replay).hidden) for replay in (False, True))
    assert replayed.shape[1] == W
    assert ((full[:, -1] - replayed[:, -1]).abs().amax(-1) > 0.01).all()


def test_the_decoder_runs_on_the_last_window_alone(model):
    _, found = watched(model, IDS, replay=True)
    tokens = [x.shape[1] for x in found["ffn_out"]]
    assert tokens == [48] * DECODER + [W] * (L - DECODER)


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("name", ["public", "mixed"])
def test_it_is_a_full_pass_with_cut_windows(name, images, monkeypatch):
    """Rows of 40, 17 and 4 tokens, and three more after the replay: also features, images, memory in the decoder."""
    model = public_model() if name == "public" else drawn_model(MIXED)
    lengths, more, rows = torch.tensor([40, 17, 4]), 3, None
    ids = drawn_ids(model.config, 3, 40 + more)
    if images:
        for row, n in enumerate(lengths.tolist()):
            ids[row, [1, n - 3, n - 1]] = CONFIG.image_token_id
        rows = drawn(int((ids == CONFIG.image_token_id).sum()), 64)
    cache = model.cache(3, 50)
    run = model.run(ids[:, :40], cache, lengths, rows, replay=True, features=True)
    cache.commit(run.chunk, lengths)
    after = model.run(torch.stack([ids[row, n : n + more] for row, n in enumerate(lengths)]), cache, features=True)
    assert run.last.tolist() == [W - 1, W - 1, 3]

    starts = (lengths - W).clamp(min=0)
    forget(monkeypatch, starts)
    expected = model.run(ids, image_rows=rows, features=True)
    for row, (start, n) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        for what in ("hidden", "features"):
            ours, later, theirs = (getattr(r, what)[row] for r in (run, after, expected))
            assert (ours[: n - start] - theirs[start:n]).abs().max() < 1e-10
            assert (later - theirs[n : n + more]).abs().max() < 1e-10


def test_the_encoders_caches_are_those_of_the_full_pass(model):
    """To the bit, with every entry and key; of the decoder's windows the first one, whose input is the encoder's."""
    lengths, caches = torch.tensor([48, 30]), []
    for replay in (False, True):
        caches.append(model.cache(2, 60))
        caches[-1].commit(model.run(IDS, caches[-1], lengths, replay=replay).chunk, lengths)
    full, replayed = caches
    same = [torch.equal(a, b) for a, b in zip(full.windows, replayed.windows, strict=True)][:L]
    assert same == [True] * (DECODER + 1) + [False] * (L - DECODER - 1)
    for name in ("entries", "keys", "open"):
        for source, held in getattr(full, name).items():
            assert torch.equal(held, getattr(replayed, name)[source]), (name, source)
    assert torch.equal(full.history, replayed.history)


def test_a_used_cache_is_refused(model):
    cache = model.cache(2, 48)
    model(IDS[:, :3], cache)
    with pytest.raises(ValueError, match="replay: expected an empty cache"):
        model.run(IDS[:, 3:20], cache, replay=True)
