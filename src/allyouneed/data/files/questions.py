"""Questions about a text, and their answers in it: SQuAD's JSON, JSON rows, or tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from allyouneed.data.files.lines import inner_suffix, read_chunks
from allyouneed.data.files.objects import is_unicode
from allyouneed.data.files.readers import JSON_SUFFIXES, TABLE_SUFFIXES, Paths, Report, expand_paths
from allyouneed.data.files.tables import Column, TableFiles, read_objects, read_rows
from allyouneed.errors import UserError

UNANSWERABLE = ("is_impossible",)  # keys of SQuAD 2


class AskedText(NamedTuple):
    """A question, the text that may answer it, and its answers: `answers[n]` at character `begins[n]`. Without any, the
    text does not answer it."""

    question: str
    context: str
    answers: tuple[str, ...]
    begins: tuple[int, ...]
    file: str
    line: int

    @property
    def texts(self) -> tuple[str, ...]:
        return self.question, self.context

    @property
    def metadata(self) -> str:
        return repr((self.answers, self.begins))


class QuestionFiles(TableFiles):
    """Files of questions: SQuAD's JSON (1.1 or 2.0, CMRC 2018), JSON rows, or tables. An answer is a part of the text;
    its place, where it is not given, is the first. A question without answers is unanswerable."""

    examples: ClassVar[str] = "questions"
    kind: Literal["questions"] = "questions"
    path: Paths
    """A file or a list of files."""
    columns: tuple[Column, Column, Column] | None = None
    """Columns of question, text and answer, by index from 0 or by name; default: by `keys`, or in this order."""
    keys: tuple[str, str, str] = ("question", "context", "answers")
    """The same names for JSON rows, and for a header without `columns`. An answer is a text, `{text, start}`, or a list
    of these; or Hugging Face's `{text: […], answer_start: […]}`."""

    def files(self) -> list[Path]:
        return expand_paths(self.path, TABLE_SUFFIXES)

    def read(self, report: Report) -> Iterator[AskedText]:
        for file in self.files():
            for number, question, context, answers in self._rows(file, report):
                found = _located(context, answers)
                if isinstance(found, str):
                    report.drop("broken", file, number, found, question)
                elif not is_unicode(question + context):
                    report.drop("broken", file, number, "an unpaired surrogate", question)
                else:
                    yield AskedText(question, context, *found, str(file), number)

    def _rows(self, file: Path, report: Report) -> Iterator[tuple[int, str, str, Any]]:
        """Line or number, question, text, answers as they are written."""
        if inner_suffix(file) not in JSON_SUFFIXES:
            for _, number, (question, context, answer) in read_rows([file], self.layout, report):
                yield number, question, context, answer or None
        elif inner_suffix(file) == ".json" and (data := _squad(file)) is not None:
            yield from _nested(file, data, report)
        else:
            names = self.layout.names
            for number, entry, text in read_objects(file, names[:2], report):
                question, context = entry[names[0]], entry[names[1]]
                if isinstance(question, str) and isinstance(context, str):
                    answers = None if any(entry.get(key) for key in UNANSWERABLE) else entry.get(names[2])
                    yield number, question, context, answers
                else:
                    report.drop("broken", file, number, f"{names[0]!r} and {names[1]!r} must be texts", text)


def _squad(file: Path) -> Any:
    """The articles of a file in the format of SQuAD, None if it has another one."""
    if not next(read_chunks(file), b"").removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return None
    try:
        tree = json.loads(b"".join(read_chunks(file)).decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None  # perhaps one object per line
    return tree.get("data") if isinstance(tree, dict) else None


def _nested(file: Path, data: Any, report: Report) -> Iterator[tuple[int, str, str, Any]]:
    """data → paragraphs → qas. Questions are numbered from 1."""
    number = 0
    try:
        for article in data:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    number += 1
                    report.read += 1
                    answers = None if asked.get("is_impossible") else asked.get("answers")
                    if not isinstance(asked["question"], str) or not isinstance(paragraph["context"], str):
                        raise TypeError("a question and its context must be texts")
                    yield number, asked["question"], paragraph["context"], answers
    except (TypeError, KeyError, AttributeError) as error:
        what = f"no key {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{file}: not SQuAD's format at question {number}: {what} (data → paragraphs → context, qas → "
            "question, answers)"
        ) from None


def _located(context: str, given: Any) -> tuple[tuple[str, ...], tuple[int, ...]] | str:
    """Answers and their places, or an error message."""
    answers, begins = list[str](), list[int]()
    if isinstance(given, Mapping) and isinstance(given.get("text"), Sequence) and not isinstance(given["text"], str):
        starts = given.get("answer_start")  # Hugging Face's columns
        starts = starts if isinstance(starts, Sequence) else [None] * len(given["text"])
        given = [{"text": text, "start": start} for text, start in zip(given["text"], starts, strict=False)]
    for one in [] if given is None else given if isinstance(given, list) else [given]:
        text = one.get("text") if isinstance(one, Mapping) else one
        if not isinstance(text, str):
            return "an answer must be a text, or an object with 'text' and 'start'"
        if not text.strip():
            continue  # as good as none
        begin = one.get("start", one.get("answer_start")) if isinstance(one, Mapping) else None
        if type(begin) is not int or context[begin : begin + len(text)] != text:  # not given, or counted otherwise
            begin = context.find(text)
        if begin < 0:
            return f"the answer {text[:40]!r} is not a part of the text"
        answers.append(text)
        begins.append(begin)
    return tuple(answers), tuple(begins)
