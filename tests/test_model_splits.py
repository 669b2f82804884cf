"""However a sequence is cut into chunks, and whatever shares its batch, its logits are the same."""

from functools import cache as once
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import CONFIG, IDS, IMAGE, IO, ODD, assert_same_cache, drawn_ids, drawn_model, public_model

EMBEDS = IO["image.embeds"].double()


@once
def model_of(name):
    return public_model() if name == "public" else drawn_model(ODD)


@st.composite
def splits(draw, total):
    """Lengths of chunks, one token and many, that sum to the total."""
    cuts = draw(st.sets(st.integers(1, total - 1), max_size=6))
    if draw(st.booleans()):
        cuts |= set(range(draw(st.integers(total - 8, total - 1)), total))
    edges = [0, *sorted(cuts), total]
    return [b - a for a, b in pairwise(edges)]


@settings(max_examples=10, deadline=None)
@given(splits(48))
def test_any_split_of_the_public_text(parts):
    model, logits = model_of("public"), []
    cache = model.cache(2, 48)
    for ids in IDS.split(parts, dim=1):
        logits.append(model(ids, cache))
    assert (torch.cat(logits, dim=1) - IO["text.logits"]).abs().max() < 1e-10


@settings(max_examples=6, deadline=None)
@given(splits(40))
def test_any_split_where_no_group_fits_the_window(parts):
    model, ids = model_of("odd"), drawn_ids(ODD, 2, 40)
    cache = model.cache(2, 40)
    logits = [model(part, cache) for part in ids.split(parts, dim=1)]
    assert (torch.cat(logits, dim=1) - model(ids)).abs().max() < 1e-10


@settings(max_examples=5, deadline=None)
@given(splits(48))
def test_any_split_of_text_with_images(parts):
    """Also inside an image's span, whose tokens are walls in the history."""
    model, images = model_of("public"), IO["image.mask"].bool()
    rows = torch.zeros(2, 48, 64).double().masked_scatter(images.unsqueeze(-1), EMBEDS)
    cache, logits, start = model.cache(2, 48), [], 0
    for ids in IMAGE.split(parts, dim=1):
        here = images[:, start : start + ids.shape[1]]
        logits.append(model(ids, cache, image_rows=rows[:, start : start + ids.shape[1]][here]))
        start += ids.shape[1]
    assert (torch.cat(logits, dim=1) - IO["image.logits"]).abs().max() < 1e-10


def test_token_by_token():
    model, cache = model_of("public"), model_of("public").cache(2, 48)
    logits = [model(ids, cache) for ids in IDS.split(1, dim=1)]
    assert (torch.cat(logits, dim=1) - IO["text.logits"]).abs().max() < 1e-10


# ---- unequal prompts


@pytest.mark.parametrize("name", ["public", "odd"])
@pytest.mark.parametrize("replay", [False, True])
def test_unequal_prompts_are_each_as_alone(name, replay):
    """Whatever fills the rows behind their lengths: hidden states, and the caches that are kept."""
    model = model_of(name)
    lengths = torch.tensor([1, 2, 7, 12, 23, 24])
    ids, fill = (drawn_ids(model.config, 6, 24, seed) for seed in (1, 2))
    inside = torch.arange(24) < lengths.unsqueeze(1)
    caches, hidden = [], []
    for filled in (ids, ids.where(inside, fill)):
        caches.append(model.cache(6, 40))
        run = model.run(filled, caches[-1], lengths, replay=replay)
        hidden.append(run.hidden[torch.arange(6), run.last])
        caches[-1].commit(run.chunk, lengths)
    assert (hidden[0] - hidden[1]).abs().max() < 1e-12, "but for rows of another expert in one product"
    assert_same_cache(*caches)
    following = drawn_ids(model.config, 6, 2)
    together = model.run(following, caches[0]).hidden
    for row, n in enumerate(lengths.tolist()):
        cache = model.cache(1, 40)
        run = model.run(ids[row : row + 1, :n], cache, replay=replay)
        torch.testing.assert_close(run.hidden[0, -1], hidden[0][row], rtol=0, atol=1e-10)
        assert run.last.tolist() == [run.hidden.shape[1] - 1]
        cache.commit(run.chunk, torch.tensor([n]))
        alone = model.run(following[row : row + 1], cache).hidden
        assert (alone - together[row]).abs().max() < 1e-10


def test_lengths_without_a_cache():
    model, lengths = model_of("public"), torch.tensor([48, 13])
    run = model.run(IDS, lengths=lengths)
    assert run.last.tolist() == [47, 12]
    assert (model.logits(run.hidden) - IO["text.logits"])[1, :13].abs().max() < 1e-10


def test_forward_commits_each_rows_own_tokens():
    model, lengths = model_of("public"), torch.tensor([20, 13])
    cache = model.cache(2, 48)
    model(IDS[:, :20], cache, lengths)
    assert torch.equal(cache.lengths, lengths)
    following = torch.stack([IDS[0, 20:26], IDS[1, 13:19]])
    logits = model(following, cache)
    expected = torch.stack([IO["text.logits"][0, 20:26], IO["text.logits"][1, 13:19]])
    assert (logits - expected).abs().max() < 1e-10


def test_drafts_are_verified_and_some_of_them_kept():
    """Blocks of drafts, wrong from some place on; each row keeps what was right, and goes on as the full pass."""
    model, cache = model_of("public"), model_of("public").cache(2, 60)
    model(IDS[:, :10], cache)
    start = torch.tensor([10, 10])
    for kept in ((0, 3), (5, 1), (4, 4), (2, 5)):
        drafts = drawn_ids(CONFIG, 2, 5, seed=9)
        for row, n in enumerate(kept):
            drafts[row, :n] = IDS[row, start[row] : start[row] + n]
        run = model.run(drafts, cache)
        for row, n in enumerate(kept):
            expected = IO["text.logits"][row, start[row] : start[row] + n]
            assert n == 0 or (model.logits(run.hidden[row, :n]) - expected).abs().max() < 1e-10
        cache.commit(run.chunk, torch.tensor(kept))
        start = start + torch.tensor(kept)
    assert torch.equal(cache.lengths, start)
