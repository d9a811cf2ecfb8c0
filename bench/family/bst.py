"""The order of what a user has clicked, and the time since, predict the next click (Behavior Sequence Transformer).

    python bench/family/bst.py

Two logs with a planted rule, 90 % obeyed. Items have categories; the category of the item shown always occurs among the
user's clicks, so that counting categories says nothing.

order   a click if the category is that of the latest item
time    a click if the latest item of the category is younger than a day

On each log: Wide & Deep, which averages the items before; the Behavior Sequence Transformer without positions, with
positions by order (the number of items since), and by time, as the paper has them. Trained and scored by the commands'
own functions. Writes docs/family/pictures/bst.svg.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import allyouneed as ayn
from allyouneed.metrics.ranking import auc, log_loss
from allyouneed.training.recipe.recipe import Recipe
from allyouneed.training.reporting.log import read_log

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/bst.svg"
CATEGORIES, ITEMS, LONGEST, TRUTH, DAY = 8, 160, 12, 0.9, 86_400
EXAMPLES = {"train": 10_000, "valid": 2_000}
WIDTH, STEPS, EVERY, ROWS, RATE = 48, 500, 100, 256, 3e-3
POSITIONS: dict[str, Any] = {
    "without positions": "none",
    "by order": {"kind": "time-gaps", "base": 1, "buckets": LONGEST + 1},
    "by time": {"kind": "time-gaps", "base": 2, "buckets": 24},
}


def impressions(rule: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    dice = random.Random(f"{rule} {seed}")
    made = 0
    while made < count:
        items = [dice.randrange(ITEMS) for _ in range(dice.randint(4, LONGEST))]
        ages = sorted((int(60 * 2 ** dice.uniform(0, 14)) for _ in items), reverse=True)  # a minute to eleven days
        shown = dice.randrange(ITEMS)
        of = [age for item, age in zip(items, ages, strict=True) if item % CATEGORIES == shown % CATEGORIES]
        if not of:
            continue
        right = items[-1] % CATEGORIES == shown % CATEGORIES if rule == "order" else of[-1] < DAY
        if right != made % 2:  # half of the impressions follow the rule
            continue
        made += 1
        click = right if dice.random() < TRUTH else not right
        yield {
            "items": items, "categories": [item % CATEGORIES for item in items], "times": [-age for age in ages],
            "item": shown, "category": shown % CATEGORIES, "time": 0, "hour": dice.randrange(24), "click": int(click),
        }  # fmt: skip


def train_bst(folder: Path, name: str) -> tuple[list[tuple[int, float]], dict[str, float]]:
    """(step, AUC) while training, and the scores of the result."""
    sequence = {"item": "items", "category": "categories"}
    columns = {"sequence": sequence, "features": ["hour"]}
    columns |= {"times": "times", "time": "time"} if name == "by time" else {}
    recipe = {
        "model": "behavior-sequence",
        "set": [
            f"width={WIDTH}", "dropout=0.1", f"embed.positions={json.dumps(POSITIONS[name])}",
            f"encoder[0].channel.hidden={2 * WIDTH}", "encoder[0].mixer.heads=4", "head.hidden=[64, 32]",
        ],
        "task": {"kind": "click", "length": LONGEST},
        "data": {split: {"path": str(folder / f"{split}.jsonl")} | columns for split in EXAMPLES},
        "batch": {"rows": 10, "row": 256},
        "schedule": {"kind": "cosine", "peak": RATE, "warmup": 50},
        "steps": STEPS,
        "validate": {"every": EVERY, "sentences": 0},
        "save": {"every": EVERY, "keep": 1},
        "average": 0,
        "device": "cpu",
        "precision": "fp32",
        "output": str(folder / name.replace(" ", "-")),
    }  # fmt: skip
    result = ayn.train(Recipe(**recipe), console=Console(quiet=True))
    log = read_log(result.model.parent / "log.jsonl")
    return [(entry["step"], entry["valid"]["auc"]) for entry in log if "valid" in entry], result.scores["valid"]


class WideAndDeep(nn.Module):
    """Cheng et al. 2016, as the paper's baseline: the mean of the items before, the item shown and other features
    through fully connected layers, plus a linear map of the item and features."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.category = nn.EmbeddingBag(ITEMS + 1, 24), nn.EmbeddingBag(CATEGORIES + 1, 24)
        self.hour, self.wide = nn.Embedding(24, 24), nn.Embedding(ITEMS + 24, 1)
        sizes = [5 * 24, 64, 32]
        layers = [part for size in pairwise(sizes) for part in (nn.Linear(*size), nn.LeakyReLU())]
        self.deep = nn.Sequential(*layers, nn.Linear(32, 1))

    def forward(self, items: Tensor, lengths: Tensor, shown: Tensor, hour: Tensor) -> Tensor:
        real = (torch.arange(items.shape[1]) < lengths[:, None]).float() / lengths[:, None]
        bags = [self._mean(self.item, items, real), self._mean(self.category, items % CATEGORIES, real)]
        here = [self.item(shown[:, None]), self.category(shown[:, None] % CATEGORIES), self.hour(hour)]
        wide = self.wide(torch.stack([shown, ITEMS + hour], 1)).sum((1, 2))
        return self.deep(torch.cat([*bags, *here], 1)).squeeze(1) + wide

    @staticmethod
    def _mean(table: nn.EmbeddingBag, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("bt,btw->bw", weights, nn.functional.embedding(ids, table.weight))


def tensors(rows: list[dict[str, Any]]) -> tuple[Tensor, ...]:
    items = torch.tensor([row["items"] + [0] * (LONGEST - len(row["items"])) for row in rows])
    lengths = torch.tensor([len(row["items"]) for row in rows])
    return (items, lengths, *(torch.tensor([row[name] for row in rows]) for name in ("item", "hour", "click")))


def train_wide_and_deep(logs: dict[str, list[dict[str, Any]]]) -> tuple[list[tuple[int, float]], dict[str, float]]:
    torch.manual_seed(0)
    net, dice, found, scores = WideAndDeep(), torch.Generator().manual_seed(1), [], {}
    optimiser = torch.optim.Adam(net.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    train, valid = tensors(logs["train"]), tensors(logs["valid"])
    for step in range(1, STEPS + 1):
        some = torch.randint(0, len(train[0]), (ROWS,), generator=dice)
        *given, click = (part[some] for part in train)
        loss = nn.functional.binary_cross_entropy_with_logits(net(*given), click.float())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % EVERY == 0:
            with torch.no_grad():
                chances = net(*valid[:-1]).sigmoid().tolist()
            clicks = [bool(one) for one in valid[-1]]
            now = {"auc": auc(chances, clicks), "loss": log_loss(chances, clicks)}
            found.append((step, now["auc"]))
            scores = now if now["auc"] > scores.get("auc", 0) else scores  # the best, as the recipes take it
    return found, scores


def main() -> None:
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    names = ["Wide & Deep", *POSITIONS]
    for rule in ("order", "time"):
        with tempfile.TemporaryDirectory() as work:
            logs = {split: list(impressions(rule, count, n)) for n, (split, count) in enumerate(EXAMPLES.items())}
            for split, rows in logs.items():
                Path(work, f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(f"rule: {rule}")
            curves[rule] = {}
            for name in names:
                run = train_wide_and_deep(logs) if name == names[0] else train_bst(Path(work), name)
                curves[rule][name], scores = run
                print(f"  {name:<18} AUC {scores['auc']:.3f}  log loss {scores['loss']:.3f}")
    draw(curves)


def draw(curves: dict[str, dict[str, list[tuple[int, float]]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "bst"
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    titles = {"order": "click if it is like the latest item", "time": "click if the like item is under a day old"}
    for axis, (rule, lines) in zip(axes, curves.items(), strict=True):
        for name, points in lines.items():
            label = name if name == "Wide & Deep" else f"BST {name}"
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axis.set(title=titles[rule], xlabel="step")
        axis.axhline(0.5, color="gray", linewidth=0.5)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("AUC on unseen impressions")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
