"""Alignment of finished translations: cross-attention weights, recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from allyouneed.apps.translate.spans.carry import AttentionMap, ChunkTranslation
from allyouneed.apps.translate.splitting.edits import moved
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.infer.decoding.alignment import CharSpan, cross_attention, reads_source, target_spans
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.engine import Engine
from allyouneed.infer.frames import Frame
from allyouneed.runtime.process import inference


@dataclass(frozen=True)
class Aligner:
    """Aligns what a model read with what it generated."""

    engine: Engine
    source: Tokenizer
    target: Tokenizer
    frame: Frame

    @property
    def model(self) -> Any:
        return self.engine.model

    @property
    def possible(self) -> bool:
        """Whether the model has cross-attention to look at."""
        blocks = getattr(getattr(self.model, "decoder", None), "blocks", ())
        aligns = self.engine.aligns and hasattr(self.model, "attention")
        return aligns and any(map(reads_source, blocks))

    def attention(self, pairs: Sequence[tuple[str, Hypothesis]]) -> list[AttentionMap]:
        """Cross-attention of answers to texts, special tokens excluded, and the characters of both sides' tokens."""
        frame, model, pad = self.frame, self.model, self.source.pad
        sources = self.source.encode_batch([text for text, _ in pairs])
        inputs = [
            (frame.source(ids), [*frame.begin, *found.tokens[:-1]])
            for ids, (_, found) in zip(sources, pairs, strict=True)
        ]

        def compute(some: list[tuple[list[int], list[int]]]) -> list[Tensor]:
            with inference():
                return cross_attention(model, [one for one, _ in some], [other for _, other in some], pad)

        weights = self.engine.compute("cross-attention", inputs, compute)
        first, skipped = len(frame.before), len(frame.begin) - 1
        return [
            AttentionMap(
                one[skipped:, first : first + len(ids)],
                self.source.spans(text),
                target_spans(self.target, found.tokens),
            )
            for one, ids, (text, found) in zip(weights, sources, pairs, strict=True)
        ]

    def links(self, answer: ChunkTranslation, source_at: int, target_at: int) -> Iterator[tuple[CharSpan, CharSpan]]:
        """For each target token the source token with the largest attention weight, as characters of the two texts in
        which the chunk and its translation begin at these offsets."""
        parts = [part for part in answer.parts if part.reading.text and part.hypothesis.tokens]
        found = self.attention([(part.reading.text, part.hypothesis) for part in parts])
        for part, (weights, sources, targets) in zip(parts, found, strict=True):
            for token, there in zip(weights.argmax(-1).tolist(), targets, strict=True):
                if there[0] < there[1]:
                    here = moved(sources[token], part.reading.edits)
                    there = moved(there, part.edits)
                    end = min(there[1] + part.target, len(answer.text))
                    if there[0] + part.target < end:
                        yield (
                            _shift(here, source_at + part.source),
                            (there[0] + target_at + part.target, end + target_at),
                        )


def _shift(span: CharSpan, by: int) -> CharSpan:
    return span[0] + by, span[1] + by
