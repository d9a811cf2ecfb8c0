"""Encode chats and comparisons with a chat template."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from allyouneed.data.batches.encoding import Dropped, EncodedRow, Encoding, id_format
from allyouneed.data.chat.template import ChatTemplate
from allyouneed.data.files.chats import Chat, Comparison
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError


class TemplateEncoding(Encoding):
    """`columns` by name; `spec` holds the template and the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, template: str, max_tokens: int | None, columns: Mapping[str, str]) -> None:
        self.template, self.max_tokens = ChatTemplate(template, {}, tokenizer), max_tokens
        self.columns = dict(columns)
        digest = hashlib.sha256(template.encode()).hexdigest()
        self.spec = {"texts": dict.fromkeys(columns, tokenizer.hash), "template": digest, "max_tokens": max_tokens}

    def encode(self, chunk: Sequence[Any]) -> Iterator[EncodedRow | Dropped]:
        for example in chunk:
            try:
                yield self.encode_one(example)
            except UserError as error:
                raise UserError(f"{example.file}:{example.line}: {error}") from None

    def encode_one(self, example: Any) -> EncodedRow | Dropped:
        raise NotImplementedError


class ChatEncoding(TemplateEncoding):
    """The tokens of a chat, and for each whether it is part of an answer (1) or given (0)."""

    name = "Chats"

    def __init__(self, tokenizer: Tokenizer, template: str, max_tokens: int | None) -> None:
        super().__init__(tokenizer, template, max_tokens, {"text": id_format(tokenizer), "answer": "<u1"})

    def encode_one(self, example: Chat) -> EncodedRow | Dropped:
        parts = self.template.encode_parts(example.messages)
        ids = [token for part, _ in parts for token in part]
        answer = [int(written) for part, written in parts for _ in part]
        return self.drop_if_too_long(len(ids)) or [ids, answer]


class ComparisonEncoding(TemplateEncoding):
    """The tokens of a prompt, up to where the model answers, and of both answers with their end token."""

    name = "Comparisons"

    def __init__(self, tokenizer: Tokenizer, template: str, max_tokens: int | None) -> None:
        columns = dict.fromkeys(("prompt", "chosen", "rejected"), id_format(tokenizer))
        super().__init__(tokenizer, template, max_tokens, columns)

    def encode_one(self, example: Comparison) -> EncodedRow | Dropped:
        prompt = self.template.prompt(example.messages)
        answers = [self.template.answer(example.messages, text) for text in (example.chosen, example.rejected)]
        return self.drop_if_too_long(len(prompt) + max(map(len, answers))) or [prompt, *answers]
