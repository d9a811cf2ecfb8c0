"""Generated tables of docs/: `python -m allyouneed.look.pages docs`.

A table is placed between `<!-- parts: written by make docs -->` and `<!-- end of parts -->`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import allyouneed.nn  # imports every part, which registers it
from allyouneed.config import Part, preset_names
from allyouneed.files import write_text
from allyouneed.look.models import Row, rows, short

# slots in the order of a model; others follow
ORDER = ("model", "embedding", "positions", "token mixer", "pattern", "scores", "attention positions", "channel mixer")


def slots() -> list[type[Part]]:
    """Every slot class of nn, in page order."""
    found: list[type[Part]] = []
    classes: list[type[Part]] = [Part]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if cls.__module__.startswith("allyouneed.nn.") and cls.slot and "registry" in vars(cls):
            found.append(cls)
    named = sorted(found, key=lambda cls: cls.slot)
    return sorted(named, key=lambda cls: ORDER.index(cls.slot) if cls.slot in ORDER else len(ORDER))


def parts_table() -> str:
    lines = [["slot", "class", "parts"]]
    for cls in slots():
        kinds = [kind for kind, part in cls.registry.items() if part.__module__.startswith("allyouneed.")]
        file = _file(cls)
        where = f"[{file.removeprefix('allyouneed/')}](../src/{file}) `{cls.__name__}`"
        lines.append([cls.slot, where, ", ".join(f"`{kind}`" for kind in kinds)])
    return _table(lines)


def presets_table() -> str:
    """Like `allyouneed models --papers`, at the shortest length."""

    def line(row: Row) -> list[str]:
        at = row.at[0]
        far = "" if at.reached else "*"
        state = "–" if at.state is None else f"{short(at.state)}B{far}"
        return [f"`{row.name}`", row.kind, short(row.parameters), short(at.flops) + far, state, row.paper]

    head = ["preset", "kind", "parameters", "FLOPs per token at 1k", "state at 1k", "paper"]
    return _table([head, *(line(row) for row in rows() if row.name in preset_names())])


def families_table() -> str:
    """Supported Hugging Face families by `model_type`."""
    from allyouneed.interop import families

    lines = [["`model_type`", "model", "weight table"]]
    for name in families.FAMILIES:
        text = inspect.getdoc(importlib.import_module(f"{families.__name__}.{name}")) or ""
        first = re.split(r"(?<!al)\.(?:\s|$)|, and what", text.replace("\n", " "))[0]  # the first sentence
        where = f"[{name}.py](../src/allyouneed/interop/families/{name}.py)"
        lines.append([f"`{name}`", first, where])
    return _table(lines)


def _file(cls: type[Part]) -> str:
    module = importlib.import_module(cls.__module__)
    return Path(module.__file__ or "").relative_to(Path(allyouneed.__file__).parents[1]).as_posix()


def _table(lines: Sequence[Sequence[str]]) -> str:
    written = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
    return "\n".join([written[0], "|" + "---|" * len(lines[0]), *written[1:]]) + "\n"


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "parts.md": {"parts": parts_table},
    "look.md": {"presets": presets_table},
    "other-models.md": {"families": families_table},
}


def render(name: str, page: str) -> str:
    """The page with current tables."""
    for table, make in PAGES[name].items():
        begin, end = f"<!-- {table}: written by make docs -->\n", f"<!-- end of {table} -->\n"
        assert page.count(begin) == page.count(end) == 1, f"{name} must contain {begin}and {end}once"
        before, rest = page.split(begin)
        page = before + begin + make() + end + rest.split(end)[1]
    return page


def main(folder: Path) -> None:
    for name in PAGES:
        write_text(folder / name, render(name, (folder / name).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
