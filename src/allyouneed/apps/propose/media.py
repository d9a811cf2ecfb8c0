"""Folders and tables of recordings or photographs: what is in them, and a recipe that learns it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape

from allyouneed.apps.propose.facts import ROLES, shown
from allyouneed.apps.propose.recipe import flow, seen_from, write_checked
from allyouneed.data.files.images import IMAGE_SUFFIXES, CaptionedImages, ImageFiles
from allyouneed.data.files.lines import inner_suffix, read_chunks
from allyouneed.data.files.media import METADATA, LabelledMedium, MediaFiles
from allyouneed.data.files.readers import TABLE_SUFFIXES, Report
from allyouneed.data.files.sounds import SOUND_SUFFIXES, SoundFiles, TranscribedSounds
from allyouneed.data.media.sound import RATE
from allyouneed.data.media.sound_input import SoundInput
from allyouneed.errors import UserError
from allyouneed.models import resolve
from allyouneed.training.planning.data_size import plan

SEEN = 2000  # entries of a folder that tell what is in it
HEARD = 200  # recordings that tell how long they are
LONGEST = 30.0  # seconds that a recipe reads without a word
MOST_LABELS = 0.25  # different values among all: more are texts
HELD_OUT = 0.1


class MediaKind(NamedTuple):
    """What a medium is read as, with labels and with texts, and what learns it."""

    suffixes: tuple[str, ...]
    files: tuple[type[MediaFiles], type[MediaFiles]]
    tasks: tuple[str, str]
    presets: tuple[str, str]
    commands: tuple[str, str]
    augment: str


KINDS = {
    "sound": MediaKind(
        SOUND_SUFFIXES,
        (SoundFiles, TranscribedSounds),
        ("audio-classification", "transcription"),
        ("audio-classifier-tiny", "ctc-tiny"),
        ("classify-audio", "transcribe"),
        "[speed, noise, spec-augment]",
    ),
    "image": MediaKind(
        IMAGE_SUFFIXES,
        (ImageFiles, CaptionedImages),
        ("image-classification", "captioning"),
        ("vit-tiny", "captioner-tiny"),
        ("classify-image", "caption"),
        "[crop]",
    ),
}


@dataclass
class MediaFacts:
    """Paths by role, and what they hold. `described`: texts, not labels."""

    noun: str
    places: dict[str, list[Path]]
    described: bool = False
    values: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    report: Report = field(default_factory=Report)

    @property
    def kind(self) -> MediaKind:
        return KINDS[self.noun]


def look_at_media(paths: Sequence[Path]) -> MediaFacts | None:
    """What is in folders or tables of recordings or photographs; None if they hold something else."""
    for noun, kind in KINDS.items():
        if paths and all(_holds(path, kind.suffixes) for path in paths):
            facts = MediaFacts(noun, _by_role(paths, kind.suffixes))
            _read(facts)
            return facts
    return None


def _holds(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Files of this kind in a folder, or in the beginning of a table; or the samples of an array."""
    if path.is_dir():
        return any(found.suffix.lower() in suffixes for found in islice(path.rglob("*"), SEEN))
    if not path.is_file() or inner_suffix(path) not in TABLE_SUFFIXES or path.suffix in (".sqlite", ".db", ".parquet"):
        return False
    start = next(read_chunks(path), b"")[: 1 << 16].decode("utf-8", "replace").lower()
    return any(line.count(suffix) for line in start.splitlines()[1:3] for suffix in suffixes)


def _by_role(paths: Sequence[Path], suffixes: tuple[str, ...]) -> dict[str, list[Path]]:
    """A folder of several sets has a folder for each."""
    found: dict[str, list[Path]] = {"train": [], "valid": [], "test": []}
    for path in paths:
        inner = [one for one in sorted(path.iterdir()) if one.is_dir()] if path.is_dir() else []
        roles = {one: ROLES.get(one.name.lower()) for one in inner}
        if "train" in roles.values() and not any((path / name).is_file() for name in METADATA):
            for one, role in roles.items():
                found[role or "train"].append(one)
        else:
            found[ROLES.get(path.stem.lower(), ROLES.get(path.stem.lower().split(".")[-1], "train"))].append(path)
    if not found["train"]:
        found["train"], found["test"] = found["valid"] or found["test"], []
    return found


