"""Commands that draw: a table of all presets, pictures of patterns and positions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from allyouneed.cli.commands import App, accept_plugins, accept_quiet, expand_groups
from allyouneed.cli.completion import presets
from allyouneed.cli.options import JsonOption, argument, option
from allyouneed.errors.extras import require

if TYPE_CHECKING:
    from allyouneed.apps.inspect.pictures.canvas import Panel

look_app = App(help="Look inside: views of a model as a page, drawings of patterns and position encodings.")

F = TypeVar("F", bound=Callable[..., None])


def page_command(name: str) -> Callable[[F], F]:
    """A command of `look` that writes a page: with groups of options, plugins and `--quiet`."""

    def register(command: F) -> F:
        look_app.command(name)(accept_quiet(accept_plugins(expand_groups(command))))
        return command

    return register


WIDE = 1000  # columns, so that table rows are not wrapped when the output is not a terminal

OutputOption = Annotated[
    Path | None, option("--output", "-o", metavar="FILE", help="save a picture: .png, .svg or .pdf")
]


def models(
    names: Annotated[
        list[str] | None, argument("NAME", "only presets whose name contains one of these", autocompletion=presets)
    ] = None,
    sort: Annotated[
        str, option(metavar="name|kind|parameters|flops|state", show_default=True, help="sort order")
    ] = "name",
    papers: Annotated[bool, option("--papers", help="show the papers")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the presets and the bundled translator: parameters, and FLOPs and decoding state at 1k and 32k tokens."""
    from rich.console import Console

    from allyouneed.apps.inspect.reference.models import notes, rows, table

    found = rows(names or [], sort)
    if as_json:
        print(json.dumps([one.tree() for one in found], ensure_ascii=False, indent=1))
        return
    console = Console(width=WIDE, highlight=False)
    with console.capture() as drawn:
        console.print(table(found, papers))
    print("\n".join(line.rstrip() for line in drawn.get().splitlines()))
    for note in notes(found):
        console.print(note, style="dim")


def parts(
    slot: Annotated[str | None, argument("SLOT", "a slot, e.g. token-mixer or recipe; or the name of a part")] = None,
    name: Annotated[str | None, argument("NAME", "a part of that slot, e.g. attention")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the parts of every slot, or show the keys of one: type, default, meaning and paper."""
    from shutil import get_terminal_size

    from allyouneed.apps.inspect.reference.reference import find
    from allyouneed.apps.inspect.reference.reference_pages import terminal

    found = find(slot, name)
    if as_json:
        print(json.dumps({one.name: [entry.tree() for entry in one.entries] for one in found}, ensure_ascii=False))
    else:
        print(terminal(found, get_terminal_size().columns if sys.stdout.isatty() else 120))


@look_app.command()
@accept_plugins
def pattern(
    expressions: Annotated[
        list[str], argument("PATTERN", "e.g. 'causal & window(64) | global(0)'; several side by side")
    ],
    size: Annotated[
        int | None, option(min=1, max=8192, help="number of tokens; default: chosen by the pattern")
    ] = None,
    output: OutputOption = None,
) -> None:
    """Draw which keys (columns) each query (row) may attend to."""
    from allyouneed.apps.inspect.pictures.pattern import panels

    _check_output(output)
    _show(panels(expressions, size), output)


@look_app.command()
@accept_plugins
def positions(
    parts: Annotated[
        list[str] | None, argument("PART", "a kind or YAML, e.g. alibi or '{kind: rotary, base: 500}'; default: all")
    ] = None,
    size: Annotated[int, option(min=2, max=4096, show_default=True, help="number of positions")] = 64,
    width: Annotated[int, option(min=2, show_default=True, help="model width; a head has width / heads")] = 128,
    heads: Annotated[int, option(min=1, show_default=True, help="attention heads")] = 8,
    causal: Annotated[bool, option("--causal", help="causal attention")] = False,
    output: OutputOption = None,
) -> None:
    """Draw position encodings: added vectors, rotated queries and keys, biases by distance."""
    from allyouneed.apps.inspect.pictures.positions import Sizes, panels

    _check_output(output)
    _show(panels(parts or [], Sizes(size, width, heads, causal)), output)


def _check_output(output: Path | None) -> None:
    if output is not None:
        require("look", "--output")


def _show(found: list[Panel], output: Path | None) -> None:
    if output is not None:
        from allyouneed.apps.inspect.pictures.figure import save

        save(found, output)
        print(f"{output}: written", file=sys.stderr)
        return
    from rich.console import Console

    from allyouneed.apps.inspect.pictures.canvas import draw

    console: Any = Console(highlight=False, soft_wrap=True)
    console.print(draw(found, console.width if console.is_terminal else 120))
