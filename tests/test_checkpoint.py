"""A checkpoint comes back as it was saved: values, bytes, names, every form that a model can be loaded in."""

from math import prod

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoint import CONFIG, files, small_model
from small_models import drawn, drawn_ids
from tokenizers import Tokenizer, models

from dsv41_edu import quantization as q
from dsv41_edu import shards
from dsv41_edu.checkpoint import QuantizedLinear, held, load, nbytes, save, skeleton
from dsv41_edu.engram.table import EngramTable
from dsv41_edu.headers import compare
from dsv41_edu.model import Transformer
from dsv41_edu.moe.experts import QuantizedExperts
from dsv41_edu.tensors import tensor_plan

PLAN = [t for t in tensor_plan(CONFIG) if not t.name.startswith("mtp.")]
SHARD = 100_000


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    made = tmp_path_factory.mktemp("checkpoint") / "small"
    save(model, made, shard_bytes=SHARD)
    return made


def once(name, values):
    """Values that go through the stored form once, by the name alone."""
    if ".ffn.experts." in name:
        return q.mxfp4_decode(*q.mxfp4_encode(values))
    if name.endswith("engram.embed.weight"):
        return q.fp8_rows_decode(*q.fp8_rows_encode(values))
    fp8 = ("wq_a", "wq_b", "wo_a", "wo_b", "main_proj", *(f"shared_experts.w{i}" for i in (1, 2, 3)))
    if name.removesuffix(".weight").endswith((*fp8, "attn.wkv", "engram.wkv")):
        return q.fp8_tiles_decode(*q.fp8_tiles_encode(values))
    if name.rpartition(".")[2].startswith(("attn_sink", "hc_")) or name.endswith(("gate.bias", "gate.bias_vl")):
        return values
    return values.bfloat16().float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_loaded_went_through_the_stored_form_once(model, folder, dtype):
    before, after = model.state_dict(), load(folder, dtype=dtype).state_dict()
    assert after.keys() == before.keys() == {t.name for t in PLAN if t.use != "scale"}
    wide = {t.name for t in PLAN if t.dtype == "F32"}
    for name, values in after.items():
        assert values.dtype == (torch.promote_types(dtype, torch.float32) if name in wide else dtype), name
        assert torch.equal(values.float(), once(name, before[name])), name


def test_the_files_are_what_the_library_writes_and_the_plan_says(folder, tmp_path):
    problems = compare(folder, tensor_plan(CONFIG))
    assert {(p.kind, p.name[:4]) for p in problems} == {("missing", "mtp.")}
    assert compare(folder, PLAN) == []
    paths = sorted(folder.glob("*.safetensors"))
    assert len(paths) > 8
    for path in paths:
        save_file(load_file(path), tmp_path / path.name, metadata={"format": "pt"})
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("keep", "tables"), [(False, "memory"), (True, "memory"), (True, "mapped")])
def test_what_was_loaded_is_saved_to_the_same_bytes(folder, tmp_path, dtype, keep, tables):
    again = tmp_path / "again"
    save(load(folder, dtype=dtype, keep=keep, tables=tables), again, shard_bytes=SHARD)
    assert files(again) == files(folder)


def test_a_mapped_checkpoint_may_be_saved_over_itself(model, tmp_path):
    save(model, tmp_path / "one", shard_bytes=SHARD)
    before = files(tmp_path / "one")
    mapped = load(tmp_path / "one", keep=True, tables="mapped")
    save(mapped, tmp_path / "one", shard_bytes=SHARD)
    assert files(tmp_path / "one") == before
    mapped.set_token_map(model.token_map)
    assert mapped(drawn_ids(CONFIG, 1, 4)).isfinite().all()  # it still reads the file that was replaced


def test_nothing_larger_than_a_piece_is_in_hand(model, folder, tmp_path, monkeypatch):
    """Tables, matrices with ragged tiles and vectors in many pieces: the same bytes and values."""
    monkeypatch.setattr(shards, "PIECE", 2048)
    largest = []
    read, write = shards.Shards.read, shards.write_shard

    def watched_read(self, t, rows):
        values = read(self, t, rows)
        largest.append(values.numel())
        return values

    def watched_write(path, tensors, rows):
        def watched_rows(t):
            for part in rows(t):
                largest.append(part[2].numel())
                yield part

        write(path, tensors, watched_rows)

    monkeypatch.setattr(shards.Shards, "read", watched_read)
    monkeypatch.setattr(shards, "write_shard", watched_write)
    save(model, tmp_path / "pieces", shard_bytes=SHARD)
    assert files(tmp_path / "pieces") == files(folder)
    loaded = load(folder, dtype=torch.float32).state_dict()
    assert all(torch.equal(values, once(name, model.state_dict()[name])) for name, values in loaded.items())
    a_row_of_tiles = 32 * max(prod(t.shape[1:]) for t in PLAN)
    assert max(largest) <= max(2048, a_row_of_tiles) < max(prod(t.shape) for t in PLAN) / 5


def test_images_and_text_give_what_the_quantised_weights_give(model, folder):
    rounded = Transformer(CONFIG, model.token_map, drafter=False)
    rounded.load_state_dict({name: once(name, values) for name, values in model.state_dict().items()})
    loaded = load(folder, dtype=torch.float32)
    loaded.set_token_map(model.token_map)
    ids = drawn_ids(CONFIG, 2, 40)
    ids[1, 5:9] = CONFIG.image_token_id  # start, one token, newline, end
    with torch.no_grad():
        rows = [m.image_rows(drawn(9, 3, 14, 14, dtype=torch.float32), 3, 3) for m in (rounded, loaded)]
        a, b = (m(ids, image_rows=r) for m, r in zip((rounded, loaded), rows, strict=True))
    assert torch.equal(a, b)


