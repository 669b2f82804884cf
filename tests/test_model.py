"""The assembled model against a public one: every layer, choice and logit. Its names, precision and refusals."""

import pytest
import torch
from small_models import CONFIG, IDS, IMAGE, IO, SEEING, WEIGHTS, bf16_model, drawn_model, public_model, watched

from dsv41_edu.attention import attention
from dsv41_edu.config import preset
from dsv41_edu.engram import gate as engram_gate
from dsv41_edu.layer import Residual
from dsv41_edu.model import Transformer
from dsv41_edu.moe.gate import weigh
from dsv41_edu.tensors import tensor_plan

LAYERS = range(CONFIG.num_hidden_layers)
EMBEDS = IO["image.embeds"].double()


@pytest.fixture(scope="module")
def model():
    return public_model()


def spied(monkeypatch, place, name, kept):
    """Let a function keep what `kept(*arguments, result)` says each time it is called."""
    found, real = [], getattr(place, name)

    def spy(*arguments):
        result = real(*arguments)
        found.append(kept(*arguments, result))
        return result

    monkeypatch.setattr(place, name, spy)
    return found


def close(ours, expected, tolerance=1e-6):
    """Within 1e-6 of 1 + |y|, where the vectors are stored as float32."""
    assert ours.shape == expected.shape
    return bool(((ours - expected).abs() <= tolerance * (1 + expected.abs())).all())


# ---- the public vectors


def test_text_layer_by_layer(model, monkeypatch):
    maps = spied(monkeypatch, Residual, "leave", lambda residual, _, maps, __: (residual.pending, maps[1]))
    gates = spied(monkeypatch, engram_gate, "add_memory", lambda *args: args[-1][1])
    collapsed = spied(monkeypatch, model.norm, "forward", lambda x, _: x)
    run, found = watched(model, IDS)
    assert (model.logits(run.hidden) - IO["text.logits"]).abs().max() < 1e-10
    ours = {name: torch.stack(values) for name, values in found.items()}
    assert torch.equal(ours.pop("router_indices").int(), IO["text.router_indices"])
    pre, comb = (torch.stack(part) for part in zip(*maps, strict=True))
    ours |= {"pre_attn": pre[::2], "pre_ffn": pre[1::2], "comb_attn": comb[::2], "engram_gate": torch.stack(gates)}
    ours["final_collapsed"] = collapsed[0]
    assert {f"text.{name}" for name in ours} <= set(IO)
    for name, values in ours.items():
        assert close(values, IO[f"text.{name}"]), name


def test_text_choices(model):
    chunk = model.run(IDS).chunk
    assert sorted(chunk.indices) == sorted(chunk.scores) == [2, 4, 6, 8]
    for layer, scores in chunk.scores.items():
        assert torch.equal(chunk.indices[layer].int(), IO[f"text.index_topk.{layer}"])
        expected = IO[f"text.index_scores.{layer}"]
        assert torch.equal(scores.isneginf(), expected.isneginf())
        assert close(scores[~scores.isneginf()], expected[~expected.isneginf()])
    assert torch.equal(chunk.candidates, IO["text.candidates"].bool())
    assert {s: list(e.shape) for s, e in chunk.entries.items()} == {2: [2, 24, 32], 4: [2, 24, 32], 6: [2, 48, 32]}


def test_text_rows(model):
    rows = model.engram_rows(IDS, None, model.run(IDS).chunk)
    assert torch.equal(torch.stack(list(rows.values()), 2).int(), IO["text.engram_rows"])
    assert list(rows) == [1, 4]
    h = model.hasher
    assert torch.equal(h.multipliers, IO["engram.multipliers"])
    assert torch.equal(h.primes, IO["engram.primes"].flatten(1))
    assert torch.equal(h.offsets, IO["engram.offsets"])


def test_images(model, monkeypatch):
    """Other router biases for an image's tokens, and walls and shut gates for the memory."""
    gates = spied(monkeypatch, engram_gate, "add_memory", lambda *args: args[-1][1])
    run, found = watched(model, IMAGE, image_rows=EMBEDS)
    assert (model.logits(run.hidden) - IO["image.logits"]).abs().max() < 1e-10
    assert close(found["streams_after_layer"][-1], IO["image.final_streams"])
    assert torch.equal(torch.stack(found["router_indices"]).int(), IO["image.router_indices"])
    assert close(torch.stack(gates), IO["image.engram_gate"])
    mask = IO["image.mask"].bool()
    assert (torch.stack(gates)[:, mask] == 0).all()
    rows = model.engram_rows(IMAGE, mask, run.chunk)
    ours, expected = torch.stack(list(rows.values()), 2).int(), IO["image.engram_rows"]
    assert torch.equal(ours[~mask], expected[~mask])
    cache, logits = model.cache(2, 48), []
    for ids, images in zip(IMAGE.split([20, 28], dim=1), mask.split([20, 28], dim=1), strict=True):
        done = mask.clone()
        done[:, : cache.lengths[0]], done[:, cache.lengths[0] + ids.shape[1] :] = False, False
        assert torch.equal(done.sum(), images.sum())
        logits.append(model(ids, cache, image_rows=EMBEDS[done[mask]]))
    assert (torch.cat(logits, dim=1) - IO["image.logits"]).abs().max() < 1e-10, "walls in the history too"


