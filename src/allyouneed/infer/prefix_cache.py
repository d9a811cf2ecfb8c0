"""Prefix cache: full blocks of prompts that were read, kept for later prompts that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from allyouneed.nn.states.paged import BlockPool

Key = tuple[int, tuple[int, ...]]


class PrefixCache:
    """Blocks by the tokens in them and the block before. The least recently used are evicted first, and no block
    before those that continue it. `prompt_tokens`, `hits`: prompt tokens looked up so far, and those found."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        # (block before, tokens) -> block; last used last, and of one prompt the first block last: evicted in this order
        self.blocks: OrderedDict[Key, int] = OrderedDict()
        self.children: dict[int, int] = {}  # block -> number of cached blocks that continue it
        self.prompt_tokens = self.hits = 0

    def find(self, prompt: Sequence[int]) -> list[int]:
        """The blocks a prompt can start with, now held by the caller; its last token is always left to read."""
        size, end = self.pool.size, len(prompt) - 1
        found = self._known([tuple(prompt[at : at + size]) for at in range(0, end // size * size, size)])[1]
        self.prompt_tokens, self.hits = self.prompt_tokens + len(prompt), self.hits + len(found) * size
        self.pool.retain(found)
        return found

    def keep(self, prompt: Sequence[int], blocks: Sequence[int]) -> None:
        """Cache those of the row's blocks that the prompt fills. Nothing continues a block before it is cached."""
        size, end = self.pool.size, len(prompt)
        texts = [tuple(prompt[at : at + size]) for at in range(0, end // size * size, size)]
        known, found = self._known(texts)
        new = blocks[len(found) : len(texts)]
        before = [*found[-1:], *new] if found else [0, *new]
        keys = list(zip(before, texts[len(found) :], strict=False))
        self.blocks.update(zip(reversed(keys), reversed(new), strict=True))
        for parent, _ in keys:
            self.children[parent] = self.children.get(parent, 0) + 1
        self.pool.cache(new)
        for key in reversed(known):  # they are evicted after the new ones, which continue them
            self.blocks.move_to_end(key)

    def _known(self, texts: Sequence[tuple[int, ...]]) -> tuple[list[Key], list[int]]:
        """Keys and blocks of the longest cached prefix of these blocks of tokens, now the most recently used."""
        keys, found, before = list[Key](), list[int](), 0
        for text in texts:
            key = before, text
            block = self.blocks.get(key)
            if block is None:
                break
            keys.append(key)
            found.append(block)
            before = block
        for key in reversed(keys):
            self.blocks.move_to_end(key)
        return keys, found

    def evict(self) -> bool:
        """Drop the least recently used block that no other continues; False: there is none."""
        for key, block in self.blocks.items():
            if not self.children.get(block):
                del self.blocks[key]
                self.children[key[0]] -= 1
                self.pool.uncache(block)
                return True
        return False

    def drop(self, prompt: Sequence[int]) -> None:
        """Forget the blocks of a prompt and all that continue them, without releasing blocks: the pool is
        recounted."""
        left, _ = self._known([tuple(prompt[: self.pool.size])])
        continued: dict[int, list[Key]] = {}
        for key in self.blocks if left else ():
            continued.setdefault(key[0], []).append(key)
        while left:
            key = left.pop()
            block = self.blocks.pop(key)
            self.pool.cached.remove(block)
            if key[0] in self.children:
                self.children[key[0]] -= 1
            self.children.pop(block, None)
            left += continued.get(block, ())

    def forget(self) -> None:
        """Empty it without releasing blocks: the pool is recounted."""
        self.blocks, self.children = OrderedDict(), {}
        self.pool.cached.clear()

    def clear(self) -> None:
        while self.evict():
            pass
