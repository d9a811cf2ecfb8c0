"""The states of parts inside a part."""

from __future__ import annotations

from torch import Tensor

from allyouneed.nn.states.base import State


class NestedStates(State):
    """The states of nested parts, by name."""

    def __init__(self, parts: dict[str, State]) -> None:
        self.parts = parts

    def trim(self, length: int, each: Tensor | None = None) -> None:
        for state in self.parts.values():
            state.trim(length, each)

    @property
    def bytes(self) -> int:
        return sum(state.bytes for state in self.parts.values())
