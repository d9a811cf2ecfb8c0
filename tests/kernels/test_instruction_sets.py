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
from allyouneed.kernels.cpu.instruction_sets import NoInstructionSet, chosen_set, supported_sets
from allyouneed.nn.linear.int8 import Int8Linear, Int8Weight, int8_linear_reference
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor
from allyouneed.runtime.cpu.instructions import Instructions
from allyouneed.runtime.cpu.lower import lower
from allyouneed.runtime.cpu.native_program import NativeProgram, PassInputs, arena_for
from native_models import STARTS, decode, language_model

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
    with pytest.raises(NoInstructionSet, match=r"ALLYOUNEED_ISA=avx1024: this processor has .*portable"):
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


def numbers() -> list[torch.Tensor]:
    """int8 products of extreme and of random weights and tokens, for all sizes of a tile, and a pass of a model."""
    library, found = native.wait_for_build(), list[torch.Tensor]()
    assert library is not None, native.status()
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for inputs in (1, 3, 16, 37, 64, 130):
            weight = torch.randn(70, inputs, generator=generator)
            weight[0], weight[1] = 1, -1  # codes ±127: pairs of their products with 255 leave 16 bits
            linear = Int8Linear(Int8Weight.of(weight), None)
            code = Instructions()
            code.outputs.append(lower(linear, code.register(inputs), code))
            program = NativeProgram(code, library, arena_for(library, code))
            for rows in (1, 2, 3, 5, 7, 8, 13):
                x = torch.randn(rows, inputs, generator=generator)
                x[0] = x[0].abs() * 1e-3 + 1  # nearly all 255
                ones = [1] * rows
                found.append(program.run(PassInputs(rows, 1, None, ones, ones), x=x)[0])
                expected = int8_linear_reference(x, linear.codes, linear.step, None)
                # a rounding may decide between two steps of an input
                assert (found[-1] - expected).abs().max() <= 2 * expected.abs().max() / 255 + 1e-5
        model = language_model()
        executor = cpu_executor(model)
        assert isinstance(executor, CpuExecutor)
        found += decode(executor, 3, STARTS)
    return found


OTHERS = [one.name for one in supported_sets()[:-1]] + ["portable"]
SUITE = (
    *("kernels/test_abi.py", "runtime/cpu/test_executor.py", "runtime/cpu/test_states.py"),
    *(
        "runtime/cpu/test_chunks.py",
        "nn/ops/test_rnn.py",
        "nn/ops/test_selective_scan.py",
        "infer/decoding/test_topk.py",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_set_gives_the_numbers_of_the_best_one(name: str, tmp_path: Path) -> None:
    if native.wait_for_build() is None:
        assert native.status().reason
        return
    file = tmp_path / "numbers.pt"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    script = f"import torch, test_instruction_sets as t; torch.save(t.numbers(), {str(file)!r})"
    environment = os.environ | {"ALLYOUNEED_ISA": name, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for theirs, ours in zip(torch.load(file), numbers(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_interpreter_passes_its_tests_on_every_set(name: str) -> None:
    tests = [str(Path(__file__).parents[1] / one) for one in SUITE]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    done = subprocess.run(command, env=os.environ | {"ALLYOUNEED_ISA": name}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
