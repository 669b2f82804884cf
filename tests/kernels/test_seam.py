"""The fused seam against the equations in float64, fed the same bits; then what goes wrong in seams.

X' is held against the equation; z and the coefficients against what follows from the X' that was stored, and rstd
against the z that was: in bf16 a rounding that falls the other way would else show in everything after it.
"""

import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv41_edu.mhc.seam import coefficients, collapse, expand, one_hot, single_pass
from dsv41_edu.quantization import fp8_rows_encode
from kernels.counting import Traffic, count_traffic
from kernels.hyper_connections import finish_coefficients
from kernels.launch import INTERPRETED
from kernels.multi_pass import fused_collapse, fused_expand, fused_project
from kernels.seam import fused_single_pass
from tests.kernels.test_experts import ulps
from tests.kernels.test_gate import DEVICE, drawn, poison

interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
BF16, FP32 = torch.bfloat16, torch.float32


def case(T, n, d, dtype=BF16, seed=0):
    """The arguments of `single_pass`: streams and maps that all differ, and coefficients that depend on them."""
    rows = n * n + 2 * n
    maps = drawn(T, rows, seed=seed + 2).sigmoid()
    return {
        "out": drawn(T, d, seed=seed, dtype=dtype),
        "streams": drawn(T, n, d, seed=seed + 1, dtype=dtype),
        "post": (2 * maps[:, :n]).contiguous(),
        "comb": maps[:, 2 * n :].reshape(T, n, n) / n,
        "pending": maps[:, n : 2 * n].contiguous(),
        "fn": drawn(rows, n * d, seed=seed + 3) / (n * d) ** 0.5,
        "base": drawn(rows, seed=seed + 4),
        "scale": torch.tensor([0.7, -1.3, 1.9], device=DEVICE),
    }


def close(ours, expected):
    assert ours.shape == expected.shape
    if ours.dtype == BF16:
        assert not ours.numel() or (ulps(ours, expected.to(BF16)) <= 1).double().mean() >= 0.999
    else:
        assert ours.dtype == FP32
        assert (ours - expected).norm() <= 1e-5 * expected.norm()


def check(ours, out, streams, post, comb, pending, fn, base, scale):
    wide = [x.double() for x in (out, streams, post, comb)]
    close(ours.streams, expand(*wide))
    wide = ours.streams.double()
    close(ours.z, collapse(wide, pending.double()))
    close(ours.rstd, torch.rsqrt(ours.z.double().square().mean(-1) + 1e-20))
    expected = coefficients(wide, fn.double(), base.double(), scale.double())
    for part, reference in zip((ours.pre, ours.post, ours.comb), expected, strict=True):
        assert part.dtype == FP32
        close(part, reference)


@pytest.mark.parametrize(
    ("T", "d", "dtype"),
    [
        (0, 128, BF16),
        (1, 576, BF16),
        (2, 77, BF16),
        (2, 128, FP32),
        (13, 128, BF16),
        (17, 77, FP32),
        (17, 130, BF16),
        (63, 64, BF16),
    ],
)
def test_outputs_are_the_equations(T, d, dtype, monkeypatch):
    intact = poison(monkeypatch)
    given = case(T, 4, d, dtype)
    ours = fused_single_pass(**given)
    assert ours.scales is None
    check(ours, **given)
    intact()


@pytest.mark.parametrize("n", range(1, 9))
def test_any_number_of_streams(n, monkeypatch):
    intact = poison(monkeypatch)
    given = case(3, n, 33, seed=n)
    check(fused_single_pass(**given), **given)
    intact()


def test_the_official_size_with_its_norm(monkeypatch):
    intact = poison(monkeypatch)
    given, weight = case(2, 4, 5120), drawn(5120, seed=9)
    ours = fused_single_pass(**given, norm_weight=weight)
    z = collapse(ours.streams.double(), given["pending"].double()).to(BF16)
    close(ours.rstd, torch.rsqrt(z.double().square().mean(-1) + 1e-20))
    close(ours.z, z.double() * ours.rstd.double()[:, None] * weight.double())
    check(ours._replace(z=z), **given)
    intact()


