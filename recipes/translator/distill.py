"""Training pairs made by a model: sequence-level distillation (Kim & Rush 2016) and back-translation (Sennrich 2016).

    python recipes/translator/distill.py --model teacher/model --data FOLDER [--part 0/2] [--seconds 200] [--device cpu]

Translates one side of the pairs in FOLDER, in all six directions, and the monolingual {en,de,fr,zh}.mono.txt.gz; the
best texts for the student come first, so that `--seconds` may end it anywhere. Written, for every direction:
XX-YY.distilled/PART.tsv.gz (a real source, the model's translation) and XX-YY.back/PART.tsv.gz (the model's
translation as the source of a real target). Dropped: what the rules of prepare.py drop, translations without an end,
and the `--worst` share by mean log-probability of each direction.
"""

from __future__ import annotations

import argparse
import gzip
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from prepare import reason_to_drop

from allyouneed.apps.translate.translator import Translator
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.frames import forbidden_tokens
from allyouneed.interop.load import load
from allyouneed.nn.models.precision import widen

LANGUAGES = ("de", "fr", "zh")
# domain and the share of its pairs to translate, in the order of use
DOMAINS = {"general": 1.0, "everyday": 1.0, "stories": 0.7, "parliament": 0.5, "manual": 0.3, "law": 0.3}
LONGEST = 120  # tokens of a source
SLICE = 48_000  # sentences decoded by one call


class Text(NamedTuple):
    text: str
    source: str  # language
    target: str
    back: bool  # its translation becomes the source of a pair


def read(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return file.read().splitlines()


def monolingual(data: Path) -> Iterator[Text]:
    """German, French and Chinese text becomes English twice: as a source to learn from, and as a target to reach."""
    for language in LANGUAGES:
        for line in read(data / f"{language}.mono.txt.gz"):
            yield Text(line, language, "en", True)
    for number, line in enumerate(read(data / "en.mono.txt.gz")):
        for other in ("fr", "zh", "de")[: 2 + number % 2]:  # most for French, which has little text of its own
            yield Text(line, "en", other, True)


def parallel(data: Path, domain: str, share: float) -> Iterator[Text]:
    for language in LANGUAGES:
        lines = read(data / f"en-{language}.{domain}.tsv.gz")
        for line in lines[: math.ceil(len(lines) * share)]:
            english, _, other = line.partition("\t")
            yield Text(english, "en", language, False)
            yield Text(other, language, "en", False)


def texts(data: Path, part: int, parts: int, only_monolingual: bool) -> Iterator[list[Text]]:
    """Slices of equal size; of each stage in random order, so that all directions advance together."""
    domains = {} if only_monolingual else DOMAINS
    for stage in (monolingual(data), *(parallel(data, *domain) for domain in domains.items())):
        own = list(dict.fromkeys(stage))[part::parts]
        random.Random(0).shuffle(own)
        yield from (own[n : n + SLICE] for n in range(0, len(own), SLICE))


class Teacher:
    def __init__(self, folder: str, device: str, budget: int) -> None:
        found = load(folder, as_stored=True)
        if device == "cuda":  # a CPU runs int8 as it is, several times as fast
            found.model = widen(found.model).to(device, torch.bfloat16)
        self.translator = Translator(found)
        self.source, self.target = self.translator.source, self.translator.target
        self.frames = {to: self.translator.frame(to) for to in ("en", *LANGUAGES)}
        target = self.target
        self.engine = Engine(
            self.translator.model, target.bos, target.eos, self.source.pad, forbidden_tokens(target), budget=budget
        )

    def translate(self, some: list[Text]) -> Iterator[tuple[Text, str, float]]:
        """Greedy translations with their mean log-probability; without the ones that did not end."""
        ids = self.source.encode_batch([one.text for one in some])
        kept = [n for n, one in enumerate(ids) if 0 < len(one) <= LONGEST]
        framed = [self.frames[some[n].target].source(ids[n]) for n in kept]
        decoding = Decoding(method="greedy", extra=30, loops=4)
        found = [best for best, *_ in self.engine.generate(framed, decoding)]
        done = [(n, one) for n, one in zip(kept, found, strict=True) if one.finished and not one.repeats]
        for (n, one), text in zip(done, self.target.decode_batch([one.tokens for _, one in done]), strict=True):
            yield some[n], text, one.log_prob / (len(one.tokens) + 1)


def usable(one: Text, translation: str) -> bool:
    english, other, language = (
        (one.text, translation, one.target) if one.source == "en" else (translation, one.text, one.source)
    )
    return reason_to_drop(english, other, language, "distilled") is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th text, for several processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no slice after this time")
    parser.add_argument("--only-monolingual", action="store_true", help="no text of the pairs")
    parser.add_argument("--tag", default="", help="begins every back-translated source (Caswell et al. 2019)")
    parser.add_argument("--worst", type=float, default=0.05, help="share of a direction to drop, by log-probability")
    parser.add_argument("--budget", type=int, default=64 * 1024, help="tokens decoded together")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    began = time.perf_counter()
    teacher = Teacher(given.model, given.device, given.budget)
    rows: dict[tuple[str, str, str], list[tuple[float, str, str]]] = {}
    counts: Counter[str] = Counter()
    for some in texts(given.data, part, parts, given.only_monolingual):
        if time.perf_counter() - began > given.seconds:
            break
        for one, translation, score in teacher.translate(some):
            counts["translated"] += 1
            if not usable(one, translation):
                counts["dropped"] += 1
                continue
            rows.setdefault((one.source, one.target, "distilled"), []).append((score, one.text, translation))
            if one.back:
                pair = (score, given.tag + translation, one.text)
                rows.setdefault((one.target, one.source, "back"), []).append(pair)
        counts["read"] += len(some)
        print(f"{time.perf_counter() - began:.0f} s {dict(counts)}", flush=True)
    for (source, target, kind), found in rows.items():
        found.sort(reverse=True)
        kept = found[: len(found) - int(given.worst * len(found))]
        random.Random(0).shuffle(kept)
        text = "".join(f"{a}\t{b}\n" for _, a, b in kept)
        path = given.data / f"{source}-{target}.{kind}" / f"{part}.tsv.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode(), 1, mtime=0))
        mean = sum(score for score, *_ in kept) / max(1, len(kept))
        print(f"{path.parent.name}/{path.name}: {len(kept)} pairs, mean log-probability {mean:.3f}")


if __name__ == "__main__":
    main()
