"""Turn failures of the `tokenizers` library into user errors."""

from __future__ import annotations

from collections.abc import Sequence

from allyouneed.errors import UserError


def translate_error(error: BaseException, texts: Sequence[str] = ()) -> BaseException:
    """What to raise where the library raises `error`. A damaged tokenizer makes it panic with a `BaseException`; one
    without a token for unknown text raises a bare `Exception`."""
    if isinstance(error, TypeError) and texts:
        return UserError(_not_unicode(texts))
    if type(error).__name__ == "PanicException":
        return UserError(f"the tokenizer is damaged and fails on a text ({error}); download it again")
    if type(error) is Exception:
        return UserError(f"the tokenizer cannot encode every text ({error}); its model needs an unknown token")
    return error


def _not_unicode(texts: Sequence[str]) -> str:
    for text in texts:
        if any("\ud800" <= char <= "\udfff" for char in text):
            return f"{text[:60]!r} contains an unpaired surrogate; fix the text"
    return "a text to encode must be a string"
