"""What a cache keeps is what a pass over the kept tokens alone leaves, however they came and whatever came along."""

from functools import cache as once

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import CONFIG, ODD, assert_same_cache, drawn_ids, drawn_model

from dsv41_edu.attention.cache import Cache, Chunk, ring_positions

MODELS = {"ratios 2 and 1": CONFIG, "ratios 3, 2 and 4": ODD}


@once
def model_of(name):
    return drawn_model(MODELS[name])


def advance(model, cache, ids, counts, S):
    """Run S tokens a row, the first counts[b] of them row b's next ones, the others any, and keep those."""
    tokens = drawn_ids(model.config, len(ids), S, seed=S)
    for row, (start, n) in enumerate(zip(cache.lengths.tolist(), counts.tolist(), strict=True)):
        tokens[row, :n] = ids[row, start : start + n]
    cache.commit(model.run(tokens, cache).chunk, counts)


def check_state(model, cache, ids):
    """Against a new cache after one pass over what was kept; and what follows is the same."""
    expected, lengths = model.cache(len(ids), cache.capacity), cache.lengths.clamp(min=1)
    run = model.run(ids[:, : int(lengths.max())], expected, lengths)
    expected.commit(run.chunk, cache.lengths)
    assert_same_cache(cache, expected)
    following = drawn_ids(model.config, len(ids), 3, seed=5)
    ours, theirs = (model.run(following, c).hidden for c in (cache, expected))
    assert (ours - theirs).abs().max() < 1e-10


# ---- commit


@pytest.mark.parametrize("shift", [0, 4, 9])
@pytest.mark.parametrize("name", MODELS)
def test_every_count_in_another_row(name, shift):
    """A chunk longer than the window, after 0 to 8 tokens: open groups of each size, rings that wrap, and 0 kept."""
    model, S = model_of(name), MODELS[name].sliding_window + 2
    rows = torch.arange(S + 1)
    ids, cache = drawn_ids(model.config, S + 1, 9 + S), model.cache(S + 1, 40)
    advance(model, cache, ids, rows % 9, 9)
    advance(model, cache, ids, (rows + shift) % (S + 1), S)
    check_state(model, cache, ids)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(list(MODELS)), st.data())
def test_any_history_of_commits(name, data):
    model = model_of(name)
    ids, cache = drawn_ids(model.config, 2, 40), model.cache(2, 40)
    for S in data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)):
        counts = data.draw(st.lists(st.integers(0, S), min_size=2, max_size=2))
        advance(model, cache, ids, torch.tensor(counts), S)
    check_state(model, cache, ids)


def test_nothing_kept_is_nothing_changed():
    model = model_of("ratios 2 and 1")
    cache, ids, none = model.cache(2, 20), drawn_ids(CONFIG, 2, 9), torch.zeros(2).long()
    cache.commit(model.run(ids, cache).chunk, none)
    assert_same_cache(cache, model.cache(2, 20))
    model(ids, cache)
    before = model.run(ids, cache)
    cache.commit(before.chunk, none)
    assert torch.equal(model.run(ids, cache).hidden, before.hidden)


def test_of_several_chunks_any_may_be_kept():
    """Two continuations of different lengths are tried, and the first is taken."""
    model = model_of("ratios 3, 2 and 4")
    ids, other = drawn_ids(ODD, 2, 12), drawn_ids(ODD, 2, 9, seed=1)
    cache = model.cache(2, 40)
    model(ids[:, :5], cache)
    taken = model.run(ids[:, 5:], cache).chunk
    model.run(other, cache)
    cache.commit(taken, torch.tensor([7, 7]))
    check_state(model, cache, ids)


def test_a_chunk_of_elsewhere_is_refused():
    model, ids = model_of("ratios 2 and 1"), drawn_ids(CONFIG, 2, 4)
    cache, other = model.cache(2, 20), model.cache(2, 20)
    four, run = torch.tensor([4, 4]), model.run(ids, cache)
    for stranger in (model.run(ids), model.run(ids, other)):
        with pytest.raises(
            ValueError, match=r"chunk that starts at \[0, 0\]: expected one that was run on this cache"
        ):
            cache.commit(stranger.chunk, four)
    cache.commit(run.chunk, four)
    with pytest.raises(ValueError, match=r"starts at \[0, 0\]: expected one .* after its \[4, 4\] tokens"):
        cache.commit(run.chunk, four)


