"""A reward model from preferences: a score per answer, higher for the answer that people prefer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from allyouneed.data.batches.chats import ComparisonEncoding
from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items
from allyouneed.data.batches.store import Store
from allyouneed.data.files.chats import ComparisonFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.nn.batch import Batch
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.language.chat import TemplateTask
from allyouneed.tasks.task import Loss


class ComparisonTask(TemplateTask):
    """Compares two answers to one prompt. The source of a batch is the preferred answer, the target the other one, each
    with the prompt before it."""

    files: ClassVar[type[Files]] = ComparisonFiles
    kinds: ClassVar[tuple[str, ...]] = ("decoder",)
    sides: ClassVar[int] = 2
    loss_unit: ClassVar[str] = "comparisons"
    has_perplexity: ClassVar[bool] = False

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return ComparisonEncoding(vocabularies.target, self.template_source, max_tokens)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return ComparisonItems(store, vocabularies.target)

    def compare(self, margins: Tensor) -> Loss:
        """−log σ of each margin (comparisons,): the log-odds that the preferred answer is preferred."""
        total = -nn.functional.logsigmoid(margins).sum()
        correct = (margins.detach() > 0).sum()
        figures = {"accuracy": 100.0 * correct, "margin": margins.detach().sum()}
        return Loss(total, total.detach(), margins.new_tensor(len(margins)), figures)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        raise NotImplementedError("a comparison has two hidden states")


class Preference(ComparisonTask):
    """Bradley-Terry: −log σ(r(x, y_chosen) − r(x, y_rejected)), r a linear map of the last token (Ouyang et al. 2022,
    eq. 1, with two answers per prompt)."""

    heads: ClassVar[tuple[str, ...]] = ("classes",)
    metrics: ClassVar[dict[str, bool]] = {"accuracy": True, "margin": True, "loss": False}
    kind: Literal["preference"] = "preference"

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        """One class without a name, whose score is the reward."""
        return super().head(model, labels) | {"labels": 1}

    def loss(self, model: Any, batch: Batch) -> Loss:
        assert batch.source is not None
        losses: list[Tensor] = []
        chosen, rejected = (model.head(*model.run(Batch(side), losses)) for side in (batch.source, batch.target))
        # both sides pass through the same parts and each adds its auxiliary losses
        found = self.compare(widen_half(chosen - rejected).squeeze(-1))
        return found.with_auxiliary([loss / 2 for loss in losses])


def widen_half(x: Tensor) -> Tensor:
    """At least single precision, for the loss of a half-precision forward pass."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ComparisonItems(StoredItems):
    """Prompt and preferred answer, prompt and other answer. `margins`: log-odds of a reference (dpo.py)."""

    columns, sides = ("prompt", "chosen", "rejected"), 2
    margins: NDArray[np.float32] | None = None

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        prompt = self.store["prompt"].lengths
        return prompt + self.store["chosen"].lengths, prompt + self.store["rejected"].lengths

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        sides = []
        for name in ("chosen", "rejected"):
            rows = [(self.store["prompt"][n], self.store[name][n]) for n in members.tolist()]
            tokens = np.concatenate([part for row in rows for part in row]).astype(np.int64)
            given = np.concatenate([np.arange(len(p) + len(a)) < len(p) for p, a in rows])
            sides.append(FlatSide(tokens, {"prompt": given}))
        margins = np.zeros(len(members), np.float32) if self.margins is None else self.margins[members]
        return FlatBatch((sides[0], sides[1]), answers=margins)

    def show(self, number: int) -> dict[str, str]:
        return {name: self.tokenizer.decode(self.store[name][number].tolist()) for name in self.store.columns}
