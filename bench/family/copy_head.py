"""Copy head (See et al. 2017): unseen names in translation and in utterance rewriting, with and without it.

    python bench/family/copy_head.py            about three minutes on one core; writes docs/family/pictures/copy.svg

The tokenizer learns from 600 names, so that most of them are one token; half of the names occur in no training pair:
their vectors stay as they were initialised. Both models have the same layers and learn the same pairs.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from bench.family.common import train_translator, write_pairs

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/copy.svg"
SEEN, PAIRS, TESTS, STEPS = 300, 4000, 200, 700
TRANSLATIONS = {
    "please call {0} in {1} .": "bitte rufen Sie {0} in {1} an .",
    "{0} has never been to {1} .": "{0} war noch nie in {1} .",
    "does {0} live near {1} ?": "wohnt {0} in der Nähe von {1} ?",
    "i met {0} and {1} today .": "ich habe heute {0} und {1} getroffen .",
}
DIALOGUES = {
    "do you know {0} ? / yes , {0} comes from {1} . / when did he leave it ?": "when did {0} leave {1} ?",
    "{0} is reading {1} . / does he like it ?": "does {0} like {1} ?",
    "i saw {0} with {1} . / who is he ? / i mean the first one .": "who is {0} ?",
    "have you been to {0} ? / no , but {1} has . / how did he like it ?": "how did {1} like {0} ?",
}


def name(dice: random.Random) -> str:
    return "".join(dice.choice("bdglmnrst") + dice.choice("aeio") for _ in range(3)).capitalize()


def pairs(templates: dict[str, str], names: list[str], count: int, dice: random.Random) -> list[tuple[str, str]]:
    found = []
    for _ in range(count):
        source = dice.choice(list(templates))
        some = dice.sample(names, 2)
        found.append((source.format(*some), templates[source].format(*some)))
    return found


def model(copies: bool) -> dict[str, Any]:
    attention = {"kind": "attention", "heads": 4}
    layer = {"wiring": "pre-norm", "repeat": 2, "mixer": attention, "channel": {"kind": "ffn", "hidden": 192}}
    decoder = layer | {"mixer": attention | {"pattern": "causal"}, "cross": attention}
    body = {"kind": "encoder-decoder", "vocab": 1, "width": 64, "embed": {"positions": "sinusoidal"}}
    return body | {"encoder": [layer], "decoder": [decoder], "head": {"copy": copies}}


def fit(folder: Path, data: list[tuple[str, str]], names: list[str], copies: bool) -> Any:
    # read by the tokenizer alone: an epoch never samples pairs of this weight
    unread = write_pairs(folder / "names.tsv", ((" ".join([one] * 20), one) for one in names)) | {"weight": 1e-9}
    splits = {
        "train": [write_pairs(folder / "train.tsv", data), unread],
        "valid": [write_pairs(folder / "valid.tsv", data[:20])],
    }
    return train_translator(
        folder / ("copy" if copies else "plain"),
        STEPS,
        splits | {"max_tokens": 96},
        tokenizer={"vocab": 1500},
        model=model(copies),
        batch={"rows": 4, "row": 96},
        schedule={"kind": "inverse-sqrt", "peak": 0.003, "warmup": 100},
    )


def exact(translator: Any, tests: list[tuple[str, str]]) -> float:
    found = translator.translate([source for source, _ in tests], beam=1)
    return 100 * sum(a == b for a, (_, b) in zip(found, tests, strict=True)) / len(tests)


def main() -> None:
    began = time.process_time()
    dice = random.Random(17)
    names = list({name(dice): None for _ in range(3 * SEEN)})[: 2 * SEEN]
    seen, unseen = names[:SEEN], names[SEEN:]
    figures: dict[str, dict[str, float]] = {}
    for task, templates in (("translation", TRANSLATIONS), ("utterance rewriting", DIALOGUES)):
        data = pairs(templates, seen, PAIRS, dice)
        tests = {
            "seen names": pairs(templates, seen, TESTS, dice),
            "unseen names": pairs(templates, unseen, TESTS, dice),
        }
        for copies in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                translator = fit(Path(folder), data, names, copies)
                figures[f"{task}, {'copy' if copies else 'plain'}"] = {
                    what: exact(translator, some) for what, some in tests.items()
                }
                for source, target in tests["unseen names"][:2]:
                    print(f"  {source}\n    {translator.translate(source, beam=1)}   (expected: {target})")
    print(f"\n{'exact match, %':32}{'seen names':>12}{'unseen names':>14}")
    for row, one in figures.items():
        print(f"{row:32}" + f"{one['seen names']:12.1f}{one['unseen names']:14.1f}")
    print(f"{time.process_time() - began:.0f} s of CPU time")
    plot(figures)


def plot(figures: dict[str, dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "copy"
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(7, 3))
    for shift, what in ((-0.2, "seen names"), (0.2, "unseen names")):
        axes.bar([n + shift for n in range(len(figures))], [one[what] for one in figures.values()], 0.38, label=what)
    axes.set_xticks(range(len(figures)), [row.replace(", ", "\n") for row in figures])
    axes.set_ylabel("exact match, %")
    axes.legend()
    chart.tight_layout()
    chart.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
