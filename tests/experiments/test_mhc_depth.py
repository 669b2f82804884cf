"""Gains are those of explicit products; arms differ in the connection alone; the stored file is whole and live."""

import dataclasses
import json
import math
import statistics
from itertools import islice

import pytest
import torch
from torch.nn import functional as F

from dsv41_edu.experiments import mhc_depth, text
from dsv41_edu.experiments.mhc_depth import EVERY, REGIMES, SETUP, agrees, measure, run, slice_run, train, watch
from dsv41_edu.experiments.mhc_stack import ARMS, Regime, Setup, Stack, composite, gains, mixing, residual_maps
from dsv41_edu.experiments.small_moe import batches
from dsv41_edu.mhc.seam import collapse

TINY = Setup(hidden_size=16, layers=2, heads=2, width=24, context=16, batch=2, steps=10, warm_up=2)
SINGLE_PASS = ARMS[3]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the stored runs had it; a second one only slows so many small operations
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def stored():
    return mhc_depth.read()


def of(stored, regime, arm):
    return [r for r in stored["runs"] if (r["regime"], r["arm"]) == (regime, arm)]


def ids(setup=TINY):
    return next(batches(setup, 0))[0]


def random_connections(arm):
    """A stack whose maps differ from token to token and layer to layer."""
    model, generator = Stack(TINY, arm, regime=Regime(scale=1.0)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.connections.parameters():
            p += 2 * torch.randn(p.shape, generator=generator)
    return model


def last_streams(model):
    seen = []
    hook = model.connections[-1].register_forward_hook(lambda _, args, out: seen.append(out))
    model(ids())
    hook.remove()
    return seen[0][0] if isinstance(seen[0], tuple) else seen[0]


def test_gain_of_identities_is_one():
    maps = torch.eye(4).expand(5, 3, 4, 4)
    assert [gain.tolist() for gain in (*gains(maps), *gains(composite(maps)))] == [[1.0] * 5] * 4
    assert mixing(maps).tolist() == [0.0] * 5


def test_gains_and_mixing_by_hand():
    maps = torch.tensor([[[[1.0, 2], [0, -3]], [[0, 1.0], [1, 0]]]])
    forward, backward = gains(maps)
    assert (forward.item(), backward.item()) == ((5 + 1) / 2, (3 + 1) / 2)
    assert mixing(maps).item() == pytest.approx((2 / 6 + 1) / 2)


def test_composite_is_what_the_streams_go_through():
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(6, 3, 4, 4, generator=generator, dtype=torch.float64)
    streams = torch.randn(3, 4, 7, generator=generator, dtype=torch.float64)
    for at, product in enumerate(composite(maps)):
        out = streams
        for residual in maps[at:]:
            out = torch.stack([sum(residual[:, j, k, None] * out[:, j] for j in range(4)) for k in range(4)], dim=1)
        torch.testing.assert_close(torch.einsum("tjk,tjd->tkd", product, streams), out)


@pytest.mark.parametrize("arm", ARMS)
def test_maps_are_those_that_the_model_used(arm):
    model = random_connections(arm)
    with torch.no_grad():
        for name, p in model.sublayers.named_parameters():
            if name.endswith(("out.weight", "w2.weight")):
                p.zero_()  # sublayers give nothing: what is left are the residual maps
    streams, maps = last_streams(model), residual_maps(model, ids())
    x = (model.embedding(ids()) + model.positions.weight).flatten(0, 1)
    expected = composite(maps)[0].sum(-2).unsqueeze(-1) * x.unsqueeze(-2)  # each stream began as the embedding
    torch.testing.assert_close(streams.flatten(0, 1).double(), expected.double(), rtol=1e-4, atol=1e-6)
    assert maps.shape == (4, 32, model.n, model.n)


def test_seed_gives_all_arms_the_same_sublayers():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    models = {arm: Stack(TINY, arm, 1) for arm in ARMS}
    assert torch.equal(state, torch.get_rng_state())  # the global generator is left alone
    torch.manual_seed(6)  # and not used
    plain = dict(models["plain"].named_parameters())
    for arm in ARMS[1:]:
        for name, p in models[arm].named_parameters():
            assert name.startswith("connections") or torch.equal(p, plain[name]), (arm, name)
        assert not torch.equal(Stack(TINY, arm, 2).head.weight, models[arm].head.weight)
        again = Stack(TINY, arm, 1)
        assert all(torch.equal(p, q) for p, q in zip(again.parameters(), models[arm].parameters(), strict=True))
    assert plain["sublayers.0.qkv.weight"].std().item() == pytest.approx(1 / 4, rel=0.1)
    assert plain["embedding.weight"].std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(("arm", "tolerance"), [(ARMS[1], 1e-5), (ARMS[2], 0.03), (ARMS[3], 0.03)])
def test_arms_start_as_nearly_one_function(arm, tolerance):
    plain, other = (Stack(SETUP, a)(ids(SETUP)) for a in ("plain", arm))
    assert (plain - other).norm() <= tolerance * plain.norm()


@pytest.mark.parametrize("arm", ARMS)
def test_a_token_never_reaches_an_earlier_position(arm):
    model = random_connections(arm)
    before, changed = model(ids()), ids().clone()
    changed[:, 7] += 1
    after = model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=1e-4, atol=1e-5)
    assert not torch.isclose(after[:, 7:], before[:, 7:]).all(-1).any()


