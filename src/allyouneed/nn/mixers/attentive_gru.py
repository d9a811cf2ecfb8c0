"""GRU decoder with additive attention (Bahdanau, Cho, Bengio 2015, "Neural Machine Translation by Jointly Learning to
Align and Translate", appendix A).

The state before the new token is the query, and the attended context enters the next state: attention is part of the
recurrence, so a sentence is processed token by token.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Memory
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.convolution import RecentTokens, recent_cost
from allyouneed.nn.observe import observe, show
from allyouneed.nn.ops.rnn import gru_step
from allyouneed.nn.ops.unpack import UnpackedRows, unpack_rows
from allyouneed.nn.states.base import State
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class AttentiveGRU(Mixer):
    """A.2.2: c_i = Σ_j softmax_j(v · tanh(W_a s_{i−1} + U_a h_j)) h_j, s_i = GRU([x_i, c_i], s_{i−1}); the output is
    U_o s_{i−1} + V_o x_i + C_o c_i. s_0 = tanh(W_s h_1), from the backward half of h (the second half of a
    bidirectional encoder)."""

    supports_cross: ClassVar[bool] = True
    supports_self: ClassVar[bool] = False

    kind: Literal["attentive-gru"] = "attentive-gru"
    hidden: Size | None = None
    """Width of the state; default: the model width."""
    aligned: Size | None = None
    """Width of the alignment model; default: `hidden`."""

    def sizes(self, common: Common) -> tuple[int, int]:
        hidden = self.hidden or common.width
        return hidden, self.aligned or hidden

    def maps(self, common: Common) -> dict[str, tuple[int, int, bool]]:
        """Inputs, outputs and bias of each map (the paper's equations omit biases)."""
        width, (hidden, aligned) = common.width, self.sizes(common)
        return {
            "start": (width - width // 2, hidden, True),  # W_s
            "query": (hidden, aligned, True),  # W_a
            "key": (width, aligned, False),  # U_a
            "seen": (width, 3 * hidden, True),  # W_r, W_z, W
            "found": (width, 3 * hidden, False),  # C_r, C_z, C
            "out": (hidden + 2 * width, width, True),  # U_o, V_o, C_o
        }

    def build(self, common: Common) -> SubLayer:
        raise TypeError("an attentive GRU needs an encoder; use it as a cross")

    def build_cross(self, common: Common) -> SubLayer:
        return AttentiveGRUModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        hidden, aligned = self.sizes(common)
        total = Cost(parameters=3 * hidden * hidden + aligned, flops=6 * hidden * hidden)
        for name, sizes in self.maps(common).items():
            one = common.linear.cost(*sizes)  # `key` and `start` run once per source
            total += Cost(one.parameters, 0.0 if name in ("key", "start") else one.flops)
        total += Cost(flops=2 * length * (aligned + common.width))
        return total + Cost(state_constant=aligned * length) + recent_cost(hidden, 1)

    def source_flops(self, common: Common) -> float:
        return common.linear.cost(*self.maps(common)["key"]).flops


class SourceKeys(NamedTuple):
    """Source tensors of each target sentence."""

    hidden: Tensor  # (sentences, time, width)
    keys: Tensor  # (sentences, time, aligned)
    mask: Tensor  # (sentences, time) bool


class AttentiveGRUModule(SubLayer):
    def __init__(self, config: AttentiveGRU, common: Common) -> None:
        super().__init__()
        self.hidden, aligned = config.sizes(common)
        self.second = common.width // 2  # first feature of the backward half
        three = (self.hidden,) * 3  # three maps in one matmul
        modules = (
            common.linear.build(inputs, three if name in ("seen", "found") else outputs, bias)
            for name, (inputs, outputs, bias) in config.maps(common).items()
        )
        self.start, self.query, self.key, self.seen, self.found, self.out = modules
        self.gates = nn.Parameter(torch.empty(self.hidden, 2 * self.hidden))  # U_r, U_z
        self.own = nn.Parameter(torch.empty(self.hidden, self.hidden))  # U
        self.score = nn.Parameter(torch.empty(aligned))  # v_a
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """B.1: orthogonal recurrent matrices; v_a is not zero, which would stop gradients."""
        for matrix in (*self.gates.chunk(2, -1), self.own):
            nn.init.orthogonal_(matrix)
        nn.init.normal_(self.score, std=len(self.score) ** -0.5)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        memory = context.memory
        assert memory is not None, "an attentive GRU needs encoder memory"
        unpacked = unpack_rows(context)
        rows = unpacked.gather(x)
        source = self.source(memory, context, unpacked, x, state)
        source = source._replace(hidden=observe(self, "v", source.hidden[:, None])[:, 0])
        begin = self.begin(source)
        if isinstance(state, AttentiveGRUState):
            begin = state.last(begin, context)
        before, states, found, weights = self.run(rows, begin, source)
        if isinstance(state, AttentiveGRUState):
            state.recent.append(states, context)
        show(self, "weights", lambda: weights[:, None])  # (sentences, 1, queries, keys)
        found = observe(self, "heads", found[:, None])[:, 0]
        request = None if context.record is None else context.record.get(self)
        if request is not None:
            request.weights.append(unpacked.scatter(weights, x)[:, None])  # (batch, 1, queries, keys)
        y: Tensor = self.out(torch.cat((before, rows, found), -1))
        return unpacked.scatter(y, x)

    def source(
        self, memory: Memory, context: Context, unpacked: UnpackedRows, x: Tensor, state: State | None
    ) -> SourceKeys:
        layout, queries, hidden = memory.layout, context.queries, memory.hidden
        if layout.packed != queries.packed:
            raise ValueError("one side is packed (segments), the other is not; pack both or neither")
        keys = state.keys_of(memory, self.key) if isinstance(state, AttentiveGRUState) else self.key(hidden)
        numbers = torch.arange(len(x), device=x.device)[:, None].expand(x.shape[:2])
        beams = max(1, len(x) // max(1, len(hidden)))
        which = unpacked.gather(numbers)[:, :1].flatten() // beams  # source row of each sentence
        if layout.segments is None:
            mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=x.device)[which]
        elif queries.packed and queries.segments is not None:
            mask = layout.segments[which] == unpacked.gather(queries.segments)[:, :1]
        else:
            mask = (layout.segments > 0)[which]
        return SourceKeys(hidden[which], keys[which], mask)

    def begin(self, source: SourceKeys) -> Tensor:
        """s_0, from the first source token."""
        first = source.mask.long().argmax(1)[:, None, None].expand(-1, 1, source.hidden.shape[2])
        tokens = source.hidden.gather(1, first)[:, 0]
        return self.start(tokens[:, self.second :]).tanh()

    def run(self, x: Tensor, s: Tensor, source: SourceKeys) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """States before and after each token, contexts and attention weights: all (sentences, time, …)."""
        seen = self.seen(x)
        before, after, found, alignments = [], [], [], []
        for t in range(x.shape[1]):
            weights = self.align(s, source)
            c = (weights[:, None] @ source.hidden)[:, 0]
            before.append(s)
            s = gru_step(seen[:, t] + self.found(c), s, self.gates.to(s.dtype), self.own.to(s.dtype))
            after.append(s)
            found.append(c)
            alignments.append(weights)
        return torch.stack(before, 1), torch.stack(after, 1), torch.stack(found, 1), torch.stack(alignments, 1)

    def align(self, s: Tensor, source: SourceKeys) -> Tensor:
        """Attention weights (sentences, source time)."""
        both = (self.query(s)[:, None] + source.keys).tanh()
        scores = both @ self.score.to(both.dtype)
        return scores.masked_fill(~source.mask, torch.finfo(scores.dtype).min).softmax(-1) * source.mask

    def new_state(self) -> State:
        return AttentiveGRUState()


class AttentiveGRUState(State):
    """The most recent states (a few, so that tokens can be trimmed), and U_a h of the current source."""

    def __init__(self) -> None:
        self.recent = RecentTokens(1)
        self.keys: Tensor | None = None
        self.memory: Memory | None = None

    def last(self, begin: Tensor, context: Context) -> Tensor:
        """State of each row after its last token, or the initial state."""
        if self.recent.tokens is None:
            return begin
        return torch.where(context.queries.positions[:, :1] > 0, self.recent.tokens[:, -1], begin)

    def keys_of(self, memory: Memory, project: nn.Module) -> Tensor:
        if self.keys is None or self.memory is not memory:
            self.keys, self.memory = project(memory.hidden), memory
        assert self.keys is not None
        return self.keys

    def select(self, rows: Tensor) -> None:
        self.recent.select(rows)

    def join(self, other: AttentiveGRUState) -> None:
        self.recent.join(other.recent)
        self.keys = self.memory = None  # the joint source differs

    def trim(self, length: int, each: Tensor | None = None) -> None:
        self.recent.trim(length, each)

    @property
    def bytes(self) -> int:
        return self.recent.bytes + (0 if self.keys is None else self.keys.numel() * self.keys.itemsize)
