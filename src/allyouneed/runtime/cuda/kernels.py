"""Kernels for one token a row: what a part becomes in a captured decode step. A rule returns a function of the input
(rows, width); a part without a rule, or one its rule does not cover, is called as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode

from allyouneed.kernels import usable
from allyouneed.nn.batch import Rows
from allyouneed.nn.channels.feedforward import FFNModule, GLUModule, gated
from allyouneed.nn.context import Context, Memory, TokenLayout
from allyouneed.nn.embed.tokens import TokenEmbedModule
from allyouneed.nn.heads.vocabulary import VocabularyHeadModule
from allyouneed.nn.linear.dense import is_dense
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from allyouneed.nn.mixers.attention.scores import ScoresModule
from allyouneed.nn.mixers.attention.shared_kv import SharedAttention
from allyouneed.nn.models.decoder_decoder import DecoderDecoderModel
from allyouneed.nn.norms import LayerNormModule, RMSNormModule
from allyouneed.nn.ops.activations import fused_name
from allyouneed.nn.ops.attention.decode import DilatedBranches, decode_attention
from allyouneed.nn.ops.attention.dense import dense_mask
from allyouneed.nn.patterns.core import And, Causal, Full, Pattern, Window
from allyouneed.nn.positions.alibi import AlibiModule
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.nn.positions.shaw import ShawModule
from allyouneed.nn.positions.t5_bias import BucketsModule
from allyouneed.nn.positions.transformer_xl import TransformerXLModule
from allyouneed.runtime.cuda.relative_tables import relative_tables
from allyouneed.runtime.cuda.static_cache import StaticKVCache, StaticStates, attend_source
from allyouneed.runtime.cuda.window_cache import StaticWindowKVCache
from allyouneed.runtime.program import Unsupported
from allyouneed.runtime.rules import Rules

Kernel = Callable[[Tensor, Tensor, Context], Tensor]  # x (rows, width), positions (rows,), context


@dataclass
class StepSetup:
    """What all kernels of a step share. `rotations`: cosines beside sines of every position (capacity, head_width), by
    the key of the rotary modules that use them. `made`: parts that got a kernel, with the reason if it
    is the part itself."""

    states: StaticStates
    rotations: dict[Any, Tensor] = field(default_factory=dict)
    shared: Any = None  # the cache that all layers of a second stack read
    gathers_shared: bool = False  # one of them needs its keys in order of positions
    made: list[tuple[Any, str]] = field(default_factory=list)

    @property
    def positions(self) -> Tensor:
        return self.states.static_layout.positions


# rule(part, setup, state, partial) -> Kernel; `partial`: may return partial sums
make_kernel = Rules("kernel", __name__)


def kernel(part: Any, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    try:
        found: Kernel = make_kernel(part, setup, state, partial)
        reason = ""
    except Unsupported as unsupported:
        found, reason = plain_kernel(part, state), str(unsupported)
    except ModuleNotFoundError:
        if setup.states.device.type != "meta":  # a step that only describes (runtime/report.py) needs no Triton
            raise
        found, reason = plain_kernel(part, state), ""
    setup.made.append((part, reason))
    return found


def plain_kernel(part: Any, state: Any) -> Kernel:
    """The part itself."""

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        with NarrowLinear():
            found: Tensor = context.call(part, x[:, None], state)[:, 0]
        return found

    return run


@make_kernel.register(FFNModule)
def _ffn(part: FFNModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    if part.norm is not None:
        raise Unsupported("a norm of the hidden layer has no fused kernel")
    return lambda x, *_: linear(linear(x, part.up, activation=part.activation), part.down, partial=partial)


@make_kernel.register(GLUModule)
def _glu(part: GLUModule, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    if part.norm is not None:
        raise Unsupported("a norm of the hidden layer has no fused kernel")

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        return linear(linear(x, part.gate_up, activation=part.activation, gate=True), part.down, partial=partial)

    return run


@make_kernel.register(SelfAttention)
def _self_attention(part: SelfAttention, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    check_state(state, setup)
    return attention_kernel(part, setup, state, partial, make_bias(part, setup, state))


def check_state(state: Any, setup: StepSetup) -> None:
    if state is None:
        raise Unsupported("attention that keeps no keys of its own has no fused kernel")
    if not isinstance(state, StaticKVCache | StaticWindowKVCache):
        raise Unsupported(f"{type(state).__name__} has no fused kernel")
    if isinstance(state, StaticWindowKVCache) and setup.states.tokens > 1:
        raise Unsupported("a ring of keys has a fused kernel for one token per row")


def attention_kernel(
    part: SelfAttention, setup: StepSetup, state: Any, partial: bool, bias: Callable[[Context], Tensor] | None = None,
    branches: DilatedBranches | None = None,
) -> Kernel:  # fmt: skip
    """`bias`: of all layers of a kind, (rows or 1, heads or 1, slots), added to the scores of their keys. `branches`:
    those of the keys that are attended to; none: all keys."""
    check_heads(part)
    check_state(state, setup)
    one = torch.empty(1, part.kv_heads, 1, part.head_width, dtype=setup.states.dtype, device=setup.states.device)
    state.allocate((one, one))
    relative, tables, scale = part.relative, relative_tables(part, setup.states), part.score_mod().scale
    add_rotation(relative, setup)

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        if part.qkv is not None:  # the attention kernel adds up partial sums
            sums = type(part.scores).prepare is ScoresModule.prepare and len(x) == setup.states.rows
            q, k, v = linear(x, part.qkv, partial=sums).split([part.inner, part.kv_width, part.kv_width], -1)
        else:
            q, k, v = linear(x, part.q), linear(x, part.k), linear(x, part.v)
        q, k, v = (y.unflatten(-1, (-1, part.head_width)) for y in (q, k, v))  # (rows, heads, head_width)
        rotation = None
        if isinstance(relative, RotaryModule):
            rotation = row_rotation(relative, setup, positions, context)
        added = None if bias is None else bias(context)
        seen = state.attend(prepare_scores(part, q), (k, v), positions, scale, rotation, added, tables, branches)
        return linear(seen.flatten(1), part.out, partial=partial)

    return run


def make_bias(part: SelfAttention, setup: StepSetup, state: Any) -> Callable[[Context], Tensor] | None:
    """What is added to the scores because of positions: that of ALiBi or T5, and -inf where a key is not seen. None if
    all keys are seen as they are, but for what the kernel itself adds (`relative_tables`)."""
    score_mod = part.score_mod()
    if isinstance(part.relative, ShawModule | TransformerXLModule):
        score_mod = replace(score_mod, bias=None, values=None)
    if score_mod.plain and sees_all(part.pattern, state.most):
        return None
    if not score_mod.fused or (score_mod.bias is not None and type(part.relative) not in (AlibiModule, BucketsModule)):
        raise Unsupported("the attention kernel computes softmax(q·k + bias)")
    shared = score_mod.static if score_mod.bias is not None else "mask"
    key = ("bias", part.pattern_text, state.most, id(part) if shared is None else shared)

    def compute(context: Context) -> Tensor:
        positions, slots = context.queries.positions, state.slot_layout(context)
        seen = dense_mask(part.pattern, context.queries, slots)[:, :, 0]  # (rows or 1, 1, positions)
        if score_mod.bias is None:
            return torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, float("-inf"))
        q = positions.new_empty(len(positions), part.heads, 1, part.head_width, dtype=setup.states.dtype)
        bias = score_mod.bias(q, positions, slots.positions, score_mod.scale)[:, :, 0]
        return bias.masked_fill(~seen, float("-inf")).contiguous()

    return lambda context: context.memoize(StepSetup, key, lambda: compute(context))


def prepare_scores(part: SelfAttention | CrossAttention | SharedAttention, q: Tensor) -> Tensor:
    """Queries (rows, heads, head_width), or partial sums where they are left as they are."""
    if type(part.scores).prepare is ScoresModule.prepare:
        return q
    return part.scores.prepare(q[:, :, None])[:, :, 0]


def add_rotation(relative: RelativeModule, setup: StepSetup) -> None:
    """Cosines beside sines of every position, if these positions are rotary."""
    if isinstance(relative, RotaryModule) and relative.key not in setup.rotations:
        cos, sin = relative.tables(setup.positions, torch.float32)[0][:, 0, 0]  # (positions, width / 2)
        setup.rotations[relative.key] = torch.cat((cos, sin), -1)


def row_rotation(relative: RotaryModule, setup: StepSetup, positions: Tensor, context: Context) -> Tensor:
    """The rotation at each row's position (rows, head_width), looked up once for all layers."""
    key = relative.key
    return context.memoize(StepSetup, ("rotation", key), lambda: embedding(positions, setup.rotations[key]))


