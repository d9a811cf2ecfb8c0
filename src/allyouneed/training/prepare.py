"""Prepare a run from its recipe: the run folder, tokenizers, token stores.

recipe.yaml     the resolved recipe, with all defaults and the checksums of the data
tokenizer/      learned once, from the training texts
labels.json     the labels of the training data, for tasks that have them
languages.json  the language detector of a multilingual model
data/           the encoded examples
checkpoints/    see checkpoints.py
log.jsonl       every step
model/          the trained model
report.html     what the run did, for people
result.json     the result, written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from allyouneed.data.batches.packing import Batches, Items
from allyouneed.data.batches.store import InputHashes, Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.readers import Example, Files, Report
from allyouneed.data.language_detection import LanguageDetector
from allyouneed.data.tokenizers.base import MASK, Vocabularies
from allyouneed.errors import UserError
from allyouneed.files import leftovers, temporary_name, write_folder, write_text
from allyouneed.files.reading import parse_yaml, read_json, read_json_value
from allyouneed.files.system import lock
from allyouneed.folder import LANGUAGES, read_about, token_types
from allyouneed.infer.retrieval.neighbour_cache import with_neighbours
from allyouneed.infer.retrieval.retriever import Retriever
from allyouneed.interop.load import about, load, vocabularies, weight_files
from allyouneed.tasks.feedback.dpo import DPO, Reference, reference_path
from allyouneed.tasks.language.causal_lm import DocumentItems
from allyouneed.tasks.reranking import Reranking
from allyouneed.tasks.task import VALIDATION_SEED, Task
from allyouneed.training.backend import choose_backend
from allyouneed.training.optim.schedule import PAPER_WARMUP
from allyouneed.training.planning.data_size import ROWS, check_left_out, choose_rows
from allyouneed.training.recipe.recipe import Recipe
from allyouneed.training.recipe.sections import SPLITS
from allyouneed.training.reporting.page import PAGE
from allyouneed.training.reporting.progress import Reporter

# recipe keys that may change when a run is resumed: duration, validation, saving, hardware
FREE_KEYS = {"steps", "epochs", "validate", "save", "average", "decoding", "output", "tensorboard"}
FREE_KEYS |= {"device", "compile", "precision", "parallel", "checkpoint_activations", "name", "description", "licence"}
FREE_KEYS |= {"plugins"}  # the config names their parts
LOCK = ".lock"
STOPPED = "stopped.json"
HASH = "hash.json"  # of the tokenizer, beside it


class RunFolder:
    """The folder of a run and its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe, self.result, self.stopped = folder / "recipe.yaml", folder / "result.json", folder / STOPPED
        self.tokenizer, self.data, self.checkpoints = folder / "tokenizer", folder / "data", folder / "checkpoints"
        self.log, self.model, self.labels = folder / "log.jsonl", folder / "model", folder / "labels.json"
        self.languages, self.page = folder / LANGUAGES, folder / PAGE

    @property
    def has_started(self) -> bool:
        return self.recipe.exists()

    def mark_stopped(self, step: int) -> None:
        """Write that the run was stopped by a signal and has saved: a job script sees it, whatever exit code torchrun
        makes of that. The next start deletes it."""
        write_text(self.stopped, json.dumps({"step": step}) + "\n")

    def read_result(self) -> dict[str, Any] | None:
        """result.json of a finished run."""
        try:
            found = json.loads(self.result.read_text(encoding="utf-8"))  # scores may be NaN
            kinds = {"asked": dict, "steps": int, "scores": dict}
            is_result = isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in kinds.items())
            return found if is_result and (self.model / "config.json").exists() else None
        except (OSError, ValueError, RecursionError):
            return None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create and lock the folder; raise if it is in use or holds something else."""
        try:
            if self.folder.exists() and not self.has_started:
                known = {self.data, self.folder / LOCK, *leftovers(self.recipe)}
                if any(path not in known for path in self.folder.iterdir()):
                    raise UserError(f"{self.folder}: exists and is not a run; set another output")
            self.data.mkdir(parents=True, exist_ok=True)
            handle = (self.folder / LOCK).open("w")
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be used: {error.strerror}; set another output") from None
        with handle:
            if not lock(handle):
                raise UserError(f"{self.folder}: another process is training here; wait, or set another output")
            self._remove_leftovers()
            self.stopped.unlink(missing_ok=True)
            yield

    @property
    def _folders(self) -> tuple[Path, ...]:
        """All but the token stores, which are found by content."""
        return self.tokenizer, self.checkpoints, self.model, self.folder / "tensorboard"

    def _remove_leftovers(self) -> None:
        """What a killed run was writing."""
        for path in (*self._folders, self.recipe, self.result, self.labels, self.languages, self.page):
            for found in leftovers(path):
                if found.is_dir():
                    shutil.rmtree(found, ignore_errors=True)
                else:
                    found.unlink()

    def clear(self) -> None:
        """Delete the run but not the token stores. The recipe is deleted last, because it identifies the folder as a
        run."""
        if not self.has_started:
            return
        for path in self._folders:
            if path.exists():
                doomed = temporary_name(path)
                path.rename(doomed)  # first: a partly deleted folder must never be used
                shutil.rmtree(doomed, ignore_errors=True)
        bad = self.folder / "bad-batches.jsonl"
        for path in (self.page, self.result, self.log, self.labels, self.languages, bad, self.recipe):
            path.unlink(missing_ok=True)

    def _read_recipe(self) -> dict[str, Any]:
        try:
            found, reason = parse_yaml(self.recipe.read_text(encoding="utf-8")), "not the recipe of a run"
        except (OSError, ValueError) as error:
            found, reason = None, str(error).splitlines()[0]
        if not isinstance(found, dict) or not isinstance(found.get("data"), dict):
            raise UserError(
                f"{self.recipe}: cannot be read ({reason}), so the run cannot be resumed; restore it, use --restart to "
                "start over, or set another output"
            )
        return found

    @property
    def trained(self) -> bool:
        """Whether there are checkpoints or a model."""
        return self.model.exists() or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    @property
    def rows(self) -> int | None:
        """Rows of a batch that the run has recorded."""
        return self._read_recipe().get("batch", {}).get("rows") if self.has_started else None

    def set_rows(self, rows: int) -> None:
        """Record the rows of a batch, which the data has decided."""
        if self.has_started and self.rows != rows:
            tree = self._read_recipe()
            self._write_recipe(tree | {"batch": tree["batch"] | {"rows": rows}})

    def open(self, tree: dict[str, Any]) -> None:
        """Start or resume a run of this recipe; raise if the folder holds a run of another recipe that has trained. A
        run that failed before its first step may be changed."""
        if self.has_started:
            before = self._read_recipe()
            if tree["batch"]["rows"] is None and self.trained:  # the data has decided, or an earlier version
                tree["batch"] = tree["batch"] | {"rows": before.get("batch", {}).get("rows", ROWS)}
            changed = differences(*_same_defaults(_fixed_keys(before), _fixed_keys(tree)))
            if changed and not self.trained:
                self.clear()
            elif changed:
                raise UserError(
                    f"{self.folder}: holds a run of another recipe; undo the changes to resume it, use --restart to "
                    "start over, or set another output. Changed:\n  " + "\n  ".join(changed)
                )
        self._write_recipe(tree)

    def _write_recipe(self, tree: dict[str, Any]) -> None:
        try:
            text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
            write_text(self.recipe, text)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written: {error.strerror}; set another output") from None


def _same_defaults(before: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Recipes of earlier versions record the paper's warm-up as the default; it is kept (`Trainer._schedule`). How the
    weights began is in the checkpoint, and earlier presets did not name it."""
    before, now = _without_init(before), _without_init(now)
    old, new = before.get("schedule"), now["schedule"]
    if isinstance(old, dict) and new.get("warmup", 0) is None and old.get("warmup") == PAPER_WARMUP:
        before = before | {"schedule": old | {"warmup": None}}
    return before, now


