"""What mixers share that are a recurrence over tokens."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from allyouneed.nn.context import Context
from allyouneed.nn.ops.unpack import unpack_rows
from allyouneed.nn.states.base import State
from allyouneed.nn.states.recurrent import Carry, Recurrent
from allyouneed.nn.sublayer import SubLayer


class RecurrentMixer(SubLayer):
    """`run` over sentences that begin with an empty carry, or over new tokens that follow a state's."""

    @abstractmethod
    def begin(self, batch: int, like: Tensor) -> Carry:
        """The carry of empty rows."""

    @abstractmethod
    def run(self, x: Tensor, carry: Carry, real: Tensor | None, starts: Tensor | None = None) -> tuple[Tensor, Carry]:
        """Outputs (batch, time, features), and the carry after each row's last real token. `starts`: of packed rows,
        whose sentences all begin anew."""

    def prepare(self, context: Context, rows: int) -> None:
        unpack_rows(context, restarts=True)

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        return self.recur(x, context, state)

    def recur(self, x: Tensor, context: Context, state: State | None) -> Tensor:
        """The outputs of `run`, in the rows of `x`."""
        if isinstance(state, Recurrent):
            return state.advance(self.run, x, context)
        unpacked = unpack_rows(context, restarts=True)
        rows = unpacked.gather(x)
        return unpacked.scatter(self.run(rows, self.begin(len(rows), rows), None, unpacked.starts)[0], x)

    def fold(self, carry: Carry, x: Tensor, real: Tensor | None) -> Carry:
        """The carry after these tokens."""
        return self.run(x, carry, real)[1]

    def new_state(self) -> State:
        return Recurrent(self.begin, self.fold)
