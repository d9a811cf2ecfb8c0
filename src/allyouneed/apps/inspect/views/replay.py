"""The view "replay": the checkpoints of a training run beside its loss curve, and any other view of each of them.

Runs are known by their names in one folder (`allyouneed serve --runs FOLDER`). A name is looked up among those that are
there; it never becomes part of a path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from pydantic import Field

import allyouneed
from allyouneed.apps.inspect.views import find_view, view
from allyouneed.apps.inspect.views.document import Document, document
from allyouneed.apps.inspect.views.model import Index, Latest, Text, ViewModel, ViewRequest
from allyouneed.errors import UserError, near
from allyouneed.interop.load import about
from allyouneed.training.checkpoints import Checkpoint, Checkpoints, TrainState

LOADED = 3  # models of checkpoints that are kept, the latest used
MOST = 16  # checkpoints that answer for the overview; of more, evenly spaced ones
POINTS = 1000  # of the loss curve
MOST_RUNS = 1000
LOG, CHECKPOINTS = "log.jsonl", "checkpoints"
NESTED = ("replay", "compare", "anatomy", "lessons")  # views that are not of one model


class ReplayRequest(ViewRequest):
    """Without `step`: the run, its curve and the answer of each checkpoint to `text` (or to the input in `request`).
    With `step`: the document of `view` for that checkpoint. Without `run`: the list of runs."""

    run: Text | None = None
    step: Index | None = None
    view: Text = "use"
    text: Text | None = None
    request: Annotated[dict[str, Any], Field(default_factory=dict)]

    def asked(self) -> dict[str, Any]:
        return ({} if self.text is None else {"text": self.text}) | self.request


class Runs:
    """The runs of a folder, by name; or one run, if the folder is that of a run. Their models answer one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: Latest[ViewModel] = Latest(LOADED)
        self._lock = Lock()

    def all(self) -> dict[str, Path]:
        if _is_run(self.folder):
            return {self.folder.resolve().name: self.folder}
        try:
            found = sorted(path for path in self.folder.iterdir() if _is_run(path))
        except OSError as error:
            raise UserError(f"the folder of runs cannot be read: {error.strerror}") from None
        return {path.name: path for path in found[:MOST_RUNS]}

    def find(self, name: str) -> Path:
        known = self.all()
        if name not in known:
            raise UserError(f"unknown run {name[:60]!r}{near(name[:60], known)} (known: {', '.join(known) or 'none'})")
        return known[name]

    def model(self, name: str, checkpoint: Checkpoint) -> ViewModel:
        """The predictor of a checkpoint; call it with the lock held."""

        def load() -> ViewModel:
            return ViewModel(f"{name}, step {checkpoint.step:,}", allyouneed.load(checkpoint.path, "cpu"))

        return self._loaded.get((name, checkpoint.step), load)

    def document(self, name: str, checkpoint: Checkpoint, view_name: str, request: Mapping[str, Any]) -> Document:
        """The document of a view of one checkpoint."""
        found = find_view(view_name)
        if view_name in NESTED or found.many or not found.models:
            raise UserError(f"view {view_name!r}: not of one model; open it by itself")
        asked = found.request.parse(request)
        try:
            with self._lock:
                return found.build(self.model(name, checkpoint), asked)
        except UserError as error:
            raise UserError(str(error).replace(str(checkpoint.path), f"step {checkpoint.step}")) from None


