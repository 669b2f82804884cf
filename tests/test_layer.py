"""The streams between sublayers against seams one by one, a layer against its parts, and the checkpoint's names."""

import pytest
import torch
from small_models import CONFIG, IO, SEEING, WEIGHTS, drawn

from dsv41_edu.attention.cache import Chunk
from dsv41_edu.layer import Layer, Residual, first_pass, fused
from dsv41_edu.mhc.seam import Seam, collapse, one_hot, single_pass
from dsv41_edu.tensors import tensor_plan

SETTINGS = 20, 1e-6, 1e-20


def drawn_seams(count, n=4, d=8):
    """Seams whose maps depend on the streams."""
    seams = [Seam(n, d).double().requires_grad_(False) for _ in range(count)]
    for i, seam in enumerate(seams):
        seam.fn.copy_(drawn(*seam.fn.shape, seed=3 * i) / (n * d) ** 0.5)
        seam.base.copy_(drawn(*seam.base.shape, seed=3 * i + 1))
        seam.scale.copy_(drawn(3, seed=3 * i + 2))
    return seams


def residual_of(x, n=4):
    return Residual(x, n, SETTINGS, (first_pass, single_pass))


def pass_through(residual, seam, sublayer):
    z, maps = residual.enter(seam.fn, seam.base, seam.scale)
    residual.leave(sublayer(z), maps)


# ---- the streams


@pytest.mark.parametrize("look", [False, True])
def test_the_streams_are_what_seams_one_by_one_make(look):
    """Whether someone looks at the streams between, which mixes the waiting output in, or not."""
    x, seams = drawn(2, 3, 8), drawn_seams(5)
    residual, streams = residual_of(x), x.unsqueeze(-2).expand(2, 3, 4, 8)
    pending = one_hot(streams, torch.float64)
    torch.testing.assert_close(residual.collapsed(), x, msg="the first seam's input is stream 0")
    for i, seam in enumerate(seams):
        pass_through(residual, seam, lambda z, i=i: (z * (i + 1)).sin())
        streams, pending = seam(streams, lambda z, i=i: (z * (i + 1)).sin(), pending)
        if look:
            torch.testing.assert_close(residual.streams, streams)
    torch.testing.assert_close(residual.collapsed(), collapse(streams, pending))
    torch.testing.assert_close(residual.streams, streams)


def test_what_is_put_in_the_streams_place_goes_on():
    x, (first, second) = drawn(2, 3, 8), drawn_seams(2)
    residual, memory = residual_of(x), drawn(2, 3, 4, 8, seed=1)
    pass_through(residual, first, torch.cos)
    expected, pending = first(x.unsqueeze(-2).expand(2, 3, 4, 8), torch.cos, one_hot(memory, torch.float64))
    residual.streams = residual.streams + memory
    pass_through(residual, second, torch.sin)
    torch.testing.assert_close(residual.streams, second(expected + memory, torch.sin, pending)[0])
    pass_through(residual, first, torch.cos)
    residual.streams = memory
    assert torch.equal(residual.streams, memory), "an output that waited was for the streams before"


def test_some_tokens_alone():
    """Kept out of order, each goes on as it would have among all."""
    x, (first, second), at = drawn(2, 5, 8), drawn_seams(2), torch.tensor([[3, 4], [1, 0]])
    every, some = residual_of(x), residual_of(x)
    for residual in (every, some):
        pass_through(residual, first, torch.cos)
    some.take(at)
    for residual in (every, some):
        pass_through(residual, second, torch.sin)
    expected = torch.stack([every.streams[row, at[row]] for row in range(2)])
    torch.testing.assert_close(some.streams, expected)
    kept = torch.stack([every.collapsed()[row, at[row]] for row in range(2)])
    torch.testing.assert_close(some.collapsed(), kept)


def test_streams_keep_the_embeddings_precision_and_maps_are_wide():
    residual = residual_of(drawn(1, 2, 8, dtype=torch.bfloat16))
    assert residual.pending.dtype == torch.float32
    pass_through(residual, drawn_seams(1)[0].float(), lambda z: z)
    assert residual.streams.dtype == residual.collapsed().dtype == torch.bfloat16
    assert residual.pending.dtype == torch.float32


