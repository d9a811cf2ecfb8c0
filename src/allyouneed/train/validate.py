"""How good the model is now: loss and perplexity over the validation pairs, and translations against references."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from allyouneed.data.packing import PaddedBatches
from allyouneed.data.readers import Pair
from allyouneed.evaluate.translation import Scores, evaluate
from allyouneed.folder import Folder
from allyouneed.infer.decoding import Decoding
from allyouneed.infer.translator import Translator
from allyouneed.tasks.task import Task
from allyouneed.train.machine import Machine

HIGHER_IS_BETTER = {"bleu": True, "chrf": True, "exact": True, "loss": False}


@torch.no_grad()
def validation_loss(model: nn.Module, task: Task, data: PaddedBatches, machine: Machine) -> dict[str, float]:
    """Per token, without smoothing: exp of it is the perplexity."""
    was_training = model.training
    model.eval()
    sums, tokens = [], []
    try:
        for batch in data.batches(0):
            with machine.autocast(), machine.uncompiled():
                loss = task.loss(model, batch.to(machine.device))
            sums.append(loss.plain)
            tokens.append(loss.tokens)
    finally:
        model.train(was_training)
    mean = float(torch.stack(sums).double().sum() / torch.stack(tokens).sum())
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0))}


def translate(folder: Folder, pairs: Sequence[Pair], decoding: Decoding, machine: Machine) -> list[str]:
    """What the model makes of the sources, exactly as a user of its folder would get it."""
    translator = Translator(folder)
    found: list[str] = [""] * len(pairs)
    with machine.uncompiled():  # and in fp32: autocast would cast every weight again for every token
        for to in dict.fromkeys(pair.to for pair in pairs):
            numbers = [n for n, pair in enumerate(pairs) if pair.to == to]
            texts = translator.translate([pairs[n].source for n in numbers], to, decoding=decoding)
            for n, text in zip(numbers, texts, strict=True):
                found[n] = text
    return found


def judge(hypotheses: Sequence[str], pairs: Sequence[Pair], resamples: int = 0) -> Scores:
    """The judge that `evaluate` is, told the language when there is just one."""
    languages = {pair.to for pair in pairs}
    language = languages.pop() if len(languages) == 1 else None
    return evaluate(hypotheses, [pair.target for pair in pairs], language, resamples=resamples)


def figures(scores: Scores) -> dict[str, float]:
    """Numbers from 0 to 100."""
    return {"bleu": scores.bleu, "chrf": scores.chrf, "exact": 100 * scores.exact}


def better(metric: str, new: Mapping[str, float], old: Mapping[str, float] | None) -> bool:
    """By the metric; where that ties (BLEU is 0 for a while), by the loss."""
    if math.isnan(new[metric]):
        return False
    sign = 1 if HIGHER_IS_BETTER[metric] else -1

    def rank(scores: Mapping[str, float]) -> tuple[float, float]:
        return sign * scores[metric], -scores["loss"]

    return old is None or rank(new) > rank(old)


def samples(pairs: Sequence[Pair], hypotheses: Sequence[str], count: int) -> str:
    """Some sentences as they came out, the same ones every time, spread over the set."""
    picked = [n * len(pairs) // count for n in range(min(count, len(pairs)))] if count else []
    return "\n".join(
        f"  source      {pairs[n].source}\n  reference   {pairs[n].target}\n  hypothesis  {hypotheses[n]}"
        for n in picked
    )