def test_published_vectors():
    vectors = load_file(Path(__file__).parents[1] / "vectors" / "mhc_seam.safetensors", device=DEVICE)
    for i in range(4):
        v = {name.split(".")[1]: tensor for name, tensor in vectors.items() if name.startswith(f"case{i}.")}
        next_seam = {name: v[name] for name in ("fn", "base", "scale")}
        post, comb = v["post"].float(), v["comb"].float()
        ours = fused_single_pass(v["F_out"], v["X"], post, comb, v["pending_pre"], **next_seam)
        torch.testing.assert_close(ours.streams.double(), v["expanded"], rtol=1e-5, atol=1e-5)

        stay = torch.eye(v["X"].shape[1], device=DEVICE).expand_as(comb).contiguous()
        ours = fused_single_pass(torch.zeros_like(v["F_out"]), v["X"], post, stay, v["pending_pre"], **next_seam)
        assert torch.equal(ours.streams, v["X"])
        torch.testing.assert_close(ours.z.double(), v["collapsed_single_pass"], rtol=1e-5, atol=1e-5)
        for name in ("pre", "post", "comb"):
            wider = 2e-5 if (name, i) == ("comb", 3) else 1e-5
            torch.testing.assert_close(getattr(ours, name).double(), v[name], rtol=wider, atol=wider)


def test_the_fused_seam_equals_the_unfused_chain():
    """X' and z to the bit; the maps but for the order of sums: splits have 64 channels here and 256 there."""
    given = case(17, 4, 140)
    ours = fused_single_pass(**given)
    streams = fused_expand(*(given[name] for name in ("out", "streams", "post", "comb")))
    assert torch.equal(ours.streams, streams)
    assert torch.equal(ours.z, fused_collapse(streams, given["pending"]))
    theirs = finish_coefficients(fused_project(streams, given["fn"]), given["base"], given["scale"], 4, 140)
    for part, other in zip(ours[3:6], theirs, strict=True):
        torch.testing.assert_close(part, other, rtol=2e-6, atol=2e-6)


def test_it_is_the_reference_in_fp32():
    given = case(5, 3, 66, FP32)
    ours, reference = fused_single_pass(**given), single_pass(**given)
    for part, other in zip((ours.streams, ours.z, ours.pre, ours.post, ours.comb), reference, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-5, atol=2e-6)


# ---- the seam


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_permutation_moves_the_streams_and_is_not_transposed(dtype):
    given = case(2, 4, 70, dtype) | {"out": torch.zeros(2, 70, dtype=dtype, device=DEVICE)}
    to = torch.tensor([2, 0, 3, 1], device=DEVICE)  # stream j becomes stream to[j]
    comb = torch.zeros(2, 4, 4, device=DEVICE)
    comb[:, torch.arange(4), to] = 1
    ours = fused_single_pass(**given | {"comb": comb})
    assert torch.equal(ours.streams[:, to], given["streams"])


def test_the_sublayers_output_reaches_the_streams_by_post_alone():
    given = case(2, 4, 70)
    given["post"][:, 1:] = 0
    given["post"][:, 0] = 1
    ours = fused_single_pass(**given | {"streams": torch.zeros_like(given["streams"])})
    assert torch.equal(ours.streams[:, 0], given["out"])
    assert not ours.streams[:, 1:].any()


def test_z_is_collapsed_with_the_pending_map_and_not_with_the_new_one():
    given = case(2, 4, 70)
    ours = fused_single_pass(**given | {"pending": one_hot(given["streams"])})
    assert torch.equal(ours.z, ours.streams[:, 0])


def test_z_and_the_maps_are_made_of_the_rounded_streams():
    """Where X' is 1 + 2^-9, bf16 holds 1, and so does z; unrounded, their difference would be left."""
    given = case(1, 2, 64)
    given["streams"][:, 0], given["streams"][:, 1], given["out"] = 1.0, 2.0**-9, torch.zeros_like(given["out"])
    given["comb"] = torch.tensor([[[1.0, 1.0], [1.0, 0.0]]], device=DEVICE)  # X'_0 = X_0 + X_1, X'_1 = X_0
    ours = fused_single_pass(**given | {"pending": torch.tensor([[1.0, -1.0]], device=DEVICE)})
    assert not ours.z.any()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_all_bits_of_fn_count(dtype):
    """What is left of v = (1, -1) are the 18th bits of fn after the point, times a large scale."""
    given = case(1, 1, 2, dtype) | {"out": torch.zeros(1, 2, dtype=dtype, device=DEVICE)}
    given["streams"][0, 0], given["comb"][:] = torch.tensor([1.0, -1.0]), 1.0
    given["fn"][:] = torch.tensor([1 + 2.0**-9 + 2.0**-18, 1 + 2.0**-9])
    given["base"][:], given["scale"][:] = 0.0, 2.0**18
    torch.testing.assert_close(fused_single_pass(**given).pre.item(), torch.tensor(1.0).sigmoid().item() + 1e-6)


