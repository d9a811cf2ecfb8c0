"""From a recipe to everything it names: the run's folder, the tokenizers, the token stores.

recipe.yaml     the whole recipe, every default written, with the checksums of the data
tokenizer/      learnt once, from the training texts
labels.json     the labels of the training data, for tasks that have them
languages.json  what tells the languages of the training data apart, where it names some
data/           the examples as token ids
checkpoints/    see checkpoints.py
log.jsonl       every step
model/          the result
result.json     how it ended, written last
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from allyouneed.files import write_folder, write_text
from allyouneed.folder import LANGUAGES
from allyouneed.infer.retrieval.neighbour_cache import with_neighbours
from allyouneed.infer.retrieval.retriever import Retriever
from allyouneed.interop.load import about, vocabularies, weight_files
from allyouneed.tasks.causal_lm import DocumentItems
from allyouneed.tasks.task import VALIDATION_SEED
from allyouneed.train.cuda.machine import choose
from allyouneed.train.progress import Reporter
from allyouneed.train.recipe import SPLITS, Recipe

# What may differ between the recipe a run was begun with and the one it goes on with: how far it goes, how it is looked
# at, and what the machine decides.
FREE = {"steps", "epochs", "validate", "save", "average", "decoding", "output", "tensorboard"}
FREE |= {"device", "compile", "precision", "parallel", "checkpoint_activations", "name", "description", "licence"}
LOCK = ".lock"


class Run:
    """The folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe, self.result = folder / "recipe.yaml", folder / "result.json"
        self.tokenizer, self.data, self.checkpoints = folder / "tokenizer", folder / "data", folder / "checkpoints"
        self.log, self.model, self.labels = folder / "log.jsonl", folder / "model", folder / "labels.json"
        self.languages = folder / LANGUAGES

    @property
    def begun(self) -> bool:
        return self.recipe.exists()

    def finished(self) -> dict[str, Any] | None:
        """result.json of a run that reached its end."""
        try:
            found: dict[str, Any] = json.loads(self.result.read_text(encoding="utf-8"))
            return found if (self.model / "config.json").exists() else None
        except (OSError, ValueError):
            return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Take the folder, making it if need be; refuse one that is somebody else's or in use."""
        known = {self.data.name, LOCK}
        try:
            if self.folder.exists() and not self.begun and any(p.name not in known for p in self.folder.iterdir()):
                raise UserError(f"{self.folder}: is in the way and holds no run; set another output")
            self.data.mkdir(parents=True, exist_ok=True)
            handle = (self.folder / LOCK).open("w")
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be used: {error.strerror}; set another output") from None
        with handle:
            try:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go of by the system, however this ends
            except ImportError:
                pass  # no such locks on this system
            except OSError:
                raise UserError(
                    f"{self.folder}: another process is training here; wait or set another output"
                ) from None
            yield

    def clear(self) -> None:
        """Forget the run, but not the token stores: they are found by their content. The recipe goes last: until then
        the folder is known as a run's."""
        if not self.begun:
            return
        for path in (self.tokenizer, self.checkpoints, self.model, self.folder / "tensorboard"):
            shutil.rmtree(path, ignore_errors=True)
        bad = self.folder / "bad-batches.jsonl"
        for path in (self.result, self.log, self.labels, self.languages, bad, self.recipe):
            path.unlink(missing_ok=True)

    @property
    def trained(self) -> bool:
        """There is something to lose."""
        return self.model.exists() or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def open(self, tree: dict[str, Any]) -> None:
        """Begin a run of this recipe, or go on with it; refuse when another was begun here. One that never came to
        its first step, for something was wrong with it, may be mended."""
        if self.begun:
            before = yaml.safe_load(self.recipe.read_text(encoding="utf-8"))
            changed = differences(_fixed(before), _fixed(tree))
            if changed and not self.trained:
                self.clear()
            elif changed:
                raise UserError(
                    f"{self.folder}: holds a run of another recipe; to go on with it undo the changes, to begin anew "
                    "use --restart, or set another output. Changed:\n  " + "\n  ".join(changed)
                )
        try:
            text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
            write_text(self.recipe, text)
        except OSError as error:
            raise UserError(f"{self.folder}: cannot be written: {error.strerror}; set another output") from None


def _fixed(tree: dict[str, Any]) -> dict[str, Any]:
    """What must not change. Files are compared by what they hold, not by where they lie."""
    kept = {key: value for key, value in tree.items() if key not in FREE | {"start", "retrieval"}}
    if "model" in tree:
        kept["model"] = {key: value for key, value in tree["model"].items() if key != "vocab"}
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
    """The recipe as it is saved, with the checksums of all files it reads; refuse files it does not expect."""
    sums: dict[str, str] = {}
    for split in SPLITS:
        for number, path in enumerate(p for entry in getattr(recipe.data, split) for p in entry.files()):
            sums[f"{split}[{number}] {path.name}"] = hashes.sha256(path)
    if recipe.retrieval is not None:
        meta = recipe.retrieval.index / "meta.json"  # which has the checksums of all other files
        if not meta.is_file():
            raise UserError(f"{meta.parent}: no index (it has no meta.json); make one with `allyouneed index`")
        sums["index meta.json"] = hashes.sha256(meta)
    if recipe.start is not None:
        for file in weight_files(recipe.start):
            sums[f"start {file.name}"] = hashes.sha256(file)
    wrong = [name for name, expected in recipe.data.sha256.items() if sums.get(name) != expected]
    if wrong:
        raise UserError(
            "the data is not what the recipe was written for: " + ", ".join(wrong) + " differ(s) from data.sha256; "
            "get the right files, or remove data.sha256 from the recipe"
        )
    tree = recipe.resolved()
    tree["data"] = tree["data"] | {"sha256": sums}
    return tree


