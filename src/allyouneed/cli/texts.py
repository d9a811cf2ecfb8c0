"""How every command that uses a model goes about it: arguments, lines or a file in; answers out, in order, plain or in
JSON; a progress bar and notes beside them."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from allyouneed.cli.options import said
from allyouneed.cli.streams import count_lines, is_plain, json_text, lines, packer, progress, sink
from allyouneed.cli.unfinished import Unfinished
from allyouneed.errors import UserError

CHUNK = 512  # texts that are held at a time
FEW = 64  # and at first, so that there is soon something to see
NOTES = 20  # about the lines of a file so many are shown, and the others counted
FILE = re.compile(r"\S*\.(txt|tsv|csv|jsonl?|md|gz|zst)")  # what nobody would say, but call a file
A = TypeVar("A")
Question = tuple[str, str]  # where it stands, for messages, and the text


@dataclass(frozen=True)
class Use(Generic[A]):
    """`ask(questions, first)` answers some at once; `first` is the place of the first of them among all. `read` makes a
    question of a line. Where `blanks` is false, a blank line is no question and gets a blank line."""

    doing: str  # beside the progress bar
    ask: Callable[[list[Any], int], Sequence[A]]
    plain: Callable[[A], str]
    tree: Callable[[A], dict[str, Any]]
    read: Callable[[str], Any] = str
    blanks: bool = True
    chunk: int = CHUNK


@dataclass(frozen=True)
class Source:
    """What is asked: `typed` by somebody who waits for each answer, or `named` as arguments, or lines that are read.
    `name`: where they stand; None: nowhere, line by line. `path`: the file they are read from."""

    questions: Iterator[Question]
    total: int | None
    typed: bool = False
    named: bool = False
    name: str | None = None
    path: Path | None = None


def placed(
    texts: list[str] | None, input_: Path | None, output: Path | None
) -> tuple[list[str] | None, Path | None, Path | None]:
    """Two arguments of which the first is a file are an input and an output; `-` is a standard one."""
    if texts and len(texts) == 2 and input_ is None and output is None:
        first, second = texts
        both = bool(FILE.fullmatch(second)) and (os.path.isdir(first) or bool(FILE.fullmatch(first)))
        if first == "-" or os.path.isfile(first) or both:
            return None, Path(first), Path(second)
    for text in texts or ():
        if os.path.isfile(text):
            print(f"note: {text!r} is taken for a text; --input reads the file of this name", file=sys.stderr)
    return texts, input_, output


def source(texts: Sequence[str] | None, input_: Path | None, whole: bool = False) -> Source:
    if texts and input_ is not None:
        raise UserError("give texts or --input, not both")
    if texts and whole:
        raise UserError("--whole is for what is read from --input or standard input; an argument is one text anyway")
    if texts:
        return Source((("", text) for text in texts), len(texts), named=True)
    input_ = _unless_standard(input_)
    where = input_ or "standard input"
    found = ((f"{where}:{number}: ", line) for number, line in enumerate(lines(input_), 1))
    typed = input_ is None and sys.stdin is not None and sys.stdin.isatty()
    if typed:
        print("Type a text; Ctrl-D ends it." if whole else "Type a text and Enter; Ctrl-D ends.", file=sys.stderr)
    path = input_ or Path("/dev/stdin")
    if whole:
        return Source(_joined(found), 1, path=path)
    return Source(found, count_lines(input_), typed, name=str(where), path=path)


def _unless_standard(path: Path | None) -> Path | None:
    return None if path == Path("-") else path


def _joined(found: Iterator[Question]) -> Iterator[Question]:
    yield "", "\n".join(line for _, line in found)


def run(
    use: Use[A],
    texts: Sequence[str] | None,
    input_: Path | None = None,
    output: Path | None = None,
    as_json: bool = False,
    whole: bool = False,
    force: bool = False,
    restart: bool = False,
) -> None:
    """Ask all, and show the answers: a line in is a line out, or an object in JSON."""
    answer(use, source(texts, input_, whole), output, as_json, force, restart)


def answer(
    use: Use[A], given: Source, output: Path | None, as_json: bool, force: bool = False, restart: bool = False
) -> None:
    """`force`: replace a file that is there. `restart`: begin anew even if some of it is done."""
    output = _unless_standard(output)
    refuse_itself(given.path, output)
    if output is None or not is_plain(output) or given.typed or given.name is None:
        found = answers(use, given)
        show(use, found, output, as_json, given.total, force)
    else:
        use.ask([], 0)  # options that cannot be are refused before anything is read
        _written(use, given, output, as_json, force, restart)


def refuse_itself(read: Path | None, output: Path | None) -> None:
    """What is read is never written over, be it through a link: there would be no way back."""
    if output is not None and output.is_file() and read is not None and read.exists() and output.samefile(read):
        raise UserError(f"{output}: is the file that is read; name another file")


def show(
    use: Use[A],
    found: Iterator[tuple[str, A | None]],
    output: Path | None,
    as_json: bool,
    total: int | None = None,
    force: bool = False,
) -> None:
    output = _unless_standard(output)
    seen = output is None and sys.stdout.isatty()
    with sink(output, force) as write, notes_of_warnings():
        for text, one in progress(_tallied(found, as_json), total, use.doing, quiet=seen):
            write(_shown(use, text, one, as_json))
            if not as_json:
                show_notes(getattr(one, "notes", ()))


def _tallied(found: Iterator[tuple[str, A | None]], quiet: bool) -> Iterator[tuple[str, A | None]]:
    """All of them, and at last a note on how guessing went, where somebody guessed."""
    went: Any = None
    for text, one in found:
        guesses = getattr(one, "guesses", None)
        went = guesses if went is None else went if guesses is None else went + guesses
        yield text, one
    if went is not None and not quiet:
        show_notes([f"draft: {went}"])


def _shown(use: Use[A], text: str, one: A | None, as_json: bool) -> str:
    if one is None:
        return json_text({"text": text}) if as_json else text + "\n"
    return json_text(use.tree(one)) if as_json else use.plain(one)


def _written(use: Use[A], given: Source, output: Path, as_json: bool, force: bool, restart: bool) -> None:
    """Line after line into a file; after a kill, from where it was. What is held is one chunk of lines."""
    pack, told = packer(output), _Told(given.name or "")
    with Unfinished(output, said() | {"json": as_json}, force, restart) as work, notes_of_warnings():
        mark, seen, reader = work.mark, _Digest(), _Counted(given.questions)
        for _, text in islice(reader, mark.lines):
            seen.add(text)
        same = (reader.count, seen.text if mark.lines else "") == (mark.lines, mark.read)
        if not same or (mark.whole and next(reader, None)):
            raise UserError(
                f"{output}: {mark.lines:,} lines of it are done, but {given.name} does not begin with the lines "
                "that were read for them; --restart begins anew"
            )
        if mark.whole:
            work.name()
            return
        if mark.lines:
            show_notes([f"{output}: going on after line {mark.lines:,}"])
        number, asked, held = mark.lines, mark.asked, list[str]()
        found = _answers(use, replace(given, questions=reader), use.blanks, asked, number)
        try:
            for text, one in progress(_tallied(found, as_json), given.total, use.doing, done=number):
                held.append(_shown(use, text, one, as_json))
                seen.add(text)
                number, asked = number + 1, asked + (one is not None)
                told.add(number, () if as_json else getattr(one, "notes", ()))
                if number == reader.count:  # all that were read are answered
                    work.add(pack("".join(held).encode()), number, asked, seen.text)
                    held = []
        except UserError:  # about one line: those before it count
            if held and number < reader.count:
                work.add(pack("".join(held).encode()), number, asked, seen.text)
            raise
        work.finish(pack(b"") if not work.mark.size else b"")
    told.end()


class _Counted:
    """Counts what is read of it."""

    def __init__(self, questions: Iterator[Question]) -> None:
        self.questions, self.count = questions, 0

    def __iter__(self) -> Iterator[Question]:
        return self

    def __next__(self) -> Question:
        question = next(self.questions)
        self.count += 1
        return question


class _Digest:
    """Of lines: by it one knows whether they are the same again."""

    def __init__(self) -> None:
        self._seen = hashlib.sha256()

    def add(self, line: str) -> None:
        self._seen.update(line.encode("utf-8", "surrogatepass") + b"\n")

    @property
    def text(self) -> str:
        return self._seen.hexdigest()


class _Told:
    """Notes about lines of a file: a few are enough, and how many there are."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0

    def add(self, number: int, notes: Iterable[str]) -> None:
        for note in notes:
            self.count += 1
            if self.count <= NOTES:
                show_notes([f"{self.name}:{number}: {note}"])

    def end(self) -> None:
        if self.count > NOTES:
            show_notes([f"{self.name}: {self.count - NOTES:,} more notes; --json has them all"])


