"""The shipped translator: data, scores, folder. docs/translator.md describes the whole process.

    python bench/translation/translator.py prepare --data FOLDER --output runs/translator [--valid 200] [--encode]
    allyouneed train runs/translator/translator.yaml
    allyouneed train runs/translator/translator-terms.yaml
    python bench/translation/translator.py score --model runs/translator/terms/model --data runs/translator \
        [--set test] [--beam 4]
    python bench/translation/translator.py ship --model runs/translator/terms/model --data runs/translator
    python bench/translation/translator.py back --model runs/translator/run/model --data runs/translator --to zh
    python bench/translation/translator.py adapt --data FOLDER --output runs/adapt [--pairs 2000]

FOLDER holds mt/{zh-en,en-de,en-fr}/tatoeba.{train,valid,test}.tsv.gz and tatoeba-laser.test.tsv.gz. Nothing else is
read except our own recipes/terms: Tatoeba is CC BY 2.0 FR, and so is the trained model. Only `adapt` reads
mt/en-de/multi30k.*, to show the benefit of adapting; that model is not shipped.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from allyouneed.apps.translate.translator import Translator
from allyouneed.config import parse
from allyouneed.folder import Folder
from allyouneed.metrics.translation import evaluate
from allyouneed.models import HERE, TRANSLATOR
from allyouneed.nn.models.precision import quantize

ROOT = Path(__file__).parents[2]
RECIPES = [ROOT / "recipes" / name for name in ("translator.yaml", "translator-terms.yaml")]
TERMS = ROOT / "recipes" / "terms"
SOURCES = {"zh": ("zh-en", 0, 1), "de": ("en-de", 1, 0), "fr": ("en-fr", 1, 0)}  # folder, its column, English's column
UNSEEN = ("机器学习很有趣", "机器学习很有趣。")  # the example that users try first must not be in the training data
VALIDATION_SEED = {"valid": "tatoeba.valid", "test": "tatoeba.test", "laser": "tatoeba-laser.test"}
LONGEST = 40  # tokens of a sentence that is translated whole; 1 in 400 training sentences is longer
LIMIT = 25_000_000  # bytes of the shipped weights
Pairs = list[tuple[str, str]]  # English first


def read(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return [line.rstrip("\r\n").split("\t") for line in file]


def write(path: Path, pairs: Iterable[tuple[str, str]]) -> None:
    text = "".join(f"{here}\t{there}\n" for here, there in pairs)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same pairs give the same file


def plain(text: str) -> str:
    """Normalise as the data's own splits do: no case, punctuation or spaces."""
    return "".join(character for character in text.lower() if character.isalnum())


def of(data: Path, language: str, name: str) -> Pairs:
    folder, own, english = SOURCES[language]
    return [(row[english], row[own]) for row in read(data / "mt" / folder / f"{name}.tsv.gz")]


def terms() -> Iterator[dict[str, str]]:
    """Our own sentences, each in four languages: every term of recipes/terms in every sentence."""
    rows = [
        [line.split("\t") for line in (TERMS / f"{name}.tsv").read_text("utf-8").splitlines()]
        for name in ("terms", "sentences")
    ]
    for chinese, english, german, dative, french, gender in rows[0]:
        article, bare = ("l'", french[2:]) if french.startswith("l'") else french.split(" ", 1)
        of, to = {"le": ("du ", "au "), "la": ("de la ", "à la "), "l'": ("de l'", "à l'")}[article]
        words = {
            "zh": chinese, "en": english, "En": english[0].upper() + english[1:],
            "de": german, "De": german[0].upper() + german[1:], "dem": dative,
            "fr": french, "Fr": french[0].upper() + french[1:], "bare": bare, "du": of + bare, "au": to + bare,
            "e": "e" if gender == "f" else "",
        }  # fmt: skip
        for sentence in rows[1]:
            yield dict(zip(("zh", "en", "de", "fr"), (text.format(**words) for text in sentence), strict=True))


