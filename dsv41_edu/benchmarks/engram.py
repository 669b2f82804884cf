"""Hash, vocabulary, look-up and gate of the n-gram memory, beside the published demonstration's way to hash."""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dsv41_edu.benchmarks.harness import Case
from dsv41_edu.config import preset
from dsv41_edu.engram.gate import add_memory
from dsv41_edu.engram.hashing import NgramHash
from dsv41_edu.engram.prefetch import Prefetcher
from dsv41_edu.engram.table import EngramTable
from dsv41_edu.engram.vocabulary import CompressedVocabulary, real_tokenizer
from dsv41_edu.quantization import E4M3, E8M0

TOKENS = 4096
FILE_ROWS = 12_000_000  # 3.2 GB on disk


def as_the_demo_does(hasher: NgramHash, ids: np.ndarray) -> list[np.ndarray]:
    """Rows [B, S, columns] of each layer: shifted copies, then a loop over orders and heads, in numpy."""
    B, S = ids.shape
    shifted = [np.concatenate([np.full((B, k), hasher.pad), ids], 1)[:, :S] for k in range(hasher.order)]
    heads = hasher.primes.shape[1] // (hasher.order - 1)
    found = []
    for layer in range(len(hasher.layers)):
        multipliers, primes, offsets = (t[layer].numpy() for t in (hasher.multipliers, hasher.primes, hasher.offsets))
        columns = []
        for order in range(2, hasher.order + 1):
            mixed = shifted[0] * multipliers[0]
            for k in range(1, order):
                mixed = np.bitwise_xor(mixed, shifted[k] * multipliers[k])
            for head in range(heads):
                column = (order - 2) * heads + head
                columns.append((mixed % int(primes[column])).astype(np.int64, copy=False) + offsets[column])
        found.append(np.stack(columns, axis=2))
    return found


@cache
def mapped() -> EngramTable:
    """A table of FILE_ROWS rows on disk, mapped; its bytes are written, so that reads meet no holes.

    The file goes with the process.
    """
    from safetensors.torch import save_file

    name, rows = "layers.1.engram.embed", FILE_ROWS
    g = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 120, (rows, 256), dtype=torch.uint8, generator=g).view(E4M3)
    scale = torch.full((rows, 8), 127, dtype=torch.uint8).view(E8M0)
    folder = tempfile.mkdtemp(prefix="engram-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "table.safetensors"
    save_file({f"{name}.weight": weight, f"{name}.scale": scale}, path)
    return EngramTable.open(path, layer=1, rows=rows)


def look_ups(rows: Tensor) -> dict[str, Callable]:
    """The same rows from a mapped file, from memory, and prefetched behind some work."""
    work = torch.randn(1024, 1024)

    def compute():
        for _ in range(8):
            work @ work

    def from_file():
        return mapped().read(rows)

    @cache
    def in_memory():
        table = mapped()
        return EngramTable(np.array(table.payload[: FILE_ROWS // 8]), np.array(table.scales[: FILE_ROWS // 8]))

    def from_memory():
        return in_memory().read(rows % (FILE_ROWS // 8))

    def one_after_the_other():
        compute()
        return from_file()

    def prefetched():
        with Prefetcher(mapped()) as prefetcher:
            request = prefetcher.request(rows)
            compute()
            return request.wait()

    return {
        "mapped file": from_file,
        "memory": from_memory,
        "work, then the file": one_after_the_other,
        "the file behind the work": prefetched,
    }


def cases() -> list[Case]:
    """Hash both layers of a long sequence, compress the vocabulary, look up, gate."""
    hasher = NgramHash.of(preset("v41_flash"), pad=2)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, hasher.size, (1, TOKENS), generator=g)
    addresses = TOKENS * hasher.primes.numel()
    rows = torch.randint(0, FILE_ROWS, (TOKENS, hasher.primes.shape[1]), generator=g)
    X, keys = (torch.randn(64, 4, 5120, generator=g).bfloat16() for _ in range(2))
    value, q, k = (torch.randn(*shape, generator=g).bfloat16() for shape in ((64, 5120), (4, 5120), (4, 5120)))
    eager = torch.no_grad()(partial(add_memory, X, keys, value, q, k))
    compiled = torch.no_grad()(partial(torch.compile(add_memory, dynamic=False), X, keys, value, q, k))
    hashers = {"ours": lambda: hasher(ids), "as the demo does": lambda: as_the_demo_does(hasher, ids.numpy())}
    vocabulary = {"ours": lambda: CompressedVocabulary.of(real_tokenizer())}
    return [
        Case("engram.hash", f"{addresses:,} rows of {TOKENS} tokens, two layers", hashers),
        Case("engram.vocabulary", "129,280 texts of the real tokenizer, read and compressed", vocabulary),
        Case("engram.rows", f"{rows.numel():,} random rows of {FILE_ROWS:,}, bf16 out", look_ups(rows)),
        Case("engram.gate", "T=64 n=4 d=5120 bf16 CPU", {"ours": compiled, "eager reference": eager}),
    ]
