"""Keys and values projected and cached once for all layers that attend to them.

Sun et al. 2024, "You Only Cache Once: Decoder-Decoder Architectures for Language Models", arXiv:2405.05254, eq. 2 and
3: K = LN(X) W_K, V = LN(X) W_V, and Attention(Q^l, K, V) in each layer l with its own queries.
"""

from __future__ import annotations

from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.attention.attention import Attention, MultiHeadAttention
from allyouneed.nn.states.base import State


class SharedKeys(nn.Module):
    """Projects the keys and values that attention of this config reads."""

    def __init__(self, config: Attention, common: Common) -> None:
        super().__init__()
        sizes, bias, build = config.sizes(common), config.biases, common.linear.build
        kv_width, norm = sizes.kv_heads * sizes.head_width, config.qk_norm
        self.head_width = sizes.head_width
        self.norm = common.norm.build(common.width)
        self.k = build(common.width, kv_width, bias.k)
        self.v = build(common.width, kv_width, bias.v)
        self.k_norm = None if norm is None else norm.build(sizes.head_width)

    def forward(self, hidden: Tensor, context: Context, reader: SharedAttention) -> tuple[Tensor, Tensor]:
        """(batch, heads, time, head_width), with the positions that all readers share."""
        x = self.norm(hidden, context)
        k, v = (part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.k, self.v))
        k = k if self.k_norm is None else self.k_norm(k, context)
        _, k, v = reader.relative.apply_positions(k.new_zeros(1, 1, 1, self.head_width), k, v, context)
        return k, v

    @staticmethod
    def cost(config: Attention, common: Common) -> Cost:
        sizes, bias, linear = config.sizes(common), config.biases, common.linear
        kv_width = sizes.kv_heads * sizes.head_width
        total = linear.cost(common.width, kv_width, bias.k) + linear.cost(common.width, kv_width, bias.v)
        total += common.norm.cost(common.width) + Cost(state_per_token=2 * kv_width)
        return total if config.qk_norm is None else total + config.qk_norm.cost(sizes.head_width)


class SharedAttention(MultiHeadAttention):
    """Attention with its own queries over shared keys and values of the same text."""

    def __init__(self, config: Attention, common: Common) -> None:
        super().__init__(config, common)
        self.k_norm = None  # SharedKeys owns it
        self.q = common.linear.build(common.width, self.inner, config.biases.q)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        memory = context.memory
        assert memory is not None and memory.shared is not None, "shared keys and values are missing"
        q = self.split(self.q(x))
        q = self.scores.prepare(q if self.q_norm is None else self.q_norm(q, context))
        unused = q.new_zeros(1, 1, 1, self.head_width)
        q, _, _ = self.relative.apply_positions(q, unused, unused, context)
        if not context.static:
            self.scores.check(memory.layout)
        return self.merge_heads(self.attend(q, *memory.shared, context, memory.layout), context)

    def new_state(self) -> State | None:
        return None
