"""The decoding fields of a request, named as OpenAI and vLLM name them, and what they mean for an engine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from allyouneed.apps.serve.errors import ApiError, over_limit
from allyouneed.apps.serve.settings import Limits
from allyouneed.apps.serve.strict import Bool, Int, RequestBody, Text

GREEDY_BELOW = 1e-4  # a lower temperature is greedy: logits divided by it would overflow
Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]
Stop = Annotated[Text | list[Text] | None, Field(description="strings before which a text ends")]


def new_seed() -> int:
    """A seed for a request that has none."""
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

    @property
    def limit(self) -> int | None:
        """The most new tokens; None: the model's default."""
        return None

    @property
    def top(self) -> int | None:
        """How many alternatives of each token to report; None: not even its own log-probability."""
        return None

    @property
    def choices(self) -> int:
        """Beams, or sequences drawn for each prompt, of which the best `n` are returned."""
        return self.n or 1

    @property
    def draws(self) -> int:
        """Sequences of each prompt."""
        return 1 if self.use_beam_search else self.choices

    def check(self, limits: Limits) -> None:
        """Refuse what no model of this server decodes."""
        n, choices, top = self.n or 1, self.choices, self.top
        if choices < n:
            raise ApiError(f"best_of={choices} is less than n={n}", param="best_of")
        if choices > limits.choices:
            name = "n" if getattr(self, "best_of", None) is None else "best_of"
            raise ApiError(f"{name}={choices}, the limit is {limits.choices}", param=name, code="limit_exceeded")
        if top is not None and top > limits.logprobs:
            raise ApiError(f"logprobs={top}, the limit is {limits.logprobs}", param="logprobs")
        if self.use_beam_search and (self.temperature or self.top_p is not None or (self.top_k or 0) > 0):
            raise ApiError("use_beam_search and sampling are exclusive; remove temperature, top_p, top_k", param="n")
        if self.use_beam_search and top is not None:
            raise ApiError("logprobs: not available with use_beam_search", param="logprobs")
        if self.stop is not None:
            _check_stop([self.stop] if isinstance(self.stop, str) else self.stop, limits)
        if self.logit_bias:
            _check_bias(self.logit_bias, limits)

    def decoding(self, defaults: Mapping[str, Any], prefers_beam: bool) -> dict[str, Any]:
        """Changes to the decoding options `defaults` of a folder. `prefers_beam`: a model that is decoded as its folder
        says unless the request asks for sampling, by a temperature or the like; others sample at temperature 1 by
        default. Without a seed, samples are those of seed 0."""
        found: dict[str, Any] = {
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "min_length": self.min_tokens or 0,
        }
        if self.repetition_penalty is not None:
            found["repetition_penalty"] = self.repetition_penalty
        if self.length_penalty is not None:
            found["length_penalty"] = self.length_penalty
        if self.use_beam_search:
            return found | {"method": "beam", "beam": self.choices, "best": self.n or 1}
        sampling: dict[str, Any] = {} if self.temperature is None else {"temperature": self.temperature}
        sampling |= {} if self.top_p is None else {"top_p": self.top_p}
        sampling |= {"top_k": self.top_k} if (self.top_k or 0) > 0 else {}
        sampling |= {"min_p": self.min_p} if self.min_p else {}
        if prefers_beam and not sampling and self.seed is None and self.draws == 1:
            return found
        temperature, found["loops"] = sampling.get("temperature", defaults.get("temperature", 1.0)), None
        if temperature < GREEDY_BELOW:
            return found | {"method": "greedy"}
        seed = (self.seed or 0) % (1 << 64)
        return found | {"method": "sample", "best": 1, "seed": seed} | sampling | {"temperature": temperature}


def _check_stop(words: Sequence[str], limits: Limits) -> None:
    if len(words) > limits.stop_words:
        raise over_limit("stop strings", len(words), limits.stop_words, "stop")
    for word in words:
        if not word:
            raise ApiError("a stop string is empty", param="stop")
        if len(word) > limits.stop_characters:
            raise over_limit("characters of a stop string", len(word), limits.stop_characters, "stop")


def _check_bias(given: Mapping[str, float], limits: Limits) -> None:
    if len(given) > limits.logit_bias:
        raise over_limit("entries of logit_bias", len(given), limits.logit_bias, "logit_bias")
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ApiError(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
