"""Commands that generate text: translate, generate, seq2seq."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allyouneed.cli.loading import load_draft, predictor_with
from allyouneed.cli.options import (
    SEARCH,
    AheadOption,
    BeamOption,
    BestOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    ForceOption,
    FromOption,
    InputOption,
    JsonOption,
    LeastOption,
    LengthOption,
    LoopsOption,
    MethodOption,
    MinPOption,
    ModelOption,
    OutputOption,
    PenaltyOption,
    RepetitionOption,
    RestartOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    ToOption,
    TopKOption,
    TopPOption,
    TranslatorOption,
    WholeOption,
    option,
    set_options,
)
from allyouneed.cli.text_commands import (
    TextCommand,
    file_arguments,
    one_line,
    open_input,
    process,
    ranked_lines,
    run,
    show_notes,
)
from allyouneed.models import shipped

if TYPE_CHECKING:
    from allyouneed.infer.predictors.generator import Generation
    from allyouneed.infer.predictors.translator import Translation

SpecialsOption = Annotated[bool, option("--specials", help="parse special tokens in the text")]


def translate(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="texts; or an input and an output file; default: standard input"),
    ] = None,
    *,
    model: TranslatorOption = None,
    as_json: JsonOption = False,
    align: Annotated[bool, option("--align", help="show which source token each target token attends to most")] = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    input_: InputOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    restart: RestartOption = False,
    to: ToOption = None,
    from_: FromOption = None,
    method: MethodOption = None,
    beam: BeamOption = None,
    best: BestOption = None,
    length_penalty: PenaltyOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    loops: LoopsOption = None,
    draft: DraftOption = None,
    ahead: AheadOption = None,
) -> None:
    """Translate texts, standard input or a file, line by line.

    `allyouneed translate in.txt out.txt` translates a file into a file, as `--input` and `--output` do (`-`: standard
    input or output). After an interruption, run the same command again to resume.

    A multilingual model detects the language of each text. It translates into English, and English into the first
    language of its training data; `--to` selects another.
    """
    options = set_options(
        method=method, beam=beam, best=best, length_penalty=length_penalty,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, loops=loops,
        draft=load_draft(draft, device, dtype, "translate_full", "translate"), ahead=ahead,
    )  # fmt: skip
    texts, input_, output = file_arguments(texts, input_, output)
    translator = predictor_with(model or shipped(), device, dtype, "translate_full", "translate")

    def plain(one: Translation) -> str:
        lines = [f"{c.score:.4f}\t{c.text}" if best is not None else c.text for c in one.candidates]
        links = [(link.target.strip() or "␣", link.source.strip() or "␣") for link in one.alignment or []]
        wide = max((len(target) for target, _ in links), default=0)
        lines += [f"  {target:<{wide}} ← {source}" for target, source in links]
        return "\n".join(lines) + ("\n\n" if best is not None or align else "\n")

    command = TextCommand(
        "translating",
        lambda texts, first: translator.translate_full(texts, to, from_=from_, align=align, first=first, **options),
        plain,
        lambda one: {"source": one.source, "translation": one.text, **asdict(one)},
    )
    run(command, texts, input_, output, as_json, force=force, restart=restart)


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="texts to continue; default: standard input"),
    ] = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    echo: Annotated[bool, option("--echo", help="print the prompt before its continuation")] = False,
    specials: SpecialsOption = False,
    index: Annotated[
        Path | None, option(metavar="FOLDER", help="index to retrieve from (allyouneed index), for RETRO models")
    ] = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    input_: InputOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    restart: RestartOption = False,
    whole: WholeOption = False,
    max_length: LengthOption = None,
    min_length: LeastOption = None,
    stop: StopOption = None,
    method: MethodOption = None,
    beam: BeamOption = None,
    best: BestOption = None,
    length_penalty: PenaltyOption = None,
    repetition_penalty: RepetitionOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    loops: LoopsOption = None,
    draft: DraftOption = None,
    ahead: AheadOption = None,
) -> None:
    r"""Continue a prompt, streamed; or many prompts.

    With many prompts each continuation is one line, and its line breaks are written as `\n`; `--json` keeps them.
    """
    options = set_options(
        max_length=max_length, min_length=min_length, stop=stop or None, method=method, beam=beam, best=best,
        length_penalty=length_penalty, repetition_penalty=repetition_penalty, temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p, seed=seed, loops=loops, specials=specials or None,
        draft=load_draft(draft, device, dtype, "generate_full", "continue texts"), ahead=ahead,
    )  # fmt: skip
    prompts, input_, output = file_arguments(prompts, input_, output)
    source = open_input(prompts, input_, whole)
    generator = predictor_with(model, device, dtype, "generate_full", "continue texts")
    if index is not None:
        generator.retrieve(index)

    def plain(one: Generation) -> str:
        before = one.prompt if echo else ""
        return ranked_lines(best is not None, [(c.score, one_line(before + c.text)) for c in one.candidates])

    command = TextCommand(
        "writing",
        lambda texts, first: generator.generate_full(texts, first=first, **options),
        plain,
        lambda one: {"prompt": one.prompt, "text": one.text, **asdict(one)},
        blanks=False,
    )
    streams = output in (None, Path("-")) and best is None and not as_json
    held = [] if source.interactive else list(islice(source.items, 2))
    if streams and (source.interactive or len(held) == 1):
        for number, (_, prompt) in enumerate(chain(held, source.items)):
            _print_stream(generator.stream(prompt, first=number, **options), prompt if echo else "")
        return
    process(command, replace(source, items=chain(held, source.items)), output, as_json, force, restart)


def _print_stream(stream: Any, before: str) -> None:
    """Print a continuation while it is generated."""

    def pieces() -> Iterator[str]:
        if before:
            yield before
        full = yield from stream
        yield "\n"
        show_notes([*full.notes, *([] if full.guesses is None else [f"draft: {full.guesses}"])])

    for piece in pieces():
        sys.stdout.write(piece)
        sys.stdout.flush()


def seq2seq(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="texts to rewrite; default: standard input")
    ] = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    prefix: Annotated[str, option(metavar="TEXT", help="prepended to every text, e.g. 'summarize: '")] = "",
    specials: SpecialsOption = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    input_: InputOption = None,
    output: OutputOption = None,
    force: ForceOption = False,
    restart: RestartOption = False,
    whole: WholeOption = False,
    max_length: LengthOption = None,
    min_length: LeastOption = None,
    method: MethodOption = None,
    beam: BeamOption = None,
    best: BestOption = None,
    length_penalty: PenaltyOption = None,
    repetition_penalty: RepetitionOption = None,
    no_repeat: Annotated[
        int | None, option(min=1, panel=SEARCH, help="never repeat an n-gram of this many tokens")
    ] = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    loops: LoopsOption = None,
    draft: DraftOption = None,
    ahead: AheadOption = None,
) -> None:
    r"""Rewrite texts: prompts of T5, summaries.

    Each result is one line, and its line breaks are written as `\n`; `--json` keeps them.
    """
    options = set_options(
        max_length=max_length, min_length=min_length, method=method, beam=beam, best=best,
        length_penalty=length_penalty, repetition_penalty=repetition_penalty, no_repeat=no_repeat,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, loops=loops, specials=specials or None,
        draft=load_draft(draft, device, dtype, "seq2seq_full", "rewrite texts"), ahead=ahead,
    )  # fmt: skip
    texts, input_, output = file_arguments(texts, input_, output)
    rewriter = predictor_with(model, device, dtype, "seq2seq_full", "rewrite texts")
    command: TextCommand[Any] = TextCommand(
        "writing",
        lambda texts, first: rewriter.seq2seq_full(texts, first=first, **options),
        lambda one: ranked_lines(best is not None, [(c.score, one_line(c.text)) for c in one.candidates]),
        lambda one: {"source": one.source, "text": one.candidates[0].text, **asdict(one)},
        parse=lambda line: prefix + line,
        blanks=False,
    )
    run(command, texts, input_, output, as_json, whole, force, restart)
