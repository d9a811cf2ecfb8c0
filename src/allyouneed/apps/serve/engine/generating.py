"""What the routes that generate text need of a model: one of this process (served_model.py), or one of an engine
process (workers/remote_model.py)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from allyouneed.apps.serve.errors import ApiError

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.chat_template import ChatTemplate
    from allyouneed.apps.serve.engine.generation import Generation
    from allyouneed.apps.serve.engine.text_models import EncodedPrompt, TextModel
    from allyouneed.apps.serve.sampling import GenerationOptions
    from allyouneed.apps.serve.settings import Limits, Settings
    from allyouneed.infer.decoding.base import Hypothesis


class SequenceJob(Protocol):
    """A submitted sequence. Once it has ended: it is `done`, or has an `error`, or was cancelled."""

    @property
    def error(self) -> BaseException | None: ...

    @property
    def done(self) -> bool: ...

    @property
    def hypotheses(self) -> list[Hypothesis]: ...


class GeneratingModel(ABC):
    name: str
    settings: Settings

    @property
    @abstractmethod
    def text(self) -> TextModel: ...

    @property
    @abstractmethod
    def template(self) -> ChatTemplate | None: ...

    @property
    @abstractmethod
    def max_model_len(self) -> int: ...

    @abstractmethod
    async def submit(self, generation: Generation, streams: bool) -> Sequence[SequenceJob]:
        """Submit its sequences, one for each of its choices, or none if one is refused. Its queue gets their tokens if
        it `streams` or records log-probabilities, and their ends."""

    @abstractmethod
    def cancel(self, jobs: Sequence[Any]) -> None:
        """Of `submit`; no effect on those that have ended."""

    @property
    def reads_images(self) -> bool:
        """Whether chats may contain images; then `encode_pieces` replaces the template."""
        return False

    async def encode_pieces(
        self, pieces: Callable[[Limits], Sequence[Any]], options: GenerationOptions
    ) -> EncodedPrompt:
        """A prompt of texts and images, of a model that `reads_images`."""
        raise NotImplementedError

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: GenerationOptions, extra: Mapping[str, Any]
    ) -> EncodedPrompt:
        """The prompt of a chat, by the folder's template."""
        text, template = self.text, self.template
        if template is None or not text.continues:
            raise ApiError(
                f"the model {self.name} has no chat template; use /v1/completions",
                param="model",
                code="no_chat_template",
            )
        values = {"add_generation_prompt": True, **extra}
        ids = await asyncio.to_thread(template.encode, messages, values)
        return text.encode(ids, options)
