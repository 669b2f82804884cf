"""Attention of each role by itself: public vectors layer by layer, plain loops, and which token moves which."""

import pytest
import torch
from small_models import CONFIG, IO, ODD, WEIGHTS, drawn

from dsv41_edu.attention.attention import Attention, nearest, role
from dsv41_edu.attention.cache import Cache, Chunk
from dsv41_edu.attention.compressor import compress
from dsv41_edu.attention.rope import layer_frequencies, rotate, turns
from dsv41_edu.config import preset
from dsv41_edu.quantization import indexer_round_trip, latent_round_trip, window_round_trip

V41 = preset("v41_flash")


def drawn_attention(config, layer, seed=0):
    made = Attention(config, layer).double().requires_grad_(False)
    for i, p in enumerate(made.parameters()):
        p.copy_(drawn(*p.shape, seed=seed + i) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 1))
    return made


def run(attention, x, **options):
    chunk = Chunk.of(attention.config, x.shape[:2], x.dtype, None, **options)
    return attention(x, chunk), chunk


# ---- who reads whom


def test_every_layers_role_and_sources():
    roles = {layer: role(V41, layer) for layer in range(43)}
    assert [layer for layer, r in roles.items() if r == "window"] == [0, 1, 40, 41, 42]
    assert [layer for layer, r in roles.items() if r == "full"] == [2, 8, 14, 20]
    assert [layer for layer, r in roles.items() if r == "reindex"] == [24, 28, 32, 36]
    assert list(roles.values()).count("reuse") == 30
    with torch.device("meta"):
        layers = [Attention(V41, layer) for layer in range(43)]
    sources = {2: 2, 7: 2, 8: 8, 13: 8, 14: 14, 19: 14, 20: 20, 24: 20, 39: 20}
    index_sources = {2: 2, 7: 2, 8: 8, 14: 14, 19: 14, 20: 20, 23: 20, 24: 24, 27: 24, 28: 28, 36: 36, 39: 36}
    assert {layer: layers[layer].source for layer in sources} == sources
    assert {layer: layers[layer].index_source for layer in index_sources} == index_sources
    assert all(layers[i].source is layers[i].index_source is None for i in (0, 1, 40, 42))
    for layer, attention in enumerate(layers):
        assert (attention.compressor is not None) == (roles[layer] == "full")
        assert (attention.indexer is not None) == (roles[layer] in ("full", "reindex"))
        assert hasattr(attention.indexer, "wk") == (roles[layer] == "full")
        assert hasattr(attention.compressor, "wgate") == (layer in (2, 8, 14))


def test_the_nearest_source():
    assert [nearest((2, 5), layer) for layer in range(7)] == [None, None, 2, 2, 2, 5, 5]


# ---- values


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_public_vectors_layer_by_layer(dtype, tolerance):
    """Each layer gets the input that it has in the model, stored as float32, and what those below it published."""
    chunk = Chunk.of(CONFIG, (2, 48), dtype, None)
    for layer in range(10):
        attention, start = Attention(CONFIG, layer), f"layers.{layer}.attn."
        state = {name.removeprefix(start): w for name, w in WEIGHTS.items() if name.startswith(start)}
        attention.to(dtype).requires_grad_(False).load_state_dict(state)
        out = attention(IO["text.attn_norm_out"][layer].to(dtype), chunk)
        expected = IO["text.attn_out"][layer]
        assert ((out - expected).abs() <= tolerance * (1 + expected.abs())).all(), layer
        if attention.indexer is not None:
            assert torch.equal(chunk.indices[layer].int(), IO[f"text.index_topk.{layer}"])
            scores, expected = chunk.scores[layer], IO[f"text.index_scores.{layer}"]
            assert torch.equal(scores.isneginf(), expected.isneginf())
            seen = ~scores.isneginf()
            assert ((scores - expected)[seen].abs() <= tolerance * (1 + expected[seen].abs())).all(), layer
    assert torch.equal(chunk.candidates, IO["text.candidates"].bool())


