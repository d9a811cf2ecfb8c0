"""Benefit of retrieval in a tiny RETRO: perplexity of held-out text with neighbours, without, and of plain decoders.

    python bench/family/retro.py TRAIN VALID [--steps 300] [--leak] [--write]

TRAIN and VALID are texts (.txt, .gz, …). Everything is built here: a tokenizer, a small masked language model that
embeds chunks, an index of TRAIN, then all models, on the same batches for the same number of steps. Consecutive
paragraphs are joined to documents of about a row; a chunk never finds its own document. `--leak` allows it, in training
and in VALID, whose documents are then indexed too: a control that shows whether the model learns to use neighbours that
contain the continuation. `--write` writes the table to docs/results/retro.md. Needs faiss."""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import allyouneed as ayn
from allyouneed.config import parse
from allyouneed.data.files.readers import Report
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.retrieval.corpus import build_index
from allyouneed.folder import Folder
from allyouneed.infer.retrieval.retriever import ChunkEncoder, Retriever
from allyouneed.nn.batch import IGNORE, Batch, Neighbours, Rows
from allyouneed.training import Recipe, train

PAGE = Path(__file__).parents[2] / "docs/results/retro.md"
WIDTH, HEADS, CHUNK, COUNT, ROW, ROWS, VOCAB = 96, 4, 16, 2, 128, 8, 1000
ATTENTION, CHANNEL = {"kind": "attention", "heads": HEADS, "positions": "rotary"}, {"kind": "ffn", "hidden": 4 * WIDTH}
PLAIN = {"wiring": "pre-norm", "mixer": ATTENTION | {"pattern": "causal"}, "channel": CHANNEL}
READS = {"wiring": "pre-norm", "mixer": ATTENTION, "channel": CHANNEL}
CROSS = {"kind": "chunked-cross", "heads": HEADS, "chunk": CHUNK}


def encoder(path: Path, folder: Path, steps: int) -> Folder:
    """A masked language model of TRAIN, with its tokenizer."""
    layer = {"repeat": 2, "wiring": "pre-norm", "mixer": ATTENTION, "channel": {"kind": "ffn", "hidden": 256}}
    tree = {
        "task": "masked-lm",
        "model": {"kind": "encoder", "width": 64, "vocab": 1, "encoder": [layer]},
        "data": {"train": str(path)},
        "tokenizer": {"vocab": VOCAB},
        "batch": {"rows": 8, "row": ROW},
        "schedule": {"kind": "constant", "peak": 0.003, "warmup": 20},
        "steps": steps,
        "validate": {"every": steps, "limit": 1},
        "save": {"every": steps},
        "device": "cpu",
        "output": str(folder),
    }
    train(parse(Recipe, tree))
    return Folder.load(folder / "model")


def documents(path: Path, tokenizer: Any) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for document in parse(TextFiles, str(path)).read(Report()):
        ids = tokenizer.encode(document.text + "\n\n")
        for first in range(0, len(ids), ROW - 1):
            piece = ids[first : first + ROW - 1]
            if found[-1] and len(found[-1]) + len(piece) >= ROW:
                found.append([])
            found[-1] += piece
    return [ids for ids in found if len(ids) > CHUNK]


def batch(texts: list[list[int]], neighbours: Neighbours, numbers: list[int], tokenizer: Any) -> Batch:
    rows = Rows.of([[tokenizer.bos, *texts[n]] for n in numbers], tokenizer.pad)
    labels = torch.full_like(rows.tokens, IGNORE)
    for row, n in enumerate(numbers):
        labels[row, : len(texts[n])] = torch.tensor(texts[n])
    return Batch(rows, neighbours.each(lambda tensor: tensor[numbers]), labels)


def losses(model: Any, given: Batch, source: Neighbours | None) -> tuple[torch.Tensor, int]:
    assert given.labels is not None
    total, _ = model.head.loss(model(Batch(given.rows, source)), given.labels, 0.0)
    return total, int((given.labels != IGNORE).sum())


def trained(config: dict[str, Any], texts: list[list[int]], near: Neighbours, tokenizer: Any, steps: int) -> Any:
    torch.manual_seed(0)
    model: Any = ayn.build(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda n: min((n + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * n / steps))
    )
    dice = torch.Generator().manual_seed(0)
    for _ in range(steps):
        numbers = torch.randint(len(texts), (ROWS,), generator=dice).tolist()
        given = batch(texts, near, numbers, tokenizer)
        total, count = losses(model, given, given.source if config["kind"] == "retro" else None)  # type: ignore[arg-type]
        optimiser.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def perplexity(model: Any, texts: list[list[int]], near: Neighbours | None, tokenizer: Any) -> float:
    nothing = Neighbours(torch.zeros(len(texts), 0, COUNT, 2 * CHUNK).long(), torch.zeros(len(texts), 0, COUNT).long())
    total, count = 0.0, 0
    for first in range(0, len(texts), 16):
        numbers = list(range(first, min(first + 16, len(texts))))
        given = batch(texts, near or nothing, numbers, tokenizer)
        loss, tokens = losses(model, given, None if near is None else given.source)  # type: ignore[arg-type]
        total, count = total + loss.item(), count + tokens
    return math.exp(total / count)


