"""The machine of interpreter.cpp, compiled for this processor once, in the background, when it is first asked for; then it
lies in the user's cache. Until then, and where it cannot be had, nobody hears of it: torch computes the same, more
slowly. `ALLYOUNEED_NATIVE=off` does without it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("interpreter.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-w")
SEAL = 64  # characters at the end of the library: the checksum of those before them
PATIENCE = 300  # seconds for a compiler that lets everybody else go first


class Order(ctypes.Structure):
    """One thing to do; program.h has the same."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("input", ctypes.c_int32),
        ("other", ctypes.c_int32),
        ("output", ctypes.c_int32),
        ("numbers", ctypes.c_int32 * 8),
        ("factors", ctypes.c_float * 2),
        ("places", ctypes.c_void_p * 6),
    )


class Cache(ctypes.Structure):
    """Keys and values of a layer, and how many numbers lie from one row, head and time to the next."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("time", ctypes.c_int64),
    )


class Pass(ctypes.Structure):
    """What all orders of one pass share; program.h has the same."""

    _fields_ = (
        ("orders", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("time", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("longest", ctypes.c_int32),
        ("order", ctypes.c_void_p),
        ("registers", ctypes.c_void_p),
        ("widths", ctypes.c_void_p),
        ("caches", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
        ("rounded", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    )


class NativeLibrary:
    """What has become of the machine: `found`, or `closed` for good, or `making` it."""

    found: ctypes.CDLL | None = None
    closed = False
    making: subprocess.Popen[bytes] | None = None


def machine() -> ctypes.CDLL | None:
    """The machine, where this computer has a use for it and it is there. Where it is not, it is being made from now on,
    and nobody waits for it."""
    if NativeLibrary.found is not None or NativeLibrary.closed:
        return NativeLibrary.found
    try:
        if os.environ.get("ALLYOUNEED_NATIVE") == "off" or not able():
            raise OSError("not wanted")
        if NativeLibrary.making is None:
            path = place()
            if not sound(path):
                NativeLibrary.making = made(path)
        if NativeLibrary.making is not None:
            if (code := NativeLibrary.making.poll()) is None:
                return None
            if code:
                raise OSError("it cannot be compiled")
        NativeLibrary.found = loaded(place())
    except OSError:
        NativeLibrary.closed = True
    return NativeLibrary.found


def wait() -> ctypes.CDLL | None:
    """The same for those who have time."""
    if machine() is None and NativeLibrary.making is not None:
        with suppress(subprocess.TimeoutExpired):
            NativeLibrary.making.wait(PATIENCE)
    return machine()


def sound(path: Path) -> bool:
    """Whether it is there, as it was made: what a crash left of it would end the process that loads it."""
    content = path.read_bytes() if path.exists() else b""
    return hashlib.sha256(content[:-SEAL]).hexdigest().encode() == content[-SEAL:]


def loaded(path: Path) -> ctypes.CDLL:
    if path.stat().st_uid != os.getuid():
        raise OSError("somebody else's")  # a place that others can write to
    library = ctypes.CDLL(str(path))
    number, place = ctypes.c_int32, ctypes.c_void_p
    for name, given, back in (
        ("run", [place], number),
        ("best", [place, number, number, place, number, number, number, place, place], None),
        ("pack", [place, number, number, place, place], None),
        ("large", [ctypes.c_int64], place),
        ("give_back", [place], None),
    ):
        getattr(library, name).argtypes, getattr(library, name).restype = given, back
    return library


def best(scores: Tensor, few: int, banned: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The `few` likeliest tokens of each row of scores (rows, vocab), none of `banned`, and their log-probabilities;
    None where the machine has not been needed for anything else, or the scores are none of its own kind."""
    library = NativeLibrary.found
    if library is None or scores.dtype is not torch.float32 or scores.device.type != "cpu":
        return None
    if scores.dim() != 2 or not scores.is_contiguous() or few > scores.shape[1]:
        return None
    rows, vocab = scores.shape
    tokens, chances = torch.empty(rows, few, dtype=torch.long), torch.empty(rows, few)
    where, count = (None, 0) if banned is None else (banned.data_ptr(), len(banned))
    threads = torch.get_num_threads()
    library.best(scores.data_ptr(), rows, vocab, where, count, few, threads, tokens.data_ptr(), chances.data_ptr())
    return tokens, chances


def able() -> bool:
    """Whether the processor multiplies 8-bit numbers in 512 bits (AVX-512 VNNI)."""
    return platform.system() == "Linux" and torch.cpu._is_vnni_supported()


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX") or "g++")
    if found is None:
        raise OSError("no compiler")
    return found


def place() -> Path:
    """Where the library lies, once it is made of this source for this processor."""
    sources = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    told = (*(source.read_text("utf-8") for source in sources), *FLAGS, compiler(), str(omp()), processor())
    name = hashlib.sha256("\n".join(told).encode()).hexdigest()[:24]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        raise OSError("a user without a home")
    return Path(home) / "allyouneed" / f"machine-{name}.so"


def made(library: Path) -> subprocess.Popen[bytes]:
    """A process that compiles it and lets others go first; it goes on where this one ends."""
    library.parent.mkdir(parents=True, exist_ok=True)
    parts, whole = (str(library.with_suffix(f".{os.getpid()}.{end}")) for end in ("o", "so"))
    threads = omp()
    steps = (
        [compiler(), *FLAGS, "-c", str(SOURCE), "-o", parts],
        [compiler(), "-shared", parts, "-o", whole, "-lgomp" if threads is None else str(threads)],
        ["sync", whole],
        ["mv", whole, str(library)],  # at once: others may be waiting for it, or making it too
    )
    compiled, linked, *kept = (shlex.join(["nice", *step]) for step in steps)
    file = shlex.quote(whole)
    sealed = f'seal=$(sha256sum < {file}) && printf %.{SEAL}s "$seal" >> {file}'
    script = " && ".join([compiled, linked, sealed, *kept])
    none = subprocess.DEVNULL
    command = ["sh", "-c", f"{script}; code=$?; rm -f {shlex.quote(parts)}; exit $code"]
    return subprocess.Popen(command, start_new_session=True, stdin=none, stdout=none, stderr=none)


def omp() -> Path | None:
    """The library whose threads torch uses, to use the same: two teams would be in each other's way."""
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libgomp" in path:
            return Path(path)
    return None


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return next((line for line in lines if line.startswith("flags")), platform.machine())
