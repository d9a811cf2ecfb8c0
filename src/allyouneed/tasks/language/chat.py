"""Supervised tuning on chats: predict the answers, given everything before them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError
from torch import Tensor

from allyouneed.data.batches.chats import ChatEncoding
from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items
from allyouneed.data.batches.store import Store
from allyouneed.data.chat.template import BUILT_IN, FILE, ROLE_TOKENS, find_template
from allyouneed.data.files.chats import ChatFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, token_loss


def _read_template(value: Any) -> Any:
    """The name of a built-in template, or the source of another one: given itself or as a file."""
    if not isinstance(value, str) or "{{" in value or "{%" in value or value in BUILT_IN:
        return value
    if value.endswith((".jinja", ".jinja2", ".j2")):
        try:
            return Path(value).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise PydanticCustomError("config", "{path}: {reason}", {"path": value, "reason": reason}) from None
    allowed = f"{', '.join(BUILT_IN)}, a .jinja file, or a template"
    raise PydanticCustomError(
        "config", "unknown chat template {name} (allowed: {allowed})", {"name": repr(value), "allowed": allowed}
    )


Template = Annotated[str, BeforeValidator(_read_template)]


class TemplateTask(Task):
    """A task whose examples are written by a chat template."""

    fills_rows: ClassVar[bool] = True
    template: Template = "roles"
    """The chat template: `roles` (a special token per role), `plain` (roles as text, for tokenizers without them), a
    .jinja file, or jinja2; default: that of the model to start from, else `plain` there and `roles` for new weights."""

    @property
    def template_source(self) -> str:
        return BUILT_IN.get(self.template, self.template)

    def specials(self) -> tuple[str, ...]:
        return ROLE_TOKENS if self.template == "roles" else ()

    def folder_files(self) -> dict[str, bytes]:
        return {FILE: self.template_source.encode()}

    @classmethod
    def defaults_from(cls, start: Path) -> dict[str, Any]:
        source = find_template(start)[0] or BUILT_IN["plain"]
        return {"template": next((name for name, known in BUILT_IN.items() if known == source), source)}


class ChatTask(TemplateTask):
    """Each token of an answer given the chat before it; messages of other roles are not predicted (Ouyang et al. 2022,
    3.5, "Supervised fine-tuning")."""

    files: ClassVar[type[Files]] = ChatFiles
    kinds: ClassVar[tuple[str, ...]] = ("decoder", "decoder-decoder")
    loss_unit: ClassVar[str] = "answer tokens"
    metrics: ClassVar[dict[str, bool]] = {"perplexity": False, "loss": False}
    decoding: ClassVar[dict[str, Any]] = {"method": "sample", "top_p": 0.9, "extra": 256}
    kind: Literal["chat"] = "chat"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing."""

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        return ChatEncoding(vocabularies.target, self.template_source, max_tokens)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return ChatItems(store, vocabularies.target)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


class ChatItems(StoredItems):
    """All tokens of a chat but the last; the label of each is the next one, where that is part of an answer."""

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.store["text"].lengths - 1,)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        rows = [self._row(number) for number in members.tolist()]
        inputs, labels = (np.concatenate(side) for side in zip(*rows, strict=True))
        return FlatBatch((FlatSide(inputs),), labels)

    def _row(self, number: int) -> tuple[Ints, Ints]:
        ids, answer = self.store["text"][number].astype(np.int64), self.store["answer"][number]
        return ids[:-1], np.where(answer[1:] == 1, ids[1:], IGNORE)

    def show(self, number: int) -> dict[str, str]:
        return {"chat": self.tokenizer.decode(self.store["text"][number].tolist(), specials=True)}
