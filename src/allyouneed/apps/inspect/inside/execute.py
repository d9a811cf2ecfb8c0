"""Where the forward passes of an inspection run: in the calling thread, or, in a server, in the thread that runs the
other forward passes of the model. Each pass waits there for its turn, so that an inspection of many passes (leaving out
every token in turn) does not hold up the requests of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Execute = Callable[[Callable[[], Any]], Any]
_execute: ContextVar[Execute | None] = ContextVar("execute", default=None)


@contextmanager
def executing(execute: Execute) -> Iterator[None]:
    """Run forward passes of this thread by `execute(function)`, which returns what the function returns."""
    token = _execute.set(execute)
    try:
        yield
    finally:
        _execute.reset(token)


def forward_pass(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that runs a model."""

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> T:
        execute = _execute.get()
        if execute is None:
            return function(*args, **options)
        return execute(lambda: function(*args, **options))

    return run
