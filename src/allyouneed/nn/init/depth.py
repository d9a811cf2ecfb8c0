"""Number of layers of a model, and the constants that depend on it."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Depth(NamedTuple):
    """Number of encoder and decoder layers, and the side a block belongs to."""

    encoder: int
    decoder: int
    side: Literal["encoder", "decoder"]


def deepnorm_factors(depth: Depth) -> tuple[float, float]:
    """α of the residual and β of the init ("DeepNet", figure 2)."""
    n, m = depth.encoder, depth.decoder
    if depth.side == "encoder" and m:
        return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
    if depth.side == "decoder" and n:
        return (3 * m) ** (1 / 4), (12 * m) ** (-1 / 4)
    return (2 * (n + m)) ** (1 / 4), (8 * (n + m)) ** (-1 / 4)
