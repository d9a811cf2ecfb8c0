"""Decoding and training on CPU: tokens per second of every token mixer in one skeleton, relative to attention in the
same run.

    python bench/family_speed/cpu.py                                  # decoding in fp32, bf16 and int8, 1 and 16 rows
    python bench/family_speed/cpu.py retention rwkv --stored int8     # some mixers (attention is always measured)
    python bench/family_speed/cpu.py --only contexts                  # decoding by length of the context, 1k to 64k
    python bench/family_speed/cpu.py --only lengths                   # training by length of a row, 1k to 16k
    python bench/family_speed/cpu.py --page docs/results/family-speed.md     # all three, with the plots beside the page

The skeleton: 6 pre-norm layers of width 256, 4 heads, a gated channel of 704, vocabulary of 8,000; only the mixer
differs, with about as many weights as attention (sizes.py). Random weights. A decode step is one new token of
every row, from token ids to logits; a training step is forward and backward of one row. In the table each model takes
turns with attention, since speeds drift; the best turn of each counts. `--processor` is for a shared machine: one
thread, and processor time instead of wall-clock time.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.config import parse
from allyouneed.kernels.cpu import build as native
from allyouneed.lab.comparison.speed import pretend
from allyouneed.lab.mixer_sizes import BOUNDED, CPU, TINY, UNEQUAL, SkeletonSizes, middle, mixers, settings
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.precision import quantize
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor
from bench.family_speed.page import Curves, curve_table, fill, markdown, picture, plot, share, short, unequal, weights
from bench.family_speed.train_cpu import Trained

STEPS = 24  # of a turn
CONTEXTS = tuple(1024 << doublings for doublings in range(7))
LENGTHS = (1024, 4096, 16384)
SECONDS = 12.0  # a training step that would take longer is left out
SHORT = ("identity", "experts", "bitnet-packed", *BOUNDED)  # no curve of their own
FILES = {"decode": "family-speed-cpu.svg", "training": "family-train-cpu.svg"}
Clock = Callable[[], float]


class Case(NamedTuple):
    name: str
    stored: str
    rows: int


def models(s: SkeletonSizes) -> dict[str, dict[str, Any]]:
    """YOCO is no mixer, and the interpreter has no program for its two stacks."""
    return {name: keys for name, keys in settings(s).items() if name != "yoco"}


def build(keys: dict[str, Any], stored: str) -> Any:
    if keys.get("linear") == "bit":
        stored = "ternary-int8" if stored == "int8" else stored
    torch.manual_seed(0)
    model: Any = parse(Model, keys).build().eval()  # type: ignore[type-abstract]
    return model if stored == "fp32" else quantize(model, stored)


class Decoding:
    """One model that has read `context` tokens, and decodes."""

    def __init__(self, s: SkeletonSizes, case: Case, context: int) -> None:
        self.sizes, self.case, self.context = s, case, context
        self.model = build(models(s)[case.name], case.stored)
        self.executor = cpu_executor(self.model)
        self.restart()

    def restart(self) -> None:
        rows, s = self.case.rows, self.sizes
        self.states = self.executor.start(rows)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, s.vocab, (rows, s.given), generator=generator)
        self.executor.advance(Rows(tokens), self.states)
        self.tokens = torch.full((rows, 1), 3)
        if self.context > s.given:
            context = self.context + middle(s, self.case.name)
            for layer in self.states.layers:
                for state in layer.values():
                    pretend(state, context)
            self.states.lengths = [context] * rows

    def turn(self, steps: int, clock: Clock) -> float:
        """Seconds of a step."""
        began = clock()
        for _ in range(steps):
            hidden = self.executor.advance(Rows(self.tokens), self.states)[:, -1]
            self.tokens = self.executor.head(hidden).argmax(-1, keepdim=True)
        return (clock() - began) / steps

    @property
    def path(self) -> str:
        """What computes it."""
        if not isinstance(self.executor, CpuExecutor):
            return "torch"
        calls = self.executor.decoder.calls
        return f"{len(calls)} calls" if calls else "native"


def measure(running: list[Decoding], rounds: int, steps: int, clock: Clock) -> list[tuple[float, str]]:
    """Tokens per second of each one's best turn, and what computed it."""
    for one in running:
        one.turn(4, clock)
    turns = [[one.turn(steps, clock) for one in running] for _ in range(rounds)]
    return [
        (one.case.rows / min(found), one.path) for one, found in zip(running, zip(*turns, strict=True), strict=True)
    ]


def survey(s: SkeletonSizes, names: list[str], kinds: list[str], rows: list[int], rounds: int, clock: Clock) -> str:
    """The table of all mixers with a short context."""
    columns = [(kind, count) for kind in kinds for count in rows]
    found: dict[Case, tuple[str, str]] = {}  # a cell, and what computed it
    for kind, count in columns:
        attention = Decoding(s, Case("attention", kind, count), s.given)
        for name in names:
            attention.restart()
            pair = [attention, Decoding(s, Case(name, kind, count), s.given)]  # also attention and itself
            (base, _), (speed, path) = measure(pair, rounds, STEPS, clock)
            found[pair[1].case] = f"{speed:,.0f} ({share(speed, base)})", path
    body, below = [], []
    for name in names:
        cells, computed = zip(*(found[Case(name, kind, count)] for kind, count in columns), strict=True)
        below += [name for cell in cells if "↓" in cell]
        paths = dict.fromkeys(computed)
        body.append([f"{name}{' ¹' if name in UNEQUAL else ''}", *cells, weights(s, name), ", ".join(paths)])
    heads = ["tokens/s (of attention's)", *(f"{kind} b{count}" for kind, count in columns)]
    table = markdown([*heads, "weights: mixer / model", "executor"], body)
    counted = f"Of {len(names) * len(columns)} shares {len(below)} are below the aim."
    return f"{table}\n\n¹ {unequal(s, names)} {counted}"


