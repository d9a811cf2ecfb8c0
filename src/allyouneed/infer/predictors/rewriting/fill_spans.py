"""Span corruption models: fill gaps of any length."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from allyouneed.config import tree_of
from allyouneed.data.tokenizers.base import MASK, sentinel
from allyouneed.errors import UserError, quote
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.base import EvaluationResult, check_texts, evenly_spaced
from allyouneed.infer.predictors.generating import GeneratingPredictor
from allyouneed.tasks.language.span_corruption import corrupt

SHOWN = 40  # tokens of a sample text
GAP = 3  # tokens removed from its middle


class SpanFiller(GeneratingPredictor):
    """Fills each `<mask>` with any number of tokens."""

    @cached_property
    def sentinels(self) -> list[int]:
        count = int(self.folder.task["sentinels"])
        return [self.tokenizer.special(sentinel(number)) for number in range(count)]

    def build_engine(self) -> Engine:
        tokenizer = self.tokenizer
        never = [n for n in tokenizer.specials if n != tokenizer.eos and n not in set(self.sentinels)]
        return Engine(self.model, tokenizer.bos, tokenizer.eos, tokenizer.pad, never, self.limit)

    def fill(self, texts: str | Sequence[str], **options: Any) -> Any:
        """The text, or each text of a list, with every `<mask>` filled. `options`: `beam=1`, `extra=20`, …"""
        many = check_texts([texts] if isinstance(texts, str) else texts, "fill")
        decoding = Decoding.of(self.folder.decoding, **options)
        texts_in_parts = [self._parts(text) for text in many]
        gaps = self._fill_gaps(texts_in_parts, decoding, many)
        found = [self._join(*both) for both in zip(texts_in_parts, gaps, strict=True)]
        return found[0] if isinstance(texts, str) else found

    def _parts(self, text: str) -> list[list[int]]:
        parts = self.tokenizer.encode_batch(text.split(MASK))
        if not 1 < len(parts) <= len(self.sentinels) + 1:
            raise UserError(f"{quote(text)}: expected 1 to {len(self.sentinels)} {MASK}")
        return parts

    def _fill_gaps(
        self, texts: list[list[list[int]]], decoding: Decoding, names: Sequence[str] = ()
    ) -> list[list[list[int]]]:
        """The tokens that fill the gaps of each text. `names`: the texts, for messages."""
        sources = [self._source(parts) for parts in texts]
        limit = self.model.config.source_limit
        for text, source in zip(names, sources, strict=False):
            if limit is not None and len(source) > limit:
                raise UserError(f"{quote(text)}: {len(source)} tokens, more than the model's {limit}; shorten it")
        answers = self.engine.generate(sources, decoding)
        for text, (best, *_) in zip(names, answers, strict=False):
            if not best.finished:
                why = "because it repeats itself" if best.repeats else "without an end token; raise extra"
                warnings.warn(f"{quote(text)}: stopped after {len(best.tokens)} tokens {why}", stacklevel=3)
        found = zip(answers, texts, strict=True)
        return [self._by_sentinel(best.tokens, len(parts) - 1) for (best, *_), parts in found]

    def _source(self, parts: list[list[int]]) -> list[int]:
        source = list(parts[0])
        for sentinel_id, part in zip(self.sentinels, parts[1:], strict=False):
            source += [sentinel_id, *part]
        return [*source, self.tokenizer.eos]

    def _by_sentinel(self, tokens: list[int], count: int) -> list[list[int]]:
        """The tokens after each sentinel; empty for a sentinel that was not generated."""
        found: dict[int, list[int]] = {}
        current: list[int] = []
        for token in tokens:
            if token in self.sentinels:
                current = found.setdefault(token, [])
            else:
                current.append(token)
        return [found.get(sentinel_id, []) for sentinel_id in self.sentinels[:count]]

    def _join(self, parts: list[list[int]], gaps: list[list[int]]) -> str:
        ids = list(parts[0])
        for gap, part in zip(gaps, parts[1:], strict=True):
            ids += [*gap, *part]
        return self.tokenizer.decode(ids)

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Samples only; validation measures the likelihood of removed spans."""
        samples = []
        options = Decoding.of(self.folder.decoding if decoding is None else tree_of(decoding))
        for example in evenly_spaced(examples, show):
            ids = self.tokenizer.encode(example.texts[0])[:SHOWN]
            middle = len(ids) // 2
            _, target = corrupt(ids, [(middle, middle + GAP)], self.sentinels)
            gaps = self._fill_gaps([[ids[:middle], ids[middle + GAP :]]], options)
            samples.append(
                {
                    "text": MASK.join(self.tokenizer.decode_batch([ids[:middle], ids[middle + GAP :]])),
                    "removed": self.tokenizer.decode(target[1:]),
                    "predicted": self.tokenizer.decode(gaps[0][0]),
                }
            )
        return EvaluationResult({}, "", samples)
