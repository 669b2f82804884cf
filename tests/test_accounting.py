"""Sums over the plan: against the released totals, closed forms, and whole configs drawn at random."""

import json
from fractions import Fraction

import pytest
from checkpoints import write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41_edu.accounting import (
    active,
    backbone,
    cache_bytes,
    expert,
    flops,
    grand_total,
    headline,
    main,
    remainder,
    report,
    totals,
    touched,
    window_bytes,
)
from dsv41_edu.config import preset
from dsv41_edu.generations import plan

V41, MINI = preset("v41_flash"), preset("mini")
V41_PLAN = plan(V41)


def test_one_expert():
    assert expert(V41) == (6, 35_389_440, 18_800_640)
    assert expert(preset("v3")).parameters == 3 * 7168 * 2048


def test_backbone_and_remainder():
    assert grand_total(V41_PLAN) == (96_085, 763_205_315_794, 510_286_023_000)
    assert grand_total(backbone(V41_PLAN)).parameters == 552_366_103_664
    assert sum(remainder(V41_PLAN).values()) == 6_883_459_184
    assert remainder(V41_PLAN) == {
        "attention": 5_064_696_320,
        "embedding": 661_913_600,
        "head": 661_913_600,
        "Engram projections": 314_654_720,
        "router": 78_673_920,
        "indexer": 43_516_416,
        "mHC": 39_323_760,
        "compressor": 18_352_128,
        "norms": 414_720,
    }


def test_totals_by_any_key_sum_to_the_whole():
    for key in ("group", "dtype", "use"):
        parts = totals(V41_PLAN, key).values()
        assert tuple(map(sum, zip(*parts, strict=True))) == grand_total(V41_PLAN)
    assert totals(V41_PLAN, "use")["scale"].parameters == 0


def test_headline_parts():
    found = headline(V41)
    assert (found["backbone"], found["tables"], found["drafter"]) == (
        552_366_103_664,
        196_613_849_600,
        14_225_362_530,
    )
    assert headline(preset("v2"))["tables"] == 0


INDEX_KEYS = 4 * 128 * 512  # the four `indexer.wk`, which a reference count of these totals leaves out


def test_decode_active_to_the_unit():
    assert active(V41) - INDEX_KEYS == 16_129_720_320
    t = touched(V41)
    assert t["routed experts"].matrices + t["shared experts"].matrices == 40 * 7 * 35_389_440 == 9_909_043_200
    assert t["attention"].matrices == 40 * 126_615_552
    assert t["head"].matrices == 661_913_600
    assert t["embedding"] == (0, 0, 5120, 10_240)
    assert t["Engram tables"] == (0, 0, 2 * 24 * 256, 12_672)
    assert t["router"].vectors == 40 * 384, "a text token never reads the images' bias"
    assert not [g for g in t if g.startswith("drafter") or g == "vision"]
    assert all(type(n) is int for group in t.values() for n in group)
    assert type(window_bytes(V41)) is int


def test_prefill_active_to_the_unit():
    assert active(V41, "prefill") - INDEX_KEYS == 7_894_958_080
    t = touched(V41, "prefill")
    assert "head" not in t
    assert t["routed experts"].matrices == 20 * 6 * 35_389_440
    assert t["compressor"].matrices == touched(V41)["compressor"].matrices, "layer 20's too"
    assert t["indexer"].matrices == 3 * (4096 * 1280 + 32 * 5120) + INDEX_KEYS
    assert t["norms"].vectors == 20 * 2 * 5120 + 5120, "layer 20's attention norm feeds its compressor"


def test_bytes_of_a_decode_token_cover_scales():
    t = touched(V41)
    assert t["routed experts"].nbytes == 40 * 6 * 18_800_640
    assert t["shared experts"].nbytes == 1_416_960_000


def test_other_phases_are_refused():
    with pytest.raises(ValueError, match="phase = 'train': expected one of"):
        touched(V41, "train")


def test_global_cache_is_890_bytes():
    parts = cache_bytes(V41)
    assert sum(parts.values()) == 890
    assert sum(v for k, v in parts.items() if k.startswith("latent")) == 720
    assert parts["latent, layer 2"] == 144
    assert parts["index key, layer 20"] == 68
    assert window_bytes(V41) == 67_584
    odd = V41.replace(compress_ratios=(0, 0) + (3,) * 18 + (1,) * 20 + (0,) * 3)
    assert sum(cache_bytes(odd).values()) == Fraction(356) * 3 / 3 + 356


def test_flops_closed_form():
    """At one token every layer has only itself: one window entry, and one compressed entry at ratio 1."""
    one = flops(V41, 1)
    pair = 2 * 2 * 64 * 512
    assert one["matrices"] == 2 * active(V41)
    assert one["attention over window and entries"] == pair * (40 + 20)
    assert one["index scores"] == 5 * 2 * 32 * 128
    assert one["residual streams"] == 80 * 2 * 5120 * 24
    full = flops(V41, 1 << 20)
    assert full["attention over window and entries"] == pair * (2 * 128 + 38 * 640)
    assert full["index scores"] == 2 * 32 * 128 * (3 * (1 << 19) + (1 << 20) + 4 * 16_384)
    with pytest.raises(ValueError, match="context = 0: expected at least 1 token"):
        flops(V41, 0)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_flops_never_fall_with_context(a, b):
    small, large = flops(MINI, min(a, b)), flops(MINI, max(a, b))
    assert all(small[k] <= large[k] for k in small)


