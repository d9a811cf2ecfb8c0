from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.speed import heads, model_of, tokens_per_second


def measure(run: ClaimRun) -> Outcome:
    lengths = run.pick((1024, 8192, 65536), (64, 128))
    trees = {
        "Transformer": model_of(heads(run), run),
        "grouped queries": model_of(heads(run, kv_heads=run.pick(4, 2)), run),
        "RetNet": model_of({"kind": "retention", "heads": run.pick(8, 4)}, run),
    }
    found = tokens_per_second(trees, lengths, run)
    first, last = float(lengths[0]), float(lengths[-1])
    return Outcome(
        (
            Figure(
                ("RetNet: speed, longest over shortest context", "RetNet：速度，最长/最短上下文"),
                (found["RetNet"][last] / found["RetNet"][first],),
                low=0.95,
            ),
            Figure(
                ("Transformer: the same", "Transformer：同上"),
                (found["Transformer"][last] / found["Transformer"][first],),
                high=0.9,
            ),
            Figure(
                ("RetNet over Transformer, second length", "RetNet/Transformer，第二个长度"),
                (found["RetNet"][float(lengths[1])] / found["Transformer"][float(lengths[1])],),
                low=1.0,
            ),
            Figure(
                ("RetNet over grouped queries, second length", "RetNet/分组查询，第二个长度"),
                (found["RetNet"][float(lengths[1])] / found["grouped queries"][float(lengths[1])],),
            ),
        ),
        found,
        ("tokens of context", "tokens per second"),
        log=True,
    )


CLAIM = Claim(
    "Sun et al. 2023, Retentive Network, figure 1 and 3.4",
    (
        "At 8k tokens RetNet decodes 8.4 times faster and with 15.6 times lower latency than a Transformer with a KV "
        "cache, "
        "at a speed that does not depend on the length.",
        "8k 词元时，RetNet 的解码吞吐为带 KV 缓存 Transformer 的 8.4 倍、延迟低 15.6 倍，且速度与长度无关。",
    ),
    (
        "Tokens per second of one row at 1k, 8k and 64k tokens of context, 1.3B parameters, bf16; beside multi-head "
        "attention, grouped queries, which the paper does not compare with. The published factors need its batch "
        "sizes.",
        "1.3B 参数、bf16，单行在 1k、8k、64k 上下文时的每秒词元数；除多头注意力外还比较论文未比的分组查询。论文的倍数"
        "取决于其批大小。",
    ),
    measure,
    needs="gpu",
)
