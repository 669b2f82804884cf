"""A seam, from one sublayer's output to the next one's input, beside its eager form and two public libraries.

Ours is the single-pass form, compiled. The libraries' seams are multi-pass: theirs read their own streams and expand
them; the one of `hyper-connections` has another parametrisation for the same role.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dsv41_edu.benchmarks.gpu import GpuCase, Running, contestants, rms
from dsv41_edu.benchmarks.harness import Case, Skip
from dsv41_edu.mhc.seam import Seam, coefficients, collapse, expand, single_pass

N = 4


def inputs(T: int, d: int, device: torch.device | None = None) -> tuple[Tensor, ...]:
    """out, streams, post, comb, pending, fn, base, scale: bf16 streams, fp32 maps and parameters."""
    g = torch.Generator().manual_seed(0)
    streams, out = (torch.randn(shape, generator=g).bfloat16() for shape in ((T, N, d), (T, d)))
    seam = Seam(N, d).requires_grad_(False)
    seam.fn.normal_(std=(N * d) ** -0.5, generator=g)
    pre, post, comb = seam.coefficients(streams)
    return tuple(t.to(device) for t in (out, streams, post, comb, pre, seam.fn, seam.base, seam.scale))


def transformers_seam(out: Tensor, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> Callable:
    """The library's V4 hyper-connection with these weights, and the expansion of its decoder layer."""
    try:
        from transformers import DeepseekV4Config
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
    except ImportError:
        raise Skip("transformers is not installed") from None
    connection = DeepseekV4HyperConnection(DeepseekV4Config(hidden_size=streams.shape[-1], hc_mult=N))
    with torch.no_grad():
        for name, value in (("fn", fn), ("base", base), ("scale", scale)):
            getattr(connection, name).copy_(value)
    x, y = streams.unsqueeze(0), out[None, :, None]

    def call():
        post, comb, collapsed = connection(x)
        mixed = torch.matmul(comb.to(x.dtype).transpose(-1, -2), x)
        return collapsed, post.to(x.dtype).unsqueeze(-1) * y + mixed

    return call


def package_seam(out: Tensor, streams: Tensor) -> Callable:
    """The mHC of the `hyper-connections` package."""
    try:
        from hyper_connections import mHC
    except ImportError:
        raise Skip("hyper-connections is not installed") from None
    connection = mHC(N, dim=streams.shape[-1]).to(streams.dtype)
    x = streams.transpose(0, 1).contiguous()  # streams are its batch

    def call():
        collapsed, add = connection(x)
        return collapsed, add(out.unsqueeze(0))

    return call


def lazily(build: Callable, *args) -> Callable:
    """A contestant that is built, or skipped, on its first call."""
    built = []

    def call():
        built or built.append(build(*args))
        with torch.no_grad():
            return built[0]()

    return call


def training(form: Callable, arguments: tuple[Tensor, ...]) -> Callable:
    """Forward and backward of a seam, all its inputs and parameters differentiated."""
    leaves = tuple(a.detach().requires_grad_() for a in arguments)

    def call():
        results = form(*leaves)
        return torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results])

    return call


def cases() -> list[Case]:
    """Forward at two widths and three batches, and a training step at the larger batches."""
    found = []
    for d in (512, 5120):
        for T in (1, 64, 1024):
            arguments = inputs(T, d)
            out, streams, *_, fn, base, scale = arguments
            compiled = torch.compile(single_pass, dynamic=False)
            contestants = {
                "ours": torch.no_grad()(partial(compiled, *arguments)),
                "eager reference": torch.no_grad()(partial(single_pass, *arguments)),
                "transformers": lazily(transformers_seam, out, streams, fn, base, scale),
                "hyper-connections": lazily(package_seam, out, streams),
            }
            work = f"T={T} n={N} d={d} bf16 streams CPU"
            found.append(Case(f"mhc.seam.{d}.{T}", work, contestants))
            if (d, T) in ((512, 1024), (5120, 64)):
                forms = {"ours": compiled, "eager reference": single_pass}
                steps = {name: training(form, arguments) for name, form in forms.items()}
                found.append(Case(f"mhc.train.{d}.{T}", f"forward and backward, {work}", steps))
    return found


# ---- on a GPU


def gpu_cases(dry: bool) -> list[GpuCase]:
    """The fused single pass, forward and backward, at the official width."""
    d, sizes = (64, (3,)) if dry else (5120, (1, 64, 4096))
    kinds = {"seam": _forward, "seam_backward": _backward}
    return [
        GpuCase(f"{name}.{T}", f"streams bf16 [{T}, {N}, {d}], fn fp32 [24, {N * d}]", partial(build, T, d))
        for name, build in kinds.items()
        for T in sizes
    ]


def _exact(out, streams, post, comb, pending, *parameters: Tensor) -> tuple[Tensor, ...]:
    """`single_pass` in float64 that rounds the new streams where it does in bf16; the gradient passes by."""
    new = expand(out, streams, post, comb)
    new = new + (new.bfloat16().double() - new).detach()
    return new, collapse(new, pending), *coefficients(new, *parameters)


def _forward(T: int, d: int, device: torch.device) -> Running:
    from kernels.seam import fused_single_pass

    arguments = inputs(T, d, device)
    ours = partial(fused_single_pass, *arguments)

    def error():
        found, exact = ours(), _exact(*(a.double() for a in arguments))
        names = "streams", "z", "pre", "post", "comb"
        return {name: rms(getattr(found, name), x) for name, x in zip(names, exact, strict=True)}

    fn = arguments[5]
    return Running(
        contestants(ours, single_pass, arguments, device),
        error,
        2 * T * (2 * N + 2) * d + 4 * fn.numel(),
        2 * T * fn.numel(),
    )


def _backward(T: int, d: int, device: torch.device) -> Running:
    from kernels.seam import fused_single_pass

    def fused(*args):
        found = fused_single_pass(*args)
        return found.streams, found.z, found.pre, found.post, found.comb

    arguments = inputs(T, d, device)
    forms = {"ours": fused, "eager": single_pass}
    if device.type == "cuda":
        forms["compiled"] = torch.compile(single_pass, dynamic=False)
    sides = {name: torch.enable_grad()(training(form, arguments)) for name, form in forms.items()}

    def error():
        exact = torch.enable_grad()(training(_exact, tuple(a.double() for a in arguments)))()
        names = "out", "streams", "post", "comb", "pending", "fn", "base", "scale"
        return {name: rms(a, b) for name, a, b in zip(names, sides["ours"](), exact, strict=True)}

    fn = arguments[5]
    # forward as above; backward: streams, out and two gradients in, two out; streams and out again for fn's gradient
    moved = 2 * T * (2 * N + 2) * d + 2 * T * (4 * N + 4) * d
    return Running(sides, error, moved + 3 * 4 * fn.numel(), 3 * 2 * T * fn.numel())
