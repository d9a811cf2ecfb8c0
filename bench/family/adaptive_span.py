"""Heads learn how far they look, and the KV cache follows (adaptive attention span).

    python bench/family/adaptive_span.py

Character models of the pages in docs/: three layers of four heads that can look 128 characters back. With the penalty
on spans, without it (fixed spans), loss and memory: the KV cache of a long text is measured. Writes
docs/family/pictures/adaptive-span.svg.
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
PICTURE = ROOT / "docs/family/pictures/adaptive-span.svg"
SPAN, RAMP, LENGTH, WIDTH, LAYERS, HEADS, STEPS, ROWS = 128, 16, 128, 64, 3, 4, 300, 8
PENALTY = 1e-3


def characters() -> tuple[Tensor, Tensor, int]:
    """Text to learn, text held out, and the number of characters."""
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    known = {letter: number for number, letter in enumerate(sorted(set(pages)))}
    ids = torch.tensor([known[letter] for letter in pages])
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:], len(known)


def model(vocab: int, penalty: float | None) -> Any:
    torch.manual_seed(0)
    positions: dict[str, Any] = {"kind": "rotary"}
    if penalty is not None:
        keys = {"span": SPAN, "ramp": RAMP, "penalty": penalty, "initial": 0.25}
        positions = {"kind": "adaptive-span", "positions": positions} | keys
    layer = {
        "repeat": LAYERS,
        "wiring": "pre-norm",
        "mixer": {"kind": "attention", "heads": HEADS, "pattern": f"causal & window({SPAN})", "positions": positions},
        "channel": {"kind": "ffn", "hidden": 4 * WIDTH},
    }
    return ayn.build({"kind": "decoder", "vocab": vocab, "width": WIDTH, "decoder": [layer]})


def train(net: Any, text: Tensor) -> None:
    dice = torch.Generator().manual_seed(1)
    spans = [parameter for name, parameter in net.named_parameters() if name.endswith("fraction")]
    others = [parameter for name, parameter in net.named_parameters() if not name.endswith("fraction")]
    groups = [{"params": others, "lr": 3e-3}, {"params": spans, "lr": 1e-2}]
    optimiser = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0)
    for step in range(STEPS):
        begins = torch.randint(0, len(text) - LENGTH - 1, (ROWS,), generator=dice)
        rows = torch.stack([text[begin : begin + LENGTH + 1] for begin in begins])
        losses: list[Tensor] = []
        total, _ = net.train().head.loss(net(Batch(Rows(rows[:, :-1])), losses), rows[:, 1:], 0.0)
        loss = total / rows[:, 1:].numel() + sum(losses)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] *= 1 if step < STEPS * 0.7 else 0.99
        optimiser.step()


@torch.no_grad()
def held_out(net: Any, text: Tensor) -> float:
    """Bits per character."""
    rows = text[: 24 * (2 * LENGTH + 1)].view(24, -1)
    hidden = net.eval()(Batch(Rows(rows[:, :-1])))
    return float(net.head.loss(hidden[:, LENGTH:], rows[:, LENGTH + 1 :], 0.0)[1]) / 24 / LENGTH / math.log(2)


@torch.no_grad()
def cache_bytes(net: Any, text: Tensor) -> int:
    states = net.eval().start(1)
    for piece in text[None, :2048].split(256, 1):
        net.advance(Rows(piece), states)
    return int(states.bytes)


def main() -> None:
    import matplotlib.pyplot as plt

    text, other, vocab = characters()
    figure, axes = plt.subplots(figsize=(6, 3.4))
    for name, penalty in {"fixed": None, "adaptive": PENALTY}.items():
        net = model(vocab, penalty)
        train(net, text)
        bits, kept = held_out(net, other), cache_bytes(net, other)
        print(f"{name:9} {bits:.3f} bits per character, KV cache {kept:,} bytes", flush=True)
    blocks = [block.sublayers["mixer"].relative for block in net.decoder.blocks]
    for number, part in enumerate(blocks):
        spans = [round(z) for z in part.spans().tolist()]
        print(f"layer {number}: spans {spans}, looks back {part.visible()} (with the ramp) of {SPAN}")
        places = [number + (head - 1.5) * 0.2 for head in range(HEADS)]
        axes.bar(places, spans, width=0.18, color=[f"C{head}" for head in range(HEADS)])
    axes.set(xlabel="layer", ylabel="learned span z (tokens)", xticks=range(LAYERS))
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
