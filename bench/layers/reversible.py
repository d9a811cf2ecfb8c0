"""Memory of a training step by depth: reversible layers against pre-norm layers, which store activations.

    python bench/layers/reversible.py                       # prints the table
    python bench/layers/reversible.py --device cuda
    python bench/layers/reversible.py --write docs/results/reversible.md

Each measurement runs in its own process: a decoder with weights and gradients allocated, one forward and backward
pass. Memory is the peak above what was resident before the pass; seconds are the mean of two passes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from allyouneed.config import parse
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.models.base import Model

WIDTH, HEADS, VOCAB = 256, 4, 256
WIRINGS = ("pre-norm", "reversible")


def model_of(wiring: str, depth: int, device: str) -> Any:
    layer = {
        "repeat": depth,
        "wiring": wiring,
        "mixer": {"kind": "attention", "heads": HEADS, "pattern": "causal"},
        "channel": {"kind": "ffn", "hidden": 4 * WIDTH},
    }
    tree = {"kind": "decoder", "vocab": VOCAB, "width": WIDTH, "dropout": 0.1, "decoder": [layer]}
    config: Any = parse(Model, tree)  # type: ignore[type-abstract]
    model = config.build().to(device).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def start_again(device: str) -> int:
    """Reset the peak; returns the memory in use."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets VmHWM to the resident size
    return peak(device)


def measure(wiring: str, depth: int, rows: int, length: int, device: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = model_of(wiring, depth, device)
    tokens = torch.randint(0, VOCAB, (rows, length), device=device)

    def step(count: int) -> None:
        labels = tokens[:count].roll(-1, 1)
        labels[:, -1] = IGNORE
        loss, _ = model.head.loss(model(Batch(Rows(tokens[:count]))), labels, 0.0)
        loss.backward()

    step(1)  # load libraries
    before = start_again(device)
    seconds: list[float] = []
    clock = time.perf_counter if device == "cuda" else time.process_time  # exclude other processes
    while len(seconds) < 2:
        began = clock()
        step(rows)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - began)
    return {"bytes": peak(device) - before, "seconds": statistics.mean(seconds)}


def child(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    # separate pages per tensor, returned when freed: otherwise allocator fragmentation counts as memory
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(depths: list[int], rows: int, length: int, device: str) -> list[str]:
    what = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    lines = [f"{what}; torch {torch.__version__.split('+')[0]}; {rows} rows of {length} tokens, width {WIDTH}.", ""]
    lines += ["| layers | pre-norm MiB | reversible MiB | ratio | pre-norm s | reversible s | ratio |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for depth in depths:
        plain, back = (child(wiring, depth, rows, length, device) for wiring in WIRINGS)
        cells = [f"{one['bytes'] / 2**20:.0f}" for one in (plain, back)] + [f"{back['bytes'] / plain['bytes']:.2f}"]
        cells += [f"{one['seconds']:.2f}" for one in (plain, back)] + [f"{back['seconds'] / plain['seconds']:.2f}"]
        lines.append(f"| {depth} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument("--one", nargs=5, metavar=("WIRING", "LAYERS", "ROWS", "TOKENS", "DEVICE"))
    options = parser.parse_args()
    if options.one:
        wiring, depth, rows, length, device = options.one
        print(json.dumps(measure(wiring, int(depth), int(rows), int(length), device)))
        return
    rows = table(options.depths, options.rows, options.length, options.device)
    if options.write:
        sizes = f"--device {options.device} --rows {options.rows} --length {options.length}"
        command = f"`python bench/layers/reversible.py {sizes}`"
        note = (
            "Peak memory of a training step beyond weights and gradients, by depth, and the time cost of recomputing "
            "every sub-layer."
        )
        body = "\n".join(["# Reversible layers", "", note, "", command, "", *rows])
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(body + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
