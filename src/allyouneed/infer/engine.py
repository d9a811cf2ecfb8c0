"""Decoding any list of sources. The engine knows tokens and the States protocol, not what the model is made of.

Sources of similar length are decoded together; a finished one leaves the batch, and everyone gets the answer they would
get alone. What comes back is in the order of what came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from allyouneed.infer.decoding import Decoding
from allyouneed.infer.search import Hypothesis, Job, search
from allyouneed.nn.batch import Rows

SHORT = 16  # a source counts as at least this long: short ones still need logits over the whole vocabulary


class Engine:
    """`forbidden`: tokens never to be produced; `limit`: the longest target the model can place, if there is one;
    `budget`: how many source tokens (times beams) are decoded together."""

    def __init__(
        self,
        model: Any,
        bos: int,
        eos: int,
        pad: int,
        forbidden: Sequence[int] = (),
        limit: int | None = None,
        budget: int = 8192,
    ) -> None:
        self.model = model  # an nn.Module that is a `Decoder`
        self.bos, self.eos, self.pad = bos, eos, pad
        self.forbidden = [token for token in dict.fromkeys(forbidden) if token != eos]
        self.limit, self.budget = limit, budget

    def generate(
        self,
        sources: Sequence[Sequence[int]],
        decoding: Decoding | None = None,
        prefix: Sequence[Sequence[int]] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        places: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Hypothesis]]:
        """The best hypotheses of each source, best first.

        `prefix`: tokens each target must begin with; they are not repeated in the hypotheses.
        `on_progress(done, total)` is called after each batch.
        `places`: numbers that name each source; with the seed they decide its samples. Its index when not given.
        An empty source gets one empty hypothesis: nothing in, nothing out.
        """
        decoding = decoding or Decoding()
        for name, given in (("prefix", prefix), ("places", places)):
            if given is not None and len(given) != len(sources):
                raise ValueError(f"{len(sources)} sources, but {len(given)} entries in {name}")
        found = [[Hypothesis([], 0.0, 0.0, [], True)] for _ in sources]
        done = sum(1 for source in sources if not source)
        was_training: bool = self.model.training
        self.model.eval()
        try:
            for batch in self._batches(sources, decoding.rows):
                prompts = [[self.bos, *(prefix[i] if prefix is not None else ())] for i in batch]
                names = [tuple(places[i]) if places is not None else (i,) for i in batch]
                with torch.inference_mode():
                    answers = search(self._job([sources[i] for i in batch], prompts, names, decoding))
                for index, answer in zip(batch, answers, strict=True):
                    found[index] = answer
                done += len(batch)
                if on_progress is not None:
                    on_progress(done, len(sources))
        finally:
            self.model.train(was_training)
        return found

    def _batches(self, sources: Sequence[Sequence[int]], rows: int) -> Iterator[list[int]]:
        """Indices of sources of similar length, the longest first (what does not fit in memory fails at once)."""
        batch: list[int] = []
        for index in sorted(range(len(sources)), key=lambda i: -len(sources[i])):
            if not sources[index]:
                break
            longest = max(len(sources[batch[0] if batch else index]), SHORT)
            if batch and (len(batch) + 1) * longest * rows > self.budget:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _job(
        self, sources: list[Sequence[int]], prompts: list[list[int]], names: list[tuple[int, ...]], decoding: Decoding
    ) -> Job:
        """Let the model read the sources and the prompts."""
        device = next(self.model.parameters()).device
        limits = [decoding.limit(len(source)) for source in sources]
        if self.limit is not None:  # the last token is never read back, so it needs no place
            limits = [max(1, min(n, self.limit + 1 - len(prompt))) for n, prompt in zip(limits, prompts, strict=True)]
        states = self.model.start(Rows.of(sources, self.pad).to(device))
        hidden = self.model.advance(Rows.of(prompts, self.pad).to(device), states)
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        last = hidden[torch.arange(len(prompts), device=device), ends]
        return Job(self.model, states, last, limits, names, decoding, self.eos, self.forbidden)
