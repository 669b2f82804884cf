"""The fused experts against the equation in float64, fed the same bits; then what goes wrong in grouped products.

The oracle rounds to x's dtype where the reference does: after each product and before the down projection. Without
that bf16 outputs would differ by more than their last place, whoever is right. What stays is the order of sums.
"""

import mmap

import pytest
import torch

from dsv41_edu.benchmarks import resources
from dsv41_edu.moe.experts import Experts, QuantizedExperts, experts_loop, swiglu
from dsv41_edu.moe.gate import route
from dsv41_edu.quantization import E4M3, E8M0, fp8_tiles_decode, fp8_tiles_encode, mxfp4_decode, mxfp4_encode
from kernels import experts as module
from kernels.aot import TARGETS, compile_all
from kernels.counting import Traffic, count_traffic
from kernels.experts import fused_experts, tiles_by_expert
from kernels.launch import INTERPRETED
from tests.kernels.test_gate import DEVICE, drawn, poison

CODECS = {"fp8": (fp8_tiles_encode, fp8_tiles_decode), "mxfp4": (mxfp4_encode, mxfp4_decode)}
FORMATS = ["dense", *CODECS]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


def routing(T, E, k, seed=0):
    weights, indices = route(torch.rand(T, E, generator=torch.Generator().manual_seed(seed)), k, renormalise=True)
    return weights.to(DEVICE), indices.to(DEVICE)


def matrices(E, d, width, format, dtype=torch.bfloat16, seed=0):
    """w1, w2, w3 as the kernel takes them, and their values in dtype."""
    shapes = [(E, width, d), (E, d, width), (E, width, d)]
    dense = [drawn(*shape, seed=seed + 10 + i) / shape[2] ** 0.5 for i, shape in enumerate(shapes)]
    if format == "dense":
        stored = values = [w.to(dtype) for w in dense]
    else:
        encode, decode = CODECS[format]
        stored = [encode(w) for w in dense]
        values = [decode(*pair).to(dtype) for pair in stored]
    return stored, values


def oracle(x, weights, indices, w1, w2, w3, limit=None):
    def rounded(values):
        return values.to(x.dtype).double()

    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t, token in enumerate(x.double()):
        for r, e in zip(weights[t].double(), indices[t].tolist(), strict=True):
            a, u = rounded(w1[e].double() @ token), rounded(w3[e].double() @ token)
            out[t] += rounded(w2[e].double() @ rounded(swiglu(a, u, limit) * r))
    return out


def ulps(x, y):
    """Steps between two bf16 tensors: their bits in the numbers' order."""
    a, b = (v.view(torch.int16).int() for v in (x, y))
    a, b = (torch.where(v < 0, -(v & 0x7FFF), v) for v in (a, b))
    return (a - b).abs()


def check(ours, expected):
    assert ours.shape == expected.shape
    if ours.dtype == torch.float32:
        assert (ours - expected).norm() <= 1e-5 * expected.norm()
    elif ours.numel():
        assert (ulps(ours, expected.bfloat16()) <= 1).double().mean() >= 0.999


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("T", "d", "width", "E", "k", "dtype"),
    [
        (17, 128, 32, 5, 2, torch.bfloat16),
        (17, 128, 32, 5, 2, torch.float32),
        (3, 576, 96, 2, 1, torch.bfloat16),
        (2, 1280, 64, 1, 1, torch.bfloat16),
    ],
)
def test_outputs_are_the_oracles(T, d, width, E, k, dtype, format, monkeypatch):
    intact = poison(monkeypatch)
    x, (weights, indices) = drawn(T, d, dtype=dtype), routing(T, E, k)
    stored, values = matrices(E, d, width, format, dtype)
    check(fused_experts(x, weights, indices, *stored, 10.0), oracle(x, weights, indices, *values, 10.0))
    intact()


@pytest.mark.parametrize("T", [0, 1, 2, 13, 17, 63])
@pytest.mark.parametrize(("tile", "k"), [(16, 3), (64, 1)])
def test_any_number_of_tokens(T, tile, k, monkeypatch):
    intact = poison(monkeypatch)
    x, (weights, indices) = drawn(T, 64).bfloat16(), routing(T, 3, k)
    stored, values = matrices(3, 64, 32, "dense")
    ours = fused_experts(x, weights, indices.int(), *stored, 0.5, tile=tile)
    check(ours, oracle(x, weights, indices, *values, 0.5))
    intact()


