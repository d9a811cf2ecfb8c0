"""`train(recipe)`: start or resume a run and finish it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console

from allyouneed.config import tree_of
from allyouneed.data.batches.store import InputHashes
from allyouneed.errors import UserError
from allyouneed.errors.extras import require
from allyouneed.files import missing_folder
from allyouneed.tasks.feedback.ppo import PPOTask
from allyouneed.training.backend import Backend, choose_backend
from allyouneed.training.distributed.process_group import (
    ProcessGroup,
    is_peer_lost,
    join_process_group,
    lost_peer_report,
)
from allyouneed.training.finish import finish
from allyouneed.training.loop import Trainer
from allyouneed.training.planning.dry_run import dry_run
from allyouneed.training.planning.memory import check_memory
from allyouneed.training.ppo.run import PPORun
from allyouneed.training.prepare import PreparedData, RunFolder, prepare, resolve
from allyouneed.training.recipe.fit import pool_note
from allyouneed.training.recipe.recipe import Recipe
from allyouneed.training.reporting.progress import Reporter
from allyouneed.training.signals import Interrupted, reraise_lost_interrupt


@dataclass(frozen=True)
class Result:
    """`scores` by set: `valid`, and `test` if the recipe has one; without a set whose scoring failed."""

    model: Path  # a model folder
    steps: int
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    already: bool = False  # it was finished before; nothing was done


def train(
    recipe: Recipe, resume: bool | Literal["auto"] = "auto", fresh: bool = False, console: Console | None = None
) -> Result:
    """Train a model by a recipe; the result is in `recipe.output / "model"`.

    An unfinished run of the same recipe is resumed (`resume=False`: an error; `True`: required), a finished one is left
    alone. `fresh` starts over. After Ctrl-C or SIGTERM it saves and raises `Interrupted` (exit code 130).
    """
    if recipe.tensorboard:
        require("tensorboard", "tensorboard: true")
    if recipe.retrieval is not None:
        require("retrieval", "retrieval")
    run = RunFolder(recipe.output)
    with join_process_group(recipe) as processes, ExitStack() as held:
        quiet = None if processes.is_main else Console(quiet=True)
        reporter = Reporter(quiet or console, recipe.task.loss_unit, recipe.task.has_perplexity)
        missing = missing_folder(run.folder)
        try:
            processes.on_main(lambda: held.enter_context(run.lock()), "opening the run folder")
            if missing is not None:
                reporter.print(f"created the folder {missing}")
            return _train(recipe, run, resume, fresh, reporter, processes)
        except Interrupted as stopped:
            reporter.print(f"stopped at step {stopped.step:,} and saved; run the same command again to resume")
            if processes.is_main:
                run.mark_stopped(stopped.step)
            raise
        except RuntimeError as error:
            if processes.is_single or not is_peer_lost(error):
                raise
            raise UserError(
                f"process {processes.rank} of {processes.world_size}: {lost_peer_report(processes, error)}; the "
                f"last checkpoint is in {run.checkpoints}, run the same command again to resume"
            ) from None


def _train(
    recipe: Recipe,
    run: RunFolder,
    resume: bool | Literal["auto"],
    fresh: bool,
    reporter: Reporter,
    processes: ProcessGroup,
) -> Result:
    started, done, tree = processes.on_main(lambda: _open(recipe, run, resume, fresh), "opening the run")
    if not run.has_started:
        raise UserError(
            f"{run.folder}: process {processes.rank} cannot see it; output must be on storage shared by all machines"
        )
    if done is not None and _is_complete(recipe, done):
        reporter.print(f"{run.folder}: this run is finished ({done['steps']:,} steps); the model is in {run.model}")
        scores = {name: row for name, row in done["scores"].items() if row}
        return Result(run.model, done["steps"], scores, already=True)
    backend = choose_backend(recipe)
    if isinstance(recipe.task, PPOTask):
        return _train_ppo(recipe, run, backend, reporter, processes, tree)
    layout = (
        ""
        if processes.is_single
        else f"; {processes.world_size} processes ({recipe.parallel.text(processes.data_ranks)})"
    )
    reporter.print(backend.summary + layout)
    # before hours of preparation, if it is certain: a batch has at least a row for each process
    least = with_rows(recipe, recipe.batch.rows or processes.data_ranks)
    check_memory(least, recipe.model_for(None), backend, processes)
    first: list[PreparedData] = []
    processes.on_main(lambda: first.append(prepare(recipe, run, reporter, processes.data_ranks)), "preparing the data")
    # the others reuse what the main process has prepared
    prepared = first[0] if first else prepare(recipe, run, reporter, processes.data_ranks)
    recipe = with_rows(recipe, prepared.rows)
    tree["batch"] = tree["batch"] | {"rows": prepared.rows}
    check_memory(recipe, recipe.model_for(prepared.vocabularies, prepared.labels), backend, processes)
    trainer = Trainer(recipe, run, prepared, backend, reporter, processes)
    if started and trainer.resumed:
        reporter.print(f"resuming the run in {run.folder} after step {trainer.state.step:,}")
    reporter.print(f"{tree_of(trainer.config)['kind']}, {trainer.config.cost().parameters:,} parameters")
    if (note := pool_note(recipe.model_tree(), trainer.config, recipe.max_tokens)) is not None:
        reporter.print(note)
    batches = trainer.data.steps_per_epoch(0)
    if recipe.accumulate > batches:
        reporter.print(
            f"an epoch has only {batches} batches, so updates have no more, although accumulate is {recipe.accumulate}"
        )
    backend.compile_model(trainer.model)
    if not trainer.is_finished:
        if backend.compiled:
            reporter.print("compiling; the first batch takes a while")
        with reraise_lost_interrupt():
            dry_run(trainer)
    trainer.run()
    last = trainer.end()
    text = _recipe_text(tree)
    scores = processes.on_main(lambda: finish(trainer, last, run, text), "writing and scoring the model")
    return Result(run.model, trainer.state.step, scores)


def with_rows(recipe: Recipe, rows: int) -> Recipe:
    return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"rows": rows})})


def _train_ppo(
    recipe: Recipe, run: RunFolder, backend: Backend, reporter: Reporter, processes: ProcessGroup, tree: dict[str, Any]
) -> Result:
    """PPO draws its own data, so it has a loop of its own."""
    if not processes.is_single:
        raise UserError("ppo runs in one process; start it without torchrun")
    tuning = PPORun(recipe, run, backend, reporter)
    if tuning.resumed:
        reporter.print(f"resuming the run in {run.folder} after step {tuning.state.step:,}")
    tuning.train()
    scores = tuning.finish(_recipe_text(tree), tree["data"]["sha256"])
    return Result(run.model, tuning.state.step, scores)


def _recipe_text(tree: dict[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None)


def _open(
    recipe: Recipe, run: RunFolder, resume: bool | Literal["auto"], fresh: bool
) -> tuple[bool, dict[str, Any] | None, dict[str, Any]]:
    """Open the run folder. Returns whether a run was there, its result if finished, and the resolved recipe."""
    if fresh:
        run.clear()
    _check_resume(run, resume)
    with InputHashes(run.data / "inputs.json") as hashes:
        tree = resolve(recipe, hashes)
    started = run.has_started
    run.open(tree)
    return started, run.read_result(), tree


def _check_resume(run: RunFolder, resume: bool | Literal["auto"]) -> None:
    if resume is True and not run.has_started:
        raise UserError(f"{run.folder}: there is no run to resume")
    if resume is False and run.has_started:
        raise UserError(f"{run.folder}: already holds a run; resume it, use --restart, or set another output")


def _is_complete(recipe: Recipe, done: dict[str, object]) -> bool:
    """Whether a finished run has the duration the recipe now sets; otherwise it is continued."""
    return done["asked"] == {"steps": recipe.last_step, "epochs": recipe.epochs}


__all__ = ["Result", "train"]
