"""The plan against the released checkpoint: the figures below were read off its 48 shard headers."""

import re
from collections import Counter
from math import prod

import pytest

from dsv41_edu.config import preset
from dsv41_edu.headers import file_size
from dsv41_edu.tensors import Tensor, tensor_plan

V41 = preset("v41_flash")
PLAN = tensor_plan(V41)
BY_NAME = {t.name: t for t in PLAN}

DTYPES = {
    "I8": (47_232, 278_585_671_680),
    "F8_E4M3": (357, 204_015_223_296),
    "F8_E8M0": (47_589, 23_563_015_184),
    "BF16": (520, 3_952_883_712),
    "F32": (387, 169_229_128),
}
GROUPS = {  # tensors, parameters, bytes
    "routed experts": (92_160, 543_581_798_400, 288_777_830_400),
    "Engram tables": (4, 196_613_849_600, 202_758_032_400),
    "drafter: routed experts": (2_304, 13_589_544_960, 7_219_445_760),
    "attention": (520, 5_064_696_320, 5_069_721_600),
    "shared experts": (240, 1_415_577_600, 1_416_960_000),
    "embedding": (1, 661_913_600, 1_323_827_200),
    "head": (1, 661_913_600, 1_323_827_200),
    "vision": (266, 485_268_480, 970_536_960),
    "Engram projections": (8, 314_654_720, 315_043_840),
    "router": (120, 78_673_920, 157_409_280),
    "indexer": (32, 43_516_416, 45_130_752),
    "mHC": (240, 39_323_760, 157_295_040),
    "compressor": (11, 18_352_128, 36_704_256),
    "norms": (81, 414_720, 829_440),
    "drafter: attention": (39, 379_852_224, 380_229_120),
    "drafter: shared experts": (18, 106_168_320, 106_272_000),
    "drafter: main projection": (2, 78_643_200, 78_720_000),
    "drafter: Markov head": (2, 66_191_360, 132_382_720),
    "drafter: mHC": (18, 2_949_282, 11_797_128),
    "drafter: router": (9, 1_966_848, 3_935_232),
    "drafter: norms": (8, 40_960, 81_920),
    "drafter: confidence head": (1, 5_376, 10_752),
}


def test_the_whole_checkpoint_to_the_unit():
    assert len(PLAN) == 96_085
    assert sum(t.nbytes for t in PLAN) == 510_286_023_000
    assert sum(t.parameters for t in PLAN) == 763_205_315_794
    assert len(BY_NAME) == len(PLAN), "names are unique"
    assert all(type(n) is int for t in PLAN for n in t.shape)


def sums(key):
    found = {}
    for t in PLAN:
        n, parameters, nbytes = found.get(getattr(t, key), (0, 0, 0))
        found[getattr(t, key)] = (n + 1, parameters + t.parameters, nbytes + t.nbytes)
    return found


def test_every_dtype_and_group_to_the_unit():
    assert {k: (n, nbytes) for k, (n, _, nbytes) in sums("dtype").items()} == DTYPES
    assert sums("group") == GROUPS


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.0.attn.wo_a.scale", "F8_E8M0", (256, 128)),
        ("layers.39.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.7.hc_ffn_fn", "F32", (24, 20480)),
        ("layers.7.hc_attn_scale", "F32", (3,)),
        ("layers.7.ffn.gate.bias_vl", "F32", (384,)),
        ("layers.3.ffn.experts.383.w2.weight", "I8", (5120, 1152)),
        ("layers.3.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.3.ffn.experts.0.w3.weight", "I8", (2304, 2560)),
        ("layers.3.ffn.shared_experts.w2.scale", "F8_E8M0", (160, 72)),
        ("layers.20.attn.compressor.wkv.weight", "BF16", (512, 5120)),
        ("layers.14.attn.compressor.wgate.weight", "BF16", (512, 5120)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.36.attn.indexer.wq_b.scale", "F8_E8M0", (128, 40)),
        ("layers.1.engram.embed.weight", "F8_E4M3", (384006168, 256)),
        ("layers.14.engram.embed.scale", "F8_E8M0", (384016682, 8)),
        ("layers.14.engram.wkv.scale", "F8_E8M0", (800, 192)),
        ("layers.1.engram.q_weight", "BF16", (4, 5120)),
        ("mtp.0.main_proj.scale", "F8_E8M0", (160, 480)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("mtp.2.markov_head.embed.weight", "BF16", (129280, 256)),
        ("mtp.1.ffn.gate.weight", "BF16", (128, 5120)),
        ("vision.blocks.31.attn.wqkv.bias", "BF16", (3072,)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
    ],
)
def test_single_tensors(name, dtype, shape):
    assert (BY_NAME[name].dtype, BY_NAME[name].shape) == (dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1: nothing to weigh
        "layers.24.attn.indexer.wk.weight",  # asks layer 20's keys
        "layers.3.attn.indexer.wq_b.weight",
        "layers.0.attn.compressor.wkv.weight",
        "layers.2.engram.embed.weight",
        "mtp.0.norm.weight",
        "mtp.1.main_proj.weight",
        "hc_head_fn",
    ],
)
def test_tensors_that_do_not_exist(name):
    assert name not in BY_NAME


