from __future__ import annotations

import torch

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, built, decoder
from allyouneed.nn.batch import Batch, Rows

SEGMENT = 8


def reach(layers: int, pattern: str, length: int) -> int:
    """The farthest earlier token that changes the last output."""
    model = built(decoder(attention(2, pattern=pattern), layers, 32)).eval().double()
    seen: list[torch.Tensor] = []
    model.embed.register_forward_hook(lambda _, __, y: seen.append(y.retain_grad() or y))
    model(Batch(Rows(torch.randint(0, 64, (1, length)))))[0, -1].square().sum().backward()
    assert seen[0].grad is not None
    return length - 1 - int(seen[0].grad[0].abs().sum(-1).nonzero()[0, 0])


def measure(run: ClaimRun) -> Outcome:
    layers = run.pick((1, 2, 4, 8), (1, 2))
    length = SEGMENT * (layers[-1] + 2)
    # a segment attends to itself and the one before it, whose states have seen the one before that
    memory = {float(n): float(reach(n, f"causal & block-window({SEGMENT}, 2)", length)) for n in layers}
    alone = {float(n): float(reach(n, f"causal & block({SEGMENT})", length)) for n in layers}
    stated = [memory[float(n)] / (n * SEGMENT + SEGMENT - 1) for n in layers]
    # evaluation: a sliding window computes a whole segment anew for every token, a cache only the new token
    window = 3800
    return Outcome(
        (
            Figure(("reach over N × L and the segment itself", "可达距离/(N × L 加本段)"), tuple(stated), 1.0, 1.0),
            Figure(
                ("without memory: reach, tokens", "无记忆：可达距离"), tuple(alone.values()), SEGMENT - 1, SEGMENT - 1
            ),
            Figure(
                ("tokens computed per token, window of 3,800", "窗口 3,800 时每词元须计算的词元数"),
                (float(window),),
                low=1874,
            ),
        ),
        {"with memory": memory, "without": alone},
        ("layers N", "farthest token"),
    )


CLAIM = Claim(
    "Dai et al. 2019, Transformer-XL, 3.2 and 4.5",
    (
        "The longest dependency grows as N × L (layers × segment), where without recurrence it ends with the segment; "
        "evaluation is up to 1,874 times faster than by a sliding window.",
        "最长依赖随 N × L（层数 × 段长）增长，无循环时止于段内；评测比滑动窗口快至多 1,874 倍。",
    ),
    (
        "Gradient of the last output with respect to all embeddings, segments of 8. The speed is not timed: at the "
        "paper's "
        "window of 3,800 a sliding window computes 3,800 tokens for each one, which bounds the gain.",
        "末位输出对所有词嵌入的梯度，段长 8。未计时：窗口 3,800 时滑动窗口每得到一个词元须计算 3,800 个，此即收益上"
        "限。",
    ),
    measure,
)
