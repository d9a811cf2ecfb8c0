from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.text import loss_after
from allyouneed.lab.claims.trees import decoder


def measure(run: ClaimRun) -> Outcome:
    expert, counts = {"kind": "ffn", "hidden": run.pick(1024, 64)}, run.pick((1, 2, 4, 8, 16), (1, 2))
    runs: list[dict[float, float]] = []
    for seed in run.seeds:
        found = {}
        for count in counts:
            channel = expert if count == 1 else {"kind": "moe", "experts": count, "top": 1, "expert": expert}
            tree = decoder(width=run.pick(256, 32), layers=4, vocab=128, channel=channel)
            found[float(count)] = loss_after(tree, seed, run, steps=run.pick(2000, 3), rows=run.pick(64, 2), length=256)
        runs.append(found)
    first, last = float(counts[0]), float(counts[-1])
    curve = {n: sum(one[n] for one in runs) / len(runs) for n in map(float, counts)}
    falls = tuple(one[last] - one[first] for one in runs)
    return Outcome(
        (Figure(("loss, most experts minus dense, nats", "损失：专家最多减稠密，nat"), falls, high=0.0),),
        {"top-1 of experts": curve},
        ("experts", "nats per character"),
    )


CLAIM = Claim(
    "Fedus et al. 2021, Switch Transformers, 3.1 and figure 1",
    (
        "At equal FLOPs per token the loss falls with the number of experts (7 times faster to T5-Base's).",
        "每词元 FLOPs 相同时，损失随专家数下降（达到 T5-Base 的损失快 7 倍）。",
    ),
    (
        "Characters, four layers of width 256, 1 to 16 experts, one for each token, 2,000 steps, three seeds.",
        "字符模型，四层、宽 256，1 到 16 个专家、每词元一个，2,000 步，三个种子。",
    ),
    measure,
    needs="gpu",
)
