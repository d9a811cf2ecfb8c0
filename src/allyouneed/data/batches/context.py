"""Sentence pairs with the sentences before them: `… <break> sentence` on the source side, or on both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allyouneed.data.batches.encoding import Dropped, EncodedRow, TextEncoding, encode_texts
from allyouneed.data.files.pairs import Pair
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies

BREAK = "<break>"  # after each sentence of the context


def count_fitting(context: Sequence[Sequence[int]], free: int) -> int:
    """How many of the last sentences of a context fit into `free` tokens, each with its break."""
    for count, ids in enumerate(reversed(context)):
        free -= len(ids) + 1
        if free < 0:
            return count
    return len(context)


def join_context(context: Sequence[Sequence[int]], mark: int) -> list[int]:
    """The sentences of a context, each followed by the break."""
    return [number for ids in context for number in (*ids, mark)]


class ContextEncoding(TextEncoding):
    """Source and target, the source with up to `sentences` sentences before it; with `target`, the target too. As many
    of them as fit into `max_tokens` are read, the nearest first; none is cut."""

    name = "WithContext"

    def __init__(
        self, vocabularies: Vocabularies, max_tokens: int | None, special_count: int, sentences: int, target: bool
    ) -> None:
        super().__init__({"source": vocabularies.source, "target": vocabularies.target}, max_tokens, special_count)
        self.sentences, self.target = sentences, target
        self.breaks = vocabularies.source.special(BREAK), vocabularies.target.special(BREAK)
        self.spec |= {"context": [sentences, target]}

    def encode(self, chunk: Sequence[Pair]) -> Iterator[EncodedRow | Dropped]:  # type: ignore[override]
        known = [
            self._encode_once(tokenizer, {pair[side] for one in chunk for pair in one.context[-self.sentences :]})
            for side, tokenizer in enumerate(self.tokenizers.values())
        ]
        for pair, row in zip(chunk, super().encode(chunk), strict=True):
            if isinstance(row, Dropped) or not pair.context:
                yield row
                continue
            context = pair.context[-self.sentences :]
            yield self._joined(row, [[known[side][one[side]] for one in context] for side in range(2)])

    def _joined(self, row: EncodedRow, context: Sequence[Sequence[Sequence[int]]]) -> EncodedRow:
        """`context`: of source and target. If both are read, both have the same sentences."""
        most = 1 << 30 if self.max_tokens is None else self.max_tokens
        free = [most - self.special_count - len(ids) for ids in row]
        sides = range(2 if self.target else 1)
        fit = min(count_fitting(context[side], free[side]) for side in sides)
        before = [join_context(context[side][len(context[side]) - fit :], self.breaks[side]) for side in sides]
        return [[*before[0], *row[0]], [*before[1], *row[1]] if self.target else row[1]]

    def _encode_once(self, tokenizer: Tokenizer, texts: set[str]) -> dict[str, list[int]]:
        ordered = sorted(texts)
        return dict(zip(ordered, encode_texts(tokenizer, ordered), strict=True))
