from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.sparse.two_hops import hops
from allyouneed.lab.claims.trees import slope
from allyouneed.nn.patterns.core import Pattern

BLOCK = 8
LOCAL, RANDOM, GLOBAL = f"block-window({BLOCK}, 2)", f"random-blocks({BLOCK}, 3, 0)", f"global-prefix({BLOCK})"


def measure(run: ClaimRun) -> Outcome:
    lengths = run.pick((64, 128, 256, 512), (64, 128))
    patterns = {
        "local": LOCAL,
        "local and random": f"{LOCAL} | {RANDOM}",
        "local and global": f"{LOCAL} | {GLOBAL}",
        "BigBird": f"{LOCAL} | {RANDOM} | {GLOBAL}",
    }
    curves = {name: {float(n): float(hops(text, n)) for n in lengths} for name, text in patterns.items()}
    whole = "block-window(64, 2) | global-prefix(128) | random-blocks(64, 3, 0)"  # the released model
    keys = {float(n): Pattern.from_text(whole).mean_keys(n) * n for n in (4096, 8192, 16384)}
    full, longer = 512.0 * 512.0, 4096
    return Outcome(
        (
            Figure(
                ("BigBird: layers between any two tokens", "BigBird：任意两词元间的层数"),
                tuple(curves["BigBird"].values()),
                2,
                2,
            ),
            Figure(
                ("without globals, longest text", "去掉全局词元，最长文本"),
                (curves["local and random"][lengths[-1]],),
                low=3,
            ),
            Figure(("local alone, longest text", "仅局部，最长文本"), (curves["local"][lengths[-1]],), low=3),
            Figure(("exponent of n in attended pairs", "注意力对数随 n 的指数"), (slope(keys),), 0.9, 1.1),
            Figure(
                ("pairs at 4,096 over full attention's at 512", "4,096 时的对数/全注意力 512 时"),
                (keys[longer] / full,),
            ),
        ),
        curves,
        ("tokens", "layers between any two tokens"),
    )


CLAIM = Claim(
    "Zaheer et al. 2020, Big Bird, 2 and 3",
    (
        "Random, local and O(1) global tokens make linear attention in which any two tokens are a short path apart; "
        "the "
        "globals carry the theory.",
        "随机、局部加 O(1) 个全局词元构成线性注意力，任意两词元路径很短；理论依赖全局词元。",
    ),
    (
        "Reachability with and without each part, and attended pairs by length.",
        "逐一去掉各部分计算可达性，并统计注意力对数随长度的变化。",
    ),
    measure,
)
