"""The reference of all parts as Markdown pages (docs/reference/), and as text for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from allyouneed.apps.inspect.reference.reference import ReferenceEntry, Slot, slot_classes, slots

INDEX = """# Reference

Every key of a recipe and of every part: type, default, meaning and paper. Written by `make docs` from the configs;
`allyouneed parts [SLOT [NAME]]` prints the same, and `--plugin` includes parts of your own. How the parts fit together:
[parts.md](../parts.md).

"""


def pages() -> dict[str, str]:
    """Files of docs/reference/: an index, and a page for each slot."""
    found = slots(own=True)
    rows = [[f"[{slot.name}]({slot.page})", ", ".join(f"`{one.name}`" for one in slot.entries)] for slot in found]
    index = INDEX + markdown_table([["slot", "parts"], *rows])
    return {"README.md": index, **{slot.page: _page(slot) for slot in found}}


def _page(slot: Slot) -> str:
    lines = [f"# {slot.name[0].upper()}{slot.name[1:]}\n"]
    if slot.text:
        lines.append(slot.text)
    for one in slot.entries:
        lines += _entry_lines(one, "##", titled=one.name != slot.name)
    return "\n".join(lines)


def _entry_lines(one: ReferenceEntry, level: str, titled: bool = True) -> list[str]:
    lines = [f"{level} `{one.name}`\n"] if titled else []
    if one.text:
        lines.append(_markdown(one.text) + "\n")
    if titled and level == "##":
        lines.append(f"Source: [{one.file.removeprefix('allyouneed/')}](../../src/{one.file})\n")
    if one.keys:
        rows = [[f"`{key.name}`", _link(key.type), _code(key.default), _markdown(key.text)] for key in one.keys]
        lines.append(markdown_table([["key", "type", "default", "meaning"], *rows]))
    else:
        lines.append("It has no keys.\n")
    for group in one.groups:
        lines += _entry_lines(group, level + "#")
    return lines


def _code(default: str) -> str:
    return default if default == "required" else f"`{default}`"


def _link(type_: str) -> str:
    """A type with its slot linked to the page of it."""
    names = sorted((cls.slot for cls in slot_classes()), key=len, reverse=True)
    type_ = type_.replace("list of layers", "list of [layers](layer.md)")
    pattern = rf"(?<![\w ])({'|'.join(names)})(?!\w)|(?<= )({'|'.join(names)})(?!\w)"
    return re.sub(pattern, lambda found: f"[{found[0]}]({found[0].replace(' ', '-')}.md)", type_)


def _markdown(text: str) -> str:
    """Docstring to Markdown: `<` outside code is escaped."""
    return "".join(part if n % 2 else part.replace("<", r"\<") for n, part in enumerate(re.split(r"(`[^`]*`)", text)))


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    written = [f"| {' | '.join(line)} |" for line in escaped]
    return "\n".join([written[0], "|" + "---|" * len(lines[0]), *written[1:]]) + "\n"


# --- terminal --------------------------------------------------------------------------------------------------------


def terminal(found: Sequence[Slot], width: int = 100) -> str:
    """The index for several slots with all their parts; else the parts with their keys."""
    if len(found) > 1 and any(len(slot.entries) > 1 for slot in found):
        wide = max(len(slot.name) for slot in found)
        lines = [_fill(", ".join(one.name for one in slot.entries), f"{slot.name:<{wide}}  ", width) for slot in found]
        return "\n".join([*lines, "", "allyouneed parts SLOT [NAME] shows the keys."])
    lines = [slot.text for slot in found if slot.text]
    for slot in found:
        for one in slot.entries:
            lines += _terminal_entry(one, width, "")
    return "\n".join(lines).rstrip()


def _terminal_entry(one: ReferenceEntry, width: int, path: str) -> list[str]:
    where = f"{one.slot}, {one.file}" if not path else f"keys of {path}{one.name}"
    lines = [f"{one.name}  ({where})", *textwrap.indent(one.text, "  ").splitlines(), ""]
    wide = max((len(key.name) for key in one.keys), default=0)
    for key in one.keys:
        default = key.default if key.default == "required" else f"default {key.default}"
        lines.append(_fill(f"{key.text} [{key.type}; {default}]", f"  {key.name:<{wide}}  ", width))
    lines += [""] if one.keys else ["  no keys", ""]
    for group in one.groups:
        lines += _terminal_entry(group, width, f"{path}{one.name}.")
    return lines


def _fill(text: str, head: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head)).rstrip() or head.rstrip()
