"""The same model trained by the same recipe with memory across batches and without (Dai et al. 2019, 3.2).

    python bench/long/segment_memory.py train.txt[.gz] valid.txt[.gz] --steps 1500 --seeds 1 2 --write

A small Transformer-XL (pattern `causal & block-window(row, 2)`: the own segment and the one before) learns TRAIN in
rows of `--row` tokens: in order, with memory (`memory: true`), or in shuffled pieces. Both have the same number of
weights, tokens per step and steps. Each is evaluated on all of VALID both ways: in pieces of `--row` tokens, and with
memory. `--write` writes the table to docs/results/long_text.md. `--forget` also trains one that reads in order but
clears its memory after each batch.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from allyouneed.config import parse
from allyouneed.data.files.readers import Report
from allyouneed.data.files.texts import TextFiles
from allyouneed.folder import Folder
from allyouneed.metrics.perplexity import pieces, recurrent
from allyouneed.nn.states.segment_memory import SegmentMemory
from allyouneed.training import Recipe, train

REMEMBERS = SegmentMemory.run
PAGE = Path(__file__).parents[2] / "docs/results/long_text.md"


def recipe(given: argparse.Namespace, memory: bool, seed: int, output: Path) -> Recipe:
    pattern = f"causal & block-window({given.row}, 2)"
    mixer = {"kind": "attention", "heads": 4, "pattern": pattern, "positions": "transformer-xl", "bias": False}
    layer = {"repeat": given.layers, "wiring": "pre-norm", "mixer": mixer | {"cache": "hidden"}}
    layer["channel"] = {"kind": "ffn", "hidden": 4 * given.width}
    tree = {
        "task": {"kind": "causal-lm", "memory": memory},
        "model": {"kind": "decoder", "vocab": 1, "width": given.width, "decoder": [layer]},
        "data": {"train": {"path": str(given.train), "document": "file"}},
        "tokenizer": {"vocab": given.vocab},
        "batch": {"rows": given.rows, "row": given.row},
        "schedule": {"kind": "cosine", "peak": 0.002, "warmup": 100},
        "steps": given.steps,
        "save": {"every": given.steps},
        "average": 0,
        "clip": 0.25,
        "seed": seed,
        "device": given.device,
        "precision": "fp32",
        "output": str(output),
    }
    return parse(Recipe, tree)


def forgetful(self: SegmentMemory, batch: Any, losses: Any) -> Any:
    if self.model.training:
        self.reset()
    return REMEMBERS(self, batch, losses)


def judged(folder: Folder, path: Path, row: int) -> list[float]:
    """Perplexities of the held-out text, in pieces and with memory."""
    tokenizer: Any = folder.vocabularies.target  # type: ignore[union-attr]
    (document,) = parse(TextFiles, {"path": str(path), "document": "file"}).read(Report())
    text = torch.tensor([tokenizer.bos, *tokenizer.encode(document.text), tokenizer.eos])
    return [mode(folder.model, text, row).perplexity for mode in (pieces, recurrent)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("train", type=Path)
    options.add_argument("valid", type=Path)
    options.add_argument("--steps", type=int, default=1500)
    options.add_argument("--seeds", type=int, nargs="+", default=[1])
    options.add_argument("--layers", type=int, default=3)
    options.add_argument("--width", type=int, default=96)
    options.add_argument("--rows", type=int, default=16)
    options.add_argument("--row", type=int, default=32)
    options.add_argument("--vocab", type=int, default=500)
    options.add_argument("--device", default="cpu")
    options.add_argument("--forget", action="store_true", help="also train in order without memory")
    options.add_argument("--write", action="store_true", help="write the table to docs/results/long_text.md")
    given = options.parse_args()
    lines = ["| trained | seed | seconds | perplexity in pieces | read on over memory |", "|---|---:|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as place:
        for seed in given.seeds:
            for name in ("with memory", "without", *(["in order, forgetting"] if given.forget else [])):
                begun = time.monotonic()
                with patch.object(SegmentMemory, "run", forgetful if "forgetting" in name else REMEMBERS):
                    made = train(recipe(given, name != "without", seed, Path(place) / f"{name} {seed}"))
                seconds = time.monotonic() - begun
                apart, on = judged(Folder.load(made.model, given.device), given.valid, given.row)
                lines.append(f"| {name} | {seed} | {seconds:.0f} | {apart:.2f} | {on:.2f} |")
                print(lines[-1], flush=True)
    about = (
        f"{given.train.name}, held out {given.valid.name}; {given.layers} layers, width {given.width}, vocabulary of "
        f"{given.vocab}; {given.steps} steps of {given.rows} rows of {given.row} tokens; {given.device}."
    )
    print("\n".join([about, "", *lines]))
    if given.write:
        words = f"{given.train.name} {given.valid.name} --steps {given.steps} --seeds {' '.join(map(str, given.seeds))}"
        words += " --forget" if given.forget else ""
        kept = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# Training with a memory and without\n"
        head = kept.partition("\n## Measured\n")[0].rstrip()
        command = f"```sh\npython bench/long/segment_memory.py {words} --write\n```"
        body = f"## Measured\n\n{command}\n\n{about}\n\n" + "\n".join(lines)
        PAGE.write_text(f"{head}\n\n{body}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
