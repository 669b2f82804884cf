"""Verifiers against the rules in exact fractions, number by number, then against the public vectors.

Laws are eighths and uniforms 64ths, so that a comparison that is a tie in fractions is one in fp64. Rows are ragged,
and what lies behind a row's length is poison. That the rules keep the target's law is test_exact's matter; here it
is only sampled, with the generators. Then greedy, edges, and bad input.
"""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dsv41_edu.benchmarks.dspark import at_once
from dsv41_edu.dspark import verification as v

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "verification.json").read_text())["cases"]
T = load_file(VECTORS / "verification.safetensors")
RULES = {"token_by_token": (v.TOKEN_BY_TOKEN, v.rejection_verify), "block": (v.BLOCK, v.block_verify)}
NAN = float("nan")
drawn = settings(derandomize=True, deadline=None, max_examples=60)
both = pytest.mark.parametrize("verify", [v.rejection_verify, v.block_verify])


def last_below(u, a):
    return max([i + 1 for i, (x, y) in enumerate(zip(u, a, strict=True)) if x < y], default=0)


def by_the_rules(name, p, q, drafts, u):
    """accepted, next, a, w of one row: p, q lists of lists of fractions, u fractions."""
    n, w = len(drafts), [Fraction(1)]
    ratios = [p[i][y] / q[i][y] for i, y in enumerate(drafts)]
    if name == "block":
        for ratio in ratios:
            w.append(min(Fraction(1), w[-1] * ratio))
        a = []
        for i in range(1, n):
            S = sum(max(w[i] * x - y, Fraction(0)) for x, y in zip(p[i], q[i], strict=True))
            a.append(S / (S + 1 - w[i]) if S + 1 - w[i] else Fraction(1))
        a += w[1:][-1:]
        tau = last_below(u[:n], a)
    else:
        w += [Fraction(1)] * n
        a = [min(Fraction(1), ratio) for ratio in ratios]
        tau = next((i for i in range(n) if u[i] >= a[i]), n)
    gone = q[tau] if tau < n else [Fraction(0)] * len(p[0])
    left = [max(w[tau] * x - y, Fraction(0)) for x, y in zip(p[tau], gone, strict=True)]
    left = left if any(left) else p[tau]
    following = next(x for x in range(len(left)) if sum(left[: x + 1]) > u[n] * sum(left))
    return tau, following, a, w


def laws(V):
    """Eighths that sum to 1, zeros included."""
    cuts = st.lists(st.integers(0, 8), min_size=V - 1, max_size=V - 1).map(sorted)
    return cuts.map(lambda c: [Fraction(b - a, 8) for a, b in zip([0, *c], [*c, 8], strict=True)])


@st.composite
def rows(draw, V):
    """One row's p [n + 1], q [n], drafts [n] that q allows, u [n + 1]; q is often p itself."""
    n = draw(st.integers(0, 3))
    p = [draw(laws(V)) for _ in range(n + 1)]
    q = [p[i] if draw(st.booleans()) else draw(laws(V)) for i in range(n)]
    drafts = [draw(st.sampled_from([x for x in range(V) if law[x]])) for law in q]
    u = [Fraction(draw(st.integers(0, 63)), 64) for _ in range(n + 1)]
    return p, q, drafts, u


batches = st.integers(1, 3).flatmap(lambda V: st.tuples(st.just(V), st.lists(rows(V), min_size=1, max_size=4)))


def packed(V, batch, dtype=torch.float64):
    """Tensors of the rows, poison behind each row's end."""
    B, g = len(batch), max(len(drafts) for _, _, drafts, _ in batch)
    p, q = torch.full((B, g + 1, V), NAN, dtype=dtype), torch.full((B, g, V), NAN, dtype=dtype)
    drafts, u = torch.full((B, g), -7), torch.full((B, g + 1), NAN, dtype=torch.float64)
    for b, row in enumerate(batch):
        for tensor, values in zip((p, q, drafts, u), row, strict=True):
            if values:
                tensor[b, : len(values)] = torch.tensor(values, dtype=torch.float64).to(tensor.dtype)
    return p, q, drafts, torch.tensor([len(row[2]) for row in batch]), u


