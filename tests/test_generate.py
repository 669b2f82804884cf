"""What is written: public greedy tokens, batches, draws, ends, images, what it took, and what is refused."""

import sys

import pytest
import torch
from small_models import CONFIG, IDS, IO, SEEING, drawn, drawn_model, public_model

from dsv41_edu import checkpoint
from dsv41_edu import generate as command
from dsv41_edu.config import preset
from dsv41_edu.experiments import text
from dsv41_edu.generate import Summary, generate, stream
from dsv41_edu.vision import merged, span_length

PROMPTS = [IDS[0, :18].tolist(), IDS[1, :5].tolist(), IDS[1, :1].tolist()]


@pytest.fixture(scope="module")
def model():
    return public_model()


def test_public_greedy_tokens(model):
    assert generate(model, IDS[:, :18].tolist(), 16) == IO["greedy.tokens"].tolist()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"replay": True}])
def test_a_row_is_what_it_would_be_alone(model, options):
    together = generate(model, PROMPTS, 10, seed=3, **options)
    for row, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], 10, seed=3 + row, **options) == [together[row]]


def test_a_seed_gives_the_same_and_another_seed_another(model):
    one, again, other = (generate(model, PROMPTS[:1], 12, temperature=1.0, seed=s) for s in (1, 1, 2))
    assert one == again != other


def test_draws_follow_the_probabilities(model):
    many = generate(model, [PROMPTS[1]] * 400, 1, temperature=0.3, seed=0)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[1]]))[0, -1]
    logits[CONFIG.image_token_id] = float("-inf")
    p = (logits / 0.3).softmax(-1)
    likeliest = int(p.argmax())
    share = sum(row == [likeliest] for row in many) / 400
    assert abs(share - p[likeliest]) < 4 * (p[likeliest] * (1 - p[likeliest]) / 400).sqrt()


def test_a_row_ends_with_its_stop(model):
    whole = generate(model, PROMPTS, 12)
    stop = whole[0][4]
    ended = generate(model, PROMPTS, 12, stop=stop)
    assert ended[0] == whole[0][: whole[0].index(stop) + 1]
    for row, expected in zip(ended, whole, strict=True):
        assert row == (expected[: expected.index(stop) + 1] if stop in expected else expected)


def test_what_it_took(model):
    took = Summary()
    steps = list(stream(model, PROMPTS, 6, summary=took))
    assert [list(map(len, step)) for step in steps] == [[1, 1, 1]] * 6
    assert (took.prompt_tokens, took.tokens, took.steps) == (24, 18, 5)
    assert took.rows_read == (24 + 3 * 5) * 12
    assert took.cache_bytes == model.cache(3, 24).nbytes
    assert took.touched.shape == (10, 8)
    assert "24 prompt tokens" in str(took)


def test_an_image_token_is_never_written(model):
    changed = public_model()
    changed.head.weight[CONFIG.image_token_id] = 100 * changed.head.weight[0]
    assert CONFIG.image_token_id not in generate(changed, PROMPTS, 20, temperature=2.0)[0]


def test_images():
    model, image = drawn_model(SEEING), SEEING.image_token_id
    v = SEEING.vision_config
    pictures = [(drawn(r * c, 3, v.patch_size, v.patch_size, seed=r), r, c) for r, c in ((5, 4), (3, 7))]
    spans = [span_length(*merged(v, r, c)) for _, r, c in pictures]
    prompt = [1, 2, *[image] * spans[0], 3, *[image] * spans[1], 4]
    together = generate(model, [prompt, [5, 6]], 4, images=[pictures, []])
    assert generate(model, [prompt], 4, images=[pictures]) == together[:1]
    assert len(generate(model, [[1, *[image] * sum(spans), 4]], 4, images=[pictures])[0]) == 4  # side by side
    for broken, given in (
        ([1, *[image] * (spans[0] - 1), 4], pictures[:1]),
        ([1, *[image] * (spans[0] + 1), 4], pictures[:1]),
        ([1, *[image] * spans[0], 4], []),
        ([1, 2, 4], pictures[:1]),
    ):
        with pytest.raises(ValueError, match=r"prompt 0: .*(span|image)"):
            generate(model, [broken], 4, images=[given])
    with pytest.raises(ValueError, match="images of 1 rows: expected 2"):
        generate(model, [prompt, prompt], 4, images=[pictures])


@pytest.mark.parametrize(
    ("prompts", "more", "said"),
    [
        ([], 3, "0 prompts"),
        ([[1]], 0, "max_new_tokens = 0"),
        ([[1], []], 3, "prompt 1 of 0 tokens"),
        ([[1] * 126], 3, "prompt 0 of 126 tokens: expected 1 to 125"),
        ([[256]], 3, "ids from 256 to 256"),
    ],
)
def test_prompts_that_are_refused(model, prompts, more, said):
    with pytest.raises(ValueError, match=said):
        generate(model, prompts, more)


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_temperatures_that_are_refused(model, temperature):
    with pytest.raises(ValueError, match="temperature"):
        generate(model, [[1]], 2, temperature=temperature)


def test_too_large_a_cache_is_foreseen(model, monkeypatch):
    monkeypatch.setattr(checkpoint, "available_memory", lambda _: 1000)
    with pytest.raises(MemoryError, match=r"needs .* bytes, 1,000 available"):
        generate(model, [[1]], 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("checkpoint") / "mini"
    model = drawn_model(preset("mini").replace(n_routed_experts=4, moe_intermediate_size=32), torch.float32)
    checkpoint.save(model, at, tokenizer=text.tokenizer())
    return at


def run_command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["generate", *map(str, arguments)])
    command.main()


def test_the_command_writes_on(folder, monkeypatch, capsys):
    run_command(monkeypatch, "--checkpoint", folder, "--prompt", "In the beginning", "--max-new-tokens", 5)
    out, err = capsys.readouterr()
    model = checkpoint.load(folder, dtype=torch.float32)
    prompt = [0, *text.tokenizer().encode("In the beginning", add_special_tokens=False).ids]
    written = text.tokenizer().decode([*prompt, *generate(model, [prompt], 5, stop=1)[0]])
    assert out.rstrip("\n") == written.rstrip("\ufffd")
    assert "5 tokens in" in err


def test_the_command_drafts_unless_told_not_to(tmp_path, monkeypatch, capsys):
    model = drawn_model(preset("mini").replace(n_routed_experts=4, moe_intermediate_size=32), torch.float32, True)
    checkpoint.save(model, tmp_path / "mini", tokenizer=text.tokenizer())
    asked, real = [], command.stream
    monkeypatch.setattr(command, "stream", lambda *a, **o: asked.append(o["speculate"]) or real(*a, **o))
    written = []
    for more in ((), ("--no-draft",)):
        run_command(monkeypatch, "--checkpoint", tmp_path / "mini", "--prompt", "And", "--max-new-tokens", 5, *more)
        written.append(capsys.readouterr().out)
    assert asked == [True, False]
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompt", "a", "--temperature", "-1"], "temperature = -1"),
        (["--prompt", "a", "--max-new-tokens", "5000"], "expected 1 to"),
    ],
)
def test_the_command_says_what_is_wrong(folder, monkeypatch, capsys, arguments, said):
    with pytest.raises(SystemExit) as left:
        run_command(monkeypatch, "--checkpoint", folder, *arguments)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_the_command_without_a_checkpoint(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_command(monkeypatch, "--checkpoint", tmp_path, "--prompt", "a")
    assert "config.json" in capsys.readouterr().err
