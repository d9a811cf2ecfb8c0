"""Fields of requests that no route uses. Clients send more than they need: such fields are ignored, and a header of the
answer names them. A field that looks misspelt is refused, and so is one that asks for another kind of answer."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from allyouneed.apps.serve.errors import ApiError, over_limit

HEADER = "X-Ignored-Fields"
CLOSE = 0.82  # of difflib: one letter of five or six
MOST_NAMED = 20
MOST_UNKNOWN = 100
NAME = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
# without these the answer would be another one than the client expects
UNSUPPORTED = (
    "functions", "function_call", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structured_outputs", "prompt_embeds", "audio", "modalities", "url", "style_id", "translation_memory_id",
    "response_format", "tools", "width", "height", "steps",
)  # fmt: skip
# values of them that ask for nothing but what the server does
PLAIN: dict[str, Any] = {
    "modalities": ["text"], "functions": [], "function_call": "none", "tools": [], "response_format": {"type": "text"},
}  # fmt: skip
ELSEWHERE = ("repeat_penalty", "models", "n_predict")  # names of other servers, not misspelt ones
_ignored: ContextVar[list[str] | None] = ContextVar("ignored_fields", default=None)


def begin_request() -> list[str]:
    """The names that are ignored while this request is answered, to be filled."""
    found: list[str] = []
    _ignored.set(found)
    return found


def forget_ignored() -> None:
    """Another process answers this request, and names them."""
    if (noted := _ignored.get()) is not None:
        noted.clear()


def check_fields(
    given: Mapping[str, Any], known: Collection[str], unused: Collection[str] = (), what: str = ""
) -> None:
    """Note fields that are ignored, `unused` ones among those that are known; refuse misspelt and unsupported ones.
    `what`: the field that these are in."""
    if (unknown := len(given.keys() - set(known))) > MOST_UNKNOWN:
        raise over_limit("unknown fields", unknown, MOST_UNKNOWN)
    for name, value in given.items():
        if value is None or (name in known and name not in unused):
            continue
        if name not in known:
            _check_unknown(f"{what}{name[:100]}", name, given, known)
        note_ignored(name)


def note_ignored(name: str) -> None:
    """Record that this model has no use for a field."""
    noted = _ignored.get()
    if noted is not None and name not in noted:
        if len(noted) == MOST_UNKNOWN:  # of all objects in a body together
            raise over_limit("unknown fields, or more", MOST_UNKNOWN + 1, MOST_UNKNOWN)
        noted.append(name)


def _check_unknown(shown: str, name: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    if name in UNSUPPORTED:
        if given[name] == PLAIN.get(name):
            return
        raise ApiError(f"{shown}: not supported by this server; remove it", param=shown, code="unsupported_field")
    if name in ELSEWHERE:
        return
    if close := next((one for one in _close(name[:100].lower(), tuple(known)) if given.get(one) is None), None):
        raise ApiError(f"{shown}: unknown field (did you mean {close!r}?)", param=shown, code="unknown_field")


@lru_cache(1024)  # a thousand messages may have the same field
def _close(name: str, known: tuple[str, ...]) -> list[str]:
    """Those that it may be a misspelling of, closest first."""
    return difflib.get_close_matches(name, known, len(known) or 1, CLOSE)


def header_value(names: list[str]) -> str:
    """Names that cannot be in a header are counted."""
    plain = [name for name in names if NAME.fullmatch(name)][:MOST_NAMED]
    more = len(names) - len(plain)
    return ", ".join([*plain, *([f"{more} more"] if more else [])])