def answers(use: Use[A], given: Source) -> Iterator[tuple[str, A | None]]:
    """Each text and its answer, in order; none to a blank line that is no question."""
    use.ask([], 0)  # options that cannot be are refused before anything is read
    return _answers(use, given, use.blanks or given.named)


def _answers(use: Use[A], given: Source, blanks: bool, first: int = 0, done: int = 0) -> Iterator[tuple[str, A | None]]:
    """One bad text of many spoils none of those before it, and the message says where it stands. `first` questions in
    `done` lines were answered before: what is asked together depends on this alone."""
    while held := list(islice(given.questions, 1 if given.typed else min(use.chunk, max(FEW, done)))):
        asked = [(where, text) for where, text in held if blanks or text.strip()]
        try:
            found = iter(use.ask([use.read(text) for _, text in asked], first))
        except UserError:
            found = _one_by_one(use, asked, first)
        for _, text in held:
            yield text, next(found) if blanks or text.strip() else None
        first, done = first + len(asked), done + len(held)


def _one_by_one(use: Use[A], asked: list[Question], first: int) -> Iterator[A]:
    for number, (where, text) in enumerate(asked):
        try:
            yield from use.ask([use.read(text)], first + number)
        except UserError as error:
            raise UserError(f"{where}{error}") from None


def show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


@contextmanager
def notes_of_warnings() -> Iterator[None]:
    """What the library warns of is a note for whoever runs a command."""
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.simplefilter("always", UserWarning)

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if "allyouneed" in Path(filename).parts:
                show_notes([str(message)])
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = note
        yield


def one_line(text: str) -> str:
    r"""A text that goes on a line of its own: its line breaks are written as \n."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\\n")


def ranked(scored: bool, ways: Iterable[tuple[float, str]]) -> str:
    """A line for the best; or a line for each with its score, and an empty line after them."""
    shown = [f"{score:.4f}\t{text}" if scored else text for score, text in ways]
    return "\n".join(shown) + ("\n\n" if scored else "\n")
