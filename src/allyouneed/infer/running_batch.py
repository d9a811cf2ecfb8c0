"""Rows that one model pass decodes together: one `States`, and one search for each way of decoding among them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec, RequestState, Search
from allyouneed.infer.decoding.beam import BeamSearch
from allyouneed.infer.decoding.sample import IndependentSearch
from allyouneed.infer.prefill import DecodableModel
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States

if TYPE_CHECKING:
    from allyouneed.infer.decoding.allowed import Columns


class ActiveBatch(Protocol):
    """Requests that are decoded together: `RunningBatch`, `SpeculativeDecoder`, `GraphBatch`."""

    @property
    def active(self) -> bool: ...

    @property
    def requests(self) -> list[RequestState]: ...

    def step(self) -> None: ...

    def close(self) -> None: ...


class RunningBatch:
    """`groups`: requests in the order of their rows in the states, by specification; all need `group` rows each, and
    have one before their first token. `limit`: positions of a row, if they are limited."""

    def __init__(
        self,
        model: DecodableModel,
        states: States,
        groups: Sequence[tuple[DecodingSpec, Sequence[RequestState]]],
        limit: int | None = None,
    ) -> None:
        self.model, self.states, self.limit = model, states, limit
        self.searches: list[Search] = []
        self.rows: list[list[int]] = []  # rows of each search in the states
        begin = 0
        for spec, requests in groups:
            beams = spec.decoding.method == "beam" and spec.rows > 1
            self.searches.append((BeamSearch if beams else IndependentSearch)(spec, requests, states.device))
            self.rows.append(list(range(begin, begin + len(requests))))
            begin += len(requests)
        self.group = self.searches[0].group
        self.columns: Columns | None = None

    def __len__(self) -> int:
        return sum(map(len, self.rows))

    @property
    def active(self) -> bool:
        return bool(self.searches)

    @property
    def requests(self) -> list[RequestState]:
        return [request for search in self.searches for request in search.requests]

    def run(self, last: Tensor) -> None:
        """Decode every request to its end, from the hidden states of the last prompt tokens (requests, width)."""
        requests = self.requests
        self.append_tokens(last)
        while self.searches:
            self.step()
        for state in requests:
            if state.error is not None:
                raise state.error

    def step(self) -> None:
        """The model reads the newest token of every row, and each row gets its next one."""
        newest = self.searches[0].last_tokens
        if len(self.searches) > 1:
            newest = torch.empty(len(self), dtype=torch.long, device=self.states.device)
            for search, rows in zip(self.searches, self.rows, strict=True):
                newest[rows] = search.last_tokens
        self.append_tokens(self.model.advance(Rows(newest[:, None]), self.states)[:, -1])

    def append_tokens(self, last: Tensor) -> None:
        """Choose the next token of each row from these hidden states (rows, width); drop rows of finished requests."""
        columns, restricted = None, self.searches[0].restricted
        if restricted or len(self.searches) > 1:
            restricted = any([search.restricted for search in self.searches])
            columns = self.find_columns() if restricted else None
        logits: Tensor = (self.model.head if columns is None else columns.head)(last).float()
        tight = self.limit is not None and max(self.states.lengths) >= self.limit
        if self.searches[0].fresh and self.group > 1:
            self.states.repeat_rows(self.group)
            expanded = [[row * self.group + beam for row in rows for beam in range(self.group)] for rows in self.rows]
        else:
            expanded = self.rows
        orders: list[list[int] | None] = []
        for search, rows in zip(self.searches, self.rows, strict=True):
            own = logits if len(self.searches) == 1 else logits[rows]
            if restricted and search.restricted:
                own = search.restrict(own, columns)
            orders.append(search.step(own, tight, columns))
        self.rows = expanded
        if orders.count(None) < len(orders):
            self.reorder(orders)

    def find_columns(self) -> Columns | None:
        """Columns for the requests that are here now; new ones once half of the rows they were found for have left."""
        if self.columns is None or 2 * len(self) <= self.columns.rows:
            from allyouneed.infer.decoding.allowed import find_columns

            self.columns = find_columns(self.model, self.requests, self.states.device)
        return self.columns

    def reorder(self, orders: Sequence[list[int] | None]) -> None:
        """Row i of a search continues its row `order[i]`; None: its rows stay. States move only when needed."""
        moved: list[int] = []
        before, self.searches, self.rows = zip(self.searches, self.rows, orders, strict=True), [], []
        for search, rows, order in before:
            past = rows if order is None else [rows[row] for row in order]
            if past:
                self.searches.append(search)
                self.rows.append(list(range(len(moved), len(moved) + len(past))))
                moved += past
        if not moved:
            self.states.close()
        elif moved != list(range(len(self.states.lengths))):
            self.states.select(moved)

    def drop_finished(self) -> None:
        """Drop the rows of finished requests now; `step` waits until several can leave together."""
        orders = [search.drop_finished(True) for search in self.searches]
        if any(order is not None for order in orders):
            self.reorder(orders)

    def split(self, request: RequestState) -> RunningBatch:
        """Move a request to a batch of its own."""
        number = next(n for n, search in enumerate(self.searches) if request in search.requests)
        search, rows = self.searches[number], self.rows[number]
        index, new = search.requests.index(request), copy(self)
        own = slice(index * search.group, (index + 1) * search.group)
        new.searches, new.states = [search.copy_requests([index])], self.states.copy_rows(rows[own])
        new.rows = [list(range(search.group))]
        orders: list[list[int] | None] = [None] * len(self.searches)
        orders[number] = search.keep_requests([n for n in range(len(search.requests)) if n != index])
        self.reorder(orders)
        return new

    def can_join(self, other: RunningBatch) -> bool:
        return self.active and other.states.joins and self.states.group == other.states.group

    def join(self, other: RunningBatch) -> None:
        """Take in the rows of a batch whose requests have their first token."""
        begin, self.columns = len(self.states.lengths), None
        self.states.join(other.states)
        known = {search.batch_key: number for number, search in enumerate(self.searches)}
        for search, rows in zip(other.searches, other.rows, strict=True):
            here = [begin + row for row in rows]
            if search.batch_key in known and search.spec.logits_processor is None:  # its tokens start together
                self.searches[known[search.batch_key]].join(search)
                self.rows[known[search.batch_key]] += here
            else:
                self.searches.append(search)
                self.rows.append(here)

    def close(self) -> None:
        """Abandon the requests and release what the states hold; without requests, they hold nothing."""
        if self.searches:
            self.states.close()
        self.searches, self.rows = [], []
