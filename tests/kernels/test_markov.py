"""The fused Markov step against float64, fed the same bits, and against the head's own step.

Greedy ids are exact, logits within an rms relative error of 1e-5, and what is drawn is what `sample` draws from the
logits that were written. Outputs start as NaN and as ids out of range, with margins that must stay as they were.
"""

import mmap
from collections import Counter

import pytest
import torch

from dsv41_edu.dspark import heads
from dsv41_edu.dspark.heads import MarkovHead
from dsv41_edu.dspark.verification import sample
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.launch import INTERPRETED, tl, triton
from kernels.launches import count_launches
from kernels.markov import draw, fused_markov
from tests.kernels.test_experts import SHARED
from tests.kernels.test_gate import DEVICE, drawn, poison

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
NONE = float("-inf")
BELOW = 1 - 2**-53
CHECK = Counter(min=1, max=1)  # of the tokens, on a CPU alone


def uniforms(*values):
    return torch.tensor(values, dtype=FP64, device=DEVICE)


def case(B, V, r, dtype=BF16, seed=0):
    """base, tokens, embed, head; what is added is as large as base, so that many ids have a chance."""
    tokens = torch.randint(0, V, (B,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    embed, head = (drawn(V, r, seed=seed + i, dtype=dtype) for i in (1, 2))
    return drawn(B, V, seed=seed + 3), tokens, embed, head / r**0.5


def logits_of(base, tokens, embed, head):
    """In float64."""
    return base.double() + embed[tokens.long()].double() @ head.double().T


def law(logits, temperature):
    return (logits.double() / temperature).softmax(-1)


@pytest.mark.parametrize(
    ("B", "V", "r", "dtype"), [(1, 1, 1, FP32), (2, 127, 8, BF16), (17, 300, 130, BF16), (13, 70, 24, FP32)]
)
def test_ids_are_exact_and_logits_close(B, V, r, dtype, monkeypatch):
    given = case(B, V, r, dtype)
    exact, u = logits_of(*given), torch.rand(B, dtype=FP64, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    intact = poison(monkeypatch)
    ids, logits = fused_markov(*given)
    assert torch.equal(ids, exact.argmax(-1))
    assert logits is None
    ids, logits = fused_markov(*given, 0.7, u)
    intact()
    monkeypatch.undo()
    assert (logits.dtype, ids.dtype) == (FP32, torch.int64)
    assert (logits - exact).norm() <= 1e-5 * exact.norm()
    assert torch.equal(ids, sample(law(logits, 0.7), u))


def test_it_is_the_unfused_chain_to_the_bit_where_sums_are_exact():
    base, tokens, embed, head = (x.sign() if x.is_floating_point() else x for x in case(5, 200, 16))
    chain = base + embed[tokens].float() @ head.float().T
    assert (chain == chain.amax(-1, True)).sum() > 5, "equals among the best"
    assert torch.equal(fused_markov(base, tokens, embed, head)[0], chain.argmax(-1))
    assert torch.equal(fused_markov(base, tokens, embed, head, 1.0, uniforms(*[0.5] * 5))[1], chain)


def test_the_lowest_id_of_equals_wins():
    base, tokens, embed, head = case(3, 300, 4)
    base, embed = torch.full_like(base, -2.0), embed.zero_()
    base[1, [7, 131, 299]] = 5.0
    base[2, [129, 130]] = -1.0
    assert fused_markov(base, tokens, embed, head)[0].tolist() == [0, 7, 129]


def test_a_hidden_id_is_never_chosen_and_a_nan_comes_last():
    """Whole tiles are hidden in the third row; the fourth has one number among NaN."""
    base, tokens, embed, head = case(4, 400, 4)
    embed.zero_()
    base[0, 5], base[1, 399], base[2], base[3] = NONE, NONE, NONE, float("nan")
    base[2, 390], base[3, 77] = -3.0, -1e30
    assert fused_markov(base, tokens, embed, head)[0][2:].tolist() == [390, 77]
    for u in (0.0, 0.5, BELOW):
        ids, _ = fused_markov(base[:3], tokens[:3], embed, head, 1.0, uniforms(u, u, u))
        assert ids[0] != 5
        assert ids[1] != 399
        assert ids[2] == 390


def test_the_ends_of_the_law():
    base, tokens, embed, head = case(2, 300, 4)
    embed.zero_()
    base[:, :3], base[:, 290:] = NONE, NONE
    ids, _ = fused_markov(base, tokens, embed, head, 0.5, uniforms(0.0, BELOW))
    assert ids.tolist() == [3, 289]


def test_each_id_is_drawn_as_often_as_its_law_says():
    """Uniforms at equal distances over tiles of which one is hidden: each id gets its share, give or take one."""
    N, (base, tokens, embed, head) = 150, case(1, 300, 4)
    base[0, 5:290] = NONE
    given = base.expand(N, -1), tokens.expand(N), embed, head
    ids, logits = fused_markov(*given, 0.8, (torch.arange(N, dtype=FP64, device=DEVICE) + 0.5) / N)
    share = torch.bincount(ids, minlength=300)
    assert (share - N * law(logits[0], 0.8)).abs().max() <= 1
    assert (share > 0).sum() >= 8


def test_the_temperature_is_not_rounded_to_fp32():
    """Where u is within 1e-10 of an edge; fp32's 0.1 would move it by 6e-9."""
    base = torch.tensor([[0.2, 0.0]] * 2, device=DEVICE)
    zeros = torch.zeros(2, 1, device=DEVICE)
    edge = law(base[0], 0.1)[0].item()
    tokens = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    ids, _ = fused_markov(base, tokens, zeros, zeros, 0.1, uniforms(edge - 1e-10, edge + 1e-10))
    assert ids.tolist() == [0, 1]


@triton.jit
def draw_once(weights, target, out, N: tl.constexpr):
    tl.store(out, draw(tl.load(weights + tl.arange(0, N)), tl.arange(0, N), tl.load(target)))


@pytest.mark.parametrize(
    ("weights", "target", "expected"),
    [
        ([0, 1, 0, 2], 0.0, 1),
        ([0, 1, 0, 2], 1.0, 3),
        ([0, 1, 0, 2], -1e-17, 1),
        ([0, 1, 2, 0], 3.0, 2),
        ([0, 0, 0, 0], 0.0, 0),
    ],
)
def test_a_draw_ends_at_an_id_with_weight(weights, target, expected):
    """Above a running sum, not at it. A target that rounding put at the total takes the last, below 0 the first."""
    out = torch.tensor([-1], device=DEVICE)
    draw_once[(1,)](torch.tensor(weights, dtype=FP64, device=DEVICE), uniforms(target), out, N=4)
    assert out.item() == expected


# ---- the same again


def test_two_runs_are_equal_and_a_row_alone_equals_the_row_in_a_batch():
    base, tokens, embed, head = given = case(19, 150, 40)
    u = torch.rand(19, dtype=FP64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = fused_markov(*given, 1.3, u)
    assert all(map(torch.equal, fused_markov(*given, 1.3, u), found))
    for b in (0, 18):
        one = slice(b, b + 1)
        alone = fused_markov(base[one], tokens[one], embed, head, 1.3, u[one])
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone, found, strict=True))


def test_rows_may_be_apart():
    """base as the logits of a place of each block, embed and head as halves of one table, tokens of any kind."""
    base, tokens, embed, head = case(3, 140, 16, FP32)
    apart = torch.stack([base * 2, base, base * 3], 1)[:, 1], torch.stack([tokens, tokens], 1)[:, 0].int()
    table = torch.cat([embed, head], 1)
    u = uniforms(0.1, 0.5, 0.9)
    found = fused_markov(*apart, table[:, :16], table[:, 16:], 0.7, u)
    assert all(map(torch.equal, found, fused_markov(base, tokens, embed, head, 0.7, u)))


@interpreted
@pytest.mark.parametrize("name", ["base", "embed", "head"])
def test_addresses_pass_2_to_the_31(name):
    """The last row lies 2.4e9 numbers on, in memory that is only promised; 32 bits would wrap."""
    memory = mmap.mmap(-1, 10_000_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    given = dict(zip(("base", "tokens", "embed", "head"), case(3, 3, 4, FP32), strict=True))
    given["tokens"] = torch.tensor([2, 1, 0])
    u, near = uniforms(0.2, 0.5, 0.8), given[name]
    far = torch.frombuffer(memory, dtype=torch.uint8).view(FP32).as_strided(near.shape, (1_200_000_000, 1))
    far.copy_(near)
    found = fused_markov(**given | {name: far}, temperature=1.0, u=u)
    assert all(map(torch.equal, found, fused_markov(**given, temperature=1.0, u=u)))


@interpreted
def test_what_is_read_and_written():
    """The head and base once, rows of the table once for each tile; the logits where something is drawn from them."""
    B, V, r, tiles = 18, 300, 24, 3
    base, tokens, embed, head = case(B, V, r)
    embed, head = (torch.cat([x, x], 1)[:, :r] for x in (embed, head))  # what lies beyond must not be read

    def read(traffic):
        assert traffic["head"] == Traffic(V * r, 0, 2 * V * r, 0)
        assert traffic["base"] == Traffic(B * V, 0, 4 * B * V, 0)
        assert traffic["embed"] == Traffic(tiles * B * r, 0, 2 * tiles * B * r, 0)
        assert traffic["tokens"].loaded == tiles * B

    with count_traffic(base=base, tokens=tokens, embed=embed, head=head) as traffic, count_launches() as launched:
        fused_markov(base, tokens, embed, head)
    assert traffic["allocated int64"] == Traffic(B * tiles, B * tiles + B, 8 * B * tiles, 8 * (B * tiles + B))
    assert launched - CHECK == {"markov": 1, "likeliest": 1}
    read(traffic)
    u = torch.full((B,), 0.5, dtype=FP64)
    given = dict(base=base, tokens=tokens, embed=embed, head=head, u=u)
    with count_traffic(**given) as traffic, count_launches() as launched:
        ids, _ = fused_markov(**given, temperature=1.0)
    again = sum(min(128, V - i // 128 * 128) for i in ids.tolist())
    assert traffic["allocated float32"].stored == B * V + B * tiles
    assert traffic["allocated float32"].loaded == B * tiles + again
    assert traffic["allocated float64"] == Traffic(B * tiles, B * tiles, 8 * B * tiles, 8 * B * tiles)
    assert traffic["u"].loaded == traffic["allocated int64"].stored == B
    assert launched - CHECK == {"markov": 1, "drawn": 1}
    read(traffic)


# ---- in its place


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_head_uses_it_on_a_gpu(temperature, monkeypatch):
    base, tokens, embed, head = case(5, 60, 8)
    markov = MarkovHead(60, 8).bfloat16()
    markov.embed.weight.data, markov.head.weight.data = embed.cpu(), head.cpu()
    u = uniforms(*[0.3] * 5).cpu() if temperature else None
    given = base.cpu(), tokens.cpu().unsqueeze(1), None, temperature, u
    expected = markov.step(*given)
    monkeypatch.setattr(heads, "fuse", lambda base: True)
    monkeypatch.setattr(heads, "sample", None)  # the plain form would fail
    with torch.no_grad():
        found = markov.step(*given)
    assert torch.equal(found[0], expected[0])
    assert (found[1] is None) == (expected[1] is None) == (temperature == 0)
    if temperature:
        torch.testing.assert_close(found[1], expected[1])


def test_the_kernel_serves_without_gradients_on_a_gpu_alone():
    class OnGpu:
        is_cuda, dtype = True, FP32

    with torch.no_grad():
        assert not heads.fuse(torch.zeros(1))
        assert heads.fuse(OnGpu())
        OnGpu.dtype = FP64
        assert not heads.fuse(OnGpu())
    OnGpu.dtype = FP32
    assert not heads.fuse(OnGpu())


# ---- bad input

BASE, TOKENS, E, H = case(2, 9, 4)
U = uniforms(0.5, 0.5)
VALUES = [
    (dict(base=BASE[0]), r"base \[9\], embed \[9, 4\]: expected \[B, V\] and \[V, r\], from 1"),
    (dict(embed=E[:, :0]), r"base \[2, 9\], embed \[9, 0\]: expected"),
    (dict(embed=E[:8]), r"embed of shape \[8, 4\]: expected \[9, 4\]"),
    (dict(head=H[:, :3]), r"head of shape \[9, 3\]: expected \[9, 4\]"),
    (dict(tokens=TOKENS[:1]), r"tokens of shape \[1\]: expected \[2\]"),
    (dict(base=BASE.T.contiguous().T), r"base has strides \(1, 2\): expected its columns adjacent"),
    (dict(head=H.to("meta")), "head is on meta: expected .*, where base is"),
    (dict(temperature=-1.0), r"temperature = -1\.0: expected a finite number from 0 up"),
    (dict(temperature=float("inf")), "temperature = inf: expected a finite number from 0 up"),
    (dict(temperature=1.0), r"temperature = 1\.0, u not given: expected u for a draw alone"),
    (dict(u=U), r"temperature = 0\.0, u given: expected u for a draw alone"),
    (dict(temperature=1.0, u=U[:1]), r"u of shape \[1\]: expected \[2\]"),
]
TYPES = [
    (dict(base=BASE.double()), r"base is torch\.float64: expected torch\.float32"),
    (dict(embed=E.half()), r"embed is torch\.float16: expected torch\.bfloat16 or torch\.float32"),
    (dict(head=H.float()), r"head is torch\.float32: expected torch\.bfloat16"),
    (dict(tokens=TOKENS.float()), r"tokens is torch\.float32: expected torch\.int64 or torch\.int32"),
    (dict(temperature=1.0, u=U.float()), r"u is torch\.float32: expected torch\.float64"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [(c, ValueError, m) for c, m in VALUES] + [(c, TypeError, m) for c, m in TYPES],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        fused_markov(**dict(base=BASE, tokens=TOKENS, embed=E, head=H, temperature=0.0) | change)


@interpreted
@pytest.mark.parametrize("token", [-1, 9])
def test_a_token_out_of_range_is_refused_where_it_can_be_seen(token):
    with pytest.raises(ValueError, match=rf"tokens from .*{token}.*: expected ids from 0 to 8"):
        fused_markov(BASE, torch.tensor([3, token]), E, H)


def test_no_rows():
    assert fused_markov(BASE[:0], TOKENS[:0], E, H)[0].shape == (0,)
    assert fused_markov(BASE[:0], TOKENS[:0], E, H, 1.0, U[:0])[1].shape == (0, 9)


def test_it_fits_every_target_at_the_official_size():
    reports = compile_all(["kernels.markov"])
    assert {report.target for report in reports} == {*TARGETS}
    for report in reports:
        assert report.spilled == report.stack_bytes == 0, report
        assert report.shared_bytes <= SHARED[report.target], report
