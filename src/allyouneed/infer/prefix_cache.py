"""Prefix cache: full blocks of prompts that were read, kept for later prompts that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from allyouneed.nn.states.paged import BlockPool


class PrefixCache:
    """Blocks by the tokens in them and the block before. The least recently used are evicted first, and no block
    before those that continue it. `prompt_tokens`, `hits`: prompt tokens looked up so far, and those found."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        # (block before, tokens) -> block; last used last, and of one prompt the first block last: evicted in this order
        self.blocks: OrderedDict[tuple[int, tuple[int, ...]], int] = OrderedDict()
        self.children: dict[int, int] = {}  # block -> number of cached blocks that continue it
        self.prompt_tokens = self.hits = 0

    def find(self, prompt: Sequence[int]) -> list[int]:
        """The blocks a prompt can start with, now held by the caller; its last token is always left to read."""
        size, found, keys = self.pool.size, [0], list[tuple[int, tuple[int, ...]]]()
        for at in range(0, (len(prompt) - 1) // size * size, size):
            key = found[-1], tuple(prompt[at : at + size])
            block = self.blocks.get(key)
            if block is None:
                break
            keys.append(key)
            found.append(block)
        self._touch(keys)
        self.prompt_tokens, self.hits = self.prompt_tokens + len(prompt), self.hits + (len(found) - 1) * size
        self.pool.retain(found[1:])
        return found[1:]

    def keep(self, prompt: Sequence[int], blocks: Sequence[int]) -> None:
        """Cache those of the row's blocks that the prompt fills."""
        size, before, keys = self.pool.size, 0, list[tuple[int, tuple[int, ...]]]()
        for number in range(len(prompt) // size):
            key = before, tuple(prompt[number * size : (number + 1) * size])
            if key not in self.blocks:
                self.blocks[key] = blocks[number]
                self.children[before] = self.children.get(before, 0) + 1
                self.pool.cache(blocks[number])
            keys.append(key)
            before = self.blocks[key]
        self._touch(keys)

    def _touch(self, keys: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """The blocks of a prompt have been used."""
        for key in reversed(keys):
            self.blocks.move_to_end(key)

    def evict(self) -> bool:
        """Drop the least recently used block that no other continues; False: there is none."""
        for key, block in self.blocks.items():
            if not self.children.get(block):
                del self.blocks[key]
                self.children[key[0]] -= 1
                self.pool.uncache(block)
                return True
        return False

    def forget(self) -> None:
        """Empty it without releasing blocks: the pool is recounted."""
        self.blocks, self.children = OrderedDict(), {}
        self.pool.cached.clear()

    def clear(self) -> None:
        while self.evict():
            pass