@pytest.mark.parametrize(("format", "d", "width"), [("dense", 70, 45), ("fp8", 70, 45), ("mxfp4", 96, 160)])
def test_ragged_sizes(format, d, width, monkeypatch):
    intact = poison(monkeypatch)
    x, (weights, indices) = drawn(5, d).bfloat16(), routing(5, 3, 2)
    stored, values = matrices(3, d, width, format)
    check(fused_experts(x, weights, indices, *stored, 10.0), oracle(x, weights, indices, *values, 10.0))
    intact()


def test_the_kernels_equal_the_unfused_chain():
    """To the bit where all sums are exact: small integers times codes of FP4, and a down projection that copies."""
    E, d, width = 4, 64, 32
    x = (drawn(20, d) * 2).round().bfloat16()
    weights, indices = routing(20, E, 2)
    stored = [mxfp4_encode((drawn(E, *s, seed=i) * 2).round().clamp(-6, 6)) for i, s in enumerate([(width, d)] * 2)]
    copying = torch.eye(width, device=DEVICE).repeat(2, 1).expand(E, d, width)
    stored = [stored[0], mxfp4_encode(copying), stored[1]]
    chain = QuantizedExperts(100.0, w1=stored[0], w2=stored[1], w3=stored[2])
    assert torch.equal(fused_experts(x, weights, indices, *stored, 100.0), chain(x, weights, indices))


def test_random_values_equal_the_unfused_chain_but_for_the_order_of_sums():
    chain = Experts(6, 128, 64, 10.0).bfloat16().to(DEVICE)
    w1, w3 = chain.w13.detach().chunk(2, dim=1)
    x, (weights, indices) = drawn(11, 128).bfloat16(), routing(11, 6, 3)
    ours = fused_experts(x, weights, indices, w1, chain.w2.detach(), w3, 10.0)
    with torch.no_grad():
        theirs = chain(x, weights, indices)
    assert (ulps(ours, theirs) <= 1).double().mean() >= 0.995
    loop = experts_loop(x, weights, indices, w1, chain.w2.detach(), w3, 10.0)
    assert (ulps(ours, loop) <= 1).double().mean() >= 0.995


# ---- stored formats


@pytest.mark.parametrize("exponent", [-127, 0, 100])  # byte 0 is a scale that fp32 holds as a subnormal
@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_every_byte_is_decoded_as_the_reference_does(format, exponent):
    """Row j of w2 has byte j in front. Token 0 has h = silu(2) * 2 in channel 0 alone, token 1 in channel 1."""
    encode, decode = CODECS[format]
    byte = torch.arange(256, device=DEVICE, dtype=torch.uint8)
    if format == "fp8":
        byte = byte.masked_fill((byte & 127) == 127, 0)  # NaN has a test of its own
    payload = byte.new_zeros(1, 256, 32 if format == "fp8" else 16)
    payload[0, :, 0] = byte
    scales = byte.new_full((1, 8 if format == "fp8" else 256, 1), exponent + 127).view(E8M0)
    w2 = payload.view(E4M3 if format == "fp8" else torch.int8), scales
    ones = encode(torch.eye(32, 256, device=DEVICE)[None] * 2)
    x, two = torch.eye(2, 256, device=DEVICE), torch.tensor(2.0, device=DEVICE)
    y = fused_experts(x, x.new_ones(2, 1), x.new_zeros(2, 1).long(), ones, w2, ones)
    expected = decode(*w2)[0, :, :2].T * swiglu(two, two)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=2e-44)


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_each_block_has_its_own_scale(format):
    """Of a tile, or of 32 channels of one row, and none like its neighbour's: that would be off by a power of two."""
    x, (weights, indices) = drawn(4, 128), routing(4, 2, 1)
    stored, _ = matrices(2, 128, 96, format)
    stored = [(p, (torch.arange(s.numel(), device=DEVICE) % 5 + 124).byte().view(E8M0).view_as(s)) for p, s in stored]
    values = [CODECS[format][1](*pair) for pair in stored]
    check(fused_experts(x, weights, indices, *stored), oracle(x, weights, indices, *values))


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_byte_255_of_a_scale_is_nan_not_infinity(format):
    ones = CODECS[format][0](torch.ones(1, 32, 32, device=DEVICE))
    nan = ones[0], torch.full_like(ones[1].view(torch.uint8), 255).view(E8M0)
    x, zero = torch.ones(1, 32, device=DEVICE), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    assert fused_experts(x, x[:, :1] + 0, zero, ones, nan, ones).isnan().all()


