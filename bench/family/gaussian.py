"""A Gaussian prior learns local rules from few examples and keeps them in longer texts (Gaussian Transformer).

    python bench/family/gaussian.py

Every token is a number; its tag says whether it is larger than both neighbours. 256 texts of 16 numbers to learn from,
then fresh texts of 16, 64 and 256. The same encoder with sinusoidal positions, with ALiBi, with T5's buckets and with
the Gaussian prior, which has two numbers per head. Writes docs/family/pictures/gaussian.svg.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import allyouneed as ayn
from allyouneed.nn.batch import Batch, Rows

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/gaussian.svg"
NUMBERS, TEXTS, LENGTH, WIDTH, STEPS, ROWS = 20, 256, 16, 32, 600, 32
LENGTHS = (16, 64, 256)
POSITIONS: dict[str, Any] = {
    "sinusoidal": None,
    "ALiBi": {"kind": "alibi", "symmetric": True},
    "T5 buckets": "buckets",
    "Gaussian": "gaussian",
}


def model(positions: Any) -> Any:
    torch.manual_seed(0)
    mixer: dict[str, Any] = {"kind": "attention", "heads": 4}
    layer = {
        "repeat": 2,
        "wiring": "pre-norm",
        "mixer": mixer | ({} if positions is None else {"positions": positions}),
        "channel": {"kind": "ffn", "hidden": 4 * WIDTH},
    }
    embed = {"positions": "sinusoidal"} if positions is None else {}
    tree = {"kind": "encoder", "vocab": NUMBERS, "width": WIDTH, "dropout": 0.1, "encoder": [layer], "embed": embed}
    return ayn.build(tree | {"head": {"kind": "tags", "labels": 2}})


def texts(count: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers (count, length), and 1 where a number is larger than its neighbours."""
    numbers = torch.randint(0, NUMBERS, (count, length), generator=torch.Generator().manual_seed(seed))
    beside = nn.functional.pad(numbers, (1, 1), value=-1)
    return numbers, ((numbers > beside[:, :-2]) & (numbers > beside[:, 2:])).long()


def train(net: Any) -> list[tuple[int, float]]:
    """(step, accuracy on fresh texts)."""
    numbers, tags = texts(TEXTS, LENGTH, 1)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, STEPS)
    dice, found = torch.Generator().manual_seed(2), []
    for step in range(1, STEPS + 1):
        some = torch.randint(0, TEXTS, (ROWS,), generator=dice)
        logits = net.train().logits(Batch(Rows(numbers[some])))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tags[some].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 50 == 0:
            found.append((step, accuracy(net, LENGTH)))
    return found


@torch.no_grad()
def accuracy(net: Any, length: int) -> float:
    """Mean of the accuracies of both tags: 0.5 is chance."""
    numbers, tags = texts(64, length, 3)
    right = net.eval().logits(Batch(Rows(numbers))).argmax(-1) == tags
    return sum(right[tags == tag].float().mean().item() for tag in (0, 1)) / 2


def main() -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    print(f"{'':12}" + "".join(f"{f'{length} numbers':>14}" for length in LENGTHS))
    for name, positions in POSITIONS.items():
        net = model(positions)
        left.plot(*zip(*train(net), strict=True), label=name)
        found = [accuracy(net, length) for length in LENGTHS]
        print(f"{name:12}" + "".join(f"{100 * one:13.1f}%" for one in found), flush=True)
    away = torch.arange(-6, 7)
    for number, block in enumerate(net.encoder.blocks):
        prior = block.sublayers["mixer"].relative
        with torch.no_grad():
            weights = prior.bias(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long), away[None], 1.0)[0, :, 0].exp()
        w, b = prior.precision.tolist(), prior.shift.tolist()
        print(f"layer {number}: " + "; ".join(f"w {x:.2f} b {y:.2f}" for x, y in zip(w, b, strict=True)))
        for head, curve in enumerate(weights):
            right.plot(away, curve, color=f"C{number}", label=None if head else f"layer {number}")
    left.set(xlabel="update", ylabel="accuracy on fresh texts", ylim=(0.45, 1.02))
    right.set(xlabel="distance", ylabel="learned prior exp(−|w·d² + b|)")
    left.legend()
    right.legend()
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
