"""V4's two forms against the reference in float64, fed the same bits; then their traffic, which is their point.

The oracle rounds to the streams' dtype where the kernels store: the new streams, and z before its norm.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from triton.runtime.interpreter import InterpreterBuilder

from dsv41_edu.mhc import seam
from kernels import hyper_connections
from kernels import multi_pass as module
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.hyper_connections import finish_coefficients
from kernels.launch import INTERPRETED
from kernels.multi_pass import SPLIT, four_pass, fused_collapse, fused_expand, fused_project, fused_rms_norm, two_pass
from tests.kernels.test_experts import ulps
from tests.kernels.test_gate import DEVICE, drawn, poison
from tests.kernels.test_sinkhorn import LIMIT

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = json.loads((VECTORS / "mhc_seam.json").read_text())["cases"]
DTYPES = [torch.bfloat16, torch.float32]
PER_TOKEN = ("out", "streams", "post", "comb")
SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}  # of one program
interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


def case(T, n, d, dtype=torch.bfloat16):
    columns = n * n + 2 * n
    return dict(
        out=drawn(T, d, dtype=dtype),
        streams=drawn(T, n, d, seed=1, dtype=dtype),
        post=drawn(T, n, seed=2).sigmoid() * 2,
        comb=drawn(T, n, n, seed=3).softmax(1),
        fn=drawn(columns, n * d, seed=4) / (n * d) ** 0.5,
        base=drawn(columns, seed=5),
        scale=torch.tensor([0.7, 1.3, -2.0], device=DEVICE),
        norm_weight=drawn(d, seed=6).sigmoid() * 2,
    )


def norm(z, weight, norm_eps=1e-20):
    return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + norm_eps) * weight


def oracle(out, streams, post, comb, fn, base, scale, norm_weight, *options):
    dtype = streams.dtype
    out, streams, post, comb, fn, base, scale, weight = (
        x.double() for x in (out, streams, post, comb, fn, base, scale, norm_weight)
    )
    streams = seam.expand(out, streams, post, comb).to(dtype).double()
    maps = seam.coefficients(streams, fn, base, scale, *options)
    z = seam.collapse(streams, maps[0]).to(dtype).double()
    return streams, norm(z, weight, *options[2:]), *maps


def close(ours, expected):
    assert ours.shape == expected.shape
    if ours.dtype == torch.float32:
        assert (ours - expected).norm() <= LIMIT * expected.norm()
    elif ours.numel():
        assert (ulps(ours, expected.bfloat16()) <= 1).double().mean() >= 0.999


def check(inputs, *options):
    """Both forms against the oracle, and against each other: to the bit, unless a compiler orders the norm's sum."""
    ours, other = two_pass(*inputs.values(), *options), four_pass(*inputs.values(), *options)
    for one, expected in zip(ours, oracle(*inputs.values(), *options), strict=True):
        close(one, expected)
    assert [x.dtype for x in ours] == [inputs["streams"].dtype] * 2 + [torch.float32] * 3
    for i, (one, two) in enumerate(zip(ours, other, strict=True)):
        assert torch.equal(one, two) or (i == 1 and not INTERPRETED)
        close(two, one.double())


@pytest.mark.parametrize(
    ("T", "dtype"), [(T, DTYPES[0]) for T in (0, 1, 2, 13, 17, 63)] + [(T, DTYPES[1]) for T in (0, 1, 17)]
)
def test_any_number_of_tokens(T, dtype, monkeypatch):
    intact = poison(monkeypatch)
    check(case(T, 4, 32, dtype), 2)
    intact()


@pytest.mark.parametrize("n", range(1, 9))
def test_any_number_of_streams(n, monkeypatch):
    intact = poison(monkeypatch)
    check(case(3, n, 21), 2)
    intact()


