"""Tokens as the page shows them: [{"id", "text", "group"}]. Tokens that share a character, or one visible sign made of
several characters (combining marks, emoji), share a `group`, so that the page never splits it. `text` of a token that
is only a part of a character is its bytes: `<E6>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allyouneed.apps.inspect.inside.reading import tokens_of
from allyouneed.data.tokenizers.base import Tokenizer


def token_list(tokenizer: Tokenizer, ids: Sequence[int]) -> list[dict[str, Any]]:
    return [token._asdict() for token in tokens_of(tokenizer, ids)]


def token_text(tokenizer: Tokenizer, number: int) -> str:
    return tokens_of(tokenizer, [number])[0].text
