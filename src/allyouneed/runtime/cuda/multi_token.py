"""Several new tokens of every row in one captured pass; those that the caller accepts stay: a model verifies draft
tokens in one pass (infer/cuda_graph/speculation.py).

All tokens together run through whatever treats each token alone (feed-forward layers, norms, the head), and through
attention to a cache, where all are stored before they attend (`PARALLEL`). Other parts with a state run token after
token, by the same kernels as in a `DecodeStep`, and states of constant size are kept after each token. Rejected tokens
stay in growing caches behind the end of a row, where the next ones overwrite them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.mixers.attention.attention import CrossAttention, SelfAttention
from allyouneed.nn.mixers.attention.longnet import LongNetAttention
from allyouneed.nn.mixers.attention.shared_kv import SharedAttention
from allyouneed.runtime.cuda.constant_states import fixed_in
from allyouneed.runtime.cuda.decode_step import DecodeStep, Step, call_step
from allyouneed.runtime.cuda.kernels import Kernel, kernel, make_kernel
from allyouneed.runtime.cuda.static_cache import StaticStates
from allyouneed.runtime.eager import find_states
from allyouneed.runtime.fuse import FusedOp
from allyouneed.runtime.program import Call, Unsupported

PARALLEL = {SelfAttention, LongNetAttention, CrossAttention, SharedAttention}  # kernels for several tokens per row
EACH = "context of each token"  # of `MultiTokenStep`, in `Context.memo`


class MultiTokenStep(DecodeStep):
    """Reads `states.tokens` tokens per row, behind the rows' lengths, which stay: `accept` changes them."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Token ids (rows, tokens) to the scores (rows · tokens, vocab) of the tokens after each."""
        states, embed = self.states, self.model.embed
        steps = torch.arange(states.tokens, device=states.device)
        places = (states.device_lengths[:, None] + steps).clamp(max=states.capacity - 1)  # (rows, tokens)
        if states.group > 1:
            rows = states.row_ids.int()[:, None].expand_as(places)
            states.block_table.scatter_(1, places, rows)
            states.token_blocks.copy_(states.block_table.repeat_interleave(states.tokens, 0))
        positions = places.flatten()
        limit = states.capacity if embed.limit is None else embed.limit
        layout = TokenLayout(positions.clamp(max=limit - 1)[:, None], start=0)  # there are positions for all
        x = embed(Rows(tokens.reshape(-1, 1)), layout)[:, 0]
        context = self.context(positions, x[:, None])
        context.memo[MultiTokenStep, EACH] = [
            self.context(at.contiguous(), one[:, None].contiguous())
            for at, one in zip(places.unbind(1), x.unflatten(0, (-1, states.tokens)).unbind(1), strict=True)
        ]
        for stage in self.stages:
            values = {0: x}
            for step in stage.steps:
                step(values, positions, context)
            x = values[stage.output]
            if stage.after is not None:
                each = zip(*(y.unflatten(0, (-1, states.tokens)).unbind(1) for y in (x, positions)), strict=True)
                for (one, at), own in zip(each, context.memo[MultiTokenStep, EACH], strict=True):
                    stage.after(one, at, own)
        return self.head(x, positions, context)

    def context(self, positions: Tensor, inputs: Tensor) -> Context:
        """The context of one token in each of some rows: positions (n,), embeddings (n, 1, width)."""
        states = self.states
        return Context(TokenLayout(positions[:, None]), states.static_layout, states.memory, inputs, static=True)

    def prepare(self, op: FusedOp, layers: list[Any], partial_sum: bool) -> Step:
        if not isinstance(op, Call):
            return super().prepare(op, layers, partial_sum)
        state = find_states(op.state, layers)
        if not state:
            return super().prepare(op, layers, partial_sum)
        if type(op.part) in PARALLEL:
            try:
                found: Kernel = make_kernel(op.part, self.setup, state, partial_sum)
                return call_step(op, found)
            except Unsupported:
                pass
        return call_step(op, self.one_by_one(kernel(op.part, self.setup, state, False), state))

    def one_by_one(self, run: Kernel, state: Any) -> Kernel:
        count = self.states.tokens

        def each(x: Tensor, positions: Tensor, context: Context) -> Tensor:
            found, xs, places = [], x.unflatten(0, (-1, count)), positions.unflatten(0, (-1, count))
            for number in range(count):
                # copied even if contiguous: kernels may read a state before the one that is running has ended, since
                # in a `DecodeStep` it was written long before, but not before a copy has ended
                one, at = xs[:, number].clone(), places[:, number].clone()
                found.append(run(one, at, context.memo[MultiTokenStep, EACH][number]))
                keep(state, number, count)
            return torch.stack(found, 1).flatten(0, 1)

        return each


def keep(states: Any, token: int, tokens: int) -> None:
    """Remember states of constant size after one of several tokens."""
    for fixed in fixed_in(states):
        fixed.keep(token, tokens)


def accept(states: StaticStates, before: Tensor, counts: Tensor) -> None:
    """Keep the first `counts` (rows,) tokens, at least one, of those read after the lengths `before` (rows,), as if no
    other had been read."""
    states.device_lengths.copy_(before + counts)
    for fixed in fixed_in(states.layers):
        fixed.restore(counts - 1)
