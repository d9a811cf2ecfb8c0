"""Translation from both ends: each target token given the source, the target on its own side, and what the other
direction has written so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import Memory, TokenLayout
from allyouneed.tasks.task import Loss, token_loss
from allyouneed.tasks.translation.translation import PairTask


class SynchronousTranslation(PairTask):
    """Zhou et al. 2019, 3.4. The right-to-left target begins with the end mark: </s> y_n … y_1.

    If both directions read the correct target, each would find its answers in the other's input once they have passed
    the middle. The paper therefore trains a second time, on targets that the first model has decoded, as the other
    direction's input. Here the other direction reads the model's own predictions, made in the same step by a pass
    without gradients in which the directions do not see each other; the loss is that of the correct direction.
    """

    kinds: ClassVar[tuple[str, ...]] = ("encoder-decoder",)
    kind: Literal["synchronous-translation"] = "synchronous-translation"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Label smoothing."""

    def loss(self, model: Any, batch: Batch) -> Loss:
        assert batch.labels is not None and batch.source is not None
        losses: list[Tensor] = []
        memory = model.encode(batch.source, losses=losses)
        count = len(batch.labels)
        ahead, labels = batch.rows, batch.labels
        back, back_labels = reverse(ahead, labels, model.embed.layout(ahead))
        with torch.no_grad():
            guesses = [self._guess(model, rows, memory) for rows in (ahead, back)]
        torch.clear_autocast_cache()  # weights cast without gradients must not be reused
        # the halves: left to right, right to left; the directions that are correct: rows 0 and 3 of each four
        rows = repeat(ahead, torch.cat([ahead.tokens, guesses[0], guesses[1], back.tokens]))
        hidden = model.decode(rows, _repeat_memory(memory, 4), losses=losses)
        correct = torch.cat([hidden[:count], hidden[3 * count :]])
        layout = model.embed.layout(ahead)
        found = self.objective(model, correct, layout, torch.cat([labels, back_labels]))
        # per token of the target, which is predicted twice
        return Loss(found.total / 2, found.plain / 2, found.tokens // 2).with_auxiliary(losses)

    def _guess(self, model: Any, rows: Rows, memory: Memory) -> Tensor:
        """What the direction would read had it chosen each token itself (batch, time)."""
        chosen = model.head(model.decode(rows, memory)).argmax(-1)
        first = model.embed.layout(rows).positions == 0
        return torch.where(first, rows.tokens, chosen.roll(1, 1))

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


def reverse(rows: Rows, labels: Tensor, layout: TokenLayout) -> tuple[Rows, Tensor]:
    """The same targets from right to left: inputs and labels. Inputs are BOS y_1 … y_n, labels y_1 … y_n EOS; they
    become EOS y_n … y_1 and y_n … y_1 EOS. Padding stays."""
    positions = layout.positions.expand_as(labels)
    segments = torch.ones_like(labels) if layout.segments is None else layout.segments
    counts = torch.zeros_like(labels).scatter_reduce(1, segments, (positions + 1) * (segments > 0), "amax")
    last = counts.gather(1, segments) - 1  # position of EOS among the labels
    columns = torch.arange(labels.shape[1], device=labels.device) - positions  # where the sentence begins
    source = columns + torch.where(positions < last, last - 1 - positions, positions)
    real = segments > 0
    turned = torch.where(real, labels.gather(1, source.clamp(min=0)), labels)
    eos = labels.gather(1, (columns + last).clamp(min=0))
    inputs = torch.where(positions == 0, eos, turned.roll(1, 1))
    return replace(rows, tokens=torch.where(real, inputs, rows.tokens)), turned


def repeat(rows: Rows, tokens: Tensor) -> Rows:
    """Rows with the layout of `rows`, repeated, and mirrored."""
    times = len(tokens) // len(rows.tokens)
    repeated = rows.each(lambda tensor: torch.cat([tensor] * times))
    return replace(repeated, tokens=tokens, mirrored=True)


def _repeat_memory(memory: Memory, times: int) -> Memory:
    return memory.select(torch.arange(len(memory.hidden), device=memory.hidden.device).repeat(times))