@pytest.mark.parametrize("format", ["fp8", "mxfp4"])
def test_a_nan_scale_or_value_is_nan_in_its_experts_tokens_alone(format):
    x, indices = drawn(4, 64), torch.tensor([[0], [1], [2], [1]], device=DEVICE)
    weights = torch.ones(4, 1, device=DEVICE)
    stored, _ = matrices(3, 64, 32, format)
    stored[0][1].view(torch.uint8)[1, 0, 1] = 255
    if format == "fp8":
        stored[2][0].view(torch.uint8)[2, 3, 3] = 127
    y = fused_experts(x, weights, indices, *stored)
    assert y[[1, 3]].isnan().all()
    assert y[2].isnan().all() == (format == "fp8")
    assert y[0].isfinite().all()


# ---- what goes wrong


def test_the_clamp_is_asymmetric_and_comes_first():
    gate, up = torch.meshgrid(*[torch.tensor([-30.0, -12.0, -5.0, 0.5, 9.0, 12.0])] * 2, indexing="ij")
    w1, w3 = (torch.zeros(1, 36, 8, device=DEVICE) for _ in range(2))
    w1[0, :, 0], w3[0, :, 0] = gate.flatten(), up.flatten()
    x, one = torch.zeros(1, 8, device=DEVICE), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    x[0, 0] = 1.0
    w2 = torch.zeros(1, 8, 36, device=DEVICE)
    for channel in range(36):
        w2.zero_()[0, 0, channel] = 1.0
        for limit in (10.0, None) if channel % 7 == 0 else (10.0,):
            y = fused_experts(x, x.new_full((1, 1), 0.5), one, w1, w2, w3, limit)
            expected = swiglu(w1[0, channel, 0], w3[0, channel, 0], limit) / 2
            torch.testing.assert_close(y[0, 0], expected, rtol=1e-6, atol=0)


def test_nan_and_infinity_pass_the_clamp_and_stay_in_their_row():
    x, (weights, indices) = drawn(5, 64).bfloat16(), routing(5, 2, 2)
    stored, _ = matrices(2, 64, 32, "dense")
    x[3, 1] = float("nan")
    y = fused_experts(x, weights, indices, *stored, 1.0)
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
def test_two_runs_are_equal_and_a_row_alone_equals_the_row_in_a_batch(format):
    x, (weights, indices) = drawn(20, 96).bfloat16(), routing(20, 3, 2)
    stored, _ = matrices(3, 96, 64, format)
    y = fused_experts(x, weights, indices, *stored, 10.0, tile=16)
    assert torch.equal(y, fused_experts(x, weights, indices, *stored, 10.0, tile=16))
    for t in (0, 7, 19):
        alone = fused_experts(x[t : t + 1], weights[t : t + 1], indices[t : t + 1], *stored, 10.0, tile=16)
        assert torch.equal(alone[0], y[t])


def test_all_pairs_on_one_expert_and_one_expert_twice():
    x, stored = drawn(40, 64), matrices(5, 64, 32, "dense", torch.float32)[0]
    weights = drawn(40, 2, seed=4)
    for indices in (torch.full((40, 2), 4), torch.tensor([[1, 3], [3, 3]] * 20)):
        indices = indices.to(DEVICE)
        check(fused_experts(x, weights, indices, *stored), oracle(x, weights, indices, *stored))


@pytest.mark.parametrize("M", [16, 64])
@pytest.mark.parametrize(("T", "E", "k"), [(1, 1, 1), (1, 9, 3), (17, 5, 2), (200, 3, 2), (64, 2, 2), (30, 400, 6)])
def test_tiles_cover_each_pair_once(T, E, k, M):
    indices = routing(T, E, k)[1]
    order, tiles = tiles_by_expert(indices, E, M)
    seen = []
    for expert, first, end in tiles.T.tolist():
        if expert < E:
            places = range(first, min(first + M, end))
            assert places
            assert (indices.flatten()[order[places.start : places.stop]] == expert).all()
            seen += places
    assert seen == [*range(T * k)]
    assert order.sort().values.tolist() == seen


