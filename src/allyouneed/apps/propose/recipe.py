"""The recipe: the choice and the sizes of the data as commented YAML."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from allyouneed.apps.propose.choice import Choice, task_type
from allyouneed.apps.propose.facts import DataFacts, FileFacts, tokens_in
from allyouneed.data.files.formats.read import CELLS
from allyouneed.data.files.lines import inner_suffix
from allyouneed.errors import UserError
from allyouneed.files import write_text
from allyouneed.infer.predictors.registry import TASKS
from allyouneed.models import resolve
from allyouneed.training import load_recipe
from allyouneed.training.planning.data_size import Plan, plan

LENGTHS = (32, 64, 128, 256, 512)  # of the longest example, in tokens
HELD_OUT = 0.1  # of the training data, where there is no validation data; less of much data
MOST_HELD_OUT = 2000
VOCABULARY = ((100_000, 1000), (1_000_000, 2000), (10_000_000, 4000), (1 << 62, 8000))  # below so many characters
# a preset of each kind of model, and what makes it small: two cores learn thousands of texts in minutes
STACK = "{0}[0].repeat=2", "{0}[0].mixer.heads=4", "{0}[0].channel.hidden=512"
PRESETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "encoder": ("bert-base", ("width=128", *(change.format("encoder") for change in STACK))),
    "decoder": ("gpt2", ("width=128", *(change.format("decoder") for change in STACK))),
    "encoder-decoder": ("transformer-tiny", ()),
}


@dataclass(frozen=True)
class Written:
    path: Path
    text: str
    plan: Plan
    notes: tuple[str, ...]
    command: str  # that uses the model


def write_recipe(facts: DataFacts, choice: Choice, output: Path, start: str | None, force: bool) -> Written:
    """Write it, and check that it is valid."""
    if output.exists() and not force:
        raise UserError(f"{output}: exists; name another with --output, or overwrite it with --force")
    column_lengths = [sorted(column.lengths) for column in choice.texts]
    most = [lengths[min(len(lengths) - 1, len(lengths) * 99 // 100)] for lengths in column_lengths if lengths]
    example = " ".join(text for column in choice.texts for text in column.examples)
    sides = 1 if task_type(choice.task).sides == 1 else 2
    longest = tokens_in(sum(most) if sides == 1 else max(most), example)
    splits = task_type(choice.task)().splits_documents
    limit = 128 if splits else next((size for size in LENGTHS if longest <= size), LENGTHS[-1])
    characters = sum(map(sum, column_lengths))
    sizes = plan(facts.rows, max(1, tokens_in(characters, example) // sides), 512)
    notes = list(_notes(facts, choice, None if splits else longest))
    text = _text(facts, choice, output, start, sizes, limit, splits, characters, notes)
    write_checked(output, text)
    model = Path("runs") / output.stem / "model"
    used = f"allyouneed {TASKS[choice.task].commands[0]} --model {model} …"
    return Written(output, text, sizes, tuple(notes), used)


def write_checked(output: Path, text: str) -> None:
    """Write a recipe; one that is not valid is taken back."""
    before = output.read_bytes() if output.exists() else None
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, text)
    try:
        load_recipe(output)
    except UserError:
        if before is None:
            output.unlink()
        else:
            output.write_bytes(before)
        raise


def _notes(facts: DataFacts, choice: Choice, longest: int | None) -> Iterator[str]:
    if longest is not None and longest > LENGTHS[-1]:
        yield f"the longest texts have about {longest:,} tokens; more than {LENGTHS[-1]} are left out"
    for one in facts.files:
        if one.file.encoding:
            yield f"{one.file.path.name} is not UTF-8: read as {one.note}; check the examples above"
    for first, second, count in facts.leaks:
        yield f"{count:,} texts are in {first} and in {second} data: scores on them are too good"
    if choice.label is not None and choice.task == "classification":
        counts = choice.label.counts.most_common()
        if counts[0][1] > 0.8 * choice.label.filled:
            share = counts[0][1] / choice.label.filled
            yield f"{share:.0%} of the labels are {counts[0][0]!r}: watch macro-f1, not accuracy"
        if counts[-1][1] < 5:
            yield f"label {counts[-1][0]!r} has only {counts[-1][1]} examples"


def _text(
    facts: DataFacts,
    choice: Choice,
    output: Path,
    start: str | None,
    sizes: Plan,
    limit: int,
    splits: bool,
    characters: int,
    notes: list[str],
) -> str:
    task: Any = {"kind": choice.task, **choice.options} if choice.options else choice.task
    lines = [
        f"# Written by `allyouneed init` for {', '.join(one.file.path.name for one in facts.files[:5])}.",
        f"# {choice.why[0].upper()}{choice.why[1:]}. Train with: allyouneed train {output}",
        *(f"# Note: {note}." for note in notes),
        "",
        f"task: {flow(task)}" + (f"  # others that fit: {', '.join(choice.others)}" if choice.others else ""),
    ]
    if start is not None:
        folder = str(resolve(start)) if not Path(start).exists() else os.path.relpath(start, output.parent)
        lines += [f"start: {flow(folder)}  # fine-tune this model; its tokenizer is used"]
    else:
        kind = task_type(choice.task).kinds[0]
        preset, changes = PRESETS[kind]
        changes = (*changes, f"dropout={sizes.dropout:g}")
        lines += [
            f"model: {preset}  # `allyouneed models` lists the others; `start: FOLDER` fine-tunes a trained model",
            f"set: {flow(list(changes))}  # a small version; without these, the sizes of the paper",
        ]
        vocabulary = next(size for most, size in VOCABULARY if characters < most)
        lines += [f"tokenizer: {{vocab: {vocabulary}}}"]
    lines += ["data:", *_data(facts, choice, output)]
    lines += [f"  max_tokens: {limit}  # longer texts are {'split' if splits else 'left out'}"]
    if any(one.duplicates for one in facts.of("train")):
        lines += ["  filters: {duplicates: true}  # some rows are repeated"]
    peak = 0.0001 if start is not None else 0.001
    lines += [
        f"schedule: {{kind: cosine, peak: {peak}}}  # the highest learning rate",
        f"epochs: {max(3, sizes.epochs // 3) if start else sizes.epochs}  # passes over the data",
        f"validate: {{every: {sizes.every}, patience: {sizes.patience}}}  # ends when nothing improves",
        f"save: {{every: {sizes.every}}}",
        f"output: runs/{output.stem}  # the model will be in runs/{output.stem}/model",
    ]
    return "\n".join(lines) + "\n"


def _data(facts: DataFacts, choice: Choice, output: Path) -> Iterator[str]:
    """The entries of every set; without validation data, a part of the training data."""
    entries = {role: list(_entries(facts.of(role), choice, output)) for role in ("train", "valid", "test")}
    comments = dict.fromkeys(entries, "")
    if not entries["valid"]:
        share = 1 - round(min(HELD_OUT, MOST_HELD_OUT / max(1, facts.rows)), 4)
        entries["valid"] = [entry | {"portion": [share, 1]} for entry in entries["train"]]
        entries["train"] = [entry | {"portion": [0, share]} for entry in entries["train"]]
        comments["valid"] = f"  # {1 - share:.3g} of the training data, chosen by a hash of the texts"
    for role, listed in entries.items():
        if len(listed) == 1:
            yield f"  {role}: {flow(listed[0])}{comments[role]}"
        elif listed:
            yield f"  {role}:{comments[role]}"
            yield from (f"    - {flow(entry)}" for entry in listed)


def _entries(files: list[FileFacts], choice: Choice, output: Path) -> Iterator[dict[str, Any]]:
    """Each file, or each two aligned ones, with what differs from the defaults."""
    known = task_type(choice.task).files.model_fields
    both = bool(choice.aligned)
    for one, other in zip(files[:: 1 + both], files[1 :: 1 + both] if both else files, strict=False):
        places = {"source": one, "target": other} if both else {"path": one}
        entry: dict[str, Any] = {name: seen_from(output, file.file.path) for name, file in places.items()}
        usual = inner_suffix(one.file) in (".csv", *CELLS)
        header = None if one.header is None or one.header == usual else one.header
        read_as = {"encoding": one.file.encoding, "separator": one.file.separator, "header": header}
        read_as |= {"table": one.file.table}
        read_as |= {"quotes": one.quotes}
        yield entry | choice.entry | {key: v for key, v in read_as.items() if v is not None and key in known}


def seen_from(output: Path, file: Path) -> str:
    """The path of a file in the recipe."""
    near = os.path.relpath(file, output.parent)
    return str(file.absolute()) if near.startswith("../..") else near


def flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
    return str(text).removesuffix("...\n").strip()