@pytest.mark.parametrize("name", ["drafter20", "drafter3"])
def test_the_drafters_features(model, name):
    first = int(name.removeprefix("drafter"))
    expected, logits = IO[f"{name}.target_features"], IO[f"{name}.backbone_logits"]
    run = model.run(IDS, features=True)
    steps = slice(first, first + len(expected))
    assert close(run.features[:, steps].transpose(0, 1), expected)
    assert close(model.logits(run.hidden)[:, steps].transpose(0, 1), logits)
    assert model.run(IDS).features is None
    cache = model.cache(2, 48)
    model(IDS[:, :first], cache)
    step = model.run(IDS[:, first : first + 1], cache, features=True)
    assert close(step.features[:, 0], expected[0])


def test_greedy_tokens(model):
    n = int(IO["greedy.prompt_length"])
    cache, ids, tokens = model.cache(2, n + 16), IDS[:, :n], []
    for _ in range(16):
        ids = model(ids, cache)[:, -1:].argmax(-1)
        tokens.append(ids)
    assert torch.equal(torch.cat(tokens, dim=1).int(), IO["greedy.tokens"])


def test_what_a_deployed_cache_gives_back():
    """Rows, not all of them: one value on the other side of a rounding moves its row and every later one."""
    model = Transformer(CONFIG, IO["token_map"], round_trips=True, drafter=False).double()
    model.load_state_dict({name: w.double() for name, w in WEIGHTS.items()})
    with torch.no_grad():
        logits = model(IDS)
        change = (logits - IO["text.logits_cache_round_trips"]).abs().amax(-1)
        assert (change < 1e-3).double().mean() >= 0.9
        assert ((logits - IO["text.logits"]).abs().amax(-1) > 1e-2).double().mean() > 0.9
        cache = model.cache(2, 48)
        parts = [model(ids, cache) for ids in IDS.split([20, 1, 1, 3, 23], dim=1)]
    assert (torch.cat(parts, dim=1) - logits).abs().max() < 1e-10


def test_decoding_scores_against_a_sources_own_keys(model):
    """The literal published code reads the keys that were published last, while a group is open: another model."""
    cache, steps = model.cache(2, 48), range(20, 26)
    model(IDS[:, :20], cache)
    ours = torch.cat([model(IDS[:, t : t + 1], cache) for t in steps], dim=1)
    assert (ours - IO["text.logits"][:, steps]).abs().max() < 1e-10
    assert (ours - IO["quirk.decode_logits_from_20_stale_index_keys"][:, : len(steps)]).abs().max() > 0.1


# ---- precision


def test_float32_against_float64():
    model = public_model(torch.float32)
    logits = model(IDS)
    assert logits.dtype == torch.float32
    assert (logits - IO["text.logits"]).abs().max() < 1e-4
    assert (model(IMAGE, image_rows=EMBEDS) - IO["image.logits"]).abs().max() < 1e-4
    chunk = model.run(IDS).chunk
    assert all(torch.equal(i.int(), IO[f"text.index_topk.{layer}"]) for layer, i in chunk.indices.items())


def test_bf16_with_float32s_choices(monkeypatch):
    """Where bf16 chooses by itself some entries and experts differ, and move a model of this size by a quarter."""
    entries = spied(monkeypatch, attention, "select", lambda *args: args[-1])
    run, found = watched(public_model(torch.float32), IDS)
    expected = public_model().logits(run.hidden.double())
    model = bf16_model()
    free = model(IDS)
    assert free.dtype == torch.float32, "logits are wide"
    assert free.isfinite().all()
    chosen = iter(entries.copy())
    monkeypatch.setattr(attention, "select", lambda *_: next(chosen))
    for layer, experts in zip(model.layers, found["router_indices"], strict=True):
        layer.ffn.gate.register_forward_hook(
            lambda gate, args, _, experts=experts: (weigh(gate.scores(args[0]), experts, True, 1.5), experts)
        )
    forced = model(IDS)
    assert (forced - expected).norm() < 0.05 * expected.norm()
    assert (free - expected).norm() < 0.5 * expected.norm()


def test_bf16_with_a_cache():
    model = bf16_model()
    cache, expected = model.cache(2, 48), model(IDS)
    logits = torch.cat([model(ids, cache) for ids in IDS.split([20, 1, 27], dim=1)], dim=1)
    assert {w.dtype for w in cache.windows} == {torch.bfloat16}
    assert (logits - expected).norm() < 0.1 * expected.norm()