def held_out(sentence: dict[str, str]) -> bool:
    """One in twenty is held out, `UNSEEN` included."""
    return sentence["zh"] in UNSEEN or int(hashlib.md5(sentence["zh"].encode()).hexdigest(), 16) % 20 == 0


def prepare(given: argparse.Namespace) -> None:
    """English first in every file. Each corpus keeps its own held-out sentences out of its train file; here those of
    the others go too, for a model of all of them would meet them on its English side."""
    data, output = given.data, given.output
    output.mkdir(parents=True, exist_ok=True)
    known: set[tuple[str, str]] = set()
    for language in SOURCES:
        for name, file in VALIDATION_SEED.items():
            pairs = of(data, language, file)
            known |= {(side, plain(text)) for pair in pairs for side, text in zip(("en", language), pair, strict=True)}
            if name == "valid":
                write(output / f"en-{language}.valid-all.tsv.gz", pairs)
                pairs = sorted(pairs, key=lambda pair: hashlib.md5(pair[0].encode()).hexdigest())[: given.valid]
            write(output / f"en-{language}.{name}.tsv.gz", pairs)
    for language in SOURCES:
        before = of(data, language, "tatoeba.train")
        kept = [p for p in before if ("en", plain(p[0])) not in known and (language, plain(p[1])) not in known]
        kept = kept[:: given.every]
        write(output / f"en-{language}.train.tsv.gz", kept)
        print(f"en-{language}: {len(before):,} training pairs, {len(kept):,} kept")
    ours = list(terms())
    for language in SOURCES:
        for name, wanted in (("terms", False), ("terms-test", True)):
            write(
                output / f"en-{language}.{name}.tsv.gz",
                [(s["en"], s[language]) for s in ours if held_out(s) is wanted],
            )
    print(f"our own: {len(ours):,} sentences, {sum(map(held_out, ours))} held out")
    for recipe in RECIPES:
        shutil.copy(recipe, output)
    if given.encode:
        encode(output)
    for path in sorted(p for p in output.rglob("*") if p.is_file() and p.stat().st_size >= 100_000):
        print(f"{path.stat().st_size / 2**20:7.2f} MiB  {path.relative_to(output)}")
    print(f"{sum(p.stat().st_size for p in output.rglob('*') if p.is_file()) / 2**20:7.2f} MiB  in total")


def encode(folder: Path) -> None:
    """Tokenizer and token store, as `allyouneed train` makes them first, so that a GPU need not wait."""
    from allyouneed.data.batches.store import InputHashes
    from allyouneed.training import load_recipe
    from allyouneed.training.prepare import RunFolder, resolve
    from allyouneed.training.prepare import prepare as ready
    from allyouneed.training.reporting.progress import Reporter

    recipe = load_recipe(folder / "translator.yaml")
    run = RunFolder(recipe.output)
    with run.locked():
        run.open(resolve(recipe, InputHashes(run.data / "inputs.json")))
        ready(recipe, run, Reporter(None, recipe.task.loss_unit, recipe.task.has_perplexity))


def load(model: Path, device: str) -> Translator:
    return Translator(Folder.load(model, device))


def score(given: argparse.Namespace) -> dict[str, Any]:
    """BLEU and chrF of each direction, with sacreBLEU's signatures."""
    translator, found = load(given.model, given.device), {}
    print(f"| {given.set} | sentences | BLEU | chrF | signature |\n|---|---:|---:|---:|---|")
    for here, there in translator.folder.directions:
        other = there if here == "en" else here
        if here is None or other not in SOURCES:
            continue
        pairs = [tuple(row) for row in read(given.data / f"en-{other}.{given.set}.tsv.gz")][: given.limit]
        sources, references = zip(*(pair if here == "en" else pair[::-1] for pair in pairs), strict=True)
        began = time.perf_counter()
        options = {} if given.beam is None else {"beam": given.beam}
        texts = translator.translate(list(sources), there, from_=here, protect=False, **options)
        one = evaluate(texts, list(references), there, resamples=0)
        found[f"{here}-{there}"] = {
            "bleu": round(one.bleu, 2), "chrf": round(one.chrf, 2), "signature": one.bleu_signature,
            "chrf_signature": one.chrf_signature, "seconds": round(time.perf_counter() - began, 1),
        }  # fmt: skip
        print(f"| {here}→{there} | {len(pairs):,} | {one.bleu:.2f} | {one.chrf:.2f} | `{one.bleu_signature}` |")
    print(f"chrF: `{next(iter(found.values()))['chrf_signature']}`")
    if given.output is not None:
        given.output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return found