def test_zero_streams_have_no_nan():
    given = case(3, 4, 66)
    ours = fused_single_pass(
        **given | {name: torch.zeros_like(given[name]) for name in ("out", "streams")},
        norm_weight=torch.ones(66, device=DEVICE),
    )
    assert not ours.z.any()
    torch.testing.assert_close(ours.rstd, torch.full((3,), 1e10, device=DEVICE))
    assert all(part.isfinite().all() for part in ours[:6])


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of a softmax, in the interpreter
def test_nan_and_infinity_stay_in_their_row():
    given = case(5, 4, 66)
    before = fused_single_pass(**given)
    given["streams"][3, 1, 2] = float("nan")
    given["out"][1, 65] = float("inf")
    given["comb"][4, 0, 0] = float("nan")
    ours = fused_single_pass(**given)
    for name in ("streams", "z", "pre", "post", "comb"):
        part = getattr(ours, name)
        assert torch.equal(part[[0, 2]], getattr(before, name)[[0, 2]])
        assert not part[[1, 3, 4]].reshape(3, -1).isfinite().all(1).any()
    assert torch.equal(ours.streams[4, :, :].isnan().all(1), torch.tensor([True, False, False, False], device=DEVICE))


# ---- the norm and E4M3


def test_the_norm_and_its_cast():
    given, weight = case(17, 2, 96), drawn(96, seed=9)
    plain = fused_single_pass(**given)
    normed = fused_single_pass(**given, norm_weight=weight)
    close(normed.z, plain.z.double() * plain.rstd.double()[:, None] * weight.double())
    cast = fused_single_pass(**given, norm_weight=weight, fp8=True)
    for part, other in zip(plain._replace(z=None)[:6], cast._replace(z=None)[:6], strict=True):
        assert part is None or torch.equal(part, other)
    same_bytes(cast, normed.z)


