from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import attention, built, config, decoder
from allyouneed.nn.batch import Batch, Rows


def measure(run: ClaimRun) -> Outcome:
    """Kaplan's N leaves out embeddings; the head's product is counted apart."""
    width, length = run.pick((256, 128), (64, 32))
    tree = decoder(attention(4), 4, width, 128, channel={"kind": "ffn", "hidden": 4 * width})
    model, tokens = built(tree), torch.randint(0, 128, (2, length))
    with FlopCounterMode(display=False) as counted:
        model.head.loss(model(Batch(Rows(tokens))), tokens, 0.0)[0].backward()
    weights = sum(weight.numel() for name, weight in model.named_parameters() if name.startswith("decoder"))
    head = 3 * 2 * 128 * width
    short = (counted.get_total_flops() / tokens.numel() - head) / (6 * weights)
    curves: dict[str, dict[float, float]] = {}
    for name in ("gpt2", "gpt2-xl"):
        one = config(name)
        stack = one.decoder[0].cost(one, 1).parameters
        lengths = (128, 512, 1024, 4096, 16384, 65536)
        curves[name] = {float(n): 3 * one.decoder[0].cost(one, n).flops / (6 * stack) for n in lengths}
    return Outcome(
        (
            Figure(
                (f"counted FLOPs over 6ND, {length} tokens", f"实测 FLOPs/6ND，{length} 个词元"), (short,), 0.9, 1.15
            ),
            Figure(("gpt2-xl, 1,024 tokens", "gpt2-xl，1,024 个词元"), (curves["gpt2-xl"][1024],), 0.9, 1.15),
            Figure(
                ("gpt2-xl, 65,536 tokens (outside the claim)", "gpt2-xl，65,536 个词元（不在该说法范围内）"),
                (curves["gpt2-xl"][65536],),
            ),
        ),
        curves,
        ("tokens of context", "FLOPs over 6ND"),
    )


CLAIM = Claim(
    "Kaplan et al. 2020, Scaling Laws for Neural Language Models, 2.1",
    (
        "Training takes C ≈ 6ND FLOPs (N parameters without embeddings, D tokens), while contexts are short against 12 "
        "d_model.",
        "上下文远短于 12 d_model 时，训练约需 C ≈ 6ND 次浮点运算（N 为不含嵌入的参数量，D 为词元数）。",
    ),
    (
        "FLOPs that torch counts in a forward and backward pass, and the cost functions of larger models by context.",
        "用 torch 统计一次前向与反向的 FLOPs，并用成本函数给出较大模型随上下文的变化。",
    ),
    measure,
)