def test_a_pair_whose_id_is_no_experts_adds_nothing(monkeypatch):
    """On a GPU ids aren't waited for, so none may lead out of the weights. It's as if the expert lived elsewhere."""
    x, (weights, indices) = drawn(9, 64).bfloat16(), routing(9, 3, 2)
    stored, values = matrices(3, 64, 32, "dense")
    elsewhere = indices.clone()
    elsewhere[0], elsewhere[4, 1], elsewhere[5, 0] = -1, 3, 2**31
    intact = poison(monkeypatch)
    monkeypatch.setattr(module, "_check", lambda *_: None)
    y = fused_experts(x, weights, elsewhere, *stored)
    for t, slots in {0: [], 4: [0], 5: [1], 6: [0, 1]}.items():
        check(y[t : t + 1], oracle(x[t : t + 1], weights[t : t + 1, slots], indices[t : t + 1, slots], *values))
    assert y[0].eq(0).all()
    intact()


@interpreted
@pytest.mark.parametrize("format", ["dense", "mxfp4"])
def test_addresses_pass_2_to_the_31(format):
    """Expert 2 lies 2.4e9 elements on, in memory that is only promised; 32 bits would take it to before the first."""
    E, d, width, apart = 3, 64, 32, 1_200_000_000
    buffers = []

    def far(tensor):
        n = tensor.element_size()
        memory = mmap.mmap(
            -1, 5_000_000_000 * n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
        )  # MAP_NORESERVE
        buffers.append(torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype))
        placed = buffers[-1].as_strided(tensor.shape, (apart, *tensor.stride()[1:]), 2_400_000_000)
        placed.view(torch.uint8).copy_(tensor.view(torch.uint8))
        return placed

    x, weights = drawn(3, d).bfloat16(), torch.ones(3, 1)
    indices = torch.tensor([[2], [1], [0]])
    stored, values = matrices(E, d, width, format)
    stored = [far(w) if format == "dense" else tuple(map(far, w)) for w in stored]
    check(fused_experts(x, weights, indices, *stored), oracle(x, weights, indices, *values))


