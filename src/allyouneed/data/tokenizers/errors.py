"""What the `tokenizers` library cannot do with a text, as a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from allyouneed.errors import UserError


@contextmanager
def reported(texts: Sequence[str] = ()) -> Iterator[None]:
    """A damaged tokenizer makes the library panic, which is no `Exception`."""
    try:
        yield
    except TypeError:
        if not texts:
            raise
        raise UserError(_not_unicode(texts)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer is damaged and fails on a text ({error}); get it again") from None


def _not_unicode(texts: Sequence[str]) -> str:
    for text in texts:
        if any("\ud800" <= char <= "\udfff" for char in text):
            return f"{text[:60]!r} holds half a surrogate pair, which is no character; mend the text"
    return "a text to encode must be a string"
