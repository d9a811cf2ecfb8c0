"""Python frames between a stack and the kernels: what a reader of a traceback, or of the code, walks through.

    python bench/layers/frames.py            # the table
    python bench/layers/frames.py --list     # and the frames themselves

Counted are the frames between `Stack.forward` and the function that calls torch's attention, or its product in the
linear maps of a feed-forward layer: all of them, of which each call of a module is two of torch's, and those of the
package. The longest of all calls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

import allyouneed
from allyouneed.config import override, parse, preset_tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model

PACKAGE = str(Path(allyouneed.__file__).parent)
ATTENTION, FEEDFORWARD = "attention", "feed-forward"
Frames = list[str]  # "file:function", outermost first
SMALL = ["vocab=61", "width=32"]
SIDE = ["{0}[0].repeat=2", "{0}[0].mixer.heads=4", "{0}[0].channel.hidden=48"]
MODELS = {
    "gpt2": [*SMALL, *(key.format("decoder") for key in SIDE)],
    "transformer-base": [
        *SMALL,
        *(key.format(side) for side in ("encoder", "decoder") for key in SIDE),
        "decoder[0].cross.heads=4",
    ],
}


class FrameRecorder(TorchFunctionMode):
    """Records the frames above attention and the linear maps of feed-forward layers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[Frames]] = {ATTENTION: [], FEEDFORWARD: []}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (linear, scaled_dot_product_attention):
            path = frames_of(sys._getframe(1))
            if function is scaled_dot_product_attention:
                self.found[ATTENTION].append(path)
            elif any("feedforward.py" in frame for frame in path):
                self.found[FEEDFORWARD].append(path)
        return function(*args, **(kwargs or {}))


def frames_of(frame: FrameType | None) -> Frames:
    """The frames from the innermost `Stack.forward` to this one; none without a stack."""
    found: Frames = []
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(str(Path(__file__))):
            found.append(f"{file}:{name}")
        if file.endswith("models/stack.py") and name == "forward":
            return found[::-1]
        frame = frame.f_back
    return []


def ours(path: Frames) -> Frames:
    return [frame for frame in path if frame.startswith(PACKAGE)]


def longest(run: Callable[[], object]) -> dict[str, Frames]:
    """The most frames between the stack and each kernel."""
    with FrameRecorder() as recorder:
        run()
    return {kernel: max(paths, key=len)[1:-1] for kernel, paths in recorder.found.items()}


def measure(name: str) -> dict[tuple[str, str], Frames]:
    """(mode, kernel) -> frames, of a small model of this preset: one training pass, and decode steps."""
    model: Any = parse(Model, override(preset_tree(name), MODELS[name])).build()  # type: ignore[type-abstract]
    source, target = Rows(torch.tensor([[7, 8, 9], [5, 6, 4]])), Rows(torch.tensor([[1, 20, 21], [1, 22, 23]]))
    translates = "encoder" in preset_tree(name)
    batch = Batch(source=source, target=target) if translates else Batch(target=target)

    def train() -> None:
        model.train().logits(batch).sum().backward()

    def decode() -> None:
        model.eval()
        with torch.no_grad():
            states = model.start(source if translates else len(target.tokens))
            for token in target.tokens.unbind(1):
                model.head(model.advance(Rows(token[:, None]), states))

    modes = {"training": train, "decoding": decode}
    return {(mode, kernel): path for mode, run in modes.items() for kernel, path in longest(run).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the frames")
    options = parser.parse_args()
    print("| model | mode | kernel | frames | of the package |\n|---|---|---|---|---|")
    found = {(name, *key): path for name in MODELS for key, path in measure(name).items()}
    for key, path in found.items():
        print(f"| {' | '.join(key)} | {len(path)} | {len(ours(path))} |")
    for key, path in found.items() if options.list else ():
        print(f"\n{', '.join(key)}", *(frame.removeprefix(PACKAGE + "/") for frame in path), sep="\n  ")


if __name__ == "__main__":
    main()
