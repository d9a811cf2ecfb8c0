"""Whether a model's decode step can be captured in a CUDA graph: every part has a fixed shape and never waits for the
host. Each part answers by a rule; one without a rule is captured if it keeps no state and its forward does not branch
on data (`traceable`). A rule raises `Unsupported` with the reason."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from allyouneed.nn.embed.tokens import TokenEmbedModule
from allyouneed.nn.heads.vocabulary import VocabularyHeadModule
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from allyouneed.nn.models.stack import Stack
from allyouneed.nn.patterns.core import And, Causal, Full, Or, Prefix, Window
from allyouneed.nn.positions.alibi import AlibiModule
from allyouneed.nn.positions.gaussian import GaussianModule
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.nn.positions.t5_bias import BucketsModule
from allyouneed.nn.states.kv_cache import KVCache
from allyouneed.runtime.cuda.static_cache import make_static_state
from allyouneed.runtime.program import Unsupported
from allyouneed.runtime.rules import Blocker, Rules
from allyouneed.runtime.trace import require_traced_model, trace

check_capture = Rules("rule for CUDA graphs")


def can_capture(model: Any) -> bool:
    """Whether the decode step can be captured."""
    return next(step_blockers(model), None) is None


def can_capture_prefill(model: Any) -> bool:
    """Whether the prefill of a model whose step can be captured can be, too: no padding after a prompt leaves a trace
    in its states."""
    return next(prefill_blockers(model), None) is None


def step_blockers(model: Any) -> Iterator[Blocker]:
    try:
        require_traced_model(model)
    except Unsupported as reason:
        yield Blocker("", str(reason))
        return
    for name in ("embed", "head"):
        yield from _blockers(name, getattr(model, name))
    yield from stack_blockers("decoder", model.decoder, model.config.width)


def prefill_blockers(model: Any) -> Iterator[Blocker]:
    if getattr(model, "source_embed", None) is not None:
        yield from _blockers("source_embed", model.source_embed)
    if hasattr(model, "encoder"):
        yield from stack_blockers("encoder", model.encoder, model.config.width)
    for number, layer in enumerate(model.decoder.new_states()):
        for name, state in layer.items():
            if not isinstance(state, KVCache):
                yield Blocker(f"decoder.blocks.{number}.{name}", f"{type(state).__name__} would keep padding")


def stack_blockers(name: str, stack: Stack, width: int) -> Iterator[Blocker]:
    if len(stack.recurrences):
        yield Blocker(f"{name}.recurrences", "recurrence in depth has no rule for CUDA graphs")
        return
    for number, block in enumerate(stack.blocks):
        for slot, part in block.sublayers.items():  # type: ignore[union-attr, operator]
            yield from _blockers(f"{name}.blocks.{number}.{slot}", part)
    if (reason := _untraceable(stack, width)) is not None:
        yield Blocker(name, reason)


_traced: weakref.WeakKeyDictionary[Stack, str | None] = weakref.WeakKeyDictionary()


def _untraceable(stack: Stack, width: int) -> str | None:
    if stack not in _traced:
        try:
            trace(stack, width, states=True)
            _traced[stack] = None
        except Unsupported as reason:
            _traced[stack] = str(reason)
    return _traced[stack]


def _blockers(path: str, part: Any) -> Iterator[Blocker]:
    try:
        check_sublayer(part) if check_capture.get(part) is None else check_capture(part)
    except Unsupported as reason:
        yield Blocker(path, str(reason))


def check_sublayer(part: Any) -> None:
    """A part without a rule."""
    if not hasattr(part, "new_state"):
        raise Unsupported(f"{type(part).__name__} has no rule for CUDA graphs")
    try:
        state = part.new_state()
    except ValueError:  # it cannot decode; as part of an encoder it need not
        state = None
    if state is not None and make_static_state.get(part) is None:
        raise Unsupported(f"{type(part).__name__} has no fixed-shape state")
    if not part.traceable:
        raise Unsupported(f"the forward of {type(part).__name__} branches on data")


@check_capture.register(SelfAttention)
def _self_attention(part: SelfAttention) -> None:
    check_capture(part.relative)
    if part.own_score or part.relative.adds_key_bias:
        raise Unsupported(f"{type(part.scores).__name__} has no rule for CUDA graphs")
    if part.caches_hidden:
        raise Unsupported("a cache of hidden states has no fixed-shape form")
    check_capture(part.pattern)


@check_capture.register(CrossAttention)
def _cross_attention(part: CrossAttention) -> None:
    if part.own_score or part.relative.adds_key_bias:
        raise Unsupported(f"{type(part.scores).__name__} has no rule for CUDA graphs")
    if type(part.relative) is not RelativeModule:
        raise Unsupported(f"{type(part.relative).__name__} has no rule for CUDA graphs in cross-attention")


@check_capture.register(RelativeModule, RotaryModule, AlibiModule, BucketsModule, GaussianModule)
def _positions(part: RelativeModule) -> None:
    """Arithmetic of positions on the device."""


@check_capture.register(Causal, Full, Window, Prefix)
def _pattern(pattern: Any) -> None:
    """Arithmetic of positions on the device: nothing is looked up on the host."""


@check_capture.register(And, Or)
def _combined(pattern: And | Or) -> None:
    check_capture(pattern.left)
    check_capture(pattern.right)


@check_capture.register(TokenEmbedModule)
def _embed(part: TokenEmbedModule) -> None:
    if part.asking is not None:
        raise Unsupported("query embeddings have no rule for CUDA graphs")


@check_capture.register(VocabularyHeadModule)
def _head(part: VocabularyHeadModule) -> None:
    if part.transform is not None:
        raise Unsupported("a head with a transform has no rule for CUDA graphs")
    if part.product is not None:
        raise Unsupported(f"{type(part.product).__name__} has no rule for CUDA graphs")
