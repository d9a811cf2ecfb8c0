"""What all uses of a model folder share: texts in batches of like length, and a judgement over examples."""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from allyouneed.data.batches.packing import Items
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.forward import Called
from allyouneed.infer.translation.split import quoted
from allyouneed.nn.batch import Rows

BUDGET = 8192  # tokens that go through the model together, padding counted
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
T = TypeVar("T")

Sample = dict[str, str]  # what to show of one example, by name


@dataclass(frozen=True)
class Judged:
    """How good answers are: `figures` by name, `text` for a person, and some of the answers to look at."""

    figures: dict[str, float]
    text: str
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a reader of the figures should know

    def shown(self) -> str:
        named = [item for sample in self.samples for item in sample.items()]
        wide = max((len(name) for name, _ in named), default=0)
        return "\n".join(f"  {name:<{wide}}  {_line(value)}" for name, value in named)


def _line(text: str) -> str:
    """On one line, and with nothing in it that a terminal would obey: a young model says any bytes."""
    return CONTROL.sub(lambda found: "⏎" if found[0] == "\n" else f"\\x{ord(found[0]):02x}", text)


class Predictor(ABC):
    """A model folder that is ready to answer. `exact`: what is written is the same to the last bit whoever else is
    answered (docs/decoding.md)."""

    exact = False

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.model: Any = folder.model

    @property
    def tokenizer(self) -> Tokenizer:
        return self.folder.tokenizers.target

    @abstractmethod
    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> Judged:
        """Answer examples and compare with what they say. `show`: so many answers, spread over all; `resamples`: for
        intervals, where the metric has them. `decoding`: the folder's own when not given."""

    def completed(self, items: Items) -> Items:
        """What is judged by its likelihood, with all that the model wants to know of it."""
        return items

    def logits(self, **inputs: Any) -> Tensor:
        """What the model makes of `tokens`, `pixels`, `features`, … (docs/calling.md): scores of tokens, classes or
        tags, or a vector. Lists of token ids may be of any lengths."""
        return Called(self.model).logits(inputs)

    def hidden(self, layer: int | str | None = None, **inputs: Any) -> Any:
        """The vectors of each token before the head; those after so many layers (0: before the first), or `"all"`."""
        return Called(self.model).hidden(inputs, layer)

    @property
    def limit(self) -> int | None:
        """The longest text the model can place."""
        found: int | None = self.model.config.limit
        return found

    @property
    def longest(self) -> int:
        """The longest text it is asked to read at once: what it was trained on, as far as it can place it."""
        return self.folder.max_tokens if self.limit is None else min(self.folder.max_tokens, self.limit)

    def given(self, framed: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Rows:
        """Texts with their marks, and types where there are several, for the model to read."""
        rows = Rows.of([tokens for tokens, _ in framed], self.tokenizer.pad)
        if any(any(types) for _, types in framed):
            rows = replace(rows, types=Rows.of([types for _, types in framed]).tokens)
        return rows.to(self.device)

    def beginning(self, text: str) -> tuple[list[int], list[int]]:
        """A text between its marks, with types, as far as it can be read at once; a warning where that is not all."""
        ids = self.tokenizer.encode(text)
        room = self.longest - self.tokenizer.template.count()
        if len(ids) > room:
            warnings.warn(f"{quoted(text)}: {len(ids)} tokens; only the first {room} were read", stacklevel=4)
        return self.tokenizer.frame(ids[:room])

    @property
    def device(self) -> torch.device:
        found: torch.device = next(self.model.parameters()).device
        return found


def spread(items: Sequence[T], count: int) -> list[T]:
    """So many of them, the same ones every time, spread over all."""
    return [items[n * len(items) // count] for n in range(min(count, len(items)))] if count else []


def checked(texts: Any, what: str) -> list[str]:
    """A list of texts, or a message."""
    if isinstance(texts, str):
        raise UserError(f"{what} takes a list of texts; write [text] for a single one")
    many = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, bytes | bytearray) else [texts]
    for text in many:
        if not isinstance(text, str):
            raise UserError(f"a text must be a string, not {type(text).__name__}")
    return many


def by_length(lengths: Sequence[int], budget: int = BUDGET) -> Iterator[list[int]]:
    """Indices of texts of similar length, the longest first (what does not fit in memory fails at once)."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * max(1, lengths[batch[0]]) > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def in_batches(model: Any, lengths: Sequence[int], answer: Callable[[list[int]], list[T]]) -> list[T]:
    """`answer` for indices of like length at a time, without dropout and gradients; what comes back is in order."""
    found: dict[int, T] = {}
    was_training: bool = model.training
    model.eval()
    try:
        for batch in by_length(lengths):
            with torch.inference_mode():
                found.update(zip(batch, answer(batch), strict=True))
    finally:
        model.train(was_training)
    return [found[n] for n in range(len(lengths))]


def on_host(tensor: Tensor) -> list[Any]:
    values: list[Any] = tensor.float().cpu().tolist()
    return values
