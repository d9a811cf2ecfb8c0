"""`train(recipe)`: begin a run, or go on with it, and bring it to its end."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console

from allyouneed.config import tree_of
from allyouneed.data.batches.store import InputHashes
from allyouneed.errors import UserError
from allyouneed.train.cuda.machine import choose
from allyouneed.train.distributed.process_group import Team, assembled, lost
from allyouneed.train.finish import finish
from allyouneed.train.loop import Trainer
from allyouneed.train.prepare import Run, prepare, resolve
from allyouneed.train.progress import Reporter
from allyouneed.train.recipe import Recipe
from allyouneed.train.signals import Interrupted, not_lost
from allyouneed.train.trial import try_worst_batch


@dataclass(frozen=True)
class Result:
    """How a run ended. `scores` by set: `valid`, and `test` when the recipe names one."""

    model: Path  # a model folder
    steps: int
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    already: bool = False  # it had ended before; nothing was done


def train(
    recipe: Recipe, resume: bool | Literal["auto"] = "auto", fresh: bool = False, console: Console | None = None
) -> Result:
    """Train a model as the recipe says; the result is in `recipe.output / "model"`.

    An unfinished run of the same recipe is gone on with (`resume=False`: refused; `True`: required), a finished one
    left alone. `fresh` begins anew whatever is there. Raises `Interrupted` (exit code 130) after Ctrl-C or SIGTERM,
    when it has saved.
    """
    run = Run(recipe.output)
    with assembled(recipe) as team:
        quiet = None if team.first else Console(quiet=True)
        reporter = Reporter(quiet or console, recipe.task.loss_unit, recipe.task.has_perplexity)
        with run.locked() if team.first else nullcontext():
            try:
                return _train(recipe, run, resume, fresh, reporter, team)
            except RuntimeError as error:
                if team.alone or not lost(error):
                    raise
                raise UserError(
                    f"process {team.rank} of {team.world}: another process of the run has ended, and so does this one; "
                    f"its last checkpoint is in {run.checkpoints}, the same command goes on from there "
                    f"({str(error).splitlines()[0]})"
                ) from None


def _train(
    recipe: Recipe, run: Run, resume: bool | Literal["auto"], fresh: bool, reporter: Reporter, team: Team
) -> Result:
    begun, done, tree = team.told(_open(recipe, run, resume, fresh) if team.first else (False, None, {}))
    if not run.begun:
        raise UserError(f"{run.folder}: process {team.rank} cannot see it; output must lie where all machines see it")
    if done is not None and _reached(recipe, done):
        reporter.say(f"{run.folder}: this run is finished ({done['steps']:,} steps); the model is in {run.model}")
        return Result(run.model, done["steps"], done["scores"], already=True)
    machine = choose(recipe)
    reporter.say(
        machine.why + (f"; {team.world} processes ({recipe.parallel.text(team.readers)})" if not team.alone else "")
    )
    if team.first:
        prepared = prepare(recipe, run, reporter)
    team.told(None)  # what the first has learnt and encoded, the others find
    if not team.first:
        prepared = prepare(recipe, run, reporter)
    trainer = Trainer(recipe, run, prepared, machine, reporter, team)
    if begun and trainer.resumed:
        reporter.say(f"going on with the run in {run.folder} after step {trainer.standing.step:,}")
    reporter.say(f"{tree_of(trainer.config)['kind']}, {trainer.config.cost().parameters:,} parameters")
    batches = trainer.data.steps_per_epoch(0)
    if recipe.accumulate > batches:
        reporter.say(
            f"an epoch has {batches} batches, so an update has no more, though accumulate is {recipe.accumulate}"
        )
    machine.speed_up(trainer.model)
    if not trainer.over:
        if machine.compiled:
            reporter.say("compiling; the first batch takes a while")
        with not_lost():
            try_worst_batch(trainer)
    try:
        trainer.run()
    except Interrupted as stopped:
        reporter.say(f"stopped at step {stopped.step:,} and saved; run the same recipe again to go on")
        raise
    last, scores = trainer.end(), {}
    if team.first:
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None)
        scores = finish(trainer, last, run, text)
    return Result(run.model, trainer.standing.step, team.told(scores))


def _open(
    recipe: Recipe, run: Run, resume: bool | Literal["auto"], fresh: bool
) -> tuple[bool, dict[str, Any] | None, dict[str, Any]]:
    """Take up the run's folder: whether a run was there, how it ended if it did, and the recipe as it is saved."""
    if fresh:
        run.clear()
    _check_wish(run, resume)
    tree = resolve(recipe, InputHashes(run.data / "inputs.json"))
    begun = run.begun
    run.open(tree)
    return begun, run.finished(), tree


def _check_wish(run: Run, resume: bool | Literal["auto"]) -> None:
    if resume is True and not run.begun:
        raise UserError(f"{run.folder}: there is no run to go on with")
    if resume is False and run.begun:
        raise UserError(f"{run.folder}: holds a run already; go on with it, use --restart, or set another output")


def _reached(recipe: Recipe, done: dict[str, object]) -> bool:
    """Whether a finished run went as far as the recipe now asks; more steps than before mean: go on."""
    return done["asked"] == {"steps": recipe.last_step, "epochs": recipe.epochs}


__all__ = ["Result", "train"]
