"""Taking turns on a GPU, and what comes out of it (gpu.py)."""

from __future__ import annotations

import argparse
import fcntl
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

DEVICE = torch.device("cuda")


def ceiling() -> float:
    """FLOP/s of a large bf16 matrix product."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(50):
        a @ b
    torch.cuda.synchronize()
    return 50 * 2 * 8192**3 / (time.perf_counter() - begin)


Turn = Callable[[int], tuple[int, float]]  # trains for one turn and gives (real tokens, seconds)


@dataclass
class Runner:
    """`make` builds the model, when its turn has come: what is in memory then is not its own."""

    name: str
    make: Callable[[], Turn]
    flops: float  # forward, of one real token
    peer: bool = False
    turn: Turn | None = None
    speeds: list[float] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)  # shares of its turns: of the GPU, and of the host
    peak: int = 0  # of its first turn: what a recording holds is counted when it is made, and not again


@contextmanager
def measuring(given: argparse.Namespace) -> Iterator[None]:
    """Wait until all have compiled and no other process measures."""
    if given.meet is None:
        yield
        return
    folder, count = Path(given.meet[0]), int(given.meet[1])
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.mkdtemp(dir=folder)
    begin = time.monotonic()
    while sum(path.is_dir() for path in folder.iterdir()) < count and time.monotonic() - begin < given.patience:
        time.sleep(0.2)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compare(runners: list[Runner], given: argparse.Namespace) -> None:
    runners = [r for r in runners if not (r.peer and given.alone)]
    for runner in list(runners):  # which compiles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        try:
            runner.turn = runner.make()
            runner.turn(0)
        except Exception:
            if not given.fusions:
                raise
            traceback.print_exc(limit=-6)
            print(f"{runner.name} failed and is left out", flush=True)
            runners.remove(runner)
            continue
        runner.peak = torch.cuda.max_memory_allocated() - before
        print(f"{runner.name}: first turn {time.perf_counter() - begin:.0f} s", flush=True)
    with measuring(given):
        tops = [ceiling()]
        for number in range(1, given.turns + 1):
            for runner in runners:
                assert runner.turn is not None
                tokens, seconds = runner.turn(number)
                runner.speeds.append(tokens / seconds)
                tops.append(ceiling())
            print(f"turn {number}: " + ", ".join(f"{r.speeds[-1]:,.0f}" for r in runners), flush=True)
            tell(report(runners, tops), given, aloud=number == given.turns)
        if given.profile:
            profiled([runner for runner in runners if not runner.peer][-1])


def report(runners: list[Runner], tops: list[float]) -> list[str]:
    """Shares of the first ceiling, of a chip at rest, and of the middle one of those after each turn: matrix products
    draw so much power that a busy chip lowers its clock."""
    first, busy = tops[0], statistics.median(tops[1:])
    best = max(statistics.median(r.speeds) for r in [r for r in runners if r.peer] or runners)
    lines = [
        f"matrix ceiling {first / 1e12:.0f} TFLOP/s at rest, {busy / 1e12:.0f} after a turn",
        "",
        "| | tokens/s | lowest to highest | × best peer | share of ceiling: at rest | after a turn | peak GiB "
        "| GPU / host waits for data |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in runners:
        middle = statistics.median(r.speeds)
        rate = 3 * r.flops * middle
        spread = f"{min(r.speeds):,.0f} – {max(r.speeds):,.0f}"
        waits = " / ".join(f"{statistics.median(of):.1%}" for of in zip(*r.waits, strict=True)) or "–"
        lines.append(
            f"| {r.name} | {middle:,.0f} | {spread} | {middle / best:.3f} | {rate / first:.1%} | {rate / busy:.1%} "
            f"| {r.peak / 2**30:.1f} | {waits} |"
        )
    return lines


def tell(lines: list[str], given: argparse.Namespace, aloud: bool = True) -> None:
    """On the screen, and where the one who asked looks for it."""
    if aloud:
        print("\n" + "\n".join(lines) + "\n", flush=True)
    if given.save is not None:
        Path(given.save).write_text("\n".join(lines) + "\n", encoding="utf-8")


def profiled(runner: Runner) -> None:
    """Where the time of one more turn goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        assert runner.turn is not None
        _, seconds = runner.turn(0)
    kernels = [e for e in seen.key_averages() if e.self_device_time_total and e.device_type.name == "CUDA"]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels) / 1e6
    print(f"{runner.name}: {seconds:.2f} s, kernels {busy:.2f} s")
    for e in kernels[:60]:
        print(f"  {e.self_device_time_total / 1e3:9.2f} ms {e.count:6d} ×  {e.key[:110]}")


def timed(step: Callable[[], int], count: int) -> tuple[int, float]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    tokens = sum(step() for _ in range(count))
    torch.cuda.synchronize()
    return tokens, time.perf_counter() - begin