@dataclass(frozen=True)
class Prepared:
    vocabularies: Vocabularies
    labels: list[str]
    train: Batches
    spare: Batches  # the same again, for questions while the first is being read in another thread
    examples: int  # kept for training
    valid: Batches | None
    valid_examples: list[Any]
    test: Batches | None
    test_examples: list[Any]
    retriever: Retriever | None = None
    detector: LanguageDetector | None = None


def prepare(recipe: Recipe, run: Run, reporter: Reporter) -> Prepared:
    """Learn the tokenizer and encode the data, or find both as an earlier start left them."""
    data, task, say = recipe.data, recipe.task, reporter.say
    retriever = _retriever(recipe)
    vocabularies = _vocabularies(recipe, run, say, retriever)
    labels = _labels(recipe, run, say)
    encoding = task.encoding(vocabularies, labels, None if task.splits_documents else recipe.max_tokens)
    what = task.file_type.examples
    store = Store.open_or_build(
        run.data, data.train, data.filters, encoding, reporter.counter(f"training {what} encoded")
    )
    say(f"training {what}: {store.report.text()}")
    room = tuple(min(side, recipe.max_tokens) for side in recipe.room)

    def items(store: Store, seed: int, name: str) -> Items:
        found = task.items(store, vocabularies, room, seed)
        if retriever is None:
            return found
        assert isinstance(found, DocumentItems)
        config: Any = recipe.model_for(vocabularies, labels)
        counter = reporter.counter(f"{name} chunks looked up")
        return with_neighbours(found, retriever, config.neighbours, run.data, counter)

    def batches() -> Batches:
        return task.batches(items(store, recipe.seed, "training"), recipe.room, recipe.batch.rows, recipe.seed)

    def validation_batches(files: Sequence[Files], name: str) -> Batches | None:
        if not files:
            return None
        held = Store.open_or_build(run.data, files, Filters(), encoding)
        if held.report.dropped:
            say(f"{name} {what}, for the loss: {held.report.text()}")
        return task.validation_batches(items(held, VALIDATION_SEED, name), recipe.max_tokens)

    return Prepared(
        vocabularies,
        labels,
        batches(),
        batches(),
        len(store),
        validation_batches(data.valid, "validation"),
        _read(data.valid, f"validation {what}", say),
        validation_batches(data.test, "test"),
        _read(data.test, f"test {what}", say),
        retriever,
        _detector(recipe, run),
    )


def _retriever(recipe: Recipe) -> Retriever | None:
    if recipe.retrieval is None:
        return None
    given = recipe.retrieval
    found = Retriever(given.index, given.encoder, str(choose(recipe).device))
    tokenizer = found.index.tokenizer if recipe.start is None else vocabularies(recipe.start).target
    found.check(recipe.model_for(None), tokenizer, str(recipe.start or "the model"))
    return found


def _vocabularies(recipe: Recipe, run: Run, say: Callable[[str], None], retriever: Retriever | None) -> Vocabularies:
    if recipe.start is not None:
        found = vocabularies(recipe.start)
        for special in recipe.task.specials():
            if special == MASK and found.target.has_mask:  # by whatever name
                continue
            try:
                found.target.special(special)
            except UserError:
                raise UserError(
                    f"{recipe.start}: its tokenizer has no {special}, which {recipe.task_kind} needs; start from a "
                    f"model whose tokenizer was trained with specials: [{special}]"
                ) from None
        return found
    if (run.tokenizer / "tokenizer.json").exists():
        return Vocabularies.load(run.tokenizer)
    if retriever is not None:
        found = Vocabularies(retriever.index.tokenizer, retriever.index.tokenizer)
        write_folder(run.tokenizer, found.save)
        return found
    say("learning the tokenizer")
    found = Vocabularies.train(recipe.tokenizer, recipe.data.train, recipe.data.filters, recipe.task.specials())
    for note in dict.fromkeys([*found.source.notes, *found.target.notes]):
        say(note)
    write_folder(run.tokenizer, found.save)
    return found


def _detector(recipe: Recipe, run: Run) -> LanguageDetector | None:
    """That of the model it starts from, or one of the training data's languages."""
    if recipe.start is not None and (recipe.start / LANGUAGES).exists():
        return LanguageDetector.load(recipe.start / LANGUAGES)
    if run.languages.exists():
        return LanguageDetector.load(run.languages)
    found = LanguageDetector.from_files(recipe.data.train)
    if found is not None:
        found.save(run.languages)
    return found


def _labels(recipe: Recipe, run: Run, say: Callable[[str], None]) -> list[str]:
    """Those of the training data; those of the model it starts from, if they are among them."""
    if run.labels.exists():
        known: list[str] = json.loads(run.labels.read_text(encoding="utf-8"))
        return known
    found = recipe.task.labels(recipe.data.train)
    if not found:
        return []
    if recipe.start is not None:
        before: list[str] = about(recipe.start).get("labels", [])
        found = before if set(found) <= set(before) else found
    say(f"{len(found)} labels: {', '.join(found[:20])}{', …' if len(found) > 20 else ''}")
    write_text(run.labels, json.dumps(found, ensure_ascii=False) + "\n")
    return found


def _read(files: Sequence[Files], what: str, say: Callable[[str], None]) -> list[Example]:
    report = Report()
    found = [example for entry in files for example in entry.read(report)]
    if report.dropped:
        say(f"{what}, for answers: {report.text()}")
    return found
