"""How every command that uses a model goes about it: arguments, lines or a file in; answers out, in order, plain or in
JSON; a progress bar and notes beside them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from allyouneed.cli.streams import count_lines, json_text, lines, progress, sink
from allyouneed.errors import UserError

CHUNK = 512  # texts that are held at a time
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
    """What is asked: `typed` by somebody who waits for each answer, or `named` as arguments, or lines that are read."""

    questions: Iterator[Question]
    total: int | None
    typed: bool = False
    named: bool = False


def source(texts: Sequence[str] | None, input_: Path | None, whole: bool = False) -> Source:
    if texts and input_:
        raise UserError("give texts or --input, not both")
    if texts and whole:
        raise UserError("--whole is for what is read from --input or standard input; an argument is one text anyway")
    if texts:
        return Source((("", text) for text in texts), len(texts), named=True)
    where = input_ or "standard input"
    found = ((f"{where}:{number}: ", line) for number, line in enumerate(lines(input_), 1))
    typed = input_ is None and sys.stdin is not None and sys.stdin.isatty()
    if typed:
        print("Type a text; Ctrl-D ends it." if whole else "Type a text and Enter; Ctrl-D ends.", file=sys.stderr)
    return Source(_joined(found), 1) if whole else Source(found, count_lines(input_), typed)


def _joined(found: Iterator[Question]) -> Iterator[Question]:
    yield "", "\n".join(line for _, line in found)


def run(
    use: Use[A],
    texts: Sequence[str] | None,
    input_: Path | None = None,
    output: Path | None = None,
    as_json: bool = False,
    whole: bool = False,
) -> None:
    """Ask all, and show the answers: a line in is a line out, or an object in JSON."""
    given = source(texts, input_, whole)
    found = answers(use, given)
    show(use, found, output, as_json, given.total)


def show(
    use: Use[A],
    found: Iterator[tuple[str, A | None]],
    output: Path | None,
    as_json: bool,
    total: int | None = None,
) -> None:
    with sink(output) as write, notes_of_warnings():
        for text, one in progress(found, total, use.doing, quiet=output is None):
            if one is None:
                write(json_text({"text": text}) if as_json else text + "\n")
                continue
            write(json_text(use.tree(one)) if as_json else use.plain(one))
            if not as_json:
                show_notes(getattr(one, "notes", ()))


def answers(use: Use[A], given: Source) -> Iterator[tuple[str, A | None]]:
    """Each text and its answer, in order; none to a blank line that is no question."""
    use.ask([], 0)  # options that cannot be are refused before anything is read
    return _answers(use, given, use.blanks or given.named)


def _answers(use: Use[A], given: Source, blanks: bool) -> Iterator[tuple[str, A | None]]:
    """One bad text of many spoils none of those before it, and the message says where it stands."""
    first = 0
    while held := list(islice(given.questions, 1 if given.typed else use.chunk)):
        asked = [(where, text) for where, text in held if blanks or text.strip()]
        try:
            found = iter(use.ask([use.read(text) for _, text in asked], first))
        except UserError:
            found = _one_by_one(use, asked, first)
        for _, text in held:
            yield text, next(found) if blanks or text.strip() else None
        first += len(asked)


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
