"""Hash, vocabulary, look-up and gate of the n-gram memory, beside the published demonstration's way to hash.

On a GPU its kernels: the hash and the rows exact, the gate against float64.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dsv41_edu.benchmarks.gpu import GpuCase, Running, contestants, rms
from dsv41_edu.benchmarks.harness import Case
from dsv41_edu.benchmarks.mhc import training
from dsv41_edu.config import preset
from dsv41_edu.engram.gate import add_memory
from dsv41_edu.engram.hashing import NgramHash
from dsv41_edu.engram.prefetch import Prefetcher
from dsv41_edu.engram.table import EngramTable
from dsv41_edu.engram.vocabulary import IN_MEMORY, CompressedVocabulary, real_tokenizer_file
from dsv41_edu.quantization import E4M3, E8M0, fp8_rows_decode

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
def written() -> Path:
    """A table of FILE_ROWS rows on disk, its bytes written, so that reads meet no holes. It goes with the process."""
    from safetensors.torch import save_file

    name, rows = "layers.1.engram.embed", FILE_ROWS
    g = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 120, (rows, 256), dtype=torch.uint8, generator=g).view(E4M3)
    scale = torch.full((rows, 8), 127, dtype=torch.uint8).view(E8M0)
    folder = tempfile.mkdtemp(prefix="engram-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "table.safetensors"
    save_file({f"{name}.weight": weight, f"{name}.scale": scale}, path)
    return path


@cache
def on_disk() -> EngramTable:
    """That table."""
    return EngramTable.open(written(), layer=1, rows=FILE_ROWS)


def look_ups(rows: Tensor) -> dict[str, Callable]:
    """The same rows from a file, from memory, and prefetched behind some work."""
    work = torch.randn(1024, 1024)

    def compute():
        for _ in range(8):
            work @ work

    def from_file():
        return on_disk().read(rows)

    @cache
    def in_memory():
        table = on_disk()
        return EngramTable(np.array(table.payload[: FILE_ROWS // 8]), np.array(table.scales[: FILE_ROWS // 8]))

    def from_memory():
        return in_memory().read(rows % (FILE_ROWS // 8))

    def one_after_the_other():
        compute()
        return from_file()

    def prefetched():
        with Prefetcher(on_disk()) as prefetcher:
            request = prefetcher.request(rows)
            compute()
            return request.wait()

    return {
        "file": from_file,
        "memory": from_memory,
        "work, then the file": one_after_the_other,
        "the file behind the work": prefetched,
    }


def from_the_cache() -> CompressedVocabulary:
    """The real vocabulary, as a process finds it that isn't the first."""
    IN_MEMORY.clear()
    return CompressedVocabulary.cached(real_tokenizer_file())


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
    vocabulary = {"ours": from_the_cache}
    vocabulary["the first time"] = lambda: CompressedVocabulary.from_file(real_tokenizer_file())
    return [
        Case("engram.hash", f"{addresses:,} rows of {TOKENS} tokens, two layers", hashers),
        Case("engram.vocabulary", "129,280 texts of the real tokenizer, read and compressed", vocabulary),
        Case("engram.rows", f"{rows.numel():,} random rows of {FILE_ROWS:,}, bf16 out", look_ups(rows)),
        Case("engram.gate", "T=64 n=4 d=5120 bf16 CPU", {"ours": compiled, "eager reference": eager}),
    ]


# ---- on a GPU


def gpu_cases(dry: bool) -> list[GpuCase]:
    """The hash of both tables, rows of a table on the GPU and of one in the host's memory, the gate both ways."""
    T, rows, width, n, d = (3, 40, 64, 4, 64) if dry else (4096, 4_000_000, 256, 4, 5120)
    cases = [GpuCase(f"ngram_hash.{T}", f"ids int64 [1, {T}], 48 rows each of two tables", partial(_hash, T))]
    for place in ("device", "host"):
        work = f"{T * 24:,} of {rows:,} rows of {width} in E4M3, {place} memory, to bf16"
        cases.append(GpuCase(f"engram_rows.{place}.{T}", work, partial(_rows, T, rows, width, place)))
    for name, build in {"engram_gate": _gate, "engram_gate_backward": _gate_backward}.items():
        for tokens in (T,) if dry else (64, T):
            work = f"streams and keys bf16 [{tokens}, {n}, {d}], value bf16 [{tokens}, {d}]"
            cases.append(GpuCase(f"{name}.{tokens}", work, partial(build, tokens, n, d)))
    return cases