def _without_init(tree: dict[str, Any]) -> dict[str, Any]:
    """The recipe without the init of its model where it is the default, or was the same before it could be balanced."""
    model = tree.get("model")
    if not isinstance(model, dict):
        return tree
    init = model.get("init", "xavier")
    init = {"kind": init} if isinstance(init, str) else {key: value for key, value in init.items() if key != "balanced"}
    return tree | {"model": model | {"init": init}}


def _fixed_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """What must not change. Files are compared by content, not by path."""
    kept = {key: value for key, value in tree.items() if key not in FREE_KEYS | {"start", "retrieval"}}
    if isinstance(tree.get("model"), dict):
        kept["model"] = {key: value for key, value in tree["model"].items() if key != "vocab"}
    if isinstance(tree.get("task"), dict):
        task: Any = Task.find(tree["task"]["kind"])
        kept["task"] = {key: value for key, value in tree["task"].items() if key not in task.free_keys}
    kept["data"] = {key: value for key, value in tree["data"].items() if key in ("filters", "max_tokens", "sha256")}
    return kept


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = list(dict.fromkeys([*before, *now]))
        return [
            line
            for key in keys
            for line in differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
        ]
    if before == now:
        return []
    if path.startswith("data.sha256."):
        return [f"the contents of {path.removeprefix('data.sha256.')}"]
    return [f"{path}: {before!r} before, {now!r} now"]


