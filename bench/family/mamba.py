"""Selective copying: S4 treats all tokens alike and depends on their places, Mamba and Mamba-2 choose what to keep.

    python bench/family/mamba.py

Gu, Dao 2023, section 4.1.1 and table 1, small: some letters among blanks, then the same letters again, in order. In the
copying task they stand at the same places in every text, in selective copying anywhere. Two layers of each mixer, same
width, same training. The trained models also read longer contexts than those they were trained on, and the decoding
state of all is measured. Writes docs/family/pictures/mamba.svg.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import allyouneed as ayn
from allyouneed.nn.batch import Batch, Rows

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/mamba.svg"
LETTERS, COPIED, CONTEXT, WIDTH = 8, 3, 40, 32
BLANK, ASK = 0, LETTERS + 1  # letters are 1 … LETTERS; ASK, ASK + 1, … ask for the first, the second, …
STEPS, ROWS, EVERY = 600, 32, 25
MIXERS: dict[str, Any] = {
    "S4": {"kind": "s4", "state": 16},
    "Mamba": {"kind": "mamba"},
    "Mamba-2": {"kind": "mamba2", "heads": 4, "state": 16},
}


def model(mixer: Any) -> Any:
    torch.manual_seed(0)
    layer = {"repeat": 2, "wiring": "pre-norm", "mixer": mixer}
    keys = {"kind": "decoder", "vocab": ASK + COPIED, "width": WIDTH, "embed": {"scale": "none"}, "norm": "rms"}
    return ayn.build(keys | {"decoder": [layer]})


def texts(rows: int, context: int, selective: bool, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (rows, context + COPIED), and the letters to be given at the last COPIED places."""
    letters = torch.randint(1, LETTERS + 1, (rows, COPIED), generator=dice)
    places = torch.arange(COPIED).expand(rows, -1)
    if selective:
        places = torch.rand(rows, context, generator=dice).argsort(1)[:, :COPIED].sort(1).values
    tokens = torch.full((rows, context), BLANK).scatter(1, places, letters)
    return torch.cat((tokens, torch.arange(ASK, ASK + COPIED).expand(rows, -1)), 1), letters


def answers(net: Any, tokens: Tensor) -> Tensor:
    """Logits (rows, COPIED, vocab)."""
    found: Tensor = net.head(net(Batch(Rows(tokens)))[:, -COPIED:])
    return found


def train(net: Any, selective: bool) -> list[float]:
    """Accuracy after every EVERY steps, on fresh texts."""
    dice, found = torch.Generator().manual_seed(1), []
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, STEPS, pct_start=0.1)
    for step in range(1, STEPS + 1):
        tokens, letters = texts(ROWS, CONTEXT, selective, dice)
        loss = nn.functional.cross_entropy(answers(net, tokens).flatten(0, 1), letters.flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step % EVERY == 0:
            found.append(accuracy(net, CONTEXT, selective))
    return found


@torch.no_grad()
def accuracy(net: Any, context: int, selective: bool) -> float:
    tokens, letters = texts(256, context, selective, torch.Generator().manual_seed(2))
    return (answers(net, tokens).argmax(-1) == letters).float().mean().item()


@torch.no_grad()
def state_bytes(net: Any, length: int) -> int:
    states = net.start(1)
    net.advance(Rows(torch.zeros(1, length, dtype=torch.long)), states)
    return int(states.bytes)


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    torch.set_num_threads(1)
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.2))
    copying = model(MIXERS["S4"])
    print(f"copying from fixed places: S4 {train(copying, False)[-1]:.1%}   (chance {1 / LETTERS:.1%})", flush=True)

    lengths = [CONTEXT * times for times in (1, 2, 4, 8)]
    print("selective copying, in the context of training and in longer ones")
    print("context    " + "".join(f"{length:8}" for length in lengths))
    trained = {}
    for name, mixer in MIXERS.items():
        trained[name] = model(mixer)
        left.plot(range(EVERY, STEPS + 1, EVERY), train(trained[name], True), label=name)
        found = [accuracy(trained[name], length, True) for length in lengths]
        print(f"{name:10} " + "".join(f"{value:8.1%}" for value in found), flush=True)
        middle.plot(lengths, found, marker="o", label=name)
    left.set(xlabel="training steps", ylabel="accuracy", ylim=(0, 1.03))
    middle.set(xscale="log", xlabel="context", ylabel="accuracy", ylim=(0, 1.03))
    middle.set_xticks(lengths, [f"{length}" for length in lengths])
    middle.minorticks_off()
    left.legend(frameon=False)

    print("\nbytes of decoding state, by tokens read")
    sizes = [64, 256, 1024, 4096]
    attention = model({"kind": "attention", "heads": 4, "pattern": "causal"})
    print("tokens     " + "".join(f"{size:10,}" for size in sizes))
    for name, net in {"attention": attention, **trained}.items():
        found = [state_bytes(net, size) for size in sizes]
        print(f"{name:10} " + "".join(f"{count:10,}" for count in found))
        right.plot(sizes, [count / 1e6 for count in found], marker="o", label=name)
    right.set(xscale="log", xlabel="tokens read", ylabel="decoding state, MB")
    right.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