def test_every_scale_belongs_to_a_payload_of_its_shape():
    scales = [t for t in PLAN if t.use == "scale"]
    assert all((t.use == "scale") == (t.dtype == "F8_E8M0") for t in PLAN)
    for scale in scales:
        payload = BY_NAME[scale.name.removesuffix("scale") + "weight"]
        out, in_ = payload.shape
        if payload.dtype == "I8":
            assert scale.shape == (out, in_ * 2 / 32)
        elif payload.use == "rows":
            assert scale.shape == (out, in_ / 32)
        else:
            assert scale.shape == ((out + 31) // 32, (in_ + 31) // 32)
    assert Counter(t.layer for t in scales)[0] == 5 + 3 + 3 * 384, "attention, shared expert, routed experts"


def test_uses_follow_from_names_and_shapes():
    vectors = re.compile(r".*(norm\w*\.weight|bias(_vl)?|attn_sink|hc_\w+_(base|scale)|[qk]_weight|image_\w+)$")
    for t in PLAN:
        if t.use != "scale":
            expected = "rows" if "embed." in t.name and "patch" not in t.name else "matrix"
            assert t.use == ("vector" if vectors.match(t.name) else expected), t.name
    assert all(t.layer is None or re.match(rf"(layers\.{t.layer}|mtp\.{t.layer - 40})\.", t.name) for t in PLAN)


def test_the_shards_of_the_tables_have_the_released_sizes():
    """Shards 47 and 48 hold one Engram module each; their headers are 656 and 664 bytes.

    The order in them, by dtype and then by name, is inferred: it moves the header by a few bytes, the data by none.
    """
    for layer, header, file in ((1, 656, 101_535_150_936), (14, 664, 101_537_926_640)):
        module = [t for t in PLAN if t.name.startswith(f"layers.{layer}.engram.")]
        found, data = file_size(sorted(module, key=lambda t: (t.dtype, t.name)))
        assert (len(module), found, 8 + found + data) == (6, header, file)


def test_parameters_of_each_format():
    def numbers(dtype, use="matrix"):
        return Tensor("x", dtype, (4, 6), "g", use).parameters

    assert [numbers("I8"), numbers("F8_E4M3"), numbers("BF16"), numbers("F8_E8M0", "scale")] == [48, 24, 24, 0]
    assert [Tensor("x", d, (4, 6), "g", "matrix").nbytes for d in ("I8", "BF16", "F32", "I64")] == [24, 48, 96, 192]


def test_tiles_may_be_cut_and_follow_the_config():
    c = preset("mini").replace(q_lora_rank=72)
    by_name = {t.name: t for t in tensor_plan(c)}
    assert by_name["layers.0.attn.wq_a.scale"].shape == (3, 6)  # 72 = 2 * 32 + 8 rows
    assert by_name["layers.0.attn.wq_b.scale"].shape == (8, 3)


def test_the_plan_moves_with_the_config():
    c = V41.replace(num_nextn_predict_layers=0, compress_ratios=V41.compress_ratios[:40], vision_config=None)
    plan = tensor_plan(c)
    assert not [t for t in plan if t.name.startswith(("mtp", "vision", "aligner", "image"))]
    assert len(plan) == 96_085 - 2_401 - 266
    with_two_shared = {t.name: t for t in tensor_plan(preset("mini").replace(n_shared_experts=2))}
    assert with_two_shared["layers.0.ffn.shared_experts.w1.weight"].shape == (128, 192)
    streams = {t.name: t for t in tensor_plan(preset("mini").replace(hc_mult=2))}
    assert streams["layers.0.hc_attn_fn"].shape == (8, 384)
    assert streams["layers.1.engram.wkv.weight"].shape[0] == 3 * 192


def test_the_mini_model_has_every_mechanism():
    groups = {t.group for t in tensor_plan(preset("mini"))}
    assert groups == set(GROUPS)
    assert 5e6 < sum(prod(t.shape) for t in tensor_plan(preset("mini"))) < 2e7


def test_other_generations_are_refused():
    with pytest.raises(ValueError, match="model_type = 'deepseek_v3': expected 'deepseek_v41'"):
        tensor_plan(preset("v3"))
