"""One session of the teacher's training: from the last snapshot to the next.

    python recipes/translator/session.py runs/translator --minutes 12 [--snapshot FOLDER] [--decay]

The teacher is trained in several sessions, on machines that keep nothing. A session starts from the weights of the last
snapshot (snapshot.py; without `--snapshot`: from new weights), and trains by teacher.yaml in the folder with the data
for the given minutes, compiling not counted: a short warm-up, then a constant rate. Its result is an average of the
weights, which on a constant rate is better than the last ones: runs/translator/teacher/snapshot, written every few
minutes and at the end, which SIGTERM or Ctrl-C brings forward. `--decay`: the rate falls to zero over the session, for
the last one. `--only-encode`: encode the files that are there already, and stop.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import snapshot
import torch
import yaml
from torch import Tensor

from allyouneed.nn.models.weights import named_tensors
from allyouneed.training import load_recipe
from allyouneed.training.backend import choose_backend
from allyouneed.training.distributed.process_group import SINGLE_PROCESS
from allyouneed.training.loop import Trainer
from allyouneed.training.optim.schedule import Schedule
from allyouneed.training.planning.dry_run import dry_run
from allyouneed.training.prefetch import Update
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from allyouneed.training.signals import Interrupted
from allyouneed.training.validate import validation_loss

EVERY = 10  # updates between two additions to the average
HORIZON = 400  # updates that the average looks back
WARMUP = 200  # updates, from a snapshot: the optimiser begins without its moments


@dataclass(frozen=True)
class Rate:
    """A schedule times what is left of the session."""

    schedule: Schedule
    left: Callable[[], float]

    def rate(self, step: int, width: int, total: int) -> float:
        return self.schedule.rate(step, width, total) * self.left()


class Session(Trainer):
    """Ends by the clock. Writes the average of its weights instead of checkpoints."""

    seconds: float
    decay = False
    sessions: tuple[dict[str, Any], ...] = ()
    began: float | None = None
    added = 0
    output: Path
    writer: threading.Thread | None = None

    def start(self) -> None:
        self.weights = {n: t.detach() for n, t in named_tensors(self.model).items() if t.is_floating_point()}
        self.average = {name: tensor.clone() for name, tensor in self.weights.items()}
        self.schedule: Any = Rate(self.schedule, (lambda: max(0.0, 1 - self.share)) if self.decay else lambda: 1.0)
        self.began = time.monotonic()
        with suppress(Interrupted):
            self.run()

    @property
    def share(self) -> float:
        """The share of the session that is over."""
        return 0.0 if self.began is None else (time.monotonic() - self.began) / self.seconds

    @property
    def is_finished(self) -> bool:
        return self.share >= 1

    def _update(self, update: Update) -> None:
        super()._update(update)
        if self.state.step % EVERY == 0:
            self.added += 1
            part = max(EVERY / HORIZON, 1 / self.added)
            torch._foreach_lerp_([*self.average.values()], [*self.weights.values()], part)

    def save(self, regular: bool) -> None:
        """On schedule only: what is not due by the clock is not written, and does not put off what will be."""
        if self.time_to_save and not self.is_finished:
            self.write({})
            self.saved_at, self.time_to_save = time.monotonic(), False

    def write(self, losses: dict[str, float]) -> None:
        if self.writer is not None:
            self.writer.join()
        row = {"updates": self.state.step, "target tokens": self.state.tokens, "epochs": self.state.position.epoch}
        row |= {"seconds": round(self.state.seconds)} | losses
        found, sessions = {name: tensor.to("cpu") for name, tensor in self.average.items()}, [*self.sessions, row]
        folder = self.folder(f"# teacher\n\nlicence: {self.recipe.licence}\n")

        def work() -> None:
            shutil.rmtree(self.output, ignore_errors=True)
            snapshot.save(folder, self.output, found, sessions=sessions)
            self.reporter.print(f"snapshot after update {row['updates']:,}")

        self.writer = threading.Thread(target=work)
        self.writer.start()

    def end(self) -> None:
        """Losses on the validation data: of the last weights, of their average, and of what a snapshot keeps of it."""
        last, losses = {name: tensor.clone() for name, tensor in self.weights.items()}, {}
        kept = {
            n: snapshot.dequantise(snapshot.quantise(t), [*t.shape]) if t.ndim > 1 else t
            for n, t in self.average.items()
        }
        for name, weights in (("last", last), ("average", self.average), ("snapshot", kept)):
            self.set_weights(weights)
            losses[f"loss, {name}"] = round(self.loss(), 4)
        self.write(losses)
        assert self.writer is not None
        self.writer.join()
        self.reporter.print(json.dumps(losses))

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)

    def loss(self) -> float:
        assert self.prepared.valid is not None
        return validation_loss(self.model, self.recipe.task, self.prepared.valid, self.backend)["loss"]


def write_recipe(data: Path, given: Path | None) -> tuple[Path, list[dict[str, Any]]]:
    """The recipe of this session beside teacher.yaml, and the sessions before it."""
    tree = yaml.safe_load((data / "teacher.yaml").read_text("utf-8"))
    sessions: list[dict[str, Any]] = []
    if given is not None:
        folder, index = snapshot.restore(given)
        start = data / "start"
        shutil.rmtree(start, ignore_errors=True)
        folder.save(start)
        sessions = index["sessions"]
        tree = {key: value for key, value in tree.items() if key not in ("model", "set", "tokenizer")}
        tree |= {"start": str(start.resolve()), "seed": len(sessions) + 1}
        tree["schedule"] |= {"warmup": WARMUP}
    path = data / "session.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), "utf-8")
    return path, sessions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--snapshot", type=Path)
    parser.add_argument("--decay", action="store_true")
    parser.add_argument("--only-encode", action="store_true")
    parser.add_argument("--workers", type=int, help="that encode; default: all cores")
    given = parser.parse_args()
    path, sessions = write_recipe(given.data, given.snapshot)
    workers = [] if given.workers is None else ["--workers", str(given.workers)]
    encode = [sys.executable, str(Path(__file__).with_name("encode.py")), str(path), *workers]
    subprocess.run(encode + ["--only-existing"] * given.only_encode, check=True)
    if given.only_encode:
        return
    recipe = load_recipe(path)
    run, reporter, backend = RunFolder(recipe.output), Reporter(), choose_backend(recipe)
    reporter.print(backend.summary)
    trainer = Session(recipe, run, prepare(recipe, run, reporter), backend, reporter, SINGLE_PROCESS)
    trainer.seconds, trainer.decay, trainer.sessions = 60 * given.minutes, given.decay, tuple(sessions)
    trainer.output = recipe.output / "snapshot"
    reporter.print(
        f"{trainer.config.cost().parameters:,} parameters, {trainer.data.steps_per_epoch(0):,} updates an epoch"
    )
    backend.compile_model(trainer.model)
    dry_run(trainer)
    trainer.start()
    trainer.end()


if __name__ == "__main__":
    main()