def plain_hash(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor, pad: int) -> Tensor:
    """Rows [B, S, L, columns] in torch alone, on any device."""
    order = multipliers.shape[1]
    seen = F.pad(ids, (order - 1, 0), value=pad).unfold(1, order, 1).flip(-1)
    products = seen.unsqueeze(2) * multipliers
    mixed, running = [], products[..., 0]
    for i in range(1, order):
        running = running ^ products[..., i]
        mixed.append(running)
    r = torch.stack(mixed, -1).repeat_interleave(primes.shape[1] // (order - 1), -1)
    return r % primes + offsets


def _hash(T: int, device: torch.device) -> Running:
    from kernels.ngram_hash import fused_ngram_hash

    hasher = NgramHash.of(preset("v41_flash"), pad=2)
    ids = torch.randint(0, hasher.size, (1, T), generator=torch.Generator().manual_seed(0))
    given = ids.to(device), *hasher.on(device), hasher.pad
    ours = partial(fused_ngram_hash, *given)

    def error():
        return {"equal": (ours()[0].cpu() == hasher(ids)[0]).double().mean().item()}

    rows = T * hasher.primes.numel()
    return Running(
        contestants(ours, plain_hash, given, device),
        error,
        8 * (T + rows),
        T * hasher.multipliers.numel() * 2 + 2 * rows,
    )


def _rows(T: int, R: int, width: int, place: str, device: torch.device) -> Running:
    from kernels.engram_rows import fused_engram_rows

    on_gpu = device.type == "cuda"
    home = device if place == "device" else torch.device("cpu")
    pinned = on_gpu and place == "host"
    g = torch.Generator(home).manual_seed(0)
    values = torch.empty(R, width, dtype=torch.uint8, device=home, pin_memory=pinned).random_(0, 120, generator=g)
    scales = torch.empty(R, width // 32, dtype=torch.uint8, device=home, pin_memory=pinned)
    scales.random_(120, 130, generator=g)
    rows = torch.randint(0, R, (T, 24), generator=torch.Generator().manual_seed(0)).to(device)

    def eager(values, scales, rows):
        at = rows.to(values.device)
        stored = values[at].to(rows.device).view(E4M3), scales[at].to(rows.device).view(E8M0)
        return fp8_rows_decode(*stored, torch.bfloat16).flatten(-2)

    ours = partial(fused_engram_rows, values, scales, rows)
    sides = {"ours": ours, "eager": partial(eager, values, scales, rows)}
    if on_gpu and place == "device":  # a compiler makes nothing of a gather on the host
        sides["compiled"] = partial(torch.compile(eager, dynamic=False), values, scales, rows)

    def error():
        some = slice(0, None, max(1, T // 40))
        exact = eager(values, scales, rows[some].cpu())  # decoded on the CPU
        return {"equal": (ours()[some].cpu() == exact).double().mean().item()}

    bytes_of_row = 8 + width + width // 32 + 2 * width
    return Running(sides, error, rows.numel() * bytes_of_row, rows.numel() * width)


def _arguments(T: int, n: int, d: int, device: torch.device) -> tuple[Tensor, ...]:
    """streams, keys, value, q_weight and k_weight of `add_memory`, bf16."""
    g = torch.Generator(device).manual_seed(0)
    shapes = (T, n, d), (T, n, d), (T, d), (n, d), (n, d)
    return tuple(torch.randn(shape, generator=g, device=device).bfloat16() for shape in shapes)


def _gate(T: int, n: int, d: int, device: torch.device) -> Running:
    from kernels.engram_gate import fused_engram_gate

    given = _arguments(T, n, d, device)
    ours = partial(fused_engram_gate, *given)

    def error():
        exact = add_memory(*(x.double() for x in given))
        return {name: rms(a, b) for name, a, b in zip(("streams", "gate"), ours(), exact, strict=True)}

    moved = 2 * T * (3 * n + 1) * d + 2 * 2 * n * d + 4 * 4 * T * n
    return Running(contestants(ours, add_memory, given, device), error, moved, 10 * T * n * d)


def _gate_backward(T: int, n: int, d: int, device: torch.device) -> Running:
    from kernels.engram_gate import fused_engram_gate

    given = _arguments(T, n, d, device)
    forms = {"ours": fused_engram_gate, "eager": add_memory}
    if device.type == "cuda":
        forms["compiled"] = torch.compile(add_memory, dynamic=False)
    sides = {name: torch.enable_grad()(training(form, given)) for name, form in forms.items()}

    def error():
        exact = torch.enable_grad()(training(add_memory, tuple(x.double() for x in given)))()
        names = "streams", "keys", "value", "q_weight", "k_weight"
        return {name: rms(a, b) for name, a, b in zip(names, sides["ours"](), exact, strict=True)}

    moved = 2 * T * (9 * n + 3) * d + 3 * 2 * 2 * n * d  # (3n + 1) d elements a token forward, (6n + 2) d backward
    return Running(sides, error, moved, 3 * 10 * T * n * d)
