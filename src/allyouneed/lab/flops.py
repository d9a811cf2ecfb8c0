"""What training a model costs: FLOPs by the rule 6·N·D, by the parts' own counts and by torch's counter, and the time
and price on a named device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from allyouneed.errors import UserError, near
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.weights import meta_model
from allyouneed.runtime.process import ignore_warnings
from allyouneed.training.planning.plan import PEAK, TOKENS_PER_PARAMETER, UTILISATION

# FLOP/s of dense bf16 matrix products: measured on an H200 (planning/plan.py), the makers' figures of the others
DEVICES = {
    "h200": PEAK,
    "h100": 989e12,
    "a100": 312e12,
    "l40s": 362e12,
    "l4": 121e12,
    "rtx-4090": 165e12,
    "rtx-3090": 71e12,
    "mi300x": 1307e12,
}
HOUR, DAY = 3600.0, 86400.0


def counted_by_torch(config: Any, length: int) -> float | str:
    """Forward and backward FLOPs per token of one row, as torch counts the operations that it executes, without
    computing them; or why it cannot. It knows matrix products, convolutions and attention, not kernels of ours."""
    if config.kind not in ("decoder", "decoder-decoder", "recurrent-memory"):
        return "counted for decoders only"
    if config.limit is not None and config.limit < length:
        return f"this model reads at most {config.limit:,} tokens"
    try:
        model: Any = meta_model(config)
        tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
        with ignore_warnings(), FlopCounterMode(display=False) as counter:
            model.head(model(Batch(Rows(tokens)))).sum().backward()
    except Exception as error:  # parts whose shapes depend on values, or kernels without a meta version
        return f"this model needs real numbers ({type(error).__name__})"
    return counter.get_total_flops() / length


def training_lines(
    config: Any, length: int, tokens: float | None = None, device: str = "h200", price: float | None = None
) -> Iterator[str]:
    """What `describe --train` prints. `price`: of an hour of the device."""
    if device not in DEVICES:
        raise UserError(f"--on {device}: unknown device{near(device, DEVICES)}; known: {', '.join(DEVICES)}")
    cost = config.cost(length)
    wanted = float(TOKENS_PER_PARAMETER * cost.parameters) if tokens is None else tokens
    parts, rule = 3.0 * cost.flops, 6.0 * cost.parameters
    yield f"training     {wanted:.3g} tokens" + (
        "" if tokens is not None else f", {TOKENS_PER_PARAMETER} per parameter"
    )
    yield f"6·N·D        {rule * wanted:.3e} FLOPs"
    yield f"by the parts {parts * wanted:.3e} FLOPs ({parts / rule:.2f} times 6·N·D; rows of {length:,})"
    counted = counted_by_torch(config, length)
    if isinstance(counted, str):
        yield f"by torch     not counted: {counted}"
    else:
        yield f"by torch     {counted * wanted:.3e} FLOPs ({counted / parts:.2f} times the parts')"
    seconds = parts * wanted / (DEVICES[device] * UTILISATION)
    took = f"{seconds / DAY:,.2f} days" if seconds > 2 * DAY else f"{seconds / HOUR:,.2f} hours"
    yield f"time         {took} on one {device} at {UTILISATION:.0%} of {DEVICES[device] / 1e12:,.0f} TFLOP/s in bf16"
    if price is not None:
        yield f"cost         {seconds / HOUR * price:,.2f} at {price:g} an hour"
