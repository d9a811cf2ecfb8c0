"""Which source token a generated token attends to: cross-attention of finished targets, recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.infer.decoding.notes import INVALID, drop_invalid
from allyouneed.nn.batch import Batch, Rows
from allyouneed.runtime.process import evaluation_mode

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
    crosses = [number for number, block in enumerate(model.decoder.blocks) if reads_source(block)]
    chosen = crosses[_default_layer(len(crosses)) if layer is None else layer]
    device = next(model.parameters()).device
    found: dict[int, Tensor] = {}
    order = sorted(range(len(inputs)), key=lambda n: (len(inputs[n]), len(sources[n])))
    with evaluation_mode(model):
        for some in (order[at : at + ROWS] for at in range(0, len(order), ROWS)):
            rows = Rows.of([inputs[n] for n in some], pad), Rows.of([sources[n] for n in some], pad)
            weights = model.attention(Batch(*rows).to(device), "cross", [chosen])[chosen].mean(1).cpu()
            for n, one in zip(some, weights, strict=True):
                found[n] = one[: len(inputs[n]), : len(sources[n])]
    return [found[n] for n in range(len(inputs))]


def _default_layer(layers: int) -> int:
    return max(layers - 2, min(layers - 1, 1))


def reads_source(block: Any) -> bool:
    """Whether the block attends to the source itself, not to the sentences before it."""
    return "cross" in block.sublayers and not getattr(block.sublayers["cross"], "reads_context", False)


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
