"""Anything that a malformed file makes our readers raise, as one message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from allyouneed.errors import UserError

# strings for numbers, negative sizes, names that are missing, …
ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError, AssertionError)


@contextmanager
def malformed(what: str) -> Iterator[None]:
    """Report any of these errors as a `UserError` that begins with `what`."""
    try:
        yield
    except UserError:
        raise
    except ERRORS as error:
        raise UserError(f"{what}: {type(error).__name__}: {error}") from error
