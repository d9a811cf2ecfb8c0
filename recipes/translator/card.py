"""Model card, licence and the tables of the documentation, from figures and the list of sources.

    python recipes/translator/card.py --model FOLDER --figures FIGURES.json [--old OLD.json] [--calibration CAL.json]

`--figures`, `--old`: written by `bench/translation/translator_quality.py --json`; `--calibration`: by calibrate.py.
Writes README.md and LICENSE.md of the model folder, docs/results/translator-quality.md, and what is between
`<!-- NAME -->` and `<!-- /NAME -->` in the pages of PAGES. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from calibrate import markdown as calibration_table
from pairs import read_sources

from allyouneed.folder import Folder
from bench.translation.quality import tables

ROOT = Path(__file__).parents[2]
PAGES = ("docs/translator.md", "docs/zh/translating.md")
RESULTS = "docs/results/translator-quality.md"
NEWS = "newstest"
TRAINED = "## As it was trained"
NAMES = {"tatoeba": "Tatoeba", "ud-pud": "UD-PUD", "news": "news", "tico19": "TICO-19"}

HEAD = """# Quality of the shipped translator

Measured by `python bench/translation/translator_quality.py`, written by `recipes/translator/card.py`. Everything is
translated as a user gets it: int8, the model's own decoding, protected spans.

"""

CARD = """# translator

English ↔ Chinese, German and French: the translator that comes with allyouneed.

- {parameters:,} parameters, encoder-decoder, {size:.1f} MB of weights, stored as {stored}
- licence of the weights: CC BY-SA 4.0, see [LICENSE.md](LICENSE.md), which names every source and its licence; the code
  of allyouneed has another, Apache-2.0
- data: {sources} sources under free licences: Tatoeba (CC BY 2.0 FR), parliament, laws, manuals, interfaces, stories,
  dictionaries, and sentences of our own (`recipes/terms`, `recipes/translator/augmentation`); sentences of the test
  sets are in no training file
- good at: everyday sentences, manuals and interfaces, parliament and administration; numbers, dates, URLs, placeholders
  and markup come through
- limits: newspapers and encyclopaedias come out understandable rather than well; names, idioms, poetry, slang and
  specialist terms are often wrong, Chinese more so than German and French. A sentence of more than {max_tokens} tokens
  is translated in parts, each without regard to the others. Between two languages other than English it goes through
  English. It can be confidently wrong: do not use it where that does harm

## Scores

What ships, as it ships (`python bench/translation/translator_quality.py`):

{scores}
{trained}"""

LICENCE = """# Licence of the weights

The files of this folder (`model.safetensors`, `tokenizer.json`, `languages.json`, `config.json`) are published under
Creative Commons Attribution-ShareAlike 4.0 International (CC BY-SA 4.0),
<https://creativecommons.org/licenses/by-sa/4.0/>, as far as the authors of allyouneed hold rights in them. The code of
allyouneed has another licence, Apache-2.0.

You may use, change and share them, also commercially. If you pass them on, or a model fine-tuned from them, name
allyouneed and this licence, and pass on the list below, for example:

> Based on the translator of allyouneed (CC BY-SA 4.0), trained on the sources listed in its LICENSE.md.

Translations that the model writes need no such note.

The weights were trained on the texts below. Each text stays under its own licence; none of it is in this folder. Some
of these licences (GPL, GFDL, CC BY-SA) ask that adaptations of the text are shared alike. Whether weights are such an
adaptation is not settled; if it matters to you, train without these sources: delete their rows in
`recipes/translator/sources.tsv`, leave the dictionaries (`words`) out, and the recipe does the rest.

| source | used as | domain | licence | origin |
|---|---|---|---|---|
{rows}
"""


def licence() -> str:
    columns = ("source", "use", "domain", "licence", "origin")
    cells = ([row[name].replace("|", "\\|") for name in columns] for row in read_sources())
    return LICENCE.format(rows="\n".join(f"| {' | '.join(row)} |" for row in cells))


def means(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """BLEU by set and direction; the news sets as one, their mean."""
    by_set: dict[str, dict[str, list[float]]] = {}
    for name, by_direction in found["sets"].items():
        kind = "news" if name.startswith(NEWS) else name
        for direction, one in by_direction.items():
            by_set.setdefault(kind, {}).setdefault(direction, []).append(one["bleu"])
    return {
        name: {direction: sum(some) / len(some) for direction, some in by_direction.items()}
        for name, by_direction in by_set.items()
    }


def summary(found: dict[str, Any], old: dict[str, Any] | None) -> str:
    """BLEU by direction; in brackets, of the model before."""
    new, before = means(found), means(old) if old else {}
    chosen = [name for name in NAMES if name in new]
    directions = list(new[chosen[0]])
    rows = []
    for direction in directions:
        cells = []
        for name in chosen:
            if direction not in new[name]:
                cells.append("–")
                continue
            was = before.get(name, {}).get(direction)
            cells.append(f"**{new[name][direction]:.1f}**" + ("" if was is None else f" ({was:.1f})"))
        rows.append([tables.arrow(direction), *cells])
    return tables.table(["BLEU", *(NAMES[name] for name in chosen)], rows)


def fill(path: Path, parts: dict[str, str]) -> None:
    """Replace what is between the marks of each part that the page has."""
    text = path.read_text(encoding="utf-8")
    for name, content in parts.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = pattern.sub(lambda found, made=content: f"{found[1]}\n{made}\n{found[2]}", text)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--figures", required=True, type=Path)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--calibration", type=Path)
    given = parser.parse_args()
    found, old, calibration = (
        None if path is None else json.loads(path.read_text(encoding="utf-8"))
        for path in (given.figures, given.old, given.calibration)
    )
    whole = tables.markdown(found)
    parts = {
        "summary": summary(found, old),
        **{name: make(found) for name, make in tables.PARTS.items() if found.get(name)},
    }
    if "numbers" in found:
        parts["numbers-total"] = tables.numbers(found | {"numbers": {"all": found["numbers"]["all"]}})
    if calibration is not None:
        parts["calibration"] = calibration_table(calibration)
        whole += f"\nConfidence, on test data that it was not fitted on:\n\n{parts['calibration']}"
    folder = Folder.load(given.model)
    config: Any = folder.model.config
    before = folder.card
    trained = (
        before[before.index(TRAINED) :]
        if TRAINED in before
        else f"\n{TRAINED}\n\n{before.partition(chr(10))[2].strip()}\n"
    )
    card = CARD.format(
        parameters=config.cost().parameters,
        size=(given.model / "model.safetensors").stat().st_size / 1e6,
        stored="int8",
        sources=len(read_sources()),
        max_tokens=folder.max_tokens,
        scores=whole,
        trained=trained.replace("\n# ", "\n### "),
    )
    (given.model / "README.md").write_text(card, encoding="utf-8")
    (given.model / "LICENSE.md").write_text(licence(), encoding="utf-8")
    for page in PAGES:
        fill(ROOT / page, parts)
    (ROOT / RESULTS).write_text(HEAD + whole, encoding="utf-8")


if __name__ == "__main__":
    main()
