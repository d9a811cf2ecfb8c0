"""The command that answers questions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from allyouneed.cli.loading import predictor_with
from allyouneed.cli.options import ComputeOptions, FileOptions, JsonOption, ModelOption, argument, option
from allyouneed.cli.text.streams import read_lines
from allyouneed.cli.text.text_input import file_arguments, unless_standard
from allyouneed.cli.text_commands import TextCommand, one_line, run
from allyouneed.errors import UserError


def answer(
    texts: Annotated[
        list[str] | None,
        argument("QUESTION", "questions; default: lines of a question, a tab and its text, from stdin"),
    ] = None,
    *,
    model: ModelOption,
    context: Annotated[
        Path | None, option(metavar="FILE", help="the text in which all questions are answered; '-': standard input")
    ] = None,
    top: Annotated[int | None, option("--top", min=1, help="show the N best, with scores and places")] = None,
    threshold: Annotated[
        float | None, option(help="answer nothing if that scores higher by this much; default: as trained")
    ] = None,
    as_json: JsonOption = False,
    compute: ComputeOptions,
    files: FileOptions,
) -> None:
    """Answer questions with a part of a text; an empty line: the text has no answer.

    `--top N` prints `score<TAB>begin-end<TAB>answer` and an empty line after each question.
    """
    texts, files = file_arguments(texts, files)
    if context is not None and unless_standard(context) is None and not texts and files.input_ is None:
        raise UserError("--context -: standard input is the text; give the questions as arguments, or in a file")
    answerer = predictor_with(model, compute, "answer_full", "answer questions")
    about = None if context is None else "\n".join(read_lines(unless_standard(context)))
    options = {"top": top or 1} | ({} if threshold is None else {"threshold": threshold})

    def plain(one: Any) -> str:
        if top is None:
            return one_line(one.text) + "\n"
        rows = [f"{a.score:.4f}\t{a.begin}-{a.end}\t{one_line(a.text)}\n" for a in one.answers]
        return "".join(rows) + "\n"

    command: TextCommand[Any] = TextCommand(
        "answering",
        lambda asked, first: answerer.answer_full(asked, **options),
        plain,
        lambda one: {"question": one.question, "text": one.text, "answers": [asdict(a) for a in one.answers]},
        parse=_question_and_text if about is None else lambda line: (line, about),
        blanks=False,
    )
    run(command, texts, files, as_json)


def _question_and_text(line: str) -> Any:
    question, tab, text = line.partition("\t")
    if not tab:
        raise UserError("expected a question and its text, separated by a tab; or name the text with --context")
    return question, text
