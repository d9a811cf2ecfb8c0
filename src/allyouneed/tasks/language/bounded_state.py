"""Whether a model can carry its state from batch to batch (`task.memory`) in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LONG = (1 << 12, 1 << 17)  # tokens; a bounded state stops growing before this


def unbounded_state_problems(config: Any, kind: str) -> Iterator[str]:
    """Why it cannot. `kind`: the kind of model that supports it, and the name of its stack."""
    if config.bounded_state:
        return
    if config.kind != kind:
        yield f"kind: {config.kind} does not support task.memory; {kind} does"
        return
    if config.embed.positions.kind != "none":
        yield (
            "embed.positions: absolute positions do not work with task.memory, because texts have no end; use the "
            "mixer's positions (transformer-xl, rotary, …)"
        )
    for number, layer in enumerate(getattr(config, kind)):
        if layer.mixer is not None and all(layer.mixer.cost(config, length).state_per_token for length in LONG):
            pattern = getattr(layer.mixer, "pattern", "causal")
            yield (
                f"{kind}[{number}].mixer.pattern: the state would grow without bound (task.memory); use "
                f"{pattern} & window(512), or {pattern} & block-window(128, 2)"
            )
