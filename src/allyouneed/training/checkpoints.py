"""Checkpoints: step-numbered folders, each a complete model folder plus the training state.

    checkpoints/step-00001000/config.json, model.safetensors, tokenizer.json, README.md      an ordinary model folder
    checkpoints/step-00001000/training/trainer.json                                          progress, checksums
    checkpoints/step-00001000/training/{optimiser,random}.safetensors
    checkpoints/step-00001000/training/shards/                                               sharded optimiser state
    checkpoints/step-00001000/training/memory.safetensors                                    segment memory
    checkpoints/last.json, best.json                                                         for people and scripts

A checkpoint is renamed to its final path only when it is complete and synced, and is never modified. Its checksums are
verified when it is read; if one fails, the previous checkpoint is used. Which one is the best is part of the training
state inside, so a single rename changes the record and what it records; last.json and best.json repeat it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from allyouneed.data.batches.sharding import ALL_ROWS, DataShard
from allyouneed.errors import UserError
from allyouneed.files import checksum, leftovers, sha256, write_text
from allyouneed.files.system import sync
from allyouneed.folder import WEIGHTS, Folder, read_weights
from allyouneed.nn.states.segment_memory import SegmentMemory
from allyouneed.training.distributed.fsdp import is_sharded, read_sharded, read_shards
from allyouneed.training.optim.optimiser import EMA, load_state_tensors, state_tensors
from allyouneed.training.prefetch import DataPosition
from allyouneed.training.random_state import RandomState

NAME = re.compile(r"step-(\d{8,})")
UNFINISHED = ".writing-"
TRAINER = "trainer.json"
SHARDS = "shards"
POINTERS = LAST, BEST = "last.json", "best.json"
DIVERGED = "diverged-"

Memory = tuple[dict[str, Tensor], Any]  # as `SegmentMemory` writes it


@dataclass(frozen=True)
class TrainState:
    """Progress of a run: everything besides weights, optimiser and random state."""

    step: int = 0
    position: DataPosition = field(default_factory=lambda: DataPosition(0, 0))  # the next batch; `place` on disk
    tokens: int = 0  # target tokens seen
    seconds: float = 0.0  # of training, without validation
    validated: int = 0  # last validated step
    best: float | None = None  # by the recipe's metric
    best_loss: float | None = None  # breaks ties of the metric
    best_step: int | None = None
    stale: int = 0  # validations since the best
    scores: dict[str, float] = field(default_factory=dict)  # of the last validation
    warmup: int | None = None  # of a schedule that leaves it to the length of the run, fixed at the start

    def to_tree(self) -> dict[str, Any]:
        return {"place" if key == "position" else key: value for key, value in asdict(self).items()}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> TrainState:
        rest = {key: value for key, value in tree.items() if key != "place"}
        return cls(**rest, position=DataPosition(*tree["place"]))


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int

    def read_trainer(self, check: bool = True) -> dict[str, Any]:
        """The contents of trainer.json, after verifying its checksum and, with `check`, that of every file it lists."""
        path = self.path / "training" / TRAINER
        try:
            about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if about["checksum"] != checksum(about):
                raise UserError(f"{path}: damaged (its checksum differs)")
            for name, expected in about["sha256"].items() if check else ():
                if not (self.path / name).is_file():
                    raise UserError(f"{self.path / name}: missing")
                if sha256(self.path / name) != expected:
                    raise UserError(f"{self.path / name}: damaged (its checksum differs)")
            TypeAdapter(TrainState).validate_python(asdict(TrainState.from_tree(about["standing"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None
        return about

    @property
    def is_regular(self) -> bool:
        """Whether it was saved on schedule; see `Checkpoints.save`."""
        try:
            about = json.loads((self.path / "training" / TRAINER).read_text(encoding="utf-8"))
            return bool(about["regular"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False

    def restore(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, check: bool = True
    ) -> tuple[TrainState, RandomState]:
        """Load model and optimiser; returns the rest for the caller to apply."""
        from safetensors.torch import load_file

        about = self.read_trainer(check)
        (read_sharded if is_sharded(model) else read_weights)(model, self.path / WEIGHTS)
        shards = self.path / "training" / SHARDS
        if shards.is_dir():
            tensors = read_shards(shards, model)
        else:
            tensors = load_file(self.path / "training" / "optimiser.safetensors")
        load_state_tensors(optimiser, model, tensors)
        random = RandomState(about["random"], load_file(self.path / "training" / "random.safetensors"))
        return TrainState.from_tree(about["standing"]), random

    def moving_average(self) -> dict[str, Tensor]:
        """The moving average of the weights, by name; empty without."""
        from safetensors import safe_open

        path = self.path / "training" / "optimiser.safetensors"
        if not path.is_file():
            return {}
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.startswith(f"{EMA}/")]  # noqa: SIM118  # not a dict
            return {name.removeprefix(f"{EMA}/"): file.get_tensor(name) for name in names}

    def restore_memory(self, model: Any, shard: DataShard = ALL_ROWS) -> None:
        """Load the segment memory of this shard's rows, for a model that has one."""
        from safetensors.torch import load_file

        if isinstance(model, SegmentMemory):
            tree = self.read_trainer(check=shard.rank == 0)["memory"]
            model.restore(load_file(self.path / "training" / "memory.safetensors"), tree)
            model.select(shard.rows(0 if tree is None else len(tree["lengths"])))


