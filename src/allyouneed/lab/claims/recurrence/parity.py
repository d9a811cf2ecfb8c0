from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, built, decoder
from allyouneed.lab.probe.run import sample
from allyouneed.lab.probe.task import find
from allyouneed.lab.probe.train import Fit, fit, score

MIXERS = {
    "LSTM": "lstm",
    "attention": attention(positions="rotary"),
    "Mamba": {"kind": "mamba"},
    "retention": {"kind": "retention", "heads": 4},
}


def measure(run: ClaimRun) -> Outcome:
    task, found = find("parity"), dict[str, list[float]]()
    longest = sample(task, task.trained[1])
    for name, mixer in MIXERS.items():
        tree = decoder(mixer, vocab=2, layers=1)
        tree["decoder"][0].pop("channel")
        for seed in run.seeds:
            model = built(tree, seed)
            fit(model, sample(task), Fit(1e-2, run.pick(300, 3), seed=seed, device=run.device), longest)
            found.setdefault(name, []).append(100 * score(model, sample(task, task.longer), run.pick(128, 4))[1])
    low = {"LSTM": (99.0, 100.0)}
    figures = [
        Figure(
            (f"{name}: accuracy at {task.longer} bits, %", f"{name}：{task.longer} 位的准确率，%"),
            tuple(values),
            *low.get(name, (0.0, 75.0)),
        )
        for name, values in found.items()
    ]
    return Outcome(tuple(figures))


CLAIM = Claim(
    "Grazzi et al. 2024, Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues, 4",
    (
        "Parity is beyond Transformers and linear recurrences with positive eigenvalues (Mamba, retention) at "
        "lengths not "
        "seen in training; an LSTM computes it at any length.",
        "在训练未见的长度上，Transformer 与特征值为正的线性循环（Mamba、保留机制）都无法计算奇偶，LSTM 在任意长度上都"
        "可以。",
    ),
    (
        "One layer of each mixer, trained on 2 to 12 bits with a label at each, tested on 48, three seeds. The first "
        "bits are "
        "easy, so that “chance” lies above 50%: at most 75%.",
        "每种混合层一层，训练 2 到 12 位、每位都有标签，测试 48 位，三个种子。前几位容易，因此“随机水平”高于 50%：至"
        "多 75%。",
    ),
    measure,
)
