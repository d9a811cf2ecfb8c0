"""Errors that the user can fix.

The message says what is wrong, where, and what to do. The command line prints it alone and exits with code 2; every
other exception is a bug and keeps its traceback.
"""

import difflib
import re
from collections.abc import Iterable

MAX_LINES, MAX_LINE = 20, 4000  # of a message: lines, and characters of one


class UserError(Exception):
    """An error the user can fix. The text says what is wrong, where, and what to do; of a long list, the first lines
    and how many follow."""

    def __init__(self, message: object = "") -> None:
        super().__init__(shorten(str(message)))


def shorten(text: str) -> str:
    """A message of at most 20 lines, each of bounded length; `text` may quote a message that was shortened."""
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        left_out = len(lines) - MAX_LINES + 1
        if quoted := _LEFT_OUT.fullmatch(lines[-1]):
            left_out += int(quoted[1].replace(",", "")) - 1
        lines = [*lines[: MAX_LINES - 1], f"  … and {left_out:,} more lines"]
    return "\n".join(
        line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}… and {len(line) - MAX_LINE:,} more characters"
        for line in lines
    )


_LEFT_OUT = re.compile(r"\s*… and ([\d,]+) more lines")


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
