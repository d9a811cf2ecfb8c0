"""Texts that say the same again and again: where they are cut, whoever writes them and in whose company.

Every so many tokens of an answer one looks back: if it ends in the same few tokens, over and over, it ends there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from allyouneed.infer.decoding.options import Decoding

LOOK = 16  # tokens between two looks
LONGEST = 16  # tokens that are said again
LEAST = 32  # tokens of a loop: a line of dashes is none


def due(said: int, decoding: Decoding) -> bool:
    """Whether one looks when an answer has so many tokens."""
    return said % LOOK == 0 and said >= LEAST and decoding.loops is not None and said > decoding.min_length


def looks(before: int, said: int, decoding: Decoding) -> list[int]:
    """When one looks while an answer grows from so many tokens to so many."""
    if decoding.loops is None or said <= decoding.min_length:
        return []
    return [count for count in range(before - before % LOOK + LOOK, said + 1, LOOK) if due(count, decoding)]


def looked(before: NDArray[np.int64], said: NDArray[np.int64], decoding: Decoding) -> NDArray[np.bool_]:
    """Whether one looks at all while answers grow so."""
    first = np.maximum(before - before % LOOK + LOOK, LEAST)
    first = np.maximum(first, decoding.min_length // LOOK * LOOK + LOOK)
    return (first <= said) & (decoding.loops is not None)


def cycle(tokens: Sequence[int], loops: int) -> int:
    """How many tokens are said `loops` times or more at the end of these, and over `LEAST` of them; 0: none are."""
    count = len(tokens)
    for size in range(1, LONGEST + 1):
        span = max(LEAST, loops * size)
        if span > count:
            return 0
        if tokens[-1] == tokens[-1 - size] and tokens[count - span : -size] == tokens[count - span + size :]:
            return size
    return 0


def looping(tokens: Sequence[int], decoding: Decoding) -> bool:
    """Whether one looks now, and sees a loop."""
    return decoding.loops is not None and due(len(tokens), decoding) and bool(cycle(tokens, decoding.loops))


def cut(tokens: Sequence[int], decoding: Decoding) -> int | None:
    """Where these end, for they repeat themselves; None: they do not."""
    found = (n for n in looks(LEAST - 1, len(tokens), decoding) if looping(tokens[:n], decoding))
    return next(found, None)


def echoes(source: Sequence[int], loops: int | None) -> bool:
    """What repeats itself may be answered by what repeats itself: half as often is enough."""
    often = max(2, (loops or 0) // 2)
    return any(
        source[at + size : at + often * size] == source[at : at + (often - 1) * size]
        for size in range(1, LONGEST + 1)
        for at in range(len(source) - often * size + 1)
    )