def test_single_pass_reads_with_the_map_of_the_seam_before():
    model, read, seams = random_connections(SINGLE_PASS), [], []
    for sublayer in model.sublayers:
        sublayer.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    for seam in model.connections:
        seam.register_forward_hook(lambda _, args, out: seams.append((args[0], *out)))
    model.norm.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    model(ids())
    assert torch.equal(read[0], model.embedding(ids()) + model.positions.weight)
    for (streams, pre), later in zip([s[1:] for s in seams], read[1:], strict=True):
        torch.testing.assert_close(later, collapse(streams, pre))


@pytest.mark.parametrize("arm", ARMS[1:3])
def test_other_arms_end_with_the_mean_of_the_streams(arm):
    model = random_connections(arm)
    torch.testing.assert_close(model(ids()), model.head(model.norm(last_streams(model).mean(-2))))


@pytest.mark.parametrize("arm", ARMS[2:])
def test_constraint_bounds_the_composite_gain(arm):
    """Columns (over `from`) come last in Sinkhorn: their sums are 1, so forward gain is; backward can't pass n."""
    maps = residual_maps(random_connections(arm), ids())
    for products in (maps, composite(maps)):
        forward, backward = gains(products)
        assert (forward - 1).abs().max() < 1e-5
        assert backward.min() > 1 - 1e-5
        assert 1.01 < backward.max() < 4
    assert mixing(maps).max() > 0.5  # these seams mix: the bound isn't that of identities


def test_gain_of_free_maps_grows_as_a_power():
    enlarged = REGIMES["enlarged"]
    gain = measure(Stack(SETUP, "HC", regime=enlarged), SETUP)
    for name in ("forward", "backward"):
        assert gain[name].tolist() == pytest.approx([1.3**length for length in range(48, 0, -1)], rel=1e-4)
    same, plain = (Stack(TINY, SINGLE_PASS, regime=r) for r in (enlarged, Regime()))
    more = same.connections[0].base - plain.connections[0].base
    torch.testing.assert_close(more, torch.tensor([0.0] * 8 + [math.log(enlarged.factor)] * 16), rtol=0, atol=1e-6)
    maps = [residual_maps(model, ids()) for model in (same, plain)]
    torch.testing.assert_close(*maps, rtol=1e-5, atol=1e-7)  # the softmax takes the factor away


def test_plain_residual_has_gain_one_whatever_was_trained():
    model = Stack(TINY, "plain")
    list(train(model, TINY, Regime(rate=100), 0))
    found = {name: values.tolist() for name, values in measure(model, TINY).items()}
    assert found.pop("mixing") == [0.0] * 4
    assert list(found.values()) == [[1.0] * 4] * 4


