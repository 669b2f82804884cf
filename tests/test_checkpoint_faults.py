"""Damage that is named and refused, memory and disk that are foreseen, a write that stops in the middle."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoint import CONFIG, files, small_model
from small_models import drawn_ids, drawn_model
from tokenizers import Tokenizer, models

from dsv41_edu import checkpoint, shards
from dsv41_edu.checkpoint import CheckpointError, load, nbytes, save, skeleton, without_drafter
from dsv41_edu.config import ConfigError
from dsv41_edu.headers import INDEX
from dsv41_edu.shards import Shards, document
from dsv41_edu.tensors import tensor_plan

PLAN = tensor_plan(CONFIG)


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def good(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "small"
    save(model, folder, shard_bytes=100_000)
    return folder


@pytest.fixture
def folder(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / "small"))


@pytest.fixture
def nothing_read(monkeypatch):
    def read(*_):
        raise AssertionError("a weight was read")

    monkeypatch.setattr(Shards, "read", read)


def rewrite(path, change):
    """The library's own file of changed tensors."""
    data = load_file(path)
    change(data)
    save_file(data, path, metadata={"format": "pt"})


def shard(folder, name):
    """The file that holds a tensor."""
    return Shards(folder).places[name][0]


def put(folder, name, byte, values):
    """Overwrite some bytes of a tensor."""
    path, at = Shards(folder).places[name]
    with path.open("r+b") as file:
        file.seek(at + byte)
        file.write(bytes(values))


def test_all_differences_are_named_at_once_and_nothing_is_read(folder, nothing_read):
    changes = {
        "embed.weight": lambda data: data.update({"embed.weight": data["embed.weight"].float()}),
        "head.weight": lambda data: data.update({"head.weight": data["head.weight"].T.contiguous()}),
        "norm.weight": lambda data: data.update(surprise=data.pop("norm.weight")),
        "vision.norm.weight": lambda data: data.update({"layers.0.ffn_norm.weight": torch.zeros(64).bfloat16()}),
    }
    for name, change in changes.items():
        rewrite(shard(folder, name), change)
    broken = shard(folder, "layers.4.attn.wq_b.weight")
    broken.write_bytes(broken.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated") as error:
        load(folder)
    found = {(p.kind, p.name) for p in error.value.problems}
    assert {
        ("damaged", broken.name),
        ("missing", "norm.weight"),
        ("extra", "surprise"),
        ("dtype", "embed.weight"),
        ("shape", "head.weight"),
        ("twice", "layers.0.ffn_norm.weight"),
        ("index", "total_size"),
    } <= found
    assert not any(name.startswith("mtp.") for _, name in found)
    shown = str(error.value).splitlines()
    assert len(shown) == 22
    assert shown[-1] == f"  and {len(error.value.problems) - 20:,} more"


def test_an_index_that_says_otherwise_is_refused(folder, nothing_read):
    index = json.loads((folder / INDEX).read_text())
    right = index["weight_map"]["norm.weight"]
    index["weight_map"]["norm.weight"] = "model-00009-of-00009.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"index: norm.weight: found model-00009-.*, expected {right}"):
        load(folder)


def test_a_drafter_that_is_there_in_part_or_by_the_index_alone_is_refused(folder, nothing_read):
    name, last = "mtp.1.norm.weight", shard(folder, "vision.norm.weight")
    rewrite(last, lambda data: data.update({name: torch.zeros(64).bfloat16()}))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = last.name
    index["metadata"]["total_size"] += 128
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as error:
        load(folder)
    drafter = {t.name for t in PLAN if t.name.startswith("mtp.")}
    assert {(p.kind, p.name) for p in error.value.problems} == {("missing", n) for n in drafter - {name}}
    rewrite(last, lambda data: data.pop(name))
    with pytest.raises(CheckpointError, match=f"index: {name}: found {last.name}, expected nothing"):
        load(folder)


BAD = {
    "a tile's scale of 255": ("layers.1.attn.wq_b.scale", 3, [255]),
    "an expert's scale of 255": ("layers.0.ffn.experts.1.w2.scale", 5, [255]),
    "a shared expert's scale of 255": ("layers.0.ffn.shared_experts.w3.scale", 1, [255]),
    "a table's scale of 255": ("layers.3.engram.embed.scale", 2_900, [255]),
    "an E4M3 payload that is no number": ("layers.2.attn.wkv.weight", 77, [0x7F]),
    "a bf16 NaN": ("vision.norm.weight", 0, [0xC0, 0x7F]),
    "an infinite F32": ("layers.0.hc_attn_scale", 8, [0, 0, 0x80, 0xFF]),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("what", BAD)
def test_values_that_are_not_finite_are_refused_by_name(folder, what, keep):
    name, byte, values = BAD[what]
    put(folder, name, byte, values)
    read = name if keep and "embed" not in name else name.replace("scale", "weight")
    read = name if "hc_" in name else read
    with pytest.raises(CheckpointError, match=f"not finite: {read}: found (nan|-inf), one of [0-9,]+, expected fin"):
        load(folder, keep=keep)


def test_a_mapped_table_gives_nan_where_it_says_so(folder):
    put(folder, "layers.3.engram.embed.scale", 0, [255])
    table = load(folder, tables="mapped").layers[3].engram.table
    assert table.read(torch.tensor([0, 1])).isnan().all(-1).tolist() == [True, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, "dtype = torch.float16: expected torch.bfloat16, torch.float32 or"),
        ({"dtype": torch.float8_e4m3fn}, "dtype = torch.float8_e4m3fn: expected"),
        ({"tables": "disk"}, "tables = 'disk': expected 'memory' or 'mapped'"),
    ],
)
def test_other_options_are_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        load(folder, **options)


