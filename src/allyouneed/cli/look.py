"""Commands that show: all presets in a table, patterns and positions as pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allyouneed.cli.options import JsonOption, option

if TYPE_CHECKING:
    from allyouneed.look.canvas import Panel

look_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Draw what is inside: patterns, positions.",
)

WIDE = 1000  # columns: a table keeps its lines whole, also where the output is no terminal

OutputOption = Annotated[
    Path | None, option("--output", "-o", metavar="FILE", help="a picture instead: .png, .svg or .pdf")
]


def models(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="only presets with one of these in their names")
    ] = None,
    sort: Annotated[
        str, option(metavar="name|kind|parameters|flops|state", show_default=True, help="in which order")
    ] = "name",
    papers: Annotated[bool, option("--papers", help="where each comes from")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the presets: parameters, and FLOPs and decoding state at 1k and 32k tokens."""
    from rich.console import Console

    from allyouneed.look.models import notes, rows, table

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


@look_app.command()
def pattern(
    expressions: Annotated[
        list[str],
        typer.Argument(metavar="PATTERN", help="e.g. 'causal & window(64) | global(0)'; several side by side"),
    ],
    size: Annotated[
        int | None, option(min=1, max=8192, help="so many tokens; chosen by the pattern if not given")
    ] = None,
    output: OutputOption = None,
) -> None:
    """Draw who may look at whom: rows are queries, columns are keys."""
    from allyouneed.look.pattern import panels

    _show(panels(expressions, size), output)


@look_app.command()
def positions(
    parts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PART", help="a word or YAML, e.g. alibi or '{kind: rotary, base: 500}'; all if none"),
    ] = None,
    size: Annotated[int, option(min=2, max=4096, show_default=True, help="so many positions")] = 64,
    width: Annotated[int, option(min=2, show_default=True, help="of the vectors; of a head it is width / heads")] = 128,
    heads: Annotated[int, option(min=1, show_default=True, help="of the attention")] = 8,
    causal: Annotated[bool, option("--causal", help="for attention that never sees the future")] = False,
    output: OutputOption = None,
) -> None:
    """Draw how parts tell where tokens stand: added vectors, turned queries and keys, biases by distance."""
    from allyouneed.look.positions import Sizes, panels

    _show(panels(parts or [], Sizes(size, width, heads, causal)), output)


def _show(found: list[Panel], output: Path | None) -> None:
    if output is not None:
        from allyouneed.look.figure import save

        save(found, output)
        print(f"{output}: written", file=sys.stderr)
        return
    from rich.console import Console

    from allyouneed.look.canvas import draw

    console: Any = Console(highlight=False, soft_wrap=True)
    console.print(draw(found, console.width if console.is_terminal else 120))
