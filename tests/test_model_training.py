"""What training needs: every gradient but the indexer's, its teacher, the dense form, and a loss for it alone."""

import pytest
import torch
from small_models import CONFIG, IDS, OPEN, SEEING, drawn, drawn_ids, drawn_model, public_model
from torch.nn import functional as F

from dsv41_edu.attention import attention
from dsv41_edu.attention.sparse_attention import named, softmax_with_sink

VISION = ("vision.", "aligner.", "image_")


def gradients(model, loss):
    """By name, None where there is none or nothing but zeros."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {n: g if g is not None and g.any() else None for n, g in zip(names, found, strict=True)}


def missing(found):
    return {name for name, g in found.items() if g is None}


def text_loss(model, ids, **options):
    logits = model.logits(model.run(ids, **options).hidden)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("dense", [False, True])
def test_the_language_models_loss_reaches_all_but_the_indexers(dense):
    model = public_model().requires_grad_(True)
    found = gradients(model, text_loss(model, IDS, dense=dense, teach=True))
    assert missing(found) == {name for name in found if ".indexer." in name}
    assert len(missing(found)) == 2 * 4 + 2 * 3, "queries and weights of four, keys and their norm of three"


def test_an_images_loss_reaches_the_tower_too():
    model = drawn_model(SEEING).requires_grad_(True)
    ids, patches = drawn_ids(SEEING, 1, 40), drawn(20, 3, 14, 14)
    assert {n for n in missing(gradients(model, text_loss(model, ids))) if ".indexer." not in n} == {
        n for n, _ in model.named_parameters() if n.startswith(VISION)
    }
    rows = model.image_rows(patches, 4, 5)
    ids[:, 3 : 3 + len(rows)] = SEEING.image_token_id
    found = gradients(model, text_loss(model, ids, image_rows=rows))
    assert missing(found) == {n for n in found if ".indexer." in n}


def test_a_loss_of_scores_reaches_the_indexers_alone():
    model = public_model().requires_grad_(True)
    chunk = model.run(IDS, dense=True, teach=True).chunk
    for layer, scores in chunk.scores.items():
        found = gradients(model, scores.masked_fill(scores.isneginf(), 0).square().sum())
        asked = {f"layers.{layer}.attn.indexer.{name}.weight" for name in ("wq_b", "weights_proj")}
        source = model.layers[layer].attn.source
        answered = {f"layers.{source}.attn.indexer.{name}.weight" for name in ("wk", "k_norm")}
        assert found.keys() - missing(found) == asked | answered


def test_gradients_are_the_slopes():
    """Of a loss in float64 along a drawn direction of all parameters at once, choices held by its smallness."""
    model = public_model().requires_grad_(True)
    found = gradients(model, text_loss(model, IDS))
    direction = {n: drawn(*p.shape, seed=i) for i, (n, p) in enumerate(model.named_parameters())}
    slope = sum((g * direction[n]).sum() for n, g in found.items() if g is not None)
    losses, step = [], 1e-7
    with torch.no_grad():
        for sign in (1, -1):
            for n, p in model.named_parameters():
                p.add_(direction[n], alpha=step if sign > 0 else -2 * step)
            losses.append(text_loss(model, IDS))
    assert ((losses[0] - losses[1]) / (2 * step)).item() == pytest.approx(slope.item(), rel=1e-4)


# ---- the indexer's teacher


@pytest.mark.parametrize("dense", [False, True])
def test_mass_is_attention_on_entries_of_all_heads_and_layers_that_share_an_index(dense, monkeypatch):
    model, real, calls = public_model().requires_grad_(True), attention.banded_attention, []
    monkeypatch.setattr(attention, "banded_attention", lambda *args: (calls.append(args), real(*args))[1])
    chunk = model.run(IDS, dense=dense, teach=True).chunk
    expected, others = {}, {}
    distance = torch.arange(48).unsqueeze(1) - torch.arange(48)
    for layer, (q, latents, W, entries, indices, sink, scale) in enumerate(calls):
        if entries is None:
            continue
        index = max(i for i in CONFIG.index_source_layer_ids if i <= layer)
        assert indices is chunk.indices[index]
        scores = torch.einsum("bshd,bnd->bshn", q, torch.cat([latents, entries], dim=1)) * scale
        near = ((distance >= 0) & (distance < W)).expand(2, 48, 48)
        mask = torch.cat([near, named(indices, entries.shape[1])], dim=2)
        p = softmax_with_sink(scores.masked_fill(~mask.unsqueeze(2), float("-inf")), sink)
        expected[index] = expected.get(index, 0) + p[..., 48:].sum(2)
        others[index] = others.get(index, 0) + p[..., :48].sum(2)
    assert sorted(chunk.mass) == [2, 4, 6, 8]
    for index, mass in chunk.mass.items():
        torch.testing.assert_close(mass, expected[index])
        assert not mass.requires_grad
        assert ((mass > 0) == named(chunk.indices[index], mass.shape[-1])).all()
        total = mass.sum(-1) + others[index].sum(-1)
        assert (total < 2 * CONFIG.num_attention_heads).all(), "sinks have their share"
    assert not model.run(IDS, dense=dense).chunk.mass


def test_teaching_changes_nothing():
    model = public_model()
    assert torch.equal(model.run(IDS, teach=True).hidden, model.run(IDS).hidden)
    assert torch.equal(model.run(IDS, dense=True, teach=True).hidden, model.run(IDS, dense=True).hidden)


def test_dense_is_a_choice_of_everything():
    """With room for every entry the choice is the dense form; with less it isn't."""
    model = public_model(config=OPEN)
    dense, chosen = (model.run(IDS, dense=d) for d in (True, False))
    assert (dense.hidden - chosen.hidden).abs().max() < 1e-12
    assert (public_model().run(IDS, dense=True).hidden - dense.hidden).abs().max() < 1e-12
    assert (public_model().run(IDS).hidden - dense.hidden).abs().max() > 0.1
    for layer, indices in dense.chunk.indices.items():
        seen = (torch.arange(48) + 1) // CONFIG.compress_ratios[layer]
        assert torch.equal((indices >= 0).sum(-1), seen.expand(2, -1))
    assert dense.chunk.candidates is None


def test_dense_with_a_cache():
    model, cache = public_model(), public_model().cache(2, 48)
    expected, parts = model.run(IDS, dense=True).hidden, []
    for ids in IDS.split([20, 1, 27], dim=1):
        run = model.run(ids, cache, dense=True)
        cache.commit(run.chunk, torch.full((2,), ids.shape[1]))
        parts.append(run.hidden)
    assert (torch.cat(parts, dim=1) - expected).abs().max() < 1e-10


def test_a_lesson_begins_a_sequence():
    model = public_model()
    cache = model.cache(2, 20)
    model.run(IDS[:, :4], cache, teach=True)
    cache.commit(model.run(IDS[:, :4], cache).chunk, torch.tensor([4, 4]))
    with pytest.raises(ValueError, match="teach: expected an empty cache"):
        model.run(IDS[:, 4:8], cache, teach=True)
