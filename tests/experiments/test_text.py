"""The text is the one that ORIGIN.md describes; the split is interleaved; the tokenizer loses nothing."""

import hashlib
import re

import pytest
import torch

from dsv41_edu.experiments import text


def test_text_is_the_one_of_the_origin_file():
    digest = hashlib.sha256(text.load_text().encode()).hexdigest()
    assert digest in (text.DATA / "ORIGIN.md").read_text()
    assert text.load_text().isascii()
    assert text.load_text().startswith("Genesis 1\nIn the beginning God created the heaven and the earth.\n")


def test_every_chapter_has_a_heading_and_only_headings_have_digits():
    every = text.chapters("train") + text.chapters("heldout")
    assert len(every) == 1189
    for chapter in every:
        heading, *verses = chapter.removesuffix("\n").split("\n")
        assert re.fullmatch(r"([123] )?[A-Z][A-Za-z ]+ \d+", heading)
        assert verses
        assert not re.search(r"\d", "".join(verses))
    assert len({chapter.split("\n")[0].rsplit(" ", 1)[0] for chapter in every}) == 66


def test_every_twentieth_chapter_is_held_out():
    every = text.load_text().split("\n\n")
    held_out = [chapter.rstrip("\n") for chapter in text.chapters("heldout")]
    assert held_out == [chapter.rstrip("\n") for chapter in every[19::20]]
    assert held_out[0].startswith("Genesis 20\n")
    assert not set(text.chapters("train")) & set(text.chapters("heldout"))
    with pytest.raises(ValueError, match="expected one of train, heldout"):
        text.chapters("test")


def test_training_the_tokenizer_again_gives_the_shipped_file():
    assert text.dump(text.train_tokenizer()) == (text.DATA / "tokenizer.json").read_text(encoding="utf-8")


def test_encoding_loses_nothing():
    tokenizer = text.tokenizer()
    everything = text.load_text()
    assert tokenizer.decode(tokenizer.encode(everything).ids) == everything
    foreign = "naïve 漢字 🙂\t\x00  two"
    assert tokenizer.decode(tokenizer.encode(foreign).ids) == foreign


def test_vocabulary():
    tokenizer = text.tokenizer()
    assert tokenizer.get_vocab_size() == text.VOCAB_SIZE
    special = {"<bos>": text.BOS, "<eos>": text.EOS, "<pad>": text.PAD, "<image>": text.IMAGE, "<noise>": text.NOISE}
    assert {word: tokenizer.token_to_id(word) for word in special} == special


def test_special_ids_are_those_of_the_miniature():
    from dsv41_edu.config import preset

    mini = preset("mini")
    assert (mini.vocab_size, mini.bos_token_id, mini.eos_token_id) == (text.VOCAB_SIZE, text.BOS, text.EOS)
    assert (mini.pad_token_id, mini.image_token_id, mini.dspark_noise_token_id) == (text.PAD, text.IMAGE, text.NOISE)


@pytest.mark.parametrize("split", text.SPLITS)
def test_tokens_are_chapters_between_bos_and_eos(split):
    ids = text.tokens(split)
    assert ids.dtype == torch.int64
    assert ids.ndim == 1
    assert ids[0] == text.BOS
    assert ids[-1] == text.EOS
    n = len(text.chapters(split))
    assert (ids == text.BOS).sum() == (ids == text.EOS).sum() == n
    assert torch.equal(torch.where(ids == text.BOS)[0][1:], torch.where(ids == text.EOS)[0][:-1] + 1)
    assert not torch.isin(ids, torch.tensor([text.PAD, text.IMAGE, text.NOISE])).any()
    first = ids[1 : int(torch.where(ids == text.EOS)[0][0])]
    assert text.tokenizer().decode(first.tolist()) == text.chapters(split)[0]


def test_bytes_per_token():
    assert text.bytes_per_token("heldout") * len(text.tokens("heldout")) == pytest.approx(202677)
