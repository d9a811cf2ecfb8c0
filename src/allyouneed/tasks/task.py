"""What a model is trained for: files, encoding, batches, objective and metrics.

One file per task. The training loop knows only this interface; predictors for trained models are in `infer`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from allyouneed.config import Part
from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.packing import Batches, Items, PackedBatches, PaddedBatches
from allyouneed.data.batches.store import Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.readers import Files, Report
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE, Batch, count_labels
from allyouneed.nn.context import TokenLayout

MAX_TOKENS = 128  # default limit for examples that are not split
BUDGET = 4096  # tokens of a validation batch
VALIDATION_SEED = 0  # for random choices in held-out data: the same for every run and for `evaluate`
POOLED = ("classes", "pooled")  # heads that pool a text into one vector


class Loss(NamedTuple):
    """Sums over the labelled tokens or texts of a batch, so that batches and processes add up exactly."""

    total: Tensor  # minimised
    plain: Tensor  # without label smoothing; with `has_perplexity`, exp(plain / tokens) is the perplexity
    tokens: Tensor  # number of labels
    figures: Mapping[str, Tensor] = {}  # further sums to report with the validation loss, by name

    def with_auxiliary(self, losses: Sequence[Tensor]) -> Loss:
        """Plus auxiliary losses of the model's parts, each a mean over the batch."""
        total = self.total
        for loss in losses:
            total = total + loss * self.tokens
        return self._replace(total=total)


