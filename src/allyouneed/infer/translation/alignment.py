"""Alignment of finished translations: cross-attention weights, recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.engine import Engine
from allyouneed.infer.translation.carry import Answer, Attention
from allyouneed.infer.translation.checks import INVALID, drop_invalid
from allyouneed.infer.translation.edits import moved
from allyouneed.infer.translation.frames import Frame
from allyouneed.nn.batch import Batch, Rows

CharSpan = tuple[int, int]  # begin and end
ROWS = 32  # pairs of a forward pass


def cross_attention(
    model: Any, sources: Sequence[Sequence[int]], inputs: Sequence[Sequence[int]], pad: int, layer: int | None = None
) -> list[Tensor]:
    """Cross-attention weights (target tokens, source tokens) of each pair, averaged over the heads of one layer.

    `inputs`: targets as the decoder reads them, begin token first; row i belongs to the prediction of token i. `layer`:
    default: the last but one, which comes closest to word alignments in trained Transformers (Garg et al. 2019, 3.1),
    but never the first of several: it aligns the token that was read, not the one that is predicted.
    """
    crosses = [number for number, block in enumerate(model.decoder.blocks) if _reads_source(block)]
    chosen = crosses[_default_layer(len(crosses)) if layer is None else layer]
    device = next(model.parameters()).device
    was_training: bool = model.training
    model.eval()
    found: dict[int, Tensor] = {}
    order = sorted(range(len(inputs)), key=lambda n: (len(inputs[n]), len(sources[n])))
    try:
        for some in (order[at : at + ROWS] for at in range(0, len(order), ROWS)):
            rows = Rows.of([inputs[n] for n in some], pad), Rows.of([sources[n] for n in some], pad)
            weights = model.attention(Batch(*rows).to(device), "cross", [chosen])[chosen].mean(1).cpu()
            for n, one in zip(some, weights, strict=True):
                found[n] = one[: len(inputs[n]), : len(sources[n])]
    finally:
        model.train(was_training)
    return [found[n] for n in range(len(inputs))]


def _default_layer(layers: int) -> int:
    return max(layers - 2, min(layers - 1, 1))


def _reads_source(block: Any) -> bool:
    """Not the sentences before it."""
    return "cross" in block.sublayers and not getattr(block.sublayers["cross"], "reads_context", False)


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
        return aligns and any(map(_reads_source, blocks))

    def attention(self, pairs: Sequence[tuple[str, Hypothesis]]) -> list[Attention]:
        """Cross-attention of answers to texts, special tokens excluded, and the characters of both sides' tokens."""
        frame, model, pad = self.frame, self.model, self.source.pad
        sources = self.source.encode_batch([text for text, _ in pairs])
        inputs = [
            (frame.source(ids), [*frame.begin, *found.tokens[:-1]])
            for ids, (_, found) in zip(sources, pairs, strict=True)
        ]

        def compute(some: list[tuple[list[int], list[int]]]) -> list[Tensor]:
            with torch.inference_mode():
                return cross_attention(model, [one for one, _ in some], [other for _, other in some], pad)

        weights = self.engine.compute("cross-attention", inputs, compute)
        first, skipped = len(frame.before), len(frame.begin) - 1
        return [
            Attention(
                one[skipped:, first : first + len(ids)],
                self.source.spans(text),
                target_spans(self.target, found.tokens),
            )
            for one, ids, (text, found) in zip(weights, sources, pairs, strict=True)
        ]

    def links(self, answer: Answer, source_at: int, target_at: int) -> Iterator[tuple[CharSpan, CharSpan]]:
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


def target_spans(tokenizer: Tokenizer, ids: Sequence[int]) -> list[CharSpan]:
    """(begin, end) characters of each token in the stripped text; tokens that share a character share its span."""
    whole = tokenizer.decode(ids)
    size = len(drop_invalid(whole.strip()))
    shift = len(whole) - len(whole.lstrip())
    ends = [len(tokenizer.decode(ids[: n + 1]).rstrip(INVALID)) for n in range(len(ids))]
    ends[-1:] = [len(whole)] * bool(ids)
    spans, begin = [], 0
    for n, end in enumerate(ends):
        reach = next((e for e in ends[n:] if e > begin), begin)
        spans.append((min(max(begin - shift, 0), size), min(max(reach - shift, 0), size)))
        begin = max(begin, end)
    return spans