def contexts(s: SkeletonSizes, names: list[str], lengths: list[int], rounds: int, clock: Clock) -> Curves:
    """Decoded tokens per second of one row in fp32 against the tokens read before. One model after another: the caches
    of all would not fit into memory."""
    found: Curves = {}
    for name in names:
        one = Decoding(s, Case(name, "fp32", 1), s.given)
        found[name] = {}
        for one.context in lengths:
            one.restart()
            ((speed, _),) = measure([one], rounds, 4, clock)
            found[name][one.context] = speed
        print(f"{name:26s}", *(f"{short(n)}: {speed:,.0f}" for n, speed in found[name].items()), flush=True)
    return found


# --- training ---------------------------------------------------------------------------------------------------------


def train(s: SkeletonSizes, names: list[str], lengths: list[int], clock: Clock) -> Curves:
    """Trained tokens per second of one row in fp32 against its length, until a step would take too long or too much
    memory: as the cost functions and the growth so far say."""
    room = proc("meminfo", "MemAvailable") / 2
    found: Curves = {}
    for name in names:
        speeds: dict[int, float] = {}
        flops = {n: n * parse(Model, models(s)[name]).cost(n).flops for n in lengths}  # type: ignore[type-abstract]
        used: list[float] = []
        trained = Trained(models(s)[name], 1, lengths[0])
        trained.step(clock)
        for before, length in zip([None, *lengths[:-1]], lengths, strict=True):
            if before is not None:
                growth = min((length / before) ** 2, used[-1] / used[-2] if len(used) > 1 else math.inf)
                slow = flops[length] / flops[before] * before / speeds[before] > SECONDS
                if slow or used[-1] * growth > room:
                    break
            trained = Trained(models(s)[name], 1, length)
            least = memory(reset=True)
            speeds[length] = length / trained.step(clock)
            used.append(max(1.0, memory() - least))
        found[name] = speeds
        print(f"{name:26s}", *(f"{short(n)}: {speed:,.0f}" for n, speed in speeds.items()), flush=True)
    return found


def memory(reset: bool = False) -> float:
    """Peak bytes of this process so far, or since a reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return proc("self/status", "VmHWM")


def proc(file: str, key: str) -> float:
    """Bytes."""
    line = next(line for line in Path("/proc", file).read_text().splitlines() if line.startswith(key))
    return 1024 * float(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(models(CPU)))
    parser.add_argument("--only", choices=["table", "contexts", "lengths"], help="one of the three measurements")
    parser.add_argument("--stored", default="fp32,bf16,int8", help="precisions of the weights, separated by commas")
    parser.add_argument("--rows", default="1,16", help="batch sizes, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor", action="store_true", help="one thread, processor time")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to rehearse")
    parser.add_argument("--page", type=Path, help="write tables into this page, and plots beside it")
    options = parser.parse_args()
    s = replace(TINY, new=144) if options.tiny else CPU
    if unknown := set(options.names) - set(models(s)):
        parser.error(f"unknown: {', '.join(sorted(unknown))} (known: {', '.join(models(s))})")
    clock = time.process_time if options.processor else time.perf_counter
    if options.processor:
        torch.set_num_threads(1)
    native.wait_for_build()
    chosen = [name for name in models(s) if name == "attention" or not options.names or name in options.names]
    long = [name for name in chosen if name not in SHORT]
    wanted = [options.only] if options.only else ["table", *(["contexts", "lengths"] if options.page else [])]
    parts: dict[str, str] = {}
    curves: dict[str, tuple[Curves, str]] = {}  # what and its file, by mark
    if "table" in wanted:
        rows = [int(count) for count in options.rows.split(",")]
        with torch.inference_mode():
            parts["cpu-mixers"] = survey(s, chosen, options.stored.split(","), rows, options.rounds, clock)
        print(parts["cpu-mixers"], flush=True)
    if "contexts" in wanted:
        at = [n // 64 for n in CONTEXTS] if options.tiny else list(CONTEXTS)
        with torch.inference_mode():
            curves["cpu-long"] = contexts(s, long, at, max(2, options.rounds // 2), clock), "decode"
    if "lengths" in wanted:
        at = [n // 64 for n in LENGTHS] if options.tiny else list(LENGTHS)
        trained = [name for name in long if options.names or name in mixers(s)]
        curves["cpu-train"] = train(s, trained, at, clock), "training"
    for mark, (found, what) in curves.items():
        label, file = f"{what}: tokens/s, one row, fp32", FILES[what]
        parts[mark] = curve_table(found, label)
        print(f"\n{parts[mark]}", flush=True)
        if options.page:
            across = "tokens of context" if what == "decode" else "tokens of a row"
            parts[mark] += picture(f"{what} speed against {across}", file)
            plot(found, options.page.with_name(file), label, across)
    if options.page:
        fill(options.page, parts)


if __name__ == "__main__":
    main()
