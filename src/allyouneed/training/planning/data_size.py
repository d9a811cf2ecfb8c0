"""What the size of the training data decides: rows of a batch, whether too little of it is left, how long to train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from allyouneed.data.batches.packing import Batches
from allyouneed.data.files.readers import Report
from allyouneed.errors import UserError
from allyouneed.tasks.task import Task
from allyouneed.training.recipe.recipe import Recipe

ROWS = Task.usual_rows  # of a batch of texts
UPDATES = 50  # of an epoch: smaller data gets smaller batches
MOST_DROPPED = 0.8  # of the examples, for their length
READ, MOST_READ = 10_000_000, (3, 30)  # tokens that a small model reads in all, and the passes over the data
DROPOUT = ((2_000, 0.3), (20_000, 0.2), (1 << 62, 0.1))  # below so many examples
PATIENCE = 6
EVERY = 500  # steps between validations
MOST_EPOCHS, EPOCHS_PATIENCE = 50, 10  # of a run whose recipe does not say how long it is


def choose_rows(
    recipe: Recipe, batches: Callable[[int], Batches], report: Callable[[str], None], least: int = 1
) -> int:
    """Rows of a batch: those of the recipe, or the task's usual number, fewer where the data would give few updates an
    epoch. `batches`: the training batches with that number of rows. `least`: a row for each process."""
    if recipe.batch.rows is not None:
        return recipe.batch.rows
    most = recipe.task.usual_rows
    usual = batches(most)
    wanted = UPDATES * recipe.accumulate  # batches
    tokens = int(usual.items.lengths(0)[-1].sum())
    if recipe.task.compares_batch or tokens >= wanted * most * recipe.capacities[-1]:
        return max(most, least)
    count = usual.steps_per_epoch(0)
    rows = max(recipe.task.least_rows, least, min(most, most * count // wanted))
    if rows < most:
        report(
            f"batch.rows: {rows}, for {batches(rows).steps_per_epoch(0):,} batches an epoch; with {most} rows the data "
            f"has {count:,}"
        )
    return rows


def check_left_out(recipe: Recipe, report: Report) -> str | None:
    """Refuse to train on what little the usual length leaves; a warning if the length was set."""
    drops = report.drops.get("too many tokens")
    if drops is None or drops.count < MOST_DROPPED * report.read:
        return None
    text = (
        f"data.max_tokens: {recipe.max_tokens} leaves out {drops.count:,} of {report.read:,} examples, which are "
        f"longer; raise it (a row holds {min(recipe.capacities)} tokens: batch.row), or split the texts"
    )
    if recipe.data.max_tokens is None:
        raise UserError(text)
    return f"warning: {text}"


@dataclass(frozen=True)
class Duration:
    """The last step (None: the recipe counts epochs), the steps between validations, and how many of them without
    improvement end the run (None: any number)."""

    steps: int | None
    every: int = EVERY
    patience: int | None = None


def choose_duration(recipe: Recipe, epoch: int, report: Callable[[str], None]) -> Duration:
    """The recipe's, or its default: the paper's number of steps, but no more passes over the data than help. `epoch`:
    its updates."""
    given, most = recipe.validation, MOST_EPOCHS * epoch
    by_recipe = recipe.steps is not None or recipe.epochs is not None
    if by_recipe or most >= recipe.task.default_steps:
        return Duration(recipe.last_step, given.every or EVERY, given.patience)
    chosen = Duration(most, given.every or max(1, min(EVERY, epoch)), given.patience or EPOCHS_PATIENCE)
    sooner = f", fewer when {chosen.patience} validations bring no improvement" if recipe.data.valid else ""
    report(f"steps: {most:,}, {MOST_EPOCHS} passes over the data{sooner}; set steps or epochs to change it")
    return chosen


@dataclass(frozen=True)
class Plan:
    """What suits so much data: passes over it, dropout, the steps between validations, validations without
    improvement."""

    epochs: int
    dropout: float
    every: int
    patience: int

    def text(self, examples: int) -> str:
        return (
            f"for {examples:,} examples: {self.epochs} epochs at most, dropout {self.dropout:g}, validation every "
            f"{self.every:,} steps, the end after {self.patience} without improvement"
        )


def plan(examples: int, tokens: int, row: int) -> Plan:
    """Settings for a new model on so many examples of so many tokens together. The less data, the more often it is
    read, and the more dropout is needed (Srivastava et al. 2014)."""
    rows = max(1, tokens // row)
    steps = max(1, rows // max(1, min(ROWS, rows // UPDATES)))  # an epoch, as `choose_rows` has it
    epochs = max(MOST_READ[0], min(MOST_READ[1], READ // max(1, tokens)))
    dropout = next((rate for most, rate in DROPOUT if examples < most), DROPOUT[-1][1])
    return Plan(epochs, dropout, max(10, min(500, steps)), PATIENCE)