def resolve(recipe: Recipe, hashes: InputHashes) -> dict[str, Any]:
    """The resolved recipe with the checksums of all files it reads; raise if they differ from its `data.sha256`."""
    sums: dict[str, str] = {}
    for split in SPLITS:
        for number, path in enumerate(p for entry in getattr(recipe.data, split) for p in entry.files()):
            sums[f"{split}[{number}] {path.name}"] = hashes.sha256(path)
        for number, entry in enumerate(getattr(recipe.data, split)):
            sums |= {f"{split}[{number}] {name}": digest for name, digest in entry.named_inputs().items()}
    if recipe.retrieval is not None:
        meta = recipe.retrieval.index / "meta.json"  # holds the checksums of all other files
        if not meta.is_file():
            raise UserError(f"{meta.parent}: not an index (no meta.json); build one with `allyouneed index`")
        sums["index meta.json"] = hashes.sha256(meta)
    folders = {"start": recipe.start, "reward": getattr(recipe.task, "reward", None)}
    for name, folder in folders.items():
        for file in () if folder is None else weight_files(folder):
            sums[f"{name} {file.name}"] = hashes.sha256(file)
    wrong = [name for name, expected in recipe.data.sha256.items() if sums.get(name) != expected]
    if wrong:
        raise UserError(
            "the data does not match data.sha256 of the recipe: " + ", ".join(wrong) + "; use the original files, or "
            "remove data.sha256"
        )
    tree = recipe.resolved()
    tree["data"] = tree["data"] | {"sha256": sums}
    return tree


@dataclass(frozen=True)
class PreparedData:
    vocabularies: Vocabularies | None  # None: a task without texts
    labels: list[str]
    train: Batches
    spare: Batches  # a second reader, for lookups while the first is used by the prefetch thread
    examples: int  # kept for training
    valid: Batches | None
    valid_examples: list[Any]
    test: Batches | None
    test_examples: list[Any]
    retriever: Retriever | None = None
    detector: LanguageDetector | None = None
    rows: int = ROWS  # of a batch
    report: Report = field(default_factory=Report)  # of the training data


def prepare(recipe: Recipe, run: RunFolder, reporter: Reporter, processes: int = 1) -> PreparedData:
    """Learn the tokenizer and encode the data, or reuse those of an earlier start. `processes`: that share a batch."""
    data, task, report = recipe.data, recipe.task, reporter.print
    run.data.mkdir(parents=True, exist_ok=True)
    retriever = _retriever(recipe)
    vocabularies = None
    if task.has_texts:
        found = _vocabularies(recipe, run, report, retriever)
        _check_unchanged(found, run)
        vocabularies = found.with_types(token_types(recipe.model_for(found)))
    labels = _labels(recipe, run, report)
    encoding = task.encoding(vocabularies, labels, None if task.splits_documents else recipe.max_tokens)
    what = task.file_type.examples
    store = Store.open_or_build(
        run.data, data.train, data.filters, encoding, reporter.counter(f"training {what} encoded")
    )
    report(f"training {what}: {store.report.text()}")
    if not run.trained and (warning := check_left_out(recipe, store.report)) is not None:
        report(warning)
    capacities = tuple(min(side, recipe.max_tokens) for side in recipe.capacities)
    reference = _reference(recipe)

    def items(store: Store, seed: int, name: str) -> Items:
        found = task.items(store, vocabularies, capacities, seed)
        if reference is not None:
            if store.fingerprint not in reference.known:
                report(f"{name} {what}: computing the log-probabilities of the reference")
            return reference.apply(found)
        if isinstance(task, Reranking) and task.hard is not None:
            from allyouneed.infer.retrieval.hard_negatives import with_hard_negatives

            report(f"{name} {what}: searching for texts that are hard to tell apart")
            return with_hard_negatives(found, task.hard, recipe.device)  # type: ignore[arg-type]
        if retriever is None:
            return found
        assert isinstance(found, DocumentItems)
        config: Any = recipe.model_for(vocabularies, labels)
        counter = reporter.counter(f"{name} chunks retrieved")
        return with_neighbours(found, retriever, config.neighbours, run.data, counter)

    def batches(rows: int) -> Batches:
        return task.batches(items(store, recipe.seed, "training"), recipe.capacities, rows, recipe.seed)

    rows = run.rows or choose_rows(recipe, batches, report, processes)
    run.set_rows(rows)

    def validation_batches(files: Sequence[Files], name: str) -> Batches | None:
        if not files:
            return None
        held = Store.open_or_build(run.data, files, Filters(), encoding)
        if held.report.dropped:
            report(f"{name} {what}, for the loss: {held.report.text()}")
        return task.validation_batches(items(held, VALIDATION_SEED, name), recipe.max_tokens)

    return PreparedData(
        vocabularies,
        labels,
        batches(rows),
        batches(rows),
        len(store),
        validation_batches(data.valid, "validation"),
        _read(data.valid, f"validation {what}", report),
        validation_batches(data.test, "test"),
        _read(data.test, f"test {what}", report),
        retriever,
        _detector(recipe, run),
        rows,
        store.report,
    )