def _read(facts: MediaFacts) -> None:
    path = facts.places["train"][0]
    beside = path.is_dir() and any(one.suffix == ".txt" for one in islice(path.rglob("*"), SEEN))
    table = not path.is_dir() or any((path / name).is_file() for name in METADATA)
    facts.described = beside or table
    examples = list(_examples(facts))
    facts.values = Counter(one.value for one in examples)
    few = len(facts.values) <= max(2, MOST_LABELS * len(examples)) and max(map(len, facts.values)) <= 40
    if table and few:
        facts.described = False
    if facts.noun == "sound":
        reader = SoundInput(seconds=3600)
        for one in examples[:: max(1, len(examples) // HEARD)]:
            try:
                facts.seconds.append(len(reader.read(one.content)) / RATE)
            except UserError as error:
                facts.report.drop("unreadable", one.file, one.line, str(error), one.value)


def _examples(facts: MediaFacts) -> Iterator[LabelledMedium]:
    files = facts.kind.files[facts.described]
    paths = facts.places["train"]
    found = list(files(path=tuple(paths)).read(facts.report))
    if not found:
        raise UserError(f"{paths[0]}: no usable {facts.noun}s\n{facts.report.text()}")
    yield from found


def propose_media(
    facts: MediaFacts, task: str | None, output: Path, start: str | None, force: bool, console: Console
) -> Path:
    """Say what is there and write the recipe."""
    if output.exists() and not force:
        raise UserError(f"{output}: exists; name another with --output, or overwrite it with --force")
    kind, count = facts.kind, facts.values.total()
    if task is not None and task not in kind.tasks:
        raise UserError(f"--task {task}: these are {facts.noun}s; choose {' or '.join(kind.tasks)}")
    described = facts.described if task is None else task == kind.tasks[1]
    chosen = kind.tasks[described]
    what = f"{count:,} {facts.noun}s with " + ("texts" if described else f"{len(facts.values)} labels")
    console.print(f"{', '.join(escape(path.name) for path in facts.places['train'])}: {what}")
    if facts.seconds:
        ordered = sorted(facts.seconds)
        middle = ordered[len(ordered) // 2]
        console.print(f"seconds: {ordered[0]:.2f} to {ordered[-1]:.2f}, median {middle:.2f} (of {len(ordered)})")
    for value, number in facts.values.most_common(8):
        console.print(f"  {number:>6,}  {escape(shown(value, 60))}")
    if facts.report.dropped:
        console.print(escape(facts.report.text()))
    write_checked(output, _recipe(facts, chosen, described, output, start))
    model = Path("runs") / output.stem / "model"
    console.print(f"task: [bold]{chosen}[/]; wrote {escape(str(output))}; next:", soft_wrap=True)
    console.print(f"  allyouneed train {escape(str(output))}", soft_wrap=True)
    console.print(f"  allyouneed {kind.commands[described]} --model {escape(str(model))} FILE", soft_wrap=True)
    return output


def _recipe(facts: MediaFacts, task: str, described: bool, output: Path, start: str | None) -> str:
    kind, count = facts.kind, facts.values.total()
    sizes = plan(count, count * 512, 512)  # an example is a row
    options = f"kind: {task}, augment: {kind.augment}"
    if facts.seconds and max(facts.seconds) > LONGEST:
        options += f", sound: {{seconds: {ceil(max(facts.seconds))}}}"
    if start is not None:
        place = str(resolve(start)) if not Path(start).exists() else os.path.relpath(start, output.parent)
        model = [f"start: {flow(place)}  # fine-tune this model"]
    else:
        model = [f"model: {kind.presets[described]}  # `allyouneed models` lists the others"]
        if described:
            model.append("tokenizer: {vocab: 300}  # bytes and a few pieces of words")
    peak = 0.0001 if start is not None else 0.001
    lines = [
        f"# Written by `allyouneed init`: {count:,} {facts.noun}s. Train with: allyouneed train {output}",
        "",
        f"task: {{{options}}}  # augment: random changes of training {facts.noun}s",
        *model,
        "data:",
        *_data(facts, output),
        f"schedule: {{kind: cosine, peak: {peak}}}  # the highest learning rate",
        f"epochs: {max(20, 2 * sizes.epochs)}  # passes over the data",
        f"validate: {{every: {sizes.every}, patience: {2 * sizes.patience}}}  # ends when nothing improves",
        f"save: {{every: {sizes.every}}}",
        f"output: runs/{output.stem}  # the model will be in runs/{output.stem}/model",
    ]
    return "\n".join(lines) + "\n"


def _data(facts: MediaFacts, output: Path) -> Iterator[str]:
    entries: dict[str, list[dict[str, Any]]] = {
        role: [{"path": seen_from(output, path)} for path in paths] for role, paths in facts.places.items()
    }
    comment = ""
    if not entries["valid"]:
        share = 1 - HELD_OUT
        entries["valid"] = [entry | {"portion": [share, 1]} for entry in entries["train"]]
        entries["train"] = [entry | {"portion": [0, share]} for entry in entries["train"]]
        comment = f"  # {HELD_OUT:.0%} of the training data"
    for role, listed in entries.items():
        if listed:
            yield f"  {role}: {flow(listed[0] if len(listed) == 1 else listed)}{comment if role == 'valid' else ''}"
