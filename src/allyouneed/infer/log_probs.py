"""Log-probabilities of given targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from allyouneed.nn.batch import IGNORE, Batch, Rows

ROWS = 64  # targets of a forward pass


@torch.no_grad()
def target_log_probs(
    model: Any,
    sources: Sequence[Sequence[int]] | None,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
) -> list[float]:
    """The sum of log-probabilities of each answer, end mark included, after its prompt, begin mark included. `sources`:
    of an encoder-decoder; without them the model is a decoder, whose prompt may see all of itself."""
    device, was_training = next(model.parameters()).device, model.training
    order = sorted(
        range(len(answers)), key=lambda n: (len(prompts[n] if sources is None else sources[n]), len(answers[n]))
    )
    found = [0.0] * len(answers)
    model.eval()
    try:
        for some in (order[at : at + ROWS] for at in range(0, len(order), ROWS)):
            targets = Rows.of([[*prompts[n], *answers[n]][:-1] for n in some])
            given = [[IGNORE] * (len(prompts[n]) - 1) + [*answers[n]] for n in some]
            labels = Rows.of(given, pad=IGNORE).tokens.to(device)
            if sources is None:
                places = torch.arange(targets.tokens.shape[1])
                prompt = places < torch.tensor([len(prompts[n]) for n in some])[:, None]
                batch = Batch(replace(targets, prompt=prompt)).to(device)
            else:
                batch = Batch(targets, Rows.of([list(sources[n]) for n in some])).to(device)
            scores = model.logits(batch).float().log_softmax(-1)
            chosen = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            sums = chosen.double().where(labels != IGNORE, 0).sum(1).tolist()
            for n, total in zip(some, sums, strict=True):
                found[n] = total
    finally:
        model.train(was_training)
    return found
