from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.text import sample, trained
from allyouneed.lab.claims.trees import attention, decoder
from allyouneed.lab.probe.train import score

KINDS = {
    "ALiBi": (attention(positions="alibi"), "none"),
    "rotary": (attention(positions="rotary"), "none"),
    "sinusoidal": (attention(), "sinusoidal"),
    "none": (attention(), "none"),
}


def measure(run: ClaimRun) -> Outcome:
    lengths, runs = run.pick((64, 128, 256, 512), (64, 128)), dict[str, list[dict[float, float]]]()
    for name, (mixer, positions) in KINDS.items():
        for seed in run.seeds:
            model = trained(decoder(mixer, vocab=128, embed={"positions": positions}), seed, run)
            losses = {float(n): score(model, sample(n, held=True), run.pick(32, 2))[0] for n in lengths}
            runs.setdefault(name, []).append(losses)
    last = float(lengths[-1])
    rise = {name: tuple(one[last] - one[64.0] for one in found) for name, found in runs.items()}
    curves = {name: {n: sum(one[n] for one in found) / len(found) for n in found[0]} for name, found in runs.items()}
    return Outcome(
        (
            Figure(
                ("ALiBi: rise of the loss at 8 times the length", "ALiBi：8 倍长度时损失的上升"),
                rise["ALiBi"],
                high=0.05,
            ),
            Figure(("sinusoidal: the same", "正弦：同上"), rise["sinusoidal"], low=0.2),
            Figure(("rotary: the same", "旋转：同上"), rise["rotary"]),
            Figure(("no positions: the same", "无位置编码：同上"), rise["none"]),
        ),
        curves,
        ("characters of context", "nats per character"),
    )


CLAIM = Claim(
    "Press et al. 2022, Train Short, Test Long (ALiBi), 1 and figure 1",
    (
        "A model with ALiBi keeps its perplexity on texts many times longer than in training; sinusoidal positions "
        "fail at "
        "once, rotary ones soon (1.3B: trained on 1,024, as good at 2,048 as sinusoidal trained on 2,048).",
        "采用 ALiBi 的模型在远长于训练长度的文本上困惑度不升；正弦编码立即失效，旋转编码随后失效（13 亿参数：1,024 训"
        "练、2,048 "
        "测试，与按 2,048 训练的正弦编码相当）。",
    ),
    (
        "Characters, trained on 64, tested on 64 to 512, two layers of width 64, three seeds. ALiBi may rise by 0.05 "
        "nats, "
        "sinusoidal must by 0.2.",
        "字符模型，训练长度 64，测试 64 到 512，两层、宽 64，三个种子。ALiBi 上升不超过 0.05 nat，正弦上升至少 0.2。",
    ),
    measure,
)
