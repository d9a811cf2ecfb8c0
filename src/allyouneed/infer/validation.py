"""Validation of requests when they are submitted: whatever could fail later, in a batch with others, is refused here,
with one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import DecodingSpec
from allyouneed.infer.decoding.options import MAX_TOKENS, Decoding
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.request import Medium, Request
from allyouneed.infer.speculative.stats import check_draft_options
from allyouneed.nn.models.base import GenerativeModel
from allyouneed.nn.models.encoder_decoder import EncoderDecoder


class RequestValidator:
    """What a model accepts. Sizes of models without a config are unknown and not checked."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        config = getattr(runner.model, "config", None)
        sizes = getattr(config, "vocabs", None)
        self.source_size: int | None = None if sizes is None else sizes.source
        self.target_size: int | None = None if sizes is None else sizes.target
        self.unlimited: bool = getattr(runner.model, "unlimited", False)  # retrieval/unlimited.py
        self.source_limit: int | None = None if self.unlimited else getattr(config, "source_limit", None)
        self.takes_source: bool | None = None
        if isinstance(config, EncoderDecoder | GenerativeModel):
            self.takes_source = isinstance(config, EncoderDecoder)
        self.accepted: DecodingSpec | None = None  # the last one: the requests of a call share theirs

    def spec(self, given: object) -> DecodingSpec:
        """A valid specification: this one, or the engine's own with these decoding options."""
        accepted = self.accepted
        if accepted is not None and given is accepted:
            return accepted
        if given is None or isinstance(given, Decoding):
            given = self.runner.spec(given or Decoding())
        if not isinstance(given, DecodingSpec) or not isinstance(given.decoding, Decoding):
            raise UserError(f"decoding: must be Decoding or DecodingSpec, not {type(given).__name__}")
        ids = (given.eos, *given.forbidden, *given.extra_eos)
        _tokens("eos, forbidden and extra_eos", ids, self.target_size)
        _integer("counted_prompt", given.counted_prompt, 0)
        if given.decoding.iterations is not None:
            raise UserError("iterations: only for mask-predict; this model decodes token by token")
        if given.logits_processor is not None and not callable(given.logits_processor):
            raise UserError("logits_processor: must be callable")
        if given.decoding.unlimited is not None and not self.unlimited:
            raise UserError("unlimited: only for encoder-decoder models that rewrite or translate texts; remove it")
        if given.draft is not None:
            from allyouneed.infer.speculative.drafts import Draft

            if not isinstance(given.draft, Draft):
                raise UserError(f"draft: must be a Draft, not {type(given.draft).__name__}")
            check_draft_options(given.decoding)
            if given.logits_processor is not None:  # it sees one token at a time; a draft is only for speed
                given = replace(given, draft=None)
        self.accepted = given
        return given

    def request(self, given: Request) -> Request:
        """The same request, valid, with token lists of its own."""
        if not isinstance(given, Request):
            raise UserError(f"must be a Request, not {type(given).__name__}")
        prompt = _tokens("prompt", given.prompt, self.target_size)
        if not prompt:
            raise UserError("the prompt has no tokens; start it with the begin token")
        limit = self.runner.limit
        if limit is not None and len(prompt) > limit:
            raise UserError(f"the prompt has {len(prompt)} tokens, the model {limit} positions; shorten it")
        source = None if given.source is None else _tokens("source", given.source, self.source_size)
        if source is not None and self.source_limit is not None and len(source) > self.source_limit:
            found, most = len(source), self.source_limit
            raise UserError(f"the source has {found} tokens, the model {most} positions; shorten it")
        if self.takes_source is not None and self.takes_source != (source is not None):
            needs = "needs a source: it has an" if self.takes_source else "takes no source: it has no"
            raise UserError(f"the model {needs} encoder")
        if given.media:
            self.check_media(given.media, len(prompt))
        _integer("limit", given.limit, 1, MAX_TOKENS)
        _integer("priority", given.priority)
        if not isinstance(given.client, str):
            raise UserError(f"client: must be text, not {type(given.client).__name__}")
        if not isinstance(given.sample_key, tuple | list):
            raise UserError(f"sample_key: must be a tuple of integers, not {type(given.sample_key).__name__}")
        for part in given.sample_key:
            _integer("sample_key", part, 0)
        if given.listener is not None and not callable(given.listener):
            raise UserError("listener: must be callable")
        if given.stop is not None:
            if not callable(given.stop):
                raise UserError("stop: must be callable")
            _integer("stop.reach", getattr(given.stop, "reach", None), 1)
        if given.allowed is not None:
            return given._replace(prompt=prompt, source=source, allowed=self.check_allowed(given.allowed))
        return given._replace(prompt=prompt, source=source)

    def check_allowed(self, given: Sequence[int] | Tensor) -> Tensor:
        """These tokens, sorted."""
        tokens = _tokens("allowed", given.tolist() if isinstance(given, Tensor) else given, self.target_size)
        if set(tokens) <= set(self.runner.forbidden):
            raise UserError("allowed: no token that may be generated; list at least one")
        return torch.tensor(sorted(set(tokens)))

    def check_media(self, media: Sequence[Medium], length: int) -> None:
        """Refuse images and sounds that the model cannot read, or whose slots do not fit a prompt of this length."""
        end, towers = 0, getattr(getattr(self.runner.model, "config", None), "towers", {})
        for medium in media:
            if not isinstance(medium, Medium):
                raise UserError(f"media: must be of type Medium, not {type(medium).__name__}")
            if medium.kind not in towers:
                reads = f"reads texts and {', '.join(towers)}" if towers else "reads texts only"
                raise UserError(f"{medium.kind}: the model {reads}")
            if problem := towers[medium.kind].problem(medium.slots, tuple(medium.values.shape)):
                raise UserError(f"{medium.kind}: {problem}")
            if not end <= medium.at < medium.at + medium.slots < length:
                raise UserError(
                    f"{medium.kind} at position {medium.at}: {medium.slots} slots must lie in the prompt of {length} "
                    "tokens, one medium after the other, and before its last token"
                )
            end = medium.at + medium.slots


def _integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> None:
    if type(value) is int and (least is None or value >= least) and (most is None or value <= most):
        return  # as nearly always
    try:
        number = index(value)
    except TypeError:
        raise UserError(f"{name}: must be an integer, not {type(value).__name__}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        bounds = f"at least {least:,}" if most is None else f"from {least:,} to {most:,}"
        raise UserError(f"{name}={number}: must be {bounds}")


def _tokens(name: str, given: Sequence[int], size: int | None) -> list[int]:
    """A copy, which the caller cannot change any more."""
    try:
        tokens = list(map(index, given))
    except TypeError:
        raise UserError(f"{name}: must be a list of token ids, not {type(given).__name__}") from None
    if tokens and (min(tokens) < 0 or (size is not None and max(tokens) >= size)):
        wrong = next(token for token in tokens if token < 0 or (size is not None and token >= size))
        within = "" if size is None else f" of {size} tokens"
        raise UserError(f"{name}: token {wrong} is outside the vocabulary{within}")
    return tokens
