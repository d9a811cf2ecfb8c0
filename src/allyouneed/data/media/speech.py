"""The tokens that tell Whisper what to do, and with which it tells when it was said (Radford et al. 2022, 2.3)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from allyouneed.config import Config, model_validator

Id = Annotated[int, Field(ge=0)]
TICK = 0.02  # seconds between two time tokens: two frames
TASKS = ("transcribe", "translate")
Task = Literal["transcribe", "translate"]

# in the order of their tokens: by how much of each Whisper heard when it was made; the last came later
_CODES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml "
    "cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am "
    "yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
)
LANGUAGES = tuple(_CODES.split())


class Speech(Config):
    """Ids of a Whisper vocabulary. Text is all below `end`; time tokens are all from `first_time` on, 20 ms apart.

    A model that knows several languages is told language and task after `start`; one that knows English only is not.
    """

    start: Id
    end: Id
    no_timestamps: Id
    previous: Id | None = None  # what stands before the text of the sound before
    no_speech: Id | None = None
    languages: dict[str, Id] = Field(default_factory=dict)
    tasks: dict[Task, Id] = Field(default_factory=dict)
    suppress: tuple[Id, ...] = ()  # never said: marks of those who subtitle, brackets, notes of music
    begin_suppress: tuple[Id, ...] = ()  # not said first: a space, the end
    first_within: Annotated[float, Field(ge=0)] = 1.0  # the first time token is not later than so many seconds
    seconds: Annotated[float, Field(gt=0)] = 30.0  # what the encoder hears at once

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if bool(self.languages) != bool(self.tasks):
            raise ValueError("languages and tasks: a model that knows several languages has tokens for both")
        return self

    @property
    def first_time(self) -> int:
        return self.no_timestamps + 1
