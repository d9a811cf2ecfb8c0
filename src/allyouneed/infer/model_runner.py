"""A model with what running it takes: its special tokens, limits, and prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.prefill import EncodedMedium, encode_media, fill_slots, prefill, start
from allyouneed.infer.request import Request
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States
from allyouneed.runtime.cpu.executor import cpu_executor

if TYPE_CHECKING:
    from allyouneed.data.shortlist import Shortlist


class RunnerOptions(TypedDict, total=False):
    """Named arguments of a `ModelRunner`."""

    budget: int
    bidirectional_prompt: bool
    ends: Sequence[int]
    counted: int
    ended: bool
    exact: bool


class ModelRunner:
    """`forbidden`: tokens that are never produced. `limit`: positions of a target row, if they are limited. `budget`:
    the most tokens (times beams) decoded together offline. `bidirectional_prompt`: the tokens of a prompt attend to
    each other. `ends`, `counted`, `ended`: see `DecodingSpec`. `exact`: each request runs in passes of its own, so that
    its bits do not depend on the rest of the batch (kernels depend on the shape of a batch).

    It may live as long as the model: between calls weights may change or move, and `exact` and `retrieve` be set."""

    def __init__(
        self,
        model: Any,
        bos: int,
        eos: int,
        pad: int,
        forbidden: Sequence[int] = (),
        limit: int | None = None,
        budget: int = 8192,
        bidirectional_prompt: bool = False,
        ends: Sequence[int] = (),
        counted: int = 0,
        ended: bool = False,
        exact: bool = False,
    ) -> None:
        self.model = model  # an nn.Module that is a `DecodableModel`
        self.bos, self.eos, self.pad = bos, eos, pad
        self.forbidden = [token for token in dict.fromkeys(forbidden) if token != eos]
        self.ends, self.counted, self.ended = ends, counted, ended
        self.limit, self.budget = limit, budget
        self.bidirectional_prompt, self.exact = bidirectional_prompt, exact
        self.retrieve: Callable[..., Any] | None = None  # finds neighbours for a retrieval model
        self.shortlist: Shortlist | None = None  # of a translation model

    @property
    def captures(self) -> bool:
        """Whether its steps are captured as CUDA graphs: on a GPU."""
        return self.device.type == "cuda"

    @property
    def decoder(self) -> Any:
        """What decodes: the model, or its program where it has one (runtime/cpu/executor.py)."""
        return cpu_executor(self.model)

    @property
    def device(self) -> torch.device:
        parameters, name = self._first_weight
        found: torch.device = parameters[name].device
        return found

    @cached_property
    def _first_weight(self) -> tuple[dict[str, Any], str]:
        """Where the first parameter is kept: finding it in an int8 model takes half a millisecond."""
        return next(
            (module._parameters, name)
            for module in self.model.modules()
            for name, weight in module._parameters.items()
            if weight is not None
        )

    def spec(self, decoding: Decoding, counted: int | None = None, draft: Any = None) -> DecodingSpec:
        """`counted`: instead of the engine's own. `draft`: a `Draft`, for speculative decoding."""
        count = self.counted if counted is None else counted
        forbidden, ends = tuple(self.forbidden), tuple(self.ends)
        return DecodingSpec(decoding, self.eos, forbidden, ends, count, self.ended, draft=draft)

    def token_limit(self, request: Request) -> int:
        """The most new tokens of a request: the last one is never read back, so it needs no position."""
        if self.limit is None:
            return request.limit
        return max(1, min(request.limit, self.limit + 1 - len(request.prompt)))

    def start(self, requests: Sequence[Request], model: Any = None) -> States:
        """Encode the sources. `model`: another executor of the same weights than `decoder`."""
        sources = [request.source for request in requests if request.source is not None]
        rows = Rows.of(sources, self.pad).to(self.device) if sources else len(requests)
        return start(model or self.decoder, rows, self.retrieve)

    def encode_media(self, requests: Sequence[Request]) -> list[list[EncodedMedium]]:
        """The images and sounds in each prompt; empty if no prompt has any."""
        return encode_media(self.model, requests) if any([request.media for request in requests]) else []

    def prefill_chunk(
        self,
        states: States,
        chunks: Sequence[Sequence[int]],
        model: Any = None,
        media: Sequence[Sequence[EncodedMedium]] = (),
    ) -> Tensor:
        """Read the next tokens of each row's prompt; hidden states of the last ones (rows, width). `media`: those of
        each row."""
        rows = Rows.of(chunks, self.pad).to(states.device)
        rows = fill_slots(rows, media, states.lengths) if media else rows
        return prefill(model or self.decoder, states, rows, self.bidirectional_prompt)

    def prefill(self, requests: Sequence[Request]) -> tuple[States, Tensor]:
        """Read sources and whole prompts; hidden states of the last tokens (requests, width)."""
        model = self.decoder
        states = self.start(requests, model)
        prompts = [request.prompt for request in requests]
        return states, self.prefill_chunk(states, prompts, model, self.encode_media(requests))
