"""XML: which tags delimit passages is detected or given, as in the translation API of DeepL."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from html import unescape

from allyouneed.apps.translate.documents.html import ENTITY, lower_names
from allyouneed.apps.translate.documents.parts import Builder, Document, free_symbols
from allyouneed.apps.translate.documents.tokens import MarkupToken, tokens
from allyouneed.errors import UserError

NEWLINE = re.compile(r"(\r\n|\n|\r)")


def read_xml(
    text: str,
    *,
    splitting_tags: Iterable[str] = (),
    non_splitting_tags: Iterable[str] = (),
    ignore_tags: Iterable[str] = (),
    outline_detection: bool = True,
    newlines: bool = False,
) -> Document:
    """`splitting_tags` delimit passages, `non_splitting_tags` are marks inside of one, and the content of `ignore_tags`
    is copied. With `outline_detection`, a tag that is in none of these lists is a mark where it stands beside words,
    or inside such a tag, and delimits passages elsewhere; without, it is a mark. `newlines`: line breaks delimit
    passages too."""
    splits, stays, ignored = (lower_names(some) for some in (splitting_tags, non_splitting_tags, ignore_tags))
    found = tokens(text, xml=True)
    beside = _beside_words(found) if outline_detection else [True] * len(found)
    builder = Builder(free_symbols(text), encode)
    depth, name = 0, ""
    copied: list[str] = []
    for token, mixed in zip(found, beside, strict=True):
        if depth:
            copied.append(token.raw)
            depth += (token.name == name) * ((token.kind == "start") - (token.kind == "end"))
            if not depth:
                builder.noun(["".join(copied)])
            continue
        if token.kind == "text":
            _add_text(builder, token.raw, newlines)
        elif token.kind == "other" and mixed:
            builder.mark([token.raw])
        elif token.kind == "other":
            builder.skip(token.raw)
        elif token.kind == "start" and token.name in ignored:
            depth, copied, name = 1, [token.raw], token.name
        elif token.name in splits or not (mixed or token.name in stays):
            builder.skip(token.raw)
        elif token.kind == "empty" and token.name in ignored:
            builder.noun([token.raw])
        elif token.kind == "empty":
            builder.mark([token.raw])
        else:
            builder.mark([token.raw], (token.name, token.kind == "end"))
    if depth:
        raise UserError(f"<{name}> is never closed; close it, or remove it from ignore_tags")
    builder.end()
    return Document(builder.parts)


def encode(text: str) -> str:
    """Text as XML: nothing in it is markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _add_text(builder: Builder, raw: str, newlines: bool) -> None:
    for number, line in enumerate(NEWLINE.split(raw) if newlines else [raw]):
        if number % 2:
            builder.skip(line)
            continue
        for part in ENTITY.split(line):
            if not ENTITY.fullmatch(part):
                builder.text(part, part)
            elif (plain := unescape(part)) != part:
                builder.entity(part, plain)
            elif part.endswith(";"):
                builder.noun([part])  # defined by the document
            else:
                builder.text(part, part)


def _beside_words(found: list[MarkupToken]) -> list[bool]:
    """For each token, whether it stands beside words, or in an element that does."""
    parents: list[int | None] = []  # the start tag of the element that each token is in
    words: set[int | None] = set()  # elements that contain words themselves
    stack: list[int] = []
    opened = Counter[str]()  # names of the elements in the stack
    for number, token in enumerate(found):
        if token.kind == "end" and opened[token.name]:
            last = ""
            while last != token.name:
                last = found[stack.pop()].name
                opened[last] -= 1
        parents.append(stack[-1] if stack else None)
        if token.kind == "text" and token.raw.strip():
            words.add(parents[-1])
        if token.kind == "start":
            stack.append(number)
            opened[token.name] += 1
    mixed: list[bool] = []
    for parent in parents:
        mixed.append(parent in words or (parent is not None and mixed[parent]))
    return mixed
