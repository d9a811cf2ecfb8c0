"""Texts with gaps, filled by a model that was trained to tell what was cut out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from allyouneed.config import tree_of
from allyouneed.data.tokenizers.base import MASK, sentinel
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.base import Judged, Predictor, checked, spread
from allyouneed.infer.translation.split import quoted
from allyouneed.tasks.span_corruption import corrupt

SHOWN = 40  # in samples, a text is cut after so many tokens
GAP = 3  # and so many of them are cut out of its middle


class SpanFiller(Predictor):
    """Fills gaps of any length: `<mask>` is where something is missing."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        tokenizer = self.tokenizer
        count = int(folder.task["sentinels"])
        self.marks = [tokenizer.special(sentinel(number)) for number in range(count)]
        never = [n for n in tokenizer.specials if n != tokenizer.eos and n not in set(self.marks)]
        self.engine = Engine(self.model, tokenizer.bos, tokenizer.eos, tokenizer.pad, never, self.limit)

    def fill(self, texts: str | Sequence[str], **options: Any) -> Any:
        """The text, or each text of a list, with every `<mask>` filled. `options`: `beam=1`, `extra=20`, …"""
        many = checked([texts] if isinstance(texts, str) else texts, "fill")
        settled = Decoding.of(self.folder.decoding, **options)
        texts_in_parts = [self._parts(text) for text in many]
        gaps = self._gaps(texts_in_parts, settled, many)
        found = [self._joined(*both) for both in zip(texts_in_parts, gaps, strict=True)]
        return found[0] if isinstance(texts, str) else found

    def _parts(self, text: str) -> list[list[int]]:
        parts = self.tokenizer.encode_batch(text.split(MASK))
        if not 1 < len(parts) <= len(self.marks) + 1:
            raise UserError(f"{quoted(text)}: write {MASK} where something is missing, 1 to {len(self.marks)} times")
        return parts

    def _gaps(
        self, texts: list[list[list[int]]], decoding: Decoding, names: Sequence[str] = ()
    ) -> list[list[list[int]]]:
        """For each text the tokens that fill its gaps. `names`: how it is called where something is to be said."""
        sources = []
        for parts in texts:
            source = list(parts[0])
            for mark, part in zip(self.marks, parts[1:], strict=False):
                source += [mark, *part]
            sources.append([*source, self.tokenizer.eos])
        limit = self.model.config.source_limit
        for text, source in zip(names, sources, strict=False):
            if limit is not None and len(source) > limit:
                raise UserError(f"{quoted(text)}: {len(source)} tokens, the model can read {limit}; shorten it")
        answers = self.engine.generate(sources, decoding)
        for text, (best, *_) in zip(names, answers, strict=False):
            if not best.finished:
                why = "for it repeats itself" if best.repeats else "without coming to an end; extra=…"
                warnings.warn(f"{quoted(text)}: stopped after {len(best.tokens)} tokens, {why}", stacklevel=3)
        return [self._told(answer[0].tokens, len(parts) - 1) for answer, parts in zip(answers, texts, strict=True)]

    def _told(self, tokens: list[int], count: int) -> list[list[int]]:
        """What stands after each mark; nothing for a mark that was not said."""
        found: dict[int, list[int]] = {}
        now: list[int] = []
        for token in tokens:
            if token in self.marks:
                now = found.setdefault(token, [])
            else:
                now.append(token)
        return [found.get(mark, []) for mark in self.marks[:count]]

    def _joined(self, parts: list[list[int]], gaps: list[list[int]]) -> str:
        ids = list(parts[0])
        for gap, part in zip(gaps, parts[1:], strict=True):
            ids += [*gap, *part]
        return self.tokenizer.decode(ids)

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> Judged:
        """Samples only: how likely what was cut out is, is what validation measures."""
        samples = []
        settled = Decoding.of(self.folder.decoding if decoding is None else tree_of(decoding))
        for example in spread(examples, show):
            ids = self.tokenizer.encode(example.texts[0])[:SHOWN]
            middle = len(ids) // 2
            _, target = corrupt(ids, [(middle, middle + GAP)], self.marks)
            gaps = self._gaps([[ids[:middle], ids[middle + GAP :]]], settled)
            samples.append(
                {
                    "text": MASK.join(self.tokenizer.decode_batch([ids[:middle], ids[middle + GAP :]])),
                    "cut out": self.tokenizer.decode(target[1:]),
                    "told": self.tokenizer.decode(gaps[0][0]),
                }
            )
        return Judged({}, "", samples)
