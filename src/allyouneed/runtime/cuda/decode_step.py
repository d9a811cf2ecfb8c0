"""One token of every row, over states of a fixed shape: what `advance` and the head do, with fewer and larger kernels
and nothing for the host to decide. What is plain here (additive wirings, projections, softmax attention of one query)
runs as fused kernels on a GPU; any other part is called as it is.

The stream is kept as a sum that has not been made yet: the next norm makes it, adds and normalises in one reading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from allyouneed.kernels import usable
from allyouneed.nn.batch import Rows
from allyouneed.nn.channels.feedforward import FFNModule, GLUModule, fused_name
from allyouneed.nn.channels.feedforward import gated as multiplied
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.embed.tokens import TokenEmbedModule
from allyouneed.nn.heads.vocabulary import VocabularyHeadModule
from allyouneed.nn.linear.dense import Joined
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from allyouneed.nn.mixers.attention.scores import ScoresModule
from allyouneed.nn.models.decoder import DecoderModel
from allyouneed.nn.models.encoder_decoder import EncoderDecoderModel
from allyouneed.nn.norms import LayerNormModule, RMSNormModule
from allyouneed.nn.patterns.core import And, Causal, Full, Or, Pattern, Prefix, Window
from allyouneed.nn.positions.alibi import AlibiModule
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.nn.positions.t5_bias import BucketsModule
from allyouneed.nn.states.kv_cache import KVCache
from allyouneed.nn.wiring.residual import PostNorm, PreNorm, ResidualModule
from allyouneed.runtime.cuda.static_cache import StaticStates, attend_source


def fits(model: Any) -> bool:
    """Whether every part of what a model writes with has a fixed shape and asks the host nothing."""
    if type(model) not in (DecoderModel, EncoderDecoderModel) or type(model.embed) is not TokenEmbedModule:
        return False
    head, stack = model.head, model.decoder
    if type(head) is not VocabularyHeadModule or head.transform is not None or head.product is not None:
        return False
    if len(stack.recurrences) or len(stack.joints) or model.embed.asking is not None:
        return False
    return all(_fits(part) for block in stack.blocks for part in block.sublayers.values())


def reads_alike(model: Any) -> bool:
    """Whether reading what it goes on from, too, asks the host nothing, and padding behind it leaves no trace: of one
    that fits."""
    stacks: list[Any] = [model.decoder, *([model.encoder] if hasattr(model, "encoder") else [])]
    if any(len(stack.recurrences) or len(stack.joints) for stack in stacks):
        return False
    if getattr(model, "source_embed", None) is not None and type(model.source_embed) is not TokenEmbedModule:
        return False
    kept = [state for layer in stacks[0].new_states() for state in layer.values()]
    parts = [part for stack in stacks for block in stack.blocks for part in block.sublayers.values()]
    return all(isinstance(state, KVCache) for state in kept) and all(_fits(part) for part in parts)


def _fits(part: Any) -> bool:
    if type(part) is SelfAttention:
        relative = type(part.relative) in (RelativeModule, RotaryModule, AlibiModule, BucketsModule)
        return relative and not part.own_score and not part.keeps_hidden and reckoned(part.pattern)
    if type(part) is CrossAttention:
        return not part.own_score and type(part.relative) is RelativeModule
    return part.traces and part.new_state() is None


def reckoned(pattern: Pattern) -> bool:
    """Whether it is arithmetic of places alone: nothing is looked up that lies with the host."""
    if isinstance(pattern, And | Or):
        return reckoned(pattern.left) and reckoned(pattern.right)
    return isinstance(pattern, Causal | Full | Window | Prefix)


class OneStep:
    def __init__(self, model: Any, states: StaticStates) -> None:
        self.model, self.states = model, states
        self.places = states.static_layout.positions
        kinds = {type(block.wiring) for block in model.decoder.blocks}
        wirings = [wiring for wiring in model.decoder.wirings]
        self.chained = kinds == {ResidualModule} and all(
            type(wiring) in (PreNorm, PostNorm) and wiring == wirings[0] and wiring.scale_start() is None
            for wiring in wirings
        )
        self.ahead = type(wirings[0]) is PreNorm
        for module in model.modules():
            if isinstance(module, RotaryModule):  # nothing may come from the host while a graph is captured
                module.frequencies = module.frequencies.to(states.device)
            elif isinstance(module, AlibiModule):
                module.there = torch.tensor(module.slopes, dtype=torch.float64, device=states.device)
        self.turns = self.tables()
        limit = states.capacity if model.embed.limit is None else model.embed.limit
        self.last = min(limit, states.capacity) - 1  # whoever is over and still here stays at the last place
        self.positions: Tensor | None = model.embed.positions(self.places.clamp(max=self.last))
        if self.positions is not None:
            self.positions = self.positions[0].to(model.embed.tokens.weight.dtype)  # (places, width)

    def __call__(self, tokens: Tensor) -> Tensor:
        """(rows,) to scores (rows, vocab) of what comes next."""
        states, decoder = self.states, self.model.decoder
        x, at, context = self.begun(tokens)
        if self.chained:
            last, more = self.chain(x, at, context)
            if decoder.end is not None:
                _, last = add_norm(last, more, decoder.end, context, keep=False)
            elif more is not None:
                last = last + summed(more).to(last.dtype)
        else:
            last = decoder(x[:, None], context, states.layers)[:, 0]
        return self.scored(last)

    def begun(self, tokens: Tensor) -> tuple[Tensor, Tensor, Context]:
        """Vectors (rows, width) of these tokens, where they stand, and what all layers share."""
        states, embed = self.states, self.model.embed
        bare = embed.types is None and embed.norm is None and embed.widen is None
        turned = None
        if bare and usable(embed.tokens.weight):
            from allyouneed.kernels.triton.embed_step import begin

            # a table of turns is looked up here if it is the only one
            turns = next(iter(self.turns.values())) if len(self.turns) == 1 else None
            table = states.block_table if states.group > 1 else None
            own = (embed.tokens.weight, embed.scale, self.positions)
            x, at, turned = begin(tokens, states.device_lengths, self.last, *own, turns, table)
        else:
            at = states.device_lengths.clamp(max=self.last)
            if states.group > 1:
                states.block_table.scatter_(1, at[:, None], states.row_ids.int()[:, None])
            # a start, so that the device is not asked how long the rows are: there are places for all of them
            x = (
                self.embedded(tokens, at)
                if bare
                else embed(Rows(tokens[:, None]), TokenLayout(at[:, None], start=0))[:, 0]
            )
            states.device_lengths.add_(1)
        context = Context(TokenLayout(at[:, None]), states.static_layout, states.memory, x[:, None])
        if turned is not None:
            context.plans[(*next(iter(self.turns)), "one")] = turned
        return x, at, context

    def embedded(self, tokens: Tensor, at: Tensor) -> Tensor:
        embed = self.model.embed
        x = embedding(tokens, embed.tokens.weight)
        if self.positions is not None:
            return torch.add(embedding(at, self.positions), x, alpha=embed.scale)
        return x if embed.scale == 1 else x * embed.scale

    def chain(self, x: Tensor, at: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """The stream, and what is still to be added to it."""
        more: Tensor | None = None
        for block, layer in zip(self.model.decoder.blocks, self.states.layers, strict=True):
            for (name, part), norm in zip(block.sublayers.items(), block.wiring.norms, strict=True):
                if self.ahead:
                    x, normal = add_norm(x, more, norm, context)
                    more = self.part(part, normal, layer.get(name), at, context)
                else:
                    _, x = add_norm(x, self.part(part, x, layer.get(name), at, context), norm, context, keep=False)
        return x, more

    def part(self, part: Any, x: Tensor, state: Any, at: Tensor, context: Context) -> Tensor:
        kind = type(part)
        if kind is FFNModule and part.norm is None:
            return linear(linear(x, part.up, activation=part.activation), part.down, parts=True)
        if kind is GLUModule and part.norm is None:
            return linear(linear(x, part.gate_up, activation=part.activation, gated=True), part.down, parts=True)
        if (
            kind in (SelfAttention, CrossAttention)
            and part.sub_norm is None
            and part.q_norm is None
            and plain(part, self.states.capacity)
        ):
            seen = self.own(part, x, state, at, context) if kind is SelfAttention else self.source(part, x, state)
            return linear(seen, part.out, parts=True)
        found: Tensor = part(x[:, None], context, state)[:, 0]
        return found

    def own(self, part: Any, x: Tensor, state: Any, at: Tensor, context: Context) -> Tensor:
        width = part.head_width
        if part.qkv is not None:  # the kernel that looks adds up what comes in parts
            parts = type(part.scores).prepare is ScoresModule.prepare
            q, k, v = linear(x, part.qkv, parts=parts).split([part.inner, part.narrow, part.narrow], -1)
        else:
            q, k, v = linear(x, part.q), linear(x, part.k), linear(x, part.v)
        q, k, v = (y.unflatten(-1, (-1, width)) for y in (q, k, v))  # (rows, heads, head_width)
        turns = self.turned(part.relative, at, context)
        found: Tensor = state.attend(part.scores.prepare(q), (k, v), at, part.score_mod().scale, turns)
        return found.flatten(1)

    def source(self, part: Any, x: Tensor, state: Any) -> Tensor:
        q = part.scores.prepare(linear(x, part.q).unflatten(-1, (-1, part.head_width)))
        return attend_source(q, state, self.states, part.score_mod().scale).flatten(1)

    def tables(self) -> dict[Any, Tensor]:
        """Cosines beside sines of every place (places, head_width), by the key of those who turn by them."""
        found: dict[Any, Tensor] = {}
        for block in self.model.decoder.blocks:
            for part in block.sublayers.values():
                if type(part) is SelfAttention and isinstance(part.relative, RotaryModule):
                    cos, sin = part.relative.tables(self.places, torch.float32)[0][:, 0, 0]  # (places, head_width / 2)
                    found[part.relative.key] = torch.cat((cos, sin), -1)
        return found

    def turned(self, relative: RelativeModule, at: Tensor, context: Context) -> Tensor | None:
        """Those of each row's place (rows, head_width), looked up once for all layers."""
        if not isinstance(relative, RotaryModule):
            return None
        return context.plan((*relative.key, "one"), lambda: embedding(at, self.turns[relative.key]))

    def scored(self, x: Tensor) -> Tensor:
        head = self.model.head
        if head.maxout is not None or not narrow(x, head.weight) or head.weight.dtype != x.dtype:
            found: Tensor = head(x)
            return found
        from allyouneed.kernels.triton.small_batch_linear import linear as few

        scores = few(x if head.scale == 1 else x * head.scale, head.weight, head.bias)
        return scores if head.soft_cap is None else head.soft_cap * torch.tanh(scores / head.soft_cap)


