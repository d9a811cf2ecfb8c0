"""The decoder that attention was invented for (Bahdanau, Cho, Bengio 2015, "Neural Machine Translation by Jointly
Learning to Align and Translate", appendix A).

The state that looks for words of the source is the one before the new token, and what it finds goes into the next: so
attention stands inside the recurrence, and neither can be computed before the other. A sentence is read token by token.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, Memory
from allyouneed.nn.cost import Cost
from allyouneed.nn.mixers.convolution import Recent
from allyouneed.nn.mixers.rnn import gru_step
from allyouneed.nn.ops.unpack import Sentences, sentences
from allyouneed.nn.states.base import State
from allyouneed.nn.states.window import MAX_TRIM
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]


class AttentiveGRU(Mixer):
    """A.2.2: c_i = Σ_j softmax_j(v · tanh(W_a s_{i−1} + U_a h_j)) h_j, s_i = GRU([x_i, c_i], s_{i−1}), and what comes
    out is U_o s_{i−1} + V_o x_i + C_o c_i. s_0 = tanh(W_s h_1), of the half of h that was read from the sentence's end
    (a bidirectional encoder puts it second)."""

    crosses: ClassVar[bool] = True
    mixes: ClassVar[bool] = False

    kind: Literal["attentive-gru"] = "attentive-gru"
    hidden: Size | None = None  # of the state, as many as the model has when not given
    aligned: Size | None = None  # features in which a state and a word are compared, as many as the state's

    @property
    def causal(self) -> bool:
        return True

    def sizes(self, common: Common) -> tuple[int, int]:
        hidden = self.hidden or common.width
        return hidden, self.aligned or hidden

    def maps(self, common: Common) -> dict[str, tuple[int, int, bool]]:
        """Inputs, outputs and whether there is a bias (the paper leaves biases out of its equations)."""
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
        raise TypeError("an attentive GRU looks at an encoder")

    def build_cross(self, common: Common) -> SubLayer:
        return AttentiveGRUModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        hidden, aligned = self.sizes(common)
        total = Cost(parameters=3 * hidden * hidden + aligned, flops=6 * hidden * hidden)
        for name, sizes in self.maps(common).items():
            one = common.linear.cost(*sizes)  # of `key` and `start` the work is the source's
            total += Cost(one.parameters, 0.0 if name in ("key", "start") else one.flops)
        total += Cost(flops=2 * length * (aligned + common.width))
        return total + Cost(state_constant=aligned * length + hidden * (1 + MAX_TRIM))

    def source_flops(self, common: Common) -> float:
        return common.linear.cost(*self.maps(common)["key"]).flops


class Source(NamedTuple):
    """What each sentence looks at."""

    hidden: Tensor  # (sentences, time, width)
    keys: Tensor  # (sentences, time, aligned)
    mask: Tensor  # (sentences, time) bool


class AttentiveGRUModule(SubLayer):
    def __init__(self, config: AttentiveGRU, common: Common) -> None:
        super().__init__()
        self.hidden, aligned = config.sizes(common)
        self.second = common.width // 2  # where the half that was read from the end begins
        three = (self.hidden,) * 3  # maps side by side
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
        """B.1: recurrent matrices orthogonal; v_a not at zero, where it would wait for the others to move."""
        for matrix in (*self.gates.chunk(2, -1), self.own):
            nn.init.orthogonal_(matrix)
        nn.init.normal_(self.score, std=len(self.score) ** -0.5)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        memory = context.memory
        assert memory is not None, "it needs an encoder's memory"
        lined = sentences(context)
        rows = lined.gather(x)
        source = self.source(memory, context, lined, x, state)
        begin = self.begin(source)
        if isinstance(state, Attending):
            begin = state.last(begin, context)
        before, states, found, weights = self.run(rows, begin, source)
        if isinstance(state, Attending):
            state.recent.append(states, context)
        wanted = None if context.record is None else context.record.get(self)
        if wanted is not None:
            wanted.found.append(lined.scatter(weights, x)[:, None])  # (batch, 1, queries, keys)
        y: Tensor = self.out(torch.cat((before, rows, found), -1))
        return lined.scatter(y, x)

    def source(self, memory: Memory, context: Context, lined: Sentences, x: Tensor, state: State | None) -> Source:
        layout, queries, hidden = memory.layout, context.queries, memory.hidden
        if layout.packed != queries.packed:
            raise ValueError("one side holds several sentences a row, the other does not: they cannot be matched")
        keys = state.keys_of(memory, self.key) if isinstance(state, Attending) else self.key(hidden)
        numbers = torch.arange(len(x), device=x.device)[:, None].expand(x.shape[:2])
        which = lined.gather(numbers)[:, :1].flatten() // (len(x) // len(hidden))  # each sentence's row of the source
        if layout.segments is None:
            mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=x.device)[which]
        elif queries.packed and queries.segments is not None:
            mask = layout.segments[which] == lined.gather(queries.segments)[:, :1]
        else:
            mask = (layout.segments > 0)[which]
        return Source(hidden[which], keys[which], mask)

    def begin(self, source: Source) -> Tensor:
        """s_0, from the first word of the source."""
        first = source.mask.long().argmax(1)[:, None, None].expand(-1, 1, source.hidden.shape[2])
        words = source.hidden.gather(1, first)[:, 0]
        return self.start(words[:, self.second :]).tanh()

    def run(self, x: Tensor, s: Tensor, source: Source) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """States before and after each token, what each found, and where: all (sentences, time, …)."""
        seen = self.seen(x)
        before, after, found, looked = [], [], [], []
        for t in range(x.shape[1]):
            weights = self.look(s, source)
            c = (weights[:, None] @ source.hidden)[:, 0]
            before.append(s)
            s = gru_step(seen[:, t] + self.found(c), s, self.gates.to(s.dtype), self.own.to(s.dtype))
            after.append(s)
            found.append(c)
            looked.append(weights)
        return torch.stack(before, 1), torch.stack(after, 1), torch.stack(found, 1), torch.stack(looked, 1)

    def look(self, s: Tensor, source: Source) -> Tensor:
        """(sentences, words of the source)"""
        both = (self.query(s)[:, None] + source.keys).tanh()
        scores = both @ self.score.to(both.dtype)
        return scores.masked_fill(~source.mask, torch.finfo(scores.dtype).min).softmax(-1) * source.mask

    def new_state(self) -> State:
        return Attending()


class Attending(State):
    """The last states (a few, so that tokens can be taken back), and U_a h of the source until there is another."""

    def __init__(self) -> None:
        self.recent = Recent(1)
        self.keys: Tensor | None = None
        self.memory: Memory | None = None

    def last(self, begin: Tensor, context: Context) -> Tensor:
        """Where each row stands: behind its last token, or at the beginning."""
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

    def join(self, other: Attending) -> None:
        self.recent.join(other.recent)
        self.keys = self.memory = None  # the joint source is another one

    def trim(self, length: int, each: Tensor | None = None) -> None:
        self.recent.trim(length, each)

    @property
    def bytes(self) -> int:
        return self.recent.bytes + (0 if self.keys is None else self.keys.numel() * self.keys.itemsize)
