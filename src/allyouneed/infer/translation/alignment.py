"""Alignment of finished translations: cross-attention weights, recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.translation.carry import Answer, Attention
from allyouneed.infer.translation.checks import INVALID, drop_invalid
from allyouneed.infer.translation.edits import moved
from allyouneed.infer.translation.frames import Frame
from allyouneed.nn.batch import Batch, Rows

CharSpan = tuple[int, int]  # begin and end


def cross_attention(
    model: Any, sources: Sequence[Sequence[int]], inputs: Sequence[Sequence[int]], pad: int, layer: int | None = None
) -> list[Tensor]:
    """Cross-attention weights (target tokens, source tokens) of each pair, averaged over the heads of one layer.

    `inputs`: targets as the decoder reads them, begin token first; row i belongs to the prediction of token i. `layer`:
    default: the last but one, which comes closest to word alignments in trained Transformers (Garg et al. 2019, 3.1).
    """
    crosses = [number for number, block in enumerate(model.decoder.blocks) if "cross" in block.sublayers]
    chosen = crosses[max(len(crosses) - 2, 0) if layer is None else layer]
    device = next(model.parameters()).device
    was_training: bool = model.training
    model.eval()
    found: list[Tensor] = []
    try:
        for source, target in zip(sources, inputs, strict=True):
            batch = Batch(Rows.of([target], pad), Rows.of([source], pad)).to(device)
            found.append(model.attention(batch, "cross", [chosen])[chosen][0].mean(0).cpu())
    finally:
        model.train(was_training)
    return found


@dataclass(frozen=True)
class Aligner:
    """Aligns what a model read with what it generated."""

    model: Any
    source: Tokenizer
    target: Tokenizer
    frame: Frame

    @property
    def possible(self) -> bool:
        """Whether the model has cross-attention to look at."""
        blocks = getattr(getattr(self.model, "decoder", None), "blocks", ())
        return hasattr(self.model, "attention") and any("cross" in block.sublayers for block in blocks)

    def attention(self, text: str, found: Hypothesis) -> Attention:
        """Cross-attention of an answer, special tokens excluded, and the characters of both sides' tokens."""
        frame, ids = self.frame, self.source.encode(text)
        target = [*frame.begin, *found.tokens[:-1]]
        (weights,) = cross_attention(self.model, [frame.source(ids)], [target], self.source.pad)
        first = len(frame.before)
        weights = weights[len(frame.begin) - 1 :, first : first + len(ids)]
        return Attention(weights, self.source.spans(text), target_spans(self.target, found.tokens))

    def links(self, answer: Answer, source_at: int, target_at: int) -> Iterator[tuple[CharSpan, CharSpan]]:
        """For each target token the source token with the largest attention weight, as characters of the two texts in
        which the chunk and its translation begin at these offsets."""
        for part in answer.parts:
            if not part.reading.text or not part.hypothesis.tokens:
                continue
            weights, sources, targets = self.attention(part.reading.text, part.hypothesis)
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
