"""Loop detection: text that repeats the same few tokens over and over is cut.

Every `CHECK_EVERY` tokens the end of a text is checked, so where it is cut depends on the text alone, not on the batch
or on how many tokens a step adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allyouneed.infer.decoding.options import Decoding

CHECK_EVERY = 16  # tokens between two checks
MAX_PERIOD = 16  # tokens of the repeated part
MIN_LOOP_TOKENS = 32  # tokens of a loop: a line of dashes is not one


def next_check(length: Any, options: Decoding, maximum: Callable[[Any, int], Any] = max) -> Any:
    """The first length after `length` at which a text is checked; an array with `maximum=np.maximum`."""
    least = maximum(length, max(MIN_LOOP_TOKENS - 1, options.min_length))
    return least - least % CHECK_EVERY + CHECK_EVERY


def is_check_due(length: int, options: Decoding) -> bool:
    if length % CHECK_EVERY or options.loops is None:
        return False
    return bool(next_check(length - 1, options) == length)


def has_check(before: NDArray[np.int64], after: NDArray[np.int64], options: Decoding) -> NDArray[np.bool_]:
    """Whether texts are checked while they grow from `before` to `after` tokens."""
    due: NDArray[np.bool_] = next_check(before, options, np.maximum) <= after
    return due & (options.loops is not None)


def loop_period(tokens: Sequence[int], loops: int) -> int:
    """The smallest period that repeats at the end at least `loops` times and over `MIN_LOOP_TOKENS`; 0: none."""
    count = len(tokens)
    for period in range(1, MAX_PERIOD + 1):
        span = max(MIN_LOOP_TOKENS, loops * period)
        if span > count:
            return 0
        if tokens[-1] == tokens[-1 - period] and tokens[count - span : -period] == tokens[count - span + period :]:
            return period
    return 0


def find_loop(tokens: Sequence[int], options: Decoding, start: int = 0) -> int | None:
    """How many tokens there are at the first check after `start` that finds a loop; None: no check does."""
    if options.loops is None:
        return None
    for length in range(next_check(start, options), len(tokens) + 1, CHECK_EVERY):
        if loop_period(tokens[:length], options.loops):
            return length
    return None


def is_looping(tokens: Sequence[int], options: Decoding) -> bool:
    """Whether a check is due at this length and finds a loop."""
    return is_check_due(len(tokens), options) and find_loop(tokens, options, len(tokens) - 1) is not None


def has_repeats(source: Sequence[int], loops: int | None) -> bool:
    """Whether a source itself repeats a part, half as often as a loop: then its translation may repeat as well."""
    times = max(2, (loops or 0) // 2)
    return any(
        source[at + period : at + times * period] == source[at : at + (times - 1) * period]
        for period in range(1, MAX_PERIOD + 1)
        for at in range(len(source) - times * period + 1)
    )
