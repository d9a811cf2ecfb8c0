"""What a predictor gives its model for one input, and how the output reads: tokens, classes, tags, a vector."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.data.tokenizers.byte_level import show_bytes
from allyouneed.nn.batch import Batch, Rows

JOINERS = ("\u200d", "\ufe0e", "\ufe0f", "\u20e3")  # zero-width joiner, variation selectors, keycap


class Token(NamedTuple):
    """`group`: tokens of one group belong to one character as a reader sees it and must not be torn apart."""

    id: int
    text: str
    group: int


class Answer(NamedTuple):
    """An output that the model chose. `position`: of the row of logits; None: one output for the whole input."""

    position: int | None
    id: int


@dataclass(frozen=True)
class Media:
    """The image or sound behind the tokens of a stack. Image: `values` (channels, height, width) as the model reads
    them; tokens from `first` on are patches of a grid of `rows` × `columns`. Sound: log-mel frames (mels, time); each
    token covers `step` frames."""

    kind: str
    values: Tensor
    first: int = 0
    rows: int = 1
    columns: int = 1
    step: int = 1


@dataclass(frozen=True)
class Reading:
    """`tokens` and `media`: by the name of the stack that reads them. `answers`: what the model chose, or the given
    target. `name`: the text of an output's id. `given`: how many tokens of the target came before the first answer.
    `output`: tokens, mask, classes, tags, vector or similarity."""

    batch: Batch
    tokens: dict[str, list[Token]]
    answers: list[Answer] = field(default_factory=list)
    output: str = "tokens"
    given: int = 1
    name: Callable[[int], str] = str
    media: dict[str, Media] = field(default_factory=dict)
    python: str = ""
    replies: Callable[[Tensor], list[Answer]] | None = None  # logits -> answers, where they follow from the logits


def next_tokens(inputs: Sequence[int], last: int | None, given: int) -> list[Answer]:
    """The answers of a decoder that read `inputs`, of which the first `given` were not chosen; `last` follows them."""
    following = [*inputs[1:], *([] if last is None else [last])]
    return [Answer(position, number) for position, number in enumerate(following) if position >= given - 1]


def tokens_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Token]:
    """Tokens with their texts. Tokens that share a character, or a grapheme of several characters (an emoji with its
    modifiers, a letter with combining marks), share a group."""
    raw = [tokenizer.token_bytes(number) for number in ids]
    special = [number in tokenizer.added for number in ids]
    groups: list[int] = []
    text, open_bytes = "", b""  # of the current group
    for piece, alone in zip(raw, special, strict=True):
        if alone:
            groups.append(groups[-1] + 1 if groups else 0)
            text, open_bytes = "", b""
            continue
        inside = bool(open_bytes) or (bool(text) and _continues(text, piece))
        groups.append(0 if not groups else groups[-1] + (0 if inside else 1))
        text, open_bytes = _advance(text if inside else "", open_bytes if inside else b"", piece)
    shown = [
        tokenizer.added[number] if alone else _readable(tokenizer, number, piece)
        for number, piece, alone in zip(ids, raw, special, strict=True)
    ]
    return [Token(int(number), one, group) for number, one, group in zip(ids, shown, groups, strict=True)]


def _readable(tokenizer: Tokenizer, number: int, raw: bytes) -> str:
    """Text with its leading space; bytes of a torn character as <E6>."""
    text = show_bytes(raw)
    return text if text or not raw else tokenizer.tokens([number])[0]


def _advance(text: str, waiting: bytes, piece: bytes) -> tuple[str, bytes]:
    """The text of a group so far, and the bytes of its incomplete last character."""
    whole = waiting + piece
    for cut in range(len(whole), max(len(whole) - 4, -1), -1):
        try:
            return text + whole[:cut].decode(), whole[cut:]
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return text + whole.decode(errors="replace"), b""
    return text, whole


def _continues(text: str, piece: bytes) -> bool:
    """Whether a piece continues the last grapheme of a text."""
    first = piece.decode(errors="ignore")[:1]
    if not first:  # the beginning of a character, in bytes: an emoji may follow a joiner
        return text.endswith("\u200d")
    regional = sum("\U0001f1e6" <= char <= "\U0001f1ff" for char in text[-2:])
    return (
        unicodedata.category(first) in ("Mn", "Me", "Mc")
        or first in JOINERS
        or text.endswith("\u200d")
        or "\U0001f3fb" <= first <= "\U0001f3ff"  # skin tones
        or ("\U0001f1e6" <= first <= "\U0001f1ff" and regional == 1)  # the second half of a flag
    )


def plain_tokens(count: int, word: str) -> list[Token]:
    """Tokens of something that is no text: patches, frames."""
    return [Token(-1, f"{word} {number}", number) for number in range(count)]


def output_name(tokenizer: Tokenizer) -> Callable[[int], str]:
    """The text of a token of the vocabulary; beyond it, its number."""
    return lambda number: tokens_of(tokenizer, [number])[0].text if number < tokenizer.size else f"<{number}>"


def read_text(tokenizer: Tokenizer, rows: Rows, stack: str = "encoder", **more: Any) -> Reading:
    """One text for a model of one stack."""
    return Reading(Batch(rows), {stack: tokens_of(tokenizer, rows.tokens[0].tolist())}, **more)


def read_labels(reading: Reading, labels: Sequence[str], output: str) -> Reading:
    """The outputs are classes or tags: the likeliest is the answer."""

    def replies(logits: Tensor) -> list[Answer]:
        best = logits[0].argmax(-1)
        return [Answer(None, int(best))] if best.dim() == 0 else [Answer(n, i) for n, i in enumerate(best.tolist())]

    return replace(reading, output=output, name=lambda number: labels[number], replies=replies)


def patch_media(embed: Any, pixels: Tensor) -> tuple[list[Token], Media]:
    """Tokens of an image (channels, height, width), and where they lie in it."""
    rows, columns = embed.grid
    names = [name for name in ("class_token", "distillation_token") if getattr(embed, name)]
    tokens = [Token(-1, f"<{name.removesuffix('_token')}>", n) for n, name in enumerate(names)]
    tokens += [Token(-1, f"patch {n // columns},{n % columns}", len(names) + n) for n in range(rows * columns)]
    return tokens, Media("image", pixels, len(names), rows, columns)


def frame_media(frames: Tensor, count: int) -> tuple[list[Token], Media]:
    """Tokens of a sound, log-mel frames (mels, time), each of `step` frames."""
    step = -(-frames.shape[-1] // count)
    return plain_tokens(count, "frame"), Media("sound", frames, step=step)
