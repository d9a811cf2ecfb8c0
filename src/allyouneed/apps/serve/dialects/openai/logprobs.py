"""Log-probabilities in the forms of OpenAI's completions and chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.logits_rules import TokenRecord
    from allyouneed.data.tokenizers.base import Tokenizer


def completion_logprobs(tokenizer: Tokenizer, records: Sequence[TokenRecord], offset: int = 0) -> dict[str, Any]:
    """`offset`: characters before the first token."""
    tokens, offsets = [], []
    for record in records:
        tokens.append(_text(tokenizer, record.token))
        offsets.append(offset)
        if record.token not in tokenizer.added:  # special tokens are not in the text
            offset += len(tokenizer.token_bytes(record.token).decode(errors="ignore"))
    return {
        "text_offset": offsets,
        "token_logprobs": [record.logprob for record in records],
        "tokens": tokens,
        "top_logprobs": [
            None if record.logprob is None else {_text(tokenizer, token): value for token, value in record.top}
            for record in records
        ],
    }


def chat_logprobs(tokenizer: Tokenizer, records: Sequence[TokenRecord]) -> dict[str, Any]:
    return {
        "content": [
            _entry(tokenizer, record.token, record.logprob)
            | {"top_logprobs": [_entry(tokenizer, token, value) for token, value in record.top]}
            for record in records
        ],
        "refusal": None,
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": _text(tokenizer, token), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}


def _text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; a part of a character as OpenAI writes it: `bytes:\\xe4\\xbd`."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
