"""The command line: thin layers over the library. A user's mistake prints one message and exits with code 2."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, TextIO

import typer

from allyouneed import __version__
from allyouneed.cli import completion
from allyouneed.cli.commands import App, accept_plugins, accept_quiet, expand_groups, record_options
from allyouneed.cli.options import EXCHANGE, LOOK, TRAIN, USE, PluginOption, QuietOption, SetOption, argument, option
from allyouneed.errors import UserError, printable
from allyouneed.infer.predictors.registry import commands
from allyouneed.runtime.process import allow_open_files, use_passive_openmp

app = App(
    pretty_exceptions_enable=False,  # a traceback is a bug of ours: print it whole and plain, for a report
    help="One Transformer whose every part is exchangeable: train it, use it, measure it, look inside.",
    epilog="New here? `allyouneed demo` trains a small translator in minutes and lets you try it.",
)

# errors of the system that the user can fix, and how where its own words do not say so
USER_ERRNOS = dict.fromkeys((errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EROFS, errno.EDQUOT), "") | {
    errno.EFBIG: "; files may not be larger here (ulimit -f)",
    errno.EMFILE: " in this process (ulimit -n)",
    errno.ENFILE: "",
}


def _version(wanted: bool) -> None:
    if wanted:
        print(f"allyouneed {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, option("--version", callback=_version, is_eager=True, help="show the version")] = False,
) -> None:
    pass


def train(
    recipe: Annotated[Path, argument("RECIPE", "a YAML file that describes the run")],
    changes: SetOption = None,
    restart: Annotated[bool, option("--restart", help="start over even if the output folder holds a run")] = False,
    plugin: PluginOption = None,
    quiet: QuietOption = False,
) -> None:
    """Train a model from a recipe, or resume an unfinished run."""
    from rich.console import Console

    from allyouneed.training import load_recipe
    from allyouneed.training import train as run

    run(load_recipe(recipe, changes or [], plugin or []), fresh=restart, console=Console(quiet=True) if quiet else None)


def init(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help="files or folders; their names tell train, valid and test apart"),
    ],
    task: Annotated[str | None, option("--task", metavar="NAME", help="the task, if not the likeliest")] = None,
    output: Annotated[
        Path, option("--output", "-o", metavar="FILE", show_default=True, help="the recipe to write")
    ] = Path("recipe.yaml"),
    start: Annotated[
        str | None, option("--start", metavar="FOLDER", help="fine-tune this model instead of a new one")
    ] = None,
    force: Annotated[bool, option("--force", help="overwrite an existing recipe")] = False,
    table: Annotated[
        str | None, option("--table", metavar="NAME", help="the sheet or table, if there are several")
    ] = None,
) -> None:
    """Look at data, say what is in it, and write a recipe that trains on it."""
    from allyouneed.apps.propose import propose

    propose(files, task, output, start, force, table=table)


def describe(
    model: Annotated[
        str, argument("MODEL", "a preset, a YAML file, a model folder or translator", autocompletion=completion.models)
    ],
    changes: SetOption = None,
    length: Annotated[int, option(min=1, max=1 << 24, show_default=True, help="context length for the FLOPs")] = 1024,
    train: Annotated[bool, option("--train", help="show what training costs: FLOPs, time, money")] = False,
    tokens: Annotated[
        float | None, option(min=1, help="with --train: tokens, e.g. 3e9; default: 20 a parameter")
    ] = None,
    on: Annotated[str, option(metavar="DEVICE", show_default=True, help="with --train: the device")] = "h200",
    price: Annotated[float | None, option(min=0, help="with --train: what an hour of it costs")] = None,
) -> None:
    """Show the parts of a model: a tree with shapes, parameters, FLOPs and cache bytes."""
    from rich.console import Console

    from allyouneed import model_config
    from allyouneed.apps.inspect.reference.describe import describe as look
    from allyouneed.cli.look import WIDE

    config = model_config(model, changes)
    if train:
        from allyouneed.lab.flops import training_lines

        print("\n".join(training_lines(config, length, tokens, on, price)))
        return
    Console(width=WIDE, highlight=False).print(look(config, length))


def demo(
    folder: Annotated[Path, option(show_default=True, help="folder for the data and the model")] = Path("runs/demo"),
    ask: Annotated[bool, option(help="translate what you type afterwards")] = True,
) -> None:
    """Train a small Transformer to read written dates, score it, and try it."""
    from allyouneed.cli.tour import run

    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder for the demo")
    run(folder, ask)


def _declare(
    name: str, module: str, panel: str, *, plugins: bool = True, quiet: bool = True, recorded: bool = False
) -> None:
    """A command: the function of its name in a module of this package. `plugins`, `quiet`: it has the options of these
    names; `recorded`: its options are kept with the output that it resumes."""

    def register() -> None:
        defined = vars(import_module(f"{__name__}.{module}" if module else __name__))
        plain = name.replace("-", "_")
        function = expand_groups(defined[plain] if plain in defined else defined[f"{plain}_"])
        function = record_options(name, function) if recorded else function
        function = accept_plugins(function) if plugins else function
        app.command(name, rich_help_panel=panel)(accept_quiet(function) if quiet else function)

    app.declare(name, register)


def _register_look() -> None:
    from allyouneed.cli.look import inside, look_app, views

    assert inside and views  # their commands register themselves
    app.add_typer(look_app, name="look", rich_help_panel=LOOK)


MODULES = {
    "generation": ("translate", "generate", "chat"),
    "text.rewriting": ("seq2seq", "summarise", "correct"),
    "text.answer": ("answer",),
    "index": ("search",),
    "media": ("transcribe", "classify-audio", "classify-image", "match-image", "caption"),
}  # others: analysis
for _name in commands():
    _declare(_name, next((m for m, names in MODULES.items() if _name in names), "analysis"), USE, recorded=True)
_declare("browse", "generation", USE)
_declare("merge", "text.merge", USE, plugins=False)
_declare("serve", "serve", USE)
_declare("train", "", TRAIN, plugins=False, quiet=False)
_declare("init", "", TRAIN, plugins=False, quiet=False)
_declare("evaluate", "evaluate", TRAIN)
_declare("describe", "", LOOK, quiet=False)
_declare("demo", "", TRAIN, plugins=False, quiet=False)
_declare("bench", "lab.bench", TRAIN)
_declare("compare", "lab.compare", TRAIN)
_declare("scaling", "lab.compare", TRAIN)
_declare("probe", "lab.architectures", TRAIN)
_declare("claims", "lab.architectures", TRAIN)
_declare("index", "index", TRAIN)
_declare("models", "look", LOOK, plugins=False, quiet=False)
_declare("parts", "look", LOOK, quiet=False)
_declare("doctor", "doctor", LOOK, plugins=False, quiet=False)
app.declare("look", _register_look)
_declare("import", "import_export", EXCHANGE, plugins=False)
_declare("export", "import_export", EXCHANGE)
_declare("quantize", "quantize", EXCHANGE)


def _broken_pipe() -> TextIO:
    """A stream without a reader: writing to it fails as if the reader had exited."""
    read, write = os.pipe()
    os.close(read)
    return open(write, "w", encoding="utf-8", buffering=1)


def system_error(error: Exception) -> str | None:
    """What an error of the system says, raised by Python or by a library in Rust, if the user can fix it."""
    if isinstance(error, OSError):
        number, file = error.errno, error.filename
    else:
        found = re.search(r"\(os error (\d+)\)", str(error))
        number, file = None if found is None else int(found[1]), None
    if number not in USER_ERRNOS:
        return None
    return f"{file or 'the output'}: {os.strerror(number)}{USER_ERRNOS[number]}"


def memory_asked_for(error: Exception) -> str | None:
    """` (4.00 GB asked for at once)` where memory ran out; None for any other error."""
    if not isinstance(error, MemoryError | RuntimeError):
        return None
    found = re.search(r"(?:tried|unable) to allocate (\d+ bytes|[\d.]+ ?[KMGTPE]i?B)", str(error), re.IGNORECASE)
    if found is not None:
        number, unit = found[1].split()
        size = f"{int(number) / 1e9:,.2f} GB" if unit == "bytes" else found[1]
        return f" ({size} asked for at once)"
    return "" if isinstance(error, MemoryError) or "out of memory" in str(error) else None


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 success, 2 an error the user can fix, 130 interrupted, 1 a bug (with its traceback) or
    a closed output pipe."""
    use_passive_openmp()
    if sys.stdout is None:  # closed from the start (>&-)
        sys.stdout = _broken_pipe()
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the process exits)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # UTF-8 whatever the locale
    try:
        allow_open_files()
        app(args, prog_name="allyouneed")
    except UserError as error:
        message = str(error)
    except Exception as error:
        if (reason := system_error(error)) is not None:
            message = reason
        elif (size := memory_asked_for(error)) is not None:
            message = f"out of memory{size}; use a smaller model, fewer or shorter texts at once, or a larger machine"
        else:
            raise
    print(f"allyouneed: {printable(message)}", file=sys.stderr)
    sys.exit(2)
