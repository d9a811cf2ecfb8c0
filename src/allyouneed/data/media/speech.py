"""Whisper's task, language and timestamp tokens (Radford et al. 2022, 2.3)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from allyouneed.config import Config, model_validator
from allyouneed.data.tokenizers.base import Tokenizer

Id = Annotated[int, Field(ge=0)]
TICK = 0.02  # seconds between two timestamp tokens: two frames
NO_TIMESTAMPS = "<|notimestamps|>"
BEYOND = 1 << 30  # more than any id
MARK = re.compile(r"<\|(\d{1,4}\.\d\d)\|>")  # a time in a transcript
TASKS = ("transcribe", "translate")
Task = Literal["transcribe", "translate"]

# in token order, which is by amount of training data; the last was added later
_CODES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml "
    "cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am "
    "yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
)
LANGUAGES = tuple(_CODES.split())


class Speech(Config):
    """Ids of a Whisper vocabulary. Text tokens are below `end`, or from `first_text` on; timestamp tokens start at
    `first_time`, 20 ms apart.

    A multilingual model gets language and task tokens after `start`; an English-only model does not.
    """

    start: Id
    """Begins a transcript."""
    end: Id
    """Ends it."""
    no_timestamps: Id | None
    """Asks for a text without timestamps; null: a model without them."""
    first_text: Id | None = None
    """The first token of text, where control tokens come before the text."""
    previous: Id | None = None
    """Precedes the text of the previous window."""
    no_speech: Id | None = None
    """Says that nobody speaks."""
    languages: dict[str, Id] = Field(default_factory=dict)
    """The token of each language."""
    tasks: dict[Task, Id] = Field(default_factory=dict)
    """The tokens that ask for a transcript or a translation."""
    suppress: tuple[Id, ...] = ()
    """Never generated: annotations, brackets, musical notes."""
    begin_suppress: tuple[Id, ...] = ()
    """Never generated first: a space, the end."""
    first_within: Annotated[float, Field(ge=0)] = 1.0
    """The latest first timestamp, in seconds."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Window of the encoder."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if bool(self.languages) != bool(self.tasks):
            raise ValueError("languages and tasks: a multilingual model has tokens for both")
        return self

    @property
    def ids(self) -> set[int]:
        """All ids of control tokens."""
        single = (self.start, self.end, self.no_timestamps, self.previous, self.no_speech)
        lists = (self.languages.values(), self.tasks.values(), self.suppress, self.begin_suppress)
        return {number for number in single if number is not None} | {number for ids in lists for number in ids}

    @property
    def first_time(self) -> int:
        return BEYOND if self.no_timestamps is None else self.no_timestamps + 1

    def is_text(self, ids: Any) -> Any:
        """Whether an id, or each id of a tensor, is one of text."""
        if self.first_text is None:
            return ids < self.end
        return (ids >= self.first_text) & (ids < (BEYOND if self.no_timestamps is None else self.no_timestamps))

    def prompt(self, language: str | None, task: Task, timed: bool) -> list[int]:
        """The tokens before a text."""
        found = [self.start]
        if self.languages:
            assert language is not None
            found += [self.languages[language], self.tasks[task]]
        return found if timed or self.no_timestamps is None else [*found, self.no_timestamps]

    @classmethod
    def of(cls, tokenizer: Tokenizer, seconds: float) -> Speech:
        """The control tokens of a tokenizer that was trained here: begin, end, and times behind the text if there are
        any (`timed_tokens`)."""
        none = next((number for number, name in tokenizer.added.items() if name == NO_TIMESTAMPS), None)
        before = [number for number in tokenizer.specials if none is None or number < none]
        never = tuple(number for number in before if number != tokenizer.eos)
        return cls(
            start=tokenizer.bos,
            end=tokenizer.eos,
            no_timestamps=none,
            first_text=max(before) + 1,
            suppress=never,
            begin_suppress=(tokenizer.eos,),
            first_within=seconds,
            seconds=seconds,
        )


def timed_tokens(seconds: float) -> list[str]:
    """What a vocabulary needs for timestamps."""
    return [NO_TIMESTAMPS, *(f"<|{number * TICK:.2f}|>" for number in range(round(seconds / TICK) + 1))]


def split_marks(text: str) -> tuple[str, list[float | str]]:
    """A transcript without its times, and the times and texts one by one."""
    parts: list[float | str] = [
        float(part) if number % 2 else part for number, part in enumerate(MARK.split(text)) if part.strip()
    ]
    return " ".join(part.strip() for part in parts if isinstance(part, str)), parts