NEW_SHARED = "new key and value of the shared cache"  # of `StepSetup`, in `Context.memo`


def shared_cache(model: DecoderDecoderModel, setup: StepSetup) -> Callable[[Tensor, Tensor, Context], None]:
    """Keys and values of the new tokens, which all layers of the second stack read. The first of these stores them,
    where all have kernels for one token per row."""
    reader = next(part for part in model.second.modules() if isinstance(part, SharedAttention))
    tokens, part, states = setup.shared.tokens, model.keys, setup.states
    fused = type(part.norm) in NORMS and part.k_norm is None and not setup.gathers_shared and states.tokens == 1
    if fused:
        one = torch.empty(1, reader.kv_heads, 1, reader.head_width, dtype=states.dtype, device=states.device)
        tokens.allocate((one, one))

    def run(x: Tensor, positions: Tensor, context: Context) -> None:
        if fused:
            normal = add_norm(x, None, part.norm, context, keep=False)[1]
            both = (linear(normal, each).unflatten(-1, (-1, part.head_width)) for each in (part.k, part.v))
            context.memo[StepSetup, NEW_SHARED] = tuple(both)  # (rows, kv_heads, head_width) each
            return
        tokens.write(part(x[:, None], context, reader), positions)
        keys, values = tokens.read() if setup.gathers_shared else tokens.stored
        context.memory = Memory(x[:, None], states.static_layout, (keys, values))

    return run


