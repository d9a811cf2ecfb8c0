"""The command that shows what this installation runs on, and what each missing piece costs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from allyouneed.cli.options import JsonOption
from allyouneed.errors.extras import EXTRAS, install_hint

TORCH_MINIMUM = (2, 10)
TORCH_TESTED = ((2, 11), (2, 13))
CPU_FLAGS = {"AVX2": "avx2", "AVX-512": "avx512f", "VNNI": "avx512_vnni"}
SILENT = {"transformers": "imported models are not compared with the original; `bench --against hf` is refused"}


@dataclass(frozen=True)
class Finding:
    """`ok` is None where something optional is missing, False where something is broken. `cost`: what that means."""

    name: str
    value: str
    ok: bool | None = True
    cost: str = ""


def doctor(as_json: JsonOption = False) -> None:
    """Show Python, torch, CPU, compiler, GPU, extras and cache, and what each missing piece costs."""
    findings = [*_software(), *_hardware(), *_extras(), *_files()]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], ensure_ascii=False, indent=1))
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = {True: "ok", None: "--", False: "!!"}[finding.ok]
        print(f"{mark}  {finding.name:<{width}}  {finding.value}" + (f": {finding.cost}" if finding.cost else ""))


def _software() -> Iterator[Finding]:
    from allyouneed import __version__

    yield Finding("allyouneed", f"{__version__} in {Path(__file__).parents[1]}")
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    try:
        import torch
    except Exception as error:  # a broken installation is what this command is for
        yield Finding("torch", "cannot be imported", False, f"{type(error).__name__}: {error}")
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    (low, high), found = TORCH_TESTED, f"{torch.__version__} (tested with {_range(*TORCH_TESTED)})"
    if version < TORCH_MINIMUM:
        yield Finding("torch", found, False, f"too old; install {_text(TORCH_MINIMUM)} or newer")
    elif not low <= version <= high:
        yield Finding("torch", found, None, "not a tested version; it may work")
    else:
        yield Finding("torch", found)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _range(low: tuple[int, int], high: tuple[int, int]) -> str:
    return f"{_text(low)} to {_text(high)}"


def _hardware() -> Iterator[Finding]:
    flags, name = _cpu()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    features = [label for label, flag in CPU_FLAGS.items() if flag in flags]
    missing = [label for label in CPU_FLAGS if label not in features]
    text = f"{name}, {cores} core{'s' if cores > 1 else ''}, {', '.join(features) or 'no AVX2'}"
    cost = f"decoding is slower without {', '.join(missing)}" if missing else ""
    yield Finding("CPU", text, None if missing else True, cost)
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    yield Finding(
        "C++ compiler",
        compiler or "not found (g++, or $CXX)",
        None if compiler is None else True,
        "" if compiler else "the native CPU interpreter cannot be built",
    )
    yield _native()
    yield from _gpu()


def _cpu() -> tuple[set[str], str]:
    """CPU flags and model name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return set(), platform.processor() or platform.machine()
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return set(values.get("flags", "").split()), values.get("model name", platform.machine())


def _native() -> Finding:
    name, cost = "native CPU interpreter", "torch computes the same, more slowly"
    try:
        from allyouneed.kernels.cpu import build

        executor, detail = build.status()
    except Exception as error:
        return Finding(name, f"cannot be loaded ({type(error).__name__}: {error})", None, cost)
    return Finding(name, detail) if executor == "native" else Finding(name, f"not in use ({detail})", None, cost)


def _gpu() -> Iterator[Finding]:
    try:
        import torch
    except Exception:
        return
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "no CUDA device found"
        yield Finding("GPU", why, None, "training and decoding run on the CPU")
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(number)
        memory = about.total_memory / 2**30
        yield Finding("GPU", f"{about.name}, {memory:.0f} GiB, compute capability {about.major}.{about.minor}")
    version = _version("triton")
    if version is None:
        yield Finding("Triton", "not installed", None, "on a GPU, torch's kernels replace the fused ones")
    else:
        yield Finding("Triton", version)
    if torch.cuda.is_available():
        from allyouneed.kernels import cublaslt

        found, slower = cublaslt.version(), "training takes the algorithms of products that torch takes"
        yield Finding("cuBLASLt", found) if found else Finding("cuBLASLt", "not found", None, slower)


def _version(module: str) -> str | None:
    """The installed version of a module's distribution; None: the module is missing."""
    if importlib.util.find_spec(module) is None:
        return None
    for name in importlib.metadata.packages_distributions().get(module, [module]):
        return importlib.metadata.version(name)
    return "installed"


def _extras() -> Iterator[Finding]:
    for extra, (module, cost) in EXTRAS.items():
        version = _version(module)
        install = f"{cost}; {install_hint(extra)}"
        yield Finding(module, version or "missing", True if version else None, "" if version else install)
    for module, cost in SILENT.items():
        version = _version(module)
        yield Finding(module, version or "missing", True if version else None, "" if version else cost)


def _files() -> Iterator[Finding]:
    from allyouneed.models import find

    translator = find()
    yield Finding(
        "bundled translator",
        str(translator or "missing"),
        True if translator else None,
        "" if translator else "`translate` requires --model; docs/translator.md shows how to train one",
    )
    from allyouneed.kernels.cpu.build import cache_folder

    try:
        folder = cache_folder()
    except OSError as error:
        yield Finding("cache folder", "none", None, f"{error}; the native CPU interpreter is built by every process")
        return
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    yield Finding("cache folder", f"{folder} ({size / 1e6:.1f} MB)" if folder.is_dir() else f"{folder} (empty)")
