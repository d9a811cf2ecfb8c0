"""The CPU interpreter gives the same answers on every instruction set, and the best set of the processor is chosen."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from allyouneed.kernels.cpu import build as native
from allyouneed.kernels.cpu import instruction_sets
from allyouneed.kernels.cpu.instruction_sets import SETS, NoInstructionSet, chosen_set, supported_sets
from allyouneed.nn.batch import Rows
from allyouneed.nn.linear.int8 import Int8Linear, Int8Weight, int8_linear_reference
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor
from allyouneed.runtime.cpu.instructions import Instructions
from allyouneed.runtime.cpu.lower import lower
from allyouneed.runtime.cpu.native_program import NativeProgram, PassInputs, arena_for
from native_models import language_model

LINUX = {
    "a laptop of 2015": ("x86_64", "sse2 avx avx2 fma", "avx2"),
    "a laptop of 2022": ("x86_64", "sse2 avx2 fma avx_vnni", "avx-vnni"),
    "a server of 2017": ("x86_64", "sse2 avx2 fma avx512f avx512bw avx512dq avx512vl", "avx512"),
    "a server of 2020": ("x86_64", "sse2 avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni", "avx512-vnni"),
    "an Atom": ("x86_64", "sse2 ssse3", "sse2"),
    "a Raspberry Pi 4": ("aarch64", "fp asimd", "neon"),
    "Graviton 2": ("aarch64", "fp asimd asimddp", "dotprod"),
    "an Apple M2": ("arm64", "asimd asimddp i8mm", "i8mm"),
    "another machine": ("riscv64", "rv64gc", "portable"),
}


@pytest.mark.parametrize("name", LINUX)
def test_each_processor_gets_its_best_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, features, best = LINUX[name]
    monkeypatch.delenv("ALLYOUNEED_ISA", raising=False)
    monkeypatch.setattr(instruction_sets.platform, "machine", lambda: machine)
    monkeypatch.setattr(instruction_sets, "processor_features", lambda: frozenset(features.split()))
    assert chosen_set().name == best


def test_a_set_that_the_processor_does_not_have_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLYOUNEED_ISA", "avx1024")
    with pytest.raises(NoInstructionSet, match="ALLYOUNEED_ISA=avx1024: this processor has .*portable"):
        chosen_set()
    monkeypatch.setenv("ALLYOUNEED_ISA", supported_sets()[0].name)
    assert chosen_set() == supported_sets()[0]


def test_a_system_without_a_file_of_features_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    monkeypatch.setattr(instruction_sets.platform, "machine", lambda: "AMD64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert instruction_sets._features_of_torch() == {"sse2", "avx2", "fma"}


def test_a_library_of_the_wheel_is_taken_before_any_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARIES", tmp_path)
    monkeypatch.setenv("CXX", "/no/such/compiler")
    bundled = tmp_path / f"interpreter-{chosen_set().name}.so"
    bundled.write_bytes(b"")
    assert native.library_path() == bundled


# --- the same numbers -------------------------------------------------------------------------------------------------

INPUTS = (1, 3, 16, 37, 64, 130)


def products(library: object) -> list[torch.Tensor]:
    """int8 products of extreme and of random weights and tokens, for every size of a tile, and a pass of a model."""
    found = []
    generator = torch.Generator().manual_seed(0)
    for inputs in INPUTS:
        for rows in (1, 2, 3, 5, 7, 8, 13):
            weight = torch.randn(70, inputs, generator=generator)
            weight[0], weight[1] = 1, -1  # all codes are ±127: sums of pairs of products leave 16 bits
            x = torch.randn(rows, inputs, generator=generator)
            x[0] = x[0].abs() * 1e-3 + 1
            linear = Int8Linear(Int8Weight.of(weight), None)
            code = Instructions()
            code.outputs.append(lower(linear, code.register(inputs), code))
            program = NativeProgram(code, library, arena_for(library, code))
            ones = [1] * rows
            with torch.inference_mode():
                found.append(program.run(PassInputs(rows, 1, None, ones, ones), x=x)[0].clone())
    return found
