"""Quality on real data: Multi30k English → German, text only, official splits.

    python bench/translation/multi30k.py --data FOLDER --output runs/multi30k [--set dropout=0.3 …]
    python bench/translation/multi30k.py --data FOLDER --output runs/moses --moses --teachers 11 12 \
        --seeds 1 2 3 --together 4

FOLDER holds multi30k.{train,valid,test2016,test2017,test2017coco}.tsv.gz (English <TAB> German). Trains by
recipes/multi30k-en-de.yaml, then scores every test set twice:

* sacreBLEU and chrF on plain text, with their signatures;
* as the published anchor does (fairseq transformer_tiny, 41.02 on test2016, Wu et al. 2021): hypotheses and references
  tokenized by sacremoses, then `sacrebleu --tokenize none -lc`.

`--moses` trains on text prepared as the anchor's: tokenized by Moses and in lower case. `--seeds` trains one model per
seed and prints the mean. `--teachers` is data diversification (Nguyen et al. 2020, "Data Diversification: A Simple
Strategy For Neural Machine Translation"): for each of these seeds a model of either direction translates the training
text, and the models of `--seeds` learn from the real pairs and from theirs. `--together` trains several at once: a GPU
is far from full with one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from allyouneed.apps.translate.translator import Translator
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Report
from allyouneed.folder import Folder
from allyouneed.metrics.translation import evaluate
from allyouneed.training import load_recipe, train

RECIPES = Path(__file__).parents[2] / "recipes"
ANCHOR = 41.02
T = TypeVar("T")
TESTS = ("test2016", "test2017", "test2017coco")


def words(texts: list[str]) -> list[str]:
    from sacremoses import MosesTokenizer

    cut = MosesTokenizer(lang="de")
    return [cut.tokenize(text, return_str=True, escape=False) for text in texts]


def prepare(data: Path, output: Path) -> Path:
    """The files again, tokenized by Moses and in lower case."""
    from sacremoses import MosesTokenizer

    cut = [MosesTokenizer(lang=language) for language in ("en", "de")]
    output.mkdir(parents=True, exist_ok=True)
    for name in ("train", "valid", *TESTS):
        pairs = PairFiles(path=data / f"multi30k.{name}.tsv.gz").read(Report())
        lines = (
            "\t".join(
                tool.tokenize(text, return_str=True, escape=False).lower()
                for tool, text in zip(cut, (pair.source, pair.target), strict=True)
            )
            for pair in pairs
        )
        (output / f"multi30k.{name}.tsv.gz").write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--recipe", type=Path, help="default: multi30k-en-de.yaml, with --moses multi30k-moses.yaml")
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="changes to the recipe, e.g. steps=8000 model.dropout=0.2")
    parser.add_argument("--beam", type=int, nargs="*", default=[4, 5])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--teachers", type=int, nargs="*", default=[], help="seeds of the models that translate")
    parser.add_argument("--teacher-steps", type=int, default=5000)
    parser.add_argument("--together", type=int, default=1, help="models trained at once, each in its own process")
    parser.add_argument("--moses", action="store_true", help="train on text as the anchor's: Moses tokens, lower case")
    parser.add_argument("--valid-only", action="store_true", help="compare recipes on the validation set only")
    given = parser.parse_args()
    given.recipe = given.recipe or RECIPES / ("multi30k-moses.yaml" if given.moses else "multi30k-en-de.yaml")
    data = given.data.resolve()
    if given.moses:
        ready = given.output / "data"
        data = ready.resolve() if (ready / "multi30k.test2016.tsv.gz").exists() else prepare(data, ready.resolve())
    taught = each(given, teach, [(given, data, seed, back) for seed in given.teachers for back in (False, True)])
    scores = each(given, run, [(given, data, seed, taught) for seed in given.seeds])
    for name in scores[0]:
        found = [float(score[name]["anchor"]) for score in scores]
        print(f"{name}: as the anchor {statistics.mean(found):.2f}, seeds {given.seeds}: {found}")


def each(given: argparse.Namespace, call: Callable[..., T], arguments: Iterable[tuple[Any, ...]]) -> list[T]:
    if given.together == 1:
        return [call(*values) for values in arguments]
    with ProcessPoolExecutor(given.together, mp_context=get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(call, *values) for values in arguments]]


def train_model(
    given: argparse.Namespace, output: Path, data: Path, *changes: str, more: Iterable[Path] = (), back: bool = False
) -> Translator:
    """`more`: files to learn from besides the training pairs; `back`: from German into English."""
    columns = [1, 0] if back else [0, 1]
    files = {"train": [data / "multi30k.train.tsv.gz", *more], "valid": [data / "multi30k.valid.tsv.gz"]}
    entries = {name: {"path": [str(path) for path in found], "columns": columns} for name, found in files.items()}
    paths = [f"data.{name}={json.dumps([entry])}" for name, entry in entries.items()]
    recipe = load_recipe(given.recipe, [*paths, f"output={output}", *given.set, *changes])
    result = train(recipe)
    print(json.dumps({"valid": result.scores}))
    from torch import cuda

    return Translator(Folder.load(result.model, "cuda" if cuda.is_available() else "cpu"))


def teach(given: argparse.Namespace, data: Path, seed: int, back: bool) -> Path:
    """Train a model of one direction; write the training pairs with its translations in place of the text it made."""
    output = given.output.resolve() / "teachers" / f"{seed}-{'back' if back else 'forward'}"
    made = output.with_suffix(".tsv.gz")
    if made.exists():
        return made
    translator = train_model(given, output, data, f"seed={seed}", f"steps={given.teacher_steps}", back=back)
    pairs = list(PairFiles(path=data / "multi30k.train.tsv.gz").read(Report()))
    texts = [pair.target if back else pair.source for pair in pairs]
    found = translator.translate(texts, beam=5, protect=False)
    lines = zip(found, texts, strict=True) if back else zip(texts, found, strict=True)
    made.write_bytes(gzip.compress("\n".join("\t".join(line) for line in lines).encode(), mtime=0))
    return made


def run(given: argparse.Namespace, data: Path, seed: int, taught: list[Path]) -> dict[str, dict[str, float | str]]:
    output = given.output.resolve() / str(seed)
    translator = train_model(given, output, data, f"seed={seed}", more=taught)
    summary: dict[str, dict[str, float | str]] = {}
    for test in ("valid",) if given.valid_only else ("valid", *TESTS):
        pairs = list(PairFiles(path=f"{data}/multi30k.{test}.tsv.gz").read(Report()))
        references = [pair.target for pair in pairs]
        for beam in given.beam:
            found = translator.translate([pair.source for pair in pairs], beam=beam, protect=False)
            plain = evaluate(found, references, language="de", resamples=1000 if test == "test2016" else 0)
            both = (found, references) if given.moses else (words(found), words(references))
            anchor = evaluate(*both, tokenize="none", lowercase=True, resamples=0)
            print(f"\n{test}, {len(pairs)} sentences, beam {beam}\n{plain.text()}")
            against = f"{anchor.bleu / ANCHOR:.3f} × {ANCHOR}"
            print(f"scored as the anchor: {anchor.bleu:.2f} ({against})  {anchor.bleu_signature}")
            summary[f"{test}/beam{beam}"] = {
                "bleu": round(plain.bleu, 2), "chrf": round(plain.chrf, 2), "anchor": round(anchor.bleu, 2),
            }  # fmt: skip
    (output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))
    return summary


if __name__ == "__main__":
    main()
