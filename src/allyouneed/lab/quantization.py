"""Compare a model before and after quantization: quality, speed, size."""

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
from allyouneed.infer.predictors.forward import NamedForward, model_inputs
from allyouneed.infer.predictors.registry import predictor
from allyouneed.interop.load import load
from allyouneed.nn.models.precision import quantize, stored_as
from allyouneed.nn.models.weights import cast_weights, named_tensors

ROWS, LENGTH, RUNS = 8, 24, 3  # of random texts where no file is given; the fastest run counts
# the metric of a task, in order of preference, and whether higher is better
METRICS = {"bleu": True, "accuracy": True, "f1": True, "spearman": True, "recall@1": True, "mrr": True}
METRICS |= {"wer": False, "perplexity": False, "loss": False}


@dataclass
class QuantizationReport:
    """`rows`: figures before and after; `loss`: the loss of quality in `unit`."""

    rows: dict[str, tuple[float, float]] = field(default_factory=dict)
    loss: float = 0.0
    unit: str = ""
    notes: list[str] = field(default_factory=list)  # caveats about the figures

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
    """The folder in float32, and quantized to `to`."""
    before, after = load(path), load(path)
    if (stored := stored_as(before.model)) is not None:
        raise UserError(f"{path}: already stored as {stored}; start from the original model")
    cast_weights(before.model, torch.float32)
    try:
        after.model = quantize(after.model, to)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return before, after


def compare(
    before: Folder, after: Folder, data: Path | None = None, into: str | None = None, from_: str | None = None
) -> QuantizationReport:
    """Compare by the task's metric on a file (of pairs in these languages), or without one by the outputs on random
    texts."""
    found = QuantizationReport()
    if data is None:
        _compare_outputs(before, after, found)
    else:
        _compare_metric(before, after, data, found, into, from_)
    speeds = [_tokens_per_second(folder) for folder in (before, after)]
    found.rows["tokens/s"] = (speeds[0], speeds[1])
    sizes = [sum(tensor.nbytes for tensor in named_tensors(folder.model).values()) / 1e6 for folder in (before, after)]
    found.rows["weights, MB"] = (sizes[0], sizes[1])
    return found


def _compare_metric(
    before: Folder, after: Folder, data: Path, found: QuantizationReport, into: str | None, from_: str | None
) -> None:
    both = [evaluate(predictor(folder), data, into, from_, "--from and --into")[0] for folder in (before, after)]
    found.notes, figures = both[0].notes, [result.figures for result in both]
    for name in figures[0]:
        found.rows[name] = (figures[0][name], figures[1][name])
    metric = next((name for name in METRICS if name in figures[0]), None)
    if metric is None:
        raise UserError(f"{data}: {', '.join(figures[0])} is not a quality metric (allowed: {', '.join(METRICS)})")
    first, second = found.rows[metric]
    if METRICS[metric]:
        found.loss, found.unit = first - second, f"points of {metric}"
    else:
        found.loss, found.unit = 100 * (second / first - 1) if first else 0.0, f"per cent of {metric}"


@torch.inference_mode()
def _compare_outputs(before: Folder, after: Folder, found: QuantizationReport) -> None:
    """How often the argmax agrees, and exp(KL): the factor by which the new model's perplexity exceeds the old one's on
    texts drawn from the old one."""
    inputs = _random_inputs(before)
    scores = [NamedForward(folder.model).logits(inputs).float() for folder in (before, after)]
    vectors = getattr(before.model.config, "head", None)
    if getattr(vectors, "kind", "") in ("none", "pooled") or scores[0].shape[-1] == 1:
        gap_percent = 100 * (1 - float(torch.cosine_similarity(scores[0].flatten(1), scores[1].flatten(1)).mean()))
        found.rows["cosine, %"] = (100.0, 100.0 - gap_percent)
        found.loss, found.unit = gap_percent, "per cent of the angle between vectors"
        return
    logs: list[Tensor] = [score.log_softmax(-1) for score in scores]
    same = float((logs[0].argmax(-1) == logs[1].argmax(-1)).float().mean())
    gap = (logs[0].exp() * (logs[0] - logs[1])).nan_to_num(0.0).sum(-1).mean()
    found.rows["same answer, %"] = (100.0, 100 * same)
    found.rows["added perplexity, %"] = (0.0, 100 * float(gap.expm1()))
    found.loss, found.unit = 100 * float(gap.expm1()), "per cent of perplexity, on random texts"


def _random_inputs(folder: Folder) -> dict[str, Any]:
    model: Any = folder.model
    able = model_inputs(model.config)
    if "tokens" not in able or model.config.kind == "two-towers":
        raise UserError(
            f"{folder.path}: takes other inputs than text, so the comparison needs a file of examples; pass --data"
        )
    vocab, limit = model.config.vocabs, min(model.config.limit or LENGTH, LENGTH)
    generator = torch.Generator().manual_seed(0)
    inputs = {"tokens": torch.randint(vocab.source, (ROWS, limit), generator=generator).tolist()}
    if model.config.kind == "encoder-decoder":
        inputs["targets"] = torch.randint(vocab.target, (ROWS, limit), generator=generator).tolist()
    return inputs


@torch.inference_mode()
def _tokens_per_second(folder: Folder) -> float:
    """Tokens per second: generated by a generative model, read by any other."""
    model: Any = folder.model
    if "tokens" not in model_inputs(model.config):
        return float("nan")
    rows = _random_inputs(folder)["tokens"] if model.config.kind != "two-towers" else []
    if not rows:
        return float("nan")
    run: Callable[[], Any] = lambda: NamedForward(model).logits(_random_inputs(folder))  # noqa: E731
    tokens = sum(map(len, rows))
    if model.config.generates:
        steps = max(1, LENGTH if model.config.limit is None else min(LENGTH, model.config.limit // 2))
        engine = Engine(model, bos=1, eos=2, pad=0)
        decoding = Decoding(method="greedy", min_length=steps, max_length=steps)
        given = [row[: max(1, len(row) // 2)] for row in rows]
        generate = engine.generate if model.config.kind == "encoder-decoder" else engine.complete
        run, tokens = lambda: generate(given, decoding), steps * len(rows)
    run()
    best = float("inf")
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return tokens / best
