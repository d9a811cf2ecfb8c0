"""Turn failures of the `tokenizers` library into user errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from allyouneed.errors import UserError


@contextmanager
def translate_errors(texts: Sequence[str] = ()) -> Iterator[None]:
    """A damaged tokenizer makes the library panic with a `BaseException`."""
    try:
        yield
    except TypeError:
        if not texts:
            raise
        raise UserError(_not_unicode(texts)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer is damaged and fails on a text ({error}); download it again") from None


def _not_unicode(texts: Sequence[str]) -> str:
    for text in texts:
        if any("\ud800" <= char <= "\udfff" for char in text):
            return f"{text[:60]!r} contains an unpaired surrogate; fix the text"
    return "a text to encode must be a string"
