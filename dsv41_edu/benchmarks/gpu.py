"""The fused kernels on a real GPU, beside eager torch and torch.compile: python -m dsv41_edu.benchmarks.gpu

Every case is first compared with float64 on a few of its tokens, then timed. The machine's two ceilings, a large copy
and a large product of matrices, are measured in the same run. It downloads nothing, ends within eight minutes and
writes book/data/gpu.json; what fails is recorded as an error, and the rest goes on. Calls are repeated on the same
inputs, so what fits the cache stays there, and times include what a call waits for on the host.

--dry-run does the same without a GPU: tiny sizes, interpreted kernels, nothing timed. A module of this package adds
its cases by a function `gpu_cases(dry)` that returns a list of `GpuCase`.
"""

import argparse
import datetime
import importlib
import json
import pkgutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from dsv41_edu import benchmarks
from dsv41_edu.benchmarks.harness import machine
from dsv41_edu.moe.experts import Experts, QuantizedExperts, expert, swiglu
from dsv41_edu.moe.gate import affinity, route
from dsv41_edu.quantization import E4M3, E8M0, fp8_tiles_decode, mxfp4_decode

RESULTS = Path(__file__).parents[2] / "book" / "data" / "gpu.json"
SECONDS = 8 * 60 - 30  # for all; what is then under way has half a minute to end
SECONDS_PER_CASE = 35  # with all that is compiled
SECONDS_PER_TIMING = 1.0
WARM_UP, FEWEST, MOST = 3, 5, 200


@dataclass(frozen=True)
class Running:
    """A case with its inputs in place: the contestants, the first is ours, and what each call must do at least."""

    contestants: dict[str, Callable[[], object]]
    error: Callable[[], dict[str, float]]  # ours against float64
    bytes: int  # each input read once, each output written once
    flops: int


@dataclass(frozen=True)
class GpuCase:
    """`work` says what is done: shapes and dtypes. `build` makes its inputs on a device."""

    name: str
    work: str
    build: Callable[[torch.device], Running]


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after so many seconds. For the main thread; a kernel isn't interrupted."""

    def stop(*_):
        raise TimeoutError(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def seconds_of(call: Callable[[], object]) -> float:
    """Median seconds of a call on the GPU's clock, between events, after a warm-up."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    times, end = [], time.monotonic() + SECONDS_PER_TIMING
    while len(times) < FEWEST or (len(times) < MOST and time.monotonic() < end):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def launches_of(call: Callable[[], object]) -> int:
    """Kernels that one call launches; copies and fills by the memory engine aren't kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_gpu)


def ceilings(device: torch.device, dry: bool) -> dict:
    """Bytes and floating-point operations a second that this GPU reaches: a copy of 4 GiB, a product of 8192^3."""
    n = 64 if dry else 8192
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    source = torch.ones(2**10 if dry else 2**32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls = {
        "copy_bytes_per_s": (2 * source.numel(), lambda: target.copy_(source)),
        "bf16_flop_per_s": (2 * n**3, lambda: a @ b),
    }
    for _, call in calls.values():
        call()
    return {name: None if dry else work / seconds_of(call) for name, (work, call) in calls.items()}


def run_case(case: GpuCase, device: torch.device, dry: bool, limits: dict, seconds: float) -> dict:
    """One case's results: error against float64, and of each contestant its time, rates and launches."""
    result = {"name": case.name, "work": case.work}
    try:
        with at_most(seconds), torch.no_grad():
            running = case.build(device)
            result |= {"bytes": running.bytes, "flops": running.flops, "contestants": []}
            result["difference"] = running.error()
            if not dry:
                memory, compute = limits["copy_bytes_per_s"], limits["bf16_flop_per_s"]
                result["floor_s"] = max(running.bytes / memory, running.flops / compute)
            for label, call in running.contestants.items():
                result["contestants"].append(one := {"label": label, "seconds": None, "launches": None})
                try:
                    call()
                    if not dry:
                        one["seconds"] = t = seconds_of(call)
                        one |= {"bytes_per_s": running.bytes / t, "flop_per_s": running.flops / t}
                        one["launches"] = launches_of(call)
                except TimeoutError:
                    raise
                except Exception as error:
                    one["error"] = f"{type(error).__name__}: {error}"[:500]
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:500]
    return result


def collect(dry: bool) -> list[GpuCase]:
    """The cases of every module of the package that has some."""
    modules = [
        importlib.import_module(m.name) for m in pkgutil.iter_modules(benchmarks.__path__, "dsv41_edu.benchmarks.")
    ]
    return [case for module in modules if hasattr(module, "gpu_cases") for case in module.gpu_cases(dry)]


def run(cases: list[GpuCase], dry: bool, seconds: float = SECONDS) -> dict:
    """{"machine", "ceilings", "cases"}; a case for which no time is left has an error that says so."""
    end = time.monotonic() + seconds
    device = torch.device("cpu" if dry and not torch.cuda.is_available() else "cuda")
    here = machine() | {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "gpu": None}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        here |= {
            "gpu": properties.name,
            "gpu_memory_gib": properties.total_memory / 2**30,
            "cuda": torch.version.cuda,
        }
    limits, results = ceilings(device, dry), []
    for case in cases:
        left = end - time.monotonic()
        if left <= 0:
            results.append({"name": case.name, "work": case.work, "error": "no time was left"})
            continue
        results.append(run_case(case, device, dry, limits, min(left, SECONDS_PER_CASE)))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"machine": here, "ceilings": limits, "cases": results}


