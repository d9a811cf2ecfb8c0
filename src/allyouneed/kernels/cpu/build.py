"""Builds and loads the native CPU interpreter (interpreter.cpp).

It is compiled for this processor once, in the background, the first time it is needed, and kept in the user's cache
folder. Until it is ready, and where it cannot be built, torch computes the same more slowly; `status()` says which of
the two runs and why. `ALLYOUNEED_NATIVE=off` disables it.

Float models decode with torch meanwhile: the numbers differ in the last bits. Int8 models wait (`wait_for_build`): the
last bits decide between two steps of 1/255, so their answers would differ from those of the next run.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from allyouneed.torch_private import has_vnni

SOURCE = Path(__file__).with_name("interpreter.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-w")
CHECKSUM = 64  # hex digits at the end of the library: the SHA-256 of everything before them
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
        if not is_supported():
            raise BuildError("the processor has no AVX-512 VNNI, or this is not Linux")
        if state.build is None:
            path = library_path()
            if not is_intact(path):
                state.build = start_build(path)
        if state.build is not None:
            if (code := state.build.poll()) is None:
                return None
            if code:
                log.warning("allyouneed: the native CPU interpreter could not be compiled; decoding with torch")
                raise BuildError(f"{compiler()} could not compile {SOURCE.name} (exit code {code})")
        state.loaded = load(library_path())
        log.info("allyouneed: native CPU interpreter %s", library_path())
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


def is_supported() -> bool:
    """Whether the processor multiplies 8-bit integers in 512-bit registers (AVX-512 VNNI)."""
    return platform.system() == "Linux" and has_vnni()


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX") or "g++")
    if found is None:
        raise BuildError("no C++ compiler found (install g++, or set CXX)")
    return found


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        raise BuildError("the user has no home folder; set XDG_CACHE_HOME")
    return Path(home) / "allyouneed"


def library_path() -> Path:
    """The file built from these sources with these flags for this processor."""
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    key = (*(source.read_text("utf-8") for source in sources), *FLAGS, compiler(), cpu_flags())
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:24]
    return cache_folder() / f"interpreter-{digest}.so"


def start_build(library: Path) -> subprocess.Popen[bytes]:
    """Compile in a process of its own, at low priority, that outlives this one."""
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_foreign(library.parent)
    object_file, shared = (str(library.with_suffix(f".{os.getpid()}.{end}")) for end in ("o", "so"))
    steps = (
        [compiler(), *FLAGS, "-c", str(SOURCE), "-o", object_file],
        [compiler(), "-shared", object_file, "-o", shared, "-pthread"],
        ["chmod", "go-w", shared],
        ["sync", shared],
        ["mv", shared, str(library)],  # atomic: other processes may be building or loading it
    )
    compiled, linked, *kept = (shlex.join(["nice", *step]) for step in steps)
    file = shlex.quote(shared)
    sealed = f'seal=$(sha256sum < {file}) && printf %.{CHECKSUM}s "$seal" >> {file}'
    script = " && ".join([compiled, linked, sealed, *kept])
    none = subprocess.DEVNULL
    command = ["sh", "-c", f"umask 077; {script}; code=$?; rm -f {shlex.quote(object_file)}; exit $code"]
    return subprocess.Popen(command, start_new_session=True, stdin=none, stdout=none, stderr=none)


def cpu_flags() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return next((line for line in lines if line.startswith("flags")), platform.machine())
