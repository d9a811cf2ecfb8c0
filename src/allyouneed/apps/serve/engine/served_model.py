"""A loaded model with its engine loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import allyouneed
from allyouneed.apps.inspect.views.model import ViewModel
from allyouneed.apps.serve.engine.forward import CHUNK
from allyouneed.apps.serve.engine.loop import CallCancelled, EngineLoop, ThreadCall, Wanted, current_call
from allyouneed.apps.serve.engine.sequences import SequenceGroup
from allyouneed.apps.serve.engine.text_models import TextModel, text_model
from allyouneed.apps.serve.errors import ApiError, log, log_failure
from allyouneed.apps.serve.metrics import Metrics
from allyouneed.apps.serve.sampling import SamplingFields
from allyouneed.apps.serve.settings import Limits, Settings
from allyouneed.apps.translate.translator import Translator
from allyouneed.data.chat.template import ChatTemplate, find_template
from allyouneed.errors import UserError
from allyouneed.infer.block_manager import block_bytes, shares_prefixes
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.base import Predictor
from allyouneed.infer.predictors.embedder import Embedder
from allyouneed.infer.predictors.generating import GeneratingPredictor
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.predictors.interleaved import InterleavedGenerator
from allyouneed.infer.predictors.registry import TASKS, predictor
from allyouneed.infer.predictors.rewriting.seq2seq import Seq2Seq
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.interop.heads import for_task
from allyouneed.interop.load import about, resolve_device
from allyouneed.nn.models.weights import widen_half_for_cpu
from allyouneed.nn.states.paged import BLOCK, BlockPool
from allyouneed.runtime.memory import available_memory
from allyouneed.runtime.process import free_objects, ignore_warnings

T = TypeVar("T")
CALLS = 256  # of predictors at once
PREFILL_BUDGET = {"cuda": 8192}  # prompt tokens read in one step: as many as take a few milliseconds
WARM_TOKENS = 16  # of the prompts and answers that a model is warmed up with
MEMORY_SHARE = 0.25  # of the free memory, for the blocks of a model
PREFIX_SHARE = 0.125  # of the free memory of a CPU, for cached prefixes: as many bytes as the model has, at most this
LEAST_PREFIXES = 64 << 20  # bytes of the cached prefixes of a small model


class PoolSize(NamedTuple):
    """Blocks of a pool, how many of them cached prefixes may hold that no request uses, and the bytes of one."""

    blocks: int
    evictable: int
    block_bytes: int


class ServedModel:
    def __init__(
        self, name: str, path: Path, predictor: Predictor, settings: Settings, metrics: Metrics, event_loop: Any
    ) -> None:
        self.name, self.path, self.predictor, self.settings = name, path, predictor, settings
        self.loop = EngineLoop(name, self._scheduler, settings.limits.queue, metrics, event_loop)
        # each waits for the engine loop, so there may be many more than processors
        self.threads = ThreadPoolExecutor(CALLS, thread_name_prefix=f"calls of {name}")
        if isinstance(predictor, GeneratingPredictor):
            predictor.engine.shared = self.loop.decode
            predictor.engine.shared_compute = self.loop.compute_now

    @classmethod
    def load(
        cls, name: str, path: Path, settings: Settings, metrics: Metrics, event_loop: asyncio.AbstractEventLoop
    ) -> ServedModel:
        device = resolve_device(settings.device, path)
        found = allyouneed.load(path, device, dtype=settings.dtype)
        if device == "cpu" and settings.dtype is None:
            widen_half_for_cpu(found.model)
        if isinstance(found, GeneratingPredictor):
            _ = found.engine.runner.decoder  # the CPU's program is made now, not for the first request
            find_template(found.folder.path, found.folder.originals)  # one that cannot be read is an error now
        model = cls(name, path, found, settings, metrics, event_loop)
        model.log_pool_size()
        return model

    def warm_up(self) -> None:
        """On a GPU: capture CUDA graphs and compile kernels now, not for the first requests."""
        if not self.captures:
            return
        try:
            self.loop.warm_up([*self._examples()] if self.generates else []).result()
        except Exception as error:  # requests will fail in the same way
            log_failure(error, f"warming up {self.name} failed")

    def _examples(self) -> Iterator[Wanted]:
        """A short greedy request and a sampled one."""
        for temperature in (0.0, 1.0):
            fields = SamplingFields(temperature=temperature, seed=0)
            try:
                request = self.text.encode([0] * WARM_TOKENS, fields, WARM_TOKENS)
                spec = self.text.spec(request, fields)
            except UserError:  # it requires a language, or allows no more than a few tokens
                continue
            yield request._replace(limit=max(1, WARM_TOKENS - spec.counted_prompt), sample_key=(0,)), spec

    @property
    def captures(self) -> bool:
        """Whether requests are decoded by captured CUDA graphs."""
        engine = self.predictor.engine if isinstance(self.predictor, GeneratingPredictor) else None
        return isinstance(engine, Engine) and engine.device.type == "cuda"

    def _scheduler(self, exact: bool) -> Scheduler:
        """Paged where prompts can share blocks. Encoder-decoders keep their states in tensors of their own: their
        prompts are a token or two, and beams reorder rows at every step. So does exact mode: bits of a shared prefix
        depend on the request that read it."""
        assert isinstance(self.predictor, GeneratingPredictor)
        engine, rows = self.predictor.engine, self.settings.rows
        budget = self.settings.budget or PREFILL_BUDGET.get(engine.device.type, 512)
        if exact:
            retrieve, engine = engine.runner.retrieve, self.predictor.build_engine()
            engine.runner.exact, engine.runner.retrieve = True, retrieve
        elif self.pool_size is not None:
            blocks, evictable, _ = self.pool_size
            pool = BlockPool(blocks, most_evictable=evictable)
            return engine.scheduler(rows=rows, budget=budget, pool=pool, graphs=engine.graphs)
        return engine.scheduler(rows=rows, budget=budget)

    @cached_property
    def pool_size(self) -> PoolSize | None:
        """None: this model's states are not paged. The pool has what `kv_memory` holds; by default enough for all rows
        at their longest, within a share of the free memory, and in any case enough for one. Cached prefixes have all
        that is free of it where the pool is allocated at once (on a GPU); elsewhere, where memory is taken as blocks
        are used, as many bytes as the weights, within a share of the free memory."""
        settings, predictor = self.settings, self.predictor
        if not settings.paged or not isinstance(predictor, GeneratingPredictor):
            return None
        engine = predictor.engine
        whole = getattr(predictor, "writes_whole_targets", False)  # no scheduler decodes them
        if whole or not isinstance(engine, Engine) or not shares_prefixes(engine.runner):
            return None
        block, free = block_bytes(engine.runner), available_memory(engine.device)
        longest = -(-self.max_model_len // BLOCK) + 2
        blocks = settings.rows * longest
        if settings.kv_memory is not None:
            blocks = max(1, settings.kv_memory // block)
        elif free is not None:
            blocks = max(longest, min(blocks, int(free * MEMORY_SHARE) // block))
        if settings.prefix_memory is not None:
            return PoolSize(blocks, min(blocks, settings.prefix_memory // block), block)
        if engine.device.type != "cpu":
            return PoolSize(blocks, blocks, block)
        weights = sum(one.nbytes for one in (*engine.model.parameters(), *engine.model.buffers()))
        prefixes = weights if free is None else min(weights, int(free * PREFIX_SHARE))
        return PoolSize(blocks, min(blocks, max(longest, LEAST_PREFIXES // block, prefixes // block)), block)

    def log_pool_size(self) -> None:
        if self.pool_size is not None:
            blocks, evictable, block = self.pool_size
            log.info(
                "%s: keys and values take up to %s (--kv-memory), those of prompts kept for later ones %s of it "
                "(--prefix-memory)",
                self.name,
                megabytes(blocks * block),
                megabytes(evictable * block),
            )

    def close(self) -> None:
        self.loop.stop()
        self.threads.shutdown(wait=False, cancel_futures=True)
        if "template" in self.__dict__ and self.template is not None:
            self.template.close()

    @property
    def task(self) -> str:
        return str(self.predictor.folder.task["kind"])

    @cached_property
    def text(self) -> TextModel:
        found = text_model(self.predictor)
        if found is None:
            raise self.wrong_task("generate text")
        return found

    @property
    def generates(self) -> bool:
        return isinstance(self.predictor, Generator | Seq2Seq | Translator)

    @property
    def max_model_len(self) -> int:
        return self.text.max_model_len if self.generates else self.predictor.max_input

    def frame(self, ids: Sequence[int]) -> list[int]:
        """Tokens of a text with the special tokens that the model reads it with."""
        tokenizers = self.predictor.folder.tokenizers
        if isinstance(self.predictor, Generator):
            return [*tokenizers.target.opening, *ids]
        if self.generates:
            before, after = tokenizers.source.source_affixes
            return [*before, *ids, *after]
        return tokenizers.source.frame(ids)[0]

    @cached_property
    def facts(self) -> dict[str, Any]:
        return {"task": self.task, "max_model_len": self.max_model_len}

    @cached_property
    def description(self) -> dict[str, Any] | None:
        """What another process needs to encode prompts and decode answers (workers/remote_model.py). None: it cannot;
        only language models in folders are that simple."""
        if not isinstance(self.predictor, Generator) or self.reads_images or not self.path.is_dir():
            return None
        hash = self.predictor.folder.tokenizers.hash
        return {
            "tokenizer_hash": hash,
            "answers": self.predictor.answers,
            "max_model_len": self.max_model_len,
            "decoding": self.predictor.folder.decoding,
        }

    @cached_property
    def embedder(self) -> Embedder:
        """The model itself, or the body of a pretrained one under a pooling head; they share their weights."""
        if isinstance(self.predictor, Embedder):
            return self.predictor
        if not TASKS[self.task].pretrained:
            raise self.wrong_task("embed texts")
        found = predictor(for_task(self.predictor.folder, "similarity"))
        assert isinstance(found, Embedder)
        return found

    @cached_property
    def template(self) -> ChatTemplate | None:
        folder, limits = self.predictor.folder, self.settings.limits
        within = limits.template_seconds, limits.template_characters
        return ChatTemplate.find(folder.path, folder.tokenizers.target, folder.originals, *within)

    @cached_property
    def look(self) -> ViewModel:
        """The model as views of the page see it, with the runs it recorded lately."""
        return ViewModel(self.name, self.predictor, self._compute_in_loop)

    def _compute_in_loop(self, function: Callable[[], Any]) -> Any:
        """Call a function in the engine loop, in its turn, unless the client has left."""
        call = current_call.get()
        if call is not None and call.cancelled:
            raise CallCancelled
        return self.loop.run(function).result()[0]

    async def submit(self, group: SequenceGroup, streams: bool) -> None:
        """Submit all its sequences, or none if one is refused. Its queue gets their tokens if it `streams` or records
        log-probabilities, and their ends."""
        draws, queue, delivery = group.draws, group.queue, self.loop.delivery
        wanted = self.text.sequences(group.requests, group.specs, draws, group.client, delivery, queue, streams)
        exact = bool(group.fields.exact)
        group.states = states = self.loop.submit(wanted, exact, partial(delivery.post_end, queue, draws))
        group.cancel = partial(self.cancel, states)

    def cancel(self, states: Sequence[RequestState]) -> None:
        for state in states:
            if not (state.done or state.cancelled):
                state.cancel()
                self.loop.wake()

    @cached_property
    def reads_images(self) -> bool:
        """Whether chats may contain images; then `encode_pieces` replaces the template."""
        return isinstance(self.predictor, InterleavedGenerator)

    async def encode_pieces(self, pieces: Callable[[Limits], Sequence[Any]], fields: SamplingFields) -> Request:
        """A prompt of texts and images, of a model that `reads_images`."""
        reader = self.predictor
        assert isinstance(reader, InterleavedGenerator)

        def encode() -> Request:
            try:
                read = reader.read_prompt(pieces(self.settings.limits))
            except UserError as error:
                raise ApiError(str(error), param="messages") from None
            return self.text.encode(read.tokens, fields, fields.limit)._replace(media=read.media)

        return await asyncio.to_thread(encode)

    def wrong_task(self, what: str) -> ApiError:
        return ApiError(f"the model {self.name} (task {self.task}) cannot {what}", param="model", code="wrong_task")

    def offering(self, method: str, what: str) -> Any:
        """The predictor, if it has this method."""
        if not callable(getattr(self.predictor, method, None)):
            raise self.wrong_task(what)
        return self.predictor

    async def compute(
        self, key: Hashable, inputs: Sequence[Any], function: Callable[[list[Any]], Sequence[Any]], chunk: int = CHUNK
    ) -> list[Any]:
        """One output per input; computed together with the inputs of other requests with this key."""

        def quietly(some: list[Any]) -> Sequence[Any]:
            with ignore_warnings():  # lengths were checked before
                return function(some)

        future = self.loop.compute(key, inputs, quietly, chunk)
        try:
            found: list[Any] = await asyncio.wrap_future(future)
            return found
        finally:
            future.cancel()

    async def call(self, function: Callable[[], T], client: str, exact: bool) -> T:
        """Call a predictor that decodes, in a thread; its requests join those of others in the engine loop."""
        call = ThreadCall(client, exact)
        token = current_call.set(call)
        try:
            context = copy_context()
        finally:
            current_call.reset(token)
        work = asyncio.get_running_loop().run_in_executor(self.threads, lambda: context.run(function))
        try:
            return await asyncio.shield(work)
        except CallCancelled:
            raise ApiError("the request was cancelled", 503) from None
        finally:
            call.cancel()
            self.loop.wake()
            if not work.done():
                work.add_done_callback(_log_abandoned)


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def _log_abandoned(work: asyncio.Future[Any]) -> None:
    """The end of a call whose client has left: an error that is not due to that is logged."""
    error = None if work.cancelled() else work.exception()
    if error is not None and not isinstance(error, CallCancelled | UserError):
        log_failure(error, "a call failed after its client had left")


def read_facts(path: Path) -> dict[str, Any]:
    """Task and `max_model_len` of a folder, without its weights."""
    try:
        found = about(path)
    except UserError:
        return {"task": "unknown", "max_model_len": None}
    limit = found.get("max_tokens")
    return {"task": found["task"]["kind"], "max_model_len": limit}


def free_memory() -> None:
    """Return the memory of models that nothing refers to any more."""
    free_objects()  # a model and its executors refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
