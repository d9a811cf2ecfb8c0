"""Checkpoints: step-numbered folders, each a complete model folder with what training needs beside it.

    checkpoints/step-00001000/config.json, model.safetensors, tokenizer.json, README.md      a model like any other
    checkpoints/step-00001000/training/trainer.json                                          where training stands
    checkpoints/step-00001000/training/{optimiser,random}.safetensors
    checkpoints/step-00001000/training/shards/                                               of many, their optimiser
    checkpoints/step-00001000/training/memory.safetensors                                    of a model that reads on
    checkpoints/last.json, best.json                                                         which is which

A checkpoint appears under its name only when it is whole and on the disk, and is never written again. Everything in
it is held to a checksum when it is read; one that fails is passed over for the one before it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.data.batches.sharding import ALL_ROWS, DataShard
from allyouneed.errors import UserError
from allyouneed.files import checksum, sha256, sync, write_text
from allyouneed.folder import WEIGHTS, Folder, read_weights
from allyouneed.nn.states.segment_memory import SegmentMemory
from allyouneed.train.distributed.fsdp import is_sharded, read_sharded, read_shards
from allyouneed.train.feed import Place
from allyouneed.train.optimiser import load_state_tensors, state_tensors
from allyouneed.train.randomness import Randomness

NAME = re.compile(r"step-(\d{8,})")
UNFINISHED = ".writing-"
TRAINER = "trainer.json"
SHARDS = "shards"

Memory = tuple[dict[str, Tensor], Any]  # as `SegmentMemory` writes it


@dataclass(frozen=True)
class TrainState:
    """Where training stands: everything that is neither weights, optimiser nor randomness."""

    step: int = 0
    place: Place = field(default_factory=lambda: Place(0, 0))  # the next batch
    tokens: int = 0  # target tokens seen
    seconds: float = 0.0  # of training, validation left out
    validated: int = 0  # the last step that was validated
    best: float | None = None  # by the recipe's metric
    best_loss: float | None = None  # decides where the metric ties
    best_step: int | None = None
    stale: int = 0  # validations since the best
    scores: dict[str, float] = field(default_factory=dict)  # of the last validation

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> TrainState:
        known = cls(**tree)
        return replace(known, place=Place(*known.place))


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int

    def trainer(self, check: bool = True) -> dict[str, Any]:
        """What trainer.json says, if it and every file it names are as written (`check`: or another process has seen to
        the files)."""
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
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from None
        return about

    def restore(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, check: bool = True
    ) -> tuple[TrainState, Randomness]:
        """Fill model and optimiser; the rest is returned, for the caller to take up when it is ready."""
        from safetensors.torch import load_file

        about = self.trainer(check)
        (read_sharded if is_sharded(model) else read_weights)(model, self.path / WEIGHTS)
        shards = self.path / "training" / SHARDS
        if shards.is_dir():
            state = read_shards(shards, model)
        else:
            state = load_file(self.path / "training" / "optimiser.safetensors")
        load_state_tensors(optimiser, model, state)
        random = Randomness(about["random"], load_file(self.path / "training" / "random.safetensors"))
        return TrainState.from_tree(about["standing"]), random

    def remind(self, reader: Any, share: DataShard = ALL_ROWS) -> None:
        """Give a model that reads on from batch to batch what it remembered of its rows."""
        from safetensors.torch import load_file

        if isinstance(reader, SegmentMemory):
            tree = self.trainer(check=share.rank == 0)["memory"]
            reader.restore(load_file(self.path / "training" / "memory.safetensors"), tree)
            reader.keep(share.rows(0 if tree is None else len(tree["lengths"])))


class Checkpoints:
    def __init__(self, folder: Path, keep: int, say: Callable[[str], None], clean: bool = True) -> None:
        """`clean`: no other process of the run does."""
        self.folder, self.keep, self.say = folder, keep, say
        if not clean:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{UNFINISHED}*"):  # of a run that was killed while saving
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.folder.glob(f".{UNFINISHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def all(self) -> list[Checkpoint]:
        """Oldest first, whether sound or not."""
        found = [(NAME.fullmatch(path.name), path) for path in self.folder.iterdir() if path.is_dir()]
        return sorted((Checkpoint(p, int(m[1])) for m, p in found if m), key=lambda checkpoint: checkpoint.step)

    def newest_sound(self) -> Checkpoint | None:
        """The last one that is as it was written. Later ones are reported and moved out of the way."""
        found = self.all()
        for checkpoint in reversed(found):
            try:
                checkpoint.trainer()
                return checkpoint
            except UserError as error:
                aside = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}")
                shutil.rmtree(aside, ignore_errors=True)
                checkpoint.path.rename(aside)
                self.say(f"{error}; this checkpoint is set aside as {aside.name}, the one before it is used")
        if found:
            self.say("there is no sound checkpoint before it: training begins anew")
        return None

    def best(self) -> Checkpoint | None:
        return self._pointed("best.json")

    def begin_shards(self) -> Path:
        """A place for what all processes write, before the checkpoint itself is made."""
        place = self.folder / f"{UNFINISHED}{SHARDS}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return place

    def save(
        self,
        folder: Folder,
        optimiser: torch.optim.Optimizer,
        standing: TrainState,
        regular: bool,
        memory: Memory | None = None,
        random: Randomness | None = None,
        shards: Path | None = None,
    ) -> Checkpoint | None:
        """Write a checkpoint; None when the disk would not take it: what there was before is still there.

        `memory`: of a model that reads on from batch to batch. `random`: of all processes, where there are many.
        `shards`: what they wrote of the optimiser.
        `regular`: on schedule, so that averaging counts it. One saved because of Ctrl-C is not, or a run that was
        interrupted would end in another model than one that was not.
        """
        from safetensors import SafetensorError

        path = self.folder / f"step-{standing.step:08d}"
        if path.exists():
            return Checkpoint(path, standing.step)
        work = self.folder / f"{UNFINISHED}{path.name}"
        try:
            shutil.rmtree(work, ignore_errors=True)
            folder.save(work)
            write_training(work, folder.model, optimiser, standing, regular, memory, random, shards)
            work.rename(path)
            sync(self.folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(work, ignore_errors=True)
            reason = getattr(error, "strerror", None) or error
            self.say(f"step {standing.step}: the checkpoint could not be saved ({reason}); the last good one is kept")
            return None
        checkpoint = Checkpoint(path, standing.step)
        self._point("last.json", checkpoint)
        return checkpoint

    def mark_best(self, checkpoint: Checkpoint) -> None:
        self._point("best.json", checkpoint)

    def prune(self) -> None:
        """Leave the last `keep` regular ones, the best, and always the two newest: one may turn out damaged."""
        everything = self.all()
        best = self.best()
        kept = {c.path for c in self.regular()[-self.keep :]} | {c.path for c in everything[-2:]}
        if best is not None:
            kept.add(best.path)
        for checkpoint in everything:
            if checkpoint.path not in kept:
                # renamed first: half a folder must never look like a checkpoint
                doomed = checkpoint.path.with_name(f"{UNFINISHED}gone-{checkpoint.path.name}")
                checkpoint.path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)

    def regular(self) -> list[Checkpoint]:
        """Those saved on schedule after training began, oldest first."""
        return [c for c in self.all() if c.step > 0 and _is_regular(c)]

    def _point(self, name: str, checkpoint: Checkpoint) -> None:
        text = json.dumps({"step": checkpoint.step, "folder": checkpoint.path.name}) + "\n"
        try:
            write_text(self.folder / name, text)
        except OSError as error:
            self.say(f"{self.folder / name}: cannot be written: {error.strerror}")

    def _pointed(self, name: str) -> Checkpoint | None:
        try:
            about = json.loads((self.folder / name).read_text(encoding="utf-8"))
            path = self.folder / about["folder"]
        except (OSError, ValueError, KeyError):
            return None
        return Checkpoint(path, int(about["step"])) if path.is_dir() else None


def write_training(
    work: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    standing: TrainState,
    regular: bool,
    memory: Memory | None = None,
    random: Randomness | None = None,
    shards: Path | None = None,
) -> None:
    from safetensors.torch import save_file

    training = work / "training"
    training.mkdir()
    random = random or Randomness.now()
    if shards is None:
        state = {name: tensor.cpu().contiguous() for name, tensor in state_tensors(optimiser, model).items()}
        save_file(state, training / "optimiser.safetensors")
    else:
        shards.rename(training / SHARDS)
    save_file(random.torch, training / "random.safetensors")
    if memory is not None:
        save_file(memory[0], training / "memory.safetensors")
    files = sorted(path for path in work.rglob("*") if path.is_file())
    about: dict[str, Any] = {
        "standing": asdict(standing),
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


def _is_regular(checkpoint: Checkpoint) -> bool:
    try:
        about = json.loads((checkpoint.path / "training" / TRAINER).read_text(encoding="utf-8"))
        return bool(about["regular"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
