from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.sparse.two_hops import hops
from allyouneed.lab.claims.trees import slope
from allyouneed.nn.patterns.core import Pattern


def measure(run: ClaimRun) -> Outcome:
    side, length = 8, run.pick(257, 65)  # keys fewer than 9 away: a window of 16, 8 on each side
    layers = {float(w): float(hops(f"window({w + 1})", length)) for w in (side // 2, side, 2 * side)}
    stated = {w: -(-(length - 1) // w) for w in layers}
    pairs = {float(n): n * Pattern.from_text("window(256) | global(0)").mean_keys(n) for n in (8192, 32768, 131072)}
    return Outcome(
        (
            Figure(("exponent of n in attended pairs", "注意力对数随 n 的指数"), (slope(pairs),), 0.95, 1.05),
            Figure(
                ("layers to cross the text over (n − 1) / (w / 2)", "跨越全文的层数/((n−1)/(w/2))"),
                tuple(layers[w] / stated[w] for w in layers),
                1.0,
                1.0,
            ),
        ),
        {"layers to cross 257 tokens": {2 * w: n for w, n in layers.items()}},
        ("window", "layers"),
    )


CLAIM = Claim(
    "Beltagy et al. 2020, Longformer, 3.1",
    (
        "A window of w scales as O(n·w); l layers have a receptive field of l × w.",
        "窗口 w 的代价为 O(n·w)；l 层的感受野为 l × w。",
    ),
    (
        "Attended pairs by length, and layers until any two of 257 tokens are connected.",
        "注意力对数随长度的变化，以及 257 个词元两两相连所需层数。",
    ),
    measure,
)