def test_the_whole_equation_by_loops():
    """A source at ratio 2, that reads all it sees: query, window, entries, sink, turn back, two output products."""
    config = CONFIG.replace(sliding_window=3)
    a, x = drawn_attention(config, 2), drawn(1, 7, 64, seed=99)
    y, _ = run(a, x, dense=True)
    freqs = layer_frequencies(config, 2)

    def normed(v, weight):
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True)) * weight

    def turned(v, t, back=False):
        turn = turns(torch.tensor(t), freqs, torch.float64)
        return rotate(v, turn.conj() if back else turn)

    latents = [turned(normed(a.wkv.weight @ x[0, t], a.kv_norm.weight), t) for t in range(7)]
    entries = []
    for j in range(3):
        u, s = (x[0, 2 * j : 2 * j + 2] @ w.weight.T for w in (a.compressor.wkv, a.compressor.wgate))
        entries.append(turned(normed(compress(u, s), a.compressor.norm.weight), 2 * j))
    for t in range(7):
        q = (a.wq_b.weight @ normed(a.wq_a.weight @ x[0, t], a.q_norm.weight)).view(4, 32)
        kv = torch.stack(latents[max(0, t - 2) : t + 1] + entries[: (t + 1) // 2])
        o = []
        for h in range(4):
            e = (turned(q[h], t) @ kv.T / 32**0.5).exp()
            o.append(turned(e @ kv / (e.sum() + a.attn_sink[h].exp()), t, back=True))
        groups = torch.stack(o).view(2, 64)
        z = torch.cat([a.wo_a.weight[16 * g : 16 * g + 16] @ groups[g] for g in range(2)])
        torch.testing.assert_close(y[0, t], a.wo_b.weight @ z)


def test_what_a_deployed_cache_would_give_back():
    """Each of latents, entries, keys and queries is rounded in its own format, and nothing else changes."""
    a, x = drawn_attention(CONFIG, 2), drawn(1, 9, 64, seed=99)
    _, plain = run(a, x)
    _, rounded = run(a, x, round_trips=True)
    for name, round_trip in (("entries", latent_round_trip), ("keys", indexer_round_trip)):
        assert torch.equal(getattr(rounded, name)[2], round_trip(getattr(plain, name)[2]))
        assert not torch.equal(getattr(rounded, name)[2], getattr(plain, name)[2])
    assert torch.equal(rounded.latents[2][1], window_round_trip(plain.latents[2][1]))
    qr, turn = a.q_norm(a.wq_a(x)), plain.turn(2)
    q, w = a.indexer.queries(x, qr, turn)
    products = torch.einsum("bshd,bnd->bshn", indexer_round_trip(q), rounded.keys[2]).relu()
    scores = torch.einsum("bsh,bshn->bsn", w, products)
    seen = ~rounded.scores[2].isneginf()
    torch.testing.assert_close(rounded.scores[2][seen], scores[seen])
    assert torch.equal(a.latent(x, turn, True), rounded.latents[2][1])


# ---- which token moves which


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("W", [1, 3])
@pytest.mark.parametrize("layer", [0, 2, 4, 6])
def test_a_token_is_seen_by_its_window_and_once_its_group_is_whole(layer, W, cached):
    """To the token: moving x_t moves the W outputs from t on, and those from its group's last token on; no other."""
    config, S = ODD.replace(sliding_window=W), 11
    a, x, r = drawn_attention(config, layer), drawn(1, S, 64, seed=99), ODD.compress_ratios[layer]
    moved = x.repeat(S + 1, 1, 1)
    moved[torch.arange(S), torch.arange(S)] += drawn(S, 64, seed=98)

    def outputs(rows):
        if not cached:
            return run(a, rows, dense=True)[0]
        cache, parts = Cache(config, len(rows), S, torch.float64), []
        for part in rows.split([4, 1, 4, 2], dim=1):
            y, chunk = run(a, part, dense=True, cache=cache)
            cache.commit(chunk, torch.full((len(rows),), part.shape[1]))
            parts.append(y)
        return torch.cat(parts, dim=1)

    y = outputs(moved)
    change = (y[:S] - y[S]).abs().amax(-1)
    for t in range(S):
        whole = t // r * r + r - 1 if r else S
        for s in range(S):
            sees = t <= s < t + W or s >= whole
            assert (change[t, s] > 1e-9) == sees, f"token {t} at {s}"


def test_a_later_layer_reads_the_entries_and_the_choice_of_its_sources():
    """Moving a source's entries moves all of its readers; moving an index moves its own readers alone."""
    x = drawn(1, 24, 64, seed=99)

    def outputs(changed=None):
        chunk = Chunk.of(CONFIG, (1, 24), torch.float64, None)
        found = {}
        for layer in range(2, 10):
            attention = drawn_attention(CONFIG, layer, seed=100 * layer)
            if changed and changed[0] == layer:
                weight = attention.get_parameter(changed[1])
                weight.copy_(drawn(*weight.shape, seed=7))
            found[layer] = attention(x, chunk)
        return found

    plain = outputs()

    def moved(layer, name):
        return [i for i, y in outputs((layer, name)).items() if not torch.equal(y, plain[i])]

    assert moved(2, "compressor.wkv.weight") == [2, 3]
    assert moved(4, "compressor.wgate.weight") == [4, 5]
    assert moved(6, "compressor.wkv.weight") == [6, 7, 8, 9]
    assert moved(2, "indexer.wq_b.weight") == [2, 3]
    assert moved(8, "indexer.wq_b.weight") == [8, 9]
    assert moved(6, "indexer.weights_proj.weight") == [6, 7, 8, 9], "8 and 9 by its candidates"
    assert moved(3, "wkv.weight") == [3], "a window is the layer's own"


def test_dense_reads_every_entry_that_is_seen():
    a, x = drawn_attention(CONFIG, 2), drawn(1, 24, 64, seed=99)
    _, chunk = run(a, x, dense=True)
    seen = (torch.arange(24) + 1) // 2
    assert torch.equal((chunk.indices[2][0] >= 0).sum(-1), seen)
    assert all(row[:n].tolist() == list(range(n)) for row, n in zip(chunk.indices[2][0], seen.tolist(), strict=True))
    assert (run(a, x)[1].indices[2] >= 0).sum(-1).max() == CONFIG.index_topk
