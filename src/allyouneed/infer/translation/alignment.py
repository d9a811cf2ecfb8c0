"""Alignment of finished translations: cross-attention weights, recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from allyouneed.nn.batch import Batch, Rows


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
