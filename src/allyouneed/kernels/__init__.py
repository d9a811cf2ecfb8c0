"""GPU kernels. Nothing here is imported before it is needed: it needs Triton."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


def usable(x: Tensor) -> bool:
    """Whether a kernel can compute with this: up to single precision, on a GPU that Triton compiles for."""
    return x.is_cuda and x.dtype != torch.float64 and _compiles(x.device)


def at_once(x: Tensor) -> bool:
    """Whether a kernel without a gradient may compute with this now: nobody learns, and no compiler fuses it anyway."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling() and usable(x)


@functools.cache
def _compiles(device: torch.device) -> bool:
    """NVIDIA's, from Ampere on; ours ran on no others."""
    there = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
    return there and torch.cuda.get_device_capability(device) >= (8, 0)


def overlaps(device: torch.device) -> bool:
    """Whether a kernel may begin while the one before it ends (Hopper's programmatic dependent launch): it fetches what
    does not depend on that one, then waits for it."""
    return OVERLAP and _capability(device) >= (9, 0)


OVERLAP = True


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
