"""How often the language of a short text is detected, also of texts with words of another language.

    python bench/translation/detection.py --data DATA                       # the shipped detector
    python bench/translation/detection.py --data DATA --detector OLD.json   # another
    python bench/translation/detection.py --data DATA --learn               # its words again, from the Tatoeba files

DATA: the corpora of recipes/translator. The sentences are the test files of Tatoeba, whole and their first three words
(Chinese: characters), and our own with loan words and names.
"""

from __future__ import annotations

import argparse
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path

from allyouneed.data.language_detection import LanguageDetector
from allyouneed.files import sha256

SHIPPED = Path(__file__).parents[2] / "src/allyouneed/models/translator/languages.json"
SIDES = {"de": ("en-de", 1), "en": ("en-de", 0), "fr": ("en-fr", 1), "zh": ("zh-en", 0)}  # folder and column
MIXED = {
    "de": """Der Newsletter wurde gestern verschickt.
Mein Handy ist im Flugmodus.
Das Teammeeting beginnt um neun.
Wer hat den Bug gefixt?
Ich habe den Song gestreamt.
Der Trailer ist ziemlich cool.
Unsere Website wird gerade gerelauncht.
Das Ticketing läuft über ein Tool.
Wir skypen morgen mit dem Support.
Die Hotline war besetzt.
Der Account wurde gehackt.
Das Layout ist noch nicht final.
Er joggt jeden Morgen im Park.
Sie arbeitet als Freelancerin.
Das Interview wurde live gestreamt.
Wir müssen das Budget tracken.
Hast du das Video geliked?
Der Download ist fertig.
Das Business Lunch war nett.
Der Barkeeper mixt einen Cocktail.""",
    "fr": """Le briefing commence à neuf heures.
Mon smartphone est en mode avion.
Le streaming ne marche pas.
Le podcast du week-end est en ligne.
Elle a fait un selfie avec la star.
Le football est un sport populaire.
Il travaille en freelance.
Le hacker a piraté le serveur.
Le casting du film est parfait.
On se fait un fast-food ce soir ?
Le check-in est à midi.
Le barman prépare un cocktail.
La playlist est trop longue.
Il a spoilé la fin du film.
Le sweat est en solde.
Le trailer est vraiment cool.
Le dressing est plein.
Le budget marketing est serré.
Il faut upgrader le serveur.
Le management a dit non.""",
    "en": """Her apartment is full of kitsch.
The concierge called a taxi.
The Gesundheit joke was bad.
The Oktoberfest begins in September.
He plays the glockenspiel.
A pretzel and a lager, please.
She wore a beige ensemble.
The ballet was a tour de force.
The Élysée published a communiqué.
Volkswagen and Mercedes are German brands.
We visited the Louvre and the Sorbonne.
The angst of the poet is real.
The hors d'oeuvres were good.
Wolfgang Schäuble was a minister.
The chef made a soufflé.
The hamster ate the muesli.
The poltergeist broke a vase.
The entrepreneur met a sommelier.
The Frankfurter Allgemeine is a newspaper.
It was a cliché.""",
    "zh": """我的iPhone坏了。
请把PDF发给我。
这个App很好用。
他在Google工作。
我们用Zoom开会。
Tom和Mary在吃饭。
我想学Python。
他买了一台MacBook Pro。
请打开Microsoft Word。
这个bug修好了吗？""",
}


def read(data: Path, name: str, kind: str) -> list[str]:
    folder, column = SIDES[name]
    with gzip.open(data / "mt" / folder / f"tatoeba.{kind}.tsv.gz", "rt", encoding="utf-8") as file:
        return [line.rstrip("\n").split("\t")[column] for line in file]


def accuracy(detector: LanguageDetector, texts: Mapping[str, Sequence[str]]) -> dict[str, float]:
    return {name: sum(detector.detect(one) == name for one in some) / len(some) for name, some in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--detector", type=Path, default=SHIPPED)
    parser.add_argument("--learn", action="store_true", help="learn its words and write it into its model folder")
    given = parser.parse_args()
    detector = LanguageDetector.load(given.detector)
    if given.learn:
        before, about = sha256(given.detector), given.detector.with_name("config.json")
        detector = detector.with_words({name: read(given.data, name, "train") for name in SIDES})
        detector.save(given.detector)
        about.write_text(about.read_text("utf-8").replace(before, sha256(given.detector)), "utf-8")
    whole = {name: read(given.data, name, "test") for name in SIDES}
    short = {n: [one[:3] if n == "zh" else " ".join(one.split()[:3]) for one in some] for n, some in whole.items()}
    mixed = {name: lines.splitlines() for name, lines in MIXED.items()}
    print(f"| right language | {' | '.join(SIDES)} |\n|---|{'---:|' * len(SIDES)}")
    for label, texts in (("sentences", whole), ("their first three words", short), ("with loan words, names", mixed)):
        found = accuracy(detector, texts)
        print(f"| {label} | {' | '.join(f'{100 * found[name]:.2f} %' for name in SIDES)} |")


if __name__ == "__main__":
    main()
