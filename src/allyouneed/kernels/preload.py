"""Libraries of a GPU, loaded in the background while a model's weights are read. The first kernel of a process would
wait 0.3 s for the import of Triton and 0.5 s for a hash of its libraries, which is part of the names of compiled
kernels; the first product, for cuBLAS."""

from __future__ import annotations

import importlib.util
import threading
from contextlib import suppress

import torch

_loading: threading.Thread | None = None


def preload_libraries(device: str | torch.device) -> None:
    """Begin to load what kernels on this device need. Nothing on a CPU, and nothing at a second call."""
    global _loading
    device = torch.device(device)
    if device.type == "cuda" and _loading is None:
        _loading = threading.Thread(target=_load, args=(device,), name="preload", daemon=True)
        _loading.start()


def wait_for_libraries() -> None:
    """Wait for what has begun: no library is loaded twice."""
    if _loading is not None:
        _loading.join()


def _load(device: torch.device) -> None:
    """What fails here fails again, with its message, where it is used."""
    with suppress(Exception):
        if importlib.util.find_spec("triton") is not None:
            _load_triton(device)
    with suppress(Exception):
        one = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        one @ one  # cuBLAS; its handle goes to another thread when this one ends


def _load_triton(device: torch.device) -> None:
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver
    from triton.runtime.cache import triton_key

    triton_key()
    with torch.cuda.device(device):
        make_backend(driver.active.get_current_target()).hash()  # of the assembler's version
