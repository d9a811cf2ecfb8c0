"""A model of 64 positions answers from a source of thousands of tokens, without training (Unlimiformer).

    python bench/family/unlimiformer.py

Eight entries, each a name and its value, stand somewhere in a source of noise; the target is a name and must go on with
its value. The encoder (a convolution, which connects neighbours, and attention) has 64 learned positions and was
trained on sources of up to 64 tokens. Then sources of up to 8,192 tokens: cut after 64 tokens, with attention to the
nearest 64 of all tokens, and to all of them. Writes docs/family/pictures/unlimiformer.svg.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import allyouneed as ayn
from allyouneed.infer.decoding.options import Unlimited
from allyouneed.infer.retrieval.unlimited import UnlimitedModel
from allyouneed.nn.batch import Batch, Rows

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/unlimiformer.svg"
NAMES, VALUES, NOISE, ENTRIES, LIMIT = 32, 16, 16, 8, 64
VOCAB, WIDTH, STEPS, ROWS, KEYS = NAMES + VALUES + NOISE, 48, 400, 64, 64
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def model() -> Any:
    torch.manual_seed(0)
    attention, channel = {"kind": "attention", "heads": 4}, {"kind": "ffn", "hidden": 2 * WIDTH}
    block = {"wiring": "pre-norm", "channel": channel}
    tree = {
        "kind": "encoder-decoder",
        "vocab": VOCAB,
        "width": WIDTH,
        "embed": {"positions": {"kind": "learned", "length": LIMIT}},
        "encoder": [block | {"mixer": {"kind": "convolution", "size": 3}}, block | {"mixer": attention}],
        "decoder": [block | {"mixer": attention | {"pattern": "causal"}, "cross": attention}],
    }
    return ayn.build(tree)


def sources(rows: int, length: int, dice: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sources (rows, length), names asked for (rows, 1) and their values (rows,)."""
    tokens = torch.randint(NAMES + VALUES, VOCAB, (rows, length), generator=dice)
    names = torch.rand(rows, NAMES, generator=dice).argsort(1)[:, :ENTRIES]
    values = torch.randint(NAMES, NAMES + VALUES, (rows, ENTRIES), generator=dice)
    places = 2 * torch.rand(rows, length // 2, generator=dice).argsort(1)[:, :ENTRIES]  # entries do not overlap
    tokens = tokens.scatter(1, places, names).scatter(1, places + 1, values)
    asked = torch.randint(0, ENTRIES, (rows, 1), generator=dice)
    return tokens, names.gather(1, asked), values.gather(1, asked)[:, 0]


def train(net: Any) -> None:
    dice = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, STEPS)
    for step in range(STEPS):
        length = 16 if step < STEPS // 3 else 2 * int(torch.randint(ENTRIES, LIMIT // 2 + 1, (1,), generator=dice))
        source, name, value = sources(ROWS, length, dice)
        loss = nn.functional.cross_entropy(net.logits(Batch(Rows(name), Rows(source)))[:, -1], value)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()


@torch.no_grad()
def accuracy(net: Any, length: int, keys: int | None) -> float:
    """`keys`: None: the source is cut after 64 tokens."""
    source, name, value = sources(64 if length > 1000 else 256, length, torch.Generator().manual_seed(2))
    if keys is None:
        logits = net.logits(Batch(Rows(name), Rows(source[:, :LIMIT])))
    else:
        view = UnlimitedModel(net, Unlimited(keys=keys), LIMIT)
        logits = view.head(view.advance(Rows(name), view.start(Rows(source))))
    return (logits[:, -1].argmax(-1) == value).float().mean().item()


def main() -> None:
    import matplotlib.pyplot as plt

    net = model()
    train(net)
    net.eval()
    ways = {"cut after 64 tokens": None, f"nearest {KEYS}": KEYS, "all tokens": 1 << 20}
    figure, axes = plt.subplots(figsize=(6, 3.6))
    print(f"{'tokens':22}" + "".join(f"{n:>7}" for n in LENGTHS))
    for name, keys in ways.items():
        found = [accuracy(net, length, keys) for length in LENGTHS]
        print(f"{name:22}" + "".join(f"{100 * one:6.0f}%" for one in found), flush=True)
        axes.plot(LENGTHS, found, marker="o", label=name)
    axes.axvline(LIMIT, color="grey", linestyle=":")
    axes.set(xlabel="tokens of the source", xscale="log", ylabel="values answered correctly", ylim=(0, 1.03))
    axes.legend()
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
