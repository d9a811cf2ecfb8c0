"""How the blocks of a pool are shared out among requests: what each may need, what is reserved for states that are not
paged, and which prompt prefixes are cached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import ceil

import torch

from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.prefix_cache import PrefixCache
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.base import States
from allyouneed.nn.states.paged import BLOCK, BlockPool, PagedStates

ENDLESS = 1 << 16  # a length at which windows are full: what still grows there grows without bound


class DeclaredSize:
    """State of a row as its config declares it, in blocks of `size` tokens of what grows without bound. `paged`:
    whether any keys and values are stored in blocks; `itemsize`: bytes of a number of the model."""

    def __init__(self, config: Model, size: int, paged: bool, itemsize: int) -> None:
        self.size, self.paged, self.itemsize = size, paged, itemsize
        self.cost = cache(config.cost)
        long = self.cost(ENDLESS)
        self.grows = long.state_bytes(1, itemsize) - long.state_bytes(0, itemsize) if paged else 0.0
        # bytes of one block; where nothing is paged, the whole state of a row counts as one
        self.block = self.grows * size or max(1.0, long.state_bytes(size, itemsize))
        self.constant = cache(self._constant)

    def _constant(self, length: int, source: int = 0) -> int:
        """Blocks' worth of state of a row of this length that is not paged."""
        cost = self.cost(max(length, source))
        rest = cost.state_bytes(length, self.itemsize) - self.grows * length
        return max(0, ceil(rest / self.block))

    def pages(self, length: int) -> int:
        """Blocks of a row of this length."""
        return -(-length // self.size) if self.paged else 0


class BlockManager:
    def __init__(self, runner: ModelRunner, pool: BlockPool) -> None:
        self.runner, self.pool, self.prefixes = runner, pool, PrefixCache(pool)
        states = PagedStates(_empty_states(runner), pool)
        self.declared = DeclaredSize(runner.model.config, pool.size, states.has_pages, _itemsize(runner))
        self.shares_prefixes, self.block_bytes = shares_prefixes(runner, states), ceil(self.declared.block)
        self.unverified: dict[RequestState, list[int]] = {}  # prompts in blocks, of requests without a first token

    # --- what a request needs ----------------------------------------------------------------------------------------

    def measure(self, state: RequestState) -> int:
        """The most blocks it can come to need; `unpaged` ones among them are known to it afterwards."""
        request, rows = state.request, state.spec.rows
        length = len(request.prompt) + state.limit
        state.unpaged = self.declared.constant(length, len(request.source or ())) * rows
        pages = self.declared.pages(length)
        return state.unpaged + (pages and pages + 1) * rows

    def soon(self, state: RequestState, unread: int) -> int:
        """Blocks for its unread prompt tokens and its first token."""
        return self.declared.pages(unread) + 2 * state.spec.rows * self.declared.paged

    # --- what is held ------------------------------------------------------------------------------------------------

    def free(self, prefilling: Iterable[tuple[RequestState, int]]) -> int:
        """Blocks that are neither held nor about to be taken by these requests, with their unread tokens; cached
        prefixes count as free."""
        return len(self.pool.free) + self.pool.evictable - sum(self.soon(state, unread) for state, unread in prefilling)

    def make_room(self, states: States, counts: Sequence[int]) -> None:
        """Evict enough cached prefixes for `counts` more tokens of each row, all at once rather than block by block."""
        if isinstance(states, PagedStates) and states.has_pages:
            size, rows = self.pool.size, zip(states.lengths, states.block_tables, counts, strict=True)
            if needed := sum([max(0, -(-(seen + count) // size) - len(table)) for seen, table, count in rows]):
                self.evict(needed)

    def evict(self, needed: int) -> bool:
        """Evict cached prefixes until this many blocks are free; False: they are not."""
        while len(self.pool.free) < needed and self.prefixes.evict():
            pass
        return len(self.pool.free) >= needed

    def reserve(self, state: RequestState) -> None:
        self.evict(state.unpaged)
        state.reserved = self.pool.allocate(state.unpaged)

    def release(self, state: RequestState) -> None:
        self.pool.release(state.reserved)
        state.reserved = []

    def recount(self, states: Iterable[States], requests: Iterable[RequestState]) -> None:
        """Recount after a failure: only these states, these requests and cached prefixes hold blocks."""
        tables = [table for paged in states if isinstance(paged, PagedStates) for table in paged.block_tables]
        kept = [list(self.prefixes.blocks.values()), *self.unverified.values()]
        self.pool.recount([*tables, *(state.reserved for state in requests), *kept])

    def resume(self, state: RequestState, states: PagedStates, rows: int, force: bool) -> bool:
        """Swap a preempted request in, if there are blocks for it and its next tokens, or anyway (`force`)."""
        if not self.evict(state.unpaged + states.swapped_blocks + 2 * rows) and not force:
            return False
        state.reserved = self.pool.allocate(state.unpaged)
        states.swap_in()
        return True

    # --- prefixes ----------------------------------------------------------------------------------------------------

    def start(self, states: States, requests: Sequence[RequestState]) -> PagedStates:
        """Paged states in which rows have read the cached prefixes of their prompts."""
        paged = PagedStates(states, self.pool)
        if self.shares_prefixes:
            for row, state in enumerate(requests):
                paged.adopt_blocks(row, self.prefixes.find(state.inputs[0]))
        return paged

    def keep_prefixes(self, states: States, requests: Iterable[tuple[int, RequestState]]) -> None:
        """Cache the prompts of these rows."""
        assert isinstance(states, PagedStates)
        if self.shares_prefixes:
            for row, state in requests:
                self.prefixes.keep(state.inputs[0], states.block_tables[row])

    def hold_prefixes(self, states: States, requests: Iterable[tuple[int, RequestState]]) -> None:
        """Cache the prompts of these rows once `verify_prefixes` knows that they were read well: the first tokens of
        requests in slots come some steps later."""
        assert isinstance(states, PagedStates)
        for row, state in requests if self.shares_prefixes else ():
            self.unverified[state] = blocks = list(states.block_tables[row])
            self.pool.retain(blocks)

    def end_step(self) -> None:
        """Decide on the prompts of `hold_prefixes`, and evict cached prefixes beyond the pool's limit."""
        if self.unverified:
            self.verify_prefixes()
        while self.pool.evictable > self.pool.most_evictable and self.prefixes.evict():
            pass

    def verify_prefixes(self) -> None:
        for state in [state for state in self.unverified if state.tokens or state.finished]:
            blocks = self.unverified.pop(state)
            if state.error is None and (state.tokens or state.done):
                self.prefixes.keep(state.inputs[0], blocks)
            self.pool.release(blocks)

    def waste(self, running: Iterable[States]) -> float:
        """The share of the blocks in use by these states that holds nothing."""
        size = self.pool.size
        filled: dict[int, int] = {}
        for states in running:
            assert isinstance(states, PagedStates)
            for blocks, length in zip(states.block_tables, states.lengths, strict=True):
                for number, block in enumerate(blocks):
                    filled[block] = max(filled.get(block, 0), min(size, length - number * size))
        return 1 - sum(filled.values()) / (len(filled) * size) if filled else 0.0


def shares_prefixes(runner: ModelRunner, states: PagedStates | None = None) -> bool:
    """A prefix can be shared when its whole state is paged and depends on nothing else. `states`: of the engine."""
    states = states or PagedStates(_empty_states(runner), BlockPool(0))
    return states.fully_paged and not states.has_sources and not runner.bidirectional_prompt


def block_bytes(runner: ModelRunner, size: int = BLOCK) -> int:
    """Bytes of one block, in all layers."""
    return ceil(DeclaredSize(runner.model.config, size, True, _itemsize(runner)).block)


def _itemsize(runner: ModelRunner) -> int:
    return next(runner.model.parameters()).itemsize


def _empty_states(runner: ModelRunner) -> States:
    """States of one row, to see what they consist of."""
    model = runner.model
    if not hasattr(model, "encode") or runner.retrieve is not None:
        states: States = model.start(1)
    else:
        states = model.start(Rows(torch.zeros(1, 1, dtype=torch.long)).to(runner.device))
    return states
