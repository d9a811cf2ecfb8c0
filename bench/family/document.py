"""Document-level translation: sentences that only the sentences before them can translate.

    python bench/family/document.py      about two minutes on one core; writes docs/family/pictures/document.svg

The target language has genders, no verb phrase ellipsis, and two words where the source has one. A document is three
sentences; the first or the second has what the last one needs:

    pronoun     I took the cup .    We waited .     It is heavy .         it: er or sie, by the gender of the noun
    ellipsis    Anna sings .        We waited .     Ben does too .        does: the verb that was said
    cohesion    We need money .     We waited .     The bank is near .    bank: Bank or Ufer, by the topic

Every test is a pair of translations, the right one and the wrong one, of the same last sentence; both are right in
other documents. The model prefers the one to which it gives the higher probability.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import allyouneed as ayn
from allyouneed.training import load_recipe, train

PICTURE = Path(__file__).parents[2] / "docs/family/pictures/document.svg"
DOCUMENTS, TESTS, STEPS = 3000, 300, 250
CONTEXT = 2
KINDS = ("pronoun", "ellipsis", "cohesion")

MASCULINE = {"spoon": "Löffel", "table": "Tisch", "hat": "Hut", "key": "Schlüssel", "chair": "Stuhl", "coat": "Mantel"}
FEMININE = {"cup": "Tasse", "lamp": "Lampe", "bag": "Tasche", "bottle": "Flasche", "door": "Tür", "clock": "Uhr"}
VERBS = {"sings": "singt", "reads": "liest", "cooks": "kocht", "swims": "schwimmt", "writes": "schreibt"}
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix")
MONEY = {"money": "Geld", "a loan": "einen Kredit", "coins": "Münzen"}
WATER = {"a boat": "ein Boot", "a swim": "ein Bad", "fish": "Fische"}
ADJECTIVES = {"heavy": "schwer", "old": "alt", "big": "groß", "here": "da", "near": "nah", "new": "neu"}
FILLERS = {
    "We waited .": "Wir warteten .",
    "It rained .": "Es regnete .",
    "Nobody came .": "Niemand kam .",
    "That was all .": "Das war alles .",
}


class Document(NamedTuple):
    kind: str
    pairs: list[tuple[str, str]]
    wrong: str  # of the last sentence
    distance: int  # sentences from the one that decides to the last


def document(dice: random.Random, kind: str) -> Document:
    english, german = dice.choice(list(ADJECTIVES.items()))
    if kind == "pronoun":
        masculine = dice.random() < 0.5
        noun, name = dice.choice(list((MASCULINE if masculine else FEMININE).items()))
        first = f"I took the {noun} .", f"Ich nahm {'den' if masculine else 'die'} {name} ."
        er, sie = (f"{pronoun} ist {german} ." for pronoun in ("Er", "Sie"))
        last, wrong = (f"It is {english} .", er if masculine else sie), sie if masculine else er
    elif kind == "ellipsis":
        (verb, said), (_, other) = dice.sample(list(VERBS.items()), 2)
        one, two = dice.sample(NAMES, 2)
        first = f"{one} {verb} .", f"{one} {said} ."
        last, wrong = (f"{two} does too .", f"{two} {said} auch ."), f"{two} {other} auch ."
    else:
        money = dice.random() < 0.5
        thing, name = dice.choice(list((MONEY if money else WATER).items()))
        first = f"We want {thing} .", f"Wir wollen {name} ."
        bank, shore = (f"{noun} ist {german} ." for noun in ("Die Bank", "Das Ufer"))
        last, wrong = (f"The bank is {english} .", bank if money else shore), shore if money else bank
    filler = dice.choice(list(FILLERS.items()))
    distance = dice.choice((1, 2))
    pairs = [filler, first, last] if distance == 1 else [first, filler, last]
    return Document(kind, pairs, wrong, distance)


def model(document_level: bool) -> dict[str, Any]:
    whole = {"kind": "encoder-decoder", "width": 64, "embed": {"positions": "sinusoidal"}}
    attention, ffn = {"kind": "attention", "heads": 4}, {"kind": "ffn", "hidden": 128}
    context, wiring = {"kind": "context-attention", "heads": 4}, "pre-norm"
    reads = {"wiring": wiring, "mixer": attention, "channel": ffn}
    causal = attention | {"pattern": "causal"}
    if not document_level:
        writes = {"wiring": wiring, "mixer": causal, "cross": attention, "channel": ffn}
        return whole | {"encoder": [reads | {"repeat": 2}], "decoder": [writes | {"repeat": 2}]}
    first = {"wiring": wiring, "mixer": causal, "cross": context}
    second = {"wiring": wiring, "cross": attention, "channel": ffn}
    encoders = {"encoder": [reads | {"repeat": 2, "cross": context}], "context": [reads]}
    return whole | encoders | {"decoder": [first, second] * 2}


def fit(folder: Path, name: str, context: Any, document_level: bool) -> Any:
    """Train on the documents of train.tsv: lines of source and target, a blank line after each document."""
    recipe = {
        "data": {"train": str(folder / "train.tsv"), "valid": str(folder / "valid.tsv"), "max_tokens": 64},
        "tokenizer": {"vocab": 420},
        "task": {"kind": "translation", "context": context},
        "model": model(document_level),
        "batch": {"rows": 8, "row": 128, "source_row": 256},
        "schedule": {"kind": "constant", "peak": 0.003, "warmup": 50},
        "steps": STEPS,
        "save": {"every": STEPS, "keep": 1},
        "validate": {"every": STEPS, "sentences": 0},
        "average": 0,
        "device": "cpu",
        "precision": "fp32",
        "output": str(folder / name),
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return ayn.load(train(load_recipe(path)).model)


def write(path: Path, documents: list[Document]) -> None:
    blocks = ["".join(f"{source}\t{target}\n" for source, target in one.pairs) for one in documents]
    path.write_text("\n".join(blocks), encoding="utf-8")


def contrast(model: Any, tests: list[Document], given: int) -> list[bool]:
    """Whether the right translation is more probable than the wrong one, with `given` sentences of context."""
    before = [one.pairs[-1 - given : -1] for one in tests]
    sources, right = ([one.pairs[-1][side] for one in tests] for side in (0, 1))
    context: dict[str, Any] = {}
    if given and model.context is not None:
        context["context"] = [[source for source, _ in some] for some in before]
        if model.context.target:
            context["target_context"] = [[target for _, target in some] for some in before]
    good, bad = (model.score(sources, targets, **context) for targets in (right, [one.wrong for one in tests]))
    return [a > b for a, b in zip(good, bad, strict=True)]


def generate(model: Any, tests: list[Document]) -> list[bool]:
    """Whether the last sentence of each document is translated right, by greedy decoding."""
    context = CONTEXT if model.context is not None else None
    lines = [line for one in tests for line in (*(source for source, _ in one.pairs), "")]  # blank: the next document
    found = model.translate(lines, context=context, method="greedy")
    return [found[4 * n + 2] == one.pairs[-1][1] for n, one in enumerate(tests)]


def percent(right: list[bool]) -> float:
    return 100 * sum(right) / len(right)


def main() -> None:
    began = time.process_time()
    dice = random.Random(5)
    documents = [document(dice, dice.choice(KINDS)) for _ in range(DOCUMENTS)]
    known = {tuple(one.pairs) for one in documents}
    tests: list[Document] = []
    while len(tests) < TESTS:
        one = document(dice, KINDS[len(tests) % len(KINDS)])
        if tuple(one.pairs) not in known:
            tests.append(one)
    systems = {
        "no context": (None, False),
        "concatenation, 3-to-1": (CONTEXT, False),
        "concatenation, 3-to-3": ({"sentences": CONTEXT, "target": True}, False),
        "context encoder": (CONTEXT, True),
    }
    curves: dict[str, list[float]] = {}
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write(folder / "train.tsv", documents)
        write(folder / "valid.tsv", documents[:30])
        for name, (context, document_level) in systems.items():
            system = fit(folder, name.replace(" ", "-"), context, document_level)
            curves[name] = [percent(contrast(system, tests, given)) for given in range(CONTEXT + 1)]
            judged, written = contrast(system, tests, CONTEXT), generate(system, tests)
            each = [percent([r for r, one in zip(judged, tests, strict=True) if one.kind == kind]) for kind in KINDS]
            rows.append([name, *each, percent(judged), percent(written)])
    print(f"\n{'prefers the right one, %':24}" + "".join(f"{kind:>10}" for kind in (*KINDS, "all", "generated")))
    for name, *figures in rows:
        print(f"{name:24}" + "".join(f"{figure:10.1f}" for figure in figures))
    print(f"\n{'sentences of context':24}" + "".join(f"{given:10}" for given in range(CONTEXT + 1)))
    for name, figures in curves.items():
        print(f"{name:24}" + "".join(f"{figure:10.1f}" for figure in figures))
    print(f"{time.process_time() - began:.0f} s of CPU time")
    plot(curves)


def plot(curves: dict[str, list[float]]) -> None:
    """How often the right translation is preferred, by the number of sentences that are read before."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "document"
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(figsize=(7, 3))
    for (name, figures), style in zip(curves.items(), ("k:", "--", "-.", "-"), strict=True):
        axes.plot(range(len(figures)), figures, style, marker="o", label=name)
    axes.set_xticks(range(CONTEXT + 1))
    axes.set_xlabel("sentences of context")
    axes.set_ylabel("prefers the right one, %")
    axes.set_ylim(40, 103)
    axes.legend()
    chart.tight_layout()
    chart.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
