"""The instruction sets that the CPU interpreter is compiled for, and how: `python instruction_sets.py avx2 FILE` does
it. Only the standard library is needed: building a wheel (setup.py) and the background build (build.py) run this."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("interpreter.cpp")
LIBRARIES = Path(__file__).with_name("libraries")  # of a binary wheel
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=fast", "-w")
CHECKSUM = 64  # hex digits at the end of a library: the SHA-256 of everything before them
AVX2, AVX512 = ("-mavx2", "-mfma"), ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")


class InstructionSet(NamedTuple):
    """`features`: what the processor must have, as Linux names it. `gain`: what it brings over the set before it."""

    name: str
    machine: str
    features: frozenset[str]
    flags: tuple[str, ...]
    gain: str


def _set(name: str, machine: str, features: str, flags: tuple[str, ...], gain: str) -> InstructionSet:
    return InstructionSet(name, machine, frozenset(features.split()), flags, gain)


SETS = {  # of each machine from the least to the best
    one.name: one
    for one in (
        _set("sse2", "x86_64", "sse2", (), "pairs of 16-bit products in 128 bits"),
        _set("avx2", "x86_64", "avx2 fma", AVX2, "256-bit registers and fused multiply-add"),
        _set("avx-vnni", "x86_64", "avx2 fma avx_vnni", (*AVX2, "-mavxvnni"), "four int8 products in one instruction"),
        _set("avx512", "x86_64", "avx2 fma avx512f avx512bw avx512dq avx512vl", (*AVX2, *AVX512), "512-bit registers"),
        _set(
            "avx512-vnni",
            "x86_64",
            "avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni",
            (*AVX2, *AVX512, "-mavx512vnni"),
            "four int8 products in one 512-bit instruction",
        ),
        _set("neon", "aarch64", "asimd", (), "128-bit registers"),
        _set(
            "dotprod",
            "aarch64",
            "asimd asimddp",
            ("-march=armv8.2-a+dotprod",),
            "four int8 products in one instruction",
        ),
        _set(
            "i8mm",
            "aarch64",
            "asimd asimddp i8mm",
            ("-march=armv8.2-a+dotprod+i8mm",),
            "unsigned by signed int8 products",
        ),
        _set("portable", "", "", (), "what any C++ compiler makes of it"),
    )
}


class NoInstructionSet(OSError):
    """The set that ALLYOUNEED_ISA names is unknown, or the processor does not have it."""


def machine() -> str:
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


@cache
def processor_features() -> frozenset[str]:
    """As Linux names them; elsewhere only those that some set needs."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        listed = next(line for line in lines if line.startswith(("flags", "Features")))
        return frozenset(listed.partition(":")[2].split())
    except (OSError, StopIteration):
        return _features_of_macos() if sys.platform == "darwin" else _features_of_torch()


def _features_of_macos() -> frozenset[str]:
    names = {
        "asimd": "AdvSIMD", "asimddp": "arm.FEAT_DotProd", "i8mm": "arm.FEAT_I8MM", "sse2": "sse2", "avx2": "avx2_0",
        "fma": "fma", "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512dq": "avx512dq", "avx512vl": "avx512vl",
        "avx512_vnni": "avx512vnni",
    }  # fmt: skip
    system = ctypes.CDLL(None)

    def has(name: str) -> bool:
        value, size = ctypes.c_int64(), ctypes.c_size_t(8)
        key = f"hw.optional.{name}".encode()
        return system.sysctlbyname(key, ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value == 1

    always = {"aarch64": {"asimd"}, "x86_64": {"sse2"}}.get(machine(), set())
    return frozenset(always | {feature for feature, name in names.items() if has(name)})


def _features_of_torch() -> frozenset[str]:
    """Where the system has no file or call that says it (Windows)."""
    import torch

    found = {"x86_64": {"sse2"}, "aarch64": {"asimd"}}.get(machine(), set())
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        found |= {"avx2", "fma"}
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        found |= {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
        if getattr(torch.cpu, "_is_vnni_supported", bool)():
            found.add("avx512_vnni")
    return frozenset(found)


def supported_sets() -> list[InstructionSet]:
    """Those that this processor has, from the least to the best."""
    found = [one for one in SETS.values() if one.machine == machine() and one.features <= processor_features()]
    return found or [SETS["portable"]]


def chosen_set() -> InstructionSet:
    """The best one, or the one that ALLYOUNEED_ISA names."""
    wanted, found = os.environ.get("ALLYOUNEED_ISA"), supported_sets()
    if not wanted:
        return found[-1]
    if wanted == "portable":
        return SETS["portable"]
    for one in found:
        if one.name == wanted:
            return one
    names = ", ".join([*(one.name for one in found), "portable"])
    raise NoInstructionSet(f"ALLYOUNEED_ISA={wanted}: this processor has {names}")


def compiler() -> str:
    for name in [os.environ["CXX"]] if os.environ.get("CXX") else ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return found
    raise OSError("no C++ compiler found (install g++, or set CXX)")


def flags_of(one: InstructionSet) -> tuple[str, ...]:
    own = ("-DPORTABLE",) if one.name == "portable" else ()
    return (*FLAGS, *one.flags, *own, *(("-static",) if sys.platform == "win32" else ()))


def compile_library(name: str, target: Path, *more: str) -> None:
    """Compile the interpreter for a set into `target`, which appears when it is complete, with its checksum at the end:
    a crash leaves no library that would end the process which loads it."""
    partial = target.with_suffix(f".{os.getpid()}.part")
    try:
        command = [compiler(), *flags_of(SETS[name]), *more, "-shared", str(SOURCE), "-o", str(partial)]
        subprocess.run(command, check=True)
        with partial.open("r+b") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
            file.write(digest.encode())
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o755)
        partial.replace(target)  # atomic: other processes may be building or loading it
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(10)
    try:
        compile_library(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    except (OSError, subprocess.CalledProcessError) as problem:
        sys.exit(str(problem))
