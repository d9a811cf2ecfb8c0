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

from allyouneed.infer.crew import Crew, Job, search
from allyouneed.infer.decoding import Decoding
from allyouneed.infer.search import Asked, Hypothesis, Stops, Way
from allyouneed.nn.batch import Rows

SHORT = 16  # a source counts as at least this long: short ones still need logits over the whole vocabulary


@dataclass(frozen=True)
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
    `ends`, `counted`, `ended`: see `Job`."""

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
    ) -> None:
        self.model = model  # an nn.Module that is a `Decoder`
        self.seen_whole = seen_whole
        self.bos, self.eos, self.pad = bos, eos, pad
        self.forbidden = [token for token in dict.fromkeys(forbidden) if token != eos]
        self.ends, self.counted, self.ended = ends, counted, ended
        self.limit, self.budget = limit, budget
        self.search: Any = None  # for a model that retrieves: how neighbours of its chunks are found

    def generate(
        self,
        sources: Sequence[Sequence[int]],
        decoding: Decoding | None = None,
        prefix: Sequence[Sequence[int]] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        places: Sequence[Sequence[int]] | None = None,
        stops: Stops | None = None,
    ) -> list[list[Hypothesis]]:
        """The best hypotheses of each source, best first.

        `prefix`: tokens each target must begin with; they are not repeated in the hypotheses.
        `on_progress(done, total)` is called after each batch.
        `places`: numbers that name each source; with the seed they decide its samples. Its index when not given.
        `stops`: what else ends a target, besides the end mark.
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
        return self._answers(requests, decoding, on_progress, stops)

    def go_on(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        first: int = 0,
        stops: Stops | None = None,
    ) -> list[list[Hypothesis]]:
        """How each prompt (begin mark included) goes on; the prompt is not repeated. `first`: the place of the first
        one in a longer request. `stops`: what else ends a text, besides the end mark."""
        decoding = decoding or Decoding()
        requests = [Request(prompt, decoding.more(), (first + n,)) for n, prompt in enumerate(prompts)]
        return self._answers(requests, decoding, on_progress, stops)

    @torch.inference_mode()  # of a generator: whoever reads it is outside between two tokens
    def stream(
        self, prompt: Sequence[int], decoding: Decoding, first: int = 0, stops: Stops | None = None
    ) -> Generator[int, None, Hypothesis]:
        """The tokens of the best hypothesis of `go_on`, each as it is chosen; those of a beam search when it is over.
        What comes back at last is the hypothesis."""
        was_training: bool = self.model.training
        self.model.eval()
        try:
            job = self._job([Request(prompt, decoding.more(), (first,))], decoding, stops)
            heard: list[int] = []
            one = Asked(job.limits[0], (first,), prompt, decoding.seed, stops, heard.append)
            crew = Crew(self.model, job.states, [(self.way(decoding), [one])], self.limit)
            crew.choose(job.last)
            while not one.done:
                yield from heard
                heard.clear()
                crew.read()
            yield from heard if decoding.rows == 1 else one.found[0].tokens
            return one.found[0]
        finally:
            self.model.train(was_training)

    def way(self, decoding: Decoding) -> Way:
        return Way(decoding, self.eos, tuple(self.forbidden), tuple(self.ends), self.counted, self.ended)

    def _answers(
        self,
        requests: Sequence[Request | None],
        decoding: Decoding,
        on_progress: Callable[[int, int], None] | None,
        stops: Stops | None = None,
    ) -> list[list[Hypothesis]]:
        found = [[Hypothesis([], 0.0, 0.0, [], True)] for _ in requests]
        done = sum(request is None for request in requests)
        was_training: bool = self.model.training
        self.model.eval()
        try:
            for numbers, batch in self._batches(requests, decoding.rows):
                with torch.inference_mode():
                    answers = search(self._job(batch, decoding, stops))
                for number, answer in zip(numbers, answers, strict=True):
                    found[number] = answer
                done += len(batch)
                if on_progress is not None:
                    on_progress(done, len(requests))
        finally:
            self.model.train(was_training)
        return found

    def _batches(self, requests: Sequence[Request | None], rows: int) -> Iterator[tuple[list[int], list[Request]]]:
        """Requests of similar size with their numbers, the largest first: what does not fit in memory fails at once."""
        real = [(number, request) for number, request in enumerate(requests) if request is not None]
        batch: list[tuple[int, Request]] = []
        for number, request in sorted(real, key=lambda both: -both[1].size):
            largest = max((batch[0][1] if batch else request).size, SHORT)
            if batch and (len(batch) + 1) * largest * rows > self.budget:
                yield [n for n, _ in batch], [r for _, r in batch]
                batch = []
            batch.append((number, request))
        if batch:
            yield [n for n, _ in batch], [r for _, r in batch]

    def _job(self, requests: list[Request], decoding: Decoding, stops: Stops | None = None) -> Job:
        """Let the model read what is given."""
        device = next(self.model.parameters()).device
        prompts, limits = [request.prompt for request in requests], [request.limit for request in requests]
        if self.limit is not None:  # the last token is never read back, so it needs no place
            limits = [max(1, min(n, self.limit + 1 - len(prompt))) for n, prompt in zip(limits, prompts, strict=True)]
        sources = [request.source for request in requests if request.source is not None]
        begin = self.model.start if self.search is None else partial(self.model.start, search=self.search)
        states = begin(Rows.of(sources, self.pad).to(device) if sources else len(prompts))
        rows = Rows.of(prompts, self.pad).to(device)
        if self.seen_whole:
            given = torch.tensor([len(prompt) for prompt in prompts], device=device)
            rows = replace(rows, prompt=torch.arange(rows.tokens.shape[1], device=device) < given[:, None])
        last = self.model.advance(rows, states, last=True)[:, 0]
        names = [request.place for request in requests]
        way = (self.eos, self.forbidden, prompts, stops, self.ends, self.counted, self.ended)
        return Job(self.model, states, last, limits, names, decoding, *way, room=self.limit)