def same_bytes(cast, normed):
    payload, scales = fp8_rows_encode(normed)
    assert (cast.z.dtype, cast.scales.dtype) == (payload.dtype, scales.dtype)
    assert torch.equal(cast.z.view(torch.uint8), payload.view(torch.uint8))
    assert torch.equal(cast.scales.view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_scales_at_their_edges(dtype):
    """With z = 1 in all channels the normed z is the weight. Most blocks of it have an amax where the scale steps."""
    largest = [448.0, 449.0, 447.0, 896.0, 2.0**-3 * 448, 1.0, 1.75, 1.7578125, 1.0e-4, 9.0e-5, 3e-7, 0.0, 1e30, 7e-4]
    weight = drawn(32 * len(largest), seed=3).clamp(-1, 1) * torch.tensor(largest, device=DEVICE).repeat_interleave(
        32
    )
    weight[::32] = torch.tensor(largest, device=DEVICE)
    weight[5], weight[40], weight[70], weight[-32:] = float("nan"), -0.0, -447.0, float("nan")
    d = len(weight)
    given = case(1, 1, d, dtype)
    given |= {"out": torch.zeros_like(given["out"]), "streams": torch.ones_like(given["streams"])}
    given |= {"comb": given["comb"].fill_(1), "pending": given["pending"].fill_(1)}
    normed = fused_single_pass(**given, norm_weight=weight)
    assert torch.equal(normed.z[0].nan_to_num(), weight.to(dtype).nan_to_num())
    same_bytes(fused_single_pass(**given, norm_weight=weight, fp8=True), normed.z)


# ---- the same again


def test_two_runs_are_equal_and_a_row_alone_equals_the_row_in_a_batch():
    given, weight = case(17, 2, 96), drawn(96, seed=9)
    ours = fused_single_pass(**given, norm_weight=weight, fp8=True)
    again = fused_single_pass(**given, norm_weight=weight, fp8=True)
    for part, other in zip(ours, again, strict=True):
        assert torch.equal(part.view(torch.uint8), other.view(torch.uint8))
    shared = {name: given[name] for name in ("fn", "base", "scale")}
    for t in (0, 16):
        alone = {name: tensor[t : t + 1].contiguous() for name, tensor in given.items() if name not in shared}
        alone = fused_single_pass(**alone, **shared, norm_weight=weight, fp8=True)
        for part, other in zip(ours, alone, strict=True):
            assert torch.equal(part[t : t + 1].view(torch.uint8), other.view(torch.uint8))


def test_streams_at_any_stride():
    given = case(3, 2, 66)
    expected = fused_single_pass(**given)
    apart = torch.cat([given["out"], given["out"] * 3], 1)[:, :66]
    by_stream = given["streams"].transpose(0, 1).contiguous().transpose(0, 1)
    ours = fused_single_pass(**given | {"out": apart, "streams": by_stream})
    assert all(torch.equal(part, other) for part, other in zip(ours[:6], expected[:6], strict=True))
    embedded = given["streams"][:, :1].expand(-1, 2, -1)
    ours = fused_single_pass(**given | {"streams": embedded})
    expected = fused_single_pass(**given | {"streams": embedded.contiguous()})
    assert torch.equal(ours.streams, expected.streams)


@interpreted
@pytest.mark.parametrize("order", ["token", "stream"])
def test_addresses_pass_2_to_the_31(order):
    """The last token, or stream, lies 2.4e9 elements on, in memory that is only promised; 32 bits would wrap."""
    memory = mmap.mmap(-1, 5_000_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    given = case(3, 3, 8)
    strides = (1_200_000_000, 8, 1) if order == "token" else (8, 1_200_000_000, 1)
    far = torch.frombuffer(memory, dtype=torch.uint8).view(BF16).as_strided((3, 3, 8), strides)
    far.copy_(given["streams"])
    ours, expected = fused_single_pass(**given | {"streams": far}), fused_single_pass(**given)
    assert torch.equal(ours.streams, expected.streams)


@interpreted
@pytest.mark.parametrize("norm", [None, "bf16", "fp8"])
def test_what_is_read_and_written(norm, monkeypatch):
    """The floor, (2n + 2) d elements; fn once for 16 tokens; the splits' parts once each way; a norm d and d."""
    T, n, d = 18, 2, 96
    splits, tiles, rows = 2, 2, 8
    given, weight = case(T, n, d), drawn(d, seed=9)
    streams = torch.cat([given["streams"]] * 2, 2)[:, :, :d]  # beyond a row's end lies what must not be read
    shapes = {"new": (T, n, d), "z": (T, d), "parts": (T, splits, rows + 2), "sums": (1, T, rows + 1), "rstd": (T,)}
    shapes |= {} if norm is None else {"normed": (T, d)}
    shapes |= {"bytes": (T, d // 32)} if norm == "fp8" else {}
    shapes |= {"pre": (T, n), "next_post": (T, n), "next_comb": (T, n, n)}
    types = dict.fromkeys(("new", "z", "normed"), BF16) | {"bytes": torch.uint8}
    types |= {"normed": torch.float8_e4m3fn} if norm == "fp8" else {}
    made = {name: torch.empty(shape, dtype=types.get(name, FP32)) for name, shape in shapes.items()}
    waiting = list(made.values())

    def empty(shape, *, dtype, device):
        assert waiting[0].shape == shape
        assert waiting[0].dtype == dtype
        return waiting.pop(0)

    monkeypatch.setattr(torch, "empty", empty)
    given |= {"streams": streams}
    counted = (
        given
        | {"weight": weight}
        | {name: t.view(torch.uint8) if t.element_size() == 1 else t for name, t in made.items()}
    )
    with count_traffic(**counted) as traffic:
        fused_single_pass(**given, norm_weight=weight if norm else None, fp8=norm == "fp8")
    assert not waiting

    floor = [traffic[name] for name in ("streams", "out", "new")]
    assert floor[:2] == [Traffic(T * n * d, 0, 2 * T * n * d, 0), Traffic(T * d, 0, 2 * T * d, 0)]
    assert floor[2] == Traffic(0, T * n * d, 0, 2 * T * n * d)
    assert traffic["z"] == Traffic(T * d * (norm is not None), T * d, 2 * T * d * (norm is not None), 2 * T * d)
    through_memory = sum(part.loaded + part.stored for part in floor) + traffic["z"].stored
    assert through_memory == (2 * n + 2) * d * T
    assert traffic["fn"] == Traffic(tiles * rows * n * d, 0, 4 * tiles * rows * n * d, 0)
    for name, numbers in {"post": n, "comb": n * n, "pending": n}.items():
        assert traffic[name].loaded == splits * T * numbers
    assert traffic["parts"].loaded == traffic["parts"].stored == T * splits * (rows + 2)
    assert traffic["rstd"].stored == T
    if norm is not None:
        assert traffic["weight"].loaded == T * d
        assert traffic["normed"] == Traffic(0, T * d, 0, T * d * (1 if norm == "fp8" else 2))
    if norm == "fp8":
        assert traffic["bytes"] == Traffic(0, T * d // 32, 0, T * d // 32)


# ---- bad input

GOOD = case(3, 2, 8)
WEIGHT = torch.ones(8, device=DEVICE)
VALUES = [
    (dict(streams=GOOD["streams"][0]), r"streams of shape \[2, 8\]: expected \[T, n, d\], n from 1 to 8"),
    (dict(streams=torch.zeros(3, 9, 8, device=DEVICE)), r"streams of shape \[3, 9, 8\]: expected \[T, n, d\]"),
    (dict(streams=torch.zeros(3, 2, 0, device=DEVICE)), r"streams of shape \[3, 2, 0\]: .* d from 1"),
    (dict(out=GOOD["out"][:2]), r"out of shape \[2, 8\]: expected \[3, 8\], as streams are \[T, n, d\]"),
    (dict(post=GOOD["post"][:, :1]), r"post of shape \[3, 1\], .*expected \[3, 2\], contiguous"),
    (dict(comb=GOOD["comb"].transpose(1, 2)), r"comb of shape \[3, 2, 2\], strides .*: expected .*contiguous"),
    (dict(pending=GOOD["pending"][:1]), r"pending of shape \[1, 2\]"),
    (dict(fn=GOOD["fn"][:, :15].contiguous()), r"fn of shape \[8, 15\], .*: expected \[8, 16\]"),
    (dict(base=GOOD["base"][:7]), r"base of shape \[7\]"),
    (dict(scale=GOOD["base"][:2]), r"scale of shape \[2\], .*: expected \[3\]"),
    (dict(norm_weight=WEIGHT[:7]), r"norm_weight of shape \[7\], .*: expected \[8\]"),
    (dict(fp8=True, norm_weight=WEIGHT), "fp8 with d = 8: expected a multiple of 32"),
    (dict(fp8=True), "fp8 .*: expected .* norm_weight"),
    (dict(iterations=0), "iterations = 0: expected 1 or more"),
    (
        dict(out=torch.zeros(8, 3, dtype=BF16, device=DEVICE).T),
        r"out has strides \(1, 3\): expected its channels adj",
    ),
    (dict(out=GOOD["out"].to("meta")), "out is on meta: expected"),
    (dict(fn=GOOD["fn"].to("meta")), "fn is on meta: expected"),
    (dict(norm_weight=WEIGHT.clone().requires_grad_()), "norm_weight: expected none where gradients are wanted"),
    (dict(norm_weight=WEIGHT, base=GOOD["base"].clone().requires_grad_()), "norm_weight: expected none where grad"),
]
TYPES = [
    (dict(streams=GOOD["streams"].half()), r"streams are torch\.float16: expected torch\.bfloat16 or torch\.float32"),
    (dict(out=GOOD["out"].float()), r"out is torch\.float32: expected torch\.bfloat16, as streams are"),
    (dict(fn=GOOD["fn"].bfloat16()), r"fn is torch\.bfloat16: expected torch\.float32"),
    (dict(pending=GOOD["pending"].double()), r"pending is torch\.float64: expected torch\.float32"),
    (dict(norm_weight=WEIGHT.bfloat16()), r"norm_weight is torch\.bfloat16: expected torch\.float32"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [(c, ValueError, m) for c, m in VALUES] + [(c, TypeError, m) for c, m in TYPES],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        fused_single_pass(**GOOD | change)
