"""The one kind of error that speaks to the person who typed something.

Rule 8: what is wrong, where, what to do. The command line prints the message alone and exits with code 2;
every other exception is our mistake and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend. The text says what is wrong, where, and what to do."""


def near(word: str | None, known: Iterable[str]) -> str:
    """` (did you mean 'de'?)`, for a name that is nearly one of these; case counts for nothing."""
    plain = {name.lower(): name for name in known}
    close = difflib.get_close_matches((word or "").lower(), plain, n=1, cutoff=0.6)
    return f" (did you mean {plain[close[0]]!r}?)" if close else ""
