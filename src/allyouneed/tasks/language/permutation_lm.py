"""Permutation language modelling: predict the last tokens of a random order, each from those before it (XLNet)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.documents import DocumentPieces
from allyouneed.data.batches.encoding import Encoding, TextEncoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import Batches, FlatBatch, FlatSide, Ints, Items, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import MASK, Tokenizer, Vocabularies
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.encoder import Encoder
from allyouneed.tasks.language.bounded_state import unbounded_state_problems
from allyouneed.tasks.language.permuted_segments import FramedDocuments, PermutedSegments
from allyouneed.tasks.task import Loss, Task, token_loss


class PermutationLM(Task):
    """One token in `one_in` is predicted, in an order redrawn every epoch, from all context tokens and the targets
    before it (Yang et al. 2019, 2.2 and 2.3, partial prediction with K = `one_in`). Targets come in runs of up to `run`
    neighbours, one run in every stretch of `one_in` times its length (3.1, span-based prediction).

    A query token after the text stands for each target (nn/models/two_stream.py), so the model needs `embed.asks` and
    the pattern `permuted`. Context tokens attend to each other, as in the authors' code.

    `memory`: segments of concatenated documents, each attending to the memory of the previous ones (2.4).
    """

    files: ClassVar[type[Files]] = TextFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder",)
    loss_unit: ClassVar[str] = "predicted tokens"
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    kind: Literal["permutation-lm"] = "permutation-lm"
    one_in: Annotated[int, Field(ge=2)] = 6
    """One token in this many is predicted (K)."""
    run: Annotated[int, Field(ge=1)] = 5
    """Longest run of neighbouring targets."""
    memory: bool = False
    """Attend to the memory of the previous segments of concatenated documents (2.4)."""

    @property
    def has_memory(self) -> bool:
        return self.memory

    def specials(self) -> tuple[str, ...]:
        return (MASK,)  # not in training texts; users write it where a token is to be predicted

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        config = parse(Model, model, "model")  # type: ignore[type-abstract]
        problems = []
        if isinstance(config, Encoder):
            if not getattr(config.embed, "asks", False):
                problems.append("embed.asks: permutation-lm needs query tokens: set embed.asks: true")
            for number, layer in enumerate(config.encoder):
                if layer.mixer is not None and "permuted" not in str(getattr(layer.mixer, "pattern", "")):
                    problems.append(f"encoder[{number}].mixer.pattern: must hide later targets: use permuted")
        if self.memory:
            problems += unbounded_state_problems(config, "encoder")
        if problems:
            raise ConfigError(problems, "model")
        return super().head(model, labels)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return TextEncoding({"text": vocabularies.target}, None)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        if self.memory:
            return FramedDocuments(store, vocabularies.target, capacities[-1], seed)
        return PermutedItems(store, vocabularies.target, capacities[-1], self.one_in, self.run, seed)

    def batches(self, items: Items, capacities: tuple[int, ...], rows: int, seed: int) -> Batches:
        if isinstance(items, FramedDocuments):
            return self._segments(items, rows, capacities[-1], seed)
        return super().batches(items, capacities, rows, seed)

    def validation_batches(self, items: Items, longest: int) -> Batches:
        if isinstance(items, FramedDocuments):
            return self._segments(items, 1, longest, None)
        return super().validation_batches(items, longest)

    def _segments(self, items: FramedDocuments, rows: int, row: int, seed: int | None) -> Batches:
        """The longest segments that fit a row together with their queries."""
        size = max(size for size in range(1, row) if size + max(size // self.one_in, 1) <= row)

        def draw(count: int, target_count: int, rng: np.random.Generator) -> Ints:
            return draw_runs(count, target_count, self.one_in, self.run, rng)

        return PermutedSegments(items, rows, size, self.one_in, draw, seed)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels)


class PermutedItems(StoredItems):
    """Pieces of documents, each between BOS and EOS and followed by its query tokens, at most `max_length` tokens in
    all."""

    def __init__(self, store: Store, tokenizer: Tokenizer, max_length: int, one_in: int, run: int, seed: int) -> None:
        super().__init__(store, tokenizer)
        self.one_in, self.run, self.seed = one_in, run, seed
        sizes = np.arange(1, max_length)
        fitting = sizes[sizes + tokenizer.template.count() + self.target_count(sizes) <= max_length]
        self.pieces = DocumentPieces.split(store["text"].lengths.astype(np.int64), int(fitting.max()))

    def target_count(self, lengths: Ints) -> Ints:
        """Number of targets among this many tokens."""
        return np.maximum(lengths // self.one_in, 1)

    def __len__(self) -> int:
        return len(self.pieces)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.pieces.lengths + self.tokenizer.template.count() + self.target_count(self.pieces.lengths),)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        columns: list[tuple[Ints, ...]] = []
        for number in members.tolist():
            ids = self.pieces.tokens(self.store["text"], number)
            rng = generator(self.seed, epoch, number)
            runs = draw_runs(len(ids), int(self.target_count(np.array(len(ids)))), self.one_in, self.run, rng)
            # indices in the framed text, in prediction order
            targets = len(self.tokenizer.template.before) + rng.permutation(runs)
            tokens = np.array(self.tokenizer.frame(ids.tolist())[0])
            order = np.zeros(len(tokens), dtype=np.int64)
            order[targets] = np.arange(1, len(targets) + 1)
            columns.append(
                (
                    np.concatenate([tokens, np.full(len(targets), self.tokenizer.pad)]),
                    np.concatenate([order, -1 - order[targets]]),
                    np.concatenate([np.arange(len(tokens)), targets]),
                    np.concatenate([np.full(len(tokens), IGNORE), tokens[targets]]),
                )
            )
        tokens, order, positions, labels = (
            np.concatenate(column).astype(np.int64) for column in zip(*columns, strict=True)
        )
        return FlatBatch((FlatSide(tokens, {"order": order, "positions": positions}),), labels)

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.pieces.tokens(self.store["text"], number).tolist())}


def draw_runs(count: int, target_count: int, one_in: int, longest: int, rng: np.random.Generator) -> Ints:
    """Indices of `target_count` of `count` tokens, sorted: runs of 1 to `longest` neighbours, each at a random offset
    in a stretch of its own, `one_in` times as long (shorter at the end of the text)."""
    targets: list[int] = []
    begin = 0
    while len(targets) < target_count:
        size = int(rng.integers(1, min(longest, target_count - len(targets)) + 1))
        stretch = min(size * one_in, count - begin)
        first = begin + int(rng.integers(0, stretch - size + 1))
        targets += range(first, first + size)
        begin += stretch
    return np.array(targets)
