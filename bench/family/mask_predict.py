"""Non-autoregressive translation: mask-predict and CTC against the autoregressive model of the same size.

    python bench/family/mask_predict.py    about three minutes on one core; writes docs/family/pictures/mask-predict.svg

A date in words has three correct translations (1984-10-17, 17/10/1984, 10.17.1984), and the training data holds one of
them at random. A model that chooses all tokens at once mixes them. Distilled data holds, for the same sources, what the
autoregressive model wrote (Kim and Rush 2016). A translation counts if it is one of the three.
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

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/mask-predict.svg"
PAIRS, TESTS, STEPS = 3000, 200, 500
MONTHS = ["january", "february", "march", "april", "may", "june"]
MONTHS += ["july", "august", "september", "october", "november", "december"]
Pairs = list[tuple[str, str]]


def date(dice: random.Random) -> tuple[int, int, int]:
    return dice.randint(1, 28), dice.randint(1, 12), dice.randint(1900, 2099)


def words(day: int, month: int, year: int) -> str:
    return f"{day} {MONTHS[month - 1]} {year}"


def formats(day: int, month: int, year: int) -> list[str]:
    return [f"{year}-{month:02}-{day:02}", f"{day:02}/{month:02}/{year}", f"{month:02}.{day:02}.{year}"]


def model(kind: str) -> dict[str, Any]:
    attention = {"kind": "attention", "heads": 4}
    layer = {"wiring": "pre-norm", "mixer": attention, "channel": {"kind": "ffn", "hidden": 192}}
    body = {"vocab": 1, "width": 64, "embed": {"positions": "sinusoidal"}}
    if kind == "ctc-translation":
        return body | {"kind": "encoder", "encoder": [layer | {"repeat": 5}]}
    own = attention if kind == "mask-predict" else attention | {"pattern": "causal"}
    decoder = layer | {"repeat": 2, "mixer": own, "cross": attention}
    return body | {"kind": "encoder-decoder", "encoder": [layer | {"repeat": 2}], "decoder": [decoder]}


def fit(folder: Path, name: str, kind: str, pairs: Pairs) -> Any:
    splits = {
        "train": write_pairs(folder / "train.tsv", pairs),
        "valid": write_pairs(folder / "valid.tsv", pairs[:20]),
    }
    return train_translator(
        folder / name,
        STEPS,
        splits | {"max_tokens": 32},
        tokenizer={"vocab": 320},
        task=kind,
        model=model(kind),
        batch={"rows": 12 if kind == "ctc-translation" else 6, "row": 64},  # of CTC, copies of the source
        schedule={"kind": "inverse-sqrt", "peak": 0.004, "warmup": 100},
    )


def measure(translator: Any, tests: list[tuple[int, int, int]], **options: Any) -> tuple[float, float]:
    """Percentage of correct translations, and translations per second of CPU time."""
    sources = [words(*one) for one in tests]
    translator.translate(sources[:20], **options)
    began = time.process_time()
    found = translator.translate(sources, **options)
    seconds = time.process_time() - began
    return 100 * sum(a in formats(*one) for a, one in zip(found, tests, strict=True)) / len(tests), len(tests) / seconds


def main() -> None:
    began = time.process_time()
    dice = random.Random(5)
    dates = list({date(dice): None for _ in range(PAIRS + TESTS)})
    tests, known = dates[:TESTS], dates[TESTS:]
    pairs = [(words(*one), dice.choice(formats(*one))) for one in known]
    rows: list[tuple[str, str, float, float]] = []
    with tempfile.TemporaryDirectory() as work:
        teacher = fit(Path(work), "autoregressive", "translation", pairs)
        rows += [
            (f"autoregressive, {name}", "one of three", *measure(teacher, tests, **options))
            for name, options in (("beam 4", {"beam": 4}), ("greedy", {"method": "greedy"}))
        ]
        sources = [source for source, _ in pairs]
        distilled = list(zip(sources, teacher.translate(sources, method="greedy"), strict=True))
        for data, some in (("one of three", pairs), ("distilled", distilled)):
            for kind in ("mask-predict", "ctc-translation"):
                translator = fit(Path(work), f"{kind} {data}", kind, some)
                if kind == "ctc-translation":
                    rows.append(("CTC, one pass", data, *measure(translator, tests)))
                    continue
                for iterations in (1, 2, 4, 10):
                    name = f"mask-predict, {iterations} iteration{'s' * (iterations > 1)}"
                    rows.append((name, data, *measure(translator, tests, iterations=iterations)))
    print(f"\n{'':28}{'training data':16}{'correct, %':>12}{'texts/s':>10}")
    for name, data, correct, speed in rows:
        print(f"{name:28}{data:16}{correct:12.1f}{speed:10.0f}")
    print(f"{time.process_time() - began:.0f} s of CPU time")
    plot(rows)


def plot(rows: list[tuple[str, str, float, float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "mask-predict"
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(7, 3.2))
    for data in ("one of three", "distilled"):
        some = [
            (int(name.split()[1]), correct) for name, own, correct, _ in rows if own == data and "iteration" in name
        ]
        axes.plot(*zip(*some, strict=True), marker="o", label=f"mask-predict, {data}")
        (single,) = (correct for name, own, correct, _ in rows if own == data and name.startswith("CTC"))
        axes.plot([1], [single], marker="s", linestyle="none", label=f"CTC, {data}")
    axes.axhline(rows[0][2], color="black", linestyle=":", label=rows[0][0])
    axes.set_xlabel("passes of the decoder")
    axes.set_ylabel("correct, %")
    axes.legend(fontsize="small")
    chart.tight_layout()
    chart.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
