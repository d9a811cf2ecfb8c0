"""Token store of a recipe, encoded by many processes: a GPU machine should not wait for one.

    python recipes/translator/encode.py RECIPE.yaml [--workers 16] [--only-existing]

Learns the tokenizer (or takes the one already in the run folder, or that of `start`), encodes every data entry in a
process of its own and joins them in order: byte for byte the store that `allyouneed train RECIPE.yaml` would build, and
which it then finds. `--only-existing` encodes ahead the files that are there already; the next call reuses them.
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
from allyouneed.data.files.readers import Drops, Files, Report
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.files import write_folder
from allyouneed.interop.load import vocabularies
from allyouneed.training import Recipe, load_recipe
from allyouneed.training.prepare import RunFolder, resolve


def encode_entry(recipe: Path, number: int, folder: Path) -> Path:
    os.environ["RAYON_NUM_THREADS"] = "1"
    given = load_recipe(recipe)
    encoding = encoding_of(given, tokenizers_of(given))
    return Store.open_or_build(folder, [given.data.train[number]], given.data.filters, encoding).folder


def tokenizers_of(recipe: Recipe) -> Vocabularies:
    return (
        vocabularies(recipe.start)
        if recipe.start is not None
        else Vocabularies.load(RunFolder(recipe.output).tokenizer)
    )


def size_of(entry: Files) -> int:
    """Bytes of its files; 0 if they are not there yet."""
    try:
        return sum(path.stat().st_size for path in entry.files())
    except (UserError, OSError):
        return 0


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
    parser.add_argument("--only-existing", action="store_true")
    given = parser.parse_args()
    began = time.perf_counter()
    recipe = load_recipe(given.recipe)
    run = RunFolder(recipe.output)
    hashes = InputHashes(run.data / "inputs.json")
    run.data.mkdir(parents=True, exist_ok=True)
    if not given.only_existing:
        run.open(resolve(recipe, hashes))
    if recipe.start is None and not (run.tokenizer / "tokenizer.json").exists():
        found = Vocabularies.train(recipe.tokenizer, recipe.data.train, recipe.data.filters, recipe.task.specials())
        write_folder(run.tokenizer, found.save)
    encoding = encoding_of(recipe, tokenizers_of(recipe))
    sizes = {number: size_of(entry) for number, entry in enumerate(recipe.data.train)}
    largest_first = sorted((number for number in sizes if sizes[number]), key=lambda number: -sizes[number])
    with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
        parts = {n: pool.submit(encode_entry, given.recipe, n, run.data / f"part-{n}") for n in largest_first}
        folders = [parts[n].result() for n in sorted(parts)]
    if given.only_existing:
        print(f"{len(folders)} of {len(sizes)} entries encoded, {time.perf_counter() - began:.0f} s")
        return
    fingerprint = _fingerprint(recipe.data.train, recipe.data.filters, encoding, hashes)
    join(run.data / fingerprint[:16], folders, fingerprint, encoding)
    for number in parts:
        shutil.rmtree(run.data / f"part-{number}")
    store = Store.open(run.data / fingerprint[:16])
    tokens = {name: len(column.values) for name, column in store.columns.items()}
    weighted = tokens["target"] if store.weights is None else int(store.weights @ store["target"].lengths)
    print(json.dumps({"examples": len(store), "tokens": tokens, "target tokens per epoch": weighted}))
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
