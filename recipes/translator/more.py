"""Names and small general sources as training files, from the files of more-sources.tsv.

    python recipes/translator/more.py --data FOLDER --output runs/translator

`--data` holds en-LL.SOURCE.tsv.gz (English first) of the sources with the domains `names` and `extra`. Written:
en-LL.names.tsv.gz and en-LL.extra.tsv.gz, without repeats, shuffled.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
from pathlib import Path

from prepare import normalize, reason_to_drop, write

SOURCES = Path(__file__).with_name("more-sources.tsv")
DOMAINS = ("names", "extra")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    given = parser.parse_args()
    with SOURCES.open(encoding="utf-8", newline="") as file:
        sources = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    for language in ("de", "fr", "zh"):
        for domain in DOMAINS:
            pairs = []
            for row in (row for row in sources if row["domain"] == domain):
                path = given.data / f"en-{language}.{row['source']}.tsv.gz"
                if not path.is_file():
                    continue
                for line in gzip.decompress(path.read_bytes()).decode("utf-8").split("\n"):
                    english, _, other = line.partition("\t")
                    pair = normalize(english), normalize(other)
                    # names have another length in every language
                    if all(pair) and (domain == "names" or reason_to_drop(*pair, language, "general") is None):
                        pairs.append(pair)
            pairs = list(dict.fromkeys(pairs))
            random.Random(0).shuffle(pairs)
            write(given.output / f"en-{language}.{domain}.tsv.gz", pairs)
            print(f"en-{language}.{domain}: {len(pairs):,} pairs")


if __name__ == "__main__":
    main()
