"""Streaming detokenization: tokens to text, piece by piece, never half a character and nothing after a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from allyouneed.data.tokenizers.base import Tokenizer

REPLACEMENT = "\ufffd"  # decodes bytes that are not, or not yet, a character
MAX_BYTES = 4  # of a character


class StreamingDetokenizer:
    """The text of tokens that follow a `prompt`, up to the first `stop` string. The pieces of `add` and `end` together
    are the text of all tokens at once."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        # Only the last few tokens are decoded again: those from `begin` on, of which those before `known` are complete.
        # A token's text may depend on the one before it (a space between words), not on earlier ones.
        self.tokens, self.begin, self.known = list(prompt), 0, len(prompt)
        self.emitted = len(tokenizer.decode(self.tokens)) if prompt else 0  # characters of the tokens from `begin` on
        self.pending = ""  # may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that this token completes."""
        return self.add_all((token,))

    def add_all(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete, decoded at once."""
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens[self.begin :])
        incomplete = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_BYTES - 1)
        new = text[self.emitted : len(text) - incomplete]
        self.emitted += len(new)
        if new and not incomplete:
            length = len(self.tokenizer.decode(self.tokens[self.known :]))
            if length:  # tokens without text cannot be the context of the next one
                self.begin, self.known, self.emitted = self.known, len(self.tokens), length
        return self._emit(new)

    def end(self) -> str:
        """The rest of the text after the last token."""
        rest = self.tokenizer.decode(self.tokens[self.begin :])[self.emitted :]
        found = self._emit(rest) + ("" if self.stopped else self.pending)
        self.pending = ""
        return found

    def _emit(self, new: str) -> str:
        """Emit as much text as cannot be the beginning of a stop string."""
        if self.stopped:
            return ""
        text = self.pending + new
        found = [position for position in (text.find(stop) for stop in self.stop) if position >= 0]
        if found:
            self.stopped, self.pending = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self.stop), default=0)
        self.pending = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the first ones of `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


def detokenize(
    tokenizer: Tokenizer, tokens: Iterable[int], prompt: Sequence[int] = (), stop: Sequence[str] = ()
) -> str:
    """The whole text at once, up to the first `stop` string."""
    begin = len(tokenizer.decode(prompt)) if prompt else 0
    text = tokenizer.decode([*prompt, *tokens])[begin:]
    return text[: min([len(text), *[text.index(one) for one in stop if one in text]])]


class StopStrings:
    """A stop condition: the text contains one of these strings. Reads the last tokens only, each at least one byte."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self.tokenizer, self.strings = tokenizer, strings
        # a few more, for the first one may lose its space, or begin in the middle of a character
        self.reach = max(len(string.encode()) for string in strings) + MAX_BYTES

    def __call__(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(tokens)
        return any(string in text for string in self.strings)
