"""XML: which tags delimit passages is detected or given, as in the translation API of DeepL."""

from __future__ import annotations

from collections.abc import Iterable
from html import unescape

from allyouneed.errors import UserError
from allyouneed.infer.translation.documents.html import encode
from allyouneed.infer.translation.documents.parts import Builder, Document, free_symbols
from allyouneed.infer.translation.documents.tokens import Token, tokens


def read_xml(
    text: str,
    *,
    splitting_tags: Iterable[str] = (),
    non_splitting_tags: Iterable[str] = (),
    ignore_tags: Iterable[str] = (),
    outline_detection: bool = True,
) -> Document:
    """`splitting_tags` delimit passages, `non_splitting_tags` are marks inside of one, and the content of `ignore_tags`
    is copied. With `outline_detection`, a tag that is in none of these lists is a mark where it stands beside words,
    or inside such a tag, and delimits passages elsewhere; without, it is a mark."""
    lists = splitting_tags, non_splitting_tags, ignore_tags
    splits, stays, ignored = ({name.lower() for name in names} for names in lists)
    found = tokens(text, xml=True)
    beside = _beside_words(found) if outline_detection else [True] * len(found)
    builder = Builder(free_symbols(text), encode)
    depth, copied, name = 0, "", ""
    for token, mixed in zip(found, beside, strict=True):
        if depth:
            copied += token.raw
            depth += (token.name == name) * ((token.kind == "start") - (token.kind == "end"))
            if not depth:
                builder.noun([copied])
            continue
        if token.kind == "text":
            builder.text(token.raw, unescape(token.raw))
        elif token.kind == "other" and mixed:
            builder.mark([token.raw])
        elif token.kind == "other":
            builder.skip(token.raw)
        elif token.kind == "start" and token.name in ignored:
            depth, copied, name = 1, token.raw, token.name
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


def _beside_words(found: list[Token]) -> list[bool]:
    """For each token, whether it stands beside words, or in an element that does."""
    parents: list[int | None] = []  # the start tag of the element that each token is in
    words: set[int | None] = set()  # elements that contain words themselves
    stack: list[int] = []
    for number, token in enumerate(found):
        if token.kind == "end" and any(found[n].name == token.name for n in stack):
            while found[stack.pop()].name != token.name:
                pass
        parents.append(stack[-1] if stack else None)
        if token.kind == "text" and token.raw.strip():
            words.add(parents[-1])
        if token.kind == "start":
            stack.append(number)
    mixed: list[bool] = []
    for parent in parents:
        mixed.append(parent in words or (parent is not None and mixed[parent]))
    return mixed
