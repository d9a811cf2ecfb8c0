"""What all predictors share: batches of similar length, and evaluation on examples."""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from allyouneed.config import tree_of
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError, quote
from allyouneed.folder import DTYPES, Folder, as_dtype
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.forward import NamedForward
from allyouneed.infer.predictors.registry import provided
from allyouneed.interop.load import check_device
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.precision import stored_as
from allyouneed.nn.models.weights import cast_weights, named_tensors
from allyouneed.runtime.process import inference

if TYPE_CHECKING:
    from allyouneed.data.batches.packing import Items

BUDGET = 8192  # tokens per forward pass, padding included
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
T = TypeVar("T")

Sample = dict[str, str]  # texts of one example to print, by label


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics by name (`figures`), the same as readable `text`, and some examples."""

    figures: dict[str, float]
    text: str
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # caveats about the figures

    def samples_text(self) -> str:
        entries = [item for sample in self.samples for item in sample.items()]
        width = max((len(label) for label, _ in entries), default=0)
        return "\n".join(f"  {label:<{width}}  {_escape_control(value)}" for label, value in entries)


def _escape_control(text: str) -> str:
    """One line without control characters: an untrained model may generate any byte."""
    return CONTROL.sub(lambda found: "⏎" if found[0] == "\n" else f"\\x{ord(found[0]):02x}", text)


class AppMethod:
    """A method that an app provides (`allyouneed.apps`), imported when it is first used."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, predictor: Any, owner: type | None = None) -> Callable[..., Any]:
        function = provided(self.name)
        return function if predictor is None else MethodType(function, predictor)


