"""The native library is built in the background, checked before it is loaded, and never required."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from allyouneed.kernels.cpu import build as native
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor
from native_models import language_model
from toy_models import random_model


@pytest.fixture(autouse=True, scope="module")
def _native_library() -> None:
    native.wait_for_build()


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.inference_mode():
        yield


def forget_library(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = type("NativeLibrary", (), {"loaded": None, "failure": None, "build": None})
    monkeypatch.setattr(native, "NativeLibrary", fresh)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is loaded, and the cache folder is empty."""
    forget_library(monkeypatch)
    monkeypatch.setattr(native, "TUNING", ("-O0",))  # compiled in a third of the time
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_float_models_do_not_wait_for_the_build_and_int8_models_do(
    no_library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An int8 model gives the same answers in the first run as in the next ones."""
    model, int8 = random_model(), language_model()
    assert cpu_executor(model) is model and not caplog.messages
    if shutil.which("g++") is not None:
        assert isinstance(cpu_executor(int8), CpuExecutor) and isinstance(cpu_executor(model), CpuExecutor)
        assert len(caplog.messages) == 1 and "compiling the CPU kernels, once" in caplog.messages[0]
        assert [path.suffix for path in (no_library / "allyouneed").iterdir()] == [".so"]


def damage(content: bytes, how: str) -> bytes:
    half = len(content) // 2
    return {
        "empty": b"",
        "truncated": content[:half],
        "zeros": bytes(len(content)),
        "zeros at its end": content[:half] + bytes(len(content) - half),
        "without checksum": content[: -native.CHECKSUM],
        "a changed byte": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
    }[how]


DAMAGES = ["empty", "truncated", "zeros", "zeros at its end", "without checksum", "a changed byte"]


def test_a_damaged_library_is_rebuilt_and_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.wait_for_build() is None:
        assert shutil.which("g++") is None
        return
    good = native.library_path()
    content, path = good.read_bytes(), tmp_path / good.name
    assert native.is_intact(good) and not native.is_intact(path)
    builds, idle = list[Path](), type("Idle", (), {"poll": lambda self: None})()
    monkeypatch.setattr(native, "library_path", lambda: path)
    monkeypatch.setattr(native, "start_build", lambda library: builds.append(library) or idle)
    for how in DAMAGES:
        forget_library(monkeypatch)
        path.write_bytes(damage(content, how))
        assert native.native_library() is None and builds.pop() == path, how
    forget_library(monkeypatch)
    path.write_bytes(content)
    assert native.native_library() is not None and not builds


def test_a_rebuilt_library_is_intact(no_library: Path) -> None:
    if shutil.which("g++") is not None:
        path = native.library_path()
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\x7fELF" + bytes(1000))
        assert native.wait_for_build() is not None and native.is_intact(path)


WHY = [
    "no compiler",
    "a compiler that fails",
    "a cache folder that cannot be written",
    "no home folder",
    "a library of another user",
    "switched off",
]


@pytest.mark.parametrize("why", WHY)
def test_decoding_works_silently_without_a_compiler(
    why: str, no_library: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if why == "a cache folder that cannot be written":
        no_library.write_text("a file, not a folder")
    elif why == "no home folder":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(native.os.path, "expanduser", lambda path: path)
    elif why == "a library of another user":
        native.wait_for_build()
        forget_library(monkeypatch)
        monkeypatch.setattr(native.os, "getuid", lambda: 12345)
    elif why == "switched off":
        monkeypatch.setenv("ALLYOUNEED_NATIVE", "off")
    else:
        monkeypatch.setenv("CXX", "/no/such/compiler" if why == "no compiler" else "false")
    model = language_model()
    assert cpu_executor(model) is model and native.wait_for_build() is None and cpu_executor(model) is model
    assert capfd.readouterr() == ("", "")


def test_the_library_is_built_where_there_is_a_compiler() -> None:
    wanted = shutil.which("g++") is not None
    assert (native.wait_for_build() is not None) == wanted
    assert isinstance(cpu_executor(language_model()), CpuExecutor) == wanted
