"""How a pool of blocks is shared out among requests: pasts that begin alike are kept for the next one who asks, and
what a request's constant states need is reserved beside its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil

from allyouneed.nn.models.base import Model
from allyouneed.nn.states.paged import BlockPool

ENDLESS = 1 << 16  # so long a text that windows have turned: what still grows, grows for ever


class Declared:
    """What a config says of its states, in blocks of so many tokens of what grows for ever. `pages`: whether there are
    keys and values that lie in blocks."""

    def __init__(self, config: Model, size: int, pages: bool) -> None:
        self.config, self.size, self.pages = config, size, pages
        self.cost = cache(config.cost)
        long = self.cost(ENDLESS)
        self.grows = long.state_per_token if pages else 0.0
        # elements of one block; where nothing lies in blocks, what a row comes to have is one
        self.block = self.grows * size or max(1.0, long.state_per_token * size + long.state_constant)

    def own(self, length: int, source: int = 0) -> int:
        """Blocks' worth of state of a row of this length that does not lie in blocks."""
        cost = self.cost(max(length, source))
        elements = cost.state_per_token * length + cost.state_constant - self.grows * length
        return max(0, ceil(elements / self.block))

    def pages_of(self, length: int) -> int:
        """Blocks of a row of this length."""
        return -(-length // self.size) if self.pages else 0


class Prefixes:
    """Full blocks of prompts that were read, by the tokens in them and what stands before. The longest unused go first,
    and none before those that go on from it. `asked`, `hits`: tokens of prompts so far, and those that were known."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.known: dict[tuple[int, tuple[int, ...]], int] = {}  # (block before, tokens) -> block; last used last
        self.after: dict[int, int] = {}  # block -> how many are known that go on from it
        self.asked = self.hits = 0

    def find(self, prompt: Sequence[int]) -> list[int]:
        """The blocks a prompt can begin with, now held by the one who asks; its last token is always left to read."""
        size, found = self.pool.size, [0]
        for at in range(0, (len(prompt) - 1) // size * size, size):
            key = found[-1], tuple(prompt[at : at + size])
            block = self.known.pop(key, None)
            if block is None:
                break
            self.known[key] = block
            found.append(block)
        self.asked, self.hits = self.asked + len(prompt), self.hits + (len(found) - 1) * size
        self.pool.retain(found[1:])
        return found[1:]

    def keep(self, prompt: Sequence[int], blocks: Sequence[int]) -> None:
        """Those of the prompt's blocks that it fills."""
        size, before = self.pool.size, 0
        for number in range(len(prompt) // size):
            key = before, tuple(prompt[number * size : (number + 1) * size])
            if key not in self.known:
                self.known[key] = blocks[number]
                self.after[before] = self.after.get(before, 0) + 1
                self.pool.retain([blocks[number]])
            before = self.known[key]

    def drop(self) -> bool:
        """Let go of the longest unused; False: there is none."""
        for key, block in self.known.items():
            if not self.after.get(block):
                del self.known[key]
                self.after[key[0]] -= 1
                self.pool.release([block])
                return True
        return False

    def clear(self) -> None:
        while self.drop():
            pass
