"""The loop of every command that uses a model: arguments, lines or a file in; results out in order, plain or JSON."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from allyouneed.cli.commands import recorded_options
from allyouneed.cli.messages import show_notes, warnings_as_notes
from allyouneed.cli.options import FileOptions
from allyouneed.cli.text.resumable_output import ResumableOutput
from allyouneed.cli.text.shards import Shard, check_siblings, files_below
from allyouneed.cli.text.streams import ReadLine, compressor, end_of, is_regular, json_text, open_output, progress
from allyouneed.cli.text.text_input import (
    InputSource,
    Item,
    check_not_input,
    check_output_folder,
    open_input,
    unless_standard,
)
from allyouneed.errors import UserError

CHUNK = 512  # texts per call of the model
FIRST_CHUNK = 64  # of the first call, so that results appear soon
NOTES = 20  # notes about the lines of a file that are printed; the rest are counted
R = TypeVar("R")


@dataclass(frozen=True)
class TextCommand(Generic[R]):
    """`predict(inputs, first)`: the results of some inputs; `first` is the index of the first of them among all.
    `parse` turns a line into an input. With `blanks` false, a blank line gives a blank line and is not predicted.
    `copies`: makes a function that sees every line that is read, in order, and says which ones are copied."""

    doing: str  # label of the progress bar
    predict: Callable[[list[Any], int], Sequence[R]]
    plain: Callable[[R], str]
    tree: Callable[[R], dict[str, Any]]
    parse: Callable[[str], Any] = str
    blanks: bool = True
    chunk: int = CHUNK
    pack: Callable[[R], bytes] | None = None  # a result as a row of `width` float32, for an output that ends in .npy
    width: int = 0
    copies: Callable[[], Callable[[str], bool]] | None = None


@dataclass(frozen=True)
class Paired:
    """An input and its prediction."""

    given: Any
    found: Any

    @property
    def notes(self) -> list[str]:
        return list(getattr(self.found, "notes", ()))


def paired(
    doing: str,
    find: Callable[[list[Any]], Sequence[Any]],
    plain: Callable[[Paired], str],
    tree: Callable[[Paired], dict[str, Any]],
    blanks: bool = False,
    **more: Any,
) -> TextCommand[Paired]:
    """A command whose predictions, `find(inputs)`, are shown with their inputs."""

    def predict(given: list[Any], first: int) -> list[Paired]:
        return [Paired(one, found) for one, found in zip(given, find(given), strict=True)]

    return TextCommand(doing, predict, plain, tree, blanks=blanks, **more)


def run(
    command: TextCommand[R],
    texts: Sequence[str] | None,
    files: FileOptions,
    as_json: bool = False,
    suffixes: tuple[str, ...] = (),
) -> None:
    """Predict all texts and write the results: one line, or one JSON object, per line of input. `suffixes`: of the
    files of a folder, if the texts are paths; otherwise a folder is processed file by file."""
    if files.input_ is not None and files.input_.is_dir() and not suffixes:
        _run_folder(command, files.input_, files, as_json)
    else:
        process(command, open_input(texts, files, suffixes), files, as_json)


def _run_folder(command: TextCommand[R], folder: Path, files: FileOptions, as_json: bool) -> None:
    """Each file of a folder becomes a file of the same name in the output folder; a shard takes every N-th of them."""
    output = check_output_folder(folder, files.output)
    shard = Shard(1, 1) if files.shard is None else Shard.parse(files.shard)
    for number, path in enumerate(files_below(folder)):
        if number % shard.count == shard.index - 1:
            target = output / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            one = replace(files, input_=path, output=target, shard=None)
            process(command, open_input(None, one), one, as_json, keep=True)


def process(
    command: TextCommand[R], source: InputSource, files: FileOptions, as_json: bool, keep: bool = False
) -> None:
    """`keep`: keep the journal of a complete output, so that the same command can be run again."""
    output = unless_standard(files.output)
    shard = None if files.shard is None else Shard.parse(files.shard)
    if output is not None and shard is not None:
        output = shard.output(output)
    check_not_input(source.path, output)
    if command.copies is not None and source.name is not None:
        source = replace(source, items=_mark_copied(source.items, command.copies()))
    if output is None or not is_regular(output) or source.interactive or source.name is None:
        found = results(command, source)
        name = None if source.interactive else source.name
        write_results(command, found, output, as_json, source.total, files.force, name)
        return
    command.predict([], 0)  # refuses invalid options before any input is read
    settings = recorded_options() | {"json": as_json}
    if shard is not None and files.output is not None:
        settings |= {"shard": f"{shard.index}/{shard.count}", "lines": source.total}
        check_siblings(shard, files.output, settings)
    with ResumableOutput(output, settings, files.force, files.restart, keep or shard is not None) as out:
        _write_resumable(command, source, out, as_json)


def write_results(
    command: TextCommand[R],
    found: Iterator[tuple[str, R | None]],
    output: Path | None,
    as_json: bool,
    total: int | None = None,
    force: bool = False,
    name: str | None = None,
) -> None:
    """`name`: of what is read line by line; the doubts about it are counted, not printed."""
    output = unless_standard(output)
    on_terminal = output is None and sys.stdout.isatty()
    doubts = LineNotes(name or "")
    with open_output(output, force) as write, warnings_as_notes():
        for text, one in progress(_with_draft_note(found, as_json), total, command.doing, quiet=on_terminal):
            write(_result_text(command, text, one, as_json))
            if not as_json:
                notes = list(getattr(one, "notes", ()))
                counted = [note for note in notes if name is not None and hasattr(note, "kind")]
                show_notes(note for note in notes if note not in counted)
                doubts.add(0, counted)
    doubts.end()


def _with_draft_note(found: Iterator[tuple[str, R | None]], quiet: bool) -> Iterator[tuple[str, R | None]]:
    """Pass the results on; at the end, a note on the acceptance rate of speculative decoding."""
    total: Any = None
    for text, one in found:
        guesses = getattr(one, "guesses", None)
        total = guesses if total is None else total if guesses is None else total + guesses
        yield text, one
    if total is not None and not quiet:
        show_notes([f"draft: {total}"])


def _result_text(command: TextCommand[R], text: str, one: R | None, as_json: bool) -> str:
    if as_json:
        return json_text({"text": text} if one is None else command.tree(one))
    plain, end = text + "\n" if one is None else command.plain(one), end_of(text)
    return plain if end == "\n" else plain.replace("\n", end)


def _write_resumable(command: TextCommand[R], source: InputSource, out: ResumableOutput, as_json: bool) -> None:
    """Write line after line to a file, resuming an interrupted run. At most one chunk of lines is in memory."""
    output, notes = out.path, LineNotes(source.name or "")
    pack = None if output.suffix != ".npy" else command.pack
    compress = compressor(output)

    def encode(text: str, one: R | None) -> bytes:
        return _result_text(command, text, one, as_json).encode() if pack is None or one is None else pack(one)

    span = range(source.total or 0) if source.span is None else source.span
    before = sum(command.blanks or bool(text.strip()) for _, text in islice(source.items, span.start))
    items = source.items if source.span is None else islice(source.items, len(span))
    with warnings_as_notes():
        point, digest, reader = out.point, _LineDigest(), _CountingReader(items)
        for _, text in islice(reader, point.lines):
            digest.add(text)
        same = (reader.count, digest.text if point.lines else "") == (point.lines, point.read)
        if not same or (point.whole and next(reader, None)):
            raise UserError(
                f"{output}: {point.lines:,} lines are done, but the first lines of {source.name} have changed since; "
                "--restart begins again"
            )
        if point.whole:
            out.rename()
            if out.keep:
                show_notes([f"{output}: is complete already"])
            return
        if point.lines:
            show_notes([f"{output}: resuming after line {point.lines:,}"])
        if pack is not None and not point.size:
            out.add(pack_head(command, len(span)), 0, 0, "")
        number, predicted, held = point.lines, point.asked, list[bytes]()
        found = _predict_all(command, replace(source, items=reader), command.blanks, before + predicted, number)
        total = None if source.total is None else len(span)
        try:
            for text, one in progress(_with_draft_note(found, as_json), total, command.doing, done=number):
                held.append(encode(text, one))
                digest.add(text)
                number, predicted = number + 1, predicted + (one is not None)
                notes.add(span.start + number, () if as_json else getattr(one, "notes", ()))
                if number == reader.count:  # every line read so far has its result
                    out.add(compress(b"".join(held)), number, predicted, digest.text)
                    held = []
        except UserError:  # about one line; keep the results before it
            if held and number < reader.count:
                out.add(compress(b"".join(held)), number, predicted, digest.text)
            raise
        if total is not None and number != total and (pack is not None or source.span is not None):
            raise UserError(f"{source.name}: has changed while it was read; --restart begins again")
        out.finish(compress(b"") if not out.point.size else b"")
    notes.end()


def pack_head(command: TextCommand[R], rows: int) -> bytes:
    """The header of a NumPy file with `rows` rows."""
    import io

    import numpy as np

    head = io.BytesIO()
    shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, command.width)}
    np.lib.format.write_array_header_1_0(head, shape)
    return head.getvalue()


class _CountingReader:
    """Counts the items that are read."""

    def __init__(self, items: Iterator[Item]) -> None:
        self.items, self.count = items, 0

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item = next(self.items)
        self.count += 1
        return item


class _LineDigest:
    """A digest of lines, to recognize the same input on resume."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, line: str) -> None:
        self._hash.update(line.encode("utf-8", "surrogatepass") + b"\n")

    @property
    def text(self) -> str:
        return self._hash.hexdigest()


