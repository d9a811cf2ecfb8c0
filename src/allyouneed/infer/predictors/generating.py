"""Predictors that decode: each keeps its engine, so that captured CUDA graphs and caches outlive a call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.base import Predictor
from allyouneed.infer.retrieval.unlimited import UnlimitedModel


class GeneratingPredictor(Predictor):
    @abstractmethod
    def build_engine(self) -> Engine:
        """An engine for the current model."""

    @property
    def engine(self) -> Engine:
        """The predictor's engine; rebuilt when the model object or its device changes."""
        return self.cached_engine("engine", self.build_engine)

    def engine_for(self, decoding: Decoding, draft: Any = None) -> Engine:
        """The engine of requests with these options: `engine`, or one that reads sources of any length."""
        options = decoding.unlimited
        if options is None:
            return self.engine
        if draft is not None:
            raise UserError("a draft reads sources within its limit only; remove draft or unlimited")

        def build() -> Engine:
            engine = self.build_engine()
            engine.model = UnlimitedModel(self.model, options, self.folder.max_tokens)
            return engine

        return self.cached_engine(f"unlimited {options!r}", build)

    def cached_engine(self, name: str, build: Callable[[], Engine]) -> Engine:
        engines: dict[str, tuple[Any, torch.device, Engine]] = self.__dict__.setdefault("_engines", {})
        model, device = self.model, self.device
        if name not in engines or engines[name][0] is not model or engines[name][1] != device:
            engines[name] = (model, device, build())
        engine = engines[name][2]
        engine.exact = self.exact
        return engine
