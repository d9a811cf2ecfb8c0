"""Commands that write one text from another: seq2seq, summarise, correct."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from allyouneed.cli.completion import words
from allyouneed.cli.loading import predictor_with, with_draft
from allyouneed.cli.options import (
    ComputeOptions,
    JsonOption,
    ModelOption,
    Seq2SeqOptions,
    SpecialsOption,
    TextFileOptions,
    option,
)
from allyouneed.cli.text.text_input import file_arguments
from allyouneed.cli.text_commands import TextCommand, one_line, ranked_lines, run

TextsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="TEXT", help="texts to rewrite; default: standard input")
]
PrefixOption = Annotated[str, option(metavar="TEXT", help="prepended to every text, e.g. 'summarize: '")]


def seq2seq(
    texts: TextsArgument = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    prefix: PrefixOption = "",
    specials: SpecialsOption = False,
    compute: ComputeOptions,
    files: TextFileOptions,
    decoding: Seq2SeqOptions,
) -> None:
    r"""Rewrite texts: models of source-target pairs, prompts of T5.

    Each result is one line, and its line breaks are written as `\n`; `--json` keeps them.
    """
    options = with_draft(decoding, compute, "seq2seq_full", "rewrite texts")
    options |= {"specials": True} if specials else {}
    rewriter = predictor_with(model, compute, "seq2seq_full", "rewrite texts")
    _run_rewriter(rewriter.seq2seq_full, options, texts, files, as_json, prefix)


def summarise(
    texts: TextsArgument = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    prefix: PrefixOption = "",
    long: Annotated[
        str | None,
        option(
            metavar="truncate|windows",
            autocompletion=words("truncate", "windows"),
            help="of a long text, read the beginning (default), or summarise its pieces one by one",
        ),
    ] = None,
    compute: ComputeOptions,
    files: TextFileOptions,
    decoding: Seq2SeqOptions,
) -> None:
    r"""Summarise texts: one line of standard input is one text; with `--whole`, all of it.

    Each summary is one line, and its line breaks are written as `\n`; `--json` keeps them.
    """
    does = "summarise texts"
    options = with_draft(decoding, compute, "summarise_full", does) | ({} if long is None else {"long": long})
    summariser = predictor_with(model, compute, "summarise_full", does, task="summarisation")
    _run_rewriter(summariser.summarise_full, options, texts, files, as_json, prefix)


def _run_rewriter(
    rewrite: Any, options: dict[str, Any], texts: list[str] | None, files: TextFileOptions, as_json: bool, prefix: str
) -> None:
    texts, files = file_arguments(texts, files)
    command: TextCommand[Any] = TextCommand(
        "writing",
        lambda texts, first: rewrite(texts, first=first, **options),
        lambda one: ranked_lines("best" in options, [(c.score, one_line(c.text)) for c in one.candidates]),
        lambda one: {"source": one.source, "text": one.candidates[0].text, **asdict(one)},
        parse=lambda line: prefix + line,
        blanks=False,
    )
    run(command, texts, files, as_json)


def correct(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="texts to correct; default: standard input")
    ] = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    edits: Annotated[bool, option("--edits", help="print the edits after each text: place, before, after")] = False,
    margin: Annotated[
        float | None,
        option(min=0, help="leave what is not exp(N) times as probable when corrected; default: as trained"),
    ] = None,
    compute: ComputeOptions,
    files: TextFileOptions,
    decoding: Seq2SeqOptions,
) -> None:
    """Correct texts. `--edits` prints a line for each edit, `begin-end<TAB>before<TAB>after`, and an empty line after
    each text."""
    options = with_draft(decoding, compute, "correct_full", "correct texts")
    options |= {} if margin is None else {"margin": margin}
    corrector = predictor_with(model, compute, "correct_full", "correct texts", task="correction")
    texts, files = file_arguments(texts, files)

    def plain(one: Any) -> str:
        places = [f"{e.begin}-{e.end}\t{one_line(e.before)}\t{one_line(e.after)}\n" for e in one.edits]
        return one_line(one.text) + "\n" + ("".join(places) + "\n" if edits else "")

    command: TextCommand[Any] = TextCommand(
        "correcting",
        lambda texts, first: corrector.correct_full(texts, first=first, **options),
        plain,
        lambda one: {
            "source": one.source,
            "text": one.text,
            "edits": [edit._asdict() for edit in one.edits],
            "notes": one.notes,
        },
        blanks=False,
    )
    run(command, texts, files, as_json)