@drawn
@given(batches, st.sampled_from([*RULES]), st.sampled_from([torch.float32, torch.float64]))
def test_follows_the_rules_in_fractions(batch, name, dtype):
    V, batch = batch
    p, q, drafts, lengths, u = packed(V, batch, dtype)
    found = RULES[name][1](p, q, drafts, lengths, u)
    expected = [by_the_rules(name, *row)[:2] for row in batch]
    assert list(zip(found.accepted.tolist(), found.next.tolist(), strict=True)) == expected
    assert (found.accepted.dtype, found.next.dtype) == (torch.int64, torch.int64)


@drawn
@given(rows(3), st.sampled_from([*RULES]))
def test_chances_are_the_rules(row, name):
    p, q = ([torch.tensor([law], dtype=torch.float64) for law in laws] for laws in row[:2])
    a, w = RULES[name][0].chances(p, q, torch.tensor([row[2]], dtype=torch.int64))
    expected_a, expected_w = by_the_rules(name, *row)[2:]
    torch.testing.assert_close(a, torch.tensor([expected_a], dtype=torch.float64), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(w, torch.tensor([expected_w], dtype=torch.float64), rtol=1e-14, atol=1e-15)


# The published vectors.
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_vectors(case, name):
    s = {key.rpartition(".")[2]: t for key, t in T.items() if key.startswith(f"case{case}.sim.")}
    u = torch.cat([s["uniforms"], s["final_uniform"].unsqueeze(1)], 1)
    found = RULES[name][1](s["target_probs"], s["draft_probs"], s["candidates"][:, 1:], None, u)
    assert torch.equal(found.accepted.int(), s[f"accepted_{name}"])
    assert torch.equal(found.next.int(), s["next_block" if name == "block" else "next_token_by_token"])


@pytest.mark.parametrize("case", range(len(CASES)))
def test_vectors_chances(case):
    V, g = CASES[case]["vocab"], CASES[case]["drafts"]
    t = {key.partition(".")[2]: x for key, x in T.items() if key.startswith(f"case{case}.")}
    drafts = t["draft_sequences"].long()
    starts = [sum(V**i for i in range(n)) for n in range(g + 1)]
    powers = [torch.tensor([V ** (i - 1 - k) for k in range(i)], dtype=torch.int64) for i in range(g + 1)]
    at = [starts[i] + (drafts[:, :i] * powers[i]).sum(1) for i in range(g + 1)]
    p, q = [t["prefix_target"][i] for i in at], [t["prefix_draft"][i] for i in at[:-1]]
    a, w = v.block_chances(p, q, drafts)
    single, _ = v.token_chances(p, q, drafts)
    possible = torch.stack([law.gather(1, drafts[:, i : i + 1])[:, 0] for i, law in enumerate(q)], 1).all(1)
    for found, name in ((a, "block_accept_prob"), (w[:, 1:], "block_prefix_prob"), (single, "token_accept_prob")):
        # the stored chances were rounded to fp32, the laws and what they were computed in were not
        torch.testing.assert_close(found[possible], t[name][possible], rtol=2**-24, atol=0)
    assert possible.any()


# Generators.
def seeded(seeds):
    return [torch.Generator().manual_seed(s) for s in seeds]


def random_batch(B=6, g=4, V=5, dtype=torch.float32, sharpness=1.0, seed=0):
    """p, q near it, drafts from q, ragged lengths."""
    r = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, g + 1, V, generator=r, dtype=torch.float64)
    q = (logits[:, :-1] + sharpness * torch.randn(B, g, V, generator=r, dtype=torch.float64)).softmax(-1)
    drafts = torch.multinomial(q.flatten(0, 1), 1, generator=r).view(B, g)
    return logits.softmax(-1).to(dtype), q.to(dtype), drafts, torch.arange(B) % (g + 1)


@both
def test_a_row_in_a_batch_is_what_it_is_alone(verify):
    p, q, drafts, lengths = random_batch(B=50)
    together = verify(p, q, drafts, lengths, seeded(range(50)))
    for b, n in enumerate(lengths.tolist()):
        alone = verify(p[b : b + 1, : n + 1], q[b : b + 1, :n], drafts[b : b + 1, :n], None, seeded([b]))
        assert (alone.accepted[0], alone.next[0]) == (together.accepted[b], together.next[b])
    assert len(together.accepted.unique()) > 2


