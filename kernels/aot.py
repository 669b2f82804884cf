"""Compile every kernel for real GPUs on a machine that has none, and report what the compilers say of each.

    python -m kernels.aot [MODULE ...]

prints one line for each build and target, by default of all the modules of this package that have `BUILDS`, a
list of `Build`. An interpreting process can't compile, so another one does it, which has DSV41_AOT=1.
"""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import kernels
from kernels.launch import triton

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, warp_size=32),
    "sm_90": GPUTarget("cuda", 90, warp_size=32),
    "sm_100": GPUTarget("cuda", 100, warp_size=32),
    "gfx942": GPUTarget("hip", "gfx942", warp_size=64),
}


@dataclass(frozen=True)
class Build:
    """One way to compile a kernel.

    `signature` gives the type of each argument at run time as Triton writes it ("*bf16", "i64", "fp32"; pointers
    are taken as aligned to 16 bytes, and "i32:16" is an integer divisible by 16, which Triton would notice at a
    launch), `constexprs` the values of all others. `num_stages=None` leaves the pipeline's depth to the target.
    Raises ValueError where the two don't name each argument of the kernel once.
    """

    name: str
    kernel: triton.JITFunction
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
    num_stages: int | None = None
    targets: Sequence[str] = tuple(TARGETS)

    def __post_init__(self):
        if sorted([*self.signature, *self.constexprs]) != sorted(self.kernel.arg_names):
            raise ValueError(f"{self.name}: signature and constexprs must name each of {self.kernel.arg_names} once")


@dataclass(frozen=True)
class Report:
    """What one build needs on one target.

    Registers are those of a thread. On AMD `registers` are the vector registers, the accumulation registers
    among them; NVIDIA has neither those nor scalar ones. `stack_bytes` is a thread's memory for what finds no
    register. The compiler for AMD counts the registers that it `spilled`, also to other registers; on NVIDIA each
    four bytes of stack are taken for one, as Triton does. `shared_bytes` are those of a program.
    """

    module: str
    build: str
    target: str
    binary: str
    shared_bytes: int
    registers: int
    spilled: int
    stack_bytes: int
    accumulation_registers: int = 0
    scalar_registers: int = 0


def compile_build(build: Build, target: str) -> Report:
    """Compile one build in this process, which must not interpret."""
    types, hints = {}, {}
    for i, name in enumerate(build.kernel.arg_names):
        types[name], _, divisor = build.signature.get(name, "constexpr").partition(":")
        if types[name].startswith("*") or divisor:
            hints[(i,)] = [["tt.divisibility", int(divisor or 16)]]
    options = {"num_warps": build.num_warps}
    if build.num_stages is not None:
        options["num_stages"] = build.num_stages
    source = ASTSource(build.kernel, types, build.constexprs, hints)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    binary = [*compiled.asm][-1]
    resources = nvidia_resources(compiled.asm) if binary == "cubin" else amd_resources(compiled.asm)
    return Report(build.kernel.__module__, build.name, target, binary, compiled.metadata.shared, **resources)


def nvidia_resources(asm: dict) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spilled": (stack + local) // 4, "stack_bytes": stack + local}


def amd_resources(asm: dict) -> dict[str, int]:
    count = {key: int(value) for key, value in re.findall(r"\.(\w+): +(\d+)$", asm["amdgcn"], re.MULTILINE)}
    return {
        "registers": count["vgpr_count"],
        "spilled": count["vgpr_spill_count"] + count["sgpr_spill_count"],
        "stack_bytes": count["private_segment_fixed_size"],
        "accumulation_registers": count["agpr_count"],
        "scalar_registers": count["sgpr_count"],
    }


def compile_here(modules: Sequence[str]) -> Iterator[Report]:
    if not modules:
        names = [module.name for module in pkgutil.iter_modules(kernels.__path__, "kernels.")]
        modules = [name for name in names if hasattr(importlib.import_module(name), "BUILDS")]
    for module in modules:
        for build in importlib.import_module(module).BUILDS:
            for target in build.targets:
                try:
                    yield compile_build(build, target)
                except Exception as error:
                    error.add_note(f"while compiling {build.name} of {module} for {target}")
                    raise


def compile_all(modules: Sequence[str] = ()) -> list[Report]:
    """Compile each build of these modules, or of all modules of `kernels`, for each of its targets.

    Raises RuntimeError with all that the compiling process had to say if it fails; the last line names the build.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"DSV41_AOT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "kernels.aot", *modules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [Report(**report) for report in json.loads(done.stdout)]


def main() -> None:
    modules = sys.argv[1:]
    if os.environ.get("DSV41_AOT") == "1":
        print(json.dumps([asdict(report) for report in compile_here(modules)]))
        return
    rows = [[field.name for field in fields(Report)], *map(astuple, compile_all(modules))]
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print(*(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)), sep="  ")


if __name__ == "__main__":
    main()
