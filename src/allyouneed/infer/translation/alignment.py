"""Which source token each target token looked at: cross-attention weights, recomputed for finished translations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from allyouneed.nn.batch import Batch, Rows


def attention(
    model: Any, sources: Sequence[Sequence[int]], inputs: Sequence[Sequence[int]], pad: int, layer: int | None = None
) -> list[Tensor]:
    """For each pair, the weights (target tokens, source tokens) with which the decoder looked at the source.

    `inputs` are targets as the decoder reads them, begin mark first: row i is the look that chose token i.
    The mean over the heads of one layer, the last but one unless told otherwise: of a trained Transformer's layers its
    mean comes closest to word alignments (Garg et al. 2019, 3.1).
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