def shuffled(near: Neighbours) -> Neighbours:
    """Neighbours of other chunks: as many, real, but unrelated."""
    order = torch.randperm(len(near.tokens), generator=torch.Generator().manual_seed(1))
    return near.each(lambda tensor: tensor[order])


def measure(train_path: Path, valid_path: Path, steps: int, leak: bool, place: Path) -> list[str]:
    began = time.perf_counter()
    reader = encoder(train_path, place / "reader", min(steps, 300))
    tokenizer = reader.vocabularies.target
    texts, held = documents(train_path, tokenizer), documents(valid_path, tokenizer)
    embed = ChunkEncoder(reader, tokenizer)
    index = build_index(texts + held if leak else texts, CHUNK, embed, tokenizer, embed.about)
    retriever = Retriever(index)
    rows, held_rows = ([[tokenizer.bos, *text] for text in some] for some in (texts, held))
    # a row with its begin token is not a document of the index, so nothing is excluded for it
    near = retriever.neighbours(rows, COUNT, None if leak else texts)
    held_near = retriever.neighbours(held_rows, COUNT, None if leak else held)
    retro = {
        "kind": "retro", "vocab": tokenizer.size, "width": WIDTH, "neighbours": COUNT,
        "encoder": [READS | {"cross": {"kind": "attention", "heads": HEADS}}, READS],
        "decoder": [PLAIN, PLAIN | {"cross": CROSS}, PLAIN, PLAIN | {"cross": CROSS}],
    }  # fmt: skip
    size = ayn.model_config(retro).cost().parameters
    each = ayn.model_config({"kind": "decoder", "vocab": 1, "width": WIDTH, "decoder": [PLAIN]}).cost().parameters
    layers = 1 + round((size - tokenizer.size * WIDTH - each) / each)
    plain = {"kind": "decoder", "vocab": tokenizer.size, "width": WIDTH, "decoder": [PLAIN | {"repeat": layers}]}
    small = plain | {"decoder": [PLAIN | {"repeat": 4}]}
    found: list[tuple[str, int, float]] = []
    model = trained(retro, texts, near, tokenizer, steps)
    for name, given in (
        ("RETRO, its neighbours", held_near),
        ("RETRO, neighbours of other chunks", shuffled(held_near)),
        ("RETRO, neighbours removed", None),
    ):
        found.append((name, size, perplexity(model, held, given, tokenizer)))
    for name, config in ((f"plain decoder of {layers} layers", plain), ("plain decoder of 4 layers", small)):
        if leak:
            break
        model = trained(config, texts, near, tokenizer, steps)
        found.append((name, ayn.model_config(config).cost().parameters, perplexity(model, held, None, tokenizer)))
    tokens, seconds = sum(map(len, texts)), time.perf_counter() - began
    lines = [
        f"{train_path.name} ({tokens:,} tokens, {len(texts):,} documents, {len(index):,} chunks of {CHUNK}), held out "
        f"{valid_path.name} ({sum(map(len, held)):,} tokens); {steps} steps of {ROWS} rows of at most {ROW} tokens; "
        f"{COUNT} neighbours; CPU, {torch.get_num_threads()} thread, {seconds:.0f} s for everything.",
        "",
        "| model | parameters | held-out perplexity |",
        "|---|---:|---:|",
    ]
    return lines + [f"| {name} | {count:,} | {value:.2f} |" for name, count, value in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("valid", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--leak", action="store_true", help="let chunks find their own documents")
    parser.add_argument("--write", action="store_true", help="write the table to docs/results/retro.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        lines = measure(options.train, options.valid, options.steps, options.leak, Path(place))
    print("\n".join(lines))
    if options.write:
        kept = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# What retrieval brings to a tiny RETRO\n"
        title = options.train.name + (", own documents found (a leak)" if options.leak else "")
        head, _, rest = kept.partition(f"\n## {title}\n")
        after = rest[rest.index("\n## ") :] if "\n## " in rest else ""
        words = f"{options.train.name} {options.valid.name} --steps {options.steps}{' --leak' if options.leak else ''}"
        command = f"```sh\npython bench/family/retro.py {words} --write\n```"
        body = "\n".join([f"## {title}", "", command, "", *lines])
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(f"{head.rstrip()}\n\n{body}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