def test_the_kernels_are_the_same_seam():
    """By tokens in any shape; in the interpreter where there is no GPU."""
    (seam,), parts = (
        drawn_seams(1, d=32),
        [drawn(2, 3, *shape, seed=9, dtype=torch.float32) for shape in ((32,), (4, 32))],
    )
    maps = [drawn(2, 3, *shape, seed=8).float().sigmoid() for shape in ((4,), (4, 4), (4,))]
    seam = seam.float()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = [t.to(device) for t in (*parts, *maps, seam.fn, seam.base, seam.scale)]
    for ours, expected in zip(fused(*arguments, *SETTINGS), single_pass(*arguments, *SETTINGS), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


# ---- the layer


def public_layer(i, dtype=torch.float64):
    layer, start = Layer(CONFIG, i).to(dtype), f"layers.{i}."
    state = {n.removeprefix(start): w.to(dtype) for n, w in WEIGHTS.items() if n.startswith(start)}
    layer.load_state_dict(state)
    return layer.requires_grad_(False), state


def test_a_layers_sublayers_get_their_own_norms_and_seams():
    """From the vectors' streams and map after layer 8, with what layers 6 and 8 published, to those after layer 9."""
    layer, _ = public_layer(9)
    streams = IO["text.streams_after_layer"][8].double()
    pending = IO["text.pre_ffn"][8].double()
    source, index = public_layer(6)[0].attn, public_layer(8)[0].attn
    chunk = Chunk.of(CONFIG, (2, 48), torch.float64, None)
    for attention, i in ((source, 6), (index, 8)):
        attention(IO["text.attn_norm_out"][i].double(), chunk)
    residual = residual_of(streams[..., 0, :])
    residual.streams, residual.pending = streams, pending
    found = layer(residual, chunk)
    assert (found.streams - IO["text.streams_after_layer"][9]).abs().max() < 1e-5, "inputs stored as float32"
    assert (found.collapsed() - IO["text.final_collapsed"]).abs().max() < 1e-5


def test_memory_is_added_where_there_is_an_engram_and_never_to_images():
    layer, _ = public_layer(1)
    residual, rows = residual_of(drawn(1, 4, 64)), IO["text.engram_rows"][:1, :4, 0].long()
    before, images = residual.streams.clone(), torch.tensor([[False, True, False, True]])
    layer.add_memory(residual, rows, images)
    moved = (residual.streams - before).abs().amax((-1, -2))
    assert (moved > 0).tolist() == [[True, False, True, False]]
    torch.testing.assert_close(residual.streams[:, ::2], layer.engram(before, rows)[:, ::2])
    assert public_layer(0)[0].engram is None


# ---- names


def plan_names(start):
    plan = {t.name.removeprefix(start) for t in tensor_plan(CONFIG) if t.name.startswith(start) and t.use != "scale"}
    return {n for n in plan if not n.startswith(("main", "norm.", "markov", "confidence"))}


@pytest.mark.parametrize("i", range(12))
def test_names_are_the_checkpoints(i):
    """Of each kind of layer, and of the drafter's blocks, whose expert count is another."""
    drafter = i >= 10
    layer = Layer(CONFIG, i, drafter)
    assert set(layer.state_dict()) == plan_names(f"mtp.{i - 10}." if drafter else f"layers.{i}.")


def test_a_state_dict_round_trip_is_exact():
    layer, state = public_layer(1, torch.float32)
    written = layer.state_dict()
    assert set(written) == set(state)
    assert all(torch.equal(written[name], state[name]) for name in state)
    w13 = layer.ffn.experts.w13
    assert torch.equal(w13[5], torch.cat([state["ffn.experts.5.w1.weight"], state["ffn.experts.5.w3.weight"]]))
    assert written["ffn.experts.5.w3.weight"].data_ptr() == w13[5, 32].data_ptr(), "views, not copies"


def test_missing_and_misshapen_experts_are_named():
    layer, state = public_layer(0, torch.float32)
    gone = {n: w for n, w in state.items() if n != "ffn.experts.3.w2.weight"}
    with pytest.raises(RuntimeError, match=r"ffn\.experts\.w13"):
        layer.load_state_dict(gone)
    wide = state | {f"ffn.experts.{e}.w2.weight": torch.zeros(64, 31) for e in range(8)}
    with pytest.raises(RuntimeError, match=r"ffn\.experts\.w2: copying a param with shape"):
        layer.load_state_dict(wide)
    extra = state | {"ffn.experts.8.w2.weight": torch.zeros(64, 32)}
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"ffn\.experts\.8\.w2\.weight"'):
        layer.load_state_dict(extra)


def test_dropout_is_off_until_asked_for():
    layer = Layer(SEEING, 0).train()
    assert layer.dropout.p == 0
    chunk = Chunk.of(SEEING, (1, 3), torch.float32, None)
    x = drawn(1, 3, 64, dtype=torch.float32)
    plain = layer(residual_of(x), chunk).streams
    assert torch.equal(layer(residual_of(x), chunk).streams, plain)
    layer.dropout.p = 1.0
    silent = layer(residual_of(x), chunk).streams
    torch.testing.assert_close(silent, x.unsqueeze(-2).expand(1, 3, 4, 64), rtol=1e-4, atol=1e-4)
