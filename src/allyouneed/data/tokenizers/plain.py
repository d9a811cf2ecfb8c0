"""Encode text that spells special tokens as plain text.

The `tokenizers` library can be configured not to parse special tokens in a text, but their names stay in the
vocabulary, where a unigram model finds them: "</s>" in a text would become EOS.
"""

from __future__ import annotations

import json
from typing import Any


def unknown_id(inner: Any) -> int | None:
    """The id of the unknown token."""
    model = json.loads(inner.to_str())["model"]
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    name = model.get("unk_token")
    return None if name is None else inner.token_to_id(name)


def plain(inner: Any) -> Any:
    """The same tokenizer with its special tokens renamed to strings no text contains; other text keeps its ids."""
    tree = json.loads(inner.to_str())
    names = {token["content"]: name(token["id"]) for token in tree["added_tokens"] if token["special"]}
    model = tree["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): number for text, number in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    tree["added_tokens"] = [token for token in tree["added_tokens"] if not token["special"]]
    tree["post_processor"] = None
    made = type(inner).from_str(json.dumps(tree))
    made.encode_special_tokens = True
    return made


def name(number: int) -> str:
    """A name no text can spell: it begins with a noncharacter."""
    return f"\ufdd0{number}"
