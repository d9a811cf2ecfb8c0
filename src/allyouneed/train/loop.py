"""The loop: update, look, save, until it is over. Everything it does at a step is a function of what a checkpoint
holds, so that a run killed anywhere and begun again does exactly what it would have done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from allyouneed.config import tree_of
from allyouneed.data.files.pairs import PairFiles
from allyouneed.errors import UserError
from allyouneed.folder import Folder, read_body
from allyouneed.infer.predictors.base import Judged
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.predictors.registry import predictor
from allyouneed.interop.load import load
from allyouneed.nn.models.precision import dequantize
from allyouneed.nn.states.segment_memory import SegmentMemory, reading
from allyouneed.train.checkpoints import Checkpoint, Checkpoints, Memory, TrainState
from allyouneed.train.cuda.capture import Updates
from allyouneed.train.cuda.machine import Machine
from allyouneed.train.distributed.apply import compute_twice, reader_of, spread
from allyouneed.train.distributed.fsdp import gathered, is_sharded, write_shards
from allyouneed.train.distributed.objective import all_pairs
from allyouneed.train.distributed.process_group import ALONE, Team
from allyouneed.train.distributed.tensor_parallel import ways_of
from allyouneed.train.feed import Feed, Update
from allyouneed.train.guard import Guard
from allyouneed.train.log import Log
from allyouneed.train.optimiser import state_tensors
from allyouneed.train.prepare import Prepared, Run
from allyouneed.train.progress import Reporter
from allyouneed.train.randomness import Randomness, seed_all, untouched
from allyouneed.train.recipe import Recipe
from allyouneed.train.signals import Interrupted, StopRequest
from allyouneed.train.step import Measured, Pending, fetch, run_update
from allyouneed.train.validate import OF_THE_LOSS, better, validation_loss

WHERE = ("kind", "path", "source", "target", "from", "to")  # keys of files that do not say how to read them
LAG = 10  # updates a GPU may be ahead of what the host knows; a CPU has no reason to lag


class Trainer:
    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        prepared: Prepared,
        machine: Machine,
        reporter: Reporter,
        team: Team = ALONE,
    ) -> None:
        self.recipe, self.prepared, self.machine, self.reporter, self.team = recipe, prepared, machine, reporter, team
        self.data = prepared.train.for_shard(team.share)
        seed_all(recipe.seed)
        self.config = recipe.model_for(prepared.vocabularies, prepared.labels)
        self.model: nn.Module = self.config.build().train()
        self.origin: dict[str, Any] = {}
        self.originals: dict[str, bytes] = {}
        self.directions: list[tuple[str | None, str]] = []
        if recipe.start is not None:
            start = load(recipe.start, as_stored=True)
            try:
                weights = dequantize(start.model)
            except UserError as error:
                raise UserError(f"{recipe.start}: {error}") from None
            fresh = read_body(self.model, weights, recipe.start, start.labels == prepared.labels)
            self.origin, self.originals, self.directions = start.origin, start.originals, start.directions
            if fresh:
                reporter.say(f"{recipe.start}: its body is kept; new and untrained: {', '.join(fresh)}")
        if recipe.checkpoint_activations:
            compute_twice(self.model)
        spread(self.model, recipe.parallel, team, machine.device)
        self.model.to(machine.device)
        # the model in one piece, for whoever does not compute gradients with it
        self.plain: nn.Module | None = None if is_sharded(self.model) else self.model
        self.optimiser = recipe.optimiser.build(self.model)
        self.reader = reading(self.model, recipe.task.has_memory)
        self.checkpoints = Checkpoints(run.checkpoints, recipe.save.keep, reporter.say, clean=team.first)
        self.guard = Guard(run.folder, prepared.spare, reporter.say, writes=team.first)
        self.standing = TrainState()
        if team.reader:
            seed_all(recipe.seed, team.reader)
        self.resumed = self._resume()
        self.task = all_pairs(recipe.task, team)
        self.trained = reader_of(self.model, self.reader, self.task, recipe.parallel, team, machine.device)
        asked = recipe.compile != "blocks"
        self.recorded = Updates(self.trained, self.task, self.optimiser, recipe.clip, machine, team, asked)
        self.log = Log(run.log if team.first else None, self.standing.step)
        shown = recipe.tensorboard and team.first
        self.board = _Board(run.folder / "tensorboard", self.standing.step) if shown else None
        self.total = recipe.last_step or (recipe.epochs or 1) * self._updates_per_epoch()
        self.pending: list[Pending] = []
        self.saved_at = self.clock = time.monotonic()
        self.time_to_save = False

    def _resume(self) -> bool:
        newest = self._newest()
        if newest is None:
            return False
        self._restore(newest)
        newest.remind(self.reader, self.team.share)
        if (saved_with := newest.trainer(check=False).get("torch")) != torch.__version__:
            self.reporter.say(
                f"step {newest.step:,} was saved with torch {saved_with}, this is {torch.__version__}: "
                "losses may differ from an uninterrupted run in their last digits"
            )
        return True

    def _newest(self) -> Checkpoint | None:
        """The last good checkpoint; the first process chooses for all."""
        return self.team.told(self.checkpoints.newest_sound() if self.team.first else None)

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.standing, random = checkpoint.restore(self.model, self.optimiser, check=self.team.first)
        own = random.of(self.team.reader)
        if own is None:
            seed_all(self.recipe.seed, self.team.reader, self.standing.step)
        else:
            own.restore()

    def _updates_per_epoch(self) -> int:
        return -(-self.data.steps_per_epoch(0) // self.recipe.accumulate)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end, or raise Interrupted."""
        if not self.resumed:
            self.save(regular=True)  # something to go back to, and a disk that is full says so now
        self.reporter.begin(self.standing.step, self.total, self.machine.device)
        self.clock = time.monotonic()
        try:
            with (
                StopRequest(self.reporter.say, self.team.alone) as stop,
                Feed(self.data, self.standing.place, self.recipe.accumulate, self.machine.device) as feed,
            ):
                self._look()  # a run that was stopped before a validation that was due
                while not self.over:
                    self._update(next(feed))
                    asked, self.time_to_save = self.team.any(stop.asked, self._minutes_are_over)
                    at_stop = self._due_validation or self._due_save or self.over or asked
                    if (at_stop or len(self.pending) >= self._lag) and self._settle():
                        continue
                    if asked:
                        self.save(regular=self._due_save)
                        raise Interrupted(self.standing.step)
                    improved = self._look()
                    if improved or self._due_save or self.over:
                        self.save(regular=self._due_save or self.over, best=improved)
        finally:
            self.reporter.end()
            self.log.flush()
            if self.board is not None:
                self.board.close()

    @property
    def over(self) -> bool:
        now, patience = self.standing, self.recipe.validation.patience
        if patience is not None and now.stale >= patience and now.validated == now.step:
            return True
        last = self.recipe.last_step
        return now.step >= last if last is not None else now.place.epoch >= (self.recipe.epochs or 0)

    @property
    def _lag(self) -> int:
        return LAG if self.machine.cuda else 1

    @property
    def _due_validation(self) -> bool:
        now = self.standing
        on_time = now.step % self.recipe.validation.every == 0 or self.over
        return self.prepared.valid is not None and now.step > now.validated and on_time

    @property
    def _due_save(self) -> bool:
        every = self.recipe.save.every
        return self.time_to_save or (every is not None and self.standing.step % every == 0)

    @property
    def _minutes_are_over(self) -> bool:
        minutes = self.recipe.save.minutes
        return minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes

    def _update(self, update: Update) -> None:
        update = replace(update, tokens=self.team.total(update.tokens))
        step = self.standing.step + 1
        rate = self.recipe.schedule.rate(step, self.config.width, self.total)
        if self.recorded.records:
            found = self.recorded.run(update, step, rate)
        else:
            model, task, clip = self.trained, self.task, self.recipe.clip
            found = run_update(model, task, self.optimiser, update, step, rate, clip, self.machine, self.team)
        self.pending.append(found)
        tokens = self.standing.tokens + update.tokens
        self.standing = replace(self.standing, step=step, place=update.next, tokens=tokens)

    def _settle(self) -> bool:
        """Learn how the updates since the last time went. True when training had to go back."""
        measured, self.pending = fetch(self.pending), []
        now = time.monotonic()
        self.standing = replace(self.standing, seconds=self.standing.seconds + now - self.clock)
        self.clock = now
        for one in measured:
            verdict = self.guard.judge(one)
            self.log.write(_entry(one))
            self.reporter.step(one)
            if self.board is not None:
                self.board.step(one, self.reporter.speed())
            if verdict == "rewind":
                self._rewind()
                return True
        self.log.flush()
        return False

    def _rewind(self) -> None:
        """Back to the last good checkpoint, but on with the data that comes next: the same again would fail again."""
        newest = self._newest()
        if newest is None:
            raise UserError("the loss is not finite from the start; lower the learning rate or use precision: fp32")
        place = self.standing.place
        self._restore(newest)
        self.recorded.forget()
        self.standing = replace(self.standing, place=place)
        if isinstance(self.reader, SegmentMemory):
            self.reader.forget()  # what it remembers may be what is not a number
        self.log.rewind(newest.step)
        self.guard.rewound(newest.step)

    # --- looking and saving -----------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Validate if it is time. True when the model is the best so far."""
        if not self._due_validation:
            return False
        began = time.monotonic()
        with untouched(), self.in_one_piece():
            scores: dict[str, float] = {}
            if self.team.first:
                scores = self.evaluate(self.recipe.validation.beam, show=self.recipe.validation.sentences)
            found = self.team.told(scores)
        metric, now = self.recipe.metric, self.standing
        known = now.best is not None and now.best_loss is not None
        old: dict[str, Any] | None = {metric: now.best, "loss": now.best_loss} if known else None
        improved = better(metric, self.recipe.task.metrics[metric], found, old)
        best, at = (found[metric], now.step) if improved else (now.best, now.best_step)
        lowest = found["loss"] if improved else now.best_loss
        stale = 0 if improved else now.stale + 1
        self.standing = replace(
            now, validated=now.step, best=best, best_loss=lowest, best_step=at, stale=stale, scores=found
        )
        self.log.write({"step": now.step, "valid": found})
        self.log.flush()
        if self.board is not None:
            self.board.valid(now.step, found)
        text = "  ".join(f"{name} {value:.3f}" for name, value in found.items())
        record = "best so far" if improved else f"best {best:.3f} at step {at}" if best is not None else ""
        self.reporter.say(f"step {now.step:,} validation  {text}  ({metric}: {record})")
        if self.over and not improved and stale and self.recipe.validation.patience:
            self.reporter.say(f"no better {metric} for {stale} validations: training ends")
        self.reporter.pause(time.monotonic() - began)
        self.clock = time.monotonic()
        return improved

    def evaluate(self, beam: int, show: int = 0) -> dict[str, float]:
        """Loss over all validation examples, and how good the answers to (up to `limit` of) them are."""
        assert self.prepared.valid is not None and self.plain is not None
        found = validation_loss(self.plain, self.recipe.task, self.prepared.valid, self.machine)
        examples = self.prepared.valid_examples[: self.recipe.validation.limit]
        only_shown = self.recipe.metric in OF_THE_LOSS
        if only_shown:
            examples = examples[:: max(1, len(examples) // show)][:show] if show else []
        if not examples:
            return found
        judged = self.judge(examples, beam, show)
        if show and judged.samples:
            self.reporter.say(judged.shown())
        return found if only_shown else found | judged.figures

    def judge(self, examples: list[Any], beam: int, show: int = 0, resamples: int = 0) -> Judged:
        """What the model makes of examples, exactly as a user of its folder would get it."""
        decoding = self.recipe.decoding.model_copy(update={"beam": beam, "best": 1})
        with self.machine.uncompiled():  # and in fp32: autocast would cast every weight again for every token
            model = predictor(self.folder())
            if self.prepared.retriever is not None and isinstance(model, Generator):
                model.retrieve(self.prepared.retriever)  # which is open already
            return model.judge(examples, decoding, show, resamples)

    def folder(self, card: str = "") -> Folder:
        recipe = self.recipe
        assert self.plain is not None
        pairs = [files for files in recipe.data.train if isinstance(files, PairFiles)]
        learnt = [(files.from_, files.to) for files in pairs if files.to is not None]
        return Folder(
            self.plain,
            self.prepared.vocabularies,
            task=tree_of(recipe.task),
            decoding=tree_of(recipe.decoding, full=False),
            max_tokens=recipe.max_tokens,
            directions=list(dict.fromkeys([*self.directions, *learnt])),
            labels=self.prepared.labels,
            files={k: v for k, v in tree_of(recipe.data.train[0], full=False).items() if k not in WHERE},
            retrieval={} if recipe.retrieval is None else tree_of(recipe.retrieval, full=False),
            card=card,
            origin=self.origin,
            originals=self.originals,
            detector=self.prepared.detector,
        )

    def save(self, regular: bool, best: bool = False) -> Checkpoint | None:
        self.log.flush(sync=True)
        saved, random, shards, memory = None, self._randomness(), self._shards(), self._memory()
        with self.in_one_piece():
            if self.team.first:
                saved = self.checkpoints.save(
                    self.folder(), self.optimiser, self.standing, regular, memory, random, shards
                )
        saved = self.team.told(saved)
        if saved is not None:
            self.guard.checkpointed()
            if self.team.first:
                if best:
                    self.checkpoints.mark_best(saved)
                self.checkpoints.prune()
        self.saved_at, self.time_to_save = time.monotonic(), False
        return saved

    def _randomness(self) -> Randomness:
        """Of all readers of the data, for the first; those of one reader draw alike."""
        now = Randomness.now()
        others = {
            f"{reader}/{name}": state
            for reader, states in enumerate(self.team.gathered(now.torch)[:: self.team.tensor])
            for name, state in states.items()
            if reader
        }
        return Randomness(now.plain, now.torch | others)

    def _memory(self) -> Memory | None:
        """What is remembered of the rows of all, for the first."""
        if not isinstance(self.reader, SegmentMemory):
            return None
        own = self.reader.written()
        return own if self.team.alone else self.reader.joined(self.team.gathered(own))

    def _shards(self) -> Path | None:
        """What the optimiser remembers, where each process has a part of it, written by all of them."""
        tensors = state_tensors(self.optimiser, self.model)
        if not is_sharded(self.model) or not tensors:
            return None
        place = self.team.told(self.checkpoints.begin_shards() if self.team.first else None)
        assert place is not None
        write_shards(tensors, place, ways_of(self.model))
        return place

    @contextmanager
    def in_one_piece(self) -> Iterator[None]:
        """Inside, the first process has the model whole (`plain`)."""
        if self.plain is not None:
            yield
            return
        self.plain = gathered(self.model, self.config, self.machine.device, self.team.first)
        try:
            yield
        finally:
            self.plain = None

    def end(self) -> Checkpoint | None:
        """After the last step: its checkpoint, made now if the disk would not take it before. The first process then
        has the model whole for good, and the others are done."""
        last = self._newest()
        if last is None or last.step < self.standing.step:
            last = self.save(regular=True)
        if self.plain is None:
            whole = gathered(self.model, self.config, self.machine.device, self.team.first)
            self.plain = self.model = whole if whole is not None else self.model
        return last


def _entry(one: Measured) -> dict[str, Any]:
    entry: dict[str, Any] = {"step": one.step, "epoch": one.places[0].epoch, "tokens": one.tokens, "rate": one.rate}
    if not one.finite:
        return entry | {"loss": None, "skipped": "not finite"}
    return entry | {"loss": one.loss, "plain": one.plain, "norm": one.norm}


class _Board:
    """TensorBoard, for those who ask for it."""

    def __init__(self, folder: Any, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("tensorboard: true needs it installed: pip install 'allyouneed[tensorboard]'") from None
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def step(self, one: Measured, speed: float | None) -> None:
        figures = {"loss": one.loss, "perplexity": one.perplexity, "rate": one.rate, "norm": one.norm}
        for name, value in (figures | ({"tokens_per_second": speed} if speed else {})).items():
            self.writer.add_scalar(f"train/{name}", value, one.step)

    def valid(self, step: int, found: dict[str, float]) -> None:
        for name, value in found.items():
            self.writer.add_scalar(f"valid/{name}", value, step)

    def close(self) -> None:
        self.writer.close()