def test_kept_matrices_compute_what_decoded_ones_do(model, folder):
    ids = drawn_ids(CONFIG, 2, 40)
    decoded, kept = (load(folder, dtype=torch.float64, keep=keep) for keep in (False, True))
    with torch.no_grad():
        for m in (decoded, kept):
            m.set_token_map(model.token_map)
        torch.testing.assert_close(kept(ids), decoded(ids), rtol=1e-10, atol=1e-10)
    stored = {t.name: t.dtype for t in PLAN if t.dtype in ("I8", "F8_E4M3", "F8_E8M0")}
    left = {n for n in stored if n not in held(kept) or held(kept)[n].dtype != shards.DTYPES[stored[n]]}
    always = {t.name for t in PLAN if t.group == "Engram tables" or t.name.startswith(decoded_always(t))}
    assert left == always & stored.keys()
    assert isinstance(kept.layers[0].attn.wq_a, QuantizedLinear)
    assert isinstance(kept.layers[0].ffn.experts, QuantizedExperts)
    assert isinstance(kept.layers[0].ffn.shared_experts, QuantizedExperts)


def test_a_mapped_table_reads_what_one_in_memory_holds(model, folder):
    ids = drawn_ids(CONFIG, 2, 40)
    whole, mapped = (load(folder, dtype=torch.float32, tables=tables) for tables in ("memory", "mapped"))
    with torch.no_grad():
        for m in (whole, mapped):
            m.set_token_map(model.token_map)
        assert torch.equal(mapped(ids), whole(ids))
    for layer in CONFIG.engram_layer_ids:
        table = mapped.layers[layer].engram.table
        assert isinstance(table, EngramTable)
        assert table.counts.asked == ids.numel() * 6
        assert table.counts.misses == table.counts.rows > 0
        assert mapped.layers[layer].engram.embed is None


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tables", ["memory", "mapped"])
def test_the_bytes_that_are_foreseen_are_those_of_the_loaded_model(folder, keep, tables):
    expected = 0
    for t in PLAN:
        if t.group == "Engram tables":
            expected += 2 * t.parameters if tables == "memory" else 0
        elif keep and t.dtype in ("I8", "F8_E4M3", "F8_E8M0") and not t.name.startswith(decoded_always(t)):
            expected += t.nbytes
        else:
            expected += t.parameters * (4 if t.dtype == "F32" else 2)
    assert nbytes(skeleton(CONFIG, PLAN, torch.bfloat16, keep, tables)) == expected
    assert nbytes(load(folder, keep=keep, tables=tables)) == expected


def decoded_always(t):
    """What is read otherwise than as one matrix."""
    return tuple(f"layers.{t.layer}.{name}" for name in ("attn.wo_a", "engram.wkv"))


@pytest.mark.parametrize("head", [None, "gated", "rnn"])
def test_a_drafter_is_saved_and_loaded_where_there_is_one(folder, tmp_path, head):
    config = CONFIG.replace(dspark_markov_head_type=head)
    with_drafter = small_model(drafter=True, config=config)
    save(with_drafter, tmp_path / "both", shard_bytes=SHARD)
    assert compare(tmp_path / "both", tensor_plan(config)) == []
    before, loaded = with_drafter.state_dict(), load(tmp_path / "both")
    assert loaded.state_dict().keys() == before.keys()
    for name, values in loaded.state_dict().items():
        assert torch.equal(values.float(), once(name, before[name])), name
    kept = load(tmp_path / "both", keep=True, tables="mapped")
    assert isinstance(kept.mtp[0].main_proj, QuantizedLinear)
    save(kept, tmp_path / "again", shard_bytes=SHARD)
    assert files(tmp_path / "again") == files(tmp_path / "both")
    assert load(folder).mtp is None


def word_tokenizer(config, distinct):
    """As many words as the model has ids, of which `distinct` differ by more than their case."""
    words = [f"w{i}" for i in range(distinct)] + [f"W{i}" for i in range(config.vocab_size - distinct)]
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))


def test_the_token_map_comes_from_the_folders_tokenizer(model, tmp_path):
    distinct = CONFIG.engram_compressed_vocab_size
    save(model, tmp_path / "words", tokenizer=word_tokenizer(CONFIG, distinct))
    loaded = load(tmp_path / "words")
    assert loaded.token_map.dtype == torch.int64
    assert loaded.token_map.tolist() == [i % distinct for i in range(CONFIG.vocab_size)]
    assert loaded(drawn_ids(CONFIG, 1, 8)).shape == (1, 8, CONFIG.vocab_size)


def test_without_a_tokenizer_the_token_map_is_the_callers(folder):
    loaded = load(folder)
    with pytest.raises(ValueError, match="token_map: expected the compressed ids"):
        loaded(drawn_ids(CONFIG, 1, 8))


def test_a_tokenizer_of_another_model_is_refused(model, tmp_path):
    few = CONFIG.engram_compressed_vocab_size - 1
    save(model, tmp_path / "words", tokenizer=word_tokenizer(CONFIG, few))
    with pytest.raises(ValueError, match=f"tokenizer.json: {few} compressed ids, expected .* {few + 1}"):
        load(tmp_path / "words")
