"""The two heads against sums in plain Python, against the public vectors of a whole model, and in low precision."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv41_edu.config import preset
from dsv41_edu.dspark.heads import ConfidenceHead, MarkovHead
from dsv41_edu.generations import plan

VECTORS = Path(__file__).parents[1] / "vectors"


def filled(module, seed=0, dtype=torch.float64):
    """Weights from a generator, of size one."""
    r = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.data = torch.randn(weight.shape, generator=r, dtype=torch.float64)
    return module.to(dtype)


def test_markov_head_is_a_table_of_low_rank():
    V, rank = 7, 3
    head = filled(MarkovHead(V, rank))
    E, H = head.embed.weight.tolist(), head.head.weight.tolist()
    tokens = torch.tensor([[0, 6], [3, 3]])
    found = head(tokens)
    assert found.shape == (2, 2, V)
    for b in range(2):
        for i in range(2):
            row = [sum(H[v][r] * E[tokens[b, i]][r] for r in range(rank)) for v in range(V)]
            assert found[b, i].tolist() == pytest.approx(row, rel=1e-12)
    assert torch.linalg.matrix_rank(head(torch.arange(V))) == rank


def test_confidence_head_weighs_states_first_then_rows():
    head = filled(ConfidenceHead(4, 2))
    (w,) = head.proj.weight.tolist()
    r = torch.Generator().manual_seed(1)
    x, rows = (torch.randn(3, 5, n, generator=r, dtype=torch.float64) for n in (4, 2))
    found = head(x, rows)
    assert found.shape == (3, 5)
    for b in range(3):
        for i in range(5):
            both = [*x[b, i].tolist(), *rows[b, i].tolist()]
            assert found[b, i].item() == pytest.approx(sum(a * c for a, c in zip(w, both, strict=True)), rel=1e-12)


@pytest.mark.parametrize("name", ["drafter20", "drafter3"])
def test_vectors(name):
    weights = load_file(VECTORS / "whole_A_weights.safetensors")
    v = {
        k.partition(".")[2]: t for k, t in load_file(VECTORS / "whole_A_io.safetensors").items() if k.startswith(name)
    }
    V, rank = weights["mtp.1.markov_head.embed.weight"].shape
    heads = MarkovHead(V, rank), ConfidenceHead(v["collapsed"].shape[-1], rank)
    for head, name in zip(heads, ("mtp.1.markov_head.", "mtp.1.confidence_head."), strict=True):
        head.load_state_dict({k.removeprefix(name): t for k, t in weights.items() if k.startswith(name)})
        head.double()
    ids = v["draft_ids"].long()[..., :-1]
    corrected = v["base_logits"] + heads[0](ids)
    torch.testing.assert_close(corrected, v["corrected_logits"], rtol=0, atol=1e-12)
    assert torch.equal(corrected.argmax(-1), v["draft_ids"].long()[..., 1:])
    found = heads[1](v["collapsed"], heads[0].embed(ids))
    torch.testing.assert_close(found, v["confidence_logits"], rtol=0, atol=1e-6)  # the states were stored in fp32


def test_low_precision_weights_are_multiplied_in_fp32():
    markov, confidence = filled(MarkovHead(50, 64)), filled(ConfidenceHead(64, 64))
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    tokens = torch.arange(9)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = [m.to(dtype) for m in (markov, confidence)]
        found = narrow[0](tokens), narrow[1](x.to(dtype), narrow[0].embed(tokens))
        wide = [m.double() for m in narrow]
        expected = wide[0](tokens), wide[1](x.to(dtype).double(), wide[0].embed(tokens))
        for a, b in zip(found, expected, strict=True):
            assert (a.dtype, b.dtype) == (torch.float32, torch.float64)
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)


def test_gradients_reach_rows_that_were_asked_for():
    markov, confidence = filled(MarkovHead(6, 3)), filled(ConfidenceHead(4, 3))
    tokens, x = torch.tensor([1, 4, 4]), torch.ones(3, 4, dtype=torch.float64)
    markov(tokens).square().sum().backward()
    assert markov.embed.weight.grad.any(1).tolist() == [False, True, False, False, True, False]
    assert markov.head.weight.grad.all()
    confidence(x, markov.embed(tokens)).sum().backward()
    assert confidence.proj.weight.grad[0, :4].tolist() == [3, 3, 3, 3]


def test_shapes_and_names_are_the_checkpoints():
    c = preset("v41_flash")
    planned = {t.name: tuple(t.shape) for t in plan(c)}
    with torch.device("meta"):
        heads = {
            "markov_head": MarkovHead(c.vocab_size, c.dspark_markov_rank),
            "confidence_head": ConfidenceHead(c.hidden_size, c.dspark_markov_rank),
        }
    for prefix, head in heads.items():
        of_plan = {n.partition(prefix + ".")[2]: shape for n, shape in planned.items() if f".{prefix}." in n}
        assert of_plan == {n: tuple(p.shape) for n, p in head.named_parameters()}
