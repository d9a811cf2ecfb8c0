from __future__ import annotations

from typing import Any

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import built, decoder
from allyouneed.nn.batch import Batch, Rows


def reach(mixer: Any, layers: int, length: int = 128) -> int:
    """The farthest earlier token that changes the last output."""
    model = built(decoder(mixer, layers, 32)).eval().double()
    seen: list[torch.Tensor] = []
    model.embed.register_forward_hook(lambda _, __, y: seen.append(y.retain_grad() or y))
    model(Batch(Rows(torch.randint(0, 64, (1, length)))))[0, -1].square().sum().backward()
    assert seen[0].grad is not None
    touched = seen[0].grad[0].abs().sum(-1).nonzero()[:, 0]
    return length - 1 - int(touched.min())


def measure(run: ClaimRun) -> Outcome:
    layers = run.pick((1, 2, 4, 8), (1, 2))
    kernels = {
        "convolution": ({"kind": "convolution", "size": 5, "sees": "past"}, 4),
        "dynamic convolution": ({"kind": "dynamic-convolution", "heads": 4, "size": 5, "sees": "past"}, 4),
    }
    curves = {name: {float(n): float(reach(mixer, n)) for n in layers} for name, (mixer, _) in kernels.items()}
    figures = [
        Figure(
            (f"{name}: reach over layers × (k − 1)", f"{name}：可达距离/(层数×(k−1))"),
            tuple(curves[name][float(n)] / (step * n) for n in layers),
            1.0,
            1.0,
        )
        for name, (_, step) in kernels.items()
    ]
    full = reach({"kind": "attention", "heads": 2, "pattern": "causal"}, 1)
    figures.append(Figure(("attention, one layer of 128 tokens", "注意力，一层，128 个词元"), (float(full),), 127, 127))
    return Outcome(tuple(figures), curves, ("layers", "farthest token"))


CLAIM = Claim(
    "Gehring et al. 2017, Convolutional Sequence to Sequence Learning, 1; Wu et al. 2019, Pay Less Attention, 3",
    (
        "Stacked convolutions of width k see layers × (k − 1) tokens back, and nothing beyond; attention sees all.",
        "k 宽卷积叠加若干层后只能看到 层数 × (k − 1) 个词元之前，再远则看不到；注意力可看到全部。",
    ),
    ("Gradient of the last output with respect to the embeddings.", "末位输出对各词嵌入的梯度。"),
    measure,
)
