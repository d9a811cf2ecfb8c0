"""Predictors that decode: each keeps its engine, so that captured CUDA graphs and caches outlive a call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from allyouneed.config import tree_of
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.base import Predictor
from allyouneed.infer.speculative.stats import check_draft_options

if TYPE_CHECKING:
    from allyouneed.infer.speculative.drafts import Draft

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CallOptions:
    """How the texts of a call are decoded; see `GeneratingPredictor.call_options`."""

    decoding: Decoding
    on_progress: Progress | None = None
    first: int = 0
    draft: Draft | None = None


class GeneratingPredictor(Predictor):
    def call_options(
        self,
        *,
        decoding: Decoding | None = None,
        on_progress: Progress | None = None,
        first: int = 0,
        draft: Any = None,
        ahead: int | None = None,
        **changes: Any,
    ) -> CallOptions:
        """What every method that decodes takes by name. `decoding`: in place of the folder's options; `changes`: single
        ones (`beam=1`, `max_length=60`, …). `on_progress(finished, total)` is called as texts are finished. `first`:
        the index of the first text in a longer request; samples depend on it and on the seed alone. `draft`: a smaller
        model, or "lookup", that drafts `ahead` tokens per step (speculative decoding)."""
        options = self.decoding_options(changes, decoding)
        drafter: Draft | None = None
        if draft is not None or ahead is not None:
            from allyouneed.infer.speculative.drafts import draft_for

            drafter = draft_for(self, draft, ahead, lambda other: other.draft_engine.runner)
        if drafter is not None:
            check_draft_options(options)
        return CallOptions(options, on_progress, first, drafter)

    def decoding_options(self, changes: dict[str, Any], decoding: Decoding | None = None) -> Decoding:
        """The folder's decoding options, or those in their place, with these changes; a sampling option implies
        `method=sample`."""
        return Decoding.of(self.folder.decoding if decoding is None else tree_of(decoding), **changes)

    @abstractmethod
    def build_engine(self) -> Engine:
        """An engine for the current model."""

    @property
    def engine(self) -> Engine:
        """The predictor's engine; rebuilt when the model object or its device changes."""
        return self.cached_engine("engine", self.build_engine)

    @property
    def draft_engine(self) -> Engine:
        """The engine with which this model drafts for another one."""
        return self.engine

    def engine_for(self, decoding: Decoding, draft: Any = None) -> Engine:
        """The engine of requests with these options: `engine`, or one that reads sources of any length."""
        options = decoding.unlimited
        if options is None:
            return self.engine
        if draft is not None:
            raise UserError("a draft reads sources within its limit only; remove draft or unlimited")

        def build() -> Engine:
            from allyouneed.infer.retrieval.unlimited import UnlimitedModel

            engine = self.build_engine()
            engine.runner.model = UnlimitedModel(self.model, options, self.folder.max_tokens)
            return engine

        return self.cached_engine(f"unlimited {options!r}", build)

    def cached_engine(self, name: str, build: Callable[[], Engine]) -> Engine:
        engines: dict[str, tuple[Any, torch.device, Engine]] = self.__dict__.setdefault("_engines", {})
        model, device = self.model, self.device
        if name not in engines or engines[name][0] is not model or engines[name][1] != device:
            engines[name] = (model, device, build())
        engine = engines[name][2]
        engine.runner.exact = self.exact
        return engine
