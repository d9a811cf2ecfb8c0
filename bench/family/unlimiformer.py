"""A model of 64 positions answers from a source of thousands of tokens, without training (Unlimiformer).

    python bench/family/unlimiformer.py

The source is a list of entries, each a name of two tokens and a value; the target is a name and must go on with its
value. The encoder has 64 learned positions and was trained on lists of up to 21 entries. Then lists of up to 1,365
entries (4,095 tokens): with the list cut after 64 tokens, with attention to the nearest 64 of all tokens, and to all.
Writes docs/family/pictures/unlimiformer.svg.
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
LETTERS, VALUES, LIMIT = 40, 16, 64  # 1,600 names of two letters
VOCAB, WIDTH, STEPS, ROWS, KEYS = 2 * LETTERS + VALUES + 1, 48, 700, 64, 64
ENTRIES = (10, 21, 42, 85, 170, 341, 682, 1365)


def model() -> Any:
    torch.manual_seed(0)
    attention, channel = {"kind": "attention", "heads": 4}, {"kind": "ffn", "hidden": 2 * WIDTH}
    block = {"wiring": "pre-norm", "channel": channel}
    tree = {
        "kind": "encoder-decoder",
        "vocab": VOCAB,
        "width": WIDTH,
        "embed": {"positions": {"kind": "learned", "length": LIMIT}},
        "encoder": [block | {"repeat": 2, "mixer": attention}],
        "decoder": [block | {"repeat": 2, "mixer": attention | {"pattern": "causal"}, "cross": attention}],
    }
    return ayn.build(tree)


def lists(rows: int, entries: int, dice: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sources (rows, 3 * entries), names asked for (rows, 2) and their values (rows,)."""
    names = torch.rand(rows, LETTERS**2, generator=dice).argsort(1)[:, :entries]
    values = torch.randint(1, VALUES + 1, (rows, entries), generator=dice)
    first, second = VALUES + 1 + names // LETTERS, VALUES + 1 + LETTERS + names % LETTERS
    asked = torch.randint(0, entries, (rows, 1), generator=dice)
    name = torch.cat((first.gather(1, asked), second.gather(1, asked)), 1)
    return torch.stack((first, second, values), 2).flatten(1), name, values.gather(1, asked)[:, 0]


def train(net: Any) -> None:
    dice = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, STEPS)
    for step in range(STEPS):
        entries = 4 if step < STEPS // 3 else int(torch.randint(4, 22, (1,), generator=dice))
        source, name, value = lists(ROWS, entries, dice)
        loss = nn.functional.cross_entropy(net.logits(Batch(Rows(name), Rows(source)))[:, -1], value)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        schedule.step()


@torch.no_grad()
def accuracy(net: Any, entries: int, keys: int | None) -> float:
    """`keys`: None: the list is cut after 64 tokens."""
    rows = 128 if entries < 500 else 48
    source, name, value = lists(rows, entries, torch.Generator().manual_seed(2))
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
    print(f"{'entries':22}" + "".join(f"{n:>7}" for n in ENTRIES))
    for name, keys in ways.items():
        found = [accuracy(net, entries, keys) for entries in ENTRIES]
        print(f"{name:22}" + "".join(f"{100 * one:6.0f}%" for one in found), flush=True)
        axes.plot([3 * n for n in ENTRIES], found, marker="o", label=name)
    axes.axvline(LIMIT, color="grey", linestyle=":")
    axes.set(xlabel="tokens of the source", xscale="log", ylabel="values answered correctly", ylim=(0, 1.03))
    axes.legend()
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
