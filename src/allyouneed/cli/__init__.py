"""The command line. Every command is a thin layer over the library; a user's mistake is one message and exit code 2."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from allyouneed import __version__
from allyouneed.cli.bench import bench
from allyouneed.cli.exchange import export, import_
from allyouneed.cli.index import index
from allyouneed.cli.loading import loaded, ready
from allyouneed.cli.look import WIDE, look_app, models
from allyouneed.cli.media import classify_image, match_image, transcribe
from allyouneed.cli.options import (
    EXCHANGE,
    FILES,
    LOOK,
    TRAIN,
    USE,
    BeamOption,
    DeviceOption,
    FromOption,
    JsonOption,
    SetOption,
    ToOption,
    option,
    remembered,
)
from allyouneed.cli.quantize import quantize
from allyouneed.cli.read import classify, embed, fill_mask, similarity, tag
from allyouneed.cli.streams import lines, progress, sink
from allyouneed.cli.texts import refuse_itself
from allyouneed.cli.write import generate, seq2seq, translate
from allyouneed.errors import UserError
from allyouneed.runtime.process import use_passive_openmp

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback is a bug of ours: whole and plain, to be copied into a report
    help="One Transformer whose every part is exchangeable: train it, use it, measure it, look inside.",
    epilog="New here? `allyouneed demo` trains a small translator in minutes and lets you try it.",
    rich_markup_mode="markdown",
)

THEIRS = {errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EROFS, errno.EDQUOT}  # what a user can mend on his machine


def _version(wanted: bool) -> None:
    if wanted:
        print(f"allyouneed {__version__}")
        raise typer.Exit


@app.callback()
def _whole(
    version: Annotated[bool, option("--version", callback=_version, is_eager=True, help="show the version")] = False,
) -> None:
    pass


USES: dict[str, Callable[..., None]] = {
    "translate": translate,
    "generate": generate,
    "seq2seq": seq2seq,
    "fill-mask": fill_mask,
    "classify": classify,
    "tag": tag,
    "embed": embed,
    "similarity": similarity,
    "transcribe": transcribe,
    "classify-image": classify_image,
    "match-image": match_image,
}
for _name, _command in USES.items():
    app.command(_name, rich_help_panel=USE)(remembered(_name, _command))


@app.command(rich_help_panel=TRAIN)
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="a YAML file that says all about the run")],
    changes: SetOption = None,
    restart: Annotated[bool, option("--restart", help="begin anew even if the output folder holds a run")] = False,
) -> None:
    """Train a model by a recipe, or go on with an unfinished run."""
    from allyouneed.train import load_recipe
    from allyouneed.train import train as run

    run(load_recipe(recipe, changes or []), fresh=restart)


@app.command(rich_help_panel=TRAIN)
def evaluate(
    pairs: Annotated[
        Path | None, typer.Argument(metavar="PAIRS", help="test pairs: TSV or JSONL (.gz, .zst too)")
    ] = None,
    model: Annotated[Path | None, option("--model", "-m", metavar="FOLDER", help="the model to score")] = None,
    hypotheses: Annotated[
        Path | None, option(metavar="FILE", help="score these translations instead, a line each")
    ] = None,
    tokenize: Annotated[str | None, option(metavar="NAME", help="sacreBLEU's: 13a, intl, zh, char or none")] = None,
    lowercase: Annotated[bool, option("--lowercase", "-lc", help="compare without regard to case")] = False,
    as_json: JsonOption = False,
    device: DeviceOption = "cpu",
    source: Annotated[
        Path | None, option(panel=FILES, metavar="FILE", help="instead of PAIRS: the sources, a line each")
    ] = None,
    target: Annotated[
        Path | None, option(panel=FILES, metavar="FILE", help="instead of PAIRS: the references, a line each")
    ] = None,
    output: Annotated[
        Path | None, option("--output", "-o", panel=FILES, metavar="FILE", help="keep the translations here")
    ] = None,
    to: ToOption = None,
    from_: FromOption = None,
    beam: BeamOption = None,
) -> None:
    """Score a model by what its task is judged by: translations, or a file of them, with BLEU and chrF."""
    from allyouneed.evaluate.translation import WORDS
    from allyouneed.evaluate.translation import evaluate as score
    from allyouneed.infer.translation.direction import direction

    if (model is None) == (hypotheses is None):
        raise UserError("give --model (translate, then score) or --hypotheses (score a file), one of the two")
    if tokenize is not None and tokenize not in WORDS:
        raise UserError(f"--tokenize {tokenize}: it may be {', '.join(WORDS)}")
    if hypotheses is not None and (beam is not None or from_ is not None or output is not None):
        raise UserError("--beam, --from and --output are for --model; with --hypotheses nothing is translated")
    if model is not None and pairs is not None and not _translates(model):
        given = {
            "--tokenize": tokenize, "--lowercase": lowercase or None, "--source": source, "--target": target,
            "--output": output, "--to": to, "--from": from_, "--beam": beam,
        }  # fmt: skip
        for name, value in given.items():
            if value is not None:
                raise UserError(f"{name} is for translation, and {model} was trained for something else; leave it out")
        _evaluate_answers(pairs, model, device, as_json)
        return
    for read in (pairs, source, target):
        refuse_itself(read, output)
    sources, references = _test_pairs(pairs, source, target, needs_source=model is not None)
    if hypotheses is not None:
        found = list(lines(hypotheses))
    else:
        assert model is not None
        translator = ready(model, device, None, "translate_stream", "translate")
        options: dict[str, Any] = {} if beam is None else {"beam": beam}
        if (routes := getattr(translator, "routes", None)) is not None:
            way = direction(routes, sources, references, to, from_)
            to, from_ = way.to, way.from_
            if way.note:
                print(f"note: {way.note}", file=sys.stderr)
        stream = translator.translate_stream(sources, to, from_=from_, chunk=256, **options)
        if to is None and len(translator.languages) == 1:
            to = translator.languages[0]
        found = []
        with ExitStack() as stack:
            write = None if output is None else stack.enter_context(sink(output))
            for one in progress(stream, len(sources), "translating"):
                found.append(one.text)
                if write is not None:
                    write(one.text + "\n")
    scores = score(found, references, to, tokenize=tokenize, lowercase=lowercase)
    print(json.dumps(scores.tree(), ensure_ascii=False) if as_json else scores.text())


@app.command(rich_help_panel=LOOK)
def describe(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a preset, a YAML file or a model folder")],
    changes: SetOption = None,
    length: Annotated[int, option(min=1, show_default=True, help="context length for the FLOPs")] = 1024,
) -> None:
    """Show what a model is made of: a tree with shapes, parameters, FLOPs and cache bytes."""
    from rich.console import Console

    from allyouneed import model_config
    from allyouneed.interop.load import about
    from allyouneed.look.describe import describe as look

    tree: Any = about(Path(model))["model"] if Path(model).is_dir() else model
    Console(width=WIDE, highlight=False).print(look(model_config(tree, changes), length))


@app.command(rich_help_panel=TRAIN)
def demo(
    folder: Annotated[Path, option(show_default=True, help="where its data and its model go")] = Path("runs/demo"),
    ask: Annotated[bool, option(help="afterwards translate what you type")] = True,
) -> None:
    """Train a small Transformer to read written dates, score it, and try it."""
    from allyouneed.demo import run

    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder for the demo")
    run(folder, ask)


app.command(rich_help_panel=TRAIN)(bench)
app.command(rich_help_panel=TRAIN)(index)
app.command(rich_help_panel=LOOK)(models)
app.add_typer(look_app, name="look", rich_help_panel=LOOK)
app.command("import", rich_help_panel=EXCHANGE)(import_)
app.command(rich_help_panel=EXCHANGE)(export)
app.command(rich_help_panel=EXCHANGE)(quantize)


# --- what the commands share ----------------------------------------------------------------------------------------


def _translates(folder: Path) -> bool:
    from allyouneed.interop.load import about

    return about(folder)["task"].get("kind") == "translation"


def _evaluate_answers(path: Path, model: Path, device: str, as_json: bool) -> None:
    """For every task but translation: the file is read as the training data was."""
    from allyouneed.infer.evaluate import evaluate as judge

    judged, report = judge(loaded(model, device), path)
    if report.dropped:
        print(f"note: {report.text()}", file=sys.stderr)
    for note in judged.notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(judged.figures) if as_json else judged.text)


def _test_pairs(
    pairs: Path | None, source: Path | None, target: Path | None, needs_source: bool
) -> tuple[list[str], list[str]]:
    from allyouneed.config import parse
    from allyouneed.data.files.pairs import PairFiles
    from allyouneed.data.files.readers import Report

    if not needs_source and pairs is None and source is None and target is not None:
        return [], list(lines(target))
    if (pairs is None) == (source is None and target is None) or (source is None) != (target is None):
        raise UserError("give PAIRS (both sides in one file), or --source and --target (aligned line by line)")
    given = {"path": pairs, "source": source, "target": target}
    files = parse(PairFiles, {key: str(path) for key, path in given.items() if path is not None}, "test pairs")
    report = Report()
    found = list(files.read(report))
    if not found:
        raise UserError(f"no test pair can be used: {report.text()}")
    if report.dropped:
        print(f"note: test pairs: {report.text()}", file=sys.stderr)
    return [pair.source for pair in found], [pair.target for pair in found]


def _unread() -> TextIO:
    """What nobody reads: as where a reader has gone, whoever writes to it ends, and who does not is not disturbed."""
    read, write = os.pipe()
    os.close(read)
    return open(write, "w", encoding="utf-8", buffering=1)


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 2 the user can mend it, 130 interrupted, 1 a bug of ours (with its traceback) or
    nobody reads the output any more."""
    use_passive_openmp()
    if sys.stdout is None:  # closed from the start (>&-)
        sys.stdout = _unread()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as long as we live)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # text is UTF-8, whatever the locale
    try:
        app(args, prog_name="allyouneed")
    except UserError as error:
        message = str(error)
    except OSError as error:
        if error.errno not in THEIRS:
            raise
        message = f"{error.filename or 'the output'}: {error.strerror}"
    print(f"allyouneed: {message}", file=sys.stderr)
    sys.exit(2)
