"""The one text and the one tokenizer of every experiment.

A public-domain English text of 4.1 MB (`dsv41_edu/data/ORIGIN.md`), 1,189 chapters of 66 books. Every 20th chapter is
held out, so that both splits hold the same kinds of language: the text's last twentieth would be a single kind. The
tokenizer is a byte-level BPE of 2,048 ids, trained on the training chapters alone and shipped; it encodes any text.
"""

import json
import lzma
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

DATA = Path(__file__).parents[1] / "data"
SPLITS = ("train", "heldout")
HELD_OUT_EVERY = 20
VOCAB_SIZE = 2048
BOS, EOS, PAD = 0, 1, 2
IMAGE, NOISE = 2046, 2047  # kept free for the miniature's image and noise tokens (`configs/mini.json`)


@cache
def load_text() -> str:
    """The whole text: chapters parted by an empty line, each a heading such as "Ruth 1" and then a verse a line."""
    return lzma.decompress((DATA / "text.txt.xz").read_bytes()).decode("utf-8")


def chapters(split: str) -> list[str]:
    """The chapters of "train" or "heldout" (the 20th, 40th, ...), each ending in a newline. Raises ValueError."""
    if split not in SPLITS:
        raise ValueError(f"split = {split!r}: expected one of {', '.join(SPLITS)}")
    every = [f"{chapter}\n" for chapter in load_text().removesuffix("\n").split("\n\n")]
    held_out = split == "heldout"
    return [c for number, c in enumerate(every, 1) if (number % HELD_OUT_EVERY == 0) == held_out]


@cache
def tokenizer() -> Tokenizer:
    """The shipped tokenizer. It adds no special ids by itself."""
    return Tokenizer.from_file(str(DATA / "tokenizer.json"))


def train_tokenizer() -> Tokenizer:
    """Learn the merges anew from the training chapters: the shipped file, byte for byte, in about a second."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=IMAGE,  # the two ids from here on aren't learned
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all 256 bytes: nothing is unknown
        show_progress=False,
    )
    made.train_from_iterator(chapters("train"), trainer)
    made.add_special_tokens(["<image>", "<noise>"])
    return made


def dump(tokenizer: Tokenizer) -> str:
    """The tokenizer as the shipped file's text."""
    return json.dumps(json.loads(tokenizer.to_str()), indent=0, ensure_ascii=True) + "\n"


@cache
def tokens(split: str) -> Tensor:
    """A split's ids in one row, int64 [N]: bos, a chapter, eos, bos, the next chapter, ... Do not write into it."""
    ids: list[int] = []
    for chapter in chapters(split):
        ids += [BOS, *tokenizer().encode(chapter, add_special_tokens=False).ids, EOS]
    return torch.tensor(ids)


def bytes_per_token(split: str) -> float:
    """UTF-8 bytes of a split's text over its tokens, bos and eos counted: turns nats a token into bits a byte."""
    return sum(len(chapter.encode()) for chapter in chapters(split)) / len(tokens(split))