def contestants(ours: Callable, eager: Callable, given: tuple, device: torch.device) -> dict[str, Callable]:
    """Ours, which has its inputs, beside a plain form of `given`, on a GPU compiled as well."""
    found = {"ours": ours, "eager": partial(eager, *given)}
    if device.type == "cuda":
        found["compiled"] = partial(torch.compile(eager, dynamic=False), *given)
    return found


# ---- gate and experts


def gpu_cases(dry: bool) -> list[GpuCase]:
    """The MoE layer of V4.1: its gate, and its experts in each stored format."""
    E, d, width, k = (8, 64, 32, 2) if dry else (384, 5120, 2304, 6)
    cases = []
    for T in (1, 3) if dry else (1, 64, 512, 4096):
        work = f"x bf16 [{T}, {d}], W bf16 [{E}, {d}], the {k} best, with bias"
        cases.append(GpuCase(f"gate.{T}", work, partial(_gate, T, E, d, k)))
    for name in ("bf16", "fp8", "mxfp4"):
        for T in (3,) if dry else (1, 64, 4096):
            work = f"x bf16 [{T}, {d}], {k} of at most {E} experts [{width}, {d}] in {name}, clamp 10"
            cases.append(GpuCase(f"experts.{name}.{T}", work, partial(_experts, name, T, E, d, width, k)))
    return cases


def _gate(T: int, E: int, d: int, k: int, device: torch.device) -> Running:
    from kernels.gate import fused_gate

    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(T, d, generator=g, device=device).bfloat16()
    weight = (torch.randn(E, d, generator=g, device=device) / d**0.5).bfloat16()
    bias = torch.randn(E, generator=g, device=device) / 100
    options = {"renormalise": k > 1, "scale": 1.5}

    def reference(x, weight, bias):
        wide = torch.promote_types(x.dtype, torch.float32)
        return route(affinity(x.to(wide) @ weight.to(wide).T, "sqrtsoftplus"), k, bias=bias, **options)

    def ours():
        return fused_gate(x, weight, bias, top_k=k, scoring_func="sqrtsoftplus", **options)

    def error():
        (weights, indices), (w, i) = ours(), reference(x.double(), weight.double(), bias.double())
        same = (indices == i).all(-1)  # in bits of fp32 two scores may change places
        return {"ids_equal": same.double().mean().item(), "rms": rms(weights[same], w[same])}

    contestants = {"ours": ours, "eager": partial(reference, x, weight, bias)}
    if device.type == "cuda":
        contestants["compiled"] = partial(torch.compile(reference), x, weight, bias)
    return Running(contestants, error, 2 * (T + E) * d + 4 * E + 12 * T * k, 2 * T * E * d)


