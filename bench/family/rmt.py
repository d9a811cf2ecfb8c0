"""Memory tokens carry digits over segments that no attention spans (Recurrent Memory Transformer).

    python bench/family/rmt.py

A text begins with digits, noise follows, and a question at its end asks for the digits. No layer attends beyond a
segment, so that only the memory tokens can bring them to the end. The model learns texts of 2, then 3, then 4 segments
and is then asked after up to 32. Beside it: the same model whose gradient stops at every segment (`bptt: 1`), and a
decoder of the same size that sees its own segment only. Writes docs/family/pictures/rmt.svg.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import allyouneed as ayn
from allyouneed.nn.batch import Batch, Rows

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/rmt.svg"
DIGITS, NOISE, SEGMENT, COUNT = 10, 4, 10, 3  # digits are 1 … 10
ASK = DIGITS + NOISE + 1
WIDTH, ROWS = 48, 64
STEPS = {2: 400, 3: 250, 4: 250}  # steps at each number of segments
ASKED = (2, 3, 4, 6, 8, 16, 32)


def model(kind: str) -> Any:
    torch.manual_seed(0)
    pattern = "causal & block(10)" if kind == "segment alone" else "causal | prompt"
    layer = {
        "repeat": 2,
        "wiring": "pre-norm",
        "mixer": {"kind": "attention", "heads": 4, "pattern": pattern, "positions": "rotary"},
        "channel": {"kind": "ffn", "hidden": 4 * WIDTH},
    }
    tree: dict[str, Any] = {"kind": "decoder", "vocab": ASK + 1, "width": WIDTH, "decoder": [layer]}
    if kind != "segment alone":
        tree |= {"kind": "recurrent-memory", "memory": 4, "segment": SEGMENT}
        tree |= {"bptt": 1} if kind == "bptt 1" else {}
    return ayn.build(tree)


def texts(rows: int, segments: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (rows, segments * SEGMENT): digits first, then noise, then as many questions; and the digits."""
    digits = torch.randint(1, DIGITS + 1, (rows, COUNT), generator=dice)
    noise = torch.randint(DIGITS + 1, ASK, (rows, segments * SEGMENT - 2 * COUNT), generator=dice)
    return torch.cat((digits, noise, torch.full((rows, COUNT), ASK)), 1), digits


def answers(net: Any, tokens: Tensor) -> Tensor:
    found: Tensor = net.head(net(Batch(Rows(tokens)))[:, -COUNT:])
    return found


def train(net: Any) -> list[tuple[int, float]]:
    """(step, accuracy) on texts of the current number of segments."""
    dice, found, step = torch.Generator().manual_seed(1), [], 0
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    for segments, steps in STEPS.items():
        for _ in range(steps):
            tokens, digits = texts(ROWS, segments, dice)
            loss = nn.functional.cross_entropy(answers(net, tokens).flatten(0, 1), digits.flatten())
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            step += 1
            if step % 50 == 0:
                found.append((step, accuracy(net, segments)))
    return found


@torch.no_grad()
def accuracy(net: Any, segments: int) -> float:
    tokens, digits = texts(256, segments, torch.Generator().manual_seed(2))
    return (answers(net, tokens).argmax(-1) == digits).float().mean().item()


@torch.no_grad()
def state_bytes(net: Any, segments: int) -> int:
    tokens, _ = texts(1, segments, torch.Generator().manual_seed(2))
    states = net.start(1)
    net.advance(Rows(tokens), states)
    return int(states.bytes)


def main() -> None:
    import matplotlib.pyplot as plt

    kinds = {"memory tokens": "rmt", "gradient cut (bptt 1)": "bptt 1", "segment alone": "segment alone"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for name, kind in kinds.items():
        net = model(kind)
        curve = train(net)
        found = [accuracy(net.eval(), segments) for segments in ASKED]
        figures = [f"{n}: {100 * one:3.0f}%" for n, one in zip(ASKED, found, strict=True)]
        print(f"{name:24}" + "  ".join(figures), flush=True)
        left.plot(*zip(*curve, strict=True), label=name)
        right.plot(ASKED, found, marker="o", label=name)
        if kind == "rmt":
            sizes = [state_bytes(net, segments) for segments in (2, 32)]
            print(f"{'decoding state':24}{sizes[0]:,} bytes after 2 segments, {sizes[1]:,} after 32", flush=True)
    left.set(xlabel="update", ylabel="digits answered correctly", ylim=(0, 1.03))
    right.set(xlabel="segments between the digits and the question", xscale="log", ylim=(0, 1.03))
    right.set_xticks(ASKED, [str(n) for n in ASKED])
    right.minorticks_off()
    right.axvline(max(STEPS), color="grey", linestyle=":")
    left.legend()
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
