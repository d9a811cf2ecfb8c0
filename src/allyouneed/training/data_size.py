"""What the size of the training data decides: rows of a batch, and whether too little of it is left."""

from __future__ import annotations

from collections.abc import Callable

from allyouneed.data.batches.packing import Batches
from allyouneed.data.files.readers import Report
from allyouneed.errors import UserError
from allyouneed.tasks.task import Task
from allyouneed.training.recipe.recipe import Recipe

ROWS = Task.usual_rows  # of a batch of texts
UPDATES = 50  # of an epoch: smaller data gets smaller batches
MOST_DROPPED = 0.8  # of the examples, for their length


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
