"""Split texts into chunks to translate, keeping what is between them, and join the translations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.infer.translation.sentences import fit, join

NEWLINE = re.compile(r"(\r\n|\n|\r)")


@dataclass(frozen=True)
class Chunk:
    """A part of a text that is translated at once. `start`: its offset in the text; `before`: the characters between it
    and the previous chunk (whitespace, line breaks); `cut`: the boundary before it: `line`, or as in
    `sentences.fit`."""

    text: str
    start: int
    before: str
    cut: str


@dataclass(frozen=True)
class SplitText:
    """A text as chunks; `after`: the characters after the last chunk."""

    source: str
    chunks: list[Chunk]
    after: str
    notes: list[str]

    def join(self, texts: Sequence[str]) -> tuple[str, list[int]]:
        """The text with these in place of the chunks, and the offset of each."""
        whole, starts = "", []
        for number, (chunk, text) in enumerate(zip(self.chunks, texts, strict=True)):
            between = chunk.before
            if chunk.cut != "line":
                last = chunk.start - len(between) - 1  # character of the previous chunk
                around = self.source[last] + self.source[chunk.start]
                between = join(texts[number - 1], between, text, chunk.cut, around)
            whole += between
            starts.append(len(whole))
            whole += text
        return whole + self.after, starts


@dataclass(frozen=True)
class Splitter:
    """Splits texts. A line of at most `whole` tokens, or of one sentence of at most `most` tokens, is one chunk; else
    each sentence is a chunk. A sentence of more than `most` tokens is split further, with a note. `marks`: special
    tokens (language, end) added to every chunk."""

    tokenizer: Tokenizer
    most: int
    whole: int
    marks: int

    def split(self, texts: Sequence[str]) -> list[SplitText]:
        rows = []  # per text: line, break, line, break, …, line
        for text in texts:
            if not isinstance(text, str):
                raise UserError(f"expected a string, got {type(text).__name__}")
            rows.append(NEWLINE.split(text))
        lengths = iter(map(len, self.tokenizer.encode_batch([line.strip() for row in rows for line in row[::2]])))
        found = []
        for text, row in zip(texts, rows, strict=True):
            chunks: list[Chunk] = []
            notes: list[str] = []
            between, at = "", 0
            for number, line in enumerate(row):
                core = line.strip()
                tokens = 0 if number % 2 else next(lengths)
                if core:
                    lead = line[: line.index(core)]
                    chunks += self._split_line(core, at + len(lead), between + lead, tokens + self.marks, notes)
                    between = line[len(lead) + len(core) :]
                else:
                    between += line
                at += len(line)
            found.append(SplitText(text, chunks, between, notes))
        return found

    def _split_line(self, core: str, at: int, before: str, tokens: int, notes: list[str]) -> list[Chunk]:
        if tokens <= self.whole:
            return [Chunk(core, at, before, "line")]
        chunks: list[Chunk] = []
        parts = fit(core, max(1, self.most - self.marks), self.tokenizer.spans)
        cut = "line"
        for part in parts:
            text = part.text.strip()
            if text:
                lead = part.text[: part.text.index(text)]
                chunks.append(Chunk(text, at + len(lead), before + lead, cut))
                before, cut = part.text[len(lead) + len(text) :], part.cut
            else:
                before += part.text
            at += len(part.text)
        splits = sum(part.cut in ("clause", "word") for part in parts)
        if splits:
            notes.append(
                f"{quote(core)}: a sentence exceeds the training length of {self.most} tokens; "
                f"it was split in {splits} place{'s' if splits > 1 else ''} and translated in parts"
            )
        return chunks


def quote(text: str, length: int = 40) -> str:
    """The beginning of a text, for a note about it."""
    return repr(text if len(text) <= length else text[: length - 1] + "…")
