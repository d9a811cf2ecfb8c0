"""Quality on real data: Multi30k English → German, text only, official splits.

    python bench/multi30k.py --data FOLDER --output runs/multi30k [--set dropout=0.3 …]
    python bench/multi30k.py --data FOLDER --output runs/moses --moses --seeds 1 2 3

FOLDER holds multi30k.{train,valid,test2016,test2017,test2017coco}.tsv.gz (English <TAB> German). Trains by
recipes/multi30k-en-de.yaml, then scores every test set twice:

* sacreBLEU and chrF on plain text, with their signatures;
* as the published anchor does (fairseq transformer_tiny, 41.02 on test2016, Wu et al. 2021): hypotheses and references
  tokenized by sacremoses, then `sacrebleu --tokenize none -lc`.

`--moses` trains on text prepared as the anchor's: tokenized by Moses and in lower case. `--seeds` trains one model per
seed and prints the mean.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import yaml

from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Report
from allyouneed.evaluate.translation import evaluate
from allyouneed.folder import Folder
from allyouneed.infer.predictors.translator import Translator
from allyouneed.train import load_recipe, train

RECIPES = Path(__file__).parent.parent / "recipes"
ANCHOR = 41.02
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
    parser.add_argument("--moses", action="store_true", help="train on text as the anchor's: Moses tokens, lower case")
    parser.add_argument("--valid-only", action="store_true", help="compare recipes on the validation set only")
    given = parser.parse_args()
    given.recipe = given.recipe or RECIPES / ("multi30k-moses.yaml" if given.moses else "multi30k-en-de.yaml")
    data = given.data.resolve()
    if given.moses:
        ready = given.output / "data"
        data = ready.resolve() if (ready / "multi30k.test2016.tsv.gz").exists() else prepare(data, ready.resolve())
    scores = [run(given, data, seed) for seed in given.seeds]
    for name in scores[0]:
        found = [float(score[name]["anchor"]) for score in scores]
        print(f"{name}: as the anchor {statistics.mean(found):.2f}, seeds {given.seeds}: {found}")


def run(given: argparse.Namespace, data: Path, seed: int) -> dict[str, dict[str, float | str]]:
    output = given.output.resolve() / str(seed)
    trees = yaml.safe_load(given.recipe.read_text(encoding="utf-8"))["data"]
    paths = []
    for name in ("train", "valid"):
        files = [{"path": entry} if isinstance(entry, str) else entry for entry in as_list(trees[name])]
        files = [entry | {"path": str(data / f"multi30k.{name}.tsv.gz")} for entry in files]
        paths.append(f"data.{name}={json.dumps(files)}")
    recipe = load_recipe(given.recipe, [*paths, f"output={output}", f"seed={seed}", *given.set])
    result = train(recipe)
    print(json.dumps({"valid": result.scores}))
    from torch import cuda

    translator = Translator(Folder.load(result.model, "cuda" if cuda.is_available() else "cpu"))
    languages = {"to": "de", "from_": "en"} if translator.languages else {}
    summary: dict[str, dict[str, float | str]] = {}
    for test in ("valid",) if given.valid_only else ("valid", *TESTS):
        pairs = list(PairFiles(path=f"{data}/multi30k.{test}.tsv.gz").read(Report()))
        references = [pair.target for pair in pairs]
        for beam in given.beam:
            found = translator.translate([pair.source for pair in pairs], beam=beam, protect=False, **languages)
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


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


if __name__ == "__main__":
    main()
