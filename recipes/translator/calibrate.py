"""Fit the confidence of a translator (tasks/translation/confidence.py) on held-out pairs, show it on others.

    python recipes/translator/calibrate.py --model FOLDER --data FOLDER [--save] [--json OUT] [--figure OUT]

`--data`: see bench/translation/translator_quality.py. Fitted on tatoeba.valid and the news of FIT, tested on
tatoeba.test, UD-PUD and the news of TEST; none of it is training data. `--save` writes the calibration
into config.json of the folder.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.apps.translate.translator import Translator
from allyouneed.config import parse, tree_of
from allyouneed.folder import Folder
from allyouneed.tasks.translation.confidence import FEATURES, Confidence, Evidence, log_odds
from bench.translation.quality.data import DIRECTIONS, Direction, read_pairs, spread

FIT = {
    "de": ("tatoeba.valid", "newstest2008-2012.train"),
    "fr": ("tatoeba.valid", "newstest2008-2011.train"),
    "zh": ("tatoeba.valid", "newstest2017.test"),
}
TEST = {
    "de": ("tatoeba.test", "newstest2014.test", "ud-pud"),
    "fr": ("tatoeba.test", "newstest2014.test", "ud-pud"),
    "zh": ("tatoeba.test", "newstest2018.test", "ud-pud"),
}
LEVEL = {"en": 50.0, "de": 50.0, "fr": 50.0, "zh": 25.0}  # chrF of an acceptable sentence
WORD = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")
BINS = 10


class Sentence(NamedTuple):
    direction: str
    evidence: list[Evidence]
    acceptable: bool
    words: list[tuple[float, bool]]  # least log-probability; whether the reference has it


class Recorder:
    """Stands in for the calibration of a folder and keeps what it is asked."""

    def __init__(self) -> None:
        self.texts: list[list[Evidence]] = []

    def sentence(self, evidence: Evidence, direction: str) -> float:
        return 1.0

    def text(self, sentences: list[Evidence], direction: str) -> float:
        self.texts.append(list(sentences))
        return 1.0

    def of_word(self, log_prob: float, sentence: float) -> float:
        return log_prob


def observe(translator: Translator, pairs: list[tuple[str, str]], direction: Direction) -> list[Sentence]:
    from sacrebleu.metrics.chrf import CHRF

    here, there = direction
    recorder = translator.folder.confidence = Recorder()  # type: ignore[assignment]
    found = translator.translate_full([source for source, _ in pairs], there, from_=here, words=True)
    decoded = [(reference, one) for (_, reference), one in zip(pairs, found, strict=True) if one.words is not None]
    sentences = []
    metric = CHRF()
    for (reference, one), evidence in zip(decoded, recorder.texts, strict=True):
        score = metric.sentence_score(one.text, [reference]).score
        sentences.append(Sentence("-".join(direction), evidence, score >= LEVEL[there], _words(one, reference, there)))
    return sentences


def _words(one: Any, reference: str, language: str) -> list[tuple[float, bool]]:
    if language == "zh":
        return [(word.confidence, word.text in reference) for word in one.words]
    left = Counter(found.casefold() for found in WORD.findall(reference))
    labelled = []
    for word in one.words:
        form = word.text.casefold()
        labelled.append((word.confidence, left[form] > 0))
        left[form] -= 1
    return labelled


def observe_all(translator: Translator, data: Path, files: dict[str, tuple[str, ...]], limit: int) -> list[Sentence]:
    found: list[Sentence] = []
    for here, there in DIRECTIONS:
        other = there if here == "en" else here
        for name in files[other]:
            pairs = spread(read_pairs(data, other, name), limit)
            found += observe(translator, pairs if here == "en" else [(b, a) for a, b in pairs], (here, there))
            print(f"{name} {here}-{there}: {len(pairs)} sentences", file=sys.stderr)
    return found


def logistic(x: np.ndarray, y: np.ndarray, penalty: float = 1.0) -> np.ndarray:
    """Weights of a logistic regression by Newton's method. `x`: (n, features), standardised."""
    weights = np.zeros(x.shape[1])
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        gradient = x.T @ (p - y) + penalty * weights
        hessian = (x * (p * (1 - p))[:, None]).T @ x + penalty * np.eye(len(weights))
        step = np.linalg.solve(hessian, gradient)
        weights -= step
        if np.abs(step).max() < 1e-8:
            break
    return weights


