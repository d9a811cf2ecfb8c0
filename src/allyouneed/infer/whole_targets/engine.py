"""Engines that do not generate targets token by token: with mask-predict (mask_predict.py), by CTC (ctc.py), from both
ends (synchronous.py). They take the requests of a translator; there are no steps to share with a scheduler, so a batch
of sources is decoded in one call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine, Forward, Progress
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.runtime.process import inference

BUDGET = 8192  # source tokens of a batch times hypotheses of each source, padding included


class TargetEngine(Engine):
    """`method`: what it is called in error messages."""

    method: str
    aligns = False
    iterates = False  # has `Decoding.iterations`

    @abstractmethod
    def targets(self, sources: list[Sequence[int]], spec: DecodingSpec) -> list[list[Hypothesis]]:
        """The hypotheses of each source, best first; no source is empty."""

    def check(self, spec: DecodingSpec) -> None:
        """Refuse options that this way of decoding does not have."""
        options = spec.decoding
        refused = {
            "iterations": options.iterations is not None and not self.iterates,
            "draft": spec.draft is not None,
            "method=sample": options.method == "sample",
            "repetition_penalty and no_repeat": options.has_penalties,
            "stop": bool(options.stop),
            "a glossary or logits_processor": spec.logits_processor is not None,
        }
        for name, given in refused.items():
            if given:
                raise UserError(f"{name}: not supported by {self.method}")

    def decode(
        self, requests: Sequence[Request], spec: DecodingSpec | Decoding, on_progress: Progress | None = None
    ) -> list[list[Hypothesis]]:
        spec = self.runner.spec(spec) if isinstance(spec, Decoding) else spec
        self.check(spec)
        sources = [self.validator.request(request).source for request in requests]
        found: list[list[Hypothesis]] = [[Hypothesis([], 0.0, 0.0, [], True)] for _ in sources]
        done = len([source for source in sources if not source])
        for batch in self._batches(sources, spec.decoding.rows):
            some = [sources[number] or [] for number in batch]
            for number, own in zip(batch, self.compute((self.method, spec), some, self._forward(spec)), strict=True):
                found[number] = own[: spec.decoding.best]
            done += len(batch)
            if on_progress is not None:
                on_progress(done, len(sources))
        return found

    def _forward(self, spec: DecodingSpec) -> Forward:
        """Decodes sources without dropout and gradients. A server may call it with those of several requests."""

        def run(sources: list[Any]) -> list[list[Hypothesis]]:
            with inference(self.model):
                return self.targets(sources, spec)

        return run

    def _batches(self, sources: Sequence[Sequence[int] | None], rows: int) -> Iterator[list[int]]:
        """Indices of sources of similar length; one at a time in exact mode."""
        batch: list[int] = []
        for number in sorted((n for n, one in enumerate(sources) if one), key=lambda n: -len(sources[n] or ())):
            longest = len(sources[batch[0]] or ()) if batch else 0
            if batch and (self.runner.exact or (len(batch) + 1) * longest * rows > BUDGET):
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def scheduler(self, **options: Any) -> Scheduler:
        raise UserError(f"{self.method} writes whole targets: token ids and streams need a model that decodes by token")
