"""GPU kernels. Modules are imported on first use, since they need Triton."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from allyouneed.torch_private import constant_to_the_compiler


def usable(x: Tensor) -> bool:
    """Whether kernels support this tensor: at most single precision, on a GPU that Triton compiles for."""
    return x.is_cuda and x.dtype != torch.float64 and _compiles(x.device)


def usable_without_grad(x: Tensor) -> bool:
    """Whether a forward-only kernel may run: no gradients, and no compiler that would fuse it anyway."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling() and usable(x)


@constant_to_the_compiler
def _compiles(device: torch.device) -> bool:
    return _can_compile(device)


@functools.cache
def _can_compile(device: torch.device) -> bool:
    """NVIDIA GPUs from Ampere on; others are untested."""
    has_triton = torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
    return has_triton and torch.cuda.get_device_capability(device) >= (8, 0)


def has_pdl(device: torch.device) -> bool:
    """Whether a kernel may start before the previous one ends (Hopper's programmatic dependent launch): it prefetches
    data that does not depend on it, then waits."""
    return OVERLAP and _capability(device) >= (9, 0)


OVERLAP = True


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
