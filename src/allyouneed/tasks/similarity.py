"""Text similarity: the cosine of two vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn

from allyouneed.data.batches.encoding import EncodedRow, Encoding, ScoredTextEncoding, TextEncoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, add_special_tokens
from allyouneed.data.batches.store import Store
from allyouneed.data.files.labels import Scored, ScoredFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task


class TwoTextTask(Task):
    """Encode both texts of an example with the same model and compare one vector of each. With `widths`, the first
    numbers of both vectors are compared, too, and the losses averaged (Kusupati et al. 2022, "Matryoshka Representation
    Learning", eq. 1): vectors may be cut to these widths."""

    heads: ClassVar[tuple[str, ...]] = ("pooled",)
    sides: ClassVar[int] = 2
    loss_unit: ClassVar[str] = "pairs"
    has_perplexity: ClassVar[bool] = False
    widths: tuple[PositiveInt, ...] = ()
    """Widths to which vectors may be cut (Matryoshka), besides their own."""

    def for_model(self, model: Mapping[str, Any]) -> Self:
        head = model.get("head")
        width = (head.get("width") if isinstance(head, Mapping) else None) or model.get("width")
        if isinstance(width, int) and any(one >= width for one in self.widths):
            raise ValueError(f"task.widths: the vectors of the model have {width} numbers; name smaller widths only")
        return self

    def loss(self, model: Any, batch: Batch) -> Loss:
        assert batch.source is not None and batch.labels is not None
        losses: list[Tensor] = []
        first, second = (model.head(*model.run(Batch(side), losses)) for side in (batch.source, batch.target))
        # both sides pass through the same parts and each adds its auxiliary losses
        found = self._compare_all(first.float(), second.float(), batch.labels)
        return found.with_auxiliary([loss / 2 for loss in losses])

    def _compare_all(self, first: Tensor, second: Tensor, answers: Tensor) -> Loss:
        """The mean of the losses of the vectors and of their beginnings."""
        whole = self.compare(first, second, answers)
        parts = [self.compare(first[:, :width], second[:, :width], answers) for width in self.widths]
        count = 1 + len(parts)
        total, plain = (
            sum((getattr(part, name) for part in parts), getattr(whole, name)) for name in ("total", "plain")
        )
        return whole._replace(total=total / count, plain=plain / count)

    def compare(self, first: Tensor, second: Tensor, answers: Tensor) -> Loss:
        """first, second (pairs, width)"""
        raise NotImplementedError

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        raise NotImplementedError("a pair has two hidden states")


class Similarity(TwoTextTask):
    """The cosine of the two vectors is trained to be the score, mapped from `range` to [0, 1].

    mse: (cosine − score)² (Reimers, Gurevych 2019, 3). cosine: score · (1 − cosine) + (1 − score) · max(0, cosine −
    margin), torch's CosineEmbeddingLoss with scores between its two labels.
    """

    files: ClassVar[type[Files]] = ScoredFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    metrics: ClassVar[dict[str, bool]] = {"spearman": True, "pearson": True, "loss": False}
    kind: Literal["similarity"] = "similarity"
    range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score of the data."""
    objective_: Annotated[Literal["mse", "cosine"], Field(alias="objective")] = "mse"
    """Squared error of the cosine, or torch's CosineEmbeddingLoss with scores between its labels."""
    margin: Annotated[float, Field(ge=-1, lt=1)] = 0.0
    """Margin of the `cosine` objective."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.range[0] >= self.range[1]:
            raise ValueError(f"range: [lowest, highest], not {list(self.range)}")
        return self

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        tokenizer = vocabularies.target
        special_count = tokenizer.template.count()
        return _UnitScoreEncoding(
            {"source": tokenizer, "target": tokenizer}, max_tokens, special_count=special_count, low_high=self.range
        )

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return TwoTextItems(store, vocabularies.target)

    def compare(self, first: Tensor, second: Tensor, answers: Tensor) -> Loss:
        cosine = nn.functional.cosine_similarity(first, second)
        if self.objective_ == "mse":
            each = (cosine - answers).square()
        else:
            each = answers * (1 - cosine) + (1 - answers) * (cosine - self.margin).clamp(min=0)
        count = answers.new_tensor(len(answers))
        return Loss(each.sum(), each.detach().sum(), count)


class _UnitScoreEncoding(ScoredTextEncoding):
    """Scores mapped to [0, 1]."""

    name = "_Scores"

    def __init__(self, *texts: Any, low_high: tuple[float, float], **options: Any) -> None:
        super().__init__(*texts, **options)
        self.low, self.high = low_high
        self.spec |= {"range": list(low_high)}

    def extra_columns(self, example: Scored) -> EncodedRow:
        if not self.low <= example.score <= self.high:
            raise UserError(
                f"{example.file}:{example.line}: score {example.score:g} is outside task.range, "
                f"[{self.low:g}, {self.high:g}]; set it to the lowest and the highest score of the data"
            )
        return [[(example.score - self.low) / (self.high - self.low)]]


def two_text_encoding(tokenizer: Tokenizer, max_tokens: int | None) -> TextEncoding:
    return TextEncoding(
        {"source": tokenizer, "target": tokenizer}, max_tokens, special_count=tokenizer.template.count()
    )


class TwoTextItems(StoredItems):
    """Two texts side by side, each between BOS and EOS; the answer is their score or, without scores, the index of the
    matching text in the batch."""

    columns, sides = ("source", "target"), 2

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        special_count = self.tokenizer.template.count()
        return self.store["source"].lengths + special_count, self.store["target"].lengths + special_count

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        sides, template = [], self.tokenizer.template
        for name in ("source", "target"):
            column = self.store[name]
            lengths = column.lengths[members].astype(np.int64)
            sides.append(FlatSide(add_special_tokens(column.gather(members), lengths, template.before, template.after)))
        answers: NDArray[Any] = np.arange(len(members))
        if "score" in self.store.columns:
            answers = np.array([self.store["score"][int(n)][0] for n in members], dtype=np.float32)
        return FlatBatch((sides[0], sides[1]), answers=answers)

    def show(self, number: int) -> dict[str, str]:
        names = {"source": "first", "target": "second"}
        return {key: self.tokenizer.decode(self.store[name][number].tolist()) for name, key in names.items()}