def fit(sentences: list[Sentence], fitted: str) -> Confidence:
    directions = sorted({one.direction for one in sentences})
    length = {
        name: float(np.median([e.log_ratio for one in sentences if one.direction == name for e in one.evidence]))
        for name in directions
    }
    rows, labels = [], []
    for one in sentences:
        if len(one.evidence) == 1:  # several sentences share one label
            rows.append((one.evidence[0].features(length[one.direction]), directions.index(one.direction)))
            labels.append(one.acceptable)
    x = np.array([features for features, _ in rows])
    mean, deviation = x.mean(0), x.std(0) + 1e-6
    is_of = np.eye(len(directions))[[number for _, number in rows]]
    weights = logistic(np.hstack([(x - mean) / deviation, is_of]), np.array(labels, float))
    slopes = weights[: len(FEATURES)] / deviation
    bias = weights[len(FEATURES) :] - float(slopes @ mean)
    tree: dict[str, Any] = {
        "weights": [round(float(one), 5) for one in slopes],
        "bias": {name: round(float(one), 5) for name, one in zip(directions, bias, strict=True)},
        "length": {name: round(one, 5) for name, one in length.items()},
        "word": [0.0, 0.0, 0.0],
        "level": LEVEL,
        "fitted": fitted,
    }
    made = parse(Confidence, tree, "calibration")
    words = np.array([(log_prob, log_odds(made.text(one.evidence, one.direction)), good)
                      for one in sentences for log_prob, good in one.words], float)  # fmt: skip
    weights = logistic(np.hstack([words[:, :2], np.ones((len(words), 1))]), words[:, 2])
    return made.model_copy(update={"word": tuple(round(float(one), 5) for one in weights)})


def judge(predicted: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Expected calibration error (`BINS` bins of equal width), area under the ROC curve, Brier score, the bins."""
    bins = []
    for low in range(BINS):
        inside = (predicted >= low / BINS) & (predicted < (low + 1) / BINS + (low == BINS - 1))
        if inside.any():
            bins.append([int(inside.sum()), float(predicted[inside].mean()), float(labels[inside].mean())])
    order = np.argsort(predicted, kind="stable")
    ranks = np.empty(len(order))
    ranks[order] = np.arange(1, len(order) + 1)
    for value in np.unique(predicted):  # ties share their mean rank
        same = predicted == value
        ranks[same] = ranks[same].mean()
    positive = labels.sum()
    auc = (ranks[labels > 0].sum() - positive * (positive + 1) / 2) / max(1, positive * (len(labels) - positive))
    return {
        "count": len(labels),
        "acceptable": round(float(labels.mean()), 4),
        "mean": round(float(predicted.mean()), 4),
        "ece": round(sum(n * abs(p - q) for n, p, q in bins) / len(labels), 4),
        "auc": round(float(auc), 4),
        "brier": round(float(((predicted - labels) ** 2).mean()), 4),
        "bins": [[n, round(p, 4), round(q, 4)] for n, p, q in bins],
    }


def report(confidence: Confidence, sentences: list[Sentence]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ["all", *sorted({one.direction for one in sentences})]:
        some = [one for one in sentences if name in ("all", one.direction)]
        predicted = np.array([confidence.text(one.evidence, one.direction) for one in some])
        found[name] = judge(predicted, np.array([one.acceptable for one in some], float))
    words = [
        (confidence.of_word(log_prob, confidence.text(one.evidence, one.direction)), good)
        for one in sentences
        for log_prob, good in one.words
    ]
    found["words"] = judge(np.array([one for one, _ in words]), np.array([good for _, good in words], float))
    return found


def markdown(found: dict[str, Any]) -> str:
    lines = ["| test data | sentences | acceptable | mean confidence | ECE | AUC | Brier |", "|---|" + "---:|" * 6]
    for name, one in found.items():
        lines.append(
            f"| {name.replace('-', '→')} | {one['count']:,} | {100 * one['acceptable']:.1f} % "
            f"| {100 * one['mean']:.1f} % | {one['ece']:.3f} | {one['auc']:.3f} | {one['brier']:.3f} |"
        )
    lines += ["", "| confidence | sentences | mean | acceptable |", "|---|---:|---:|---:|"]
    for count, mean, share in found["all"]["bins"]:
        low = min(BINS - 1, int(mean * BINS))
        lines.append(f"| {low * 10}–{low * 10 + 10} % | {count:,} | {100 * mean:.1f} % | {100 * share:.1f} % |")
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4.2, 4))
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for name, label in (("all", "sentences"), ("words", "words")):
        bins = found[name]["bins"]
        axes.plot([one[1] for one in bins], [one[2] for one in bins], marker="o", markersize=4, label=label)
    axes.set(xlabel="confidence", ylabel="share acceptable", xlim=(0, 1), ylim=(0, 1))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--limit", type=int, default=250, help="sentences of each file and direction")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    translator = Translator(Folder.load(given.model), together=0)  # it learnt single sentences
    names = "; ".join(f"{language}: {', '.join(files)}" for language, files in FIT.items())
    confidence = fit(observe_all(translator, given.data, FIT, given.limit), names)
    found = report(confidence, observe_all(translator, given.data, TEST, given.limit))
    print(dict(zip(FEATURES, confidence.weights, strict=True)), confidence.bias, confidence.word)
    print(markdown(found))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.figure is not None:
        draw(found, given.figure)
    if given.save:
        path = given.model / "config.json"
        about = json.loads(path.read_text(encoding="utf-8"))
        about |= {"confidence": tree_of(confidence), "together": 0}
        path.write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
