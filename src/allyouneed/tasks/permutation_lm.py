"""The last tokens of an order drawn by chance, each given all that are said before it: XLNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.config import ConfigError, parse
from allyouneed.data.batches.documents import Pieces
from allyouneed.data.batches.encoding import Encoding, Texts
from allyouneed.data.batches.packing import Batches, Filled, Ints, Items, Side, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import MASK, Tokenizer, Vocabularies
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.encoder import Encoder
from allyouneed.tasks.endless import endless_problems
from allyouneed.tasks.permuted_segments import FramedDocuments, PermutedSegments
from allyouneed.tasks.task import Loss, Task, token_loss


class PermutationLM(Task):
    """One token in `one_in` is told, in an order drawn anew in each epoch, given all the others and those told before
    it (Yang et al. 2019, 2.2 and 2.3, partial prediction with K = `one_in`). They come in runs of up to `run`
    neighbours, one in every stretch of `one_in` times its length (3.1, span-based prediction).

    A token to be told is asked for by another that stands behind the text (nn/models/two_stream.py), so the model needs
    `embed.asks` and the pattern `permuted`. Those that are not told see each other, as in the authors' code.

    `memory`: segments of documents that stand end to end, each over what is remembered of those before (2.4).
    """

    files: ClassVar[type[Files]] = TextFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder",)
    counted: ClassVar[str] = "told tokens"
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    kind: Literal["permutation-lm"] = "permutation-lm"
    one_in: Annotated[int, Field(ge=2)] = 6
    run: Annotated[int, Field(ge=1)] = 5
    memory: bool = False

    @property
    def carries(self) -> bool:
        return self.memory

    def specials(self) -> tuple[str, ...]:
        return (MASK,)  # no text of training has it; whoever uses the model writes it where a token is to be told

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        config = parse(Model, model, "model")  # type: ignore[type-abstract]
        problems = []
        if isinstance(config, Encoder):
            if not getattr(config.embed, "asks", False):
                problems.append("embed.asks: permutation-lm asks for tokens: set embed.asks: true")
            for number, layer in enumerate(config.encoder):
                if layer.mixer is not None and "permuted" not in str(getattr(layer.mixer, "pattern", "")):
                    problems.append(f"encoder[{number}].mixer.pattern: must hide what is said later: write permuted")
        if self.memory:
            problems += endless_problems(config, "encoder")
        if problems:
            raise ConfigError(problems, "model")
        return super().head(model, labels)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return Texts({"text": vocabularies.target}, None)

    def items(self, store: Store, vocabularies: Vocabularies, room: tuple[int, ...], seed: int) -> Items:
        if self.memory:
            return FramedDocuments(store, vocabularies.target, room[-1], seed)
        return PermutedItems(store, vocabularies.target, room[-1], self.one_in, self.run, seed)

    def batches(self, items: Items, room: tuple[int, ...], rows: int, seed: int) -> Batches:
        if isinstance(items, FramedDocuments):
            return self._segments(items, rows, room[-1], seed)
        return super().batches(items, room, rows, seed)

    def validation_batches(self, items: Items, longest: int) -> Batches:
        if isinstance(items, FramedDocuments):
            return self._segments(items, 1, longest, None)
        return super().validation_batches(items, longest)

    def _segments(self, items: FramedDocuments, rows: int, row: int, seed: int | None) -> Batches:
        """As long as they can be, with those that ask, in a row of the batch."""
        size = max(size for size in range(1, row) if size + max(size // self.one_in, 1) <= row)

        def draw(count: int, told: int, chance: np.random.Generator) -> Ints:
            return draw_runs(count, told, self.one_in, self.run, chance)

        return PermutedSegments(items, rows, size, self.one_in, draw, seed)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels)


class PermutedItems(Items):
    """Pieces of documents, each between a begin and an end mark and followed by those that ask; all of it takes at most
    `room` places."""

    def __init__(self, store: Store, tokenizer: Tokenizer, room: int, one_in: int, run: int, seed: int) -> None:
        self.store, self.tokenizer, self.one_in, self.run, self.seed = store, tokenizer, one_in, run, seed
        store.check(text=tokenizer)
        self.pads = (tokenizer.pad,)
        sizes = np.arange(1, room)
        fitting = sizes[sizes + tokenizer.template.count() + self.told(sizes) <= room]
        self.pieces = Pieces.of(store["text"].lengths.astype(np.int64), int(fitting.max()))

    def told(self, lengths: Ints) -> Ints:
        """How many of so many tokens."""
        return np.maximum(lengths // self.one_in, 1)

    def __len__(self) -> int:
        return len(self.pieces)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.pieces.lengths + self.tokenizer.template.count() + self.told(self.pieces.lengths),)

    def fill(self, epoch: int, members: Ints) -> Filled:
        columns: list[tuple[Ints, ...]] = []
        for number in members.tolist():
            ids = self.pieces.tokens(self.store["text"], number)
            chance = generator(self.seed, epoch, number)
            runs = draw_runs(len(ids), int(self.told(np.array(len(ids)))), self.one_in, self.run, chance)
            # after the marks before the text, in the order in which they are told
            places = len(self.tokenizer.template.before) + chance.permutation(runs)
            tokens = np.array(self.tokenizer.frame(ids.tolist())[0])
            order = np.zeros(len(tokens), dtype=np.int64)
            order[places] = np.arange(1, len(places) + 1)
            columns.append(
                (
                    np.concatenate([tokens, np.full(len(places), self.tokenizer.pad)]),
                    np.concatenate([order, -1 - order[places]]),
                    np.concatenate([np.arange(len(tokens)), places]),
                    np.concatenate([np.full(len(tokens), IGNORE), tokens[places]]),
                )
            )
        tokens, order, positions, labels = (
            np.concatenate(column).astype(np.int64) for column in zip(*columns, strict=True)
        )
        return Filled((Side(tokens, {"order": order, "positions": positions}),), labels)

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.pieces.tokens(self.store["text"], number).tolist())}


def draw_runs(count: int, told: int, one_in: int, longest: int, chance: np.random.Generator) -> Ints:
    """Places of `told` of `count` tokens, in reading order: runs of 1 to `longest` neighbours, each somewhere in a
    stretch of its own that is `one_in` times as long (shorter, where the text is)."""
    places: list[int] = []
    begin = 0
    while len(places) < told:
        size = int(chance.integers(1, min(longest, told - len(places)) + 1))
        stretch = min(size * one_in, count - begin)
        first = begin + int(chance.integers(0, stretch - size + 1))
        places += range(first, first + size)
        begin += stretch
    return np.array(places)