def test_other_configs_are_refused(folder, tmp_path, nothing_read):
    data = document(CONFIG)
    data["quantization_config"]["weight_block_size"] = [128, 128]
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="weight_block_size = 128: expected 32"):
        load(folder)
    shutil.copy(Path(checkpoint.__file__).parent / "configs" / "v4_flash.json", folder / "config.json")
    with pytest.raises(ValueError, match="model_type = 'deepseek_v4': expected 'deepseek_v41'"):
        load(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(folder)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_a_damaged_tokenizer_is_refused_before_weights_are_read(folder, nothing_read):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected a tokenizer\.json"):
        load(folder)


@pytest.mark.parametrize(("keep", "tables"), [(False, "memory"), (True, "memory"), (False, "mapped")])
def test_a_model_that_memory_cannot_hold_is_refused_before_it_is_read(folder, monkeypatch, keep, tables):
    needed = nbytes(skeleton(CONFIG, without_drafter(PLAN), torch.float32, keep, tables))
    monkeypatch.setattr(checkpoint, "available_memory", lambda device: needed)
    load(folder, dtype=torch.float32, keep=keep, tables=tables)
    monkeypatch.setattr(checkpoint, "available_memory", lambda device: needed - 1)
    monkeypatch.setattr(Shards, "read", None)
    needs = rf"dtype = torch.float32, keep = {keep}, tables = '{tables}' need 0\.0 GiB, 0\.0 GiB available on cpu"
    with pytest.raises(MemoryError, match=needs):
        load(folder, dtype=torch.float32, keep=keep, tables=tables)


def test_the_memory_of_this_machine_is_known_on_linux():
    available = checkpoint.available_memory("cpu")
    if not Path("/proc/meminfo").exists():
        assert available is None
        return
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total / 1000 < available <= total


def test_what_cannot_be_saved_is_named_before_anything_is_written(model, tmp_path):
    other = drawn_model(CONFIG.replace(hc_mult=2), torch.float32)
    other.config = CONFIG
    other.stranger = torch.nn.Parameter(torch.zeros(3))
    del other.image_end
    with pytest.raises(CheckpointError) as error:
        save(other, tmp_path / "none")
    found = {(p.kind, p.name) for p in error.value.problems}
    assert {("extra", "stranger"), ("missing", "image_end"), ("shape", "layers.0.hc_ffn_fn")} <= found
    part = small_model(drafter=True)
    del part.mtp[0].main_proj
    with pytest.raises(
        CheckpointError, match=r"missing: mtp\.0\.main_proj\.weight: found nothing, expected \[64, 192\]"
    ):
        save(part, tmp_path / "none")
    with pytest.raises(ValueError, match="shard_bytes = 0: expected at least 1"):
        save(model, tmp_path / "none", shard_bytes=0)
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_is_not_finite_is_not_saved(model, folder):
    before = files(folder)
    for name in ("layers.3.ffn.experts.1.w3.weight", "layers.4.attn.wq_a.weight", "image_newline"):
        broken = small_model()
        broken.state_dict()[name].flatten()[5] = float("nan")
        with pytest.raises(CheckpointError, match=f"not finite: {name}: found nan, one of 1, expected"):
            save(broken, folder)
    assert files(folder) == before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(model, folder, monkeypatch):
    read = Shards.read

    def replaced_first(self, t, rows):
        if t.name == "head.weight":
            save(model, folder, shard_bytes=100_000)
        return read(self, t, rows)

    monkeypatch.setattr(Shards, "read", replaced_first)
    with pytest.raises(OSError, match="small: replaced by another checkpoint while it was read"):
        load(folder)


def test_a_folder_with_other_files_is_refused(model, folder):
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"small: holds notes\.txt: expected no files but those"):
        save(model, folder)
    assert (folder / "notes.txt").read_text() == "mine"
    file = folder / "notes.txt"
    with pytest.raises(NotADirectoryError):
        save(model, file)


def test_a_tokenizer_is_replaced_by_another_and_never_dropped(model, folder):
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    words.save(str(folder / "tokenizer.json"))
    with pytest.raises(FileExistsError, match=r"holds tokenizer\.json"):
        save(model, folder)
    more = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    save(model, folder, tokenizer=more)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == 2


def test_a_full_disk_is_foreseen(model, folder, monkeypatch):
    before = files(folder)
    total = json.loads(before[INDEX])["metadata"]["total_size"]
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda _: usage._replace(free=total - 1))
    with pytest.raises(OSError, match=f"{total - 1:,} bytes free, expected {total:,}"):
        save(model, folder)
    assert files(folder) == before
    assert list(folder.parent.iterdir()) == [folder]


def test_a_new_checkpoint_can_be_read_by_others_and_links_are_followed(model, folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    save(model, link)
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "small"]
    (tmp_path / "plain").mkdir()
    assert folder.stat().st_mode == (tmp_path / "plain").stat().st_mode
    loaded = load(link)
    loaded.set_token_map(model.token_map)
    assert loaded(drawn_ids(CONFIG, 1, 3)).isfinite().all()