def _experts(name: str, T: int, E: int, d: int, width: int, k: int, device: torch.device) -> Running:
    from kernels.experts import fused_experts

    g = torch.Generator(device).manual_seed(0)
    bits = {"bf16": 16, "fp8": 8 + 8 / 1024, "mxfp4": 4 + 8 / 32}[name]
    if device.type == "cuda":  # as many as memory has room for, a tenth of it left for the rest
        E = min(E, int(0.9 * torch.cuda.mem_get_info(device)[0] / (3 * d * width * bits / 8)))
    w2 = _stored(name, E, d, width, g)
    if name == "bf16":
        joint = _stored(name, E, 2 * width, d, g)  # the reference's layout, and views of it for ours
        w1, w3 = joint.chunk(2, dim=1)
        with torch.device("meta"):
            eager = Experts(E, d, width, 10.0)
        eager.w13, eager.w2 = (nn.Parameter(w, requires_grad=False) for w in (joint, w2))
    else:
        w1, w3 = (_stored(name, E, width, d, g) for _ in range(2))
        eager = QuantizedExperts(10.0, w1=w1, w2=w2, w3=w3)
    x = torch.randn(T, d, generator=g, device=device).bfloat16()
    weights, indices = route(torch.rand(T, E, generator=g, device=device), k, renormalise=k > 1, scale=1.5)
    decode = {"bf16": None, "fp8": fp8_tiles_decode, "mxfp4": mxfp4_decode}[name]

    def matrices(e, decode=decode):
        return [w[e] if decode is None else decode(w[0][e], w[1][e], torch.float32).to(x.dtype) for w in (w1, w2, w3)]

    def compiled(expert, decode):
        y = torch.zeros(x.shape, device=device)
        for e in indices.unique().tolist():
            token, slot = torch.where(indices == e)
            y.index_add_(0, token, expert(x[token], *matrices(e, decode), 10.0, weights[token, slot]).float())
        return y.to(x.dtype)

    def error():
        some = torch.arange(0, T, max(1, T // 4), device=device)[:4]
        out = ours()[some]
        exact = torch.stack([_in_float64(x[t], weights[t], indices[t], matrices) for t in some.tolist()])
        steps = (out.view(torch.int16).int() - exact.bfloat16().view(torch.int16).int()).abs()
        return {"rms": rms(out, exact), "within_one_ulp": (steps <= 1).double().mean().item()}

    ours = partial(fused_experts, x, weights, indices, w1, w2, w3, 10.0)
    contestants = {"ours": ours, "eager": partial(eager, x, weights, indices)}
    if device.type == "cuda":  # the loop over experts stays outside: inlined, it would be compiled for each routing
        dynamic = partial(torch.compile, dynamic=True)
        contestants["compiled"] = partial(compiled, dynamic(expert), decode and dynamic(decode))
    touched = len(indices.unique())
    bytes_moved = int(touched * 3 * d * width * bits / 8) + 2 * 2 * T * d + 12 * T * k
    return Running(contestants, error, bytes_moved, 2 * 3 * T * k * d * width)


def _stored(name: str, E: int, rows: int, columns: int, g: torch.Generator) -> Tensor | tuple[Tensor, Tensor]:
    """Random matrices in a stored format, of standard deviation near columns^-1/2, without a second copy of them."""

    def bytes_(shape, least, above):
        return torch.empty(shape, dtype=torch.uint8, device=g.device).random_(least, above, generator=g)

    if name == "bf16":
        w = torch.empty(E, rows, columns, dtype=torch.bfloat16, device=g.device)
        return w.normal_(std=columns**-0.5, generator=g)
    least = 127 - columns.bit_length() // 2
    if name == "fp8":  # without the exponent's top bit: below 2, and never NaN
        scales = bytes_((E, -(-rows // 32), -(-columns // 32)), least, least + 3)
        return bytes_((E, rows, columns), 0, 256).bitwise_and_(0xBF).view(E4M3), scales.view(E8M0)
    scales = bytes_((E, rows, columns // 32), least - 2, least + 1)
    return bytes_((E, rows, columns // 2), 0, 256).view(torch.int8), scales.view(E8M0)


def _in_float64(x: Tensor, weights: Tensor, indices: Tensor, matrices: Callable) -> Tensor:
    """One token's output, rounded where the reference rounds."""

    def rounded(values):
        return values.to(x.dtype).double()

    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for r, e in zip(weights.double(), indices.tolist(), strict=True):
        w1, w2, w3 = (w.double() for w in matrices(e))
        y += rounded(w2 @ rounded(swiglu(rounded(w1 @ x.double()), rounded(w3 @ x.double()), 10.0) * r))
    return y


def rms(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dsv41_edu.benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny sizes, nothing timed; writes nothing without --out"
    )
    parser.add_argument("--out", type=Path, help=f"by default {RESULTS}")
    given = parser.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no GPU here: try --dry-run")
    results = run(collect(given.dry_run), given.dry_run)
    out = given.out or (None if given.dry_run else RESULTS)
    if out:
        rounded = json.loads(json.dumps(results), parse_float=lambda digits: float(f"{float(digits):.4g}"))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(rounded, indent=1) + "\n")
    for case in results["cases"]:
        for one in case.get("contestants") or [case]:
            seconds = "-" if one.get("seconds") is None else f"{one['seconds'] * 1e6:.1f} us"
            note = one.get("error", case.get("error", case.get("difference")))
            print(f"{case['name']:20} {one.get('label', ''):9} {seconds:>12} {one.get('launches') or '-':>5}  {note}")


if __name__ == "__main__":
    main()
