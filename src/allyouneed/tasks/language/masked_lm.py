"""Masked language modelling: predict masked tokens from their context (BERT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from allyouneed.data.batches.documents import DocumentPieces
from allyouneed.data.batches.encoding import Encoding, TextEncoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files
from allyouneed.data.files.texts import TextFiles
from allyouneed.data.tokenizers.base import MASK, Tokenizer, Vocabularies
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, class_loss, token_loss

MASKED, REPLACED = 0.8, 0.1  # of the chosen tokens; the rest are unchanged (Devlin et al. 2019, 3.1)


class MaskedLM(Task):
    """A `share` of the tokens is chosen and predicted; 80 % of them become `<mask>`, 10 % a random token, 10 % stay
    (Devlin et al. 2019, 3.1, Task #1). They are redrawn every epoch (Liu et al. 2019, 4.1).

    `whole_word`: choose words, not tokens (the BERT authors' whole word masking). A word is a piece that no token
    crosses: a word with the space before it, or a digit; in Chinese and Japanese a token, or a character of several.

    `pairs`: each piece of a text is cut in two at random, and the first token says whether the second is another text's
    (`next-sentence`: 3.1, Task #2), or whether both have changed places (`sentence-order`: Lan et al. 2020, 3.1).
    """

    files: ClassVar[type[Files]] = TextFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder",)
    loss_unit: ClassVar[str] = "masked tokens"
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    kind: Literal["masked-lm"] = "masked-lm"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens to predict."""
    whole_word: bool = False
    """Choose whole words instead of tokens."""
    pairs: Literal["next-sentence", "sentence-order"] | None = None
    """Learn from pairs of texts too: whether the second is the next (BERT), or which is the first (ALBERT)."""

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        found = super().head(model, labels)
        if self.pairs is None:
            return found
        return (dict(found) if isinstance(found, dict) else {"kind": "vocabulary"}) | {"pair": 2}

    def specials(self) -> tuple[str, ...]:
        return (MASK,)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return TextEncoding({"text": vocabularies.target}, None, word_starts=self.whole_word)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        template = vocabularies.target.template
        if self.pairs is not None:
            from allyouneed.tasks.language.masked_pairs import MaskedPairItems

            room = capacities[-1] - template.count(2)
            return MaskedPairItems(store, vocabularies.target, room, self.share, seed, self.pairs)
        return MaskedItems(store, vocabularies.target, capacities[-1] - template.count(), self.share, seed)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        found = token_loss(model.head, hidden, labels.clamp(min=IGNORE))
        if self.pairs is None:
            return found
        wanted = torch.where(labels < IGNORE, IGNORE - 1 - labels, IGNORE)
        scores = model.head.pair_scores(hidden)  # of all tokens: no shape depends on where texts begin
        pair = class_loss(scores, wanted)
        mean = pair.total / pair.tokens.clamp(min=1)
        right = ((scores.argmax(-1) == wanted) & (wanted != IGNORE)).sum() / pair.tokens.clamp(min=1)
        figures = {"pair-loss": mean.detach() * found.tokens, "pair-accuracy": 100.0 * right * found.tokens}
        return found._replace(figures=figures).with_auxiliary([mean])


class MaskedItems(StoredItems):
    """Pieces of documents of at most `max_length` tokens, each between BOS and EOS."""

    def __init__(self, store: Store, tokenizer: Tokenizer, max_length: int, share: float, seed: int) -> None:
        super().__init__(store, tokenizer)
        self.share, self.seed = share, seed
        self.pieces = DocumentPieces.split(store["text"].lengths.astype(np.int64), max_length)
        self.mask = tokenizer.mask
        self.replacements = np.setdiff1d(np.arange(tokenizer.size), tokenizer.specials)

    def __len__(self) -> int:
        return len(self.pieces)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.pieces.lengths + self.tokenizer.template.count(),)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        template = self.tokenizer.template
        affixes = [np.array(ids, dtype=np.int64) for ids in (template.before, template.after)]
        ignored = [np.full_like(ids, IGNORE) for ids in affixes]
        inputs: list[Ints] = []
        labels: list[Ints] = []
        for number in members.tolist():
            ids = self.pieces.tokens(self.store["text"], number)
            starts = self.pieces.tokens(self.store["starts"], number) if "starts" in self.store.columns else None
            rng = generator(self.seed, epoch, number)
            chosen = choose_masked(len(ids), starts, self.share, rng)
            inputs += [affixes[0], self.masked(ids, chosen, rng), affixes[1]]
            labels += [ignored[0], np.where(chosen, ids, IGNORE), ignored[1]]
        return FlatBatch((FlatSide(np.concatenate(inputs)),), np.concatenate(labels))

    def masked(self, ids: Ints, chosen: NDArray[np.bool_], rng: np.random.Generator) -> Ints:
        """The tokens with the chosen ones hidden."""
        return apply_mask(ids, chosen, self.mask, self.replacements, rng)

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.pieces.tokens(self.store["text"], number).tolist())}


def choose_masked(count: int, starts: Ints | None, share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which of `count` tokens to predict: the share, rounded, at least one. With `starts` (1 where a word begins),
    whole words in random order while they fit; if every word is too long, one word."""
    wanted = max(1, int(share * count + 0.5))
    chosen = np.zeros(count, dtype=bool)
    if starts is None:
        chosen[rng.permutation(count)[:wanted]] = True
        return chosen
    begins = np.flatnonzero(starts | (np.arange(count) == 0))  # a piece may begin inside a word
    ends = np.append(begins[1:], count)
    order = rng.permutation(len(begins)).tolist()
    for word in order:
        size = int(ends[word] - begins[word])
        if size <= wanted:
            chosen[begins[word] : ends[word]] = True
            wanted -= size
    if not chosen.any():
        chosen[begins[order[0]] : ends[order[0]]] = True
    return chosen


def apply_mask(ids: Ints, chosen: NDArray[np.bool_], mask: int, replacements: Ints, rng: np.random.Generator) -> Ints:
    draw = rng.random(len(ids))
    random_ids = replacements[rng.integers(len(replacements), size=len(ids))]
    masked = np.where(chosen & (draw < MASKED), mask, ids)
    return np.where(chosen & (draw >= MASKED) & (draw < MASKED + REPLACED), random_ids, masked)