@interpreted
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_read_and_written(format, monkeypatch):
    """Each tile reads its expert whole and no other; hidden and rows pass once through memory."""
    T, d, width, E, k, M, N = 30, 96, 160, 6, 2, 16, 64
    x, weights = drawn(T, d).bfloat16(), torch.ones(T, k)
    indices = torch.tensor([[0, 4]] * 20 + [[4, 1]] * 10)  # 20 pairs, 30 and 10: 2, 2 and 1 tiles; three are idle
    n_tiles, P = 5, T * k
    stored, _ = matrices(E, d, width, format)
    order, tiles = tiles_by_expert(indices, E, M)
    made = {shape: torch.empty(shape).bfloat16() for shape in [(T, d), (P, width), (P, d)]}
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: made[shape])
    monkeypatch.setattr(module, "tiles_by_expert", lambda *_: (order, tiles))
    parts = {}
    for name, w in zip(("w1", "w2", "w3"), stored, strict=True):
        payload, scales = (w, None) if format == "dense" else (part.view(torch.uint8) for part in w)
        parts[f"{name}_idle"], parts[name] = payload[2], payload
        if scales is not None:
            parts[f"{name}_scales"] = scales
    outputs = dict(zip(("out", "hidden", "rows"), made.values(), strict=True))
    with count_traffic(
        x=x, weights=weights, indices=indices, order=order, tiles=tiles, **parts, **outputs
    ) as traffic:
        fused_experts(x, weights, indices, *stored, tile=M)
    blocks_up, blocks_down = -(-width // N), -(-d // N)
    elements = d * width // (2 if format == "mxfp4" else 1)
    for name in ("w1", "w2", "w3"):
        assert traffic[name].loaded == n_tiles * elements
        assert traffic[f"{name}_idle"].loaded == 0
        if format != "dense":
            assert traffic[f"{name}_scales"].loaded == n_tiles * d * width // (1024 if format == "fp8" else 32)
    assert traffic["x"].loaded == P * d * blocks_up
    assert traffic["weights"].loaded == P * blocks_up
    assert traffic["order"].loaded == P * (blocks_up + blocks_down)
    assert traffic["hidden"] == Traffic(
        P * width * blocks_down, P * width, 2 * P * width * blocks_down, 2 * P * width
    )
    assert traffic["rows"] == Traffic(P * d, P * d, 2 * P * d, 2 * P * d)
    assert traffic["out"] == Traffic(0, T * d, 0, 2 * T * d)


# ---- bad input

X, R, I = torch.zeros(3, 32, device=DEVICE), torch.zeros(3, 2, device=DEVICE), torch.zeros(3, 2, dtype=torch.int64)
W1, W2 = torch.zeros(4, 64, 32, device=DEVICE), torch.zeros(4, 32, 64, device=DEVICE)
GOOD = dict(x=X, weights=R, indices=I.to(DEVICE), w1=W1, w2=W2, w3=W1)
FP4 = dict(zip(("w1", "w2", "w3"), map(mxfp4_encode, (W1, W2, W1)), strict=True))
FP8 = dict(zip(("w1", "w2", "w3"), map(fp8_tiles_encode, (W1, W2, W1)), strict=True))
VALUES = [
    (dict(x=X[0]), r"x \[32\], weights \[3, 2\], indices \[3, 2\]: expected \[T, d\], \[T, k\], \[T, k\]"),
    (dict(weights=R[:2]), r"expected \[T, d\], \[T, k\], \[T, k\]"),
    (dict(weights=R[:, :1].expand(3, 2)), r"weights has strides \(2, 0\): expected contiguous"),
    (dict(x=torch.zeros(32, 3, device=DEVICE).T), r"a row of x has strides \(1, 3\): expected contiguous"),
    (dict(w1=W1[0]), r"w1 of shape \[64, 32\]: expected \[E, out, in\]"),
    (dict(w1=W1[:, :63]), r"w2 \[4, 32, 64\], dense: expected \[4, 32, 63\], dense"),
    (dict(w3=W1[:3]), r"w3 \[3, 64, 32\], dense: expected \[4, 64, 32\], dense"),
    (
        dict(w3=W1.repeat(1, 1, 2)[:, :, :32]),
        r"w3 has strides \(4096, 64, 4096, 64\): expected \(2048, 32, 2048, 32\)",
    ),
    (dict(w2=W2.transpose(1, 2).contiguous().transpose(1, 2)), r"w2 has strides \(2048, 1, 32\): expected 1 last"),
    (FP4 | dict(w2=W2), r"w2 \[4, 32, 64\], dense: expected \[4, 32, 64\], mxfp4"),
    (FP4 | dict(w1=(FP4["w1"][0], FP4["w1"][1][:, :2])), r"scales of w1 \[4, 2, 1\]: expected \[4, 64, 1\]"),
    (FP8 | dict(w1=(FP8["w1"][0], FP8["w1"][1][:, :1])), r"scales of w1 \[4, 1, 1\]: expected \[4, 2, 1\]"),
    (dict(tile=32), "tile = 32: expected 16 or 64"),
    (dict(w1=W1.to("meta"), w3=W1.to("meta")), "w1 is on meta: expected"),
]
if INTERPRETED:
    VALUES += [
        (dict(indices=I + 4), "indices from 4 to 4: expected 0 to 3"),
        (dict(indices=I - 1), "indices from -1"),
    ]
TYPES = [
    (dict(x=X.bfloat16()), r"w1 is torch\.float32 .*: expected torch\.bfloat16, as x is, alone, or a pair of"),
    (dict(w1=(W1, W1)), r"w1 is torch\.float32 with torch\.float32: expected .* a pair of float8_e4m3fn or int8"),
    (
        FP8 | dict(w2=(FP8["w2"][0], FP8["w2"][1].float())),
        r"w2 is torch\.float8_e4m3fn with torch\.float32: expected",
    ),
    (FP4 | dict(x=X.half()), r"x is torch\.float16: expected torch\.bfloat16 or torch\.float32"),
    (dict(indices=R), r"indices torch\.float32: expected a float and an integer type"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [(c, ValueError, m) for c, m in VALUES] + [(c, TypeError, m) for c, m in TYPES],
)
def test_bad_input_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        fused_experts(**GOOD | change)


# ---- compiled

SHARED = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}  # of one program


def test_gate_and_experts_fit_every_target_at_the_official_sizes():
    reports = compile_all(["kernels.gate", "kernels.experts"])
    assert {report.target for report in reports} == {*TARGETS}
    assert len(reports) == len(TARGETS) * len({report.build for report in reports})
    stored = resources.read("kernels.gate") + resources.read("kernels.experts")
    assert resources.rows(reports) == stored, "python -m dsv41_edu.benchmarks.resources"
    for report in reports:
        assert report.spilled == report.stack_bytes == 0, report
        assert report.shared_bytes <= SHARED[report.target], report
