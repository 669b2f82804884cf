"""The drafter against public numbers, by itself, and with the backbone: speculation changes no token."""

import pytest
import torch
from safetensors.torch import load_file
from small_models import CONFIG, IDS, IO, VECTORS, assert_same_cache, drawn_model

from dsv41_edu.config import preset
from dsv41_edu.drafter import Draft, Drafter
from dsv41_edu.dspark.scheduler import Delayed
from dsv41_edu.dspark.verification import block_verify, rejection_verify, sample
from dsv41_edu.generate import Summary, generate, possible
from dsv41_edu.model import Transformer
from dsv41_edu.tensors import tensor_plan

WEIGHTS = load_file(VECTORS / "whole_A_weights.safetensors")


@pytest.fixture(scope="module")
def model():
    model = Transformer(CONFIG, IO["token_map"]).double()
    model.load_state_dict({name: w.double() for name, w in WEIGHTS.items()})
    return model.eval().requires_grad_(False)


def filled(model, ids, capacity=60):
    cache = model.cache(len(ids), capacity)
    cache.commit(model.run(ids, cache, features=True).chunk, torch.full((len(ids),), ids.shape[1]))
    return cache


@pytest.mark.parametrize(("prompt", "last"), [(20, 26), (3, 8)])
def test_public_drafts(model, prompt, last):
    cache = filled(model, IDS[:, :prompt])
    for step, t in enumerate(range(prompt, last)):
        run = model.run(IDS[:, t : t + 1], cache, features=True)
        cache.commit(run.chunk, torch.tensor([1, 1]))
        draft = model.draft(IDS[:, t + 1], cache)

        def expected(name, step=step):
            return IO[f"drafter{prompt}.{name}"][step]

        assert torch.equal(draft.ids, expected("draft_ids").long())
        torch.testing.assert_close(draft.base, expected("base_logits"), atol=1e-10, rtol=0)
        corrected = draft.base + model.mtp[-1].markov_head(draft.ids[:, :-1])
        torch.testing.assert_close(corrected, expected("corrected_logits"), atol=1e-10, rtol=0)
        torch.testing.assert_close(draft.confidence, expected("confidence_logits"), atol=1e-10, rtol=0)
        torch.testing.assert_close(draft.hidden, expected("collapsed").double(), atol=2e-6, rtol=2e-6)
        features = expected("target_features").double()
        torch.testing.assert_close(run.features[:, 0], features, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("head", [None, "gated", "rnn"])
@pytest.mark.parametrize("name", ["v41_flash", "mini"])
def test_the_drafter_is_the_plan(name, head):
    config = preset(name).replace(dspark_markov_head_type=head)
    plan = [t for t in tensor_plan(config) if t.name.startswith("mtp.") and t.use != "scale"]
    with torch.device("meta"):
        state = Drafter(config).state_dict()
    shapes = {t.name.removeprefix("mtp."): (*t.shape[:-1], t.shape[-1] * (1 + (t.dtype == "I8"))) for t in plan}
    assert {n: tuple(t.shape) for n, t in state.items()} == shapes
    assert sum(t.numel() for t in state.values()) == sum(t.parameters for t in plan)


def test_a_draft_leaves_the_cache_as_it_was(model):
    cache, untouched = filled(model, IDS[:, :11]), filled(model, IDS[:, :11])
    model.draft(IDS[:, 11], cache)
    assert_same_cache(cache, untouched)


def test_rows_of_other_lengths_are_each_as_alone(model):
    cache, lengths = model.cache(2, 60), torch.tensor([17, 4])
    cache.commit(model.run(IDS[:, :17], cache, lengths, features=True).chunk, lengths)
    both = model.draft(IDS[:, 30], cache)
    for row, n in enumerate(lengths.tolist()):
        alone = model.draft(IDS[row : row + 1, 30], filled(model, IDS[row : row + 1, :n]))
        torch.testing.assert_close(both.base[row], alone.base[0], atol=1e-10, rtol=0)


def test_each_query_sees_the_ring_and_the_whole_block(model):
    cache = filled(model, IDS[:1, :20])
    ids = torch.tensor([[5, 6, 7, 8]])
    given = cache, model.embed, model.seams, False
    before = model.mtp.hidden(ids, *given)
    for i in range(4):
        other = ids.clone()
        other[0, i] += 50
        assert (model.mtp.hidden(other, *given) != before).any(-1).all(), f"row {i} of the block"
    first, W = CONFIG.num_hidden_layers, CONFIG.sliding_window
    for slot in range(W):
        ring = cache.windows[first]
        cache.windows[first] = ring + 0.1 * (torch.arange(W) == slot).view(1, -1, 1)
        assert (model.mtp.hidden(ids, *given) != before).any(-1).all(), f"slot {slot} of the ring"
        cache.windows[first] = ring


def test_slots_that_hold_nothing_are_not_seen(model):
    cache = filled(model, IDS[:1, :3])
    before = model.draft(IDS[:1, 3], cache).base
    for i in range(CONFIG.num_nextn_predict_layers):
        cache.windows[CONFIG.num_hidden_layers + i][:, 3:] = 7.0
    assert torch.equal(model.draft(IDS[:1, 3], cache).base, before)


@pytest.mark.parametrize("replay", [False, True])
def test_greedy_speculation_writes_the_same(model, replay):
    prompts = [IDS[0, :18].tolist(), IDS[1, :5].tolist(), IDS[1, :1].tolist()]
    took = Summary()
    plain = generate(model, prompts, 20, replay=replay)
    assert generate(model, prompts, 20, replay=replay, speculate=True, summary=took) == plain
    assert took.steps <= 19


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_the_other_heads_draft_along_the_block(head):
    """Each draft follows all before it; greedy text is the model's own."""
    model = drawn_model(CONFIG.replace(dspark_markov_head_type=head), drafter=True)
    draft, last = model.draft(IDS[:, 11], filled(model, IDS[:, :11])), model.mtp[-1]
    corrected = draft.base + last.markov_head(draft.ids[:, :-1], last.norm(draft.hidden))
    assert torch.equal(corrected.argmax(-1), draft.ids[:, 1:])
    assert (corrected - draft.base).abs().max() > 0.1
    prompts = [IDS[0, :9].tolist(), IDS[1, :4].tolist()]
    assert generate(model, prompts, 12, speculate=True) == generate(model, prompts, 12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_scheduler_says_how_many_drafts_are_verified(model, monkeypatch, temperature):
    """Rows of other lengths are each as alone with their own; greedy tokens don't hang on it."""
    prompts = [IDS[0, :18].tolist(), IDS[1, :5].tolist(), IDS[1, :1].tolist()]
    asked, given = [], torch.tensor([[4, 0, 2], [0, 0, 0], [1, 3, 3]])

    def scheduler(confidence):
        asked.append(confidence)
        return given[len(asked) % 3].numpy()

    def run(ids, cache, lengths=None, rows=None, real=model.run, **options):
        widths.append((ids.shape[1], lengths.tolist()))
        return real(ids, cache, lengths, rows, **options)

    widths, options = [], {"speculate": True, "temperature": temperature, "seed": 5}
    plain = generate(model, prompts, 20)
    monkeypatch.setattr(model, "run", run)
    took = Summary()
    found = generate(model, prompts, 20, scheduler=scheduler, summary=took, **options)
    assert all(c.shape == (3, 4) and c.dtype == "float64" and (c > 0).all() and (c < 1).all() for c in asked)
    expected = [given[n % 3] for n in range(1, len(asked) + 1)]
    assert widths[1:] == [(int(n.max()) + 1, (n + 1).tolist()) for n in expected]
    if temperature == 0:
        assert found == plain
    for row, prompt in enumerate(prompts):
        asked.clear()
        alone = generate(
            model,
            [prompt],
            20,
            scheduler=lambda c, row=row: scheduler(c)[row : row + 1],
            **options | {"seed": 5 + row},
        )
        assert alone[0] == found[row]


def test_a_drafter_that_guesses_right_saves_steps(model, monkeypatch):
    prompt = IDS[0, :18].tolist()
    plain = generate(model, [prompt], 20)[0]

    def oracle(tokens, cache, *_):
        at = int(cache.lengths[0]) - len(prompt)
        ids = torch.tensor([[*plain[at:], 0, 0, 0, 0][:5]])
        return type("Draft", (), {"ids": ids, "logits": None})

    monkeypatch.setattr(model, "draft", oracle)
    took = Summary()
    assert generate(model, [prompt], 20, speculate=True, summary=took) == [plain]
    assert took.steps == 4  # 19 tokens after the first, five a step


@pytest.fixture(scope="module")
def third():
    """A model, and the law of the third token after a prompt at temperature 0.2, all likely first and second ones
    added up."""
    model, prompt = Transformer(CONFIG, IO["token_map"]), IDS[0, :6].tolist()
    model.load_state_dict(WEIGHTS)
    model.eval().requires_grad_(False)

    def laws(prompts):
        hidden = model.run(torch.tensor(prompts)).hidden[:, -1]
        return (possible(model, hidden).double() / 0.2).softmax(-1)

    first, law = laws([prompt])[0], torch.zeros(CONFIG.vocab_size, dtype=torch.float64)
    for a in (first > 1e-5).nonzero()[:, 0].tolist():
        both = first[a] * laws([[*prompt, a]])[0]
        likely = (both > 1e-5).nonzero()[:, 0].tolist()
        if likely:
            law += both[likely] @ laws([[*prompt, a, b] for b in likely])
    assert law.sum() > 0.995
    return model, prompt, law / law.sum()


@pytest.mark.parametrize(
    ("verifier", "scheduler"),
    [(block_verify, None), (rejection_verify, Delayed(1 / (1000 + torch.arange(10_000))))],
    ids=["block", "token by token, delayed budget"],
)
def test_sampled_speculation_has_the_law_of_sampling(third, verifier, scheduler, monkeypatch):
    """The drafter's law is the model's own at another temperature, its confidence knows the draft before."""
    (model, prompt, law), N = third, 1500

    def drafter(tokens, cache, temperature, u, _):
        ids, laws = [tokens], []
        for i in range(2):
            laws.append(0.6 * possible(model, model.run(torch.stack(ids, dim=1), cache).hidden[:, -1]))
            ids.append(sample((laws[-1].double() / temperature).softmax(-1), u[:, i]))
        ids = torch.stack(ids, dim=1)
        return Draft(ids, torch.stack(laws, dim=1), 2.0 - 4 * (ids[:, :-1] % 2), None, None)

    monkeypatch.setattr(model, "draft", drafter)
    options = {"temperature": 0.2, "speculate": True, "verifier": verifier, "scheduler": scheduler}
    found = torch.tensor(generate(model, [prompt] * N, 3, **options))[:, 2].bincount(minlength=len(law))
    rare = law * N < 8
    found, expected = (torch.cat([x[~rare], x[rare].sum().unsqueeze(0)]) for x in (found, law * N))
    freedom, chi2 = len(expected) - 1, ((found - expected) ** 2 / expected).sum().item()
    assert freedom > 5
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5


def test_a_row_that_was_fast_waits_for_the_others(model, monkeypatch):
    """Its last block went further than it was asked for."""
    prompts = [IDS[0, :18].tolist(), IDS[1, :18].tolist()]
    plain = torch.tensor(generate(model, prompts, 40))

    def oracle(tokens, cache, *_):
        ids = torch.stack([row[n - 18 :][:5] for row, n in zip(plain, cache.lengths.tolist(), strict=True)])
        ids[1, 1:] = (ids[1, 1:] + 1) % 7  # never right
        return type("Draft", (), {"ids": ids, "logits": None})

    monkeypatch.setattr(model, "draft", oracle)
    took = Summary()
    assert generate(model, prompts, 20, speculate=True, summary=took) == plain[:, :20].tolist()
    assert took.steps == 19


def test_without_a_drafter_speculation_is_refused():
    with pytest.raises(ValueError, match="expected a model with a drafter"):
        generate(Transformer(CONFIG, IO["token_map"], drafter=False), [[1]], 2, speculate=True)
