"""Sections of a recipe: files, batches, validation, checkpoints. Defaults are the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from allyouneed.config import Config, model_validator
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.readers import Files


def as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str | Path | dict | Files) else value


Entries = Annotated[tuple[Files, ...], BeforeValidator(as_tuple)]
SPLITS = ("train", "valid", "test")


class DataConfig(Config):
    """Files of examples, and which examples to leave out."""

    train: Annotated[Entries, Field(min_length=1)]
    """Training files: a path, a list of paths, or keys of the task's kind of files."""
    valid: Entries = ()
    """Validation files, scored during training; default: none."""
    test: Entries = ()
    """Test files, scored once after training; default: none."""
    filters: Filters = Filters()
    """Rules that training examples must pass."""
    max_tokens: Annotated[int, Field(ge=4)] | None = None
    """Longest example in tokens, special tokens included: longer ones are dropped and reported, documents are split;
    default: 128, or a row of the batch where documents are split."""
    sha256: dict[str, str] = Field(default_factory=dict)  # expected checksums; recorded in a run's recipe.yaml
    """Expected checksums of the files; recorded in a run's recipe.yaml."""


class RetrievalConfig(Config):
    """The index a retrieval model gets its neighbours from: a folder built by `allyouneed index`."""

    index: Path
    """Folder built by `allyouneed index`."""
    encoder: Path | None = None
    """The index's encoder, if it has moved since the index was built."""

    @model_validator(mode="before")
    @classmethod
    def _parse_path(cls, tree: Any) -> Any:
        return {"index": tree} if isinstance(tree, str | Path) else tree


class BatchConfig(Config):
    """A batch is `rows` packed rows of `row` target tokens (and `source_row` source tokens, by default as many)."""

    rows: PositiveInt | None = None
    """Packed rows of a batch; default: 8, or as few as give small data 50 updates an epoch."""
    row: Annotated[int, Field(ge=4)] = 512
    """Target tokens of a row."""
    source_row: PositiveInt | None = None
    """Source tokens of a row; default: as many as `row`."""

    @property
    def source(self) -> int:
        return self.source_row or self.row


class ValidationConfig(Config):
    """When and how the model is scored during training."""

    every: PositiveInt | None = None
    """Steps between validations; default: 500, or an epoch where the data decides how long to train."""
    patience: PositiveInt | None = None
    """Stop after this many validations without improvement; default: never, or 10 where the data decides how long to
    train."""
    metric: str | None = None
    """The metric that decides which checkpoint is best; default: the task's first."""
    sentences: NonNegativeInt = 3
    """Samples printed with their references."""
    beam: PositiveInt = 1
    """Beam width of validation; 1 is greedy."""
    limit: PositiveInt | None = None
    """Predict at most this many examples; the loss is over all."""


class SaveConfig(Config):
    """When checkpoints are saved, and how many are kept."""

    every: PositiveInt | None = 500
    """Steps between checkpoints."""
    minutes: PositiveFloat | None = 10
    """Minutes between checkpoints to resume from; these are averaged at the end only if `every` is null."""
    keep: PositiveInt = 5
    """Checkpoints to keep; the best is kept in addition."""

    @model_validator(mode="after")
    def _check_interval(self) -> Self:
        if self.every is None and self.minutes is None:
            raise ValueError("set 'every' (steps) or 'minutes'")
        return self
