from __future__ import annotations

from typing import Any

from allyouneed.config import parse
from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import slope
from allyouneed.nn.common import Common
from allyouneed.nn.sublayer import Mixer

# table 1: exponents of n and of d
LAYERS: dict[str, tuple[dict[str, Any], int, int]] = {
    "self-attention": ({"kind": "attention", "heads": 1}, 2, 1),
    "recurrent": ({"kind": "lstm"}, 1, 2),
    "convolutional": ({"kind": "convolution", "size": 3}, 1, 2),
    "self-attention, restricted": ({"kind": "attention", "heads": 1, "pattern": "window(64)"}, 1, 1),
}
# attention also has projections, 8 n d² FLOPs, which the table leaves out: n is large for the exponents of attention
LONG, WIDE = 1 << 20, 64


def flops(keys: dict[str, Any], length: int, width: int) -> float:
    mixer = parse(Mixer, keys)  # type: ignore[type-abstract]
    common, projections = Common(width=width), 8.0 * width**2 if keys["kind"] == "attention" else 0.0
    return length * (mixer.cost(common, length).flops - projections)


def measure(run: ClaimRun) -> Outcome:
    figures = []
    curves = {}
    for name, (keys, n, d) in LAYERS.items():
        by_length = {float(length): flops(keys, length, WIDE) for length in (LONG // 16, LONG // 4, LONG)}
        by_width = {float(width): flops(keys, LONG, width) for width in (WIDE, 4 * WIDE, 16 * WIDE)}
        for what, chinese, found, exponent in (("n", "n", by_length, n), ("d", "d", by_width, d)):
            label = (f"{name}: exponent of {what}", f"{name}：{chinese} 的指数")
            figures.append(Figure(label, (slope(found),), exponent - 0.05, exponent + 0.05))
        curves[name] = by_length
    return Outcome(tuple(figures), curves, ("tokens n", "FLOPs of a layer"), log=True)


CLAIM = Claim(
    "Vaswani et al. 2017, Attention Is All You Need, table 1",
    (
        "Complexity per layer: self-attention n²·d, recurrent n·d², convolutional k·n·d², restricted attention r·n·d.",
        "每层复杂度：自注意力 n²·d，循环层 n·d²，卷积层 k·n·d²，受限自注意力 r·n·d。",
    ),
    (
        "Exponents of n and d in the FLOPs that the cost functions count (tests hold them to the built layers). The "
        "four "
        "projections of attention, n·d², which the table leaves out, are subtracted.",
        "用成本函数（测试保证其与实际层一致）计数 FLOPs，求 n 与 d 的指数。表中未计注意力的四个投影 n·d²，这里先减去。",
    ),
    measure,
)