class Predictor(ABC):
    """Serves a model folder. `exact`: results are bit-identical whatever else is in the batch (docs/decoding.md)."""

    exact = False
    inside = AppMethod()  # every value of one run by name (docs/inside.md)
    look = AppMethod()  # a page that shows how the model reads a text (docs/seeing.md)

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.model: Any = folder.model

    @classmethod
    def of(cls, folder: Folder) -> Predictor:
        """The predictor of a folder whose task this class serves."""
        return cls(folder)

    def __repr__(self) -> str:
        """`Translator(encoder-decoder, translation, … parameters, int8, cpu, …/models/translator)`"""
        config, task = self.model.config, self.folder.task.get("kind")
        parameters = f"{config.cost(1).parameters:,} parameters"
        facts = [tree_of(config)["kind"], task, parameters, self.dtype, self.device, self.folder.path or "not saved"]
        return f"{type(self).__name__}({', '.join(map(str, facts))})"

    def to(self, *where: str | torch.device | torch.dtype) -> Self:
        """Move the model to a device, or cast its weights: `to("cuda")`, `to("bfloat16")`, `to("cuda", "bfloat16")`.
        In place; returns the predictor."""
        for one in where:
            if isinstance(one, torch.dtype) or one in DTYPES:
                dtype = as_dtype(one)
                if (stored := stored_as(self.model)) is not None and dtype != torch.float32:
                    raise UserError(f"the weights are quantized ({stored}) and cannot be cast to {dtype}")
                cast_weights(self.model, dtype)
            else:
                check_device(one)
                self.model.to(one)
        return self

    def save(self, folder: Path | str) -> Path:
        """Write a model folder that `allyouneed.load` reads. An earlier model folder there is replaced."""
        from allyouneed.interop.save import save_folder

        return save_folder(self.folder, folder)

    @property
    def dtype(self) -> str:
        """The precision of the weights: `float32`, `bfloat16`, `float16`, or how they are stored: `int8`, `ternary`."""
        found = next(tensor.dtype for tensor in named_tensors(self.model).values() if tensor.is_floating_point())
        return stored_as(self.model) or str(found).removeprefix("torch.")

    @property
    def tokenizer(self) -> Tokenizer:
        return self.folder.tokenizers.target

    @abstractmethod
    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Predict examples and compare with their references. `show`: number of samples to keep; `resamples`: bootstrap
        samples for confidence intervals, where the metric has them. `decoding`: default: the folder's."""

    def prepare_items(self, items: Items) -> Items:
        """Add what the model needs to compute likelihoods, such as retrieved neighbours."""
        return items

    def logits(self, **inputs: Any) -> Tensor:
        """The model's output for `tokens`, `pixels`, `features`, … (docs/calling.md): scores of tokens, classes or
        tags, or a vector. Lists of token ids may have any lengths."""
        return NamedForward(self.model).logits(inputs)

    def hidden(self, layer: int | str | None = None, **inputs: Any) -> Any:
        """Hidden states before the head, after `layer` layers (0: before the first), or of `"all"` layers."""
        return NamedForward(self.model).hidden(inputs, layer)

    def with_languages(
        self, examples: Sequence[Any], to: str | None, from_: str | None, options: str
    ) -> tuple[Sequence[Any], str]:
        """The examples with the languages of this request, and a note if they were detected; only translators have
        any. `options`: how the user sets them, for errors."""
        return examples, ""

    @property
    def limit(self) -> int | None:
        """The most tokens the position encoding allows; None: no limit."""
        found: int | None = self.model.config.limit
        return found

    @property
    def max_input(self) -> int:
        """The most tokens read at once: the training length, within `limit`."""
        return self.folder.max_tokens if self.limit is None else min(self.folder.max_tokens, self.limit)

    def to_rows(self, framed: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Rows:
        """Token ids with special tokens, and segment types where there are several, as padded rows."""
        rows = Rows.of([tokens for tokens, _ in framed], self.tokenizer.pad)
        if any(any(types) for _, types in framed):
            rows = replace(rows, types=Rows.of([types for _, types in framed]).tokens)
        return rows.to(self.device)

    def encode_truncated(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids with special tokens, and types; truncated to `max_input`, with a warning."""
        ids = self.tokenizer.encode(text)
        room = self.max_input - self.tokenizer.template.count()
        if len(ids) > room:
            warnings.warn(f"{quote(text)}: {len(ids)} tokens, truncated to {room}", stacklevel=4)
        return self.tokenizer.frame(ids[:room])

    @property
    def device(self) -> torch.device:
        found: torch.device = next(self.model.parameters()).device
        return found


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """`count` evenly spaced items, always the same ones."""
    return [items[n * len(items) // count] for n in range(min(count, len(items)))] if count else []


def check_texts(texts: Any, what: str) -> list[str]:
    """A list of strings, or an error."""
    if isinstance(texts, str):
        raise UserError(f"{what} takes a list of texts; use [text] for a single one")
    many = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, bytes | bytearray) else [texts]
    for text in many:
        if not isinstance(text, str):
            raise UserError(f"a text must be a string, not {type(text).__name__}")
    return many


def group_by_length(lengths: Sequence[int], budget: int = BUDGET) -> Iterator[list[int]]:
    """Indices in groups of similar length, the longest first, so that an out-of-memory error comes early."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * max(1, lengths[batch[0]]) > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@dataclass
class TokenCount:
    """Tokens that predictors have read and generated in a thread, other than with an engine."""

    read: int = 0
    generated: int = 0


token_count: ContextVar[TokenCount | None] = ContextVar("token_count", default=None)


def add_tokens(read: int, generated: int = 0) -> None:
    """Add to the count of whoever keeps one."""
    if (count := token_count.get()) is not None:
        count.read, count.generated = count.read + read, count.generated + generated


def run_in_batches(model: Any, lengths: Sequence[int], answer: Callable[[list[int]], list[T]]) -> list[T]:
    """Call `answer` on groups of similar length, without dropout and gradients; results in input order."""
    add_tokens(sum(lengths))
    found: dict[int, T] = {}
    with inference(model):
        for batch in group_by_length(lengths):
            found.update(zip(batch, answer(batch), strict=True))
    return [found[n] for n in range(len(lengths))]


def to_list(tensor: Tensor) -> list[Any]:
    values: list[Any] = tensor.float().cpu().tolist()
    return values
