"""What the size of the training data decides: rows of a batch, and whether too little of it is left."""

from __future__ import annotations

from collections.abc import Callable

from allyouneed.data.batches.packing import Batches
from allyouneed.data.files.readers import Report
from allyouneed.errors import UserError
from allyouneed.training.recipe.recipe import Recipe

ROWS = 8  # of a batch of usual data: 4,096 target tokens with rows of 512
UPDATES = 50  # of an epoch: smaller data gets smaller batches
MOST_DROPPED = 0.8  # of the examples, for their length


def choose_rows(
    recipe: Recipe, batches: Callable[[int], Batches], report: Callable[[str], None], least: int = 1
) -> int:
    """Rows of a batch: those of the recipe, or 8, fewer where the data would give few updates an epoch. `batches`: the
    training batches with that number of rows. `least`: a row for each process."""
    if recipe.batch.rows is not None:
        return recipe.batch.rows
    usual = batches(ROWS)
    wanted = UPDATES * recipe.accumulate  # batches
    tokens = int(usual.items.lengths(0)[-1].sum())
    if recipe.task.compares_batch or tokens >= wanted * ROWS * recipe.capacities[-1]:
        return max(ROWS, least)
    count = usual.steps_per_epoch(0)
    rows = max(1, least, min(ROWS, ROWS * count // wanted))
    if rows < ROWS:
        report(
            f"batch.rows: {rows}, for {batches(rows).steps_per_epoch(0):,} batches an epoch; with {ROWS} rows the data "
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
