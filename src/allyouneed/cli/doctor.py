"""The command that shows what this installation runs on, and what each missing piece costs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from allyouneed.cli.options import JsonOption
from allyouneed.errors.extras import EXTRAS, install_hint
from allyouneed.files.system import usable_cores

TORCH_MINIMUM = (2, 10)
TORCH_TESTED = ((2, 11), (2, 13))
SILENT = {"transformers": "imported models are not compared with the original; `bench --against hf` is refused"}


@dataclass(frozen=True)
class Finding:
    """`ok` is None where something optional is missing, False where something is broken. `cost`: what that means."""

    name: str
    value: str
    ok: bool | None = True
    cost: str = ""


def doctor(
    as_json: JsonOption = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the bundled translator on this machine.")] = False,
) -> None:
    """Show Python, torch, CPU, instruction set, compiler, GPU, extras and cache, and what each missing piece costs."""
    findings = [*_software(), *_hardware(), *_extras(), *_files(), *(_measured() if measure else ())]
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
    from allyouneed.kernels.cpu.instruction_sets import LIBRARIES
    from allyouneed.kernels.cpu.instruction_sets import compiler as find_compiler

    cores = usable_cores()
    yield Finding("CPU", f"{_processor()}, {cores} core{'s' if cores > 1 else ''}")
    yield _instruction_set()
    try:
        yield Finding("C++ compiler", find_compiler())
    except OSError:
        cost = "the native CPU interpreter cannot be built"
        if any(LIBRARIES.glob("*.so")):
            yield Finding(
                "C++ compiler", "not found", None, "not needed: the native CPU interpreter came with the wheel"
            )
        else:
            yield Finding("C++ compiler", "not found (g++, or $CXX)", None, cost)
    yield _native()
    yield from _gpu()


def _processor() -> str:
    """The processor's name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _instruction_set() -> Finding:
    """The set in use, and what the better ones of this kind of machine would bring."""
    from allyouneed.kernels.cpu.instruction_sets import SETS, NoInstructionSet, chosen_set, machine, supported_sets

    name = "instruction set"
    try:
        found = chosen_set()
    except NoInstructionSet as error:
        return Finding(name, "none", False, f"{error}; unset ALLYOUNEED_ISA, or name one of these")
    kin = [one for one in SETS.values() if one.machine == machine()]
    better = kin[kin.index(found) + 1 :] if found in kin else kin
    gains = "; ".join(f"{one.name} would bring {one.gain}" for one in better)
    if found != supported_sets()[-1]:
        gains = f"{gains} (this processor has {supported_sets()[-1].name}; ALLYOUNEED_ISA={found.name} holds it back)"
    return Finding(name, found.name, None if better else True, gains)


def _measured() -> Iterator[Finding]:
    """Words that the bundled translator writes in a second: one text at a time, and many."""
    from time import perf_counter

    import allyouneed
    from allyouneed.kernels.cpu import build
    from allyouneed.models import find

    folder = find()
    if folder is None:
        return
    build.wait_for_build()
    translator = allyouneed.load(folder)
    text = "The weather was fine, so we walked along the river and talked about the books we had read."
    for name, texts in (("one text at a time", [text]), ("32 texts at a time", [text] * 32)):
        seconds = list[float]()
        for number in range(6):  # other texts each time: answers are not looked up
            given = [f"{one} {number * len(texts) + n}" for n, one in enumerate(texts)]
            began = perf_counter()
            translator.translate(given)
            seconds.append(perf_counter() - began)
        words = len(text.split()) * len(texts) / min(seconds)
        yield Finding(f"translator, {name}", f"{words:,.0f} words/s, {min(seconds) * 1e3:.0f} ms a call")


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
