"""Rules that executors keep for parts, by the part's class. A part without a rule still runs: its executor calls it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from allyouneed.runtime.program import Unsupported


class Blocker(NamedTuple):
    """A part that keeps a model from an executor; an empty path is the model itself."""

    path: str
    reason: str


F = TypeVar("F", bound=Callable[..., Any])


class Rules:
    """`purpose` completes "RetentionModule has no …". A rule holds for exactly the classes it is registered for: a
    subclass may compute something else. A class that computes the same as another says so (`computes_as`)."""

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose
        self.found: dict[type, Callable[..., Any]] = {}

    def register(self, *kinds: type) -> Callable[[F], F]:
        def note(rule: F) -> F:
            for kind in kinds:
                self.found[kind] = rule
            return rule

        return note

    def get(self, part: Any) -> Callable[..., Any] | None:
        return self.found.get(getattr(type(part), "computes_as", type(part)))

    def __call__(self, part: Any, *args: Any) -> Any:
        """Apply a part's rule; it raises `Unsupported` where it does not cover this part, or where there is none."""
        rule = self.get(part)
        if rule is None:
            name = "recurrence in depth" if isinstance(part, partial) else type(part).__name__
            raise Unsupported(f"{name} has no {self.purpose}")
        return rule(part, *args)