def back(given: argparse.Namespace) -> None:
    """Back-translation (Sennrich et al. 2016): English sentences of the other corpora, with a machine's translation.
    They help to translate *from* that language, since the target side is human text."""
    translator, to = load(given.model, given.device), given.to
    theirs = {english for english, _ in map(tuple, read(given.data / f"en-{to}.train.tsv.gz"))}
    rest = (r[0] for other in SOURCES if other != to for r in read(given.data / f"en-{other}.train.tsv.gz"))
    texts = list(dict.fromkeys(text for text in rest if text not in theirs))[: given.limit]
    began = time.perf_counter()
    found = translator.translate(texts, to, from_="en", beam=1)
    pairs = [(here, there) for here, there in zip(texts, found, strict=True) if there]
    write(given.data / f"en-{to}.back.tsv.gz", pairs)
    print(f"{len(pairs):,} sentences in {time.perf_counter() - began:.0f} s; now add to data.train of the recipe:")
    print(f"  - {{path: en-{to}.back.tsv.gz, columns: [1, 0], from: {to}, to: en, weight: 0.5}}")


CARD = """# translator

English ↔ Chinese, German and French, everyday sentences: the translator that comes with allyouneed.

- {parameters:,} parameters, encoder-decoder, stored as {stored}
- licence of the weights: CC BY 2.0 FR, as the data
- data: Tatoeba (tatoeba.org, CC BY 2.0 FR) and {terms:,} sentences of our own on science and engineering
  (`recipes/terms`); sentences of the test sets are in no training file
- limits: everyday sentences, one at a time; what has more than {max_tokens} tokens is cut between clauses. News, law,
  medicine and names it has not seen come out wrong, and so do text in capitals and single words; check numbers.
  Chinese is simplified; between two languages other than English it goes through English. It can be confidently
  wrong: do not use it where that does harm

## Scores

What ships, as it ships, on the Tatoeba test files: beam {beam}, sacreBLEU (chrF `{chrf}`)

| direction | BLEU | chrF | BLEU signature |
|---|---:|---:|---|
{rows}

## As it was trained

First stage (`recipes/translator.yaml`):

{first}

Second stage (`recipes/translator-terms.yaml`):

{trained}"""


def ship(given: argparse.Namespace) -> None:
    """The packaged folder: int8, with its scores; refused above the size limit."""
    folder = Folder.load(given.model)
    before = (given.data / "run" / "model" / "README.md").read_text(encoding="utf-8")
    trained = (folder.card or "").partition("\n- licence")
    folder.model = quantize(folder.model, given.to)
    folder.together, folder.max_tokens = 0, LONGEST  # trained on single sentences
    folder.save(given.into)
    size = (given.into / "model.safetensors").stat().st_size
    if size > LIMIT:
        raise SystemExit(f"{given.into}: {size:,} bytes of weights, more than the {LIMIT:,} that may ship")
    if given.scores is None:
        scores = score(argparse.Namespace(**{**vars(given), "model": given.into}))
    else:
        scores = json.loads(given.scores.read_text(encoding="utf-8"))
    config: Any = folder.model.config
    folder.card = CARD.format(
        parameters=config.cost().parameters, stored=given.to, max_tokens=folder.max_tokens, terms=len(list(terms())),
        beam=given.beam or folder.decoding.get("beam", 4), chrf=next(iter(scores.values()))["chrf_signature"],
        rows="\n".join(f"| {n} | {s['bleu']:.2f} | {s['chrf']:.2f} | `{s['signature']}` |" for n, s in scores.items()),
        first="\n".join(line for line in before.splitlines() if line.startswith(("- trained on", "- weights"))),
        trained=(trained[1] + trained[2]).lstrip().replace("## ", "### ").replace(f"{given.data.resolve()}/", ""),
    )  # fmt: skip
    folder.save(given.into)
    print(f"{given.into}: {size:,} bytes of weights")


