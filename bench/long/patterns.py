"""Cost of sparse patterns and recurrences by text length: time and memory of one layer, forward and with backward.

    python bench/long/patterns.py --device cpu --lengths 1024 2048 4096 8192
    python bench/long/patterns.py --device cuda --lengths 1024 4096 16384 65536 --write docs/results/long.md

Batch 1, 8 heads of width 64 for queries, keys and values; float32 on CPU, bfloat16 on CUDA. The plan (the block mask)
is built once and has its own column, since all layers of a forward pass share it. On CPU every measurement runs in its
own process; memory is the peak beyond q, k, v and their gradients (CPU: resident set, CUDA: the allocator's). The
baseline is SDPA's causal kernel in the same run: "× causal" is the multiple of its time. "growth" is the time relative
to the previous length; when lengths double, 2 is linear and 4 quadratic. Recurrences have as many features as all heads
together. Where flash-linear-attention (`fla`) is installed, its kernels for retention and RWKV-4 are measured beside
ours, and a second table gives ours as a multiple of theirs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.mixers.attention.longnet import LongNet
from allyouneed.nn.ops.attention.dense import AttentionFn, ScoreMod
from allyouneed.nn.ops.attention.select import causal, select_attention
from allyouneed.nn.ops.retention import chunkwise
from allyouneed.nn.ops.wkv import initial_state, run_wkv
from allyouneed.nn.patterns.core import Pattern

HEADS, HEAD_WIDTH = 8, 64
PATTERNS = {
    "causal": "causal",
    "window": "causal & window(256)",
    "window and first": "causal & (window(256) | prefix(4))",
    "block": "causal & block(256)",
    "dilated": "causal & dilated(256, 8)",
    "strided": "causal & strided(ROOT)",
    "sparse": "causal & (window(ROOT) | strided(ROOT))",
    "fixed": "causal & (block(ROOT) | fixed(ROOT, 8))",
    "global": "window(256) | global(0)",
    "bigbird": "block-window(64, 2) | global-prefix(64) | random-blocks(64, 3, 0)",
    "longnet": "longnet",
    "retention": "retention",
    "gated retention": "gated retention",
    "rwkv": "RWKV-4",
}
PEERS = {
    "fla retention": "fla: chunk_retention",
    "fla gated retention": "fla: chunk_simple_gla",
    "fla rwkv": "fla: fused_recurrent_rwkv4",
}


def planned(name: str, length: int, device: str) -> AttentionFn:
    layout, score_mod = (
        TokenLayout.of(Rows(torch.zeros(1, length, dtype=torch.long, device=device))),
        ScoreMod(HEAD_WIDTH**-0.5),
    )
    if name == "longnet":
        from allyouneed.nn.common import Common

        config = LongNet(heads=HEADS, head_width=HEAD_WIDTH, segments=(256, 1024, 4096), dilations=(1, 4, 16))
        return config.build(Common(width=HEADS * HEAD_WIDTH)).select_attention(layout, layout)  # type: ignore[operator]
    if "retention" in name or "rwkv" in name:
        return recurrence(name, length, device)
    text = PATTERNS[name].replace("ROOT", str(round(math.sqrt(length))))
    return causal if name == "causal" else select_attention(Pattern.from_text(text), layout, layout, score_mod)


def recurrence(name: str, length: int, device: str) -> AttentionFn:
    """As a plan: q, k, v and the output are (1, heads, time, head width), with the strides of a layer."""
    rates = torch.log1p(-(2.0 ** (-5 - torch.arange(HEADS, device=device))))  # retention decay
    gates = torch.nn.functional.logsigmoid(4 + torch.randn(1, HEADS, length, device=device)) / 16
    w = -5 + 8 * torch.linspace(0, 1, HEADS * HEAD_WIDTH, device=device) ** 1.35  # RWKV-4's initial decay
    u = torch.zeros_like(w)

    def turned(x: Tensor) -> Tensor:
        return x.transpose(1, 2)  # (1, time, heads, head width), contiguous

    def merged(x: Tensor) -> Tensor:
        return turned(x).flatten(2)

    def rwkv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = run_wkv(initial_state(1, len(w), k), merged(k), merged(v), w.exp(), u)[0]
        return turned(y.unflatten(2, (HEADS, HEAD_WIDTH)))

    def fla_rwkv(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from fla.ops.rwkv4 import fused_recurrent_rwkv4

        state = torch.zeros(1, 3, 1, len(w), device=device)
        state[:, 2] = -1e38
        y = fused_recurrent_rwkv4(w, u, merged(k), merged(v), state)[0]
        return turned(y.unflatten(2, (HEADS, HEAD_WIDTH)))

    def fla_retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from fla.ops.retention import chunk_retention

        return turned(chunk_retention(turned(q), turned(k), turned(v), scale=1.0)[0])

    def fla_gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from fla.ops.simple_gla import chunk_simple_gla

        return turned(chunk_simple_gla(turned(q), turned(k), turned(v), g=turned(gates), scale=1.0)[0])

    run = {
        "retention": lambda q, k, v: chunkwise(q, k, v, rates[None, :, None])[0],
        "gated retention": lambda q, k, v: chunkwise(q, k, v, gates)[0],
        "rwkv": rwkv,
        "fla retention": fla_retention,
        "fla gated retention": fla_gated,
        "fla rwkv": fla_rwkv,
    }[name]
    if name.endswith("gated retention"):
        gates.requires_grad_()
    return lambda q, k, v, dropout, score_mod: run(q, k, v)


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


def measure(name: str, length: int, device: str, backward: bool) -> dict[str, Any]:
    """In this process: seconds of the plan, median seconds of a pass, peak bytes of the first pass."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = [torch.randn(1, HEADS, length, HEAD_WIDTH, device=device, dtype=dtype) for _ in range(3)]
    if "retention" in name or "rwkv" in name:  # strides of the layer
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    noise = torch.randn_like(inputs[0])
    for tensor in inputs if backward else []:
        tensor.requires_grad_().grad = torch.zeros_like(tensor)
    score_mod = ScoreMod(HEAD_WIDTH**-0.5)

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    warm = planned(name, min(length, 1024), device)  # load libraries, fill memory pools, start autograd threads
    some = [tensor.detach()[:, :, :1024].requires_grad_(backward) for tensor in inputs]
    first = warm(*some, 0.0, score_mod)
    if backward:
        first.sum().backward()
    before = start_again(device)
    began = now()
    execute = planned(name, length, device)
    ready = now() - began
    seconds: list[float] = []
    while len(seconds) < (2 if device == "cuda" else 1) or (sum(seconds) < 2 and len(seconds) < 20):
        began = now()
        with torch.set_grad_enabled(backward):
            out = execute(*inputs, 0.0, score_mod)
            if backward:
                out.backward(noise)
        seconds.append(now() - began)
        del out
        if len(seconds) == 1:
            used = peak(device) - before
    return {"plan": ready, "seconds": statistics.median(seconds[1:] or seconds), "bytes": used}


