"""What an engine really decodes, seen from outside a predictor: `with observe_decoding() as seen: model.translate(…)`.

`seen.decoded` lists the requests of all calls in order, with their hypotheses and the record of their beam search. A
predictor may ask for several, such as one for each sentence of a text. `prefixes` maps the index of a request to the
tokens that its answer must begin with; the predictor then works with the whole answer, as if it had been found freely.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis
from allyouneed.infer.decoding.beam_record import BeamRecord
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.penalties import Penalties
from allyouneed.infer.decoding.rules import TokenRules
from allyouneed.infer.request import Request

Progress = Callable[[int, int], None]
T = TypeVar("T")


class DecodingEngine(Protocol):
    """`Engine`, as far as it is observed."""

    runner: Any  # a `ModelRunner`

    def decode(
        self, requests: Sequence[Request], spec: DecodingSpec, on_progress: Progress | None = None
    ) -> list[list[Hypothesis]]: ...

    def compute(
        self, key: Hashable, inputs: Sequence[Any], function: Callable[[list[Any]], Sequence[Any]]
    ) -> list[Any]: ...


@dataclass(frozen=True)
class DecodedRequest:
    """One request. `prefix`: the first tokens of its hypotheses, if they were given; they are not in the prompt."""

    engine: DecodingEngine
    request: Request
    spec: DecodingSpec
    hypotheses: list[Hypothesis]
    prefix: list[int]
    beams: BeamRecord | None  # of what follows the prefix

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """The engine's logits (len(tokens) + 1, vocab) for each token of an answer to this request and for the one
        after it, before penalties and bans. One row fewer where the model has no position for the last."""
        return torch.stack(self.steps(tokens, lambda _, logits: logits))

    def steps(self, tokens: Sequence[int], keep: Callable[[int, Tensor], T]) -> list[T]:
        """`keep(step, logits)` of every row of `logits`; only one row is held at a time."""
        return forced_steps(self.engine, self.request, self.spec, tokens, keep)

    def log_probs(self, tokens: Sequence[int]) -> list[float]:
        """The log-probability of each of these tokens as the answer to the request."""
        return forced_log_probs(self.engine, self.request, self.spec, tokens)

    def logits_after(self, tokens: Sequence[int]) -> Tensor:
        """(vocab,): the last row of `logits`, at the cost of one step."""
        prompt = [*self.request.prompt, *tokens]
        return forced_steps(self.engine, self.request._replace(prompt=prompt), self.spec, (), lambda _, logits: logits)[
            0
        ]

    def continue_each(self, starts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], list[float]]]:
        """At most `count` tokens that continue each start of an answer greedily, and their log-probabilities."""
        greedy = Decoding(method="greedy", loops=None, shortlist=self.spec.decoding.shortlist)
        spec = replace(self.spec, decoding=greedy, draft=None)
        requests = [
            self.request._replace(prompt=[*self.request.prompt, *start], limit=count, stop=None, listener=None)
            for start in starts
        ]
        with _set(None):
            found = self.engine.decode(requests, spec) if requests else []
        return [(one.tokens, one.log_probs) for (one,) in found]

    def next_logits(self, tokens: Sequence[int], decoding: Decoding) -> Tensor:
        """(vocab,): what a token after these is chosen by: `logits` with the penalties and bans of these options."""
        spec, logits = replace(self.spec, decoding=decoding), self.logits_after(tokens)[None]
        penalties = Penalties(decoding, [[*self.request.prompt, *tokens]]) if decoding.has_penalties else None
        allowed = logits if penalties is None else penalties.apply(logits)
        return TokenRules(spec, logits.device).ban_tokens(allowed, torch.tensor([len(tokens)]))[0]


@dataclass
class Observer:
    prefixes: Mapping[int, Sequence[int]] = field(default_factory=dict)
    decoded: list[DecodedRequest] = field(default_factory=list)

    def decode(
        self, engine: DecodingEngine, requests: Sequence[Request], spec: DecodingSpec, on_progress: Progress | None
    ) -> list[list[Hypothesis]]:
        """Observe a call of `Engine.decode`."""
        first = len(self.decoded)
        prefixes = [list(self.prefixes.get(first + number, ())) for number in range(len(requests))]
        searches = spec.decoding.method == "beam" and spec.decoding.beam > 1
        records = [BeamRecord() if searches else None for _ in requests]
        with _set(None):
            observed = [one._replace(observer=record) for one, record in zip(requests, records, strict=True)]
            if any(prefixes):
                both = zip(observed, prefixes, strict=True)
                found = [_decode_after(engine, request, spec, prefix) for request, prefix in both]
            else:
                found = engine.decode(observed, spec, on_progress)
        for request, hypotheses, prefix, record in zip(requests, found, prefixes, records, strict=True):
            self.decoded.append(DecodedRequest(engine, request, spec, hypotheses, prefix, record))
        return found


_current: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observe_decoding(prefixes: Mapping[int, Sequence[int]] | None = None) -> Iterator[Observer]:
    """Observe the engines that this thread calls. `prefixes`: by number of the request."""
    observer = Observer(prefixes or {})
    with _set(observer):
        yield observer


@contextmanager
def _set(observer: Observer | None) -> Iterator[None]:
    token = _current.set(observer)
    try:
        yield
    finally:
        _current.reset(token)


def current_observer() -> Observer | None:
    return _current.get()


def _decode_after(engine: DecodingEngine, request: Request, spec: DecodingSpec, prefix: list[int]) -> list[Hypothesis]:
    """The hypotheses of a request that begin with `prefix`: as if those tokens had been generated."""
    if not prefix:
        return engine.decode([request], spec)[0]
    log_probs = forced_log_probs(engine, request, spec, prefix)
    prompt, limit = [*request.prompt, *prefix], max(1, request.limit - len(prefix))
    counted = replace(spec, counted_prompt=spec.counted_prompt + len(prefix))
    (found,) = engine.decode([request._replace(prompt=prompt, limit=limit)], counted)
    return [_with_prefix(one, prefix, log_probs, counted) for one in found]


def _with_prefix(one: Hypothesis, prefix: list[int], log_probs: list[float], spec: DecodingSpec) -> Hypothesis:
    total = sum(log_probs) + one.log_prob
    divisor = spec.decoding.length_divisor(len(one.log_probs) + spec.counted_prompt)
    return replace(
        one,
        tokens=[*prefix, *one.tokens],
        log_probs=[*log_probs, *one.log_probs],
        log_prob=total,
        score=total / divisor,
    )


def forced_log_probs(
    engine: DecodingEngine, request: Request, spec: DecodingSpec, tokens: Sequence[int]
) -> list[float]:
    """The log-probability of each of these tokens as the answer to a request."""

    def keep(step: int, logits: Tensor) -> float:
        return float(logits.log_softmax(-1)[tokens[step]]) if step < len(tokens) else 0.0

    return forced_steps(engine, request, spec, tokens, keep)[: len(tokens)]


def forced_steps(
    engine: DecodingEngine,
    request: Request,
    spec: DecodingSpec,
    tokens: Sequence[int],
    keep: Callable[[int, Tensor], T],
) -> list[T]:
    """`keep(step, logits)` of every step of the engine while it decodes exactly these tokens, and of the one after
    them. `logits`: (vocab,) float32, on the CPU."""
    processor = _ForcedTokens(list(tokens), keep)
    options = Decoding(method="greedy", loops=None, shortlist=spec.decoding.shortlist)
    plain = DecodingSpec(options, spec.eos, counted_prompt=spec.counted_prompt, logits_processor=processor)
    wanted = request._replace(limit=len(tokens) + 1, stop=None, listener=None, observer=None)
    with _set(None):
        engine.decode([wanted], plain)
    return processor.kept


class _ForcedTokens(Generic[T]):
    """A logits processor that lets only the next of `tokens` be chosen."""

    def __init__(self, tokens: list[int], keep: Callable[[int, Tensor], T]) -> None:
        self.tokens, self.keep = tokens, keep
        self.kept: list[T] = []

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Logits (1, vocab)."""
        step = len(self.kept)
        self.kept.append(self.keep(step, logits[0].detach().float().cpu().clone()))
        if step == len(self.tokens):
            return logits
        only = torch.full_like(logits, -torch.inf)
        only[:, self.tokens[step]] = 0.0
        return only