@make_kernel.register(SharedAttention)
def _shared_attention(part: SharedAttention, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    try:
        check_attention(part, setup.states.capacity)
    except Unsupported:
        setup.gathers_shared = True
        raise
    add_rotation(part.relative, setup)

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        q = prepare_scores(part, linear(x, part.q).unflatten(-1, (-1, part.head_width)))
        states, cache, scale = setup.states, setup.shared, part.score_mod().scale
        new = context.memo.pop((StepSetup, NEW_SHARED), None)
        counts = positions if new else context.memoize(StepSetup, "tokens of a row", lambda: positions + 1)
        rotation = None
        if isinstance(part.relative, RotaryModule):
            rotation = row_rotation(part.relative, setup, positions, context)
        keys, values, counters = cache.keys, cache.values, states.counters
        seen = decode_attention(q, keys, values, counts, scale, states.table_of(len(x)), new, rotation, counters)
        return linear(seen.flatten(1), part.out, partial=partial)

    return run


@make_kernel.register(CrossAttention)
def _cross_attention(part: CrossAttention, setup: StepSetup, state: Any, partial: bool) -> Kernel:
    check_attention(part, setup.states.capacity)
    if not isinstance(part.pattern, Full):
        raise Unsupported("the attention kernel attends to whole sources")

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        q = prepare_scores(part, linear(x, part.q).unflatten(-1, (-1, part.head_width)))
        seen = attend_source(q, state, setup.states, part.score_mod().scale)
        return linear(seen.flatten(1), part.out, partial=partial)

    return run


def check_attention(part: SelfAttention | CrossAttention | SharedAttention, capacity: int) -> None:
    """Raise `Unsupported` unless it is softmax(q·k) over all keys, rotated by halves or not at all."""
    check_heads(part)
    if not part.score_mod().plain or not sees_all(part.pattern, capacity):
        raise Unsupported("the attention kernel computes softmax(q·k) over all keys")
    if type(part.relative) not in (RelativeModule, RotaryModule):
        raise Unsupported(f"{type(part.relative).__name__} has no fused kernel")


def check_heads(part: SelfAttention | CrossAttention | SharedAttention) -> None:
    """Raise `Unsupported` unless the attention kernel can read the heads."""
    if getattr(part, "caches_hidden", False):
        raise Unsupported("a cache of hidden states has no fused kernel")
    if part.sub_norm is not None or part.q_norm is not None:
        raise Unsupported("norms inside attention have no fused kernel")
    if part.head_width % 2:
        raise Unsupported("the attention kernel reads heads in halves")
    if isinstance(part.relative, RotaryModule):
        check_rotary(part.relative, part.head_width)
    elif type(part.relative) not in FUSED_POSITIONS:
        raise Unsupported(f"{type(part.relative).__name__} has no fused kernel")


FUSED_POSITIONS = (RelativeModule, AlibiModule, BucketsModule, ShawModule, TransformerXLModule)


def check_rotary(rotary: RotaryModule, head_width: int) -> None:
    config = rotary.config
    if rotary.width != head_width or config.order != "halves" or config.xpos is not None or config.values:
        raise Unsupported("the attention kernel rotates whole heads by halves")


def sees_all(pattern: Pattern, capacity: int) -> bool:
    """Whether the newest of at most `capacity` tokens sees all of them."""
    if isinstance(pattern, And):
        return sees_all(pattern.left, capacity) and sees_all(pattern.right, capacity)
    return isinstance(pattern, Causal | Full) or (isinstance(pattern, Window) and pattern.size >= capacity)


# --- embedding and head -----------------------------------------------------------------------------------------------

Embed = Callable[[Tensor], tuple[Tensor, Tensor]]  # token ids -> vectors (rows, width), positions (rows,)


def embed_kernel(embed: TokenEmbedModule, setup: StepSetup) -> Embed:
    states, weight = setup.states, embed.tokens.weight
    bare = embed.types is None and embed.norm is None and embed.widen is None
    limit = states.capacity if embed.limit is None else embed.limit
    last = min(limit, states.capacity) - 1  # rows that have ended stay at the last position
    table: Tensor | None = embed.positions(setup.positions.clamp(max=last))
    if table is not None:
        table = table[0].to(weight.dtype)  # (positions, width)

    def run(tokens: Tensor) -> tuple[Tensor, Tensor]:
        positions = states.device_lengths.clamp(max=last)
        if states.group > 1:
            states.block_table.scatter_(1, positions[:, None], states.row_ids.int()[:, None])
        if not bare:
            # a start, so that the host need not know the longest row: there are positions for all
            x = embed(Rows(tokens[:, None]), TokenLayout(positions[:, None], start=0))[:, 0]
        else:
            x = embedding(tokens, weight)
            if table is not None:
                x = torch.add(embedding(positions, table), x, alpha=embed.scale)
            elif embed.scale != 1:
                x = x * embed.scale
        states.device_lengths.add_(1)
        return x, positions

    return run


def head_kernel(head: Any) -> Kernel:
    plain = type(head) is VocabularyHeadModule and head.maxout is None and head.transform is None

    def run(x: Tensor, positions: Tensor, context: Context) -> Tensor:
        if not plain or head.product is not None or not is_narrow(x, head.weight):
            found: Tensor = head(head.read_source(x[:, None], context))[:, 0]
            return found
        from allyouneed.kernels.triton.small_batch_linear import linear as small_batch

        scores = small_batch(x if head.scale == 1 else x * head.scale, head.weight, head.bias)
        return scores if head.soft_cap is None else head.soft_cap * torch.tanh(scores / head.soft_cap)

    return run


# --- what kernels are made of -----------------------------------------------------------------------------------------


def is_narrow(x: Tensor, weight: Tensor) -> bool:
    """Few rows on a GPU, in half precision: our own kernel reads the weights faster."""
    if not usable(x) or x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return False
    from allyouneed.kernels.triton.small_batch_linear import is_small_batch

    return is_small_batch(len(x), weight) and weight.is_contiguous() and weight.shape[1] % 8 == 0


def linear(x: Tensor, module: Any, activation: Any = None, gate: bool = False, partial: bool = False) -> Tensor:
    """(rows, inputs) to (rows, outputs), or to partial sums of it (parts, rows, outputs)."""
    name = "" if activation is None else fused_name(activation)
    if name is not None and is_dense(module) and is_narrow(x, module.weight):
        from allyouneed.kernels.triton.small_batch_linear import linear as small_batch

        return small_batch(x, module.weight, module.bias, name, gate, partial)
    found: Tensor = module(x)
    if gate:
        return gated(found, activation)
    return found if activation is None else activation(found)


class NarrowLinear(TorchFunctionMode):
    """Linear maps of few rows inside of parts run by our kernel, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and not kwargs and args[0].dim() > 1:
            x, weight, bias = (*args, None)[:3]
            flat = x.flatten(0, -2)
            if is_narrow(flat, weight) and flat.stride(1) == 1:
                from allyouneed.kernels.triton.small_batch_linear import linear as small_batch

                return small_batch(flat, weight, bias).unflatten(0, x.shape[:-1])
        return func(*args, **(kwargs or {}))


def total(x: Tensor) -> Tensor:
    """The sum of partial sums."""
    return x.sum(0) if x.dim() == 3 else x


NORMS = (LayerNormModule, RMSNormModule)


def add_norm(x: Tensor, more: Tensor | None, norm: Any, context: Context, keep: bool = True) -> tuple[Tensor, Tensor]:
    """The sum of both (rows, width), and its norm. `keep`: the sum is read again."""
    if usable(x) and x.shape[1] <= 16384:
        from allyouneed.kernels.triton.add_norm import add_norm as fused

        is_layer_norm = type(norm) is LayerNormModule
        offset = 0.0 if is_layer_norm else float(norm.offset)
        return fused(x.contiguous(), more, norm.weight, norm.bias, norm.eps, is_layer_norm, offset, keep)
    summed = x if more is None else x + total(more).to(x.dtype)
    return summed, norm(summed[:, None], context)[:, 0]


# --- constants --------------------------------------------------------------------------------------------------------


def move_constants(model: nn.Module, device: torch.device) -> None:
    """Nothing may come from the host while a graph is captured: what modules hold beside parameters and buffers."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.device != device:
                setattr(module, name, value.to(device))
        if isinstance(module, AlibiModule):
            module.device_slopes = torch.tensor(module.slopes, dtype=torch.float64, device=device)
