"""Chats with a language model: its folder's chat template makes the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from allyouneed.data.chat.template import ChatTemplate, Message, check_messages
from allyouneed.errors import UserError
from allyouneed.folder import Folder

if TYPE_CHECKING:
    from allyouneed.infer.predictors.reward import RewardModel

Messages = str | Sequence[Message]  # a text is one message of the user


def folder_template(folder: Folder) -> ChatTemplate:
    """The chat template of a folder, or an error."""
    found = ChatTemplate.find(folder.path, folder.tokenizers.target, folder.originals)
    if found is None:
        raise UserError(
            f"{folder.path or 'the model'}: has no chat template; train it for chats (task: chat), or put a "
            "chat_template.jinja into the folder of the original"
        )
    return found


@dataclass(frozen=True)
class ChatAnswer:
    """An answer. `candidates`: all that were drawn, best first; `rewards`: their scores by a reward model, if it chose
    among them."""

    messages: list[dict[str, Any]]
    text: str
    candidates: list[str]
    rewards: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def choose_by_reward(
    model: RewardModel, messages: Sequence[Message], texts: Sequence[str]
) -> tuple[list[str], list[float]]:
    """The texts and their rewards, the highest first; equal texts are kept, in the order they were drawn."""
    rewards = model.score([list(messages)] * len(texts), list(texts))
    order = sorted(range(len(texts)), key=lambda n: -rewards[n])
    return [texts[n] for n in order], [rewards[n] for n in order]


class ChatMethods:
    """What a predictor that continues prompts adds for chats."""

    folder: Folder

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return folder_template(self.folder)

    def chat_prompt(self, messages: Messages) -> tuple[list[dict[str, Any]], list[int]]:
        """The messages, and the token ids of their prompt."""
        checked = check_messages(messages)
        return checked, self.chat_template.prompt(checked)
