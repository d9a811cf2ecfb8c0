"""A text as pieces to translate and all that stands between them, so that the translation can be put together again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.infer.translation.sentences import fit, join

NEWLINE = re.compile(r"(\r\n|\n|\r)")


@dataclass(frozen=True)
class Piece:
    """What is translated in one go: `start` is its place in the text, `before` all that stands between it and the piece
    before it (whitespace, line breaks), `cut` how the two were parted: `line`, or as `sentences.fit` did it."""

    text: str
    start: int
    before: str
    cut: str


@dataclass(frozen=True)
class Plan:
    """A text taken apart; `after` stands behind the last piece."""

    source: str
    pieces: list[Piece]
    after: str
    notes: list[str]

    def joined(self, texts: Sequence[str]) -> tuple[str, list[int]]:
        """The text with these in place of the pieces, and where in it each of them begins."""
        whole, starts = "", []
        for number, (piece, text) in enumerate(zip(self.pieces, texts, strict=True)):
            between = piece.before
            if piece.cut != "line":
                last = piece.start - len(between) - 1  # of the piece before
                around = self.source[last] + self.source[piece.start]
                between = join(texts[number - 1], between, text, piece.cut, around)
            whole += between
            starts.append(len(whole))
            whole += text
        return whole + self.after, starts


@dataclass(frozen=True)
class Cutter:
    """Takes texts apart: a line stays whole while it has at most `together` tokens, or is one sentence of at most
    `most`; else each sentence is a piece, and a sentence of more than `most` is several, and a note says so.
    `marks` more tokens (language, end) go with every piece."""

    tokenizer: Tokenizer
    most: int
    together: int
    marks: int

    def plans(self, texts: Sequence[str]) -> list[Plan]:
        rows = []  # of each text: line, break, line, break, …, line
        for text in texts:
            if not isinstance(text, str):
                raise UserError(f"a text to translate must be a string, not {type(text).__name__}")
            rows.append(NEWLINE.split(text))
        lengths = iter(map(len, self.tokenizer.encode_batch([line.strip() for row in rows for line in row[::2]])))
        plans = []
        for text, row in zip(texts, rows, strict=True):
            pieces: list[Piece] = []
            notes: list[str] = []
            between, at = "", 0
            for number, line in enumerate(row):
                core = line.strip()
                tokens = 0 if number % 2 else next(lengths)
                if core:
                    lead = line[: line.index(core)]
                    pieces += self._cut(core, at + len(lead), between + lead, tokens + self.marks, notes)
                    between = line[len(lead) + len(core) :]
                else:
                    between += line
                at += len(line)
            plans.append(Plan(text, pieces, between, notes))
        return plans

    def _cut(self, core: str, at: int, before: str, tokens: int, notes: list[str]) -> list[Piece]:
        if tokens <= self.together:
            return [Piece(core, at, before, "line")]
        pieces: list[Piece] = []
        parts = fit(core, max(1, self.most - self.marks), self.tokenizer.spans)
        cut = "line"
        for part in parts:
            text = part.text.strip()
            if text:
                lead = part.text[: part.text.index(text)]
                pieces.append(Piece(text, at + len(lead), before + lead, cut))
                before, cut = part.text[len(lead) + len(text) :], part.cut
            else:
                before += part.text
            at += len(part.text)
        torn = sum(part.cut in ("clause", "word") for part in parts)
        if torn:
            notes.append(
                f"{quoted(core)}: a sentence has more than the {self.most} tokens the model was trained for; "
                f"it was cut in {torn} place{'s' if torn > 1 else ''} and translated in parts"
            )
        return pieces


def quoted(text: str, most: int = 40) -> str:
    """The beginning of a text, for a note about it."""
    return repr(text if len(text) <= most else text[: most - 1] + "…")
