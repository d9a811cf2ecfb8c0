"""Models of engine processes as an API process uses them: it tokenizes, renders chat templates and detokenizes; token
ids go to an engine process and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from allyouneed.apps.serve.engine.generating import GeneratingModel
from allyouneed.apps.serve.engine.registry import Entry, ModelRegistry
from allyouneed.apps.serve.metrics import Metrics
from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.workers.channel import Kind, pack_prompts, to_bytes, with_body
from allyouneed.apps.serve.workers.engine_client import EngineConnection, Question, RemoteJob, RemoteSequences
from allyouneed.runtime.process import freeze_objects

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.chat_template import ChatTemplate
    from allyouneed.apps.serve.engine.generation import Generation
    from allyouneed.apps.serve.engine.text_models import LanguageModel


class AnsweredByEngine(Exception):
    """A request that an API process cannot answer: the engine process gets all of it."""


class Engines:
    """Connections to all engine processes, one per device."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.connections: list[EngineConnection] = []

    def connect(self) -> None:
        self.connections = [EngineConnection(path) for path in self.paths]
        for one in self.connections:
            one.connect()

    def close(self) -> None:
        for one in self.connections:
            one.close()

    def choose(self) -> EngineConnection:
        """The one with the fewest requests of this process; one that is being restarted last."""
        return min(self.connections, key=lambda one: (not one.connected.is_set(), len(one.pending)))


class RemoteModel(GeneratingModel):
    """A language model. `text`: encodes and decodes as in the engine process."""

    def __init__(self, entry: Entry, description: Mapping[str, Any], settings: Settings, engines: Engines) -> None:
        from allyouneed.apps.serve.engine.chat_template import ChatTemplate
        from allyouneed.apps.serve.engine.text_models import LanguageModel
        from allyouneed.data.chat.template import find_template
        from allyouneed.interop.load import vocabularies

        self.name, self.settings, self.engines = entry.name, settings, engines
        tokenizers = vocabularies(entry.path)
        if tokenizers.hash != description["tokenizer_hash"]:
            raise AnsweredByEngine
        self._text = LanguageModel(StandIn(tokenizers, description))  # type: ignore[arg-type]
        source, values = find_template(entry.path)
        self._template = None
        if source is not None:
            self._template = ChatTemplate(source, values, tokenizers.target, settings.limits)

    @property
    def text(self) -> LanguageModel:
        return self._text

    @property
    def template(self) -> ChatTemplate | None:
        return self._template

    @property
    def max_model_len(self) -> int:
        return self._text.max_model_len

    def close(self) -> None:
        if self._template is not None:
            self._template.close()

    async def submit(self, generation: Generation, streams: bool) -> Sequence[RemoteJob]:
        engine = self.engines.choose()
        request = RemoteSequences(engine, generation.queue, len(generation.choices))
        content = {
            "model": self.name,
            "options": vars(generation.options),
            "client": generation.client,
            "streams": streams,
        }
        try:
            prompts = pack_prompts([prompt.prompt for prompt in generation.prompts])
            await engine.ask(request, Kind.GENERATE, *with_body(content, prompts))
            await request.accepted
        except asyncio.CancelledError:
            request.cancel()
            raise
        return request.jobs

    def cancel(self, jobs: Sequence[RemoteJob]) -> None:
        if jobs:
            jobs[0].sequences.cancel()

    async def compute(self, *_: Any) -> Any:
        """Needs the model."""
        raise AnsweredByEngine

    async def call(self, *_: Any) -> Any:
        raise AnsweredByEngine


class StandIn:
    """What a `LanguageModel` needs of its predictor to encode and decode."""

    def __init__(self, tokenizers: Any, description: Mapping[str, Any]) -> None:
        limit = description["max_model_len"]
        self.answers, self.limit = description["answers"], limit
        self.folder = SimpleNamespace(tokenizers=tokenizers, max_tokens=limit)

    def retrieve_as_trained(self) -> None:
        """Only the engine process retrieves."""


class RemoteRegistry(ModelRegistry):
    """Names as in the engine processes. Only language models are used here; `use` of another raises
    `AnsweredByEngine`."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        settings: Settings,
        metrics: Metrics,
        default: str | None,
        aliases: Mapping[str, str],
        engines: Engines,
    ) -> None:
        super().__init__(folders, settings, metrics, default, aliases)
        self.engines = engines
        self.elsewhere: set[str] = set()  # names of models that are no language models

    async def load(self, entry: Entry) -> None:
        async with entry.lock:
            if entry.model is not None:
                return
            if entry.name in self.elsewhere:
                raise AnsweredByEngine
            engine = self.engines.choose()
            question = Question(engine)
            try:
                await engine.ask(question, Kind.OPEN, to_bytes(entry.name))
                description = await question.accepted
            finally:
                question.cancel()
            try:
                if description is None:
                    raise AnsweredByEngine
                entry.model = await asyncio.to_thread(RemoteModel, entry, description, self.settings, self.engines)
                freeze_objects()
            except AnsweredByEngine:
                self.elsewhere.add(entry.name)
                raise
