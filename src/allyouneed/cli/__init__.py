"""The command line. Every command is a thin layer over the library; a user's mistake is one message and exit code 2."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allyouneed import __version__
from allyouneed.cli.index import index
from allyouneed.cli.look import WIDE, look_app, models
from allyouneed.cli.options import JsonOption, SetOption, option
from allyouneed.cli.streams import count_lines, json_line, lines, plain_lines, progress, sink
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.infer.translator import Translator

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback is a bug of ours: whole and plain, to be copied into a report
    help="One Transformer whose every part is exchangeable: train it, use it, measure it, look inside.",
    epilog="New here? `allyouneed demo` trains a small translator in minutes and lets you try it.",
    rich_markup_mode="markdown",
)

FILES, LANGUAGES, SEARCH, SAMPLING = "Files", "Multilingual models", "Search", "Sampling, with --method sample"
THEIRS = {errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EROFS, errno.EDQUOT}  # what a user can mend on his machine


ModelOption = Annotated[Path, option("--model", "-m", metavar="FOLDER", help="the model to use")]
ToOption = Annotated[str | None, option("--to", panel=LANGUAGES, metavar="LANGUAGE", help="translate into it")]
FromOption = Annotated[str | None, option("--from", panel=LANGUAGES, metavar="LANGUAGE", help="translate from it")]
BeamOption = Annotated[int | None, option(min=1, panel=SEARCH, help="width of the beam search; 1 is greedy")]
DeviceOption = Annotated[str, option(metavar="cpu|cuda", show_default=True, help="where to compute")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"allyouneed {__version__}")
        raise typer.Exit


@app.callback()
def _whole(
    version: Annotated[bool, option("--version", callback=_version, is_eager=True, help="show the version")] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="a YAML file that says all about the run")],
    changes: SetOption = None,
    restart: Annotated[bool, option("--restart", help="begin anew even if the output folder holds a run")] = False,
) -> None:
    """Train a model by a recipe, or go on with an unfinished run."""
    from allyouneed.train import load_recipe
    from allyouneed.train import train as run

    run(load_recipe(recipe, changes or []), fresh=restart)


@app.command()
def translate(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="what to translate; standard input if nothing is given"),
    ] = None,
    *,
    model: ModelOption,
    as_json: JsonOption = False,
    align: Annotated[bool, option("--align", help="show which source piece each target piece looked at most")] = False,
    device: DeviceOption = "cpu",
    input_: Annotated[
        Path | None, option("--input", "-i", panel=FILES, metavar="FILE", help="a text a line (.gz, .zst too)")
    ] = None,
    output: Annotated[
        Path | None, option("--output", "-o", panel=FILES, metavar="FILE", help="written when it is complete")
    ] = None,
    to: ToOption = None,
    from_: FromOption = None,
    method: Annotated[str | None, option(panel=SEARCH, metavar="beam|greedy|sample", help="how to search")] = None,
    beam: BeamOption = None,
    best: Annotated[int | None, option(min=1, panel=SEARCH, help="so many translations of each, with scores")] = None,
    length_penalty: Annotated[float | None, option(panel=SEARCH, help="higher prefers longer translations")] = None,
    temperature: Annotated[float | None, option(panel=SAMPLING, help="higher is bolder")] = None,
    top_k: Annotated[int | None, option(panel=SAMPLING, help="only among the k likeliest tokens")] = None,
    top_p: Annotated[float | None, option(panel=SAMPLING, help="only among the likeliest of probability p")] = None,
    seed: Annotated[int | None, option(panel=SAMPLING, help="the same seed draws the same")] = None,
) -> None:
    """Translate texts, standard input, or a file; a line in is a line out."""
    given = {
        "method": method, "beam": beam, "best": best, "length_penalty": length_penalty,
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    if texts and input_:
        raise UserError("give texts or --input, not both")
    source: Iterable[str] = texts or lines(input_)
    asking = not texts and input_ is None and sys.stdin.isatty()
    translator = _load(model, device)
    found = translator.translate_stream(source, to, from_=from_, align=align, chunk=1 if asking else 512, **options)
    show = json_line if as_json else plain_lines(best is not None, align)
    if asking:
        print("Type a text and Enter; Ctrl-D ends.", file=sys.stderr)
    with sink(output) as write:
        for one in progress(found, len(texts) if texts else count_lines(input_), quiet=output is None):
            write(show(one))
            if not as_json:
                for note in one.notes:
                    print(f"note: {note}", file=sys.stderr)


@app.command()
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
    sources, references = _test_pairs(pairs, source, target, needs_source=model is not None)
    if hypotheses is not None:
        found = list(lines(hypotheses))
    else:
        assert model is not None
        translator = _load(model, device)
        options: dict[str, Any] = {} if beam is None else {"beam": beam}
        stream = translator.translate_stream(sources, to, from_=from_, chunk=256, **options)
        if to is None and len(translator.languages) == 1:
            to = translator.languages[0]
        found = []
        with ExitStack() as stack:
            write = None if output is None else stack.enter_context(sink(output))
            for one in progress(stream, len(sources)):
                found.append(one.text)
                if write is not None:
                    write(one.text + "\n")
    scores = score(found, references, to, tokenize=tokenize, lowercase=lowercase)
    print(json.dumps(scores.tree(), ensure_ascii=False) if as_json else scores.text())


@app.command()
def describe(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a preset, a YAML file or a model folder")],
    changes: SetOption = None,
    length: Annotated[int, option(min=1, show_default=True, help="context length for the FLOPs")] = 1024,
) -> None:
    """Show what a model is made of: a tree with shapes, parameters, FLOPs and cache bytes."""
    from rich.console import Console

    from allyouneed import model_config
    from allyouneed.folder import read_about
    from allyouneed.look.describe import describe as look

    tree: Any = read_about(Path(model))["model"] if Path(model).is_dir() else model
    Console(width=WIDE, highlight=False).print(look(model_config(tree, changes), length))


@app.command()
def demo(
    folder: Annotated[Path, option(show_default=True, help="where its data and its model go")] = Path("runs/demo"),
    ask: Annotated[bool, option(help="afterwards translate what you type")] = True,
) -> None:
    """Train a small Transformer to read written dates, score it, and try it."""
    from allyouneed.demo import run

    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder for the demo")
    run(folder, ask)


app.command()(models)
app.command()(index)
app.add_typer(look_app, name="look")


# --- what the commands share ----------------------------------------------------------------------------------------


def _load(folder: Path, device: str) -> Translator:
    model = _loaded(folder, device)
    if not hasattr(model, "translate_stream"):
        raise UserError(f"{folder}: it was trained for {model.folder.task['kind']} and does not translate")
    translator: Translator = model
    return translator


def _loaded(folder: Path, device: str) -> Any:
    import allyouneed

    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: it may be cpu or cuda")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("--device cuda: torch finds no CUDA GPU here; use --device cpu")
    return allyouneed.load(folder, device)


def _translates(folder: Path) -> bool:
    from allyouneed.folder import read_about

    return read_about(folder)["task"].get("kind") == "translation"


def _evaluate_answers(path: Path, model: Path, device: str, as_json: bool) -> None:
    """For every task but translation: the file is read as the training data was."""
    from allyouneed.infer.evaluate import evaluate as judge

    judged, report = judge(_loaded(model, device), path)
    if report.dropped:
        print(f"note: {report.text()}", file=sys.stderr)
    for note in judged.notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(judged.figures) if as_json else judged.text)


def _test_pairs(
    pairs: Path | None, source: Path | None, target: Path | None, needs_source: bool
) -> tuple[list[str], list[str]]:
    from allyouneed.config import parse
    from allyouneed.data.pairs import PairFiles
    from allyouneed.data.readers import Report

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


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 2 the user can mend it, 130 interrupted, 1 a bug of ours (with its traceback) or
    nobody reads the output any more."""
    # before torch is loaded: on a busy machine threads that spin while they wait for each other are ten times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
