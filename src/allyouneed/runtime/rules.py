"""Rules that executors keep for parts, by the part's class. A part without a rule still runs: its executor calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from allyouneed.plugins import named_in_sources
from allyouneed.runtime.program import Unsupported


class Blocker(NamedTuple):
    """A part that keeps a model from an executor; an empty path is the model itself."""

    path: str
    reason: str


F = TypeVar("F", bound=Callable[..., Any])


@cache
def registering_modules(folder: Path) -> dict[str, list[str]]:
    """Modules by the names of the classes that they register rules for."""
    return named_in_sources([folder], r"^@\w+\.register\(([\w, ]+)\)")


class Rules:
    """`purpose` completes "RetentionModule has no …". A rule holds for exactly the classes it is registered for: a
    subclass may compute something else. A class that computes the same as another says so (`computes_as`).

    `module`: where these rules are made. Its neighbours register more; one is imported when a class that it names is
    first met, so that a model loads the rules of its own parts only.
    """

    def __init__(self, purpose: str, module: str) -> None:
        self.purpose, self.module = purpose, module
        self.folder = Path(str(sys.modules[module].__file__)).parent
        self.found: dict[type, Callable[..., Any]] = {}
        self._asked: set[str] = set()  # names of classes whose modules are imported

    def register(self, *kinds: type) -> Callable[[F], F]:
        def note(rule: F) -> F:
            for kind in kinds:
                self.found[kind] = rule
            return rule

        return note

    def get(self, part: Any) -> Callable[..., Any] | None:
        kind = getattr(type(part), "computes_as", type(part))
        if kind not in self.found and kind.__name__ not in self._asked:
            self._asked.add(kind.__name__)
            for module in registering_modules(self.folder).get(kind.__name__, ()):
                import_module(module)
        return self.found.get(kind)

    def classes(self) -> list[type]:
        """Every class that has a rule; imports them all."""
        for module in {name for names in registering_modules(self.folder).values() for name in names}:
            import_module(module)
        return list(self.found)

    def __call__(self, part: Any, *args: Any) -> Any:
        """Apply a part's rule; it raises `Unsupported` where it does not cover this part, or where there is none."""
        rule = self.get(part)
        if rule is None:
            name = "recurrence in depth" if isinstance(part, partial) else type(part).__name__
            raise Unsupported(f"{name} has no {self.purpose}")
        return rule(part, *args)
