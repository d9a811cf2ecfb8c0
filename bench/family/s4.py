"""S4 remembers what stood at the start of a long text: accuracy by distance, against an LSTM.

    python bench/family/s4.py

One of eight letters, then blanks to the end, where the letter is asked for. S4 and S4D start from HiPPO, one more S4D
from random numbers. Also the time of S4's convolution and of its recurrence. Writes docs/family/pictures/s4.svg.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import allyouneed as ayn
from allyouneed.nn.batch import Batch, Rows

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/s4.svg"
LETTERS, NOISE, WIDTH, STEPS, ROWS = 8, 1, 24, 350, 16
LENGTHS = (50, 200, 800)
S4 = {"kind": "s4", "state": 32}
S4D = S4 | {"matrix": "diagonal"}
MODELS: dict[str, Any] = {"S4": S4, "S4D": S4D, "S4D, random Λ and B": S4D, "LSTM": "lstm"}


def model(name: str) -> Any:
    torch.manual_seed(0)
    layer = {"repeat": 1, "wiring": "pre-norm", "mixer": MODELS[name]}
    keys = {"kind": "decoder", "vocab": LETTERS + NOISE + 1, "width": WIDTH, "embed": {"scale": "none"}}
    net = ayn.build(keys | {"decoder": [layer]})
    if "random" in name:
        with torch.no_grad():
            for block in net.decoder.blocks:  # type: ignore[union-attr]
                part = block.sublayers["mixer"]
                for weight in (part.log_decay, part.frequency, part.b):
                    weight.normal_()
    return net


def texts(length: int, rows: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (rows, length) and the first letter of each; the last token asks for it."""
    first = torch.randint(0, LETTERS, (rows, 1), generator=dice)
    noise = torch.randint(LETTERS, LETTERS + NOISE, (rows, length - 2), generator=dice)
    return torch.cat((first, noise, torch.full((rows, 1), LETTERS + NOISE)), 1), first[:, 0]


def accuracy_after_training(net: Any, length: int) -> float:
    dice = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(STEPS):
        tokens, first = texts(length, ROWS, dice)
        loss = nn.functional.cross_entropy(net.head(net(Batch(Rows(tokens)))[:, -1]), first)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
    tokens, first = texts(length, 256, dice)
    with torch.no_grad():
        return (net.head(net(Batch(Rows(tokens)))[:, -1]).argmax(-1) == first).float().mean().item()


@torch.no_grad()
def times(length: int) -> tuple[float, float]:
    """Processor seconds of one text, as a convolution and token by token."""
    net, tokens = model("S4").eval(), torch.zeros(1, length, dtype=torch.long)
    started = time.process_time()
    whole = net(Batch(Rows(tokens)))
    middle, states = time.process_time(), net.start(1)
    steps = [net.advance(Rows(tokens[:, t : t + 1]), states) for t in range(length)]
    ended = time.process_time()
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-3, rtol=1e-3)
    return middle - started, ended - middle


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    torch.set_num_threads(1)
    figure, axes = pyplot.subplots(figsize=(5, 3.2))
    print(
        f"accuracy, by distance{'':4}" + "".join(f"{length:8}" for length in LENGTHS) + f"   (chance {1 / LETTERS:.0%})"
    )
    for name in MODELS:
        found = [accuracy_after_training(model(name), length) for length in LENGTHS]
        print(f"{name:24} " + "".join(f"{value:8.1%}" for value in found), flush=True)
        axes.plot(LENGTHS, found, marker="o", label=name)
    axes.set(xscale="log", xlabel="distance to the letter", ylabel="accuracy", ylim=(0, 1.03))
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    whole, steps = times(800)
    print(f"\none text of 800 tokens: {1000 * whole:.0f} ms as a convolution, {1000 * steps:.0f} ms token by token")


if __name__ == "__main__":
    main()
