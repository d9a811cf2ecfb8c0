"""BLEU of one or more translators on the same sentences of UD-PUD and newstest, greedy, without protected spans.

    python recipes/translator/validate.py MODEL … --data DATA [--sentences 150] [--device cuda]

A MODEL is a model folder, a snapshot (snapshot.py) or `translator`, the one that ships. `--data` holds mt/ and
corpora/. The given number of sentences of each set, evenly spaced. sacreBLEU, `tok:13a`, Chinese `tok:zh`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

import snapshot

from allyouneed.apps.translate.translator import Translator
from allyouneed.folder import Folder
from allyouneed.metrics.translation import evaluate
from allyouneed.models import resolve
from bench.translation.quality import data

NEWEST = {"de": "newstest2018", "fr": "newstest2014", "zh": "newstest2019"}


def load(name: str, device: str) -> Translator:
    path = Path(resolve(name))
    folder = snapshot.restore(path)[0] if (path / snapshot.INDEX).is_file() else Folder.load(path)
    folder.model.to(device)
    return Translator(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--sentences", type=int, default=150)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    models = {name: load(name, given.device) for name in given.models}
    print(f"BLEU, {given.sentences} sentences of each set, greedy\n")
    print("| set | direction | " + " | ".join(Path(name).name for name in models) + " |")
    print("|---|---|" + "---:|" * len(models))
    for one in data.SETS:
        for direction in data.DIRECTIONS:
            other = direction[direction[0] == "en"]
            if one.name not in ("ud-pud", NEWEST[other]):
                continue
            pairs = data.spread(data.test_pairs(given.data, one, direction), given.sentences)
            if not pairs:
                continue
            sources, references = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            row = []
            for model in models.values():
                texts = model.translate(sources, direction[1], from_=direction[0], method="greedy", protect=False)
                row.append(f"{evaluate(texts, references, direction[1], resamples=0).bleu:.1f}")
            print(f"| {one.name} | {direction[0]}→{direction[1]} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
