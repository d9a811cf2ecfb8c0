"""The engine: decodes any number of sources or prompts with one model. It knows tokens and `States`, not what the model
consists of. Every call submits requests to a scheduler and steps it until they are finished; results come back in the
order of the input, and each is the same as alone in its batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import closing, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState
from allyouneed.infer.decoding.observe import current_observer
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.model_runner import ModelRunner, RunnerOptions
from allyouneed.infer.request import Medium, Request, StopCondition
from allyouneed.infer.scheduler import Scheduler, new_graphs
from allyouneed.infer.scheduling.admission import LargestFirst
from allyouneed.infer.speculative.stats import check_draft_options
from allyouneed.infer.validation import RequestValidator
from allyouneed.runtime.process import evaluation_mode, pause_gc

if TYPE_CHECKING:
    import torch

    from allyouneed.infer.cuda_graph.runner import GraphRunnerCache
    from allyouneed.infer.speculative.drafts import Draft

Progress = Callable[[int, int], None]
Forward = Callable[[list[Any]], Sequence[Any]]  # one output per input


class Engine:
    """`forbidden`, `limit`, `options`: of its `ModelRunner`. Keep one engine as long as its model: captured CUDA graphs
    belong to it.

    `shared`: decodes in place of a scheduler of the call's own; `shared_compute`: in place of `compute`. A server sets
    them, so that the calls of all its threads share steps (apps/serve/engine/loop.py)."""

    aligns = True  # targets are read from the begin token on, so that cross-attention aligns them

    shared: Callable[[Sequence[Request], DecodingSpec, Progress | None], list[list[Hypothesis]]] | None = None
    shared_compute: Callable[[Hashable, Sequence[Any], Forward], list[Any]] | None = None

    _graphs: GraphRunnerCache | None = None

    def __init__(
        self,
        model: Any,
        bos: int,
        eos: int,
        pad: int,
        forbidden: Sequence[int] = (),
        limit: int | None = None,
        **options: Unpack[RunnerOptions],
    ) -> None:
        self.runner = ModelRunner(model, bos, eos, pad, forbidden, limit, **options)

    @property
    def model(self) -> Any:
        return self.runner.model

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def bos(self) -> int:
        """The begin token, for requests to a scheduler (docs/decoding.md)."""
        return self.runner.bos

    @property
    def graphs(self) -> GraphRunnerCache | None:
        """Captured CUDA graphs of this engine; None on a CPU."""
        self._graphs = self._graphs or new_graphs(self.runner)
        return self._graphs

    @cached_property
    def validator(self) -> RequestValidator:
        return RequestValidator(self.runner)

    def generate(
        self,
        sources: Sequence[Sequence[int]],
        decoding: Decoding | None = None,
        prefix: Sequence[Sequence[int]] | None = None,
        on_progress: Progress | None = None,
        sample_keys: Sequence[Sequence[int]] | None = None,
        stop: StopCondition | None = None,
        draft: Draft | None = None,
        *,
        prompts: Sequence[Sequence[int]] | None = None,
        counted: int | None = None,
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each source, best first.

        `prefix`: tokens after the begin token that each target must start with; they are not repeated in the
        hypotheses. `prompts`: the same with the begin token, in place of the engine's own.
        `on_progress(finished, total)` is called as sources are finished.
        `sample_keys`: with the seed they decide the samples of each source; its index by default.
        `stop`: ends a target, besides the end token. `draft`: proposes tokens (speculative decoding).
        `counted`: prompt tokens that count as decoded where lengths matter; the engine's own by default.
        An empty source gets one empty hypothesis.
        """
        decoding = decoding or Decoding()
        for name, given in (("prefix", prefix), ("sample_keys", sample_keys), ("prompts", prompts)):
            if given is not None and len(given) != len(sources):
                raise ValueError(f"{len(sources)} sources, but {len(given)} entries in {name}")
        if prompts is None:
            prompts = [[self.runner.bos, *start] for start in prefix or [()] * len(sources)]
        keys = [tuple(key) for key in sample_keys] if sample_keys is not None else [(n,) for n in range(len(sources))]
        limits = {length: decoding.limit(length) for length in set(map(len, sources))}
        requests = [
            Request(prompt, limits[len(source)], key, source, stop)
            for source, prompt, key in zip(sources, prompts, keys, strict=True)
        ]
        return self.decode(requests, self.runner.spec(decoding, counted, draft), on_progress)

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding | None = None,
        on_progress: Progress | None = None,
        first: int = 0,
        stop: StopCondition | None = None,
        draft: Draft | None = None,
        media: Sequence[Sequence[Medium]] | None = None,
    ) -> list[list[Hypothesis]]:
        """The continuations of each prompt (begin token included), best first; the prompt is not repeated. `first`: the
        index of the first prompt in a longer list, for its samples. For `stop` and `draft` see `generate`. `media`: the
        images and sounds in each prompt."""
        decoding = decoding or Decoding()
        limit = decoding.continuation_limit()
        given = [()] * len(prompts) if media is None else [tuple(some) for some in media]
        requests = [
            Request(prompt, limit, (first + n,), stop=stop, media=some)
            for n, (prompt, some) in enumerate(zip(prompts, given, strict=True))
        ]
        return self.decode(requests, self.runner.spec(decoding, draft=draft), on_progress)

    def stream(
        self,
        prompt: Sequence[int],
        decoding: Decoding,
        first: int = 0,
        stop: StopCondition | None = None,
        draft: Draft | None = None,
        media: Sequence[Medium] = (),
    ) -> Generator[int, None, Hypothesis]:
        """The tokens of the best hypothesis of `complete` as they are decoded; those of a beam search at its end. The
        generator returns the hypothesis."""
        spec = self.runner.spec(decoding, draft=draft)
        if draft is not None:
            check_draft_options(decoding)
        scheduler = self._offline()
        with evaluation_mode(self.model), closing(scheduler):
            request = Request(prompt, decoding.continuation_limit(), (first,), stop=stop, media=tuple(media))
            state = scheduler.submit(request, spec)
            state.streams = True
            yield from scheduler.stream(state)
            return state.hypotheses[0]

    def decode(
        self, requests: Sequence[Request], spec: DecodingSpec | Decoding, on_progress: Progress | None = None
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each request, best first; all are decoded by one specification."""
        spec = self.runner.spec(spec) if isinstance(spec, Decoding) else spec
        if spec.draft is not None:
            check_draft_options(spec.decoding)
        if (observer := current_observer()) is not None:
            return observer.decode(self, requests, spec, on_progress)
        if self.shared is not None:
            return self.shared(requests, spec, on_progress)
        return self._decode([(request, spec) for request in requests], on_progress)

    def decode_each(self, requests: Sequence[tuple[Request, DecodingSpec]]) -> list[list[Hypothesis]]:
        """`decode` of requests whose specifications differ in nothing but their logits processors: the model reads
        their tokens together."""
        if self.shared is not None or current_observer() is not None:
            return [self.decode([request], spec)[0] for request, spec in requests]
        return self._decode(requests)

    def _decode(
        self, requests: Sequence[tuple[Request, DecodingSpec]], on_progress: Progress | None = None
    ) -> list[list[Hypothesis]]:
        scheduler, graphs = self._offline(), self.graphs
        # garbage collection would stall a GPU that is kept busy by captured graphs
        with (
            nullcontext() if graphs is None else pause_gc(),
            nullcontext() if graphs is None else graphs.ask_model_once(),
        ):
            states = scheduler.submit_all(requests)
            report = None if on_progress is None else _reporter(states, on_progress)
            try:
                scheduler.run(report)
            finally:
                scheduler.close()
        return [state.hypotheses for state in states]

    def compute(self, key: Hashable, inputs: Sequence[Any], function: Forward) -> list[Any]:
        """The outputs of a function that runs the model; calls with the same key may be computed together."""
        if self.shared_compute is not None:
            return self.shared_compute(key, inputs, function)
        return list(function(list(inputs)))

    def scheduler(self, **options: Any) -> Scheduler:
        """A scheduler for requests that arrive at any time; `Scheduler` names the options."""
        graphs = None if options.get("pool") is not None else self.graphs
        return Scheduler(self.runner, **{"graphs": graphs, "validator": self.validator} | options)

    def _offline(self) -> Scheduler:
        queue = LargestFirst(self.runner.budget)
        return Scheduler(self.runner, queue=queue, graphs=self.graphs, validator=self.validator)


def _reporter(states: Sequence[RequestState], on_progress: Progress) -> Callable[[], None]:
    """Calls `on_progress` when more requests are finished; they are counted in the order of admission."""
    largest_first = iter(sorted(states, key=lambda state: -state.request.size))
    finished, current = 0, next(largest_first, None)

    def report() -> None:
        nonlocal finished, current
        before = finished
        while current is not None and current.done:
            finished, current = finished + 1, next(largest_first, None)
        if finished > before:
            on_progress(finished, len(states))

    return report