@pytest.mark.parametrize("rate", [1.0, 10.0])
def test_connections_learn_at_their_own_rate_and_never_decay(rate):
    model = Stack(TINY, "HC")
    before = [c.a_r.detach().clone() for c in model.connections]
    next(train(model, TINY, Regime(rate=rate), 0))
    moved = max((c.a_r - b).abs().max().item() for c, b in zip(model.connections, before, strict=True))
    assert moved == pytest.approx(rate * TINY.learning_rate / TINY.warm_up, rel=0.01)  # Adam's first step is the rate


def test_scales_start_as_the_regime_says():
    free, *bound = (Stack(TINY, arm, regime=REGIMES["hot"]).connections for arm in ARMS[1:])
    assert all(c.s_alpha == c.s_beta == 1 for c in free)
    assert all((seam.scale == 1).all() for seams in bound for seam in seams)


def test_points_of_the_curves():
    curves, model = watch(Stack(TINY, "HC"), TINY, Regime(), 0, 3), Stack(TINY, "HC")
    losses, norms = zip(*train(Stack(TINY, "HC"), TINY, Regime(), 0), strict=True)
    parts = [slice(i, i + EVERY) for i in range(0, TINY.steps, EVERY)]
    assert curves["loss"] == [pytest.approx(statistics.mean(losses[p]), rel=1e-4) for p in parts]
    assert curves["gradient_norm"] == [pytest.approx(max(norms[p]), rel=1e-4) for p in parts]
    list(islice(train(model, TINY, Regime(), 0), EVERY))
    for name, values in measure(model, TINY).items():
        assert curves[name][1] == pytest.approx(values.max().item(), rel=1e-4)
    assert curves["forward_all"][1] == pytest.approx(measure(model, TINY)["forward"][0].item(), rel=1e-4)


def test_evaluation_is_the_mean_over_the_first_windows(monkeypatch):
    monkeypatch.setattr(mhc_depth, "WINDOWS", 20)
    model, tokens = Stack(TINY, "plain"), text.tokens("heldout")
    parts = [tokens[a : a + 17] for a in range(0, 320, 16)]
    losses = [F.cross_entropy(model(part[None, :-1])[0], part[1:]).item() for part in parts]
    assert mhc_depth.evaluate(model, TINY) == pytest.approx(statistics.mean(losses), rel=1e-5)


def test_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="arm = 'MHC': expected one of plain, HC, mHC multi-pass, mHC single-pass"):
        Stack(TINY, "MHC")
    for length in (0, 4):
        with pytest.raises(ValueError, match=f"length = {length}: expected 1 to 3 points"):
            watch(Stack(TINY, "plain"), TINY, Regime(), 0, length)


