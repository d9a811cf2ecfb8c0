"""Tokens as text while they come: never half a character, and nothing of what is not to be said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from allyouneed.data.tokenizers.base import Tokenizer

BROKEN = "\ufffd"  # what bytes become that are no character, or not yet
LONGEST = 4  # bytes of a character


class StreamingDetokenizer:
    """The text of tokens that follow those `given`, told piece by piece; it ends before the first of the strings it is
    to `stop` at. All pieces together are the text, whoever asks for it: at once or as it comes."""

    def __init__(self, tokenizer: Tokenizer, given: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        # Only the last few tokens are decoded again: from `begin` on, of which those before `known` are told in full.
        # A token's text may depend on the one before it (a space between words), not on those further back.
        self.tokens, self.begin, self.known = list(given), 0, len(given)
        self.told = len(tokenizer.decode(self.tokens)) if given else 0  # characters of the tokens from `begin` on
        self.held = ""  # may be the beginning of a string to stop at
        self.stopped = False

    def add(self, token: int) -> str:
        """What can be said now that this token has come."""
        self.tokens.append(token)
        text = self.tokenizer.decode(self.tokens[self.begin :])
        waiting = min(len(text) - len(text.rstrip(BROKEN)), LONGEST - 1)
        new = text[self.told : len(text) - waiting]
        self.told += len(new)
        if new and not waiting:
            told = len(self.tokenizer.decode(self.tokens[self.known :]))
            if told:  # tokens without text would be no neighbour to the next one
                self.begin, self.known, self.told = self.known, len(self.tokens), told
        return self._settled(new)

    def end(self) -> str:
        """What is left when no token comes any more."""
        rest = self.tokenizer.decode(self.tokens[self.begin :])[self.told :]
        found = self._settled(rest) + ("" if self.stopped else self.held)
        self.held = ""
        return found

    def _settled(self, new: str) -> str:
        """As much of the text as is surely not the beginning of a string to stop at."""
        if self.stopped:
            return ""
        text = self.held + new
        found = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        if found:
            self.stopped, self.held = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self.stop), default=0)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the first ones of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def text_of(tokenizer: Tokenizer, tokens: Iterable[int], given: Sequence[int] = (), stop: Sequence[str] = ()) -> str:
    """The whole text at once."""
    spoken = StreamingDetokenizer(tokenizer, given, stop)
    return "".join([spoken.add(token) for token in tokens]) + spoken.end()


class StopStrings:
    """Whether a text has come to one of these strings, by its last tokens: a token is at least a byte of it."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, strings
        # and some more, for the first of them may lose its space, or begin in the middle of a character
        self.reach = max(len(string.encode()) for string in strings) + LONGEST

    def __call__(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(tokens)
        return any(string in text for string in self.strings)
