"""The stored map: computed once, for what it answers for alone, never believed when damaged, never in the way."""

import struct

import numpy as np
import pytest

from dsv41_edu.engram import vocabulary
from dsv41_edu.engram.vocabulary import CompressedVocabulary
from tests.engram.test_vocabulary import made_of, spelled


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A tokenizer.json, beside a cache that is empty on disk and in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vocabulary, "IN_MEMORY", {})
    made_of(*map(spelled, ("a", "A", "é", "b"))).save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def computed(monkeypatch):
    """A list that grows with each map that is computed."""
    times, of = [], CompressedVocabulary.of
    monkeypatch.setattr(CompressedVocabulary, "of", lambda *given: times.append(given) or of(*given))
    return times


def stored(path):
    return list((path.parent / "cache" / "dsv41_edu").glob("*"))


def test_a_cached_map_is_computed_once(path, computed):
    first = CompressedVocabulary.cached(path)
    assert first.map.tolist() == [0, 0, 1, 2]
    first.map[:] = 0  # nobody else's
    vocabulary.IN_MEMORY.clear()  # another process
    found = CompressedVocabulary.cached(path)
    assert (found.map.tolist(), found.map.dtype, found.size) == ([0, 0, 1, 2], np.int32, 3)
    (file,) = stored(path)
    file.unlink()
    assert CompressedVocabulary.cached(path).map.tolist() == [0, 0, 1, 2]
    assert len(computed) == 1


def test_what_the_cache_answers_for(path, computed, monkeypatch):
    CompressedVocabulary.cached(path)
    assert CompressedVocabulary.cached(path, 2).map.tolist() == [0, 0]
    assert len(computed) == 2
    made_of(*map(spelled, ("a", "A", "é", "c"))).save(str(path))
    CompressedVocabulary.cached(path)
    assert len(computed) == 3
    monkeypatch.setattr(vocabulary, "RULES", vocabulary.RULES + 1)
    CompressedVocabulary.cached(path)
    monkeypatch.setattr(vocabulary.tokenizers, "__version__", "0.0")
    CompressedVocabulary.cached(path)
    assert len(computed) == len(stored(path)) == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:32],
        lambda whole: whole[:-4],
        lambda whole: whole + b"\0\0\0\0",
        lambda whole: whole[:-4] + struct.pack("<i", 1),  # a map all the same
        lambda whole: bytes([whole[0] ^ 1]) + whole[1:],
    ],
)
def test_a_damaged_file_is_computed_again_and_replaced(path, computed, damage):
    CompressedVocabulary.cached(path)
    (file,) = stored(path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    vocabulary.IN_MEMORY.clear()
    assert CompressedVocabulary.cached(path).map.tolist() == [0, 0, 1, 2]
    assert len(computed) == 2
    assert file.read_bytes() == whole


def test_without_a_place_to_write_the_map_is_computed(path, computed, monkeypatch):
    def homeless(self):
        raise RuntimeError("Could not determine home directory.")

    (path.parent / "cache").write_text("a file where the folder should be")
    assert CompressedVocabulary.cached(path).map.tolist() == [0, 0, 1, 2]
    vocabulary.IN_MEMORY.clear()
    monkeypatch.setattr(vocabulary.Path, "expanduser", homeless)
    assert CompressedVocabulary.cached(path).map.tolist() == [0, 0, 1, 2]
    assert len(computed) == 2


def test_a_file_appears_whole_or_not_at_all(path, monkeypatch):
    def full(*given):
        raise OSError("no space left on device")

    monkeypatch.setattr(vocabulary.os, "replace", full)
    assert CompressedVocabulary.cached(path).map.tolist() == [0, 0, 1, 2]
    assert stored(path) == []


def test_the_cache_is_in_the_home_folder_by_default(path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(path.parent / "home"))
    CompressedVocabulary.cached(path)
    assert len(list((path.parent / "home" / ".cache" / "dsv41_edu").iterdir())) == 1


def test_what_cannot_be_read_is_refused_as_without_a_cache(path, tmp_path):
    with pytest.raises(FileNotFoundError):
        CompressedVocabulary.cached(tmp_path / "none.json")
    path.write_text('{"model": 3}')
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tokenizer\.json: expected a tokenizer\.json: "):
            CompressedVocabulary.cached(path)
    made_of(*map(spelled, "abcd")).save(str(path))
    with pytest.raises(ValueError, match="expected at most 4"):
        CompressedVocabulary.cached(path, 5)