def everything(pattern: Pattern, capacity: int) -> bool:
    """Whether the newest of so many tokens at most sees all of them."""
    if isinstance(pattern, And):
        return everything(pattern.left, capacity) and everything(pattern.right, capacity)
    return isinstance(pattern, Causal | Full) or (isinstance(pattern, Window) and pattern.size >= capacity)


def plain(part: Any, capacity: int) -> bool:
    """Softmax of q·k over everything there is, turned by halves or not at all."""
    if not part.score_mod().plain or not everything(part.pattern, capacity) or part.head_width % 2:
        return False
    if not isinstance(part.relative, RotaryModule):
        return type(part.relative) is RelativeModule
    turning = part.relative.config
    whole = part.relative.width == part.head_width
    return whole and turning.order == "halves" and turning.xpos is None and not turning.values


def narrow(x: Tensor, weight: Tensor) -> bool:
    """Few rows on a GPU, in half precision: our own kernel reads the weights faster."""
    if not usable(x) or x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return False
    from allyouneed.kernels.triton.small_batch_linear import few

    return few(len(x), weight) and weight.is_contiguous() and weight.shape[1] % 8 == 0


def linear(x: Tensor, module: Any, activation: Any = None, gated: bool = False, parts: bool = False) -> Tensor:
    """(rows, inputs) to (rows, outputs), or to parts of it that are still to be added up."""
    name = "" if activation is None else fused_name(activation)
    if name is not None and type(module) in (nn.Linear, Joined) and narrow(x, module.weight):
        from allyouneed.kernels.triton.small_batch_linear import linear as few

        return few(x, module.weight, module.bias, name, gated, parts)
    found: Tensor = module(x)
    if gated:
        return multiplied(found, activation, name)
    return found if activation is None else activation(found)


def summed(parts: Tensor) -> Tensor:
    return parts.sum(0) if parts.dim() == 3 else parts


def add_norm(x: Tensor, more: Tensor | None, norm: Any, context: Context, keep: bool = True) -> tuple[Tensor, Tensor]:
    """The sum of both (rows, width), and its norm. `keep`: the sum itself is wanted too."""
    if type(norm) in (LayerNormModule, RMSNormModule) and usable(x) and x.shape[1] <= 16384:
        from allyouneed.kernels.triton.add_norm import add_norm as fused

        layer = type(norm) is LayerNormModule
        offset = 0.0 if layer else float(norm.offset)
        return fused(x.contiguous(), more, norm.weight, norm.bias, norm.eps, layer, offset, keep)
    total = x if more is None else x + summed(more).to(x.dtype)
    return total, norm(total[:, None], context)[:, 0]
