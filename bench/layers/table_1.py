"""Table 1 of "Attention Is All You Need": a recurrent, a convolutional and a self-attention layer of equal width, and
self-attention restricted to a neighbourhood.

    python bench/layers/table_1.py --lengths 64 256 1024 4096
    python bench/layers/table_1.py --device cuda --write docs/results/layers.md

For each: sequential steps of a layer (stated below, by part), the path length between the two farthest positions of a
sentence, cost, and time of forward and backward together, batch 1, beside full self-attention in the same run.

The path is measured: layers are stacked until the gradient of the last position's output reaches the first position. A
recurrence reaches it in one layer, but through its own steps: each step is cut in turn, and those whose cut leaves no
gradient are counted. Lengths beyond those measured use the formula that was verified there. Times are medians of passes
in which all layers alternate, so that load affects all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from allyouneed.config import parse
from allyouneed.lab.claims.attention.path_length import context, path
from allyouneed.nn.common import Common
from allyouneed.nn.sublayer import Mixer, SubLayer

SMALL = {"attention": {"heads": 2}}  # layers of width 8
CHECKED = (33, 64, 100)  # lengths at which the path is measured; beyond, its formula is used, which must agree there


@dataclass(frozen=True)
class Kind:
    name: str
    keys: dict[str, object]
    complexity: str  # the paper's, per layer
    steps: Callable[[int], int]  # sequential steps of one layer
    reach: Callable[[int], int]  # positions that one step crosses, of n


def kinds(heads: int, kernel: int, window: int) -> list[Kind]:
    attention = {"kind": "attention", "heads": heads}
    return [
        Kind("self-attention", attention, "n² · d", lambda n: 1, lambda n: n),
        Kind("recurrent (LSTM)", {"kind": "lstm"}, "n · d²", lambda n: n, lambda n: 1),
        Kind(
            f"convolution (k = {kernel})",
            {"kind": "convolution", "size": kernel},
            "k · n · d²",
            lambda n: 1,
            lambda n: kernel // 2,
        ),
        Kind(
            f"self-attention (restricted, r = {window})",
            attention | {"pattern": f"window({window})"},
            "r · n · d",
            lambda n: 1,
            lambda n: window - 1,
        ),
    ]


def expected_path(kind: Kind, length: int) -> int:
    return -(-(length - 1) // min(kind.reach(length), length - 1))


def seconds(layers: list[SubLayer], length: int, width: int, device: str, budget: float) -> list[float]:
    """Median time of forward and backward of each, alternating."""
    x, noise = (torch.randn(1, length, width, device=device) for _ in range(2))
    x.requires_grad_()

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def once(layer: SubLayer) -> float:
        began = now()
        y: Tensor = layer(x, context(length, device))
        torch.autograd.grad(y, [x, *layer.parameters()], noise)
        return now() - began

    rounds: list[list[float]] = []
    while len(rounds) < 4 or (sum(map(sum, rounds)) < budget * len(layers) and len(rounds) < 50):
        rounds.append([once(layer) for layer in layers])
    return [statistics.median(each) for each in zip(*rounds[1:], strict=True)]  # the first is a warm-up


def table(options: argparse.Namespace) -> list[str]:
    width, device = options.width, options.device
    every = kinds(options.heads, options.kernel, options.window)
    for kind in every:
        for length in CHECKED:
            found, stated = (
                path(dict(kind.keys) | SMALL.get(str(kind.keys["kind"]), {}), length),
                expected_path(kind, length),
            )
            assert found == stated, f"{kind.name} at {length}: measured {found}, stated {stated}"
    what = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = [f"{what}; torch {torch.__version__.split('+')[0]}; width {width}, {options.heads} heads, float32.", ""]
    rows += [
        "| layer | complexity | tokens n | sequential steps | longest path | MFLOP per token | ms | × self-attention |"
    ]
    rows += ["|---|---|---|---|---|---|---|---|"]
    common = Common(width=width)
    configs = [parse(Mixer, kind.keys) for kind in every]  # type: ignore[type-abstract]
    layers = [config.build(common).to(device) for config in configs]
    took = {length: seconds(layers, length, width, device, options.budget) for length in options.lengths}
    for number, (kind, config) in enumerate(zip(every, configs, strict=True)):
        for length in options.lengths:
            cells = [
                kind.name,
                kind.complexity,
                str(length),
                str(kind.steps(length)),
                str(expected_path(kind, length)),
                f"{config.cost(common, length).flops / 1e6:.2f}",
                f"{took[length][number] * 1e3:.2f}",
                f"{took[length][number] / took[length][0]:.2f}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(6, 13)])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kernel", type=int, default=3, help="kernel size of the convolution")
    parser.add_argument("--window", type=int, default=64, help="positions to each side of restricted attention")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for each measurement, at least three passes")
    parser.add_argument("--write", type=Path, help="write the table to this file, below its first heading")
    options = parser.parse_args()
    rows = table(options)
    if options.write:
        lengths = " ".join(map(str, options.lengths))
        command = f"`python bench/layers/table_1.py --device {options.device} --lengths {lengths}`"
        title = "# Layer types: complexity, sequential steps, path length (the paper, table 1)\n"
        kept = options.write.read_text(encoding="utf-8") if options.write.exists() else title
        heading, mark = f"## {options.device}", f"\n## {options.device}\n"
        before, _, after = kept.partition(mark)
        others = after[after.index("\n## ") :] if "\n## " in after else ""
        options.write.parent.mkdir(parents=True, exist_ok=True)
        body = "\n".join([heading, "", command, "", *rows])
        options.write.write_text(f"{before.rstrip()}\n\n{body}\n{others}", encoding="utf-8")


if __name__ == "__main__":
    main()