class Task(Part, slot="task", default="translation"):
    files: ClassVar[type[Files]]
    kinds: ClassVar[tuple[str, ...]]  # of models it can train
    heads: ClassVar[tuple[str, ...]] = ("vocabulary",)  # supported; the first is the default
    sides: ClassVar[int] = 1  # 2: source and target
    reads: ClassVar[Mapping[str, str]] = {}  # what the embeddings of its models read, by slot, where it is not text
    usual_tokens: ClassVar[int] = MAX_TOKENS  # default limit for examples that are not split
    has_texts: ClassVar[bool] = True  # examples have texts, which need a tokenizer
    usual_rows: ClassVar[int] = 8  # of a batch; 4,096 target tokens with rows of 512
    least_rows: ClassVar[int] = 1  # of a batch of small data
    two_vocabularies: ClassVar[bool] = False  # each side may have its own
    loss_unit: ClassVar[str] = "tokens"  # what the loss is averaged over
    supports_weights: ClassVar[bool] = False  # files may set how often an epoch reads their examples
    has_perplexity: ClassVar[bool] = True  # the plain loss is a cross-entropy over the vocabulary
    metrics: ClassVar[dict[str, bool]]  # name to whether higher is better; the first is the default
    decoding: ClassVar[dict[str, Any]] = {}  # default decoding options, if not beam search
    needs_start: ClassVar[bool] = False  # it tunes a trained model
    default_steps: ClassVar[int] = 100_000  # of the paper's base model
    required_keys: ClassVar[tuple[str, ...]] = ()  # of its own, which a recipe must set
    unused_keys: ClassVar[tuple[str, ...]] = ()  # fields of a recipe without effect on it
    free_keys: ClassVar[tuple[str, ...]] = ()  # of its own, which may differ when a run is resumed
    compares_batch: ClassVar[bool] = False  # the loss of an example depends on the others of its batch
    fills_rows: ClassVar[bool] = False  # an example may be as long as a row of the batch, by default

    def reads_of(self, kind: str) -> Mapping[str, str]:
        """What the embeddings of a model of this kind read, by slot, where it is not text."""
        return self.reads

    @property
    def file_type(self) -> type[Files]:
        return self.files

    @property
    def splits_documents(self) -> bool:
        """Long examples are split into pieces, as documents can be; otherwise they are dropped."""
        return self.file_type is TextFiles

    @property
    def copies(self) -> int:
        """How often the model reads each token of an example."""
        return 1

    @property
    def has_memory(self) -> bool:
        """Rows continue from batch to batch, and the model keeps a memory."""
        return False

    def specials(self) -> tuple[str, ...]:
        """Special tokens it needs besides the standard ones."""
        return ()

    @classmethod
    def defaults_from(cls, start: Path) -> dict[str, Any]:
        """Options that default to those of the model folder to start from."""
        return {}

    def learnt(self, start: Mapping[str, Any]) -> dict[str, Any]:
        """Options that the model to start from, trained for the task `start`, has learnt and keeps."""
        return {}

    def for_model(self, model: Mapping[str, Any]) -> Self:
        """The same task with options that the model, given as a tree, determines; ValueError if they contradict it."""
        return self

    def entry_defaults(self) -> dict[str, Any]:
        """Keys of its files that default to what it needs."""
        return {}

    def finished(self, model: nn.Module) -> nn.Module:
        """What remains of the model after training."""
        return model

    def folder_files(self) -> dict[str, bytes]:
        """Small files that a model trained for it needs besides its weights and tokenizer, by name."""
        return {}

    def labels(self, files: Sequence[Files]) -> list[str]:
        """All labels of the training data, sorted; empty for tasks without."""
        return []

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        """The head for this task: the model's own if it fits, completed with what the data determines. `labels` is None
        before the data is read."""
        given = model.get("head")
        kind = given.get("kind", "vocabulary") if isinstance(given, dict) else given or "vocabulary"
        if kind in self.heads:
            return given
        # in a causal stack only the last token has seen the whole text
        pool = {"pool": "last"} if model.get("kind") == "decoder" and self.heads[0] in POOLED else {}
        return {"kind": self.heads[0]} | pool

    def complete(self, model: Mapping[str, Any], files: Sequence[Files]) -> Mapping[str, Any]:
        """The model with the sizes that the columns of the training files determine."""
        return model

    def learn_vocabularies(self, config: TokenizerConfig, files: Sequence[Files], filters: Filters) -> Vocabularies:
        """The tokenizers of a new model."""
        return Vocabularies.train(config, files, filters, self.specials())

    def with_vocabulary(self, model: Mapping[str, Any], size: Any) -> dict[str, Any]:
        """The model for vocabularies of this size: a number, or those of source and target."""
        return {**model, "vocab": size}

    @abstractmethod
    def encoding(self, vocabularies: Any, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        """How examples are encoded. `vocabularies`: Vocabularies, or None without texts."""

    @abstractmethod
    def items(self, store: Store, vocabularies: Any, capacities: tuple[int, ...], seed: int) -> Items:
        """The items of batches; `capacities`: the most tokens of an item on each side."""

    def batches(self, items: Items, capacities: tuple[int, ...], rows: int, seed: int) -> Batches:
        """Training batches: packed rows, or padded batches of as many tokens if items must not share a row."""
        return (
            PaddedBatches(items, rows * capacities[-1], seed)
            if items.one_per_row
            else PackedBatches(items, capacities, rows, seed)
        )

    def validation_batches(self, items: Items, longest: int) -> Batches:
        """Validation batches of items with up to `longest` tokens."""
        return PaddedBatches(items, max(longest, BUDGET))

    def loss(self, model: Any, batch: Batch) -> Loss:
        assert batch.labels is not None
        losses: list[Tensor] = []
        hidden, layout = model.run(batch, losses)
        return self.objective(model, hidden, layout, batch.labels).with_auxiliary(losses)

    @abstractmethod
    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        """The loss from hidden states."""


def token_loss(head: Any, hidden: Tensor, labels: Tensor, smoothing: float = 0.0) -> Loss:
    """Cross-entropy of the vocabulary over the labelled tokens."""
    smoothed, plain = head.loss(hidden, labels, smoothing)
    return Loss(smoothed, plain.detach(), (labels != IGNORE).sum())


def class_loss(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Loss:
    """Cross-entropy of a few classes: logits (…, classes), labels (…), or their probabilities (…, classes)."""
    flat, wanted = logits.float().flatten(0, -2), labels.flatten()
    if labels.is_floating_point():
        wanted = labels.flatten(0, -2)
        wanted = wanted.where(wanted != IGNORE, 0)
    total = nn.functional.cross_entropy(flat, wanted, ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum")
    plain = total
    if smoothing:
        plain = nn.functional.cross_entropy(flat, wanted, ignore_index=IGNORE, reduction="sum")
    return Loss(total, plain.detach(), count_labels(labels))


def set_label_count(head: Any, labels: Sequence[str] | None) -> dict[str, Any]:
    """The head with the number of labels of the data; raise if it was set to another number."""
    tree = dict(head) if isinstance(head, dict) else {"kind": head}
    if labels is None:
        return {"labels": 2} | tree
    configured = tree.get("labels")
    if configured is not None and configured != len(labels):
        count = len(labels)
        raise UserError(f"model.head.labels: {configured}, but the training data has {count}; set head.labels={count}")
    return tree | {"labels": len(labels)}


def read_examples(files: Sequence[Files]) -> Iterator[Any]:
    """All examples, before encoding; unusable ones are reported when they are encoded."""
    report = Report()
    for entry in files:
        yield from entry.read(report)
