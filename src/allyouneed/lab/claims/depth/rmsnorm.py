from __future__ import annotations

import time

import torch

from allyouneed.config import parse
from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.nn.batch import Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.norms import Norm


def measure(run: ClaimRun) -> Outcome:
    width, rows = 512, run.pick(2048, 64)
    context = Context(TokenLayout.of(Rows(torch.zeros(1, 4, dtype=torch.long))))
    norms = {kind: parse(Norm, {"kind": kind}).build(width) for kind in ("layer", "rms")}  # type: ignore[type-abstract]
    centred = torch.randn(64, width, dtype=torch.double)
    centred = centred - centred.mean(-1, keepdim=True)
    doubles = {kind: norm.double() for kind, norm in norms.items()}
    gap = float((doubles["layer"](centred, context) - doubles["rms"](centred, context)).abs().max())
    scaled = float((doubles["rms"](centred * 7, context) - doubles["rms"](centred, context)).abs().max())
    ratios = []
    norms = {kind: norm.float() for kind, norm in norms.items()}
    for seed in range(run.pick(8, 2)):
        torch.manual_seed(seed)
        x = torch.randn(rows, width, requires_grad=True)
        took = {kind: [] for kind in norms}  # type: dict[str, list[float]]
        for _ in range(run.pick(20, 3)):
            for kind, norm in norms.items():  # in turns, so that load affects both alike
                began = time.process_time()
                norm(x, context).sum().backward()
                took[kind].append(time.process_time() - began)
        ratios.append(100 * (1 - min(took["rms"]) / min(took["layer"])))
    return Outcome(
        (
            Figure(("difference on centred inputs", "输入均值为零时两者之差"), (gap,), high=1e-4),
            Figure(("change when inputs are scaled", "输入缩放时的变化"), (scaled,), high=1e-4),
            Figure(("time saved against LayerNorm, %", "比 LayerNorm 节省的时间，%"), tuple(ratios), 7.0, 64.0),
        )
    )


CLAIM = Claim(
    "Zhang, Sennrich 2019, Root Mean Square Layer Normalization, abstract",
    (
        "RMSNorm keeps LayerNorm's re-scaling invariance and reduces running time by 7% to 64% on different models.",
        "RMSNorm 保留 LayerNorm 的缩放不变性，并使不同模型的运行时间减少 7% 到 64%。",
    ),
    (
        "Equality on centred inputs, invariance to scaling, and processor time of the norm alone with its backward "
        "pass "
        "(torch's kernels, in turns, fastest of 20, eight rounds), 2,048 tokens of width 512. The paper timed whole "
        "models with norms "
        "written in TensorFlow and Theano operations.",
        "均值为零的输入上是否相等、缩放不变性，以及单个归一化层前向加反向的处理器时间（torch 内核，交替计时，20 次取"
        "最快，共八轮），"
        "2,048 个词元、宽 512。论文计时的是整个模型，归一化由 TensorFlow、Theano 的算子写成。",
    ),
    measure,
    revised=(
        "three rounds at first, inconclusive: −463 … 61%",
        "最初只有三轮，无定论：−463 … 61%",
    ),
)