def child(name: str, length: int, device: str, backward: bool, limit: float) -> dict[str, Any] | None:
    """The same in a process of its own (on CUDA, where the allocator tells, in this one: compiled kernels are kept);
    None when it takes too long or too much memory."""
    if device == "cuda":
        try:
            return measure(name, length, device, backward)
        except RuntimeError as failure:
            # a peer may refuse a GPU or a version of Triton
            if name not in PEERS and not isinstance(failure, torch.OutOfMemoryError):
                raise
            print(f"{name} at {length}: {failure}", file=sys.stderr)
            torch.cuda.empty_cache()
            return None
    command = [sys.executable, __file__, "--one", name, str(length), device, str(int(backward))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        print(
            f"{name} at {length}: {done.stderr.strip().splitlines()[-1] if done.stderr else 'killed'}", file=sys.stderr
        )
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(names: list[str], lengths: list[int], device: str, limit: float, causal_until: int) -> list[str]:
    what = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = [f"{what}; torch {torch.__version__.split('+')[0]}; {HEADS} heads of {HEAD_WIDTH}.", ""]
    rows += [
        "| pattern | tokens | plan s | forward s | growth | × causal | and backward s | growth | × causal | peak MiB |"
    ]
    rows += ["|---|---|---|---|---|---|---|---|---|---|"]
    base: dict[tuple[int, bool], float] = {}
    times: dict[tuple[str, int, bool], float] = {}
    for name in names:
        last: dict[bool, float] = {}
        for length in lengths:
            if name == "causal" and length > causal_until:
                continue
            cells, ready, used = [], 0.0, 0.0
            for backward in (False, True):
                found = child(name, length, device, backward, limit)
                if found is None:
                    cells += ["—", "—", "—"]
                    continue
                seconds, ready, used = found["seconds"], found["plan"], found["bytes"] / 2**20
                if name == "causal":
                    base[length, backward] = seconds
                grown = f"{seconds / last[backward]:.2f}" if backward in last else ""
                ratio = f"{seconds / base[length, backward]:.2f}" if (length, backward) in base else ""
                cells += [f"{seconds:.5f}", grown, ratio]
                last[backward] = times[name, length, backward] = seconds
            text = "LongNet 256/1, 1024/4, 4096/16" if name == "longnet" else (PATTERNS | PEERS)[name]
            text = text.replace("ROOT", "√n").replace("|", "\\|")
            rows.append(f"| {text} | {length} | {ready:.3f} | {' | '.join(cells)} | {used:.0f} |")
            print(rows[-1], flush=True)
    return rows + beside_peers(times, lengths)


def beside_peers(times: dict[tuple[str, int, bool], float], lengths: list[int]) -> list[str]:
    """Our time relative to theirs, in the same run."""
    rows = ["", "| ours over theirs | tokens | forward | and backward |", "|---|---|---|---|"]
    for peer, text in PEERS.items():
        for length in lengths:
            pairs = [(times.get((peer[4:], length, back)), times.get((peer, length, back))) for back in (False, True)]
            cells = [f"{own / other:.2f}" if own and other else "—" for own, other in pairs]
            if any(other for _, other in pairs):
                rows.append(f"| {peer[4:]} / {text} | {length} | {' | '.join(cells)} |")
                print(rows[-1], flush=True)
    return rows if len(rows) > 3 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(10, 17)])
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=list(PATTERNS))
    parser.add_argument("--causal-until", type=int, default=16384, help="longest text of the baseline")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one measurement")
    parser.add_argument("--write", type=Path, help="write the table to this file, below its first heading")
    parser.add_argument("--one", nargs=4, metavar=("PATTERN", "TOKENS", "DEVICE", "BACKWARD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, length, device, backward = options.one
        print(json.dumps(measure(name, int(length), device, bool(int(backward)))))
        return
    names = list(options.patterns)
    if options.device == "cuda" and importlib.util.find_spec("fla") is not None:
        names += [f"fla {name}" for name in names if f"fla {name}" in PEERS]
    rows = table(names, options.lengths, options.device, options.limit, options.causal_until)
    if options.write:
        command = f"`python bench/long/patterns.py {' '.join(sys.argv[1:])}`"
        kept = options.write.read_text(encoding="utf-8") if options.write.exists() else "# Long texts\n"
        heading, mark = f"## {options.device}", f"\n## {options.device}\n"
        before, _, after = kept.partition(mark)
        others = after[after.index("\n## ") :] if "\n## " in after else ""
        body = "\n".join([heading, "", command, "", *rows])
        options.write.parent.mkdir(parents=True, exist_ok=True)
        options.write.write_text(f"{before.rstrip()}\n\n{body}\n{others}", encoding="utf-8")


if __name__ == "__main__":
    main()
