"""Span corruption: predict the spans removed from a text (T5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from allyouneed.data.batches.documents import DocumentPieces
from allyouneed.data.batches.encoding import Encoding, TextEncoding
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import Vocabularies, sentinel
from allyouneed.errors import UserError
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, token_loss


class SpanCorruption(Task):
    """Each removed span is replaced by a sentinel; the target is every sentinel followed by its span
    (Raffel et al. 2020, 3.1.4 and figure 2; without the closing sentinel of the figure, as the authors' code has it).

    `density` of the tokens are removed, in spans of `span` tokens on average, redrawn every epoch.
    """

    files: ClassVar[type[Files]] = TextFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder-decoder",)
    sides: ClassVar[int] = 2
    loss_unit: ClassVar[str] = "target tokens"
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    kind: Literal["span-corruption"] = "span-corruption"
    density: Annotated[float, Field(gt=0, lt=0.5)] = 0.15
    """Share of the tokens to remove."""
    span: Annotated[float, Field(ge=1)] = 3.0
    """Mean length of a removed span, in tokens."""
    sentinels: PositiveInt = 100
    """Number of sentinel tokens: the most spans of a text."""

    def specials(self) -> tuple[str, ...]:
        return tuple(sentinel(number) for number in range(self.sentinels))

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return TextEncoding({"text": vocabularies.target}, None)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return SpanItems(store, vocabularies, self, capacities, seed)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels)


def noise_sizes(tokens: int, density: float, span: float) -> tuple[int, int]:
    """Number of removed tokens and of spans (the authors' random_spans_noise_mask)."""
    noise = min(max(1, round(tokens * density)), max(1, tokens - 1))
    return noise, min(max(1, round(noise / span)), noise, max(1, tokens - noise))


def noise_spans(tokens: int, noise: int, span_count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """The spans as (begin, end): kept and removed pieces alternate, kept first, with random lengths."""
    kept, cut = _split_total(tokens - noise, span_count, rng), _split_total(noise, span_count, rng)
    ends = np.cumsum(kept + cut)
    return [(int(end - size), int(end)) for end, size in zip(ends, cut, strict=True)]


def _split_total(total: int, count: int, rng: np.random.Generator) -> Ints:
    """`total` as a sum of `count` numbers, each at least 1 if `total` allows it."""
    if total < count:
        return np.array([0] * (count - total) + [1] * total, dtype=np.int64)
    cuts = np.sort(rng.permutation(total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)


class SpanItems(Items):
    """Source: the kept tokens with sentinels, and EOS. Target: BOS, then sentinels and removed spans."""

    def __init__(
        self, store: Store, vocabularies: Vocabularies, task: SpanCorruption, capacities: tuple[int, ...], seed: int
    ) -> None:
        self.store, self.tokenizer, self.task, self.seed = store, vocabularies.target, task, seed
        store.check(text=self.tokenizer)
        self.pads = vocabularies.source.pad, vocabularies.target.pad
        self.sentinels = [self.tokenizer.special(name) for name in task.specials()]
        self.pieces = DocumentPieces.split(store["text"].lengths.astype(np.int64), self._longest_piece(capacities))
        sizes = {n: noise_sizes(n, task.density, task.span) for n in set(self.pieces.lengths.tolist())}
        cut = np.array([sizes[n] for n in self.pieces.lengths.tolist()], dtype=np.int64).reshape(-1, 2)
        self.noise, self.span_count = cut[:, 0], cut[:, 1]

    def _longest_piece(self, capacities: tuple[int, ...]) -> int:
        """The longest piece whose two sides fit and that has enough sentinels."""
        for tokens in range(capacities[0], 0, -1):
            noise, span_count = noise_sizes(tokens, self.task.density, self.task.span)
            fits = tokens - noise + span_count + 1 <= capacities[0] and noise + span_count + 1 <= capacities[-1]
            if fits and span_count <= len(self.sentinels):
                return tokens
        raise UserError(
            f"rows of {capacities[0]} and {capacities[-1]} tokens are too short for span corruption; raise batch.row"
        )

    def __len__(self) -> int:
        return len(self.pieces)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return self.pieces.lengths - self.noise + self.span_count + 1, self.noise + self.span_count + 1

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        sources: list[int] = []
        targets: list[int] = []
        labels: list[int] = []
        for number in members.tolist():
            ids = self.pieces.tokens(self.store["text"], number).tolist()
            rng = generator(self.seed, epoch, number)
            spans = noise_spans(len(ids), int(self.noise[number]), int(self.span_count[number]), rng)
            source, target = corrupt(ids, spans, self.sentinels)
            sources += [*source, self.tokenizer.eos]
            targets += [self.tokenizer.bos, *target]
            labels += [*target, self.tokenizer.eos]
        sides = FlatSide(np.array(sources, dtype=np.int64)), FlatSide(np.array(targets, dtype=np.int64))
        return FlatBatch(sides, np.array(labels, dtype=np.int64))

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.pieces.tokens(self.store["text"], number).tolist())}


def corrupt(ids: list[int], spans: list[tuple[int, int]], sentinels: Sequence[int]) -> tuple[list[int], list[int]]:
    """The text with each span replaced by a sentinel, and the sentinels each followed by its span."""
    source: list[int] = []
    target: list[int] = []
    end = 0
    for sentinel_id, (left, right) in zip(sentinels, spans, strict=False):
        source += [*ids[end:left], sentinel_id]
        target += [sentinel_id, *ids[left:right]]
        end = right
    return source + ids[end:], target
