"""Markdown pages as blocks of plain text."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

ASIDE = re.compile(r"\A---\n.*?\n---\n|<!--.*?-->|<script.*?</script>|<svg.*?</svg>", re.DOTALL)
SKIPPED = re.compile(r"```|!\[|<|\||-{3,}|\*{3,}$")  # fences, pictures, elements, tables, rules
ITEM = re.compile(r"(?:[*+-]|\d+[.)])\s+")
INLINE = (  # what is replaced by what, in this order
    (r"!\[[^\]]*\]\([^)]*\)", ""),
    (r"\[([^\]]*)\]\s*\([^)]*\)", r"\1"),
    (r"\[([^\]]*)\]\[[^\]]*\]", r"\1"),
    (r"\[#?\d+\]", ""),
    (r"</?[a-zA-Z][^>]*>|`|\*\*|__|\{[^}]*\}", ""),
    (r"(?<![\w*])[*_]([^*_]+)[*_](?![\w*])", r"\1"),
    (r"&nbsp;|\s+", " "),
)


class Block(NamedTuple):
    kind: Literal["heading", "item", "text"]
    text: str


def blocks(page: str) -> list[Block]:
    """Headings, list items and paragraphs; the lines of a paragraph joined."""
    found: list[Block] = []
    joined = False  # whether the next line continues the last block
    for line in map(str.strip, ASIDE.sub("", page).split("\n")):
        item = ITEM.match(line)
        if not line or SKIPPED.match(line):
            joined = False
        elif line.startswith("#"):
            found.append(Block("heading", line.lstrip("# ")))
            joined = False
        elif item is not None:
            found.append(Block("item", line[item.end() :]))
            joined = False
        elif joined:
            found[-1] = Block("text", f"{found[-1].text} {line.lstrip('> ')}")
        else:
            found.append(Block("text", line.lstrip("> ")))
            joined = True
    return [Block(block.kind, text) for block in found if (text := plain(block.text))]


def plain(text: str) -> str:
    """Without links, emphasis, code marks, tags and attributes."""
    for pattern, replacement in INLINE:
        text = re.sub(pattern, replacement, text)
    return text.strip()