def test_compiled_seams_take_the_place_of_plain_ones(model, monkeypatch):
    """All of them, at the first layer and after each memory those with nothing waiting. No compiler runs here."""
    calls, compiled = [], public_model()

    def compile(seam, **_):
        return lambda *args: (calls.append(seam.__name__), seam(*args))[1]

    monkeypatch.setattr(torch, "compile", compile)
    compiled.compile_seams()
    assert torch.equal(compiled(IDS), model(IDS))
    assert (calls.count("first_pass"), calls.count("single_pass")) == (3, 2 * 10 - 3)


# ---- names and sizes


@pytest.mark.parametrize("drafter", [True, False])
@pytest.mark.parametrize("name", ["v41_flash", "mini"])
def test_the_model_is_the_plan(name, drafter):
    config = preset(name)
    model = Transformer(config, device="meta", drafter=drafter)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    plan = [t for t in tensor_plan(config) if t.use != "scale" and (drafter or not t.name.startswith("mtp."))]
    unpacked = {t.name: (*t.shape[:-1], t.shape[-1] * (2 if t.dtype == "I8" else 1)) for t in plan}
    assert {n: tuple(t.shape) for n, t in model.state_dict().items()} == unpacked
    biases = sum(t.parameters for t in plan if t.name.endswith((".gate.bias", ".gate.bias_vl")))
    assert sum(b.numel() for b in model.buffers()) == biases, "which don't learn"
    assert sum(p.numel() for p in model.parameters()) + biases == sum(t.parameters for t in plan)


def test_a_state_dict_round_trip_is_exact():
    model = drawn_model(SEEING, torch.float32)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    other = Transformer(SEEING, model.token_map, drafter=False)
    other.load_state_dict(state)
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert all(torch.equal(t, state[name]) for name, t in other.state_dict().items())


# ---- bad input


def test_bad_ids_are_refused(model):
    for ids in (IDS.int(), IDS.double()):
        with pytest.raises(TypeError, match=f"ids are {ids.dtype}: expected torch.int64"):
            model(ids)
    for ids in (IDS[0], IDS[:0], IDS[:, :0], IDS.unsqueeze(0)):
        with pytest.raises(ValueError, match=r"ids of shape \[.*\]: expected \[B, S\], one token at least"):
            model(ids)
    for ids, told in ((IDS.clone().fill_(256), "256 to 256"), (IDS.clone().fill_(-1), "-1 to -1")):
        with pytest.raises(ValueError, match=f"ids from {told}: expected 0 to 255"):
            model(ids)


@pytest.mark.parametrize("lengths", [[0, 4], [4, 49], [4], [4, 4, 4], [4.0, 4.0]])
def test_bad_lengths_are_refused(model, lengths):
    with pytest.raises(ValueError, match=r"lengths = \[.*\]: expected 2 of int64, from 1 to 48"):
        model(IDS, lengths=torch.tensor(lengths))


def test_bad_image_rows_are_refused(model):
    for rows, told in ((None, [0, 64]), (EMBEDS[:20], [20, 64]), (EMBEDS.repeat(1, 2), [21, 128])):
        message = f"image_rows of shape {told}: expected [21, 64], one for each token 251"
        with pytest.raises(ValueError, match=message.replace("[", r"\[")):
            model(IMAGE, image_rows=rows)
    with pytest.raises(ValueError, match=r"image_rows of shape \[21, 64\]: expected \[0, 64\]"):
        model(IDS, image_rows=EMBEDS)


def test_a_model_without_images_takes_text():
    config = CONFIG.replace(image_token_id=None)
    model = Transformer(config, IO["token_map"], drafter=False)
    model.load_state_dict(WEIGHTS)
    assert (model(IDS) - IO["text.logits"]).abs().max() < 1e-4
    with pytest.raises(ValueError, match=r"image_rows of shape \[1, 64\]: expected \[0, 64\]"):
        model(IDS, image_rows=EMBEDS[:1])


def test_bad_token_maps_are_refused(model):
    with pytest.raises(ValueError, match="token_map: expected the compressed ids of the tokens"):
        Transformer(CONFIG)(IDS)
    for bad in (IO["token_map"][:-1], IO["token_map"].double(), torch.zeros(0)):
        with pytest.raises(ValueError, match=r"token_map torch.* of shape \[.*\]: expected integers \[256\]"):
            model.set_token_map(bad)
    for bad, told in ((IO["token_map"] - 1, "-1 to 95"), (IO["token_map"] + 1, "1 to 97")):
        with pytest.raises(ValueError, match=f"token_map from {told}: expected 0 to 96"):
            model.set_token_map(bad)


def test_another_generation_is_refused():
    with pytest.raises(ValueError, match="model_type = 'deepseek_v4': expected 'deepseek_v41'"):
        Transformer(preset("v4_flash"), device="meta")


def test_compiled_seams_give_the_same():
    model = public_model(torch.float32)
    expected = model(IDS[:, :12])
    model.compile_seams()
    torch.testing.assert_close(model(IDS[:, :12]), expected, atol=1e-4, rtol=1e-4)
    assert all(hasattr(seam, "_torchdynamo_orig_callable") for seam in model.seams)
