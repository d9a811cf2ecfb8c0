"""Predictors that decode: each keeps its engine, so that captured CUDA graphs and caches outlive a call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.base import Predictor


class GeneratingPredictor(Predictor):
    @abstractmethod
    def build_engine(self) -> Engine:
        """An engine for the current model."""

    @property
    def engine(self) -> Engine:
        """The predictor's engine; rebuilt when the model object or its device changes."""
        return self.cached_engine("engine", self.build_engine)

    def cached_engine(self, name: str, build: Callable[[], Engine]) -> Engine:
        engines: dict[str, tuple[Any, torch.device, Engine]] = self.__dict__.setdefault("_engines", {})
        model, device = self.model, self.device
        if name not in engines or engines[name][0] is not model or engines[name][1] != device:
            engines[name] = (model, device, build())
        engine = engines[name][2]
        engine.exact = self.exact
        return engine
