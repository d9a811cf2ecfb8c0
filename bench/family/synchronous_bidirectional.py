"""Synchronous bidirectional decoding: a target whose left half is easy from the left, its right half from the right.

    python bench/family/synchronous_bidirectional.py      about a minute on one core; writes
                                                          docs/family/pictures/synchronous-bidirectional.svg

The source is two numbers a + b in base 3. The target is c=d: c_i = c_{i−1} + a_i (running sums from the left, modulo
3), and d_i = d_{i+1} + b_i (running sums from the right). From the left, the first digit of d needs the sum of all
digits of b at once, and so does the last digit of c from the right: either direction has to guess it, one time in three
correctly.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from bench.family.common import train_translator, write_pairs

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/synchronous-bidirectional.svg"
DIGITS, BASE, PAIRS, TESTS, STEPS = 4, 3, 2500, 100, 300
Pairs = list[tuple[str, str]]


def pair(dice: random.Random) -> tuple[str, str]:
    a, b = ([dice.randrange(BASE) for _ in range(DIGITS)] for _ in range(2))
    c = [total % BASE for total in accumulate(a)]
    d = [total % BASE for total in accumulate(b[::-1])][::-1]
    return "+".join("".join(map(str, part)) for part in (a, b)), "=".join("".join(map(str, part)) for part in (c, d))


def model(synchronous: bool) -> dict[str, Any]:
    attention = {"kind": "attention", "heads": 4}
    layer = {"wiring": "pre-norm", "repeat": 2, "mixer": attention, "channel": {"kind": "ffn", "hidden": 192}}
    own = {"kind": "synchronous", "heads": 4, "fusion": "gate"} if synchronous else attention | {"pattern": "causal"}
    decoder = layer | {"mixer": own, "cross": attention}
    body = {"kind": "encoder-decoder", "vocab": 1, "width": 64, "embed": {"positions": "sinusoidal"}}
    return body | {"encoder": [layer], "decoder": [decoder]}


def fit(folder: Path, name: str, synchronous: bool, pairs: Pairs) -> Any:
    splits = {
        "train": write_pairs(folder / "train.tsv", pairs),
        "valid": write_pairs(folder / "valid.tsv", pairs[:20]),
    }
    return train_translator(
        folder / name,
        2 * STEPS if synchronous else STEPS,  # it learns both directions with the same weights
        splits | {"max_tokens": 32},
        tokenizer={"vocab": 280},
        task="synchronous-translation" if synchronous else "translation",
        model=model(synchronous),
        batch={"rows": 4, "row": 64},
        schedule={"kind": "constant", "peak": 0.003, "warmup": 50},
    )


def main() -> None:
    began = time.process_time()
    dice = random.Random(3)
    pairs = list(dict(pair(dice) for _ in range(PAIRS + TESTS)).items())
    tests, known = pairs[:TESTS], pairs[TESTS:]
    sources, targets = [source for source, _ in tests], [target for _, target in tests]
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        found["left to right"] = fit(folder, "l2r", False, known).translate(sources, beam=4)
        turned = [(source, target[::-1]) for source, target in known]
        found["right to left"] = [text[::-1] for text in fit(folder, "r2l", False, turned).translate(sources, beam=4)]
        found["both, synchronous"] = fit(folder, "both", True, known).translate(sources, beam=4)
    print(f"\n{'correct, %':22}{'left half':>12}{'right half':>12}{'all':>8}")
    for name, texts in found.items():
        halves = [[text[:DIGITS], text[-DIGITS:], text] for text in texts]
        wanted = [[text[:DIGITS], text[-DIGITS:], text] for text in targets]
        right = [100 * sum(a[n] == b[n] for a, b in zip(halves, wanted, strict=True)) / len(tests) for n in range(3)]
        print(f"{name:22}{right[0]:12.1f}{right[1]:12.1f}{right[2]:8.1f}")
    print(f"{time.process_time() - began:.0f} s of CPU time")
    plot(found, targets)


def plot(found: dict[str, list[str]], targets: list[str]) -> None:
    """The share of correct digits at each place of the target."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "synchronous-bidirectional"
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(7, 3))
    places = range(len(targets[0]))
    for (name, texts), style in zip(found.items(), ("--", ":", "-"), strict=True):
        right = [
            100 * sum(a[n : n + 1] == b[n] for a, b in zip(texts, targets, strict=True)) / len(texts) for n in places
        ]
        axes.plot(places, right, style, marker="o", label=name)
    axes.set_xticks(places, [f"c{n + 1}" for n in range(DIGITS)] + ["="] + [f"d{n + 1}" for n in range(DIGITS)])
    axes.set_ylabel("correct, %")
    axes.set_ylim(0, 105)
    axes.legend()
    chart.tight_layout()
    chart.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
