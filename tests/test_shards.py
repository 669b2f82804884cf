"""Where shards are cut, a config's document, files of the real size, and a write that stops in the middle."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from checkpoints import CONFIGS
from small_checkpoint import CONFIG, files

from dsv41_edu import checkpoint
from dsv41_edu.checkpoint import load
from dsv41_edu.config import ModelConfig, preset
from dsv41_edu.headers import INDEX
from dsv41_edu.shards import Shards, cut, document, replacing, write_shard
from dsv41_edu.tensors import tensor_plan

PLAN = tensor_plan(CONFIG)
SHARD_NAME = "model-0000{}-of-00007.safetensors"


@pytest.mark.parametrize("limit", [1, 20_000, 10**5, 10**12])
def test_shards_are_cut_between_matrices(limit):
    parts = cut(PLAN, limit)
    assert sorted(t.name for part in parts.values() for t in part) == sorted(t.name for t in PLAN)
    for file, part in parts.items():
        assert file.endswith(f"-of-{len(parts):05d}.safetensors")
        owners = {t.name.rpartition(".")[0] for t in part}
        engram = {t.layer for t in part if ".engram." in t.name}
        if engram:
            assert len(engram) == 1
            assert len(part) == 6
        else:
            assert sum(t.nbytes for t in part) <= limit or len(owners) == 1
        scales = {t.name.removesuffix("scale") for t in part if t.use == "scale"}
        payloads = {t.name.removesuffix("weight") for t in part if t.dtype in ("I8", "F8_E4M3")}
        assert scales == payloads
    sizes = [sum(t.nbytes for t in part) for part in parts.values() if ".engram." not in part[0].name]
    assert all(a + b > limit for a, b in pairwise(sizes))  # no two would fit into one


@pytest.mark.parametrize("name", ["v41_flash", "mini"])
def test_a_config_document_is_the_official_one(name):
    config, official = preset(name), json.loads((CONFIGS / f"{name}.json").read_text())
    made = json.loads(json.dumps(document(config)))
    again = ModelConfig.from_dict(made)
    assert (again, again.metadata, again.unknown) == (config, config.metadata, config.unknown)
    assert made.keys() == official.keys()
    text, theirs = made["text_config"], official["text_config"]
    for ours, stated in (
        (text.pop("rope_scaling"), theirs.pop("rope_scaling")),
        (text, theirs),
        (made.pop("quantization_config"), official.pop("quantization_config")),
        (made.pop("vision_config"), official.pop("vision_config")),
    ):
        assert {name: ours.get(name) for name in stated} == stated
    assert {n: v for n, v in made.items() if n != "text_config"} == {
        n: v for n, v in official.items() if n != "text_config"
    }


def test_fields_that_nobody_knows_survive():
    data = document(CONFIG)
    data["text_config"] |= {"mystery": [1, 2]}
    data["vision_config"] |= {"colour": "blue"}
    config = ModelConfig.from_dict(data)
    assert config.unknown == {"mystery": [1, 2], "vision_config.colour": "blue"}
    assert ModelConfig.from_dict(json.loads(json.dumps(document(config)))).unknown == config.unknown


def test_the_large_checkpoint_is_checked_whole_and_its_memory_foreseen(tmp_path, monkeypatch):
    """Headers of the real size over files without data."""
    config = preset("v41_flash")
    plan = tensor_plan(config)
    (tmp_path / "config.json").write_text(json.dumps(document(config)))
    weight_map = {}
    for name, part in cut(plan, 10**10).items():
        write_shard(tmp_path / name, part, lambda t: ())
        try:
            with (tmp_path / name).open("r+b") as file:
                file.truncate(file.seek(0, 2) + sum(t.nbytes for t in part))
        except OSError:
            pytest.skip("this file system holds no sparse file of 100 GB")
        weight_map |= {t.name: name for t in part}
    total = sum(t.nbytes for t in plan)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    monkeypatch.setattr(checkpoint, "available_memory", lambda device: 64 * 2**30)
    monkeypatch.setattr(Shards, "read", None)
    whole = sum(t.parameters * (4 if t.dtype == "F32" else 2) for t in plan) / 2**30
    decoded = [t for t in plan if t.name.rpartition(".")[0].endswith(("attn.wo_a", "engram.wkv"))]
    kept = [t for t in plan if t not in decoded and t.group != "Engram tables"]
    least = sum(t.nbytes for t in kept) + sum(2 * t.parameters for t in decoded)
    with pytest.raises(MemoryError) as error:
        load(tmp_path)
    assert f"need {whole:,.1f} GiB, 64.0 GiB available on cpu" in str(error.value)
    assert f"need {least / 2**30:,.1f} GiB" in str(error.value)


@pytest.mark.parametrize("stop", [OSError, KeyboardInterrupt])
def test_a_write_that_stops_anywhere_leaves_the_old_files_or_the_new(tmp_path, monkeypatch, stop):
    """At each wait for the disk and each rename the folder is one or the other, also for who is killed there."""
    old, new = ({name: bytes([i]) for name in ("config.json", *map(SHARD_NAME.format, range(3)))} for i in range(2))
    new[INDEX] = b"{}"
    calls = []

    def stopping(real):
        def called(*arguments):
            if folder.exists():
                assert files(folder) == (old if calls.count("rename") < 2 else new)
            else:
                assert calls[-1] == "rename"  # between the two
            calls.append(real.__name__)
            if len(calls) == at:
                raise stop
            return real(*arguments)

        return called

    monkeypatch.setattr(os, "fsync", stopping(os.fsync))
    monkeypatch.setattr(Path, "rename", stopping(Path.rename))
    for at in range(10):
        folder = tmp_path / str(at) / "checkpoint"
        folder.mkdir(parents=True)
        for name, data in old.items():
            (folder / name).write_bytes(data)
        calls.clear()
        try:
            with replacing(folder, ["config.json"]) as written:
                for name, data in new.items():
                    (written / name).write_bytes(data)
        except stop:
            assert files(folder) == (new if at == 9 else old)
        else:
            assert at == 0
            assert files(folder) == new
            # five files, their names, the two renames, the folder's own name
            assert calls == ["fsync"] * 6 + ["rename"] * 2 + ["fsync"]
        assert list(folder.parent.iterdir()) == [folder]
