"""Memory that is available."""

from __future__ import annotations

from pathlib import Path

import torch


def available_memory(device: torch.device) -> int | None:
    """Free bytes; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo("MemAvailable")
    limit = _number("/sys/fs/cgroup/memory.max")  # container limit
    limits = [count for count in (free, limit) if count is not None]
    return min(limits, default=None)


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