@both
def test_pieces_change_nothing(verify, monkeypatch):
    p, q, drafts, lengths = random_batch(B=40)
    u = torch.rand(40, 5, generator=torch.Generator().manual_seed(1))
    whole = verify(p, q, drafts, lengths, u)
    for piece in (1, 15):
        monkeypatch.setattr(v, "PIECE", piece)
        assert all(map(torch.equal, verify(p, q, drafts, lengths, u), whole))


@both
def test_a_generator_gives_its_rows_length_and_one(verify):
    p, q, drafts, lengths = random_batch()
    used, plain = seeded(range(6)), seeded(range(6))
    u = torch.zeros(6, 5, dtype=torch.float64)
    for b, n in enumerate(lengths.tolist()):
        u[b, : n + 1] = torch.rand(n + 1, generator=plain[b], dtype=torch.float64)
    assert all(map(torch.equal, verify(p, q, drafts, lengths, used), verify(p, q, drafts, lengths, u)))
    for a, b in zip(used, plain, strict=True):
        assert torch.rand(1, generator=a) == torch.rand(1, generator=b)


@both
@pytest.mark.parametrize("afresh", [False, True])
def test_output_keeps_the_law_unless_the_drafts_numbers_come_again(verify, afresh):
    N, p, q = 4000, torch.tensor([0.7, 0.3]).expand(4000, 2, 2), torch.tensor([0.5, 0.5]).expand(4000, 1, 2)
    generators = seeded(range(N))
    first = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
    drafts = v.sample(q[:, 0].double(), first).unsqueeze(1)
    found = verify(p, q, drafts, None, seeded(range(N)) if afresh else generators)
    # a draft 1 has u from 0.5 up; tested with the same u it passes below 0.6 alone
    expected = 0.1 if afresh else 0.3
    frequency = float(torch.where(found.accepted > 0, drafts[:, 0], found.next).double().mean())
    assert abs(frequency - expected) < 5 * (expected * (1 - expected) / N) ** 0.5


@both
def test_sampled_output_has_the_targets_law(verify):
    N, r = 30_000, torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.4, 0.4], [0.3, 0.3, 0.4]], dtype=torch.float64)
    drafts = torch.stack([torch.multinomial(law, N, replacement=True, generator=r) for law in q], 1)
    found = verify(p.expand(N, 3, 3), q.expand(N, 2, 3), drafts, None, [r] * N)
    first = torch.where(found.accepted > 0, drafts[:, 0], found.next)
    second = torch.where(found.accepted > 1, drafts[:, 1], found.next)
    second = second.where(found.accepted > 0, torch.multinomial(p[1], N, replacement=True, generator=r))
    for a in range(3):
        for b in range(3):
            frequency, expected = float(((first == a) & (second == b)).double().mean()), float(p[0, a] * p[1, b])
            assert abs(frequency - expected) < 5 * (expected * (1 - expected) / N) ** 0.5


