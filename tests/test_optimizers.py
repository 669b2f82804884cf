"""Steps by hand: orthogonal matrices, balanced tables, AdamW's vectors, and which parameter gets which."""

import pytest
import torch

from dsv41_edu.config import preset
from dsv41_edu.model import Transformer
from dsv41_edu.optimizers import RMS, ReportOptimizer, balance, orthogonalise, report_groups


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (8, 3), (2, 5, 7), (1, 1)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    m = drawn(*shape)
    u, _, v = torch.linalg.svd(m, full_matrices=False)
    found = orthogonalise(m)
    assert (torch.linalg.svdvals(found) > 0.3).all()  # the smallest of few steps may still be on its way
    assert (torch.linalg.svdvals(found) < 1.3).all()
    inside = u.transpose(-1, -2) @ found @ v.transpose(-1, -2)
    torch.testing.assert_close(inside, torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1)), atol=1e-10, rtol=0)


def test_scale_of_the_momentum_is_of_no_matter_and_zero_stays():
    torch.testing.assert_close(orthogonalise(1e6 * drawn(3, 5)), orthogonalise(drawn(3, 5)))
    assert not orthogonalise(torch.zeros(3, 5)).any()


def test_balanced_rows_and_columns():
    m = drawn(30, 8) * torch.logspace(-3, 3, 30, dtype=torch.float64).unsqueeze(1)
    found = balance(m, 50)
    for dim in (0, 1):
        torch.testing.assert_close(found.square().mean(dim).sqrt(), torch.full((m.shape[1 - dim],), RMS).double())
    m[3] = 0
    assert not balance(m)[3].any()
    assert balance(m).isfinite().all()


def test_a_vector_moves_as_by_adamw():
    p, other = (torch.nn.Parameter(drawn(6)) for _ in range(2))
    ours = ReportOptimizer([{"params": [p], "kind": "vector", "weight_decay": 0.1}], lr=0.01)
    theirs = torch.optim.AdamW([other], lr=0.01, betas=(0.9, 0.95), eps=1e-20, weight_decay=0.1)
    for step in range(5):
        for parameter, optimizer in ((p, ours), (other, theirs)):
            parameter.grad = drawn(6, seed=step + 1)
            optimizer.step()
    torch.testing.assert_close(p, other)


def test_heads_are_turned_each_by_itself():
    p, halves = torch.nn.Parameter(drawn(8, 5)), [torch.nn.Parameter(h.clone()) for h in drawn(8, 5).chunk(2)]
    whole = ReportOptimizer([{"params": [p], "kind": "matrix", "heads": 2}], lr=0.1)
    apart = ReportOptimizer([{"params": halves, "kind": "matrix"}], lr=0.1)
    for step in range(3):
        p.grad = drawn(8, 5, seed=step + 1)
        for half, g in zip(halves, p.grad.chunk(2), strict=True):
            half.grad = g.clone()
        whole.step()
        apart.step()
    torch.testing.assert_close(p.detach(), torch.cat([h.detach() for h in halves]))


def test_steps_of_every_kind_have_one_size():
    for kind, shape in (("matrix", (64, 32)), ("matrix", (4, 16, 32)), ("table", (100, 32))):
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = drawn(*shape).float()
        ReportOptimizer([{"params": [p], "kind": kind}], lr=1.0).step()
        assert 0.12 < p.detach().square().mean().sqrt() < 0.28, (kind, shape)


def test_every_parameter_is_in_one_group():
    config = preset("mini")
    model = Transformer(config, device="meta")
    groups = report_groups(model, config.num_attention_heads, 0.1)
    grouped = [p for group in groups for p in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped}) == len(list(model.parameters()))
    kinds = {id(p): group for group in groups for p in group["params"]}
    for name, p in model.named_parameters():
        group = kinds[id(p)]
        if name.endswith("attn.wq_b.weight"):
            assert group["heads"] == config.num_attention_heads
        if "engram.embed" in name:
            assert group["times"] == 5
        assert (group["kind"] == "matrix") == (group.get("weight_decay", 0) > 0)
        if p.ndim == 1 or "hc_" in name:
            assert group["kind"] == "vector", name


def test_it_learns():
    target, p = drawn(6, 4), torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    optimizer = ReportOptimizer([{"params": [p], "kind": "matrix"}], lr=0.05)
    before = target.square().sum()
    for _ in range(200):
        p.grad = 2 * (p.detach() - target)
        optimizer.step()
    assert (p.detach() - target).square().sum() < before / 20
