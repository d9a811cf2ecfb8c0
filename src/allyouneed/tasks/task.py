"""What a model is trained for: an objective, what it reads, how its batches are made and what it is judged by.

One file per task. Training knows none of them: it asks. How a person uses what came out is in `infer`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.packing import Batches, Items, PackedBatches, PaddedBatches
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files, Report
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE, Batch
from allyouneed.nn.context import TokenLayout

MAX_TOKENS = 128  # of an example that is kept whole
BUDGET = 4096  # tokens of a batch that is only judged
VALIDATION_SEED = 0  # the seed of what is drawn in data to judge by: every run, and `evaluate`, gets the same questions
POOLED = ("classes", "pooled")  # heads that gather a text into one vector


class Loss(NamedTuple):
    """Sums over what is labelled in a batch (tokens, or whole texts), so that batches and processes add up exactly."""

    total: Tensor  # what is minimised
    plain: Tensor  # without smoothing and the like; where it is a likelihood, exp(plain / tokens) is the perplexity
    tokens: Tensor  # how many were labelled

    def plus(self, losses: Sequence[Tensor]) -> Loss:
        """With what parts of the model add, each a mean over the batch."""
        total = self.total
        for loss in losses:
            total = total + loss * self.tokens
        return self._replace(total=total)


class Task(Part, slot="task", default="translation"):
    files: ClassVar[type[Files]]  # what it reads
    kinds: ClassVar[tuple[str, ...]]  # the kinds of models it can train
    heads: ClassVar[tuple[str, ...]] = ("vocabulary",)  # that give what it asks for; the first unless said otherwise
    sides: ClassVar[int] = 1  # how many texts stand beside each other in a batch
    two_vocabularies: ClassVar[bool] = False  # each side may have its own
    counted: ClassVar[str] = "tokens"  # what is labelled
    supports_weights: ClassVar[bool] = False  # its files may say how often an epoch reads them
    has_perplexity: ClassVar[bool] = True  # the plain loss is that of a choice among tokens: it has a perplexity
    metrics: ClassVar[dict[str, bool]]  # what it can be judged by, the usual first, and whether more is better
    decoding: ClassVar[dict[str, Any]] = {}  # how what it learns is best decoded, where that is not beam search

    @property
    def reads(self) -> type[Files]:
        return self.files

    @property
    def splits_documents(self) -> bool:
        """Long examples are cut to fit, as documents can be; others are kept whole or left out."""
        return self.reads is TextFiles

    @property
    def carries(self) -> bool:
        """Rows go on from batch to batch, and the model remembers."""
        return False

    def specials(self) -> tuple[str, ...]:
        """Tokens it needs besides those every tokenizer has."""
        return ()

    def labels(self, files: Sequence[Files]) -> list[str]:
        """All there are in the training data, in a fixed order; none for tasks without."""
        return []

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        """The head of a model that learns this: the one it has if that will do, with all that the data decides. Labels
        are None as long as the data was not read."""
        given = model.get("head")
        kind = given.get("kind", "vocabulary") if isinstance(given, dict) else given or "vocabulary"
        if kind in self.heads:
            return given
        # nobody but the last token of a causal stack has seen the whole text
        pool = {"pool": "last"} if model.get("kind") == "decoder" and self.heads[0] in POOLED else {}
        return {"kind": self.heads[0]} | pool

    @abstractmethod
    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        """How examples are stored."""

    @abstractmethod
    def items(self, store: Store, vocabularies: Vocabularies, room: tuple[int, ...], seed: int) -> Items:
        """What batches are made of; `room`: how many tokens an item may have on each side."""

    def batches(self, items: Items, room: tuple[int, ...], rows: int, seed: int) -> Batches:
        """What is trained on: packed rows, or as many tokens in rows of one item each where these must be alone."""
        return PaddedBatches(items, rows * room[-1], seed) if items.alone else PackedBatches(items, room, rows, seed)

    def validation_batches(self, items: Items, longest: int) -> Batches:
        """What is judged by: items of up to so many tokens."""
        return PaddedBatches(items, max(longest, BUDGET))

    def loss(self, model: Any, batch: Batch) -> Loss:
        assert batch.labels is not None
        losses: list[Tensor] = []
        hidden, layout = model.run(batch, losses)
        return self.objective(model, hidden, layout, batch.labels).plus(losses)

    @abstractmethod
    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        """From hidden states to what is minimised."""


def token_loss(head: Any, hidden: Tensor, labels: Tensor, smoothing: float = 0.0) -> Loss:
    """Cross-entropy of the vocabulary over the labelled tokens."""
    smoothed, plain = head.loss(hidden, labels, smoothing)
    return Loss(smoothed, plain.detach(), (labels != IGNORE).sum())


def class_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Loss:
    """Cross-entropy of a few classes: logits (…, classes), labels (…)."""
    flat, wanted = logits.float().flatten(0, -2), labels.flatten()
    total = nn.functional.cross_entropy(flat, wanted, ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum")
    plain = total
    if smoothing:
        plain = nn.functional.cross_entropy(flat, wanted, ignore_index=IGNORE, reduction="sum")
    return Loss(total, plain.detach(), (labels != IGNORE).sum())


def with_labels(head: Any, labels: Sequence[str] | None) -> dict[str, Any]:
    """A head with the number of labels that the data has; refuse one that was written for another number."""
    tree = dict(head) if isinstance(head, dict) else {"kind": head}
    if labels is None:
        return {"labels": 2} | tree
    said = tree.get("labels")
    if said is not None and said != len(labels):
        raise UserError(f"model.head.labels: {said}, but the training data has {len(labels)}; leave 'labels' out")
    return tree | {"labels": len(labels)}


def every(files: Sequence[Files]) -> Iterator[Any]:
    """All examples, for a look before they are encoded; what cannot be used is told when they are."""
    report = Report()
    for entry in files:
        yield from entry.read(report)
