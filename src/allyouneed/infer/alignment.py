"""Which source token each target token looked at: cross-attention weights, recomputed for finished translations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.nn.batch import Rows


def attention(
    model: Any, sources: Sequence[Sequence[int]], inputs: Sequence[Sequence[int]], pad: int, layer: int | None = None
) -> list[Tensor]:
    """For each pair, the weights (target tokens, source tokens) with which the decoder looked at the source.

    `inputs` are targets as the decoder reads them, begin mark first: row i is the look that chose token i.
    The mean over the heads of one layer, the last but one unless told otherwise: of a trained Transformer's layers its
    mean comes closest to word alignments (Garg et al. 2019, 3.1).
    """
    crosses = [module for name, module in model.decoder.named_modules() if name.endswith("sublayers.cross")]
    chosen: nn.Module = crosses[max(len(crosses) - 2, 0) if layer is None else layer]
    device = next(model.parameters()).device
    was_training: bool = model.training
    model.eval()
    found: list[Tensor] = []
    try:
        with torch.inference_mode():
            for source, target in zip(sources, inputs, strict=True):
                record: dict[nn.Module, Any] = {chosen: None}
                memory = model.encode(Rows.of([source], pad).to(device))
                model.decode(Rows.of([target], pad).to(device), memory, record)
                found.append(record[chosen][0].mean(0).cpu())
    finally:
        model.train(was_training)
    return found