@pytest.mark.parametrize(("n", "d", "dtype"), [(4, 1, DTYPES[0]), (4, 259, DTYPES[0]), (2, 131, DTYPES[1])])
def test_other_sizes(n, d, dtype, monkeypatch):
    """Of one channel, and of several splits, the last of which has 3."""
    intact = poison(monkeypatch)
    check(case(2, n, d, dtype), 2)
    intact()


def test_more_splits_and_the_official_width():
    """Projected are fewer channels than collapsed, for the interpreter takes its time for each split."""
    inputs = case(1, 4, 1280)
    names = "streams", "fn", "base", "scale"
    maps = finish_coefficients(
        fused_project(inputs["streams"], inputs["fn"]), *(inputs[n] for n in names[2:]), 4, 1280
    )
    for one, expected in zip(maps, seam.coefficients(*(inputs[n].double() for n in names)), strict=True):
        close(one, expected)
    streams, pre, weight = drawn(2, 4, 5120, dtype=torch.bfloat16), drawn(2, 4, seed=1), drawn(5120, seed=2)
    z = seam.collapse(streams.double(), pre.double()).bfloat16().double()
    close(fused_collapse(streams, pre, weight), norm(z, weight.double()))


def test_each_option_arrives():
    check(case(3, 4, 32, torch.float32), 3, 1e-2, 0.3)


@pytest.mark.parametrize("case", [pytest.param(c, id=f"{c['case']}") for c in CASES])
def test_public_vectors(case):
    n, d, tensors = case["hc"], case["d"], load_file(VECTORS / "mhc_seam.safetensors", device=DEVICE)
    given = {name.split(".")[1]: x for name, x in tensors.items() if name.startswith(f"case{case['case']}.")}
    maps = finish_coefficients(fused_project(given["X"], given["fn"]), given["base"], given["scale"], n, d)
    ours = dict(zip(("pre", "post", "comb"), maps, strict=True))
    ours["collapsed_multi_pass"] = fused_collapse(given["X"], maps[0])
    ours["expanded"] = fused_expand(given["F_out"], given["X"], *maps[1:])
    for name, one in ours.items():
        limit = 2e-5 if name == "comb" and case["comb_logit_scale"] >= 30 else 1e-5
        assert ((one - given[name]).abs() / (1 + given[name].abs())).max() <= limit, name


# ---- the parts