def test_the_benchmarks_peer_does_the_same_work():
    p, q, drafts, _ = random_batch(B=200, dtype=torch.float64)
    u = torch.rand(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert all(map(torch.equal, at_once(p, q, drafts, u), v.block_verify(p, q, drafts, None, u)))


# Edges.
@both
def test_a_drafter_that_is_right_loses_nothing(verify):
    p = random_batch(B=20, seed=3)[0]
    drafts = torch.arange(80).view(20, 4) % 5
    u = torch.rand(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u[:, :-1] = 1 - 2**-53  # the largest below 1
    found = verify(p, p[:, :-1], drafts, None, u)
    assert found.accepted.tolist() == [4] * 20
    assert torch.equal(found.next, v.sample(p[:, -1].double(), u[:, -1]))


@both
def test_a_drafter_that_shares_nothing_with_the_target_costs_nothing_but_its_drafts(verify):
    p = torch.tensor([[[0.25, 0.75, 0, 0]] * 3], dtype=torch.float64)
    q = torch.tensor([[[0, 0, 0.5, 0.5]] * 2], dtype=torch.float64)
    for last, expected in ((0.2, 0), (0.3, 1)):
        found = verify(p, q, torch.tensor([[2, 3]]), None, torch.tensor([[0.0, 0.0, last]]))  # u = 0: still no
        assert (found.accepted.item(), found.next.item()) == (0, expected)


@both
def test_decides_in_fp64(verify):
    p = torch.tensor([[[0.5 - 1e-10, 0.5 + 1e-10], [1, 0]]], dtype=torch.float64)
    q = torch.tensor([[[0.5, 0.5]]], dtype=torch.float64)
    for u, expected in ((1 - 3e-10, 1), (1 - 1e-10, 0)):
        found = verify(p, q, torch.tensor([[0]]), None, torch.tensor([[u, 0.5]], dtype=torch.float64))
        assert found.accepted.item() == expected


@both
def test_laws_are_divided_by_their_sums(verify):
    p, _, drafts, lengths = random_batch(dtype=torch.float64, B=40)
    found = verify(p * (1 - 9e-5), p[:, :-1] * (1 + 9e-5), drafts, lengths, torch.full((40, 5), 1 - 1e-6))
    assert torch.equal(found.accepted, lengths)  # p = q, but for the factors


def test_rounding_that_leaves_nothing_falls_back_to_the_target():
    p, q = torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([[0.25, 0.8], [0.25, 0.75]])
    found = v.residual(p, q, torch.ones(2))
    assert found.tolist() == [[0.25, 0.75], [0.25, 0.0]]


@both
def test_nothing_drafted(verify):
    p = torch.tensor([[[0.25, 0.75]], [[0.25, 0.75]]])
    found = verify(p, torch.empty(2, 0, 2), torch.empty(2, 0, dtype=torch.int64), None, torch.tensor([[0.2], [0.3]]))
    assert (found.accepted.tolist(), found.next.tolist()) == ([0, 0], [0, 1])
    none = verify(p[:0], torch.empty(0, 0, 2), torch.empty(0, 0, dtype=torch.int64), None, [])
    assert (none.accepted.shape, none.next.shape) == ((0,), (0,))
    one = verify(torch.ones(1, 3, 1), torch.ones(1, 2, 1), torch.zeros(1, 2, dtype=torch.int32), None, seeded([0]))
    assert (one.accepted.item(), one.next.item()) == (2, 0)


# Greedy.
def test_greedy_is_verification_of_laws_that_are_sure():
    p, q, _, lengths = random_batch(B=60, sharpness=0.8)
    ids, drafts = p.argmax(-1), q.argmax(-1)
    sure = [torch.nn.functional.one_hot(x, 5).double() for x in (ids, drafts)]
    found = v.greedy_verify(p.log(), None, drafts, lengths)
    for verify in (v.rejection_verify, v.block_verify):
        assert all(map(torch.equal, found, verify(*sure, drafts, lengths, seeded(range(60)))))
    for b, n in enumerate(lengths.tolist()):
        agree = next((i for i in range(n) if ids[b, i] != drafts[b, i]), n)
        assert (found.accepted[b], found.next[b]) == (agree, ids[b, agree])
    assert len(found.accepted.unique()) > 2


def test_greedy_takes_the_lowest_of_equals_and_never_looks_behind():
    p = torch.zeros(2, 3, 4)
    p[1, 1:] = NAN
    found = v.greedy_verify(p, None, torch.tensor([[0, 1], [0, 99]]), torch.tensor([2, 0]))
    assert (found.accepted.tolist(), found.next.tolist()) == ([1, 0], [0, 0])
    none = v.greedy_verify(p[:1, :1], None, torch.empty(1, 0, dtype=torch.int64), None)
    assert (none.accepted.tolist(), none.next.tolist()) == ([0], [0])


# Bad input.
P = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]] * 2)
Q, D, U = P[:, :1], torch.zeros(2, 1, dtype=torch.int64), torch.full((2, 2), 0.5)


def changed(tensor, *at_value):
    *at, value = at_value
    tensor = tensor.clone()
    tensor[tuple(at)] = value
    return tensor


