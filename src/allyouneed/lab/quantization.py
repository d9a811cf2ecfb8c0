"""A model before and after it is stored in fewer bits: how much worse it gets, how much faster, how much smaller."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.evaluate import evaluate
from allyouneed.infer.predictors.forward import Called, takes
from allyouneed.infer.predictors.registry import predictor
from allyouneed.interop.load import load
from allyouneed.nn.models.precision import quantize, stored_as
from allyouneed.nn.models.weights import cast_weights, named_tensors

ROWS, LENGTH, TURNS = 8, 24, 3  # of random texts where no file is given; what is quickest of so many turns counts
# what a task is judged by, first come: the name, and whether more is better
JUDGED = {"bleu": True, "accuracy": True, "f1": True, "wer": False, "perplexity": False, "loss": False}


@dataclass
class Comparison:
    """`rows`: what was measured, before and after; `loss`: how much worse it got, in `unit`."""

    rows: dict[str, tuple[float, float]] = field(default_factory=dict)
    loss: float = 0.0
    unit: str = ""
    notes: list[str] = field(default_factory=list)  # what a reader of the figures should know

    def text(self) -> str:
        wide = max(map(len, self.rows))
        lines = [f"{'':{wide}}  {'before':>12}  {'after':>12}"]
        for name, (before, after) in self.rows.items():
            lines.append(f"{name:{wide}}  {before:12,.2f}  {after:12,.2f}")
        return "\n".join(lines)

    def tree(self) -> dict[str, Any]:
        rows = {name: {"before": before, "after": after} for name, (before, after) in self.rows.items()}
        return {"measured": rows, "loss": self.loss, "unit": self.unit}


def quantized(path: Path, to: str) -> tuple[Folder, Folder]:
    """The folder as it is, ready to compute with, and in `to`."""
    before, after = load(path), load(path)
    if (manner := stored_as(before.model)) is not None:
        raise UserError(f"{path}: is stored as {manner} already; begin with the model it was made of")
    cast_weights(before.model, torch.float32)
    try:
        after.model = quantize(after.model, to)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return before, after


def compare(
    before: Folder, after: Folder, data: Path | None = None, into: str | None = None, from_: str | None = None
) -> Comparison:
    """By what the task is judged by, on a file (of pairs in these languages); without one, by what both make of random
    texts."""
    found = Comparison()
    if data is None:
        _agreement(before, after, found)
    else:
        _judged(before, after, data, found, into, from_)
    speeds = [_speed(folder) for folder in (before, after)]
    found.rows["tokens/s"] = (speeds[0], speeds[1])
    sizes = [sum(tensor.nbytes for tensor in named_tensors(folder.model).values()) / 1e6 for folder in (before, after)]
    found.rows["weights, MB"] = (sizes[0], sizes[1])
    return found


def _judged(before: Folder, after: Folder, data: Path, found: Comparison, into: str | None, from_: str | None) -> None:
    both = [evaluate(predictor(folder), data, into, from_, "--from and --into")[0] for folder in (before, after)]
    found.notes, figures = both[0].notes, [judged.figures for judged in both]
    for name in figures[0]:
        found.rows[name] = (figures[0][name], figures[1][name])
    judge = next((name for name in JUDGED if name in figures[0]), None)
    if judge is None:
        raise UserError(f"{data}: gives {', '.join(figures[0])}, and nothing of that says how good the model is")
    first, second = found.rows[judge]
    if JUDGED[judge]:
        found.loss, found.unit = first - second, f"points of {judge}"
    else:
        found.loss, found.unit = 100 * (second / first - 1) if first else 0.0, f"per cent of {judge}"


@torch.inference_mode()
def _agreement(before: Folder, after: Folder, found: Comparison) -> None:
    """How often both find the same likeliest, and by how much more the new model is surprised by what the old one
    would say: exp(KL) is the perplexity that it adds on texts of the old one's own."""
    inputs = _random(before)
    scores = [Called(folder.model).logits(inputs).float() for folder in (before, after)]
    vectors = getattr(before.model.config, "head", None)
    if getattr(vectors, "kind", "") in ("none", "pooled") or scores[0].shape[-1] == 1:
        apart = 100 * (1 - float(torch.cosine_similarity(scores[0].flatten(1), scores[1].flatten(1)).mean()))
        found.rows["cosine, %"] = (100.0, 100.0 - apart)
        found.loss, found.unit = apart, "per cent of the angle between vectors"
        return
    logs: list[Tensor] = [score.log_softmax(-1) for score in scores]
    same = float((logs[0].argmax(-1) == logs[1].argmax(-1)).float().mean())
    gap = (logs[0].exp() * (logs[0] - logs[1])).nan_to_num(0.0).sum(-1).mean()
    found.rows["same answer, %"] = (100.0, 100 * same)
    found.rows["added perplexity, %"] = (0.0, 100 * float(gap.expm1()))
    found.loss, found.unit = 100 * float(gap.expm1()), "per cent of perplexity, on random texts"


def _random(folder: Folder) -> dict[str, Any]:
    model: Any = folder.model
    able = takes(model.config)
    if "tokens" not in able or model.config.kind == "two-towers":
        raise UserError(
            f"{folder.path}: reads more than texts, so a file of examples is needed to compare; give --data"
        )
    vocab, limit = model.config.vocabs, min(model.config.limit or LENGTH, LENGTH)
    dice = torch.Generator().manual_seed(0)
    inputs = {"tokens": torch.randint(vocab.source, (ROWS, limit), generator=dice).tolist()}
    if model.config.kind == "encoder-decoder":
        inputs["targets"] = torch.randint(vocab.target, (ROWS, limit), generator=dice).tolist()
    return inputs


@torch.inference_mode()
def _speed(folder: Folder) -> float:
    """Tokens a second: said one after the other by a model that writes, read by one that does not."""
    model: Any = folder.model
    if "tokens" not in takes(model.config):
        return float("nan")
    rows = _random(folder)["tokens"] if model.config.kind != "two-towers" else []
    if not rows:
        return float("nan")
    run: Callable[[], Any] = lambda: Called(model).logits(_random(folder))  # noqa: E731
    said = sum(map(len, rows))
    if model.config.generates:
        steps = max(1, LENGTH if model.config.limit is None else min(LENGTH, model.config.limit // 2))
        engine = Engine(model, bos=1, eos=2, pad=0)
        decoding = Decoding(method="greedy", min_length=steps, max_length=steps)
        given = [row[: max(1, len(row) // 2)] for row in rows]
        ask = engine.generate if model.config.kind == "encoder-decoder" else engine.complete
        run, said = lambda: ask(given, decoding), steps * len(rows)
    run()
    best = float("inf")
    for _ in range(TURNS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return said / best
