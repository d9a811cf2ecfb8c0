"""Generated pages and tables of docs/: `python -m allyouneed.apps.inspect.reference.pages docs`.

docs/reference/ is written whole. On other pages, a table is placed between `<!-- parts: written by make docs -->` and
`<!-- end of parts -->`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path

from allyouneed.apps.inspect.reference.models import Row, rows, short
from allyouneed.apps.inspect.reference.reference import parts_of, slot_classes, source_file
from allyouneed.apps.inspect.reference.reference_pages import markdown_table
from allyouneed.apps.inspect.reference.reference_pages import pages as reference_pages
from allyouneed.config import preset_names
from allyouneed.files import write_text


def parts_table() -> str:
    """The slots of nn; docs/reference/ has those of a recipe too."""
    lines = [["slot", "class", "parts"]]
    for cls in (cls for cls in slot_classes() if cls.__module__.startswith("allyouneed.nn.")):
        kinds = [f"`{part.model_fields['kind'].default}`" for part in parts_of(cls, own=True)]
        file = source_file(cls)
        where = f"[{file.removeprefix('allyouneed/')}](../src/{file}) `{cls.__name__}`"
        lines.append([cls.slot, where, ", ".join(kinds)])
    return markdown_table(lines)


def presets_table() -> str:
    """Like `allyouneed models --papers`, at the shortest length."""

    def line(row: Row) -> list[str]:
        at = row.at[0]
        far = "" if at.reached else "*"
        state = "–" if at.state is None else f"{short(at.state)}B{far}"
        return [f"`{row.name}`", row.kind, short(row.parameters), short(at.flops) + far, state, row.paper]

    head = ["preset", "kind", "parameters", "FLOPs per token at 1k", "state at 1k", "paper"]
    return markdown_table([head, *(line(row) for row in rows() if row.name in preset_names())])


def families_table() -> str:
    """Supported Hugging Face families by `model_type`."""
    from allyouneed.interop import families

    lines = [["`model_type`", "model", "weight table"]]
    for name in families.FAMILIES:
        text = inspect.getdoc(importlib.import_module(f"{families.__name__}.{name}")) or ""
        first = re.split(r"(?<!al)\.(?:\s|$)|, and what", text.replace("\n", " "))[0]  # the first sentence
        where = f"[{name}.py](../src/allyouneed/interop/families/{name}.py)"
        lines.append([f"`{name}`", first, where])
    return markdown_table(lines)


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
    (folder / "reference").mkdir(exist_ok=True)
    for old in (folder / "reference").glob("*.md"):
        old.unlink()
    for name, text in reference_pages().items():
        write_text(folder / "reference" / name, text)
    for name in PAGES:
        write_text(folder / name, render(name, (folder / name).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
