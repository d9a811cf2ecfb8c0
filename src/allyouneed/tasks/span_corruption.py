"""The pieces that were cut out of a text, given the rest: T5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from allyouneed.data.batches.documents import Pieces
from allyouneed.data.batches.encoding import Encoding, Texts
from allyouneed.data.batches.packing import Filled, Ints, Items, Side, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import Vocabularies, sentinel
from allyouneed.errors import UserError
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, token_loss


class SpanCorruption(Task):
    """Spans of the text are each replaced by a sentinel; the target is every sentinel followed by what stood there
    (Raffel et al. 2020, 3.1.4 and figure 2; without the closing sentinel of the figure, as the authors' code has it).

    `density` of the tokens are cut out, in spans of `span` tokens on average, drawn anew in each epoch.
    """

    files: ClassVar[type[Files]] = TextFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder-decoder",)
    sides: ClassVar[int] = 2
    counted: ClassVar[str] = "target tokens"
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    kind: Literal["span-corruption"] = "span-corruption"
    density: Annotated[float, Field(gt=0, lt=0.5)] = 0.15
    span: Annotated[float, Field(ge=1)] = 3.0
    sentinels: PositiveInt = 100

    def specials(self) -> tuple[str, ...]:
        return tuple(sentinel(number) for number in range(self.sentinels))

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return Texts({"text": vocabularies.target}, None)

    def items(self, store: Store, vocabularies: Vocabularies, room: tuple[int, ...], seed: int) -> Items:
        return SpanItems(store, vocabularies, self, room, seed)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels)


def cut_sizes(tokens: int, density: float, span: float) -> tuple[int, int]:
    """How many tokens of so many are cut out, and in how many spans (the authors' random_spans_noise_mask)."""
    noise = min(max(1, round(tokens * density)), max(1, tokens - 1))
    return noise, min(max(1, round(noise / span)), noise, max(1, tokens - noise))


def cut_places(tokens: int, noise: int, spans: int, chance: np.random.Generator) -> list[tuple[int, int]]:
    """Where the spans lie: kept and cut pieces take turns, kept ones first, their lengths drawn evenly."""
    kept, cut = _parts(tokens - noise, spans, chance), _parts(noise, spans, chance)
    ends = np.cumsum(kept + cut)
    return [(int(end - size), int(end)) for end, size in zip(ends, cut, strict=True)]


def _parts(total: int, count: int, chance: np.random.Generator) -> Ints:
    """`total` as a sum of `count` numbers, each at least 1 (where there is that much)."""
    if total < count:
        return np.array([0] * (count - total) + [1] * total, dtype=np.int64)
    cuts = np.sort(chance.permutation(total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)


class SpanItems(Items):
    """Source: what is kept, with sentinels, and an end mark. Target: begin mark, sentinels and what was cut out."""

    def __init__(
        self, store: Store, vocabularies: Vocabularies, task: SpanCorruption, room: tuple[int, ...], seed: int
    ) -> None:
        self.store, self.tokenizer, self.task, self.seed = store, vocabularies.target, task, seed
        store.check(text=self.tokenizer)
        self.pads = vocabularies.source.pad, vocabularies.target.pad
        self.sentinels = [self.tokenizer.special(name) for name in task.specials()]
        self.pieces = Pieces.of(store["text"].lengths.astype(np.int64), self._most(room))
        sizes = {n: cut_sizes(n, task.density, task.span) for n in set(self.pieces.lengths.tolist())}
        cut = np.array([sizes[n] for n in self.pieces.lengths.tolist()], dtype=np.int64).reshape(-1, 2)
        self.noise, self.spans = cut[:, 0], cut[:, 1]

    def _most(self, room: tuple[int, ...]) -> int:
        """The longest piece whose two sides fit, and for which there are sentinels enough."""
        for tokens in range(room[0], 0, -1):
            noise, spans = cut_sizes(tokens, self.task.density, self.task.span)
            fits = tokens - noise + spans + 1 <= room[0] and noise + spans + 1 <= room[-1]
            if fits and spans <= len(self.sentinels):
                return tokens
        raise UserError(
            f"rows of {room[0]} and {room[-1]} tokens are too short to cut spans out; make batch.row larger"
        )

    def __len__(self) -> int:
        return len(self.pieces)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return self.pieces.lengths - self.noise + self.spans + 1, self.noise + self.spans + 1

    def fill(self, epoch: int, members: Ints) -> Filled:
        heard: list[int] = []
        said: list[int] = []
        labels: list[int] = []
        for number in members.tolist():
            ids = self.pieces.tokens(self.store["text"], number).tolist()
            chance = generator(self.seed, epoch, number)
            places = cut_places(len(ids), int(self.noise[number]), int(self.spans[number]), chance)
            source, target = corrupt(ids, places, self.sentinels)
            heard += [*source, self.tokenizer.eos]
            said += [self.tokenizer.bos, *target]
            labels += [*target, self.tokenizer.eos]
        sides = Side(np.array(heard, dtype=np.int64)), Side(np.array(said, dtype=np.int64))
        return Filled(sides, np.array(labels, dtype=np.int64))

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.pieces.tokens(self.store["text"], number).tolist())}


def corrupt(ids: list[int], places: list[tuple[int, int]], marks: Sequence[int]) -> tuple[list[int], list[int]]:
    """The text with a mark in each place, and the marks with what stood there."""
    source: list[int] = []
    target: list[int] = []
    end = 0
    for mark, (left, right) in zip(marks, places, strict=False):
        source += [*ids[end:left], mark]
        target += [mark, *ids[left:right]]
        end = right
    return source + ids[end:], target
