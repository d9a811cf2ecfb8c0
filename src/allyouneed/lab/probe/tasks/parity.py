from __future__ import annotations

from torch import Generator, Tensor

from allyouneed.lab.probe.task import ProbeTask, drawn


def make(dice: Generator, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Bits; at each, whether the ones so far are odd."""
    bits = drawn(dice, 0, 2, rows, length)
    return bits, bits.cumsum(1) % 2


TASK = ProbeTask(
    ("parity of the bits so far", "奇偶：到目前为止 1 的个数"),
    "Grazzi et al. 2024, Unlocking State-Tracking in Linear RNNs, 4",
    2,
    1 / 2,
    (2, 12),
    48,
    make,
    convolved=False,
)