class LineNotes:
    """Prints the first notes about the lines that are read and counts the rest. Notes with a `kind` (doubts about a
    result, too frequent to print) are only counted."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.doubts = name, 0, Counter[str]()

    def add(self, number: int | None, notes: Iterable[str]) -> None:
        """`number`: of the line, if it is read line by line."""
        for note in notes:
            if kind := getattr(note, "kind", None):
                self.doubts[kind] += 1
                continue
            self.count += 1
            if self.count <= NOTES:
                show_notes([f"{self.name}: {note}" if number is None else f"{self.name}:{number}: {note}"])

    def end(self) -> None:
        if self.count > NOTES:
            show_notes([f"{self.name}: {self.count - NOTES:,} more notes; --json includes all of them"])
        if self.doubts:
            kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.doubts.items()))
            show_notes([f"{self.name}: some results are doubtful ({kinds}); --json says which and why"])


class Copied(ReadLine):
    """A line that is written as it is read."""


def _mark_copied(items: Iterator[Item], copies: Callable[[str], bool]) -> Iterator[Item]:
    for where, line in items:
        yield where, Copied(line, end_of(line)) if copies(line) else line


class LineHistory:
    """Remembers the last lines of an input: `count` of them precede each chunk, also after a resume."""

    def __init__(self, count: int) -> None:
        self.count, self.lines = count, dict[int, str]()

    def watch(self, copies: Callable[[str], bool] | None) -> Callable[[str], bool]:
        """`TextCommand.copies` of a new input: sees every line as it is read; one that is copied counts as blank."""
        self.lines.clear()
        numbers = itertools.count()

        def see(line: str) -> bool:
            copied = copies is not None and copies(line)
            self.add(["" if copied else line], next(numbers))
            return copied

        return see

    def add(self, lines: Iterable[str], first: int) -> None:
        for number, line in enumerate(lines, first):
            self.lines[number] = line
            self.lines.pop(number - CHUNK - self.count, None)  # a chunk is read before it is predicted

    def before(self, first: int) -> list[str]:
        """The lines before line `first`."""
        return [self.lines[n] for n in range(first - self.count, first) if n in self.lines]


def results(command: TextCommand[R], source: InputSource) -> Iterator[tuple[str, R | None]]:
    """Each text and its result, in order; None for a blank line that is not predicted."""
    command.predict([], 0)  # refuses invalid options before any input is read
    return _predict_all(command, source, command.blanks or source.arguments)


def _predict_all(
    command: TextCommand[R], source: InputSource, blanks: bool, first: int = 0, done: int = 0
) -> Iterator[tuple[str, R | None]]:
    """Predict in chunks; of a pipe, what has arrived. After an error a chunk is repeated text by text: those before the
    bad one keep their result, and the message names its line. `first` inputs in `done` lines precede; for a file, the
    chunks depend on nothing else."""
    while held := source.arrived(1 if source.interactive else min(command.chunk, max(FIRST_CHUNK, done))):
        kept = [(where, text) for where, text in held if blanks or text.strip()]
        try:
            found = iter(command.predict([command.parse(text) for _, text in kept], first))
        except UserError:
            found = _predict_one_by_one(command, kept, first)
        for _, text in held:
            yield text, next(found) if blanks or text.strip() else None
        first, done = first + len(kept), done + len(held)


def _predict_one_by_one(command: TextCommand[R], items: list[Item], first: int) -> Iterator[R]:
    for number, (where, text) in enumerate(items):
        try:
            yield from command.predict([command.parse(text)], first + number)
        except UserError as error:
            raise UserError(f"{where}{error}") from None


def one_line(text: str) -> str:
    r"""The text on one line: line breaks are written as \n."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\\n")


def ranked_lines(with_scores: bool, candidates: Iterable[tuple[float, str]]) -> str:
    """A line per candidate; with scores, `score<TAB>text` lines and an empty line after them."""
    lines = [f"{score:.4f}\t{text}" if with_scores else text for score, text in candidates]
    return "\n".join(lines) + ("\n\n" if with_scores else "\n")
