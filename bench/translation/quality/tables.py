"""The figures of translator_quality.py as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Figures = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def arrow(direction: str) -> str:
    return direction.replace("-", "→")


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "–"


def quality(found: Figures) -> str:
    directions = list(dict.fromkeys(name for one in found["sets"].values() for name in one))
    rows = []
    for name, by_direction in found["sets"].items():
        cells = []
        for direction in directions:
            one = by_direction.get(direction)
            half = (one["bleu_interval"][1] - one["bleu_interval"][0]) / 2 if one else 0
            cells.append(f"{one['bleu']:.2f} ± {half:.1f} / {one['chrf']:.1f}" if one else "–")
        rows.append([name, *cells])
    first = next(iter(found["sets"].values()))
    signatures = {one["bleu_signature"] for one in first.values()} | {one["chrf_signature"] for one in first.values()}
    text = "BLEU ± 95 % interval / chrF:\n\n" + table(["set", *map(arrow, directions)], rows)
    text += "\n" + "\n".join(f"* `{one}`" for one in sorted(signatures)) + "\n"
    cosines = [
        [name, *(f"{one[d]['cosine']:.3f}" if "cosine" in one.get(d, {}) else "–" for d in directions)]
        for name, one in found["sets"].items()
    ]
    if any(cell != "–" for row in cosines for cell in row[1:]):
        text += "\nMean cosine of sentence embeddings, translation against reference:\n\n"
        text += table(["set", *map(arrow, directions)], cosines)
    return text


def faults(found: Figures) -> str:
    names = [name for name in next(iter(found["faults"].values())) if name != "sentences"]
    rows = [
        [arrow(direction), f"{one['sentences']:,}", *(share(one[name], one["sentences"]) for name in names)]
        for direction, one in found["faults"].items()
    ]
    return table(["all sets", "sentences", *names], rows)


def order(name: str) -> int:
    """Kinds first, then directions, then all."""
    return 2 if name == "all" else int(len(name) == 5 and name[2] == "-")


def numbers(found: Figures) -> str:
    rows = [
        [
            arrow(name),
            f"{one['sentences']:,}",
            share(one["value"], one["sentences"]),
            share(one["local"], one["sentences"]),
        ]
        for name, one in sorted(found["numbers"].items(), key=lambda item: order(item[0]))
    ]
    return table(["numbers", "sentences", "right value", "in the target's notation"], rows)


def spans(found: Figures) -> str:
    rows = [[kind, f"{count:,}", f"{percent:.1f} %"] for kind, (percent, count) in found["spans"].items()]
    return table(["span", "sentences", "survives"], rows)


def words(found: Figures) -> str:
    rows = [
        [
            arrow(name),
            f"{one['words']:,}",
            share(one["in the dictionary"], one["words"]),
            share(one["same case"], one["words"]),
        ]
        for name, one in found["words"].items()
    ]
    return table(["single words", "words", "in the dictionary", "in the same case"], rows)


def cases(found: Figures) -> str:
    rows = [
        [
            arrow(name),
            f"{one['normal']:.2f}",
            f"{one['upper']:.2f} ({one['upper'] - one['normal']:+.2f})",
            f"{one['lower']:.2f} ({one['lower'] - one['normal']:+.2f})",
        ]
        for name, one in found["cases"].items()
    ]
    return table(["Tatoeba, BLEU without case", "normal", "ALL CAPS", "all lower"], rows)


def traditional(found: Figures) -> str:
    rows = [
        [name, f"{one['simplified']:.2f}", f"{one['traditional']:.2f} ({one['traditional'] - one['simplified']:+.2f})"]
        for name, one in found["traditional"].items()
    ]
    return table(["zh→en, BLEU", "simplified", "traditional"], rows)


def speed(found: Figures) -> str:
    rows = [
        [name, f"{one['new']:.1f}", f"{one['old']:.1f}", f"**{one['ratio']:.2f}**"]
        for name, one in found["speed"].items()
    ]
    return table(["speed, 2 threads, sentences per second", "this model", "previous model", "ratio"], rows)


PARTS = {
    "sets": quality,
    "faults": faults,
    "numbers": numbers,
    "spans": spans,
    "words": words,
    "cases": cases,
    "traditional": traditional,
    "speed": speed,
}


def markdown(found: Figures) -> str:
    return "\n".join(make(found) for name, make in PARTS.items() if found.get(name))
