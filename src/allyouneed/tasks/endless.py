"""Whether a model can read a text that goes on from batch to batch (`task.memory`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LONG = (1 << 12, 1 << 17)  # tokens, by which what forgets has begun to


def endless_problems(config: Any, kind: str) -> Iterator[str]:
    """Why it cannot, in constant memory; `kind` is the one that could, and its stack."""
    if config.kind != kind:
        yield f"kind: {config.kind} does not read on from batch to batch (task.memory); {kind} does"
        return
    if config.embed.positions.kind != "none":
        yield (
            "embed.positions: are counted from the beginning, and with task.memory a text has no end; leave them to "
            "the mixer (positions: transformer-xl, rotary, …)"
        )
    for number, layer in enumerate(getattr(config, kind)):
        if layer.mixer is not None and all(layer.mixer.cost(config, length).state_per_token for length in LONG):
            pattern = getattr(layer.mixer, "pattern", "causal")
            yield (
                f"{kind}[{number}].mixer.pattern: would remember everything that was ever read (task.memory); let it "
                f"forget: {pattern} & window(512), or {pattern} & block-window(128, 2)"
            )