@both
@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"p": changed(P, 1, 1, 0, 0.3)}, ValueError, r"p\[1, 1\] has sum 1.05"),
        ({"q": changed(Q, 1, 0, 0, 0.3)}, ValueError, r"q\[1, 0\] has sum 0.8"),
        ({"p": P * 1.00015}, ValueError, r"p\[0, 0\] has sum 1.00015"),
        ({"q": Q * 0.99985}, ValueError, r"q\[0, 0\] has sum 0.99985"),
        ({"p": changed(P, 0, 0, 1, NAN)}, ValueError, r"p\[0, 0\] has sum nan"),
        ({"p": changed(P, 0, 1, 1, float("inf"))}, ValueError, r"p\[0, 1\] has sum inf"),
        ({"p": changed(P, 1, 0, torch.tensor([-0.5, 1.5]))}, ValueError, r"p\[1, 0\] .* smallest entry -0.5"),
        ({"q": changed(Q, 1, 0, torch.tensor([1.5, -0.5]))}, ValueError, r"q\[1, 0\] .* smallest entry -0.5"),
        ({"q": changed(Q, 1, 0, torch.tensor([0.0, 1.0]))}, ValueError, r"drafts\[1, 0\] = 0 has q = 0"),
        ({"p": P.log()}, ValueError, r"p\[0, 0\]"),
        ({"p": P.bfloat16()}, TypeError, "p is torch.bfloat16"),
        ({"q": Q.half()}, TypeError, "q torch.float16"),
        ({"p": P[:, :1]}, ValueError, r"p \[2, 1, 2\]"),
        ({"p": P[:1]}, ValueError, r"p \[1, 2, 2\]"),
        ({"p": P[0]}, ValueError, r"p \[2, 2\]"),
        ({"p": P[:, :, :0], "q": Q[:, :, :0]}, ValueError, r"p \[2, 2, 0\]"),
        ({"q": P}, ValueError, r"expected q \[B, g, V\] = \[2, 1, 2\]"),
        ({"drafts": D[:, 0]}, ValueError, r"drafts \[2\]"),
        ({"drafts": D.float()}, TypeError, "drafts is torch.float32"),
        ({"drafts": D + 2}, ValueError, r"drafts\[0, 0\] = 2: expected an id from 0 to 1"),
        ({"drafts": changed(D, 1, 0, -1)}, ValueError, r"drafts\[1, 0\] = -1"),
        ({"lengths": torch.tensor([1, 2])}, ValueError, r"lengths = \[1, 2\]: expected 0 to 1"),
        ({"lengths": torch.tensor([-1, 1])}, ValueError, r"lengths = \[-1, 1\]"),
        ({"lengths": torch.tensor([1])}, ValueError, r"lengths is torch.int64 \[1\]"),
        ({"lengths": torch.tensor([1.0, 1.0])}, ValueError, "lengths is torch.float32"),
        ({"draws": U[:, :1]}, ValueError, r"draws \[2, 1\]: expected \[B, g \+ 1\] = \[2, 2\]"),
        ({"draws": changed(U, 1, 1, 1.0)}, ValueError, r"draws\[1, 1\] = 1.0"),
        ({"draws": changed(U, 0, 1, -0.1)}, ValueError, r"draws\[0, 1\] = -0.1"),
        ({"draws": changed(U, 0, 0, NAN)}, ValueError, r"draws\[0, 0\] = nan"),
        ({"draws": seeded([0])}, ValueError, "1 generators: expected one for each of 2 rows"),
    ],
)
def test_refuses(verify, arguments, error, says):
    fine = {"p": P, "q": Q, "drafts": D, "lengths": None, "draws": U}
    assert verify(**fine).accepted.tolist() == [1, 1]
    with pytest.raises(error, match=says):
        verify(**fine | arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"p": changed(P, 1, 1, 0, NAN)}, ValueError, r"p\[1, 1\] has a NaN"),
        ({"p": P[:, :1]}, ValueError, r"p \[2, 1, 2\]"),
        ({"q": P}, ValueError, r"expected q \[B, g, V\]"),
        ({"drafts": D + 2}, ValueError, r"drafts\[0, 0\] = 2"),
        ({"lengths": torch.tensor([1, 2])}, ValueError, "lengths"),
    ],
)
def test_greedy_refuses(arguments, error, says):
    with pytest.raises(error, match=says):
        v.greedy_verify(**{"p": P, "q": None, "drafts": D, "lengths": None} | arguments)
