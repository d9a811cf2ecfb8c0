"""Finds or builds the native CPU interpreter (interpreter.cpp), and loads it.

A binary wheel has it inside, for every instruction set of its platform. Elsewhere it is compiled once, in the
background, the first time it is needed, and kept in the user's cache folder. Until it is ready, and where it cannot be
built, torch computes the same more slowly; `status()` says which of the two runs and why. `ALLYOUNEED_NATIVE=off`
disables it; `ALLYOUNEED_ISA` names another instruction set than the best one of this processor.

Float models decode with torch meanwhile: the numbers differ in the last bits. Int8 models wait (`wait_for_build`): the
last bits decide between two steps of 1/255, so their answers would differ from those of the next run.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from allyouneed.kernels.cpu import instruction_sets
from allyouneed.kernels.cpu.instruction_sets import CHECKSUM, LIBRARIES, SOURCE, chosen_set, compiler, flags_of

TUNING = ("-mtune=native",)  # of what is compiled for this processor only
TIMEOUT = 300  # seconds to wait for the compiler, which runs at low priority

log = logging.getLogger("allyouneed")


class NativeLibrary:
    """The library of this process: `loaded`, or the reason for its `failure`, or the `build` that is under way."""

    loaded: ctypes.CDLL | None = None
    failure: str | None = None
    build: subprocess.Popen[bytes] | None = None


class Status(NamedTuple):
    """Which backend computes on this CPU, and why."""

    backend: str  # native, torch
    reason: str


class BuildError(OSError):
    """Why the native interpreter cannot be used here."""


def native_library() -> ctypes.CDLL | None:
    """The loaded library. Where it is not built yet, start the build and return None without waiting."""
    state = NativeLibrary
    if state.loaded is not None or state.failure is not None:
        return state.loaded
    try:
        if os.environ.get("ALLYOUNEED_NATIVE") == "off":
            raise BuildError("disabled by ALLYOUNEED_NATIVE=off")
        path = library_path()
        if state.build is None and not is_intact(path):
            state.build = start_build(path)
        if state.build is not None:
            if (code := state.build.poll()) is None:
                return None
            if code:
                log.warning("allyouneed: the native CPU interpreter could not be compiled; decoding with torch")
                raise BuildError(f"{compiler()} could not compile {SOURCE.name} (exit code {code})")
        state.loaded = load(path)
        log.info("allyouneed: native CPU interpreter %s", path)
    except OSError as error:
        state.failure = str(error)
        log.info("allyouneed: no native CPU interpreter: %s", error)
    return state.loaded


def wait_for_build() -> ctypes.CDLL | None:
    """Like `native_library`, but wait for a build that is under way."""
    if native_library() is None and NativeLibrary.failure is None and NativeLibrary.build is not None:
        log.warning("allyouneed: compiling the CPU kernels, once, about 10 seconds")
        with suppress(subprocess.TimeoutExpired):
            NativeLibrary.build.wait(TIMEOUT)
    return native_library()


def status(wait: bool = False) -> Status:
    """What computes on this CPU now; `wait`: once a build that is under way has ended."""
    if (wait_for_build if wait else native_library)() is not None:
        return Status("native", str(library_path()))
    return Status("torch", NativeLibrary.failure or "the native interpreter is being compiled in the background")


def is_intact(path: Path) -> bool:
    """Whether the library is complete: loading what a crash left of it would end the process."""
    content = path.read_bytes() if path.exists() else b""
    return hashlib.sha256(content[:-CHECKSUM]).hexdigest().encode() == content[-CHECKSUM:]


def load(path: Path) -> ctypes.CDLL:
    if path.parent != LIBRARIES:  # whoever can write to the package can do so without this
        refuse_foreign(path)
        refuse_foreign(path.parent)
    library = ctypes.CDLL(str(path))
    number, pointer = ctypes.c_int32, ctypes.c_void_p
    for name, arguments, result in (
        ("run", [pointer], number),
        ("selective_scan", [pointer], None),
        ("rnn_layer", [pointer], None),
        ("top_k", [pointer, number, number, pointer, number, number, number, pointer, pointer], None),
        ("pack", [pointer, number, number, pointer, pointer], None),
        ("allocate", [ctypes.c_int64], pointer),
        ("release", [pointer], None),
    ):
        getattr(library, name).argtypes, getattr(library, name).restype = arguments, result
    return library


def refuse_foreign(path: Path) -> None:
    """Code is only loaded from files that no other user can write to."""
    if not hasattr(os, "getuid"):  # Windows: the user's own folder
        return
    found = path.stat()
    if found.st_uid != os.getuid():
        raise BuildError(f"{path} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{path} is writable by other users; remove it or run chmod go-w on it")


def top_k(scores: Tensor, k: int, banned: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The `k` best tokens of each row of scores (rows, vocab) that are not `banned`, and their log-probabilities; None
    where the library has not been loaded for a model, or the scores are not contiguous float32 on the CPU."""
    library = NativeLibrary.loaded
    if library is None or scores.dtype is not torch.float32 or scores.device.type != "cpu":
        return None
    if scores.dim() != 2 or not scores.is_contiguous() or not 0 < k <= scores.shape[1]:
        return None
    rows, vocab = scores.shape
    tokens, log_probs = torch.empty(rows, k, dtype=torch.long), torch.empty(rows, k)
    ban, count = (None, 0) if banned is None else (banned.data_ptr(), len(banned))
    threads = torch.get_num_threads()
    library.top_k(scores.data_ptr(), rows, vocab, ban, count, k, threads, tokens.data_ptr(), log_probs.data_ptr())
    return tokens, log_probs


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        raise BuildError("the user has no home folder; set XDG_CACHE_HOME")
    return Path(home) / "allyouneed"


def library_path() -> Path:
    """The file of the chosen instruction set: the wheel's, or the one built from these sources for this processor."""
    one = chosen_set()
    bundled = LIBRARIES / f"interpreter-{one.name}.so"
    if bundled.is_file():
        return bundled
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    key = (*(source.read_text("utf-8") for source in sources), *flags_of(one), *TUNING, compiler(), processor())
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:24]
    return cache_folder() / f"interpreter-{one.name}-{digest}.so"


def start_build(library: Path) -> subprocess.Popen[bytes]:
    """Compile in a process of its own, at low priority, that outlives this one."""
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_foreign(library.parent)
    command = [sys.executable, "-I", instruction_sets.__file__, chosen_set().name, str(library), *TUNING]
    none = subprocess.DEVNULL
    return subprocess.Popen(command, start_new_session=True, stdin=none, stdout=none, stderr=none)


def processor() -> str:
    """What tells this processor from others."""
    return " ".join([platform.machine(), *sorted(instruction_sets.processor_features())])
