from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.positions.alibi_extrapolates import KINDS
from allyouneed.lab.claims.trees import built, decoder
from allyouneed.lab.probe.run import CONVOLUTION, sample
from allyouneed.lab.probe.task import find
from allyouneed.lab.probe.train import Fit, fit, score


def measure(run: ClaimRun) -> Outcome:
    task, runs = find("copy"), dict[str, list[dict[float, float]]]()
    longest, lengths = task.trained[1], (12, 16, 24)
    for name, (mixer, positions) in KINDS.items():
        for seed in run.seeds:
            tree = decoder(mixer, vocab=task.vocab, embed={"positions": positions})
            tree["decoder"] = [CONVOLUTION, tree["decoder"][0] | {"repeat": 1}] * 2
            model = built(tree, seed)
            fit(model, sample(task), Fit(steps=run.pick(300, 3), seed=seed, device=run.device), sample(task, longest))
            found = {float(n): score(model, sample(task, n), run.pick(128, 4))[1] for n in lengths}
            runs.setdefault(name, []).append(found)
    longer = {name: tuple(100 * one[24.0] for one in found) for name, found in runs.items()}
    curves = {name: {n: sum(one[n] for one in found) / len(found) for n in found[0]} for name, found in runs.items()}
    figures = [
        Figure((f"{name}: accuracy at twice the length, %", f"{name}：两倍长度的准确率，%"), values)
        for name, values in longer.items()
    ]
    lead = tuple(
        a - max(rest) for a, *rest in zip(longer["none"], *(longer[n] for n in KINDS if n != "none"), strict=True)
    )
    figures.append(Figure(("no positions over the best other, points", "无位置编码领先最好者，百分点"), lead, low=0.0))
    learnt = tuple(100 * one[12.0] for one in runs["none"])
    figures.append(
        Figure(("no positions, trained length, %", "无位置编码，训练长度，%"), learnt, low=90.0, control=True)
    )
    return Outcome(tuple(figures), curves, ("letters to copy", "accuracy"))


CLAIM = Claim(
    "Kazemnejad et al. 2023, The Impact of Positional Encoding on Length Generalization, 4",
    (
        "Decoders without positions generalise to longer texts better than ALiBi, rotary and absolute ones.",
        "不加位置编码的解码器在更长文本上的泛化优于 ALiBi、旋转与绝对位置编码。",
    ),
    (
        "Copying of 4 to 12 letters, tested on up to 24; two layers, each behind a short convolution, 300 steps, three "
        "seeds. The convolution is ours: it tells neighbours apart without positions.",
        "复制 4 到 12 个字母，测试至 24 个；两层、每层前有短卷积，300 步，三个种子。短卷积为我们所加，它无需位置编码"
        "即可区分相邻词元。",
    ),
    measure,
)
