"""The joint tokenizer of teacher and student, learnt from a balanced sample: little of the manuals, Chinese twice.

python recipes/translator/tokenizer.py --data runs/translator --output runs/translator/teacher/tokenizer
"""

from __future__ import annotations

import argparse
import gzip
import random
import tempfile
from pathlib import Path

from allyouneed.data.files.filters import Filters
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies
from allyouneed.files import write_folder

PAIRS = {"general": 60_000, "everyday": 40_000, "stories": 40_000, "parliament": 60_000, "law": 15_000}
PAIRS |= {"scripture": 5_000, "dictionary": 20_000, "manual": 60_000, "interface": 20_000, "copy": 10_000}
REPEATS = {"zh": 2, "de": 1, "fr": 1}  # texts are counted this often


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--vocab", type=int, default=32_000)
    given = parser.parse_args()
    files = []
    with tempfile.TemporaryDirectory() as work:
        for language, repeats in REPEATS.items():
            sample: list[str] = []
            for domain, pairs in PAIRS.items():
                path = given.data / f"en-{language}.{domain}.tsv.gz"
                if path.is_file():
                    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
                        lines = file.readlines()
                    sample += random.Random(0).sample(lines, min(pairs, len(lines)))
            for number in range(repeats):
                path = Path(work) / f"{language}.{number}.tsv"
                path.write_text("".join(sample), encoding="utf-8", newline="\n")
                files.append(PairFiles(path=(path,), **{"from": "en", "to": language}))
                files.append(PairFiles(path=(path,), columns=(1, 0), **{"from": language, "to": "en"}))
        found = Vocabularies.train(TokenizerConfig(kind="bpe", vocab=given.vocab), files, Filters(), [])
        given.output.parent.mkdir(parents=True, exist_ok=True)
        write_folder(given.output, found.save)


if __name__ == "__main__":
    main()
