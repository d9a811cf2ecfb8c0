"""Find the answer to a question in a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.packing import Items
from allyouneed.data.batches.questions import QuestionEncoding, QuestionItems
from allyouneed.data.batches.store import Store
from allyouneed.data.files.questions import QuestionFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, class_loss


class QuestionAnswering(Task):
    """Cross-entropies of the first and the last token of the answer among all tokens of question and text (Devlin et
    al. 2019, 4.2). Where a window of a long text does not contain it, both are the first token (4.3)."""

    files: ClassVar[type[Files]] = QuestionFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder",)
    heads: ClassVar[tuple[str, ...]] = ("span",)
    loss_unit: ClassVar[str] = "ends of answers"
    has_perplexity: ClassVar[bool] = False
    fills_rows: ClassVar[bool] = True
    metrics: ClassVar[dict[str, bool]] = {"f1": True, "exact": True, "loss": False}
    kind: Literal["question-answering"] = "question-answering"
    unanswerable: bool = False
    """Questions may have no answer (SQuAD 2): they are learned, and the model may answer nothing."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A text that is too long is read in windows, each this share of its length after the one before."""
    longest: Annotated[int, Field(gt=0)] = 30
    """The most tokens of an answer that the model gives."""
    threshold: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """With `unanswerable`: how much the scores of no answer must exceed those of the best one."""
    free_keys: ClassVar[tuple[str, ...]] = ("longest", "threshold")

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        assert max_tokens is not None
        return QuestionEncoding(vocabularies.target, max_tokens, self.unanswerable)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return QuestionItems(store, vocabularies.target, capacities[-1], self.share)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        """labels (rows, 2)"""
        scores = model.head(hidden, layout).float()  # (rows, time, 2)
        if layout.segments is not None:
            scores = scores.masked_fill((layout.segments == 0)[..., None], torch.finfo(scores.dtype).min)
        return class_loss(scores.transpose(1, 2), labels)
