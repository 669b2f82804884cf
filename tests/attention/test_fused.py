"""Where the kernels take over they give what the reference gives: forced on here, in Triton's interpreter."""

from types import SimpleNamespace

import pytest
import torch
from small_models import CONFIG, IDS, bf16_model, drawn, public_model

import kernels.index_scores
import kernels.sparse_attention
from dsv41_edu.attention import attention as attention_module
from dsv41_edu.attention.attention import fuse
from dsv41_edu.attention.cache import Chunk


@pytest.fixture(scope="module")
def model():
    return public_model(torch.float32)


@pytest.fixture
def called(monkeypatch):
    """Names of the kernels that were asked, in order; the reference serves until `force` is called."""
    names = []
    for module, name in (
        (kernels.sparse_attention, "fused_sparse_attention"), (kernels.index_scores, "fused_index_scores"),
    ):  # fmt: skip
        kernel = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, name=name, kernel=kernel: names.append(name) or kernel(*given)
        )
    return names


def test_the_kernels_serve_on_a_gpu_without_gradients_alone():
    on_gpu = {t: SimpleNamespace(is_cuda=True, dtype=t) for t in (torch.bfloat16, torch.float32, torch.float64)}
    assert not any(fuse(q) for q in (torch.zeros(1), *on_gpu.values()))
    with torch.no_grad():
        assert not fuse(torch.zeros(1))
        assert [fuse(q) for q in on_gpu.values()] == [True, True, False]


@torch.no_grad()
def passes(model):
    """Logits and choices of a prompt of unequal rows, and of a chunk after it."""
    lengths, cache = torch.tensor([9, 7]), model.cache(2, 20)
    prompt = model.run(IDS[:, :9], cache, lengths)
    cache.commit(prompt.chunk, lengths)
    more = model.run(IDS[:, 9:12], cache)
    return prompt, more


def test_a_prompt_and_what_follows_it(model, called, monkeypatch):
    expected = passes(model)
    assert not called
    monkeypatch.setattr(attention_module, "fuse", lambda q: True)
    found = passes(model)
    indexers = sum(layer.attn.indexer is not None for layer in model.layers)
    assert called.count("fused_sparse_attention") == 2 * CONFIG.num_hidden_layers
    assert called.count("fused_index_scores") == 2 * indexers
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.hidden, reference.hidden, atol=2e-5, rtol=2e-5)
        assert ours.chunk.indices.keys() == reference.chunk.indices.keys()
        for layer, indices in reference.chunk.indices.items():
            assert torch.equal(ours.chunk.indices[layer], indices)


def test_a_replayed_prompt(model, called, monkeypatch):
    with torch.no_grad():
        expected = model.run(IDS[:, :13], replay=True)
        monkeypatch.setattr(attention_module, "fuse", lambda q: True)
        found = model.run(IDS[:, :13], replay=True)
    assert called
    torch.testing.assert_close(found.hidden, expected.hidden, atol=2e-5, rtol=2e-5)


def test_what_a_fresh_chunk_sees_of_its_own_tokens():
    chunk = Chunk.of(CONFIG.replace(sliding_window=3), torch.Size([1, 4]), torch.float32, None)
    latents = drawn(1, 4, 2)
    rows, seen = chunk.window(0, latents)
    assert rows is latents
    assert seen.tolist() == [[[-1, -1, 0], [-1, 0, 1], [0, 1, 2], [1, 2, 3]]]


@pytest.mark.parametrize("round_trips", [False, True])
def test_in_bf16_with_a_cache_and_without(called, monkeypatch, round_trips):
    """The dtype of the release: the kernels take all that the layers hand them, and are as near to float64."""
    model, exact = bf16_model(), bf16_model().double()
    model.round_trips = exact.round_trips = round_trips

    def outputs(of):
        with torch.no_grad():
            return [of.run(IDS[:, :9]).hidden, *(run.hidden for run in passes(of))]

    wanted, plain = outputs(exact), outputs(model)
    assert not called
    monkeypatch.setattr(attention_module, "fuse", lambda q: True)
    for ours, reference, exactly in zip(outputs(model), plain, wanted, strict=True):
        assert (ours.double() - exactly).norm() < 1.5 * (reference.double() - exactly).norm()
    assert called
