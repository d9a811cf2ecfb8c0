"""FLASH: the cost of mixed chunk attention grows linearly with the length, at the quality of the quadratic unit.

    python bench/family/flash.py

Three small language models of the same size, letter by letter on this project's pages: attention and FFN, gated
attention units over all pairs (FLASH-Quad), and in mixed chunks (FLASH). Then the time of one layer, forward and
backward, by the length of the text. Writes docs/family/pictures/flash.svg.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import allyouneed as ayn
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.sublayer import Mixer

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/family/pictures/flash.svg"
WIDTH, LENGTH, ROWS, STEPS = 64, 256, 8, 120
UNIT = {"hidden": 2 * WIDTH, "key_width": 32}
LAYERS: dict[str, Any] = {
    "attention + FFN": {
        "repeat": 2,
        "mixer": {"kind": "attention", "heads": 4, "pattern": "causal", "positions": "rotary"},
        "channel": {"kind": "ffn", "hidden": 4 * WIDTH, "activation": "gelu"},
    },
    "GAU (quadratic)": {"repeat": 4, "mixer": {"kind": "gau", "pattern": "causal", **UNIT}},
    "mixed chunks of 64": {"repeat": 4, "mixer": {"kind": "mixed-chunk", "chunk": 64, **UNIT}},
}


def text() -> tuple[Tensor, int]:
    """The pages in docs/, as numbers of letters, and the number of different ones."""
    pages = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/results/*.md")])
    data = "".join(page.read_text(encoding="utf-8") for page in pages)
    letters = {letter: number for number, letter in enumerate(sorted(set(data)))}
    return torch.tensor([letters[letter] for letter in data]), len(letters)


def model(layer: Any, vocab: int) -> Any:
    torch.manual_seed(0)
    keys = {"kind": "decoder", "vocab": vocab, "width": WIDTH, "embed": {"scale": "none", "tied": False}}
    return ayn.build(keys | {"decoder": [{"wiring": "pre-norm", **layer}]})


def loss_of(net: Any, data: Tensor, starts: Tensor) -> Tensor:
    rows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
    return nn.functional.cross_entropy(net.logits(Batch(Rows(rows[:, :-1]))).flatten(0, 1), rows[:, 1:].flatten())


def train(net: Any, data: Tensor, tests: Tensor) -> list[float]:
    """Loss (nats per letter) on unseen text after every 20 steps."""
    dice, found = torch.Generator().manual_seed(1), []
    optimiser = torch.optim.AdamW(net.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, STEPS)
    for step in range(1, STEPS + 1):
        loss = loss_of(net, data, torch.randint(0, len(data) - LENGTH - 1, (ROWS,), generator=dice))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % 20 == 0:
            with torch.no_grad():
                found.append(loss_of(net, tests, torch.arange(0, len(tests) - LENGTH - 1, LENGTH)[:16]).item())
    return found


def seconds(mixer: Mixer, length: int) -> float:
    """One layer, forward and backward, on one text: the fastest of three runs, in processor time."""
    module, x = mixer.build(Common(width=WIDTH)), torch.randn(1, length, WIDTH, requires_grad=True)
    context, best = Context(TokenLayout(torch.arange(length)[None], start=0)), float("inf")
    for _ in range(3):
        started = time.process_time()
        module(x, context).sum().backward()
        best = min(best, time.process_time() - started)
    return best


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    torch.set_num_threads(1)
    data, vocab = text()
    cut = len(data) * 9 // 10
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    print(f"{'':20} parameters   loss on unseen text, nats per letter")
    configs = {}
    for name, layer in LAYERS.items():
        net = model(layer, vocab)
        curve = train(net, data[:cut], data[cut:])
        print(f"{name:20} {net.config.cost(LENGTH).parameters:10,}   {curve[-1]:.3f}", flush=True)
        left.plot(range(20, STEPS + 1, 20), curve, label=name)
        configs[name] = net.config.decoder[0].mixer
    left.set(xlabel="training steps", ylabel="loss on unseen text, nats per letter")
    left.legend(frameon=False)

    lengths = [512, 1024, 2048, 4096]
    print("\nmilliseconds of one unit, forward and backward, by length")
    print(f"{'':20} " + "".join(f"{length:8,}" for length in lengths))
    for name in list(LAYERS)[1:]:
        found = [1000 * seconds(configs[name], length) for length in lengths]
        print(f"{name:20} " + "".join(f"{value:8.0f}" for value in found), flush=True)
        right.plot(lengths, found, marker="o", label=name)
    right.set(xscale="log", yscale="log", xlabel="length", ylabel="milliseconds, forward and backward")
    right.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
    right.minorticks_off()
    right.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
