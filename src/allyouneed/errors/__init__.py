"""Errors that the user can fix.

The message says what is wrong, where, and what to do. The command line prints it alone and exits with code 2; every
other exception is a bug and keeps its traceback.
"""

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """An error the user can fix. The text says what is wrong, where, and what to do."""


def near(word: str | None, known: Iterable[str]) -> str:
    """` (did you mean 'de'?)` for a name similar to one of these, ignoring case; else nothing."""
    plain = {name.lower(): name for name in known}
    close = difflib.get_close_matches((word or "").lower(), plain, n=1, cutoff=0.6)
    return f" (did you mean {plain[close[0]]!r}?)" if close else ""


# control characters but for line break and tab, and those that reorder what surrounds them
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text of a file, for a terminal: escape codes and other control characters are spelled out."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


_PRIVATE_USE = re.compile("[\ue000-\uf8ff]")  # the marks of a document


def quote(text: str, length: int = 40) -> str:
    """The beginning of a text, for a note about it."""
    text = _PRIVATE_USE.sub("", text)
    return repr(text if len(text) <= length else text[: length - 1] + "…")
