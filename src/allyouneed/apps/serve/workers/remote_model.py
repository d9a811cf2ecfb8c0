"""Models of engine processes as an API process uses them: it tokenizes, renders chat templates and detokenizes; token
ids go to an engine process and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from allyouneed.apps.serve.engine.registry import Entry, ModelRegistry, failures_of_the_server
from allyouneed.apps.serve.metrics import Metrics
from allyouneed.apps.serve.settings import Settings
from allyouneed.apps.serve.workers.channel import Kind, pack_requests, to_bytes, with_body
from allyouneed.apps.serve.workers.engine_client import EngineConnection, Question, RemoteSequences
from allyouneed.runtime.process import freeze_objects

if TYPE_CHECKING:
    from allyouneed.apps.serve.engine.sequences import SequenceGroup


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


class RemoteModel:
    """A language model, for `SequenceGroup`s. `text`: encodes and decodes as in the engine process."""

    reads_images = False

    def __init__(self, entry: Entry, description: Mapping[str, Any], settings: Settings, engines: Engines) -> None:
        from allyouneed.apps.serve.engine.text_models import LanguageModel
        from allyouneed.data.chat.template import ChatTemplate
        from allyouneed.interop.load import vocabularies

        self.name, self.settings, self.engines = entry.name, settings, engines
        tokenizers, limits = vocabularies(entry.path), settings.limits
        if tokenizers.hash != description["tokenizer_hash"]:
            raise AnsweredByEngine
        self.text = LanguageModel(StandIn(tokenizers, description))  # type: ignore[arg-type]
        self.max_model_len = self.text.max_model_len
        within = limits.template_seconds, limits.template_characters
        self.template = ChatTemplate.find(entry.path, tokenizers.target, None, *within)

    def close(self) -> None:
        if self.template is not None:
            self.template.close()

    async def submit(self, group: SequenceGroup, streams: bool) -> None:
        engine, spec = self.engines.choose(), group.specs[0]
        request, seed = RemoteSequences(engine, group), spec.decoding.seed
        rules: Any = spec.logits_processor
        content = {
            "model": self.name,
            # the seed is sent beside it: requests that differ in nothing else are parsed once
            "decoding": spec.decoding.model_dump(mode="json", exclude_defaults=True, exclude={"seed"}),
            "rules": None if rules is None else [rules.bias, rules.presence, rules.frequency, rules.top],
            "draws": group.draws,
            "exact": bool(group.fields.exact),
            "client": group.client,
            "streams": streams,
        }
        try:
            await engine.ask(request, Kind.GENERATE, *with_body(content, pack_requests(group.requests, seed)))
            await request.accepted
        except asyncio.CancelledError:
            request.cancel()
            raise
        group.states, group.cancel = request.states, request.cancel

    async def compute(self, *_: Any) -> Any:
        """Needs the model."""
        raise AnsweredByEngine

    async def call(self, *_: Any) -> Any:
        raise AnsweredByEngine


class StandIn:
    """What a `LanguageModel` needs of its predictor to encode and decode."""

    def __init__(self, tokenizers: Any, description: Mapping[str, Any]) -> None:
        from allyouneed.infer.decoding.base import DecodingSpec

        limit, eos = description["max_model_len"], tokenizers.target.eos
        self.answers, self.limit = description["answers"], limit
        self.folder = SimpleNamespace(tokenizers=tokenizers, max_tokens=limit, decoding=description["decoding"])
        # the engine process adds the rest of the specification
        self.engine = SimpleNamespace(runner=SimpleNamespace(spec=lambda decoding: DecodingSpec(decoding, eos)))

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
                with failures_of_the_server(entry):
                    entry.model = await asyncio.to_thread(RemoteModel, entry, description, self.settings, self.engines)
                freeze_objects()
            except AnsweredByEngine:
                self.elsewhere.add(entry.name)
                raise
