"""Whether a model's decode step can be captured in a CUDA graph: every state has a fixed-shape form (static_cache.py,
constant_states.py), and no part waits for the host. A part is captured unless a rule raises `Unsupported` with the
reason; tests/runtime/cuda/test_every_part.py proves it for every part there is. Of a part from outside that waits for
the host after all, the capture fails, and the engine decodes without graphs (infer/cuda_graph/runner.py)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from allyouneed.nn.channels.moe import MoEModule
from allyouneed.nn.embed.tokens import TokenEmbedModule
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from allyouneed.nn.mixers.attention.infini import CompressiveMemory
from allyouneed.nn.mixers.attention.mla import LatentAttentionModule
from allyouneed.nn.mixers.attention.synchronous import SynchronousAttention
from allyouneed.nn.mixers.convolution import RecentTokens
from allyouneed.nn.models.decoder_decoder import DecoderDecoderModel
from allyouneed.nn.models.stack import Stack
from allyouneed.nn.patterns.core import And, Causal, Full, Or, Pattern, Prefix, Window
from allyouneed.nn.positions.alibi import AlibiModule
from allyouneed.nn.positions.gaussian import GaussianModule
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.nn.positions.t5_bias import BucketsModule
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import CrossKVCache, KVCache
from allyouneed.nn.states.nested import NestedStates
from allyouneed.nn.states.recurrent import Recurrent
from allyouneed.nn.sublayer import SubLayer
from allyouneed.runtime.cuda.kernels import check_heads
from allyouneed.runtime.cuda.static_cache import make_static_state, plain_state, step_layers, step_stacks
from allyouneed.runtime.program import Unsupported
from allyouneed.runtime.rules import Blocker, Rules
from allyouneed.runtime.trace import require_traced_model, trace

check_capture = Rules("rule for CUDA graphs", __name__)


def can_capture(model: Any) -> bool:
    """Whether the decode step can be captured."""
    return next(step_blockers(model), None) is None


def can_capture_prefill(model: Any) -> bool:
    """Whether the prefill of a model whose step can be captured can be, too: no padding after a prompt leaves a trace
    in its states, and no layout is looked up on the host."""
    return next(prefill_blockers(model), None) is None


def step_blockers(model: Any) -> Iterator[Blocker]:
    try:
        require_traced_model(model, DecoderDecoderModel)
        check_capture_of(model.embed)
    except Unsupported as reason:
        yield Blocker("", str(reason))
        return
    for name, stack in step_stacks(model):
        for path, part in parts_of(name, stack):
            try:
                check_capture_of(part)
            except Unsupported as reason:
                yield Blocker(path, str(reason))
        if (untraceable := _untraceable(stack)) is not None:
            yield Blocker(name, untraceable)


def parts_of(name: str, stack: Stack) -> Iterator[tuple[str, Any]]:
    for number, block in enumerate(stack.blocks):
        for slot, part in block.sublayers.items():  # type: ignore[union-attr, operator]
            yield f"{name}.blocks.{number}.{slot}", part


_traced: weakref.WeakKeyDictionary[Stack, str | None] = weakref.WeakKeyDictionary()


def _untraceable(stack: Stack) -> str | None:
    if stack not in _traced:
        try:
            trace(stack, stack.width, states=True)
            _traced[stack] = None
        except Unsupported as reason:
            _traced[stack] = str(reason)
    return _traced[stack]


def check_capture_of(part: Any) -> None:
    """Raise `Unsupported` if the state of a part, or of one inside it, cannot be captured."""
    for state in _nested(plain_state(part)):
        if make_static_state.get(state) is None:
            raise Unsupported(f"{type(state).__name__} has no {make_static_state.purpose}")
    for module in part.modules():
        if check_capture.get(module) is not None:
            check_capture(module)


def _nested(state: State | None) -> Iterator[State]:
    if state is None:
        return
    yield state
    for inside in state.parts.values() if isinstance(state, NestedStates) else ():
        yield from _nested(inside)


@check_capture.register(MoEModule)
def _experts(part: MoEModule) -> None:
    """All at once by kernels; expert after expert, the host reads how many tokens each has."""
    if part.capacity is not None or part.row_capacity is not None:
        raise Unsupported("rows that are not in use would take room in the experts' capacity")
    if part.grouped_maps() is None:
        raise Unsupported("experts other than dense feed-forward networks run one after another")


@check_capture.register(SynchronousAttention)
def _synchronous(part: SynchronousAttention) -> None:
    raise Unsupported(f"{type(part).__name__} decodes two directions at once")


@check_capture.register(TokenEmbedModule)
def _embed(part: TokenEmbedModule) -> None:
    if part.asking is not None:
        raise Unsupported("query embeddings have no rule for CUDA graphs")


def position_limit(model: Any) -> int | None:
    """The most tokens of a text or source for which all parts have weights; a captured step cannot check it."""
    found = [getattr(part, "position_limit", None) for part in model.modules()]
    return min((limit for limit in found if limit is not None), default=None)


def reads_past_tokens_only(model: Any) -> bool:
    """Whether the work of a step depends on the tokens that rows have, not on the positions there are for them."""
    if isinstance(model, DecoderDecoderModel):
        return False
    parts = [part for layer in step_layers(model) for part in layer.values()]
    return all(_reads_past_tokens_only(part) for part in parts)


def _reads_past_tokens_only(part: Any) -> bool:
    state = plain_state(part)
    if state is None or isinstance(state, CONSTANT):
        return True
    if type(part) not in (SelfAttention, CrossAttention):
        return False
    try:
        check_heads(part)
    except Unsupported:
        return False
    return part.score_mod().fused


CONSTANT = (Recurrent, RecentTokens, CompressiveMemory)  # states that do not grow


# --- prefill ----------------------------------------------------------------------------------------------------------


def prefill_blockers(model: Any) -> Iterator[Blocker]:
    stacks = [*step_stacks(model), *([("encoder", model.encoder)] if hasattr(model, "encoder") else [])]
    for name, stack in stacks:
        for path, part in parts_of(name, stack):
            if not _prefills_on_device(part):
                yield Blocker(path, f"the forward of {type(part).__name__} branches on data")
        if len(stack.recurrences):
            yield Blocker(name, "recurrence in depth branches on data")
    for layer in step_layers(model):
        for name, part in layer.items():
            state = plain_state(part)
            if state is not None and type(state) not in (KVCache, CrossKVCache):
                yield Blocker(name, f"{type(state).__name__} would keep padding")


POSITIONS = (RelativeModule, RotaryModule, AlibiModule, BucketsModule, GaussianModule)


def _prefills_on_device(part: Any) -> bool:
    if type(part) in (SelfAttention, CrossAttention, LatentAttentionModule):
        own = part.own_score or part.relative.adds_key_bias or getattr(part, "caches_hidden", False)
        return not own and type(part.relative) in POSITIONS and _is_arithmetic(part.pattern)
    inside = [one for one in part.modules() if one is not part and isinstance(one, SubLayer)]  # of branches, of LSRA
    return bool(part.traceable) and all(map(_prefills_on_device, inside))


def _is_arithmetic(pattern: Pattern) -> bool:
    """Computed from positions on the device: nothing is looked up on the host."""
    if isinstance(pattern, And | Or):
        return _is_arithmetic(pattern.left) and _is_arithmetic(pattern.right)
    return isinstance(pattern, Causal | Full | Window | Prefix)