def test_a_small_experiment_from_runs_to_file(tmp_path, monkeypatch):
    monkeypatch.setattr(mhc_depth, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(mhc_depth, "WINDOWS", 8)
    tiny = dataclasses.replace(TINY, layers=1, steps=5)
    runs = [run(regime, arm, s, tiny) for regime, arm in (("ordinary", "plain"), ("enlarged", "HC")) for s in (0, 1)]
    mhc_depth.write(runs)
    assert mhc_depth.read() == json.loads(json.dumps(mhc_depth.document(runs)))
    assert {**run("enlarged", "HC", 1, tiny), "duration_s": 0} == {**runs[-1], "duration_s": 0}
    assert runs[-1]["curves"]["forward_all"][0] == 1.69  # 1.3 twice
    assert runs[-1]["max_forward"] == runs[-1]["layers"]["forward"][0] > max(runs[-1]["curves"]["forward"])


def test_a_number_that_is_not_finite_is_kept_as_none():
    broken = {"regime": "hot", "arm": "HC", "seed": 0, "heldout_loss": mhc_depth.rounded(math.inf)}
    assert (broken["heldout_loss"], mhc_depth.rounded(123456.7)) == (None, 123460.0)
    assert mhc_depth.largest([1.0, mhc_depth.rounded(math.nan), 2.0]) == 2.0
    peaks = {f"max_{name}": 1.0 for name in mhc_depth.PEAKS}
    whole = [{**peaks, "regime": "ordinary", "arm": "plain", "seed": s, "heldout_loss": 5.0 + s} for s in (0, 1)]
    rows = mhc_depth.summary([*whole, {**broken, **peaks}])
    assert rows[0]["heldout_loss"] == [5.5, 1.4142]
    assert rows[1]["heldout_loss"] is rows[1]["loss_minus_plain"] is None


def test_stored_file_was_made_with_these_settings(stored):
    now = json.loads(json.dumps(mhc_depth.document(stored["runs"])["setup"]))
    assert {**now, "torch": stored["setup"]["torch"]} == stored["setup"]
    assert [(r["regime"], r["arm"], r["seed"]) for r in stored["runs"]] == mhc_depth.jobs()


def test_every_run_is_whole(stored):
    for r in stored["runs"]:
        assert {len(curve) for curve in r["curves"].values()} == {SETUP.steps // EVERY}
        assert {len(values) for values in r["layers"].values()} == {2 * SETUP.layers}
        for name in mhc_depth.PEAKS:
            assert r[f"max_{name}"] == max(r["curves"][name] + r["layers"].get(name, []))


def test_summary_is_that_of_the_runs(stored):
    assert stored["summary"] == mhc_depth.summary(stored["runs"])
    plain, hc, *_ = stored["summary"]
    assert plain["loss_minus_plain"] == [0, 0]
    assert hc["max_forward"] == [f(r["max_forward"] for r in of(stored, "ordinary", "HC")) for f in (min, max)]


def test_what_the_chapter_says_of_the_runs(stored):
    """With every seed; the plain residual of the ordinary regime is what losses are held against."""
    plain = [r["heldout_loss"] for r in of(stored, "ordinary", "plain")]
    for r in stored["runs"]:
        if r["arm"] in ARMS[2:]:
            assert r["max_forward"] < 1.0002
            assert r["max_backward"] < 2  # the paper's 1.6 is of this size
    for r, base in zip(of(stored, "ordinary", "HC"), plain, strict=True):
        assert r["max_forward"] > 4  # grows where all is as in the papers, and does no harm
        assert r["heldout_loss"] < base + 0.02
    for r, base in zip(of(stored, "enlarged", "HC"), plain, strict=True):
        assert r["max_forward"] > 1e5  # a large gain alone does no harm: every sublayer normalises its input
        assert r["heldout_loss"] < base
    for regime, gain, later in (("hot", 1e12, 0.2), ("extreme", 1e18, 1.0)):
        for arm in ARMS[2:]:
            for free, bound in zip(of(stored, regime, "HC"), of(stored, regime, arm), strict=True):
                assert free["max_forward"] > gain
                assert free["heldout_loss"] > bound["heldout_loss"] + later
    for r in of(stored, "extreme", "HC"):  # nothing is left to learn from: the uniform guess, and no gradient
        assert r["heldout_loss"] == pytest.approx(math.log(2048), abs=1e-3)
        assert r["curves"]["gradient_norm"][-1] == 0


@pytest.mark.parametrize(("regime", "arm", "length"), [("ordinary", "HC", 2), ("hot", SINGLE_PASS, 1)])
def test_a_live_slice_agrees_with_the_stored_file(stored, regime, arm, length):
    piece = slice_run(regime, arm, length=length)
    assert {len(curve) for curve in piece.values()} == {length}
    assert agrees(piece, of(stored, regime, arm)[0])
    assert not agrees(piece, of(stored, regime, arm)[1])
    assert not agrees({**piece, "loss": [x * 1.02 for x in piece["loss"]]}, of(stored, regime, arm)[0])
