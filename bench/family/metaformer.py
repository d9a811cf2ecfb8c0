"""MetaFormer's comparison, small: one block, four token mixers (identity, pooling, spatial MLP, attention), on rendered
digits.

    python bench/family/metaformer.py

Digits of 5×7 dots, drawn at random places with noise, in images of 28×28 (patches of 4×4). All models
have the same skeleton and the same training; only the mixer differs. Writes docs/family/pictures/metaformer.svg.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import allyouneed as ayn
from allyouneed.nn.batch import Batch, Signal

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/metaformer.svg"
SIDE, PATCH, WIDTH, LAYERS, STEPS, ROWS = 28, 4, 48, 3, 280, 48
GRID = SIDE // PATCH
DOTS = """
.###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""
MIXERS: dict[str, Any] = {
    "identity": "identity",
    "pooling": {"kind": "pooling", "grid": [GRID, GRID]},
    "spatial MLP": {"kind": "spatial-mlp", "length": GRID**2},
    "attention": {"kind": "attention", "heads": 4},
}


def digits() -> Tensor:
    """(10, 7, 5)"""
    lines = [line.split() for line in DOTS.strip().splitlines()]
    return torch.tensor([[[float(dot == "#") for dot in line[digit]] for line in lines] for digit in range(10)])


def images(count: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images (count, 1, 28, 28) and their digits."""
    shapes, labels = digits(), torch.randint(0, 10, (count,), generator=dice)
    found = 0.2 * torch.randn(count, 1, SIDE, SIDE, generator=dice)
    for row, label in enumerate(labels):
        shape = shapes[label].repeat_interleave(3, 0).repeat_interleave(3, 1)
        height, width = shape.shape
        top, left = (int(place) for place in torch.randint(0, 8, (2,), generator=dice))
        found[row, 0, top : top + height, left : left + width] += shape
    return found, labels


def model(mixer: Any) -> Any:
    torch.manual_seed(0)
    embed = {"kind": "patches", "image": SIDE, "patch": PATCH, "channels": 1, "class_token": False}
    embed["positions"] = {"kind": "learned", "length": GRID**2}
    layer = {"repeat": LAYERS, "wiring": "pre-norm", "mixer": mixer}
    layer["channel"] = {"kind": "ffn", "hidden": 4 * WIDTH, "activation": "gelu"}
    head = {"kind": "classes", "labels": 10, "pool": "mean"}
    return ayn.build({"kind": "encoder", "width": WIDTH, "embed": embed, "encoder": [layer], "head": head})


def train(net: Any, tests: tuple[Tensor, Tensor]) -> list[float]:
    """Accuracy on the test images after every 40 steps."""
    dice, found = torch.Generator().manual_seed(1), []
    optimiser = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, STEPS)
    for step in range(1, STEPS + 1):
        pixels, labels = images(ROWS, dice)
        loss = nn.functional.cross_entropy(net.logits(Batch(Signal(pixels))), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 40 == 0:
            with torch.no_grad():
                found.append((net.logits(Batch(Signal(tests[0]))).argmax(-1) == tests[1]).float().mean().item())
    return found


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    tests = images(500, torch.Generator().manual_seed(2))
    figure, axes = pyplot.subplots(figsize=(5, 3.2))
    print(f"{'mixer':12} parameters   MFLOPs per image   accuracy")
    for name, mixer in MIXERS.items():
        net = model(mixer)
        cost, curve = net.config.cost(GRID**2), train(net, tests)
        print(f"{name:12} {cost.parameters:10,}   {cost.flops * GRID**2 / 1e6:16.1f}   {curve[-1]:8.1%}", flush=True)
        axes.plot(range(40, STEPS + 1, 40), curve, marker="o", markersize=3, label=name)
    axes.set(xlabel="training steps", ylabel="accuracy on test images", ylim=(0, 1.03))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
