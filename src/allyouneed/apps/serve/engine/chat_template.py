"""Chat templates (data/chat/template.py) within the limits of the server; where one fails, the client is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allyouneed.apps.serve.errors import ApiError
from allyouneed.apps.serve.settings import Limits
from allyouneed.data.chat.template import ChatTemplate as Template
from allyouneed.data.chat.template import TemplateError, find_template
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.folder import Folder


class ChatTemplate(Template):
    def __init__(self, source: str, values: Mapping[str, Any], tokenizer: Tokenizer, limits: Limits) -> None:
        super().__init__(source, values, tokenizer, limits.template_seconds, limits.template_characters)

    @classmethod
    def of(cls, folder: Folder, limits: Limits) -> ChatTemplate | None:
        """The template of a model folder, ours or Hugging Face's, if it has one."""
        source, values = find_template(folder.path, folder.originals)
        return None if source is None else cls(source, values, folder.tokenizers.target, limits)

    def render(self, values: Mapping[str, Any]) -> str:
        try:
            return super().render(values)
        except TemplateError as error:
            raise ApiError(str(error), param="messages") from None
