"""What was said when: the tokens of one window of sound as pieces with a begin and an end, and where the next window
begins (Radford et al. 2022, 3.8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FRAMES = 2  # in one tick of the time tokens


@dataclass(frozen=True)
class Heard:
    """`begin` and `end` in frames of the window; `tokens` with the times around them."""

    begin: int
    end: int
    tokens: tuple[int, ...]


def pieces(tokens: Sequence[int], first_time: int, frames: int) -> tuple[list[Heard], int]:
    """The pieces of a window of so many frames, and how many frames the next window begins later.

    Two times side by side are where one piece ends and the next begins. What comes after the last such pair was cut off
    by the window's end: the next window begins there. A window that ends with a single time is told to its end.
    """
    times = [token >= first_time for token in tokens]
    cuts = [n for n in range(1, len(tokens)) if times[n - 1] and times[n]]
    single_end = times[-2:] == [False, True]

    def frame(token: int) -> int:
        return (token - first_time) * FRAMES

    if not cuts:
        said = [token for token, is_time in zip(tokens, times, strict=True) if is_time]
        end = frame(said[-1]) if said and said[-1] != first_time else frames
        return [Heard(0, end, tuple(tokens))], frames
    if single_end:
        cuts.append(len(tokens))
    found = []
    for begin, end in zip([0, *cuts], cuts, strict=False):
        part = tuple(tokens[begin:end])
        found.append(Heard(frame(part[0]), frame(part[-1]), part))
    return found, frames if single_end else frame(tokens[cuts[-1] - 1])
