"""The training loop: update, validate, save. Each step is a function of what a checkpoint holds, so that a run killed
at any point resumes bit for bit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allyouneed.config import tree_of
from allyouneed.errors import UserError
from allyouneed.folder import Folder, read_body
from allyouneed.interop.load import load
from allyouneed.nn.init.balance import drowned_tokens
from allyouneed.nn.models.precision import dequantize
from allyouneed.nn.states.segment_memory import SegmentMemory, with_segment_memory
from allyouneed.training.backend import Backend
from allyouneed.training.checkpoints import Checkpoint, Checkpoints, Memory, TrainState
from allyouneed.training.cuda.capture import CapturedUpdates
from allyouneed.training.distributed.apply import checkpoint_activations, shard_model, wrap_model
from allyouneed.training.distributed.fsdp import gather_model, is_sharded, write_shards
from allyouneed.training.distributed.objective import over_all_processes
from allyouneed.training.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from allyouneed.training.distributed.tensor_parallel import tensor_parallel_size
from allyouneed.training.guard import NonFiniteGuard, high_first_loss
from allyouneed.training.optim.optimiser import averaged_weights, state_tensors
from allyouneed.training.optim.schedule import PAPER_WARMUP, Schedule, default_warmup
from allyouneed.training.planning.data_size import choose_duration
from allyouneed.training.prefetch import Prefetcher, Update
from allyouneed.training.prepare import PreparedData, RunFolder
from allyouneed.training.random_state import RandomState, preserve_random_state, seed_all
from allyouneed.training.recipe.recipe import Recipe
from allyouneed.training.reporting.log import Log, TensorBoard, step_entry
from allyouneed.training.reporting.progress import Reporter
from allyouneed.training.signals import Interrupted, StopRequest
from allyouneed.training.step import PendingStep, fetch_results, run_update
from allyouneed.training.validate import Scorer, is_better

# these do not affect how files are read
LOCATION_KEYS = ("kind", "path", "labels", "source", "target", "from", "to", "portion")
LAG = 10  # updates a GPU may run ahead of the results on the host; a CPU does not run ahead


class Trainer:
    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        prepared: PreparedData,
        backend: Backend,
        reporter: Reporter,
        processes: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self.recipe, self.prepared, self.backend = recipe, prepared, backend
        self.reporter, self.processes = reporter, processes
        self.data = prepared.train.for_shard(processes.shard)
        seed_all(recipe.seed)
        self.config = recipe.model_for(prepared.vocabularies, prepared.labels)
        self.model: nn.Module = self.config.build().train()
        self.origin: dict[str, Any] = {}
        self.originals: dict[str, bytes] = {}
        self.directions: list[tuple[str | None, str]] = []
        self.learnt: dict[str, Any] = {}  # options of the task that a start model has learnt already
        if recipe.start is None:
            self._warn(drowned_tokens(self.model))
        else:
            start = load(recipe.start, as_stored=True)
            try:
                weights = dequantize(start.model)
            except UserError as error:
                raise UserError(f"{recipe.start}: {error}") from None
            fresh = read_body(self.model, weights, recipe.start, start.labels == prepared.labels)
            self.origin, self.originals, self.directions = start.origin, start.originals, start.directions
            self.learnt = recipe.task.learnt(start.task)
            if fresh:
                reporter.print(f"{recipe.start}: weights loaded; newly initialised: {', '.join(fresh)}")
        if recipe.checkpoint_activations:
            checkpoint_activations(self.model)
        shard_model(self.model, recipe.parallel, processes, backend.device, backend.bf16)
        self.model.to(backend.device)
        # the unsharded model, for validation and saving
        self.full_model: nn.Module | None = None if is_sharded(self.model) else self.model
        self.optimiser = recipe.optimiser.build(self.model)
        self.stateful_model = with_segment_memory(self.model, recipe.task.has_memory)
        self.checkpoints = Checkpoints(run.checkpoints, recipe.save.keep, reporter.print, clean=processes.is_main)
        self.guard = NonFiniteGuard(run.folder, prepared.spare, reporter.print, writes=processes.is_main)
        self.state = TrainState()
        if processes.data_rank:
            seed_all(recipe.seed, processes.data_rank)
        self.resumed_regular = False  # whether the checkpoint it resumed from was on schedule
        self.resumed = self._resume()
        self.task = over_all_processes(recipe.task, processes)
        self.wrapped_model = wrap_model(
            self.model, self.stateful_model, self.task, recipe.parallel, processes, backend.device
        )
        capture = recipe.compile != "blocks"
        self.captured = CapturedUpdates(
            self.wrapped_model, self.task, self.optimiser, recipe.clip, backend, processes, reporter.print, capture
        )
        self.scorer = Scorer(recipe, prepared, backend, reporter.print, self.folder)
        self.log = Log(run.log if processes.is_main else None, self.state.step)
        writes = recipe.tensorboard and processes.is_main
        self.tensorboard = TensorBoard(run.folder / "tensorboard", self.state.step) if writes else None
        epoch = self._updates_per_epoch()
        self.duration = choose_duration(recipe, epoch, reporter.print)
        self.total = self.duration.steps or (recipe.epochs or 1) * epoch
        self.schedule = self._schedule()
        self.pending: list[PendingStep] = []
        self.saved_at = self.clock = time.monotonic()
        self.saved_step = self.state.step  # the last step a checkpoint was saved at, or tried to be
        self.time_to_save = False

    def _resume(self) -> bool:
        newest = self._newest()
        if newest is None:
            return False
        self._restore(newest)
        self.resumed_regular = newest.is_regular
        newest.restore_memory(self.stateful_model, self.processes.shard)
        if self.processes.is_main:
            self.checkpoints.write_pointers(newest, self.state)  # the run may have been killed before it wrote them
        if (saved_with := newest.read_trainer(check=False).get("torch")) != torch.__version__:
            self.reporter.print(
                f"step {newest.step:,} was saved with torch {saved_with}, this is {torch.__version__}: "
                "losses may differ from an uninterrupted run in their last digits"
            )
        return True

    def _newest(self, leave_diverged: bool = False) -> Checkpoint | None:
        """The latest valid checkpoint, chosen by the main process. `leave_diverged`: not one that a rewind has already
        shown to lead nowhere, as long as there is another."""

        def newest() -> Checkpoint | None:
            found = self.checkpoints.latest_valid()
            if leave_diverged and found and self.guard.is_diverged(found.step) and len(self.checkpoints.all()) > 1:
                self.checkpoints.set_aside(found)
                found = self.checkpoints.latest_valid()
            return found

        return self.processes.on_main(newest, "reading a checkpoint")

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.state, random = checkpoint.restore(self.model, self.optimiser, check=self.processes.is_main)
        own = random.for_rank(self.processes.data_rank)
        if own is None:
            seed_all(self.recipe.seed, self.processes.data_rank, self.state.step)
        else:
            own.restore()

    def _schedule(self) -> Schedule:
        """The recipe's schedule. A warm-up that it leaves open is fixed now and kept in the training state."""
        schedule, report = self.recipe.schedule, self.reporter.print
        if schedule.follows_length:
            warmup = self.state.warmup
            if warmup is None:  # resumed: the run was started by a version that always used the paper's
                warmup = PAPER_WARMUP if self.resumed else default_warmup(self.total)
            self.state = replace(self.state, warmup=warmup)
            schedule = schedule.with_warmup(warmup, self.config.width)
            if warmup != PAPER_WARMUP:
                report(f"warm-up: {warmup:,} of {self.total:,} steps; set schedule.warmup to change it")
        if warning := schedule.warning(self.total):
            report(f"warning: {warning}")
        return schedule

    def _updates_per_epoch(self) -> int:
        return -(-self.data.steps_per_epoch(0) // self.recipe.accumulate)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end, or raise Interrupted."""
        if not self.resumed:
            self.save(regular=True)  # a checkpoint to rewind to; also reports a full disk early
        self.reporter.begin(self.state.step, self.total, self.backend.device)
        self.clock = time.monotonic()
        try:
            with (
                StopRequest(self.reporter.print, self.processes.is_single) as stop,
                Prefetcher(self.data, self.state.position, self.recipe.accumulate, self.backend.device) as updates,
            ):
                self._complete_last_step()
                while not self.is_finished:
                    self._update(next(updates))
                    clock = self.processes.is_main and self._minutes_elapsed
                    stopping, self.time_to_save = self.processes.any_flag(stop.requested, clock)
                    must_sync = self._due_validation or self._due_save or self.is_finished or stopping
                    if (must_sync or len(self.pending) >= self._lag) and self._collect_results():
                        continue
                    if self.guard.in_streak:
                        continue  # the weights are suspect: what is due waits, until a finite update or a rewind
                    if stopping:
                        self.save(regular=self._is_regular)
                        raise Interrupted(self.state.step)
                    self._validate_and_save()
        finally:
            self.reporter.end()
            self.log.flush()
            if self.tensorboard is not None:
                self.tensorboard.close()

    def _complete_last_step(self) -> None:
        """Validate if the run was stopped between a step and its validation, and save the checkpoint again if that
        makes it the best or the last."""
        before = self.state
        improved = self._validate()
        if improved or (self.is_finished and not self.resumed_regular):
            self._save_validated(self.resumed_regular or self.is_finished, before)

    def _validate_and_save(self) -> None:
        before = self.state
        improved = self._validate()
        if improved or self._due_save or self.is_finished:
            self._save_validated(self._is_regular, before)

    def _save_validated(self, regular: bool, before: TrainState) -> None:
        """`before`: the state before validating. The best is the best that was saved: a later one can be worse."""
        if self.save(regular) is None:
            self.state = replace(self.state, best=before.best, best_loss=before.best_loss, best_step=before.best_step)

    @property
    def is_finished(self) -> bool:
        now, patience = self.state, self.duration.patience
        if patience is not None and now.stale >= patience and now.validated == now.step:
            return True
        last = self.duration.steps
        return now.step >= last if last is not None else now.position.epoch >= (self.recipe.epochs or 0)

    @property
    def _lag(self) -> int:
        return LAG if self.backend.cuda else 1

    @property
    def _due_validation(self) -> bool:
        now, every = self.state, self.duration.every
        due = now.step // every > now.validated // every or (self.is_finished and now.step > now.validated)
        return self.prepared.valid is not None and due

    @property
    def _due_by_count(self) -> bool:
        every = self.recipe.save.every
        return every is not None and self.state.step // every > self.saved_step // every

    @property
    def _due_save(self) -> bool:
        return self.time_to_save or self._due_by_count

    @property
    def _is_regular(self) -> bool:
        """Whether a checkpoint saved now is on schedule; the clock is one if it is the only one."""
        by_clock = self.time_to_save and self.recipe.save.every is None
        return self._due_by_count or by_clock or self.is_finished

    @property
    def _minutes_elapsed(self) -> bool:
        minutes = self.recipe.save.minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def _update(self, update: Update) -> None:
        step = self.state.step + 1
        self.processes.at(f"update {step}")
        update = replace(update, tokens=self.processes.sum_count(update.tokens))
        rate = self.schedule.rate(step, self.config.width, self.total)
        if self.captured.enabled:
            pending = self.captured.run(update, step, rate)
        else:
            model, task, clip = self.wrapped_model, self.task, self.recipe.clip
            pending = run_update(model, task, self.optimiser, update, step, rate, clip, self.backend, self.processes)
        self.pending.append(pending)
        tokens = self.state.tokens + update.tokens
        self.state = replace(self.state, step=step, position=update.next, tokens=tokens)

    def _collect_results(self) -> bool:
        """Fetch and log the results of pending updates. True if training was rewound."""
        results, self.pending = fetch_results(self.pending), []
        now = time.monotonic()
        self.state = replace(self.state, seconds=self.state.seconds + now - self.clock)
        self.clock = now
        for one in results:
            verdict = self.guard.check(one)
            self.log.write(step_entry(one))
            self.reporter.step(one)
            vocabs = self.config.vocabs
            if one.step == 1 and self.recipe.start is None and self.recipe.task.has_perplexity and vocabs is not None:
                self._warn(high_first_loss(one.plain, vocabs.target))
            if self.tensorboard is not None:
                self.tensorboard.step(one, self.reporter.speed())
            if verdict == "rewind":
                self._rewind()
                return True
        self.log.flush()
        if self.is_finished and self.guard.in_streak:
            self._rewind()
            return True
        return False

    def _warn(self, text: str | None) -> None:
        if text is not None:
            self.reporter.print(f"warning: {text}")

    def _rewind(self) -> None:
        """Restore the last valid checkpoint, but continue with the data after the bad batches."""
        newest = self._newest(leave_diverged=True)
        if newest is None:
            raise UserError("the loss is not finite from the start; lower the learning rate or use precision: fp32")
        self.guard.on_rewind(newest.step)
        position = self.state.position
        self._restore(newest)
        self.captured.reset()
        self.state = replace(self.state, position=position)
        self.saved_step = newest.step
        if isinstance(self.stateful_model, SegmentMemory):
            self.stateful_model.reset()  # the memory may hold non-finite values
        self.log.rewind(newest.step)

    # --- validating and saving --------------------------------------------------------------------------------------

    def _validate(self) -> bool:
        """Validate if due. True if the model is the best so far."""
        if not self._due_validation:
            return False
        began = time.monotonic()
        limit = self.recipe.validation.limit
        with preserve_random_state(), averaged_weights(self.optimiser), self.gather_full_model():
            options = self.recipe.validation
            found = self.processes.on_main(
                lambda: self.scorer.evaluate(options.beam, options.sentences, limit),
                f"validation after update {self.state.step}",
            )
        metric, now = self.recipe.metric, self.state
        known = now.best is not None and now.best_loss is not None
        old: dict[str, Any] | None = {metric: now.best, "loss": now.best_loss} if known else None
        improved = is_better(metric, self.recipe.task.metrics[metric], found, old)
        best, at = (found[metric], now.step) if improved else (now.best, now.best_step)
        lowest = found.get("loss", math.inf) if improved else now.best_loss
        stale = 0 if improved else now.stale + (metric in found)
        self.state = replace(
            now, validated=now.step, best=best, best_loss=lowest, best_step=at, stale=stale, scores=found
        )
        self.log.write({"step": now.step, "valid": found})
        self.log.flush()
        if self.tensorboard is not None:
            self.tensorboard.valid(now.step, found)
        text = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
        record = "best so far" if improved else f"best {best:.3f} at step {at}" if best is not None else "none yet"
        self.reporter.print(
            f"step {now.step:,} validation  {text}{self.scorer.limit_text(limit)}  ({metric}: {record})"
        )
        if not improved and stale >= (self.duration.patience or math.inf):
            self.reporter.print(f"no better {metric} for {stale} validations: stopping early")
        self.reporter.pause(time.monotonic() - began)
        self.clock = time.monotonic()
        return improved

    def folder(self, card: str = "") -> Folder:
        recipe = self.recipe
        assert self.full_model is not None
        trained = [files.direction for files in recipe.data.train if files.direction is not None]
        return Folder(
            self.full_model,
            self.prepared.vocabularies,
            task=tree_of(recipe.task) | self.learnt,
            decoding=tree_of(recipe.decoding, full=False),
            max_tokens=recipe.max_tokens,
            directions=list(dict.fromkeys([*self.directions, *trained])),
            labels=self.prepared.labels,
            files={k: v for k, v in tree_of(recipe.data.train[0], full=False).items() if k not in LOCATION_KEYS},
            retrieval={} if recipe.retrieval is None else tree_of(recipe.retrieval, full=False),
            card=card,
            origin=self.origin,
            originals=self.originals | recipe.task.folder_files(),
            detector=self.prepared.detector,
        )

    def save(self, regular: bool) -> Checkpoint | None:
        self.log.flush(sync=True)
        self.processes.at(f"saving after update {self.state.step}")
        random, shards, memory = self._random_state(), self._shards(), self._memory()
        with self.gather_full_model():
            saved = self.processes.on_main(
                lambda: self.checkpoints.save(
                    self.folder(), self.optimiser, self.state, regular, memory, random, shards
                ),
                f"saving after update {self.state.step}",
            )
        if saved is not None:
            self.guard.on_checkpoint()
            if self.processes.is_main:
                self.checkpoints.prune(self.state, self.guard.proven)
        self.saved_at, self.saved_step, self.time_to_save = time.monotonic(), self.state.step, False
        return saved

    def _random_state(self) -> RandomState:
        """The random state of every data rank, on the main process; its tensor-parallel ranks share one."""
        now = RandomState.capture()
        others = {
            f"{rank}/{name}": state
            for rank, states in enumerate(self.processes.gather(now.torch)[:: self.processes.tensor])
            for name, state in states.items()
            if rank
        }
        return RandomState(now.plain, now.torch | others)

    def _memory(self) -> Memory | None:
        """The segment memory of the rows of all processes, on the main process."""
        if not isinstance(self.stateful_model, SegmentMemory):
            return None
        own = self.stateful_model.export()
        return own if self.processes.is_single else self.stateful_model.merge(self.processes.gather(own))

    def _shards(self) -> Path | None:
        """Write the sharded optimiser state from all processes; the folder it is in."""
        tensors = state_tensors(self.optimiser, self.model)
        if not is_sharded(self.model) or not tensors:
            return None
        folder = self.processes.broadcast(self.checkpoints.begin_shards() if self.processes.is_main else None)
        assert folder is not None
        write_shards(tensors, folder, tensor_parallel_size(self.model))
        return folder

    @contextmanager
    def gather_full_model(self) -> Iterator[None]:
        """Inside, the main process has the unsharded model (`full_model`)."""
        if self.full_model is not None:
            yield
            return
        self.full_model = gather_model(self.model, self.config, self.backend.device, self.processes.is_main)
        try:
            yield
        finally:
            self.full_model = None

    def end(self) -> Checkpoint | None:
        """The checkpoint of the last step, saved now if saving failed before. Afterwards the main process keeps the
        unsharded model; the others are done."""
        last = self._newest()
        if last is None or last.step < self.state.step:
            last = self.save(regular=True)
        if self.processes.is_main:
            self.checkpoints.remove_diverged()
        if self.full_model is None:
            whole = gather_model(self.model, self.config, self.backend.device, self.processes.is_main)
            self.full_model = self.model = whole if whole is not None else self.model
        return last
