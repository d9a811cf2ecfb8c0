"""Masked tokens in pairs of texts, of which the first token says how they belong together (BERT, ALBERT)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE
from allyouneed.tasks.language.masked_lm import MaskedItems, choose_masked


class MaskedPairItems(MaskedItems):
    """Pieces of documents cut in two, as `<s> A </s> B </s>`. The label of the first token is `IGNORE` − 1 − class:
    1 if B begins another document's piece (next-sentence), or is what comes before A (sentence-order), else 0."""

    def __init__(
        self,
        store: Store,
        tokenizer: Tokenizer,
        max_length: int,
        share: float,
        seed: int,
        pairs: Literal["next-sentence", "sentence-order"],
    ) -> None:
        super().__init__(store, tokenizer, max_length, share, seed)
        self.order = pairs == "sentence-order"
        if not tokenizer.template.before:
            raise UserError("task.pairs: the tokenizer puts no token before a text, which could say how two belong")
        long = self.pieces.lengths > 1  # others cannot be cut
        found = {name: getattr(self.pieces, name)[long] for name in ("documents", "begins", "lengths")}
        self.pieces = replace(self.pieces, **found)
        if not self.order and len(np.unique(self.pieces.documents)) < 2:
            raise UserError("task.pairs: next-sentence needs at least two documents; use sentence-order")
        self._drawn: tuple[int, Ints] | None = None

    def drawn(self, epoch: int) -> Ints:
        """(items, 3): where each piece is cut, the piece of B, and how many tokens B has; where both are swapped,
        −1 for the piece."""
        known = self._drawn  # batches are made in another thread than lengths are asked for
        if known is None or known[0] != epoch:
            known = self._drawn = epoch, self._draw(generator(self.seed, epoch, len(self)))
        return known[1]

    def _draw(self, rng: np.random.Generator) -> Ints:
        count, lengths, own = len(self), self.pieces.lengths, np.arange(len(self))
        cuts, other = 1 + np.floor(rng.random(count) * (lengths - 1)).astype(np.int64), rng.random(count) < 0.5
        if self.order:
            return np.stack([cuts, np.where(other, -1, own), lengths - cuts], 1)
        documents, others = self.pieces.documents, rng.integers(count, size=count)
        for _ in range(64):
            same = documents[others] == documents
            if not same.any():
                break
            others[same] = rng.integers(count, size=int(same.sum()))
        other &= documents[others] != documents
        second = np.where(other, others, own)
        return np.stack([cuts, second, np.where(other, np.minimum(lengths - cuts, lengths[second]), lengths - cuts)], 1)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        found = self.drawn(epoch)
        return (found[:, 0] + found[:, 2] + self.tokenizer.template.count(2),)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        template, drawn = self.tokenizer.template, self.drawn(epoch)
        begin, gap = len(template.before), len(template.between)
        inputs, types, labels = list[int](), list[int](), list[Ints]()
        for number in members.tolist():
            cut, second, size = drawn[number].tolist()
            rng = generator(self.seed, epoch, number)
            column = "starts" if "starts" in self.store.columns else None
            ids, starts = self._joined("text", number, cut, second, size), None
            if column is not None:
                starts = self._joined(column, number, cut, second, size)
            first = size if second < 0 else cut  # tokens of A
            chosen = choose_masked(len(ids), starts, self.share, rng)
            masked = self.masked(ids, chosen, rng).tolist()
            row, kinds = self.tokenizer.frame(masked[:first], masked[first:])
            wanted = np.full(len(row), IGNORE, np.int64)
            wanted[begin : begin + first] = np.where(chosen, ids, IGNORE)[:first]
            after = begin + first + gap
            wanted[after : after + len(ids) - first] = np.where(chosen, ids, IGNORE)[first:]
            wanted[0] = IGNORE - 1 - int(second != number)
            inputs, types = inputs + row, types + kinds
            labels.append(wanted)
        side = FlatSide(np.array(inputs, np.int64), {"types": np.array(types, np.int64)})
        return FlatBatch((side,), np.concatenate(labels))

    def _joined(self, name: str, number: int, cut: int, second: int, size: int) -> Ints:
        """The values of A and B, in the order in which they are read."""
        own = self.pieces.tokens(self.store[name], number)
        if second < 0:
            return np.concatenate([own[cut:], own[:cut]])
        other = own[cut:] if second == number else self.pieces.tokens(self.store[name], second)
        return np.concatenate([own[:cut], other[:size]])
