"""Peak memory of this process, or of its GPU."""

from __future__ import annotations

from pathlib import Path

import torch


def peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def reset_peak(device: str) -> int:
    """Reset the peak; returns the memory in use."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets VmHWM to the resident size
    return peak(device)
