"""Quality on real data: Multi30k English → German, text only, official splits.

    python bench/multi30k.py --data FOLDER --output runs/multi30k [--set dropout=0.3 …]

FOLDER holds multi30k.{train,valid,test2016,test2017,test2017coco}.tsv.gz (English <TAB> German). Trains by
recipes/multi30k-en-de.yaml, then scores every test set twice:

* sacreBLEU and chrF on plain text, with their signatures;
* as the published anchor does (fairseq transformer_tiny, 41.02 on test2016, Wu et al. 2021): hypotheses and references
  tokenized by sacremoses, then `sacrebleu --tokenize none -lc`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Report
from allyouneed.evaluate.translation import evaluate
from allyouneed.folder import Folder
from allyouneed.infer.predictors.translator import Translator
from allyouneed.train import load_recipe, train

RECIPE = Path(__file__).parent.parent / "recipes" / "multi30k-en-de.yaml"
ANCHOR = 41.02
TESTS = ("test2016", "test2017", "test2017coco")


def words(texts: list[str]) -> list[str]:
    from sacremoses import MosesTokenizer

    cut = MosesTokenizer(lang="de")
    return [cut.tokenize(text, return_str=True, escape=False) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--set", nargs="*", default=[], help="changes to the recipe, e.g. steps=8000 model.dropout=0.2")
    parser.add_argument("--beam", type=int, nargs="*", default=[4, 5])
    parser.add_argument("--valid-only", action="store_true", help="compare recipes on the validation set only")
    given = parser.parse_args()
    data = given.data.resolve()
    paths = [f"data.{name}={data}/multi30k.{name}.tsv.gz" for name in ("train", "valid")]
    recipe = load_recipe(given.recipe, [*paths, f"output={given.output.resolve()}", *given.set])
    result = train(recipe)
    print(json.dumps({"valid": result.scores}))
    from torch import cuda

    translator = Translator(Folder.load(result.model, "cuda" if cuda.is_available() else "cpu"))
    summary: dict[str, dict[str, float | str]] = {}
    for test in ("valid",) if given.valid_only else ("valid", *TESTS):
        pairs = list(PairFiles(path=f"{data}/multi30k.{test}.tsv.gz").read(Report()))
        references = [pair.target for pair in pairs]
        for beam in given.beam:
            found = translator.translate([pair.source for pair in pairs], beam=beam)
            plain = evaluate(found, references, language="de", resamples=1000 if test == "test2016" else 0)
            anchor = evaluate(words(found), words(references), tokenize="none", lowercase=True, resamples=0)
            print(f"\n{test}, {len(pairs)} sentences, beam {beam}\n{plain.text()}")
            against = f"{anchor.bleu / ANCHOR:.3f} × {ANCHOR}"
            print(f"scored as the anchor: {anchor.bleu:.2f} ({against})  {anchor.bleu_signature}")
            summary[f"{test}/beam{beam}"] = {
                "bleu": round(plain.bleu, 2), "chrf": round(plain.chrf, 2), "anchor": round(anchor.bleu, 2),
            }  # fmt: skip
    (given.output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
