"""Denoising: restore a text from a corrupted one (BART)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from allyouneed.data.batches.documents import DocumentPieces
from allyouneed.data.batches.encoding import Encoding, TextEncoding
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import MASK, Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, token_loss

ENDS = (".", "!", "?", "…", "。", "！", "？", "\n")  # of sentences
Share = Annotated[float, Field(ge=0, lt=0.9)]


class Denoising(Task):
    """The decoder writes a text whose encoder read it corrupted (Lewis et al. 2020, 3.1 and 3.2): sentences in random
    order, tokens deleted, spans replaced by one mask each (text infilling), tokens masked; redrawn every epoch."""

    files: ClassVar[type[Files]] = TextFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder-decoder",)
    sides: ClassVar[int] = 2
    loss_unit: ClassVar[str] = "target tokens"
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    kind: Literal["denoising"] = "denoising"
    infill: Share = 0.3
    """Share of the tokens that are replaced in spans, each by one mask."""
    span: Annotated[float, Field(gt=0)] = 3.0
    """Mean length of these spans (Poisson): a span may be empty, and its mask stands for nothing."""
    delete: Share = 0.0
    """Share of the tokens that are left out without a trace."""
    mask: Share = 0.0
    """Share of the tokens that are replaced by a mask each."""
    permute: bool = True
    """Put the sentences in random order."""
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.infill + self.delete + self.mask >= 1:
            raise ValueError("infill + delete + mask: must leave some of the text, less than 1 together")
        if not (self.infill or self.delete or self.mask or self.permute):
            raise ValueError("nothing is corrupted; set infill, delete, mask or permute")
        return self

    def specials(self) -> tuple[str, ...]:
        return (MASK,)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return TextEncoding({"text": vocabularies.target}, None)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return NoisyItems(store, vocabularies.target, self, min(capacities), seed)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


class NoisyItems(Items):
    """Source: the corrupted tokens and EOS. Target: BOS and the tokens of a piece of a document. How many tokens are
    changed depends on its length alone, so lengths are the same in all epochs."""

    def __init__(self, store: Store, tokenizer: Tokenizer, task: Denoising, longest: int, seed: int) -> None:
        self.store, self.tokenizer, self.task, self.seed = store, tokenizer, task, seed
        store.check(text=tokenizer)
        self.pads = tokenizer.pad, tokenizer.pad
        if longest < 4:
            raise UserError(f"rows of {longest} tokens are too short for denoising; raise batch.row")
        self.pieces = DocumentPieces.split(store["text"].lengths.astype(np.int64), longest - 2)
        self.removed, self.spans, self.deleted = self._counts(self.pieces.lengths)
        self.ends = sentence_ends(tokenizer) if task.permute else np.zeros(tokenizer.size, bool)

    def _counts(self, lengths: Ints) -> tuple[Ints, Ints, Ints]:
        """How many tokens are infilled and in how many spans, and how many are deleted."""
        removed = np.rint(lengths * self.task.infill).astype(np.int64)
        spans = np.where(removed > 0, np.maximum(1, np.rint(removed / self.task.span)), 0).astype(np.int64)
        spans = np.minimum(spans, removed)
        return removed, spans, np.rint(lengths * self.task.delete).astype(np.int64)

    def __len__(self) -> int:
        return len(self.pieces)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return self.pieces.lengths - self.removed + self.spans - self.deleted + 1, self.pieces.lengths + 1

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        sources, targets, labels = list[Ints](), list[Ints](), list[Ints]()
        bos, eos = [self.tokenizer.bos], [self.tokenizer.eos]
        for number in members.tolist():
            ids = self.pieces.tokens(self.store["text"], number)
            noisy = self.corrupted(ids, number, generator(self.seed, epoch, number))
            sources.append(np.concatenate([noisy, eos]))
            targets.append(np.concatenate([bos, ids]))
            labels.append(np.concatenate([ids, eos]))
        sides = (FlatSide(np.concatenate(sources).astype(np.int64)), FlatSide(np.concatenate(targets).astype(np.int64)))
        return FlatBatch(sides, np.concatenate(labels).astype(np.int64))

    def corrupted(self, ids: Ints, number: int, rng: np.random.Generator) -> Ints:
        removed, spans, deleted = (int(part[number]) for part in (self.removed, self.spans, self.deleted))
        mask = self.tokenizer.mask
        if self.task.permute:
            ids = permuted(ids, self.ends[ids], rng)
        if deleted:
            ids = np.delete(ids, rng.permutation(len(ids))[:deleted])
        ids = infilled(ids, removed, spans, mask, rng)
        if self.task.mask:
            count = round(int(self.pieces.lengths[number]) * self.task.mask)
            ids[rng.permutation(np.flatnonzero(ids != mask))[:count]] = mask
        return ids

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.pieces.tokens(self.store["text"], number).tolist())}


def sentence_ends(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Whether a sentence ends with each token."""
    texts = tokenizer.decode_batch([[number] for number in range(tokenizer.size)])
    return np.array([text.rstrip(" ").endswith(ENDS) for text in texts])


def permuted(ids: Ints, ends: NDArray[np.bool_], rng: np.random.Generator) -> Ints:
    """The sentences of a text in random order."""
    sentences = [some for some in np.split(ids, np.flatnonzero(ends) + 1) if len(some)]
    return np.concatenate([sentences[number] for number in rng.permutation(len(sentences))]) if sentences else ids


def infilled(ids: Ints, removed: int, spans: int, mask: int, rng: np.random.Generator) -> Ints:
    """The tokens with `removed` of them replaced in spans by one mask each. Poisson lengths of which the sum is known
    are multinomial; no two spans touch, as far as there is anything to keep between them."""
    if not spans:
        return ids.copy()
    sizes = rng.multinomial(removed, np.full(spans, 1 / spans))
    kept = len(ids) - removed
    places = rng.permutation(kept + 1)[:spans] if spans <= kept + 1 else rng.integers(kept + 1, size=spans)
    found, at, before = list[Ints](), 0, 0
    for place, size in zip(np.sort(places).tolist(), sizes.tolist(), strict=True):
        found += [ids[at : at + place - before], np.array([mask])]
        at, before = at + place - before + size, place
    return np.concatenate([*found, ids[at:]])