def adapt(given: argparse.Namespace) -> None:
    """Benefit of a user's own pairs: image descriptions (Multi30k, en → de), a domain the translator has not seen."""
    from allyouneed.training import Recipe, train

    def of_images(name: str) -> Pairs:
        return [(here, there) for here, there in read(given.data / "mt" / "en-de" / f"multi30k.{name}.tsv.gz")]

    given.output.mkdir(parents=True, exist_ok=True)
    for name, pairs in (("train", of_images("train")[: given.pairs]), ("valid", of_images("valid")[:300])):
        write(given.output / f"images.{name}.tsv.gz", pairs)
    files = {
        name: [{"path": str(given.output / f"images.{name}.tsv.gz"), "from": "en", "to": "de"}]
        for name in ("train", "valid")
    }
    recipe = {
        "start": str(given.model), "data": files, "batch": {"rows": 8, "row": 512},
        "schedule": {"kind": "constant", "peak": 0.0001, "warmup": 50}, "steps": given.steps,
        "validate": {"every": 100, "metric": "bleu"}, "save": {"every": 50, "keep": 4}, "average": 4,
        "decoding": {"beam": 4, "length_penalty": 1.0}, "output": str(given.output / "run"),
    }  # fmt: skip
    result = train(parse(Recipe, recipe, "adapt"))
    print(f"| {given.pairs:,} pairs, {given.steps} steps | sentences | before | after |\n|---|---:|---:|---:|")
    for name in ("test2016", "test2017"):
        sources, references = zip(*of_images(name), strict=True)
        found = [
            evaluate(
                load(model, given.device).translate(list(sources), "de", from_="en", beam=4),
                list(references),
                "de",
                resamples=0,
            ).bleu
            for model in (given.model, result.model)
        ]
        print(f"| {name} | {len(sources):,} | {found[0]:.2f} | {found[1]:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(work: Any, *with_model: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(work.__name__, help=work.__doc__)
        made.set_defaults(work=work)
        made.add_argument("--data", required=True, type=Path)
        for name, options in with_model:
            made.add_argument(name, **options)
        return made

    model = ("--model", {"required": True, "type": Path}), ("--device", {"default": "cpu"})
    scored = ("--set", {"default": "test"}), ("--beam", {"type": int}), ("--limit", {"type": int})
    one = command(prepare, ("--output", {"required": True, "type": Path}))
    one.add_argument("--valid", type=int, default=200, help="validation sentences per direction")
    one.add_argument("--every", type=int, default=1, help="keep every n-th training pair, for a quick trial run")
    one.add_argument("--encode", action="store_true", help="also train the tokenizer and write the token store")
    command(score, *model, *scored, ("--output", {"type": Path}))
    two = command(back, *model, ("--to", {"default": "zh"}))
    two.add_argument("--limit", type=int, help="number of sentences")
    three = command(ship, *model, *scored, ("--output", {"type": Path}))
    three.add_argument("--to", default="int8")
    three.add_argument("--scores", type=Path, help="output of `score --output` for this folder, to avoid scoring twice")
    three.add_argument("--into", type=Path, default=HERE / TRANSLATOR)
    four = command(adapt, ("--model", {"type": Path, "default": HERE / TRANSLATOR}), ("--device", {"default": "cpu"}))
    four.add_argument("--output", required=True, type=Path)
    four.add_argument("--pairs", type=int, default=2000)
    four.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    given.work(given)


if __name__ == "__main__":
    main()
