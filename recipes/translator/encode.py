"""Token store of a recipe, encoded by many processes: a GPU machine should not wait for one.

    python recipes/translator/encode.py RECIPE.yaml [--workers 16]

Learns the tokenizer (or takes the one already in the run folder), encodes every data entry in a process of its own and
joins them in order: byte for byte the store that `allyouneed train RECIPE.yaml` would build, and which it then finds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.store import InputHashes, Store, _fingerprint, _read_meta, _write_meta
from allyouneed.data.files.readers import Drops, Report
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.files import write_folder
from allyouneed.train import Recipe, load_recipe
from allyouneed.train.prepare import RunFolder, resolve


def encode_entry(recipe: Path, number: int, folder: Path) -> Path:
    os.environ["RAYON_NUM_THREADS"] = "1"
    given = load_recipe(recipe)
    tokenizers = Vocabularies.load(RunFolder(given.output).tokenizer)
    return Store.build(folder, [given.data.train[number]], given.data.filters, encoding_of(given, tokenizers)).folder


def encoding_of(recipe: Recipe, tokenizers: Vocabularies) -> Encoding:
    return recipe.task.encoding(tokenizers, [], recipe.max_tokens)


def join(folder: Path, parts: list[Path], fingerprint: str, encoding: Encoding) -> None:
    report, weights = Report(), []
    for part in parts:
        meta = _read_meta(part)
        one = Report.from_tree(meta["report"])
        report.read += one.read
        for reason, drops in one.drops.items():
            whole = report.drops.setdefault(reason, Drops())
            whole.count += drops.count
            whole.examples = (whole.examples + drops.examples)[: report.show]
        for weight, count in meta.get("weights", [(1.0, meta["examples"])]):
            if weights and weights[-1][0] == weight:
                count += weights.pop()[1]
            weights.append((weight, count))

    def fill(work: Path) -> None:
        for name in encoding.columns:
            end, offsets = 0, [np.zeros(1, "<i8")]
            with (work / f"{name}.values").open("wb") as file:
                for part in parts:
                    with (part / f"{name}.values").open("rb") as values:
                        shutil.copyfileobj(values, file, 1 << 24)
                    own = np.fromfile(part / f"{name}.offsets", "<i8")
                    offsets.append(own[1:] + end)
                    end += int(own[-1])
            np.concatenate(offsets).tofile(work / f"{name}.offsets")
        _write_meta(work, fingerprint, encoding, report, weights)

    write_folder(folder, fill)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    given = parser.parse_args()
    began = time.perf_counter()
    recipe = load_recipe(given.recipe)
    run = RunFolder(recipe.output)
    hashes = InputHashes(run.data / "inputs.json")
    run.data.mkdir(parents=True, exist_ok=True)
    run.open(resolve(recipe, hashes))
    if not (run.tokenizer / "tokenizer.json").exists():
        found = Vocabularies.train(recipe.tokenizer, recipe.data.train, recipe.data.filters, recipe.task.specials())
        write_folder(run.tokenizer, found.save)
    encoding = encoding_of(recipe, Vocabularies.load(run.tokenizer))
    entries = sorted(
        range(len(recipe.data.train)), key=lambda n: -sum(p.stat().st_size for p in recipe.data.train[n].files())
    )  # the largest first
    with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
        parts = {n: pool.submit(encode_entry, given.recipe, n, run.data / f"part-{n}") for n in entries}
        folders = [parts[n].result() for n in range(len(entries))]
    fingerprint = _fingerprint(recipe.data.train, recipe.data.filters, encoding, hashes)
    join(run.data / fingerprint[:16], folders, fingerprint, encoding)
    for folder in folders:
        shutil.rmtree(folder)
    store = Store.open(run.data / fingerprint[:16])
    sizes = {name: len(column.values) for name, column in store.columns.items()}
    tokens = sizes["target"] if store.weights is None else int(store.weights @ store["target"].lengths)
    print(json.dumps({"examples": len(store), "tokens": sizes, "target tokens per epoch": tokens}))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
