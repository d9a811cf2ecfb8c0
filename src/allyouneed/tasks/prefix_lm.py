"""How a text goes on after a prompt that is seen as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.data.batches.encoding import Encoding, Texts
from allyouneed.data.batches.packing import Filled, Ints, Items, Side, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.causal_lm import DocumentItems
from allyouneed.tasks.task import Loss, Task, token_loss


class PrefixLM(Task):
    """Each token after the prompt, given the prompt and what comes before it (Raffel et al. 2020, 3.2.1 and figure 4).
    The model is a decoder; with the pattern `causal | prompt` the tokens of a prompt all see each other.

    `reads: pairs`: prompt and answer, with an end mark between them (Dong et al. 2019, 3.3). `reads: text`: documents,
    split at a place that is drawn anew in each epoch.
    """

    files: ClassVar[type[Files]] = PairFiles
    kinds: ClassVar[tuple[str, ...]] = ("decoder",)
    counted: ClassVar[str] = "target tokens"
    supports_weights: ClassVar[bool] = True
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    kind: Literal["prefix-lm"] = "prefix-lm"
    reads_: Annotated[Literal["pairs", "text"], Field(alias="reads")] = "pairs"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def reads(self) -> type[Files]:
        return PairFiles if self.reads_ == "pairs" else TextFiles

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        tokenizer = vocabularies.target
        if self.reads_ == "text":
            return Texts({"text": tokenizer}, None)
        return Texts({"source": tokenizer, "target": tokenizer}, max_tokens, marks=1, together=1)

    def items(self, store: Store, vocabularies: Vocabularies, room: tuple[int, ...], seed: int) -> Items:
        if self.reads_ == "pairs":
            return PromptItems(store, vocabularies.target)
        return SplitItems(store, vocabularies, room[-1], seed)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


def prompted(prompt: Ints, answer: Ints, eos: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """A prompt (marks included) and what follows it: what is read, what is to be said, and which of it is given."""
    read = np.concatenate([prompt, answer])
    said = np.concatenate([np.full(len(prompt) - 1, IGNORE), answer, [eos]])
    return read, said, np.arange(len(read)) < len(prompt)


class PromptItems(Items):
    """Begin mark, prompt, end mark, answer; the answer and its end mark are to be said."""

    def __init__(self, store: Store, tokenizer: Tokenizer) -> None:
        self.store, self.tokenizer = store, tokenizer
        store.check(source=tokenizer, target=tokenizer)
        self.pads = (tokenizer.pad,)
        self.weights = store.weights

    def __len__(self) -> int:
        return len(self.store)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.store["source"].lengths + self.store["target"].lengths + 2,)

    def fill(self, epoch: int, members: Ints) -> Filled:
        bos, eos = self.tokenizer.bos, self.tokenizer.eos
        rows = []
        for number in members.tolist():
            prompt = np.concatenate([[bos], self.store["source"][number], [eos]])
            rows.append(prompted(prompt, self.store["target"][number].astype(np.int64), eos))
        return _filled(rows)

    def show(self, number: int) -> dict[str, str]:
        return {name: self.tokenizer.decode(self.store[name][number].tolist()) for name in ("source", "target")}


class SplitItems(DocumentItems):
    """A piece of a document, split anywhere: what comes before is given, what comes after is to be said."""

    def __init__(self, store: Store, vocabularies: Vocabularies, room: int, seed: int) -> None:
        super().__init__(store, vocabularies, room)
        self.seed = seed

    def fill(self, epoch: int, members: Ints) -> Filled:
        rows = []
        for number in members.tolist():
            read, said = self.piece(number)
            given = np.arange(len(read)) <= generator(self.seed, epoch, number).integers(len(read))
            rows.append((read, np.where(np.append(given[1:], False), IGNORE, said), given))
        return _filled(rows)


def _filled(rows: list[tuple[Ints, Ints, NDArray[np.bool_]]]) -> Filled:
    read, said, prompt = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Filled((Side(read.astype(np.int64), {"prompt": prompt}),), said.astype(np.int64))
