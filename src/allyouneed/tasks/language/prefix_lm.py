"""Prefix language modelling: continue a prompt that is attended to bidirectionally."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.data.batches.encoding import Encoding, TextEncoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.language.causal_lm import DocumentItems
from allyouneed.tasks.task import Loss, Task, token_loss


class PrefixLM(Task):
    """Predict each token after the prompt from the prompt and the tokens before it (Raffel et al. 2020, 3.2.1, figure
    4). The model is a decoder; with the pattern `causal | prompt` prompt tokens attend to each other.

    `reads: pairs`: prompt and answer, separated by EOS (Dong et al. 2019, 3.3). `reads: text`: documents,
    split at a random token, redrawn every epoch.
    """

    files: ClassVar[type[Files]] = PairFiles
    kinds: ClassVar[tuple[str, ...]] = ("decoder",)
    loss_unit: ClassVar[str] = "target tokens"
    supports_weights: ClassVar[bool] = True
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    kind: Literal["prefix-lm"] = "prefix-lm"
    reads_: Annotated[Literal["pairs", "text"], Field(alias="reads")] = "pairs"
    """Files of prompt and answer, or of documents that are split at a random token."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing."""

    @property
    def file_type(self) -> type[Files]:
        return PairFiles if self.reads_ == "pairs" else TextFiles

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        tokenizer = vocabularies.target
        if self.reads_ == "text":
            return TextEncoding({"text": tokenizer}, None)
        return TextEncoding({"source": tokenizer, "target": tokenizer}, max_tokens, special_count=1, separators=1)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        if self.reads_ == "pairs":
            return PromptItems(store, vocabularies.target)
        return SplitItems(store, vocabularies, capacities[-1], seed)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


def join_prompt(prompt: Ints, answer: Ints, eos: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """A prompt (special tokens included) and its answer: inputs, labels, and which inputs are prompt."""
    inputs = np.concatenate([prompt, answer])
    labels = np.concatenate([np.full(len(prompt) - 1, IGNORE), answer, [eos]])
    return inputs, labels, np.arange(len(inputs)) < len(prompt)


class PromptItems(StoredItems):
    """BOS, prompt, EOS, answer; labels are the answer and EOS."""

    columns = ("source", "target")

    def __init__(self, store: Store, tokenizer: Tokenizer) -> None:
        super().__init__(store, tokenizer)
        self.weights = store.weights

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.store["source"].lengths + self.store["target"].lengths + 2,)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        bos, eos = self.tokenizer.bos, self.tokenizer.eos
        rows = []
        for number in members.tolist():
            prompt = np.concatenate([[bos], self.store["source"][number], [eos]])
            rows.append(join_prompt(prompt, self.store["target"][number].astype(np.int64), eos))
        return _filled(rows)

    def show(self, number: int) -> dict[str, str]:
        return {name: self.tokenizer.decode(self.store[name][number].tolist()) for name in ("source", "target")}


class SplitItems(DocumentItems):
    """A piece of a document split at a random token: prompt before it, labels after it."""

    def __init__(self, store: Store, vocabularies: Vocabularies, max_length: int, seed: int) -> None:
        super().__init__(store, vocabularies, max_length)
        self.seed = seed

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        rows = []
        for number in members.tolist():
            inputs, labels = self.piece(number)
            prompt = np.arange(len(inputs)) <= generator(self.seed, epoch, number).integers(len(inputs))
            rows.append((inputs, np.where(np.append(prompt[1:], False), IGNORE, labels), prompt))
        return _filled(rows)


def _filled(rows: list[tuple[Ints, Ints, NDArray[np.bool_]]]) -> FlatBatch:
    inputs, labels, prompt = (np.concatenate(column) for column in zip(*rows, strict=True))
    return FlatBatch((FlatSide(inputs.astype(np.int64), {"prompt": prompt}),), labels.astype(np.int64))
