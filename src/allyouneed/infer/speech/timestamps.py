"""Split the tokens of a window into timed segments, and find the start of the next window (Radford et al. 2022,
3.8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FRAMES = 2  # per step of the timestamp tokens


@dataclass(frozen=True)
class TimedTokens:
    """`begin` and `end` in frames of the window; `tokens` include the timestamps around them."""

    begin: int
    end: int
    tokens: tuple[int, ...]


def split_segments(tokens: Sequence[int], first_time: int, frames: int) -> tuple[list[TimedTokens], int]:
    """The segments of a window of `frames` frames, and the offset of the next window in frames.

    Two adjacent timestamps separate segments. Text after the last such pair was truncated by the end of the window, so
    the next window starts there. A window that ends with a single timestamp is complete.
    """
    times = [token >= first_time for token in tokens]
    cuts = [n for n in range(1, len(tokens)) if times[n - 1] and times[n]]
    single_end = times[-2:] == [False, True]

    def frame(token: int) -> int:
        return (token - first_time) * FRAMES

    if not cuts:
        stamps = [token for token, is_time in zip(tokens, times, strict=True) if is_time]
        end = frame(stamps[-1]) if stamps and stamps[-1] != first_time else frames
        return [TimedTokens(0, end, tuple(tokens))], frames
    if single_end:
        cuts.append(len(tokens))
    found = []
    for begin, end in zip([0, *cuts], cuts, strict=False):
        part = tuple(tokens[begin:end])
        found.append(TimedTokens(frame(part[0]), frame(part[-1]), part))
    return found, frames if single_end else frame(tokens[cuts[-1] - 1])