def _retriever(recipe: Recipe) -> Retriever | None:
    if recipe.retrieval is None:
        return None
    given = recipe.retrieval
    found = Retriever(given.index, given.encoder, str(choose_backend(recipe).device))
    tokenizer = found.index.tokenizer if recipe.start is None else vocabularies(recipe.start).target
    found.check(recipe.model_for(None), tokenizer, str(recipe.start or "the model"))
    return found


def _reference(recipe: Recipe) -> Reference | None:
    """The frozen model that preferences are learned against."""
    if not isinstance(recipe.task, DPO):
        return None
    return Reference(load(reference_path(recipe.task.reference), choose_backend(recipe).device).model)


def _vocabularies(
    recipe: Recipe, run: RunFolder, report: Callable[[str], None], retriever: Retriever | None
) -> Vocabularies:
    if recipe.start is not None:
        found = vocabularies(recipe.start)
        for special in recipe.task.specials():
            if special == MASK and found.target.has_mask:  # under any name
                continue
            try:
                found.target.special(special)
            except UserError:
                raise UserError(
                    f"{recipe.start}: the tokenizer has no {special}, which {recipe.task_kind} needs; start from a "
                    f"model whose tokenizer was trained with specials: [{special}]"
                ) from None
        return found
    if (run.tokenizer / "tokenizer.json").exists():
        return Vocabularies.load(run.tokenizer)
    if retriever is not None:
        found = Vocabularies(retriever.index.tokenizer, retriever.index.tokenizer)
        write_folder(run.tokenizer, lambda folder: _save_tokenizer(found, folder))
        return found
    report("learning the tokenizer")
    found = recipe.task.learn_vocabularies(recipe.tokenizer, recipe.data.train, recipe.data.filters)
    for note in dict.fromkeys([*found.source.notes, *found.target.notes]):
        report(note)
    write_folder(run.tokenizer, lambda folder: _save_tokenizer(found, folder))
    return found


def _save_tokenizer(vocabularies: Vocabularies, folder: Path) -> None:
    vocabularies.save(folder)
    write_text(folder / HASH, json.dumps({"sha256": vocabularies.hash}) + "\n")


def _check_unchanged(vocabularies: Vocabularies, run: RunFolder) -> None:
    """Refuse to resume with another tokenizer than the run has been trained with: its ids mean other texts."""
    known = [read_json(run.tokenizer, HASH, needed=False).get("sha256")]
    for checkpoint in sorted(run.checkpoints.glob("step-*"))[-1:]:
        with suppress(UserError):  # damaged: reported when it is resumed from
            known.append(read_about(checkpoint)["tokenizer_hash"])
    if any(found not in (None, vocabularies.hash) for found in known):
        raise UserError(
            f"{run.folder}: the tokenizer is not the one that this run has been trained with; restore it, or use "
            "--restart to start over"
        )


def _detector(recipe: Recipe, run: RunFolder) -> LanguageDetector | None:
    """The detector of the start model, or one trained on the languages of the training data."""
    if recipe.start is not None and (recipe.start / LANGUAGES).exists():
        return LanguageDetector.load(recipe.start / LANGUAGES)
    if run.languages.exists():
        return LanguageDetector.load(run.languages)
    found = LanguageDetector.from_files(recipe.data.train)
    if found is not None:
        found.save(run.languages)
    return found


def _labels(recipe: Recipe, run: RunFolder, report: Callable[[str], None]) -> list[str]:
    """The labels of the start model if they include those of the training data, else the latter."""
    if run.labels.exists():
        known = read_json_value(run.folder, run.labels.name)
        if not isinstance(known, list) or not all(isinstance(label, str) for label in known):
            raise UserError(f"{run.labels}: not a list of labels; use --restart to start over")
        return known
    found = recipe.task.labels(recipe.data.train)
    if not found:
        return []
    if recipe.start is not None:
        before: list[str] = about(recipe.start).get("labels", [])
        found = before if set(found) <= set(before) else found
    report(f"{len(found)} labels: {', '.join(found[:20])}{', …' if len(found) > 20 else ''}")
    write_text(run.labels, json.dumps(found, ensure_ascii=False) + "\n")
    return found


def _read(files: Sequence[Files], what: str, print_line: Callable[[str], None]) -> list[Example]:
    report = Report()
    found = [example for entry in files for example in entry.read(report)]
    if report.dropped:
        print_line(f"{what}, for predictions: {report.text()}")
    return found
