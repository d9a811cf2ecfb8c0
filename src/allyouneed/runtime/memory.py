"""Memory that is available."""

from __future__ import annotations

from pathlib import Path

import torch

from allyouneed.errors import UserError


def available_memory(device: torch.device) -> int | None:
    """Free bytes; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo("MemAvailable")
    limit = _number("/sys/fs/cgroup/memory.max")  # container limit
    limits = [count for count in (free, limit, _address_space_left()) if count is not None]
    return min(limits, default=None)


def check_weights(parameters: float, device: torch.device) -> None:
    """Refuse a model whose weights alone, in float32, do not fit into the memory of this device."""
    free = available_memory(device)
    if device.type in ("cpu", "cuda") and free is not None and 4 * parameters > free:
        raise UserError(
            f"the weights of {parameters:,.0f} parameters take {4 * parameters / 1e9:,.1f} GB; {free / 1e9:,.1f} GB "
            "are free; use a smaller model"
        )


def _address_space_left() -> int | None:
    """What `ulimit -v` leaves; None without a limit."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return None
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError, IndexError):
        return None
    return max(0, limit - used)


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), None)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
