from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.speed import heads, model_of, tokens_per_second


def measure(run: ClaimRun) -> Outcome:
    lengths = run.pick((1024, 16384, 65536), (64, 128))
    kinds = {"multi-head": None, "grouped": run.pick(4, 2), "multi-query": 1}
    found = tokens_per_second(
        {name: model_of(heads(run, kv_heads=kv), run) for name, kv in kinds.items()}, lengths, run
    )
    gain = {n: found["multi-query"][n] / found["multi-head"][n] for n in map(float, lengths)}
    last = float(lengths[-1])
    return Outcome(
        (
            Figure(("multi-query over multi-head, longest context", "多查询/多头，最长上下文"), (gain[last],), low=1.5),
            Figure(
                ("the gain grows with the context: longest over shortest", "收益随上下文增长：最长/最短"),
                (gain[last] / gain[float(lengths[0])],),
                low=1.1,
            ),
            Figure(
                ("grouped over multi-query, longest context", "分组/多查询，最长上下文"),
                (found["grouped"][last] / found["multi-query"][last],),
                low=0.7,
            ),
        ),
        found,
        ("tokens of context", "tokens per second"),
        log=True,
    )


CLAIM = Claim(
    "Shazeer 2019, Fast Transformer Decoding, table 3; Ainslie et al. 2023, GQA, table 1",
    (
        "One head of keys and values decodes many times faster (46 → 3.8 μs per token); grouped queries are nearly "
        "as fast.",
        "单个键值头使解码快许多倍（每词元 46 → 3.8 微秒）；分组查询的速度与之接近。",
    ),
    (
        "Tokens per second by context, 1.3B parameters, bf16, one row.",
        "1.3B 参数、bf16、单行，各上下文长度的每秒词元数。",
    ),
    measure,
    needs="gpu",
)
