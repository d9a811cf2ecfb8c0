"""The command line. Every command is a thin layer over the library; a user's mistake is one message and exit code 2."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.infer.translator import Translation, Translator

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", help=__doc__)

ModelOption = Annotated[Path, typer.Option("--model", "-m", help="model folder")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="change a key, e.g. width=256 (repeatable)")]
ToOption = Annotated[str | None, typer.Option(help="target language, for multilingual models")]
FromOption = Annotated[str | None, typer.Option("--from", help="source language, for multilingual models")]
BeamOption = Annotated[int | None, typer.Option(help="width of the beam search; 1 is greedy")]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda")]


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="recipe.yaml")],
    changes: SetOption = None,
    restart: Annotated[bool, typer.Option(help="begin anew even if the output folder holds a run")] = False,
) -> None:
    """Train a model by a recipe; an unfinished run goes on where it stopped, exactly."""
    from allyouneed.train import load_recipe
    from allyouneed.train import train as run

    run(load_recipe(recipe, changes or []), fresh=restart)


@app.command()
def translate(
    texts: Annotated[
        list[str] | None, typer.Argument(help="what to translate; standard input when nothing is given")
    ] = None,
    model: ModelOption = ...,  # type: ignore[assignment]
    to: ToOption = None,
    from_: FromOption = None,
    input_: Annotated[
        Path | None, typer.Option("--input", "-i", help="a text file, a sentence a line (.gz, .zst too)")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write here instead of standard output")] = None,
    method: Annotated[str | None, typer.Option(help="beam, greedy or sample")] = None,
    beam: BeamOption = None,
    best: Annotated[int | None, typer.Option(help="how many translations of each text, with scores")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="α; higher prefers longer translations")] = None,
    temperature: Annotated[float | None, typer.Option(help="for sample")] = None,
    top_k: Annotated[int | None, typer.Option(help="for sample")] = None,
    top_p: Annotated[float | None, typer.Option(help="for sample")] = None,
    seed: Annotated[int | None, typer.Option(help="for sample")] = None,
    align: Annotated[bool, typer.Option(help="show which source piece each target piece looked at most")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
    device: DeviceOption = "cpu",
) -> None:
    """Translate arguments, standard input, or a file to a file."""
    given = {
        "method": method, "beam": beam, "best": best, "length_penalty": length_penalty,
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    if texts and input_:
        raise UserError("give texts or --input, not both")
    translator = _load(model, device)
    if texts:
        source: Iterable[str] = texts
    else:
        source = _lines(input_)
    chunk = 1 if not texts and input_ is None and sys.stdin.isatty() else 512
    found = translator.translate_stream(source, to, from_=from_, align=align, chunk=chunk, **options)
    show = _json_line if as_json else _plain_lines(best is not None, align)
    total = len(texts) if texts else None
    with _Sink(output) as sink:
        for one in _progress(found, "translating", total, quiet=output is None):
            sink.write(show(one))
            if not as_json:
                for note in one.notes:
                    print(f"note: {note}", file=sys.stderr)


@app.command()
def evaluate(
    pairs: Annotated[Path | None, typer.Argument(help="test pairs: TSV or JSONL (.gz, .zst too)")] = None,
    model: Annotated[Path | None, typer.Option("--model", "-m", help="model folder")] = None,
    source: Annotated[Path | None, typer.Option(help="source side of aligned files, instead of PAIRS")] = None,
    target: Annotated[
        Path | None, typer.Option(help="target side of aligned files; with --hypotheses, the references")
    ] = None,
    hypotheses: Annotated[Path | None, typer.Option(help="score these translations instead of a model's")] = None,
    to: ToOption = None,
    from_: FromOption = None,
    beam: BeamOption = None,
    tokenize: Annotated[str | None, typer.Option(help="sacreBLEU's tokenizer: 13a, zh, char, none, …")] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", "-lc", help="compare without regard to case")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="write the translations here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="scores as JSON")] = False,
    device: DeviceOption = "cpu",
) -> None:
    """Score a model on test pairs with sacreBLEU and chrF: signature and 95 % interval included."""
    from allyouneed.evaluate.translation import evaluate as score

    if (model is None) == (hypotheses is None):
        raise UserError("give --model (translate, then score) or --hypotheses (score a file), one of the two")
    sources, references = _test_pairs(pairs, source, target, needs_source=model is not None)
    language = to
    if hypotheses is not None:
        found = list(_lines(hypotheses))
    else:
        assert model is not None
        translator = _load(model, device)
        if language is None and len(translator.languages) == 1:
            language = translator.languages[0]
        options: dict[str, Any] = {} if beam is None else {"beam": beam}
        stream = translator.translate_stream(sources, to, from_=from_, chunk=256, **options)
        found = [one.text for one in _progress(stream, "translating", len(sources))]
    if output is not None:
        with _Sink(output) as sink:
            for text in found:
                sink.write(text + "\n")
    scores = score(found, references, language, tokenize=tokenize, lowercase=lowercase)
    print(json.dumps(scores.tree(), ensure_ascii=False) if as_json else scores.text())


@app.command()
def describe(
    model: Annotated[str, typer.Argument(help="preset, YAML file or model folder")],
    changes: SetOption = None,
    length: Annotated[int, typer.Option(min=1, help="context length for the FLOPs")] = 1024,
) -> None:
    """Show what a model is made of: a tree with shapes, parameters, FLOPs and cache bytes."""
    from rich.console import Console

    from allyouneed import model_config
    from allyouneed.folder import read_about
    from allyouneed.look.describe import describe as look

    tree: Any = read_about(Path(model))["model"] if Path(model).is_dir() else model
    Console().print(look(model_config(tree, changes), length))


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="where the demo keeps its data and its model")] = Path("runs/demo"),
    ask: Annotated[bool, typer.Option(help="afterwards translate what you type")] = True,
) -> None:
    """Train a small Transformer on written dates (English, German, Chinese), score it on unseen dates, then ask you."""
    from allyouneed.demo import run

    run(folder, ask)


# --- what the commands share ----------------------------------------------------------------------------------------


def _load(folder: Path, device: str) -> Translator:
    import allyouneed

    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: it may be cpu or cuda")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise UserError("--device cuda: torch finds no CUDA GPU here; use --device cpu")
    return allyouneed.load(folder, device)


def _lines(path: Path | None) -> Iterator[str]:
    """The lines of a file or of standard input, none dropped: bytes that are not UTF-8 are replaced, and said."""
    from allyouneed.data.readers import raw_lines

    if path is not None and not path.is_file():
        raise UserError(f"{path}: no such file")
    raws = (
        raw_lines(path) if path is not None else (line.rstrip(b"\n").removesuffix(b"\r") for line in sys.stdin.buffer)
    )
    for number, raw in enumerate(raws, 1):
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError:
            print(f"note: {path or 'standard input'}:{number}: not UTF-8; the bad bytes are replaced", file=sys.stderr)
            yield raw.decode("utf-8", "replace")


def _test_pairs(
    pairs: Path | None, source: Path | None, target: Path | None, needs_source: bool
) -> tuple[list[str], list[str]]:
    from allyouneed.config import parse
    from allyouneed.data.readers import PairFiles, Report, read_pairs

    if not needs_source and pairs is None and source is None and target is not None:
        return [], list(_lines(target))
    given = {"path": pairs, "source": source, "target": target}
    files = parse(PairFiles, {key: str(path) for key, path in given.items() if path is not None}, "test pairs")
    report = Report()
    found = list(read_pairs(files, report))
    if report.dropped:
        print(report.text(), file=sys.stderr)
    return [pair.source for pair in found], [pair.target for pair in found]


def _plain_lines(scored: bool, align: bool) -> Callable[[Translation], str]:
    def show(one: Translation) -> str:
        lines = [f"{c.score:.4f}\t{c.text}" if scored else c.text for c in one.candidates]
        if align and one.alignment is not None:
            lines += [f"  {link.target.strip()!r} ← {link.source.strip()!r}" for link in one.alignment]
        return "\n".join(lines) + "\n"

    return show


def _json_line(one: Translation) -> str:
    tree = {"source": one.source, "translation": one.text, **asdict(one)}
    return json.dumps(tree, ensure_ascii=False) + "\n"


class _Sink:
    """Where results go. A file appears under its name when it is complete, so nothing is lost half-way."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def __enter__(self) -> _Sink:
        if self.path is None:
            self.file = sys.stdout
            return self
        self.work = self.path.with_name(self.path.name + ".part")
        try:
            self.file = self.work.open("w", encoding="utf-8", newline="\n")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from None
        return self

    def write(self, text: str) -> None:
        self.file.write(text)
        if self.path is None:
            self.file.flush()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.path is None:
            return
        self.file.close()
        if kind is None:
            self.work.replace(self.path)
        else:
            print(f"what was finished is in {self.work}", file=sys.stderr)


def _progress(items: Iterator[Any], what: str, total: int | None, quiet: bool = False) -> Iterator[Any]:
    """A progress bar on standard error while the items come, when a person is there to see it."""
    if quiet or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield from bar.track(items, total=total)


def main() -> None:
    """Run a command. Exit codes: 0 done, 2 the user can mend it, 130 interrupted."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        print(f"allyouneed: {error}", file=sys.stderr)
        code = 2
    except click.ClickException as error:
        error.show()
        code = 2
    except (KeyboardInterrupt, click.Abort):
        code = 130
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
