"""What a predictor gives its model for one input, and how the output reads: tokens, classes, tags, a vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.data.tokenizers.byte_level import show_bytes
from allyouneed.data.tokenizers.graphemes import group_pieces
from allyouneed.nn.batch import Batch, Rows


class Token(NamedTuple):
    """`group`: tokens of one group belong to one visible character and must not be separated."""

    id: int
    text: str
    group: int


class Prediction(NamedTuple):
    """An output that the model chose. `position`: of the row of logits; None: one output for the whole input."""

    position: int | None
    id: int


@dataclass(frozen=True)
class MediaInput:
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
    answers: list[Prediction] = field(default_factory=list)
    output: str = "tokens"
    given: int = 1
    name: Callable[[int], str] = str
    media: dict[str, MediaInput] = field(default_factory=dict)
    python: str = ""
    replies: Callable[[Tensor], list[Prediction]] | None = None  # logits -> answers, where they follow from the logits
    never: tuple[int, ...] = ()  # tokens that decoding does not choose
    ends: tuple[int, ...] = ()  # tokens that end an answer
    moved: dict[int, int] | None = None  # positions of the target before and after tokens were left out


def next_tokens(inputs: Sequence[int], last: int | None, given: int) -> list[Prediction]:
    """The answers of a decoder that read `inputs`, whose first `given` were not chosen; `last` follows them."""
    following = [*inputs[1:], *([] if last is None else [last])]
    return [Prediction(position, number) for position, number in enumerate(following) if position >= given - 1]


def tokens_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Token]:
    """Tokens with their texts; bytes that are no whole character are shown as <E6>."""
    pieces = [tokenizer.token_bytes(number) for number in ids]
    # a special token is a character of its own, whatever its name
    groups = group_pieces(
        [b"\0" if number in tokenizer.added else piece for number, piece in zip(ids, pieces, strict=True)]
    )
    return [
        Token(int(number), show_bytes(piece), group) for number, piece, group in zip(ids, pieces, groups, strict=True)
    ]


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

    def replies(logits: Tensor) -> list[Prediction]:
        best = logits[0].argmax(-1)
        return (
            [Prediction(None, int(best))]
            if best.dim() == 0
            else [Prediction(n, i) for n, i in enumerate(best.tolist())]
        )

    return replace(reading, output=output, name=lambda number: labels[number], replies=replies)


def patch_media(embed: Any, pixels: Tensor) -> tuple[list[Token], MediaInput]:
    """Tokens of an image (channels, height, width), and where they lie in it."""
    rows, columns = embed.grid
    names = [name for name in ("class_token", "distillation_token") if getattr(embed, name)]
    tokens = [Token(-1, f"<{name.removesuffix('_token')}>", n) for n, name in enumerate(names)]
    tokens += [Token(-1, f"patch {n // columns},{n % columns}", len(names) + n) for n in range(rows * columns)]
    return tokens, MediaInput("image", pixels, len(names), rows, columns)


def frame_media(frames: Tensor, count: int) -> tuple[list[Token], MediaInput]:
    """Tokens of a sound, log-mel frames (mels, time), each of `step` frames."""
    step = -(-frames.shape[-1] // count)
    return plain_tokens(count, "frame"), MediaInput("sound", frames, step=step)
