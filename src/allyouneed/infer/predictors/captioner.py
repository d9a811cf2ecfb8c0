"""Descriptions of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allyouneed.config import tree_of
from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import DecodingSpec, RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.frames import forbidden_tokens
from allyouneed.infer.predictors.base import EvaluationResult, Predictor, evenly_spaced
from allyouneed.infer.predictors.image_classifier import Image, for_readable, pixels_of, read_images
from allyouneed.infer.request import Request
from allyouneed.infer.running_batch import RunningBatch
from allyouneed.metrics.translation import evaluate
from allyouneed.nn.batch import Rows, Signal
from allyouneed.nn.states.base import States
from allyouneed.runtime.process import inference

TOGETHER = 16  # images decoded together


@dataclass(frozen=True)
class Caption:
    """The text of an image; `score`: log-probability over length penalty."""

    text: str
    score: float


class Captioner(Predictor):
    """Describes images."""

    def caption(self, images: Image | list[Image], **options: Any) -> Any:
        """The text of an image, or of each image of a list. `options`: `beam=1`, `max_length=30`, …"""
        many = images if isinstance(images, list) else [images]
        found = [full.text for full in self.caption_full(many, **options)]
        return found if isinstance(images, list) else found[0]

    def caption_full(
        self, images: Sequence[Image], *, decoding: Decoding | None = None, first: int = 0, **options: Any
    ) -> list[Caption]:
        """The same with scores. `decoding`: in place of the folder's options; `first`: the index of the first image in
        a longer request, which samples depend on."""
        if not isinstance(images, list | tuple):
            raise UserError("caption_full takes a list of images; use [image] for a single one")
        chosen = Decoding.of(self.folder.decoding if decoding is None else tree_of(decoding), **options)
        found: list[Caption] = []
        for start in range(0, len(images), TOGETHER):
            found += self._decode(images[start : start + TOGETHER], chosen, first + start)
        return found

    @inference()
    def _decode(self, images: Sequence[Image], decoding: Decoding, first: int) -> list[Caption]:
        target = self.folder.tokenizers.target
        pixels = read_images(pixels_of(self.folder), images)
        memory = self.model.encode(Signal(pixels.to(self.device, next(self.model.parameters()).dtype)))
        states = States(self.model.decoder.new_states(), len(images), self.device, memory)
        prompt = [target.opening[0] if target.opening else target.bos]
        hidden = self.model.advance(Rows.of([prompt] * len(images)).to(self.device), states)
        limit = decoding.max_length or self.folder.max_tokens
        limit = limit if self.limit is None else min(limit, self.limit)
        spec = DecodingSpec(decoding, target.eos, tuple(forbidden_tokens(target)))
        requests = [
            RequestState(Request(prompt, limit, (first + number,)), spec, limit) for number in range(len(images))
        ]
        RunningBatch(self.model, states, [(spec, requests)]).run(hidden[:, -1])
        if error := next((request.error for request in requests if request.error is not None), None):
            raise error
        best = [request.hypotheses[0] for request in requests]
        return [Caption(target.decode(one.tokens), one.score) for one in best]

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """BLEU and chrF of the texts, and the percentage of exact matches."""
        examples, found, notes = for_readable(
            examples,
            pixels_of(self.folder),
            lambda some: [full.text for full in self.caption_full([one.content for one in some], decoding=decoding)],
        )
        expected = [example.value for example in examples]
        scores = evaluate(found, expected, None, resamples=resamples)
        samples = [
            {"image": example.name, "reference": example.value, "found": text}
            for example, text in evenly_spaced(list(zip(examples, found, strict=True)), show)
        ]
        figures = {"bleu": scores.bleu, "chrf": scores.chrf, "exact": 100 * scores.exact}
        return EvaluationResult(figures, scores.text(), samples, notes)
