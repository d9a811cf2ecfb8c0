"""Train in forked processes that die at chosen file events, resume, and compare with a run that was never killed.

    python kill_points.py RECIPE FOLDER PLANS      PLANS: JSON, a list of lists of events

An event is what a process does to files below its output folder: open for writing, write (killed halfway through),
fsync, rename, remove, truncate, make or remove a folder. Event n kills before it takes place. Each plan is a chain: die
at its first event, resume, die at the next one, …, resume to the end. An event is a number or, as [name, n], the n-th
after the first rename to that name. Prints JSON: the number of events of a whole run, and what differs, by plan.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from rich.console import Console

from allyouneed.files import sha256
from allyouneed.training import Recipe, load_recipe, train
from allyouneed.training.loop import Trainer
from allyouneed.training.reporting.log import read_log
from allyouneed.training.validate import Scorer

KILLED = 99
BEST = 6  # the step with the lowest validation loss
CHANGES = {"os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir"}


class Events:
    """Counts events, and ends the process at one of them."""

    def __init__(self, folder: Path, last: int | None) -> None:
        self.folder, self.last, self.count = f"{folder}{os.sep}", last, 0
        self.renames: dict[str, int] = {}

    def happen(self, halfway: Callable[[], object] = lambda: None) -> None:
        self.count += 1
        if self.count == self.last:
            halfway()
            os._exit(KILLED)

    def install(self) -> None:
        sys.addaudithook(self._audit)
        fsync, save, file = os.fsync, safetensors.torch.save_file, io.open

        def counted_fsync(handle: int) -> None:
            self.happen()
            fsync(handle)

        def counted_save(tensors: dict[str, torch.Tensor], path: Any, *rest: Any) -> None:
            def half() -> None:
                save(tensors, path, *rest)
                os.truncate(path, os.path.getsize(path) // 2)

            self.happen(half)  # safetensors writes without Python
            save(tensors, path, *rest)

        def counted_open(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            found = file(path, mode, *rest, **options)
            if mode.strip("bt") != "r" and self._is_inside(path):
                write = found.write

                def counted_write(data: Any) -> Any:
                    def half() -> None:
                        write(data[: len(data) // 2])
                        found.flush()

                    self.happen(half)
                    return write(data)

                found.write = counted_write
            return found

        os.fsync, safetensors.torch.save_file = counted_fsync, counted_save
        io.open = builtins.open = counted_open  # pathlib uses io.open

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if flags & (os.O_WRONLY | os.O_RDWR) and self._is_inside(path):
                self.happen()
        elif event in CHANGES and (self._is_inside(args[0]) or args[-1] not in (-1, None)):  # or relative to a folder
            self.happen()
            if event == "os.rename":
                self.renames.setdefault(Path(args[1]).name, self.count)

    def _is_inside(self, path: Any) -> bool:
        return isinstance(path, str | Path) and str(path).startswith(self.folder)


def run(recipe: Recipe, output: Path, last: int | None) -> tuple[int, dict[str, Any]]:
    """Train in a child process: its exit code, and the events it counted."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            events = Events(output, last)
            events.install()
            said = io.StringIO()
            train(recipe.model_copy(update={"output": output}), console=Console(file=said))
            os.write(write, json.dumps({"count": events.count, "renames": events.renames}).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        counted = json.loads(pipe.read() or "{}")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), counted


def outcome(output: Path) -> dict[str, Any]:
    """All that must not depend on kills."""
    result = json.loads((output / "result.json").read_text())
    saved = output / "checkpoints"
    return {
        "weights": sha256(output / "model" / "model.safetensors"),
        "result": {key: result[key] for key in ("steps", "weights", "tokens", "scores")},
        "log": read_log(output / "log.jsonl"),
        "best": json.loads((saved / "best.json").read_text()),
        "last": json.loads((saved / "last.json").read_text()),
        "hidden": [path.name for path in (*output.iterdir(), *saved.iterdir()) if path.name.startswith(".w")],
    }


def differences(recipe: Recipe, output: Path, plan: list[int], expected: dict[str, Any]) -> list[str]:
    for event in plan:
        code, _ = run(recipe, output, event)
        if code not in (KILLED, 0):
            return [f"died with code {code} before event {event}"]
    code, _ = run(recipe, output, None)
    if code:
        return [f"cannot be resumed: code {code}"]
    found = outcome(output)
    return [f"{key}: {found[key]} instead of {value}" for key, value in expected.items() if found[key] != value]


def validate(trainer: Trainer, real: Callable[[Trainer], bool] = Trainer._validate) -> bool:
    """Validate, with losses that are chosen instead of computed."""
    loss = 1.0 + abs(trainer.state.step - BEST)
    Scorer.evaluate = lambda *_, **options: {"loss": loss}  # type: ignore[method-assign]
    return real(trainer)


def main(path: str, folder: str, text: str) -> None:
    recipe, base = load_recipe(path), Path(folder)
    torch.optim.AdamW([torch.zeros(1)])  # imports half of torch: once, not in every child
    Trainer._validate = validate  # type: ignore[method-assign]
    code, events = run(recipe, base / "whole", None)
    assert code == 0
    expected, wrong = outcome(base / "whole"), {}
    for number, chosen in enumerate(json.loads(text)):
        output = base / str(number)
        plan = [1 + n % events["count"] if isinstance(n, int) else events["renames"][n[0]] + n[1] for n in chosen]
        if found := differences(recipe, output, plan, expected):
            wrong[json.dumps(plan)] = found
        else:
            shutil.rmtree(output)
    print(json.dumps({"events": events["count"], "wrong": wrong}))


if __name__ == "__main__":
    main(*sys.argv[1:])
