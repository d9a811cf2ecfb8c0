"""Whisper's task, language and timestamp tokens (Radford et al. 2022, 2.3)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from allyouneed.config import Config, model_validator

Id = Annotated[int, Field(ge=0)]
TICK = 0.02  # seconds between two timestamp tokens: two frames
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
    """Ids of a Whisper vocabulary. Text tokens are below `end`; timestamp tokens start at `first_time`, 20 ms apart.

    A multilingual model gets language and task tokens after `start`; an English-only model does not.
    """

    start: Id
    end: Id
    no_timestamps: Id
    previous: Id | None = None  # precedes the text of the previous window
    no_speech: Id | None = None
    languages: dict[str, Id] = Field(default_factory=dict)
    tasks: dict[Task, Id] = Field(default_factory=dict)
    suppress: tuple[Id, ...] = ()  # never generated: annotations, brackets, musical notes
    begin_suppress: tuple[Id, ...] = ()  # never generated first: a space, the end
    first_within: Annotated[float, Field(ge=0)] = 1.0  # latest first timestamp, in seconds
    seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0  # window of the encoder

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
        return self.no_timestamps + 1
