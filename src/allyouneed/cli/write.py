"""Commands that write texts: translate, generate, seq2seq."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allyouneed.cli.loading import drafted, ready
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
    given,
    option,
)
from allyouneed.cli.texts import Use, answer, one_line, placed, ranked, run, show_notes, source
from allyouneed.models import shipped

if TYPE_CHECKING:
    from allyouneed.infer.predictors.generator import Generation
    from allyouneed.infer.predictors.translator import Translation

SpecialsOption = Annotated[
    bool, option("--specials", help="read what is spelled like a special token of the model as one")
]


def translate(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="what to translate; or a file, and the one to write; or standard input"),
    ] = None,
    *,
    model: TranslatorOption = None,
    as_json: JsonOption = False,
    align: Annotated[bool, option("--align", help="show which source piece each target piece looked at most")] = False,
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
    """Translate texts, standard input, or a file; a line in is a line out.

    `allyouneed translate in.txt out.txt` translates a file into a file, as `--input` and `--output` do (`-`: standard
    input or output). Interrupted, the same command goes on where it was.

    A model of several languages sees which one a text is in. It translates into English, from English into the first it
    learnt; `--to` says another.
    """
    options = given(
        method=method, beam=beam, best=best, length_penalty=length_penalty,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, loops=loops,
        draft=drafted(draft, device, dtype, "translate_full", "translate"), ahead=ahead,
    )  # fmt: skip
    texts, input_, output = placed(texts, input_, output)
    translator = ready(model or shipped(), device, dtype, "translate_full", "translate")

    def plain(one: Translation) -> str:
        shown = [f"{c.score:.4f}\t{c.text}" if best is not None else c.text for c in one.candidates]
        links = [(link.target.strip() or "␣", link.source.strip() or "␣") for link in one.alignment or []]
        wide = max((len(target) for target, _ in links), default=0)
        shown += [f"  {target:<{wide}} ← {source}" for target, source in links]
        return "\n".join(shown) + ("\n\n" if best is not None or align else "\n")

    use = Use(
        "translating",
        lambda asked, first: translator.translate_full(asked, to, from_=from_, align=align, first=first, **options),
        plain,
        lambda one: {"source": one.source, "translation": one.text, **asdict(one)},
    )
    run(use, texts, input_, output, as_json, force=force, restart=restart)


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="what to go on with; standard input if nothing is given"),
    ] = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    echo: Annotated[bool, option("--echo", help="show the prompt before what comes after it")] = False,
    specials: SpecialsOption = False,
    index: Annotated[
        Path | None, option(metavar="FOLDER", help="for models that retrieve: where to look up (allyouneed index)")
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
    r"""Go on with a prompt, shown as it comes; or with many prompts.

    Of many, a line in is a line out, and a line break in an answer is written as `\n`; `--json` has it as it is.
    """
    options = given(
        max_length=max_length, min_length=min_length, stop=stop or None, method=method, beam=beam, best=best,
        length_penalty=length_penalty, repetition_penalty=repetition_penalty, temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p, seed=seed, loops=loops, specials=specials or None,
        draft=drafted(draft, device, dtype, "generate_full", "go on with texts"), ahead=ahead,
    )  # fmt: skip
    prompts, input_, output = placed(prompts, input_, output)
    asked = source(prompts, input_, whole)
    writer = ready(model, device, dtype, "generate_full", "go on with texts")
    if index is not None:
        writer.retrieve(index)

    def plain(one: Generation) -> str:
        before = one.prompt if echo else ""
        return ranked(best is not None, [(c.score, one_line(before + c.text)) for c in one.candidates])

    use = Use(
        "writing",
        lambda asked, first: writer.generate_full(asked, first=first, **options),
        plain,
        lambda one: {"prompt": one.prompt, "text": one.text, **asdict(one)},
        blanks=False,
    )
    as_it_comes = output in (None, Path("-")) and best is None and not as_json
    held = [] if asked.typed else list(islice(asked.questions, 2))
    if as_it_comes and (asked.typed or len(held) == 1):
        for number, (_, prompt) in enumerate(chain(held, asked.questions)):
            _tell(writer.stream(prompt, first=number, **options), prompt if echo else "")
        return
    answer(use, replace(asked, questions=chain(held, asked.questions)), output, as_json, force, restart)


def _tell(pieces: Any, before: str) -> None:
    """Each piece as it comes."""

    def shown() -> Iterator[str]:
        if before:
            yield before
        full = yield from pieces
        yield "\n"
        show_notes([*full.notes, *([] if full.guesses is None else [f"draft: {full.guesses}"])])

    for piece in shown():
        sys.stdout.write(piece)
        sys.stdout.flush()


def seq2seq(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="TEXT", help="what to rewrite; standard input if nothing is given")
    ] = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    prefix: Annotated[str, option(metavar="TEXT", help="stands before every text, e.g. 'summarize: '")] = "",
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
    no_repeat: Annotated[int | None, option(min=1, panel=SEARCH, help="no run of so many tokens twice")] = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    loops: LoopsOption = None,
    draft: DraftOption = None,
    ahead: AheadOption = None,
) -> None:
    r"""From text to text: prompts of T5, summaries.

    A line in is a line out, and a line break in an answer is written as `\n`; `--json` has it as it is.
    """
    options = given(
        max_length=max_length, min_length=min_length, method=method, beam=beam, best=best,
        length_penalty=length_penalty, repetition_penalty=repetition_penalty, no_repeat=no_repeat,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, loops=loops, specials=specials or None,
        draft=drafted(draft, device, dtype, "seq2seq_full", "rewrite texts"), ahead=ahead,
    )  # fmt: skip
    texts, input_, output = placed(texts, input_, output)
    rewriter = ready(model, device, dtype, "seq2seq_full", "rewrite texts")
    use: Use[Any] = Use(
        "writing",
        lambda asked, first: rewriter.seq2seq_full(asked, first=first, **options),
        lambda one: ranked(best is not None, [(c.score, one_line(c.text)) for c in one.candidates]),
        lambda one: {"source": one.source, "text": one.candidates[0].text, **asdict(one)},
        read=lambda line: prefix + line,
        blanks=False,
    )
    run(use, texts, input_, output, as_json, whole, force, restart)
