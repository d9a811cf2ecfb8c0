from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import config


def measure(run: ClaimRun) -> Outcome:
    albert, bert = config("albert-base"), config("bert-base")
    sizes = {name: one.cost(512).parameters / 1e6 for name, one in (("albert", albert), ("bert", bert))}
    block = {name: one.encoder[0].cost(one, 1).parameters for name, one in (("albert", albert), ("bert", bert))}
    flops = albert.cost(512).flops / bert.cost(512).flops
    return Outcome(
        (
            Figure(("ALBERT-base, millions", "ALBERT-base，百万参数"), (sizes["albert"],), 11.0, 12.5),
            Figure(("BERT-base, millions", "BERT-base，百万参数"), (sizes["bert"],), 107, 111),
            Figure(
                ("parameters of the blocks, BERT over ALBERT", "块参数：BERT/ALBERT"),
                (block["bert"] / block["albert"],),
                11.9,
                12.1,
            ),
            Figure(("FLOPs, ALBERT over BERT", "FLOPs：ALBERT/BERT"), (flops,)),
        )
    )


CLAIM = Claim(
    "Lan et al. 2020, ALBERT, table 1",
    (
        "Sharing one layer twelve times and factorising the embedding gives 12M parameters where BERT-base has 108M.",
        "十二层共享一层参数并分解词嵌入后，参数为 1,200 万，而 BERT-base 为 1.08 亿。",
    ),
    (
        "Parameters of both presets from the cost functions. Sharing saves weights, not work: the last figure.",
        "由成本函数得到两个预置模型的参数量。共享节省的是参数而非计算量，见末行。",
    ),
    measure,
)
