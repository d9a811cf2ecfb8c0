from __future__ import annotations

from functools import partial

from torch import Generator, Tensor

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import built, decoder
from allyouneed.lab.probe.run import CONVOLUTION
from allyouneed.lab.probe.tasks.needle import TASK
from allyouneed.lab.probe.train import Fit, fit, score

SEGMENT = 32


def asked(dice: Generator, rows: int, segments: int) -> tuple[Tensor, Tensor]:
    return TASK.make(dice, rows, SEGMENT * segments)


def measure(run: ClaimRun) -> Outcome:
    segments, runs = run.pick((1, 2, 4, 8, 16), (1, 2)), []
    tree = decoder(
        {"kind": "infini", "heads": 4, "segment": SEGMENT, "positions": "rotary"}, vocab=TASK.vocab, width=128
    )
    tree["decoder"] = [CONVOLUTION, tree["decoder"][0] | {"repeat": 1}] * 2
    for seed in run.seeds:
        model = built(tree, seed)
        how = Fit(steps=run.pick(3000, 3), rows=run.pick(64, 2), seed=seed, device=run.device)
        fit(model, partial(asked, segments=4), how)
        runs.append({float(n): score(model, partial(asked, segments=n))[1] for n in segments})
    last = float(segments[-1])
    return Outcome(
        (
            Figure(
                ("recall behind one segment", "一段之内的召回"), tuple(one[1.0] for one in runs), low=0.9, control=True
            ),
            Figure(("recall behind the most segments", "段数最多时的召回"), tuple(one[last] for one in runs), low=0.9),
        ),
        {"accuracy": {n: sum(one[n] for one in runs) / len(runs) for n in runs[0]}},
        ("segments", "accuracy"),
    )


CLAIM = Claim(
    "Munkhdalai et al. 2024, Leave No Context Behind, table 3",
    (
        "The compressive memory finds a passkey after many segments (1M tokens after tuning on 5k); a reproduction by "
        "Hugging Face found that it gets worse with each compression.",
        "压缩记忆在许多段之后仍能找到密钥（5k 微调后可达 1M 词元）；Hugging Face 的复现则发现每次压缩都会变差。",
    ),
    (
        "The needle task, trained over four segments of 32, tested over up to 16, 3,000 steps, three seeds.",
        "大海捞针任务，训练 4 段（每段 32），测试至 16 段，3,000 步，三个种子。",
    ),
    measure,
    needs="gpu",
)