class Checkpoints:
    def __init__(self, folder: Path, keep: int, report: Callable[[str], None], clean: bool = True) -> None:
        """`clean`: remove leftovers of an interrupted save; only the main process does."""
        self.folder, self.keep, self.report = folder, keep, report
        if not clean:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{UNFINISHED}*"):  # the run was killed while saving
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.folder.glob(f".{UNFINISHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for name in POINTERS:
            for file in leftovers(self.folder / name):
                file.unlink()

    def all(self) -> list[Checkpoint]:
        """All checkpoints, oldest first, valid or not."""
        found = [(NAME.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir()]
        return sorted((Checkpoint(p, int(m[1])) for m, p in found if m), key=lambda checkpoint: checkpoint.step)

    def latest_valid(self) -> Checkpoint | None:
        """The latest checkpoint whose checksums match. Later ones are reported and renamed."""
        found = self.all()
        for checkpoint in reversed(found):
            try:
                checkpoint.read_trainer()
                return checkpoint
            except UserError as error:
                aside = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                checkpoint.path.rename(aside)
                self.report(f"{error}; renamed this checkpoint to {aside.name}, trying the previous one")
        if found:
            self.report("no valid checkpoint left: training starts from scratch")
        return None

    def best(self, state: TrainState) -> Checkpoint | None:
        """The best checkpoint, according to the training state, if it is intact."""
        found = self._best(state)
        try:
            if found is not None:
                found.read_trainer()
        except UserError as error:
            self.report(f"{error}; the best checkpoint cannot be used")
            return None
        return found

    def _best(self, state: TrainState) -> Checkpoint | None:
        if state.best_step is None:
            return None
        found = self._at(state.best_step)
        # in runs of earlier versions the state may name a checkpoint that could not be saved
        return found if found.path.is_dir() else self._read_pointer(BEST)

    def _at(self, step: int) -> Checkpoint:
        return Checkpoint(self.folder / f"step-{step:08d}", step)

    def set_aside(self, checkpoint: Checkpoint) -> None:
        """Rename a checkpoint that training cannot continue from, so that the one before it is the latest."""
        aside = checkpoint.path.with_name(f"{DIVERGED}{checkpoint.path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.path.rename(aside)
        self.report(f"the checkpoint of step {checkpoint.step} leads to non-finite losses; renamed it to {aside.name}")

    def remove_diverged(self) -> None:
        for path in self.folder.glob(f"{DIVERGED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def begin_shards(self) -> Path:
        """A temporary folder that all processes write their optimiser shards to."""
        folder = self.folder / f"{UNFINISHED}{SHARDS}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def save(
        self,
        folder: Folder,
        optimiser: torch.optim.Optimizer,
        train_state: TrainState,
        regular: bool,
        memory: Memory | None = None,
        random: RandomState | None = None,
        shards: Path | None = None,
    ) -> Checkpoint | None:
        """Write a checkpoint. None if writing failed (a full disk); earlier checkpoints are untouched.

        `memory`: segment memory. `random`: random states of all processes.
        `shards`: folder of their optimiser shards.
        `regular`: saved on schedule and included in the final average. A checkpoint saved on Ctrl-C or by the clock is
        not, so that an interrupted or slower run ends in the same model.
        """
        from safetensors import SafetensorError

        checkpoint = self._at(train_state.step)
        path = checkpoint.path
        work = self.folder / f"{UNFINISHED}{path.name}"
        try:
            shutil.rmtree(work, ignore_errors=True)
            folder.save(work)
            write_training(work, folder.model, optimiser, train_state, regular, memory, random, shards)
            if path.exists():  # saved by Ctrl-C, before it was validated; without it the run would redo the last steps
                self._remove(checkpoint)
            work.rename(path)
            sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(work, ignore_errors=True)
            reason = getattr(error, "strerror", None) or error
            self.report(f"step {train_state.step}: saving the checkpoint failed ({reason}); the previous one is kept")
            return None
        self.write_pointers(checkpoint, train_state)
        return checkpoint

    def write_pointers(self, last: Checkpoint, state: TrainState) -> None:
        """Make last.json and best.json agree with the training state."""
        for name, checkpoint in ((LAST, last), (BEST, self._best(state))):
            if checkpoint is None:
                with suppress(OSError):
                    (self.folder / name).unlink()
            elif self._read_pointer(name) != checkpoint:
                self._write_pointer(name, checkpoint)

    def prune(self, state: TrainState, proven: int) -> None:
        """Keep the last `keep` regular checkpoints, the best, always the two newest, in case one is damaged, and the
        newest one up to step `proven`, whose weights are known to be good."""
        everything = self.all()
        best = self._best(state)
        kept = {c.path for c in self.regular()[-self.keep :]} | {c.path for c in everything[-2:]}
        kept |= {c.path for c in ([c for c in everything if c.step <= proven] or everything[:1])[-1:]}
        if best is not None:
            kept.add(best.path)
        for checkpoint in everything:
            if checkpoint.path not in kept:
                self._remove(checkpoint)

    def _remove(self, checkpoint: Checkpoint) -> None:
        """Rename, then delete: a partly deleted folder must never look like a checkpoint."""
        doomed = checkpoint.path.with_name(f"{UNFINISHED}gone-{checkpoint.path.name}")
        checkpoint.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def regular(self) -> list[Checkpoint]:
        """Checkpoints saved on schedule after step 0, oldest first."""
        return [c for c in self.all() if c.step > 0 and c.is_regular]

    def _write_pointer(self, name: str, checkpoint: Checkpoint) -> None:
        text = json.dumps({"step": checkpoint.step, "folder": checkpoint.path.name}) + "\n"
        try:
            write_text(self.folder / name, text)
        except OSError as error:
            self.report(f"{self.folder / name}: cannot be written: {error.strerror}")

    def _read_pointer(self, name: str) -> Checkpoint | None:
        try:
            about = json.loads((self.folder / name).read_text(encoding="utf-8"))
            found = self._at(int(about["step"]))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        return found if found.path.is_dir() else None


def write_training(
    work: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    train_state: TrainState,
    regular: bool,
    memory: Memory | None = None,
    random: RandomState | None = None,
    shards: Path | None = None,
) -> None:
    from safetensors.torch import save_file

    training = work / "training"
    training.mkdir()
    random = random or RandomState.capture()
    if shards is None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in state_tensors(optimiser, model).items()}
        save_file(tensors, training / "optimiser.safetensors")
    else:
        shards.rename(training / SHARDS)
    save_file(random.torch, training / "random.safetensors")
    if memory is not None:
        save_file(memory[0], training / "memory.safetensors")
    files = sorted(path for path in work.rglob("*") if path.is_file())
    about: dict[str, Any] = {
        "standing": train_state.to_tree(),
        "regular": regular,
        "random": random.plain,
        "memory": None if memory is None else memory[1],
        "torch": torch.__version__,
        "sha256": {path.relative_to(work).as_posix(): sha256(path) for path in files},
    }
    about = json.loads(json.dumps(about))
    about["checksum"] = checksum(about)
    (training / TRAINER).write_text(json.dumps(about) + "\n", encoding="utf-8")
    for path in [*training.rglob("*"), training, work]:
        sync(path)