# total and active as the reports print them (V4-Pro's "1.6T" with its prediction layer or without)
PRINTED = {
    "deepseekmoe_16b": (16.4e9, 2.6e9),
    "v2": (236e9, 21e9),
    "v3": (671e9, 37e9),
    "v32": (672e9, 37e9),
    "v4_flash": (284e9, 13e9),
    "v4_pro": (1573e9, 49e9),
    "v41_flash": (552e9, 16e9),
}


@pytest.mark.parametrize("name", PRINTED)
def test_headline_of_each_generation(name):
    found = headline(preset(name))
    unit = 1e8 if name == "deepseekmoe_16b" else 1e9
    assert (round(found["backbone"] / unit), round(found["active, decode"] / unit)) == tuple(
        round(v / unit) for v in PRINTED[name]
    )
    assert found["active, prefill"] < found["active, decode"] < found["backbone"]


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    width=st.integers(1, 6),
    d=st.integers(1, 8),
    E=st.integers(2, 12),
    k=st.integers(1, 2),
    shared=st.integers(0, 2),
    n=st.integers(1, 6),
)
def test_closed_forms_on_drawn_configs(width, d, E, k, shared, n):
    c = MINI.replace(
        moe_intermediate_size=32 * width,
        hidden_size=32 * d,
        n_routed_experts=E,
        num_experts_per_tok=k,
        n_shared_experts=shared,
        hc_mult=n,
    )
    one, layers, t = 3 * 32 * d * 32 * width, c.num_hidden_layers, touched(c)
    assert t["routed experts"].matrices == layers * k * one
    assert t["shared experts"].matrices == layers * shared * one
    assert t["mHC"].matrices == 2 * layers * (n * n + 2 * n) * n * 32 * d
    assert t["router"].matrices == layers * E * 32 * d
    assert t["embedding"].rows == 32 * d
    groups = totals(plan(c))
    assert all(0 <= t[g].matrices + t[g].vectors + t[g].rows <= groups[g].parameters for g in t)
    assert active(c, "prefill") < active(c)


def test_report_is_plain_numbers():
    for name in ("mini", "v2", "v41_flash"):
        found = json.loads(json.dumps(report(preset(name))))
        assert found["total"]["tensors"] == len(plan(preset(name)))
    assert report(MINI)["flops_at_full_context"]["matrices"] == 2 * active(MINI)


# ---- the command


def test_command_prints_the_table(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "total                      96,085  763,205,315,794  510,286,023,000" in out
    assert "cache bytes per token" in out


def test_command_json(capsys):
    assert main(["v3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["headline"]["backbone"] == 671_026_419_200
    assert "cache_bytes_per_token" not in found


def test_command_reports_unknown_fields(tmp_path, capsys):
    from checkpoints import CONFIGS

    data = json.loads((CONFIGS / "mini.json").read_text())
    data["novelty"] = 1
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert main([str(tmp_path / "config.json")]) == 0
    assert "unknown field kept: novelty = 1" in capsys.readouterr().out
    assert main([str(tmp_path / "config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unknown_fields"] == ["novelty"]


def test_command_refuses_bad_input(tmp_path, capsys):
    assert main([str(tmp_path / "none.json")]) == 2
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    assert main([str(tmp_path / "config.json")]) == 2
    assert main(["mini", "--checkpoint", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "vocab_size is missing: deepseek_v3 needs it" in errors
    assert "no .safetensors file" in errors


def test_command_holds_a_checkpoint_against_its_own_config(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "mini", MINI, "mini")
    assert main(["--checkpoint", str(folder)]) == 0
    assert f"the checkpoint agrees with the plan: {len(plan(MINI)):,} tensors" in capsys.readouterr().out
    (folder / "model-00002-of-00004.safetensors").unlink()
    assert main(["--checkpoint", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "missing: mtp.*.ffn.experts.*.w*.weight (" in out
    assert "differences from the plan" in out
    assert main(["--checkpoint", str(folder), "--json"]) == 1
    listed = json.loads(capsys.readouterr().out)["checkpoint"]
    assert {"kind", "name", "file", "found", "expected"} == set(listed[0])
    assert "mtp.1.ffn.experts.7.w2.weight" in {p["name"] for p in listed if p["kind"] == "missing"}
    assert main(["v41_flash", "--checkpoint", str(folder)]) == 1, "a named config wins"


def test_command_names_a_single_difference_in_full_and_takes_the_released_config_by_default(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "mini", MINI, "mini")
    c = MINI.replace(vision_config=None)
    assert len(plan(MINI)) > len(plan(c))
    (folder / "config.json").unlink()
    assert main(["--checkpoint", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "shape: embed.weight: found [2048, 192], expected [129280, 5120]" in out
    assert "missing: layers.*.ffn.experts.*.w*.weight (" in out