def test_a_permutation_moves_the_streams():
    """comb's first index is the old stream. One that is used transposed, or dropped, can't do that."""
    streams, out = drawn(2, 4, 40).bfloat16(), torch.zeros(2, 40, device=DEVICE).bfloat16()
    to = [2, 0, 3, 1]
    comb = torch.eye(4, device=DEVICE)[to].expand(2, 4, 4).contiguous()
    mixed = fused_expand(out, streams, torch.ones(2, 4, device=DEVICE), comb)
    assert torch.equal(mixed[:, to], streams)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_projection_of_one_channel_is_a_column_of_fn_to_the_bit(dtype):
    """All 24 bits of it, whatever the streams' dtype."""
    n, d = 2, 19
    fn = drawn(8, n * d)
    for channel in (0, 18, 19, 37):
        streams = torch.zeros(1, n * d, device=DEVICE, dtype=dtype).index_fill(
            1, torch.tensor(channel, device=DEVICE), 1
        )
        partials = fused_project(streams.view(1, n, d), fn)
        assert partials.shape == (1, 1, 9)
        assert torch.equal(partials[0, 0], torch.cat([fn[:, channel], fn.new_ones(1)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_partials_are_of_the_splits_channels(dtype):
    streams, fn = drawn(3, 2, 140, dtype=dtype), drawn(8, 280, seed=1)
    partials = fused_project(streams, fn)
    weights = fn.double().view(8, 2, 140)
    for split, channels in zip(partials, (slice(SPLIT), slice(SPLIT, 140)), strict=True):
        v = streams[..., channels].double()
        expected = torch.einsum("tci,mci->tm", v, weights[..., channels])
        close(split, torch.cat([expected, v.square().sum((1, 2))[:, None]], 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_collapse_and_norm_apart_and_together(dtype):
    streams, pre, weight = drawn(5, 3, 77, dtype=dtype), drawn(5, 3, seed=1), drawn(77, seed=2)
    z = fused_collapse(streams, pre)
    close(z, seam.collapse(streams.double(), pre.double()))
    normed = fused_rms_norm(z, weight, 0.2)
    close(normed, norm(z.double(), weight.double(), 0.2))
    close(fused_collapse(streams, pre, weight, 0.2), normed.double())


def test_the_unfused_chain_differs_in_the_order_of_sums_alone():
    inputs = case(6, 4, 64, torch.float32)
    out, streams, post, comb, fn, base, scale, weight = inputs.values()
    streams = seam.expand(out, streams, post, comb)
    maps = seam.coefficients(streams, fn, base, scale)
    chain = streams, norm(seam.collapse(streams, maps[0]), weight), *maps
    for one, expected in zip(two_pass(**inputs), chain, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-5, atol=2e-6)


# ---- what goes wrong


def test_streams_of_zeros_have_finite_maps_and_no_input():
    inputs = case(2, 4, 32)
    for name in ("out", "streams"):
        inputs[name] = torch.zeros_like(inputs[name])
    check(inputs, 2)
    streams, z, pre, *_ = two_pass(**inputs)
    assert streams.count_nonzero() == z.count_nonzero() == 0
    torch.testing.assert_close(pre[0], inputs["base"][:4].sigmoid() + 1e-6)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum says so
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_token(dtype):
    inputs = case(5, 4, 40, dtype)
    usual = two_pass(**inputs, iterations=2)
    inputs["streams"][2, 1, 7] = float("nan")
    ours = two_pass(**inputs, iterations=2)
    assert ours[0][2].isnan().sum() == 4, "of one channel, in each new stream"
    assert all(x[2].isnan().all() for x in ours[1:])
    for one, before in zip(ours, usual, strict=True):
        assert torch.equal(one[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_runs_are_equal_and_a_row_alone_equals_the_row_in_a_batch(dtype):
    inputs = case(33, 2, 24, dtype)
    ours = two_pass(**inputs, iterations=2)
    for one, two in zip(ours, two_pass(**inputs, iterations=2), strict=True):
        assert torch.equal(one, two)
    for t in (0, 13, 32):
        row = {name: x[t : t + 1] if name in PER_TOKEN else x for name, x in inputs.items()}
        for alone, batch in zip(two_pass(**row, iterations=2), ours, strict=True):
            assert torch.equal(alone[0], batch[t])


@interpreted
def test_addresses_pass_2_to_the_31(monkeypatch):
    """Of a million tokens only the last ones run, in memory that is only promised for all others."""
    T, last = 2**22 + 19, 19  # times 4 streams of 128 channels
    small = case(last, 4, 128)
    expected = two_pass(**small, iterations=2)
    first = 0

    class LastPrograms:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            nonlocal first
            first = grid[0] - 1
            return self.kernel[(1, *grid[1:])]

    def set_grid_idx(builder, x, y, z):
        builder.grid_idx = first + x, y, z

    def far(x):
        tokens = torch.empty((T, *x.shape[1:]), dtype=x.dtype)
        tokens[-last:] = x
        return tokens

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_grid_idx)
    for place, name in ((module, "expand_project"), (module, "collapse"), (hyper_connections, "finish")):
        monkeypatch.setattr(place, name, LastPrograms(getattr(place, name)))
    big = {name: far(x) if name in PER_TOKEN else x for name, x in small.items()}
    streams, z, *maps = two_pass(**big, iterations=2)
    assert streams.numel() > 2**31
    assert torch.equal(z[-1], expected[1][-1]), "a program has one token"
    for one, other in zip((streams, *maps), (expected[0], *expected[2:]), strict=True):
        assert torch.equal(one[-last:], other)


# ---- traffic


def counted(form, T, n, d, dtype, monkeypatch):
    """The traffic of one form by the tensors' names. `normed` is the norm's result where it isn't `z` itself."""
    inputs = case(T, n, d, dtype)
    C = n * n + 2 * n + 1
    made = {
        "mixed": torch.empty(T, n, d, dtype=dtype),
        "partials": torch.empty(-(-d // SPLIT), T, C),
        "pre": torch.empty(T, n),
        "new_post": torch.empty(T, n),
        "new_comb": torch.empty(T, n, n),
        "z": torch.empty(T, d, dtype=dtype),
        "normed": torch.empty(T, d, dtype=dtype),
    }
    left = [*made.values()]

    def empty(shape, dtype, device):
        tensor = left.pop(0)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    with count_traffic(**inputs, **made) as traffic:
        form(**inputs, iterations=1)
    return traffic


@interpreted
@pytest.mark.parametrize(
    ("T", "n", "d", "dtype"),
    [
        (3, 4, 136, torch.bfloat16),
        (33, 4, 32, torch.bfloat16),
        (2, 3, 37, torch.float32),
        (1, 8, 16, torch.bfloat16),
        (2, 1, 16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("form", "of_n", "more"), [(two_pass, 3, 2), (four_pass, 4, 4)])
def test_what_is_read_and_written(form, of_n, more, T, n, d, dtype, monkeypatch):
    """(3n + 2) d and (4n + 4) d elements a token, 14 d and 20 d for n = 4, and what else passes, by name."""
    traffic = counted(form, T, n, d, dtype, monkeypatch)
    size, C, splits = T * d, n * n + 2 * n + 1, -(-d // SPLIT)
    wide = {name: traffic[name] for name in ("out", "streams", "mixed", "z", "normed")}
    assert sum(t.loaded + t.stored for t in wide.values()) == (of_n * n + more) * size
    assert sum(t.loaded_bytes + t.stored_bytes for t in wide.values()) == (of_n * n + more) * size * dtype.itemsize
    four = form is four_pass
    loaded = {"out": size, "streams": n * size, "mixed": (1 + four) * n * size, "z": size * four, "normed": 0}
    stored = {"out": 0, "streams": 0, "mixed": n * size, "z": size, "normed": size * four}
    assert {name: t.loaded for name, t in wide.items()} == loaded
    assert {name: t.stored for name, t in wide.items()} == stored

    block = 32 if dtype == torch.bfloat16 else 16
    assert traffic["fn"] == Traffic(-(-T // block) * (C - 1) * n * d, 0, 4 * -(-T // block) * (C - 1) * n * d, 0)
    assert traffic["partials"].loaded == traffic["partials"].stored == splits * T * C
    assert traffic["pre"] == Traffic(T * n, T * n, 4 * T * n, 4 * T * n)
    assert traffic["norm_weight"].loaded == size
    channel_blocks = -(-d // 32)
    assert traffic["post"].loaded == T * n * channel_blocks
    assert traffic["comb"].loaded == T * n * n * channel_blocks


# ---- bad input

GOOD = case(3, 4, 8)
VALUES = [
    (
        dict(streams=GOOD["streams"][0]),
        r"streams of shape \[4, 8\]: expected \[T, n, d\] with n from 1 to 8, d from 1",
    ),
    (dict(streams=torch.zeros(3, 9, 8)), r"streams of shape \[3, 9, 8\]"),
    (dict(streams=torch.zeros(3, 0, 8)), r"streams of shape \[3, 0, 8\]"),
    (dict(streams=torch.zeros(3, 4, 0)), r"streams of shape \[3, 4, 0\]"),
    (
        dict(streams=GOOD["streams"].mT.contiguous().mT),
        r"streams of shape .*, strides \(32, 1, 4\): expected .*, contiguous",
    ),
    (dict(out=GOOD["out"][:2]), r"out of shape \[2, 8\], strides \(8, 1\): expected \[3, 8\], contiguous"),
    (dict(post=GOOD["post"][:, :3]), r"post of shape \[3, 3\], strides .*: expected \[3, 4\]"),
    (
        dict(comb=GOOD["comb"].mT),
        r"comb of shape \[3, 4, 4\], strides \(16, 1, 4\): expected \[3, 4, 4\], contiguous",
    ),
    (dict(fn=GOOD["fn"][:23]), r"fn of shape \[23, 32\], .*: expected \[24, 32\]"),
    (dict(base=GOOD["base"][:23]), r"base of shape \[23\], .*: expected \[24\]"),
    (dict(scale=GOOD["scale"][:2]), r"scale of shape \[2\], .*: expected \[3\]"),
    (dict(norm_weight=GOOD["norm_weight"][:7]), r"norm_weight of shape \[7\], .*: expected \[8\]"),
    (dict(post=GOOD["post"].to("meta")), "post is on meta: expected"),
    (dict(iterations=0), "iterations = 0: expected 1 or more"),
]
TYPES = [
    (dict(streams=GOOD["streams"].half()), r"streams are torch\.float16: expected torch\.bfloat16 or torch\.float32"),
    (dict(out=GOOD["out"].float()), r"out is torch\.float32: expected torch\.bfloat16"),
    (dict(fn=GOOD["fn"].bfloat16()), r"fn is torch\.bfloat16: expected torch\.float32"),
    (dict(comb=GOOD["comb"].bfloat16()), r"comb is torch\.bfloat16: expected torch\.float32"),
    (dict(norm_weight=GOOD["norm_weight"].bfloat16()), r"norm_weight is torch\.bfloat16: expected torch\.float32"),
]
X, WEIGHT = GOOD["out"], GOOD["norm_weight"]
PARTS = [
    (
        fused_collapse,
        (GOOD["streams"], GOOD["post"][:2]),
        ValueError,
        r"pre of shape \[2, 4\], .*: expected \[3, 4\]",
    ),
    (fused_project, (GOOD["streams"], GOOD["fn"].mT), ValueError, r"fn of shape \[32, 24\], .*: expected \[24, 32\]"),
    (fused_rms_norm, (X[0], WEIGHT), ValueError, r"x of shape \[8\]: expected \[T, d\] with d from 1"),
    (
        fused_rms_norm,
        (X.T, WEIGHT[:3]),
        ValueError,
        r"x of shape \[8, 3\], strides \(1, 8\): expected .*, contiguous",
    ),
    (fused_rms_norm, (X, WEIGHT[:7]), ValueError, r"norm_weight of shape \[7\], .*: expected \[8\]"),
    (
        fused_rms_norm,
        (X.double(), WEIGHT),
        TypeError,
        r"x is torch\.float64: expected torch\.bfloat16 or torch\.float32",
    ),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [(c, ValueError, m) for c, m in VALUES] + [(c, TypeError, m) for c, m in TYPES],
)
@pytest.mark.parametrize("form", [two_pass, four_pass])
def test_bad_input_is_refused(form, change, error, message):
    with pytest.raises(error, match=message):
        form(**GOOD | change)


@pytest.mark.parametrize(("part", "arguments", "error", "message"), PARTS)
def test_bad_input_of_a_part_is_refused(part, arguments, error, message):
    with pytest.raises(error, match=message):
        part(*arguments)


def test_no_spills_on_any_target_at_the_official_size():
    reports = compile_all(["kernels.multi_pass"])
    assert {report.target for report in reports} == {*TARGETS}
    assert len(reports) == len(TARGETS) * len(module.BUILDS)
    for report in reports:
        assert report.spilled == report.stack_bytes == 0, report
        assert report.shared_bytes <= SHARED[report.target], report
