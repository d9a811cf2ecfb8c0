"""The decoding fields of a request, named as OpenAI and vLLM name them, and what they mean for an engine."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.settings import Limits
from allyouneed.apps.serve.strict import Bool, Int, RequestBody, Text

GREEDY_BELOW = 1e-4  # a lower temperature is greedy: logits divided by it would overflow
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]
Stop = Annotated[Text | list[Text] | None, Field(description="strings before which a text ends")]


@dataclass(frozen=True)
class GenerationOptions:
    """How a request is decoded. `sampling`: fields of `Decoding` that were set. `beam`: width of a beam search.
    `max_tokens`: None: the model's default. `logprobs`: how many alternatives of each token to report; None: not even
    its own log-probability. `draws`: sequences per prompt, of which the best `n` are returned."""

    sampling: dict[str, Any] = field(default_factory=dict)
    beam: int | None = None
    length_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    draws: int = 1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    exact: bool = False
    source_lang: str | None = None
    target_lang: str | None = None

    def __hash__(self) -> int:
        return hash((*self.sampling.items(), self.beam, self.max_tokens, self.min_tokens, self.draws, self.seed))

    def with_max_tokens(self, tokens: int) -> GenerationOptions:
        return replace(self, max_tokens=tokens)

    def exactly(self) -> GenerationOptions:
        return replace(self, exact=True)

    @property
    def samples(self) -> bool:
        """Whether the request asks for sampling, by a temperature or the like."""
        return bool(self.sampling) or self.seed is not None or self.draws > 1

    def decoding(self, defaults: dict[str, Any], prefers_beam: bool) -> dict[str, Any]:
        """Changes to the decoding options `defaults` of a folder. `prefers_beam`: a model that is decoded as its folder
        says unless the request asks for sampling; others sample at temperature 1 by default."""
        shared: dict[str, Any] = {"stop": self.stop, "min_length": self.min_tokens}
        if self.repetition_penalty is not None:
            shared["repetition_penalty"] = self.repetition_penalty
        if self.length_penalty is not None:
            shared["length_penalty"] = self.length_penalty
        if self.beam is not None:
            return shared | {"method": "beam", "beam": self.beam, "best": self.n}
        if prefers_beam and not self.samples:
            return shared
        temperature = self.sampling.get("temperature", defaults.get("temperature", 1.0))
        shared["loops"] = None
        if temperature < GREEDY_BELOW:
            return shared | {"method": "greedy"}
        seed = new_seed() if self.seed is None else self.seed % (1 << 64)
        return shared | {"method": "sample", "best": 1, "seed": seed} | self.sampling | {"temperature": temperature}


def new_seed() -> int:
    """Of a request without one."""
    return secrets.randbits(63)


class SamplingFields(RequestBody):
    temperature: Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[Int, Field(ge=-1, description="0 or -1: all tokens")] | None = None
    min_p: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(strict=True, gt=0, le=100, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Text, Annotated[float, Field(strict=True, ge=-100, le=100)]] | None = None
    min_tokens: Annotated[Int, Field(ge=0)] | None = None
    n: Annotated[Int, Field(ge=1)] | None = None
    stop: Stop = None
    seed: Int | None = None
    use_beam_search: Annotated[Bool, Field(description="beams: best_of, or n")] | None = None
    length_penalty: Annotated[float, Field(strict=True, ge=-10, le=10, allow_inf_nan=False)] | None = None
    exact: Annotated[Bool, Field(description="bit-identical whatever else the server computes")] | None = None
    source_lang: Annotated[Text | None, Field(description="of a multilingual translation model")] = None
    target_lang: Text | None = None

    def options(
        self, limits: Limits, max_tokens: int | None, logprobs: int | None, best_of: int | None = None
    ) -> GenerationOptions:
        n = self.n or 1
        draws = n if best_of is None else best_of
        if draws < n:
            raise ApiError(f"best_of={draws} is less than n={n}", param="best_of")
        if draws > limits.choices:
            name = "n" if best_of is None else "best_of"
            raise ApiError(f"{name}={draws}, the limit is {limits.choices}", param=name, code="limit_exceeded")
        if logprobs is not None and logprobs > limits.logprobs:
            raise ApiError(f"logprobs={logprobs}, the limit is {limits.logprobs}", param="logprobs")
        sampling = {
            name: value
            for name in ("temperature", "top_p", "top_k", "min_p")
            if (value := getattr(self, name)) is not None and not (name in ("top_k", "min_p") and value <= 0)
        }
        beams = bool(self.use_beam_search)
        if beams and (sampling.get("temperature") or "top_p" in sampling or "top_k" in sampling):
            raise ApiError("use_beam_search and sampling are exclusive; remove temperature, top_p, top_k", param="n")
        if beams and logprobs is not None:
            raise ApiError("logprobs: not available with use_beam_search", param="logprobs")
        return GenerationOptions(
            sampling={} if beams else sampling,
            beam=draws if beams else None,
            length_penalty=self.length_penalty,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            n=n,
            draws=1 if beams else draws,
            stop=_stop(self.stop, limits),
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=_bias(self.logit_bias or {}, limits),
            logprobs=logprobs,
            exact=bool(self.exact),
            source_lang=self.source_lang,
            target_lang=self.target_lang,
        )


def _stop(given: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    words = [given] if isinstance(given, str) else given or []
    if len(words) > limits.stop_words:
        raise over_limit("stop strings", len(words), limits.stop_words, "stop")
    for word in words:
        if not word:
            raise ApiError("a stop string is empty", param="stop")
        if len(word) > limits.stop_characters:
            raise over_limit("characters of a stop string", len(word), limits.stop_characters, "stop")
    return tuple(words)


def _bias(given: dict[str, float], limits: Limits) -> dict[int, float]:
    if len(given) > limits.logit_bias:
        raise over_limit("entries of logit_bias", len(given), limits.logit_bias, "logit_bias")
    found = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ApiError(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        found[int(key)] = value
    return found