@pytest.mark.parametrize("counts", [[5, 1], [-1, 1], [1], [1, 1, 1], [1.0, 2.0]])
def test_counts_that_the_chunk_has_not_are_refused(counts):
    model, cache = model_of("ratios 2 and 1"), model_of("ratios 2 and 1").cache(2, 20)
    run = model.run(drawn_ids(CONFIG, 2, 4), cache)
    with pytest.raises(ValueError, match=r"counts = \[.*\]: expected 2 integers from 0 to 4"):
        cache.commit(run.chunk, torch.tensor(counts))
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("counts", [[19, 20, 5], [20, 20, 5]])
def test_a_replayed_prompt_is_kept_whole(counts):
    """Of the rows' 20, 12 and 5 tokens the decoder has seen the last 8, 8 and 5."""
    model, cache = model_of("ratios 2 and 1"), model_of("ratios 2 and 1").cache(3, 30)
    lengths = torch.tensor([20, 12, 5])
    run = model.run(drawn_ids(CONFIG, 3, 20), cache, lengths, replay=True)
    with pytest.raises(ValueError, match=r"counts = .*: expected the whole prompt, its end alone was replayed"):
        cache.commit(run.chunk, torch.tensor(counts))
    cache.commit(run.chunk, lengths)
    assert torch.equal(cache.lengths, lengths)


# ---- shapes


def test_what_it_holds():
    """Of each layer and drafter block a window, of each source entries, keys and an open group."""
    cache = Cache(ODD, batch=3, capacity=20, dtype=torch.bfloat16)
    assert [list(w.shape) for w in cache.windows] == [[3, 5, 32]] * 12
    assert cache.ratios == {2: 3, 4: 2, 6: 4}
    assert {s: list(e.shape) for s, e in cache.entries.items()} == {2: [3, 7, 32], 4: [3, 11, 32], 6: [3, 6, 32]}
    assert {s: list(k.shape) for s, k in cache.keys.items()} == {2: [3, 7, 32], 4: [3, 11, 32], 6: [3, 6, 32]}
    assert {s: list(o.shape) for s, o in cache.open.items()} == {
        s: [3, r - 1, 2, 32] for s, r in cache.ratios.items()
    }
    assert cache.history.tolist() == [[-1] * 3] * 3
    assert {t.dtype for t in (*cache.windows, *cache.entries.values(), *cache.keys.values())} == {torch.bfloat16}
    assert {t.dtype for t in cache.open.values()} == {torch.float32}, "a group that is open waits in fp32"
    wide, whole = 3 * 32 * 2, 3 * 8
    assert cache.nbytes == (12 * 5 + 2 * 24) * wide + 2 * 6 * 2 * wide + 4 * whole


@pytest.mark.parametrize(("batch", "capacity"), [(0, 4), (1, 0), (1, 129)])
def test_a_cache_of_no_size_is_refused(batch, capacity):
    message = f"batch = {batch}, capacity = {capacity}: expected at least one sequence, and 1 to 128 tokens"
    with pytest.raises(ValueError, match=message):
        Cache(CONFIG, batch, capacity)


def test_a_cache_is_filled_to_its_last_token_and_no_further():
    model = model_of("ratios 3, 2 and 4")
    ids, cache = drawn_ids(ODD, 2, 14), model.cache(2, 13)
    advance(model, cache, ids, torch.tensor([12, 5]), 12)
    advance(model, cache, ids, torch.tensor([1, 1]), 1)
    with pytest.raises(
        ValueError, match=r"2 x 1 tokens after \[13, 6\]: expected 2 rows and at most 13 tokens in each"
    ):
        model.run(ids[:, :1], cache)
    with pytest.raises(ValueError, match=r"3 x 1 tokens after \[13, 6\]: expected 2 rows"):
        Chunk.of(ODD, (3, 1), torch.float64, None, cache)


def test_a_cache_of_one_token():
    model, cache = model_of("ratios 2 and 1"), model_of("ratios 2 and 1").cache(1, 1)
    ids = drawn_ids(CONFIG, 1, 1)
    assert torch.equal(model(ids, cache), model(ids))


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(1, 9))
def test_slots_of_a_ring_by_writing_them(end, W):
    slots = [None] * W
    for p in range(end):
        slots[p % W] = p
    found = ring_positions(torch.tensor([end]), W)[0].tolist()
    assert [p if p >= 0 else None for p in found] == slots


def test_the_tail_of_a_chunk():
    chunk = Chunk.of(CONFIG, (3, 20), torch.float64, None)
    tail = chunk.tail(torch.tensor([20, 9, 3]), 8)
    assert tail.start.tolist() == [12, 1, 0]
    assert tail.positions[:, [0, 7]].tolist() == [[12, 19], [1, 8], [0, 7]]
    tail.entries[2] = tail.latents[3] = "shared"
    assert (chunk.entries[2], chunk.latents[3]) == ("shared", "shared")