@view("replay", ReplayRequest, runs=True)
def replay(runs: Runs | None, request: ReplayRequest) -> Document:
    if runs is None:
        raise UserError("no runs: start the server with `--runs FOLDER`, the folder of your training runs")
    if request.run is None:
        listed = [{"name": name, "checkpoints": len(_checkpoints(path))} for name, path in runs.all().items()]
        return document("replay", None, request, "allyouneed.load(checkpoint)", {"runs": listed})
    path = runs.find(request.run)
    checkpoints = _checkpoints(path)
    if not checkpoints:
        raise UserError(f"{request.run}: no checkpoints yet")
    if request.step is not None:
        chosen = next((one for one in checkpoints if one.step == request.step), None)
        if chosen is None:
            known = ", ".join(str(one.step) for one in checkpoints)
            raise UserError(f"{request.run}: no checkpoint of step {request.step} (there are: {known})")
        inner = runs.document(request.run, chosen, request.view, request.asked())
        folder = f"{request.run}/{CHECKPOINTS}/{chosen.path.name}"
        line = inner["python"].replace("model.", f"allyouneed.load({folder!r}).", 1)
        return document("replay", None, request, line, {"document": inner, "step": chosen.step})
    asked = request.asked()
    data: Document = {
        "run": request.run,
        "runs": [{"name": name} for name in runs.all()],
        "curve": read_curve(path / LOG),
        "checkpoints": [_about(one) for one in checkpoints],
        "task": _task(checkpoints[-1]),
        "answers": [],
    }
    if asked:
        shown = _evenly(checkpoints, MOST)
        data["answers"] = [_answer(runs, request.run, one, asked) for one in shown]
    line = f"[allyouneed.load(one) for one in sorted(Path({request.run!r}, 'checkpoints').glob('step-*'))]"
    return document("replay", None, request, line, data)


# --- a run on disk --------------------------------------------------------------------------------------------------


def _is_run(path: Path) -> bool:
    return (path / CHECKPOINTS).is_dir()


def _checkpoints(path: Path) -> list[Checkpoint]:
    return Checkpoints(path / CHECKPOINTS, 0, lambda text: None, clean=False).all()


def _about(checkpoint: Checkpoint) -> Document:
    try:
        state = TrainState.from_tree(checkpoint.read_trainer(check=False)["standing"])
    except UserError as error:
        return {"step": checkpoint.step, "damaged": str(error).rpartition(": ")[2]}
    best = state.best_step == checkpoint.step
    return {"step": checkpoint.step, "tokens": state.tokens, "scores": _finite(state.scores), "best": best}


def _task(checkpoint: Checkpoint) -> str:
    try:
        return str(about(checkpoint.path)["task"]["kind"])
    except (UserError, KeyError, TypeError):
        return ""


def _evenly(items: Sequence[Checkpoint], most: int) -> list[Checkpoint]:
    """At most `most` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]


def _answer(runs: Runs, name: str, checkpoint: Checkpoint, asked: Mapping[str, Any]) -> Document:
    try:
        found = runs.document(name, checkpoint, "use", asked)["data"]
    except UserError as error:
        return {"step": checkpoint.step, "error": str(error)}
    parts = found.get("parts") or []
    return {
        "step": checkpoint.step,
        "answer": found["answer"],
        "log_prob": sum(part["log_prob"] for part in parts) if parts else None,
        "tokens": [[one["text"] for one in part["tokens"]] for part in parts],
        "log_probs": [part["log_probs"] for part in parts],
        "scores": found.get("scores"),
    }


def read_curve(path: Path) -> Document:
    """Loss by step, and the validations. Where there are more than `POINTS` steps, the mean of neighbours. A damaged
    last line, of a run that is being written, is left out."""
    steps: list[tuple[int, float]] = []
    valid: list[Document] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    except OSError:
        lines = []
    for line in lines:
        try:
            entry = json.loads(line)
            step = int(entry["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(entry.get("valid"), dict):
            valid.append({"step": step, "scores": _finite(entry["valid"])})
        elif isinstance(entry.get("loss"), int | float) and math.isfinite(entry["loss"]):
            steps.append((step, float(entry["loss"])))
    each = max(1, math.ceil(len(steps) / POINTS))
    groups = [steps[at : at + each] for at in range(0, len(steps), each)]
    return {
        "steps": [group[-1][0] for group in groups],
        "loss": [sum(loss for _, loss in group) / len(group) for group in groups],
        "mean_of": each,
        "valid": valid,
    }


def _finite(scores: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(v) for name, v in scores.items() if isinstance(v, int | float) and math.isfinite(v)}
