"""Toy kernels, compiled for each target by another process. What a report says is known from how they are built."""

import sys

import pytest

import kernels
from kernels import aot
from kernels.aot import TARGETS, Build, Report, amd_resources, compile_all
from tests.kernels.toy_kernels import BUILDS, NORM, rmsnorm

TOYS = "tests.kernels.toy_kernels"


@pytest.fixture(scope="module")
def reports():
    return {(report.build, report.target): report for report in compile_all([TOYS])}


def test_each_build_is_compiled_for_each_of_its_targets(reports):
    assert list(reports) == [(build.name, target) for build in BUILDS for target in build.targets]
    assert {report.module for report in reports.values()} == {TOYS}
    kinds = {target: {report.binary for key, report in reports.items() if key[1] == target} for target in TARGETS}
    assert kinds == {"sm_80": {"cubin"}, "sm_90": {"cubin"}, "sm_100": {"cubin"}, "gfx942": {"hsaco"}}


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_that_fits_does_not_spill(reports, target):
    report = reports["rmsnorm", target]
    assert 16 <= report.registers <= 128
    assert report.spilled == report.stack_bytes == report.accumulation_registers == 0
    assert report.shared_bytes > 0
    assert (report.scalar_registers > 0) == (target == "gfx942")


def test_a_kernel_that_does_not_fit_spills(reports):
    nvidia, amd = reports["matmul_crowded", "sm_90"], reports["matmul_crowded", "gfx942"]
    assert nvidia.registers == 255
    assert nvidia.spilled * 4 == nvidia.stack_bytes > 0
    assert amd.spilled > 0
    assert amd.accumulation_registers > 0


def test_the_counts_of_the_amd_compiler():
    counts = amd_resources(
        {
            "amdgcn": """
  - .agpr_count:     2
    .private_segment_fixed_size: 64
    .sgpr_count:     31
    .sgpr_spill_count: 5
    .vgpr_count:     7
    .vgpr_spill_count: 3
"""
        }
    )
    assert counts == {
        "registers": 7,
        "spilled": 8,
        "stack_bytes": 64,
        "accumulation_registers": 2,
        "scalar_registers": 31,
    }


def test_operands_in_float8_pass_through_shared_memory(reports):
    operands = 2 * 64 * 128
    assert all(reports["matmul_float8", name].shared_bytes >= operands for name in ("sm_90", "sm_100", "gfx942"))


def test_divisors_warps_and_stages_reach_the_compiler(reports):
    assert reports["matmul_one_stage", "sm_90"].shared_bytes < reports["matmul_float8", "sm_90"].shared_bytes
    plain = reports["rmsnorm", "sm_90"]
    assert reports["rmsnorm_divisible", "sm_90"].registers < plain.registers  # loads of 16 bytes share addresses
    assert reports["rmsnorm_wide", "sm_90"].registers < plain.registers  # each thread has half as many elements


def test_a_failure_names_the_build(tmp_path, monkeypatch):
    (tmp_path / "unbuildable.py").write_text(
        "from tests.kernels.toy_kernels import *\n"
        "BUILDS = [Build('old', convert, {'x': '*fp32', 'y': '*fp8e4nv', 'n': 'i32'},\n"
        "    {'BLOCK': 64, 'ROUNDING': None}, targets=['sm_80'])]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        RuntimeError, match=r"(?s)fp8e4nv not supported.*while compiling old of unbuildable for sm_80"
    ):
        compile_all(["unbuildable"])


def test_modules_with_builds_are_found(tmp_path, monkeypatch):
    (tmp_path / "built_toy.py").write_text("from tests.kernels.toy_kernels import BUILDS\n")
    (tmp_path / "other_toy.py").write_text("")
    monkeypatch.setattr(kernels, "__path__", [str(tmp_path)])
    monkeypatch.setattr(aot, "compile_build", lambda build, target: (build.name, target))
    assert list(aot.compile_here([])) == [(build.name, target) for build in BUILDS for target in build.targets]


@pytest.mark.parametrize(("types", "values"), [(NORM, {}), (NORM | {"z": "i32"}, {"BLOCK": 8}), (NORM, {"d": 8})])
def test_a_build_names_each_argument_once(types, values):
    message = r"norm: signature and constexprs must name each of \['x', 'weight', 'y', 'd', 'eps', 'BLOCK'\] once"
    with pytest.raises(ValueError, match=message):
        Build("norm", rmsnorm, types, values)


def test_the_command_prints_a_table(monkeypatch, capsys):
    rows = [Report("m", "b", "sm_90", "cubin", 1024, 32, 0, 0), Report("m", "b", "gfx942", "hsaco", 0, 9, 1, 4, 2, 3)]
    asked = []
    monkeypatch.setattr(aot, "compile_all", lambda modules: asked.append(modules) or rows)
    monkeypatch.setattr(sys, "argv", ["aot", "m"])
    aot.main()
    assert asked == [["m"]]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:6] == ["module", "build", "target", "binary", "shared_bytes", "registers"]
    assert lines[1:] == ["m b sm_90 cubin 1024 32 0 0 0 0".split(), "m b gfx942 hsaco 0 9 1 4 2 3".split()]
