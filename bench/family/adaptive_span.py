"""Heads learn how far they look, and the KV cache follows (adaptive attention span).

    python bench/family/adaptive_span.py

Noise that repeats itself after 40 tokens, nine times in ten: to predict it, one head has to look 39 tokens back. Two
layers of two heads can look 96 tokens back; with the penalty on spans and without it: loss, spans, and the bytes of the
KV cache after 512 tokens. Writes docs/family/pictures/adaptive-span.svg.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import allyouneed as ayn
from allyouneed.nn.batch import Batch, Rows

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/adaptive-span.svg"
SPAN, RAMP, PERIOD, LENGTH, WIDTH, LAYERS, HEADS, STEPS, ROWS, VOCAB = 96, 8, 40, 96, 32, 2, 2, 240, 16, 12
PENALTY = {"no penalty": 0.0, "penalty 0.002": 2e-3}


def model(penalty: float) -> Any:
    torch.manual_seed(0)
    spans = {"span": SPAN, "ramp": RAMP, "initial": 1.0, "penalty": penalty}
    positions = {"kind": "adaptive-span", "vectors": True} | spans
    layer = {
        "repeat": LAYERS,
        "wiring": "pre-norm",
        "mixer": {"kind": "attention", "heads": HEADS, "pattern": "causal", "positions": positions},
        "channel": {"kind": "ffn", "hidden": 2 * WIDTH},
    }
    return ayn.build({"kind": "decoder", "vocab": VOCAB, "width": WIDTH, "decoder": [layer]})


def texts(rows: int, length: int, dice: torch.Generator) -> Tensor:
    """Tokens (rows, length) that repeat those 40 before, nine times in ten."""
    tokens = torch.randint(0, VOCAB, (rows, length), generator=dice)
    keeps = torch.rand(rows, length, generator=dice) < 0.9
    for t in range(PERIOD, length):
        tokens[:, t] = torch.where(keeps[:, t], tokens[:, t - PERIOD], tokens[:, t])
    return tokens


def train(net: Any) -> list[list[float]]:
    """Spans of all heads after every 10 updates."""
    dice, found = torch.Generator().manual_seed(1), []
    spans = [parameter for name, parameter in net.named_parameters() if name.endswith("fraction")]
    others = [parameter for name, parameter in net.named_parameters() if not name.endswith("fraction")]
    optimiser = torch.optim.Adam([{"params": others, "lr": 5e-3}, {"params": spans, "lr": 1e-2}])
    for step in range(STEPS):
        rows = texts(ROWS, LENGTH + 1, dice)
        losses: list[Tensor] = []
        logits = net.head(net.train()(Batch(Rows(rows[:, :-1])), losses))
        loss = nn.functional.cross_entropy(logits[:, PERIOD:].flatten(0, 1), rows[:, PERIOD + 1 :].flatten())
        if step < STEPS // 2:  # first what to look at, then how little of it
            losses = []
        optimiser.zero_grad()
        (loss + sum(losses)).backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        optimiser.step()
        if step % 10 == 9:
            found.append([z for part in parts(net) for z in part.spans().tolist()])
    return found


def parts(net: Any) -> list[Any]:
    return [block.sublayers["mixer"].relative for block in net.decoder.blocks]


@torch.no_grad()
def accuracy(net: Any) -> float:
    rows = texts(64, LENGTH + 1, torch.Generator().manual_seed(2))
    right = net.head(net.eval()(Batch(Rows(rows[:, :-1])))).argmax(-1) == rows[:, 1:]
    return right[:, PERIOD:].float().mean().item()


@torch.no_grad()
def cache_bytes(net: Any) -> int:
    states = net.eval().start(1)
    net.advance(Rows(texts(1, 512, torch.Generator().manual_seed(2))), states)
    return int(states.bytes)


def main() -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, (name, penalty) in zip(axes, PENALTY.items(), strict=True):
        net = model(penalty)
        curves = train(net)
        print(f"{name}: {100 * accuracy(net):.0f}% right, KV cache {cache_bytes(net):,} bytes", flush=True)
        for number, part in enumerate(parts(net)):
            spans = ", ".join(f"{z:.0f}" for z in part.spans().tolist())
            print(f"  layer {number}: spans {spans}; the cache looks back {part.visible()} tokens")
        for head, curve in enumerate(zip(*curves, strict=True)):
            label = f"layer {head // HEADS}, head {head % HEADS}"
            axis.plot(range(10, STEPS + 1, 10), curve, label=label)
        axis.axhline(PERIOD, color="grey", linestyle=":")
        axis.set(title=name, xlabel="update")
    axes[0].set(ylabel="span z (tokens)")
    axes[1].legend()
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
