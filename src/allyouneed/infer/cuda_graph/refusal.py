"""Why requests are decoded without CUDA graphs. docs/decoding.md lists the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from allyouneed.infer.decoding.base import DecodingSpec
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.request import Request
from allyouneed.infer.speculative.drafts import Draft, DraftModel, PromptLookup
from allyouneed.runtime.cuda.capture import can_capture, position_limit, reads_past_tokens_only


class ModelLimits(NamedTuple):
    """Whether a step of the model can be captured, how many positions it has then (None: any number), and whether it
    takes as long with more positions than a row needs."""

    captures: bool
    positions: int | None
    spares: bool


def model_limits(model: Any) -> ModelLimits:
    return ModelLimits(can_capture(model), position_limit(model), reads_past_tokens_only(model))


def refusal(
    runner: ModelRunner, spec: DecodingSpec, requests: Sequence[Request] = (), known: ModelLimits | None = None
) -> str | None:
    """Why model, specification and requests have no steps of a fixed shape that do not depend on the host; None: they
    have. `known`: the limits of the model, if the caller has looked them up."""
    found = _options(spec, requests) or _engine(runner)
    if found is not None:
        return found
    if spec.draft is not None and (found := _draft(runner, spec.draft)) is not None:
        return found
    ahead = 0 if spec.draft is None else spec.draft.ahead
    limits = [known or model_limits(runner.model)]
    if isinstance(spec.draft, DraftModel):
        limits.append(model_limits(spec.draft.runner.model))
    for captures, positions, _ in limits:
        if not captures:
            return "a part of the model cannot be captured"
        if positions is not None and _longest(runner, requests, ahead) > positions:
            return f"parts of the model have {positions} positions, which a captured step cannot check"
    return None


def _longest(runner: ModelRunner, requests: Sequence[Request], ahead: int) -> int:
    sizes = [max(len(r.prompt) + runner.token_limit(r) + ahead, len(r.source or ())) for r in requests]
    return max(sizes, default=0)


def _options(spec: DecodingSpec, requests: Sequence[Request]) -> str | None:
    beams = spec.decoding.method == "beam" and spec.decoding.beam > 1
    if beams and any(request.observer is not None for request in requests):
        return "every candidate of the beams is recorded"
    if any(request.allowed is not None for request in requests):
        return "each request has its own tokens to choose from"
    return None


def _engine(runner: ModelRunner) -> str | None:
    return "neighbours are retrieved by the host" if runner.retrieve is not None else None


def _draft(runner: ModelRunner, draft: Draft) -> str | None:
    if type(draft) is PromptLookup:
        return None
    if type(draft) is not DraftModel:
        return f"{type(draft).__name__} drafts on the host"
    if draft.runner.device != runner.device:
        return "the draft model is on another device"
    if draft.runner.bidirectional_prompt:
        return "the tokens of a prompt attend to each other in the draft model"
    return _engine(draft.runner)
