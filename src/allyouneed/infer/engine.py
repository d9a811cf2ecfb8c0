"""Decoding any list of sources or prompts. The engine knows tokens and the States protocol, not what the model is made
of.

Those of similar length are decoded together; a finished one leaves the batch, and everyone gets the answer they would
get alone. What comes back is in the order of what came in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from allyouneed.infer.cuda_graph.runner import GraphRunnerCache
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState, StopCondition
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.running_batch import Job, RunningBatch, search
from allyouneed.infer.speculative.decode import Speculation, refuse, speculate
from allyouneed.infer.speculative.drafts import Draft
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States
from allyouneed.runtime.cpu.executor import cpu_executor

SHORT = 16  # a source counts as at least this long: short ones still need logits over the whole vocabulary


@dataclass(frozen=True, slots=True)
class Request:
    """What is given (a source for those models that read one, and how the target begins), how many more tokens there
    may be, and numbers that name it: with the seed they decide its samples."""

    prompt: Sequence[int]
    limit: int
    place: tuple[int, ...]
    source: Sequence[int] | None = None

    @property
    def size(self) -> int:
        return len(self.prompt) + self.limit if self.source is None else len(self.source)


class Engine:
    """`forbidden`: tokens never to be produced; `limit`: the longest target the model can place, if there is one;
    `budget`: how many tokens (times beams) are decoded together; `seen_whole`: a prompt's tokens all see each other;
    `ends`, `counted`, `ended`: see `Job`. `exact`: nobody shares a pass of the model with anybody, so that answers are
    the same to the last bit whoever else is answered: another shape may be computed by another kernel."""

    def __init__(
        self,
        model: Any,
        bos: int,
        eos: int,
        pad: int,
        forbidden: Sequence[int] = (),
        limit: int | None = None,
        budget: int = 8192,
        seen_whole: bool = False,
        ends: Sequence[int] = (),
        counted: int = 0,
        ended: bool = False,
        exact: bool = False,
    ) -> None:
        self.model = model  # an nn.Module that is a `Decoder`
        self.seen_whole = seen_whole
        self.bos, self.eos, self.pad = bos, eos, pad
        self.forbidden = [token for token in dict.fromkeys(forbidden) if token != eos]
        self.ends, self.counted, self.ended = ends, counted, ended
        self.limit, self.budget = limit, budget
        self.exact = exact
        self.search: Any = None  # for a model that retrieves: how neighbours of its chunks are found
        self.room = GraphRunnerCache(self)  # on a GPU, batches of a fixed shape

    def generate(
        self,
        sources: Sequence[Sequence[int]],
        decoding: Decoding | None = None,
        prefix: Sequence[Sequence[int]] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        places: Sequence[Sequence[int]] | None = None,
        stops: StopCondition | None = None,
        draft: Draft | None = None,
    ) -> list[list[Hypothesis]]:
        """The best hypotheses of each source, best first.

        `prefix`: tokens each target must begin with; they are not repeated in the hypotheses.
        `on_progress(done, total)` is called after each batch.
        `places`: numbers that name each source; with the seed they decide its samples. Its index when not given.
        `stops`: what else ends a target, besides the end mark.
        `draft`: who guesses how targets go on, so that a pass can be worth several tokens.
        An empty source gets one empty hypothesis: nothing in, nothing out.
        """
        decoding = decoding or Decoding()
        for name, given in (("prefix", prefix), ("places", places)):
            if given is not None and len(given) != len(sources):
                raise ValueError(f"{len(sources)} sources, but {len(given)} entries in {name}")
        requests: list[Request | None] = []
        for number, source in enumerate(sources):
            prompt = [self.bos, *(prefix[number] if prefix is not None else ())]
            place = tuple(places[number]) if places is not None else (number,)
            requests.append(Request(prompt, decoding.limit(len(source)), place, source) if source else None)
        return self._answers(requests, decoding, on_progress, stops, draft)

    def go_on(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        first: int = 0,
        stops: StopCondition | None = None,
        draft: Draft | None = None,
    ) -> list[list[Hypothesis]]:
        """How each prompt (begin mark included) goes on; the prompt is not repeated. `first`: the place of the first
        one in a longer request. `stops`: what else ends a text, besides the end mark. `draft`: who guesses how it goes
        on."""
        decoding = decoding or Decoding()
        requests = [Request(prompt, decoding.more(), (first + n,)) for n, prompt in enumerate(prompts)]
        return self._answers(requests, decoding, on_progress, stops, draft)

    @torch.inference_mode()  # of a generator: whoever reads it is outside between two tokens
    def stream(
        self,
        prompt: Sequence[int],
        decoding: Decoding,
        first: int = 0,
        stops: StopCondition | None = None,
        draft: Draft | None = None,
    ) -> Generator[int, None, Hypothesis]:
        """The tokens of the best hypothesis of `go_on`, each as it is chosen; those of a beam search when it is over.
        What comes back at last is the hypothesis."""
        if draft is not None:
            refuse(decoding)
        was_training: bool = self.model.training
        if was_training:  # only then: it is a walk through all parts
            self.model.eval()
        try:
            request = Request(prompt, decoding.more(), (first,))
            heard: list[int] = []
            one = RequestState(self.most(request), (first,), prompt, decoding.seed, stops, heard.append)
            for _ in self._rounds(request, one, decoding, draft):
                yield from heard
                heard.clear()
            yield from heard if decoding.rows == 1 else one.hypotheses[0].tokens
            return one.hypotheses[0]
        finally:
            if was_training:
                self.model.train()

    def _rounds(self, request: Request, one: RequestState, decoding: Decoding, draft: Draft | None) -> Iterator[None]:
        """Whenever there may be more to hear."""
        if draft is None and not self.exact and self.room.open([request], decoding, one.stops):
            yield from self.room.rounds(self.way(decoding), [(request, one)])
            return
        job = self._job([request], decoding, one.stops)
        go_on = self._writing(job, one) if draft is None else Speculation(job, [request], draft, [one]).go_on
        while not one.done:
            yield
            go_on()

    def _writing(self, job: Job, one: RequestState) -> Callable[[], None]:
        crew = RunningBatch(job.model, job.states, [(self.way(job.decoding), [one])], self.limit)
        crew.choose(job.last)
        return crew.read

    @property
    def decoder(self) -> Any:
        """What decodes: the model, or its orders where it has them (runtime/cpu/executor.py)."""
        return cpu_executor(self.model)

    def most(self, request: Request) -> int:
        """So many tokens there may be: the last one is never read back, so it needs no place."""
        return request.limit if self.limit is None else max(1, min(request.limit, self.limit + 1 - len(request.prompt)))

    def way(self, decoding: Decoding) -> DecodingSpec:
        return DecodingSpec(decoding, self.eos, tuple(self.forbidden), tuple(self.ends), self.counted, self.ended)

    def _answers(
        self,
        requests: Sequence[Request | None],
        decoding: Decoding,
        on_progress: Callable[[int, int], None] | None,
        stops: StopCondition | None = None,
        draft: Draft | None = None,
    ) -> list[list[Hypothesis]]:
        if draft is not None:
            refuse(decoding)
        found = [[Hypothesis([], 0.0, 0.0, [], True)] if request is None else [] for request in requests]
        done = sum(request is None for request in requests)
        was_training: bool = self.model.training
        if was_training:  # only then: it is a walk through all parts
            self.model.eval()
        try:
            if draft is None and not self.exact and self.room.open(requests, decoding, stops):
                self.room.answer(requests, found, decoding, stops, on_progress)
                return found
            for numbers, batch in self._batches(requests, decoding.rows * (1 if draft is None else 1 + draft.ahead)):
                with torch.inference_mode():
                    job = self._job(batch, decoding, stops)
                    answers = search(job) if draft is None else speculate(job, batch, draft)
                for number, answer in zip(numbers, answers, strict=True):
                    found[number] = answer
                done += len(batch)
                if on_progress is not None:
                    on_progress(done, len(requests))
        finally:
            if was_training:
                self.model.train()
        return found

    def _batches(self, requests: Sequence[Request | None], rows: int) -> Iterator[tuple[list[int], list[Request]]]:
        """Requests of similar size with their numbers, the largest first: what does not fit in memory fails at once."""
        real = [(number, request) for number, request in enumerate(requests) if request is not None]
        batch: list[tuple[int, Request]] = []
        for number, request in sorted(real, key=lambda both: -both[1].size):
            largest = max((batch[0][1] if batch else request).size, SHORT)
            if batch and (self.exact or (len(batch) + 1) * largest * rows > self.budget):
                yield [n for n, _ in batch], [r for _, r in batch]
                batch = []
            batch.append((number, request))
        if batch:
            yield [n for n, _ in batch], [r for _, r in batch]

    def _job(self, requests: Sequence[Request], decoding: Decoding, stops: StopCondition | None = None) -> Job:
        prompts, limits = [request.prompt for request in requests], [self.most(request) for request in requests]
        states, last = self.read(requests)
        names = [request.place for request in requests]
        way = (self.eos, self.forbidden, prompts, stops, self.ends, self.counted, self.ended)
        return Job(self.decoder, states, last, limits, names, decoding, *way, room=self.limit)

    def read(self, requests: Sequence[Request]) -> tuple[States, Tensor]:
        """Let the model read what is given; hidden states of the last token of each prompt (requests, width)."""
        device = next(self.model.parameters()).device
        prompts = [request.prompt for request in requests]
        sources = [request.source for request in requests if request.source is not None]
        model = self.decoder
        begin = model.start if self.search is None else partial(model.start, search=self.search)
        states = begin(Rows.of(sources, self.pad).to(device) if sources else len(prompts))
        rows = Rows.of(prompts, self.pad).to(device)
        if self.seen_whole:
            given = torch.tensor([len(prompt) for prompt in prompts], device=device)
            rows = replace(rows, prompt=torch.arange(rows.tokens.shape[1], device=device) < given[:, None])
        return states, model.advance(rows, states, last=True)[:, 0]
