"""The tokens that were hidden, given all around them: BERT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.data.batches.documents import Pieces
from allyouneed.data.batches.encoding import Encoding, Texts
from allyouneed.data.batches.packing import Filled, Ints, Items, Side, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import MASK, Tokenizer, Vocabularies
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, token_loss

HIDDEN, REPLACED = 0.8, 0.1  # of the chosen tokens; the rest stay as they are (Devlin et al. 2019, 3.1)


class MaskedLM(Task):
    """A share of the tokens is chosen; of these 80 % become `<mask>`, 10 % a random token, 10 % stay, and all of them
    are to be told (Devlin et al. 2019, 3.1, Task #1). They are chosen anew in each epoch (Liu et al. 2019, 4.1).

    `whole_word`: words are chosen, not tokens (the BERT authors' whole word masking). A word is what no token crosses:
    a word with the space before it, a digit; in Chinese and Japanese a token, or a character of several.
    """

    files: ClassVar[type[Files]] = TextFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder",)
    counted: ClassVar[str] = "hidden tokens"
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    kind: Literal["masked-lm"] = "masked-lm"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    whole_word: bool = False

    def specials(self) -> tuple[str, ...]:
        return (MASK,)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return Texts({"text": vocabularies.target}, None, word_starts=self.whole_word)

    def items(self, store: Store, vocabularies: Vocabularies, room: tuple[int, ...], seed: int) -> Items:
        return MaskedItems(
            store, vocabularies.target, room[-1] - vocabularies.target.template.count(), self.share, seed
        )

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels)


class MaskedItems(Items):
    """Pieces of documents of at most `room` tokens, each between a begin and an end mark."""

    def __init__(self, store: Store, tokenizer: Tokenizer, room: int, share: float, seed: int) -> None:
        self.store, self.tokenizer, self.share, self.seed = store, tokenizer, share, seed
        store.check(text=tokenizer)
        self.pads = (tokenizer.pad,)
        self.pieces = Pieces.of(store["text"].lengths.astype(np.int64), room)
        self.mask = tokenizer.mask
        self.others = np.setdiff1d(np.arange(tokenizer.size), tokenizer.specials)  # what a token is replaced by

    def __len__(self) -> int:
        return len(self.pieces)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.pieces.lengths + self.tokenizer.template.count(),)

    def fill(self, epoch: int, members: Ints) -> Filled:
        marks = [
            np.array(ids, dtype=np.int64) for ids in (self.tokenizer.template.before, self.tokenizer.template.after)
        ]
        nothing = [np.full_like(ids, IGNORE) for ids in marks]
        said: list[Ints] = []
        labels: list[Ints] = []
        for number in members.tolist():
            ids = self.pieces.tokens(self.store["text"], number)
            starts = self.pieces.tokens(self.store["starts"], number) if "starts" in self.store.columns else None
            chance = generator(self.seed, epoch, number)
            chosen = choose(len(ids), starts, self.share, chance)
            said += [marks[0], hide(ids, chosen, self.mask, self.others, chance), marks[1]]
            labels += [nothing[0], np.where(chosen, ids, IGNORE), nothing[1]]
        return Filled((Side(np.concatenate(said)),), np.concatenate(labels))

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.pieces.tokens(self.store["text"], number).tolist())}


def choose(count: int, starts: Ints | None, share: float, chance: np.random.Generator) -> NDArray[np.bool_]:
    """Which of `count` tokens are to be told: the share, rounded, and at least one. With `starts` (1 where a word
    begins) whole words, in random order, as long as they do not make too many; one, where every word is too long."""
    wanted = max(1, int(share * count + 0.5))
    chosen = np.zeros(count, dtype=bool)
    if starts is None:
        chosen[chance.permutation(count)[:wanted]] = True
        return chosen
    begins = np.flatnonzero(starts | (np.arange(count) == 0))  # a piece may begin inside a word
    ends = np.append(begins[1:], count)
    order = chance.permutation(len(begins)).tolist()
    for word in order:
        size = int(ends[word] - begins[word])
        if size <= wanted:
            chosen[begins[word] : ends[word]] = True
            wanted -= size
    if not chosen.any():
        chosen[begins[order[0]] : ends[order[0]]] = True
    return chosen


def hide(ids: Ints, chosen: NDArray[np.bool_], mask: int, others: Ints, chance: np.random.Generator) -> Ints:
    dice = chance.random(len(ids))
    drawn = others[chance.integers(len(others), size=len(ids))]
    found = np.where(chosen & (dice < HIDDEN), mask, ids)
    return np.where(chosen & (dice >= HIDDEN) & (dice < HIDDEN + REPLACED), drawn, found)
