"""Multi-linear attention against multi-head attention: parameters and quality, with and without a causal mask.

    python bench/family/tensorized.py

Character models of the pages in docs/, in pieces of 16 characters: attention, tensorised attention of three ranks, and
the authors' form without a causal mask, which sees the character that it predicts. Writes
docs/family/pictures/tensorized.svg.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import allyouneed as ayn
from allyouneed.nn.batch import Batch, Rows

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/family/pictures/tensorized.svg"
LENGTH, WIDTH, LAYERS, STEPS, ROWS = 16, 128, 2, 400, 64
MIXERS: dict[str, Any] = {
    "attention": {"kind": "attention", "heads": 4, "pattern": "causal"},
    "rank 16": {"kind": "tensorized", "rank": 16, "length": LENGTH, "pattern": "causal"},
    "rank 64": {"kind": "tensorized", "rank": 64, "length": LENGTH, "pattern": "causal"},
    "rank 64, no mask": {"kind": "tensorized", "rank": 64, "length": LENGTH},
}


def characters() -> tuple[Tensor, Tensor, int]:
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    known = {letter: number for number, letter in enumerate(sorted(set(pages)))}
    ids = torch.tensor([known[letter] for letter in pages])
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:], len(known)


def model(vocab: int, mixer: Any) -> Any:
    """A decoder, or, without a mask, an encoder of the same parts: a decoder would refuse it."""
    torch.manual_seed(0)
    stack = "encoder" if mixer["kind"] == "tensorized" and "pattern" not in mixer else "decoder"
    layer = {
        "repeat": LAYERS,
        "wiring": "pre-norm",
        "mixer": mixer,
        "channel": {"kind": "ffn", "hidden": 2 * WIDTH},
    }
    tree = {"kind": stack, "vocab": vocab, "width": WIDTH, stack: [layer], "embed": {"positions": "sinusoidal"}}
    return ayn.build(tree)


def pieces(text: Tensor, rows: int, dice: torch.Generator) -> Tensor:
    begins = torch.randint(0, len(text) - LENGTH - 1, (rows,), generator=dice)
    return torch.stack([text[begin : begin + LENGTH + 1] for begin in begins])


def train(net: Any, text: Tensor) -> None:
    dice = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, STEPS)
    for _ in range(STEPS):
        rows = pieces(text, ROWS, dice)
        total, _ = net.head.loss(net(Batch(Rows(rows[:, :-1]))), rows[:, 1:], 0.0)
        optimiser.zero_grad()
        (total / rows[:, 1:].numel()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()


@torch.no_grad()
def held_out(net: Any, text: Tensor) -> float:
    """Bits per character."""
    rows = pieces(text, 512, torch.Generator().manual_seed(2))
    loss = float(net.eval().head.loss(net(Batch(Rows(rows[:, :-1]))), rows[:, 1:], 0.0)[1])
    return loss / rows[:, 1:].numel() / math.log(2)


def main() -> None:
    import matplotlib.pyplot as plt

    text, other, vocab = characters()
    figure, axes = plt.subplots(figsize=(6, 3.4))
    for name, mixer in MIXERS.items():
        net = model(vocab, mixer)
        train(net, text)
        blocks = (net.decoder if hasattr(net, "decoder") else net.encoder).blocks
        size, bits = sum(p.numel() for p in blocks[0].sublayers["mixer"].parameters()), held_out(net, other)
        print(f"{name:18} {size:7,} parameters per mixer, {bits:.3f} bits per character", flush=True)
        axes.scatter([size], [bits])
        axes.annotate(name, (size, bits), xytext=(5, 3), textcoords="offset points")
    axes.set(xlabel="parameters of a mixer", ylabel="bits per character, held out")
    axes.margins(0.2)
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
