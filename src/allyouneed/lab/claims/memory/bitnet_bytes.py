from __future__ import annotations

from allyouneed.lab.claims.claim import Claim, ClaimRun, Figure, Outcome
from allyouneed.lab.claims.trees import config

# Llama sizes of the paper: width, layers, heads, hidden
SIZES = {
    "700M": (1536, 24, 24, 4096),
    "1.3B": (2048, 24, 32, 5460),
    "3B": (3200, 26, 32, 8640),
    "70B": (8192, 80, 64, 24576),
}
PUBLISHED = {"700M": 2.60, "1.3B": 2.93, "3B": 3.55, "70B": 7.16}
VOCAB, BITS = 32000, 2  # ternary weights packed in two bits


def measure(run: ClaimRun) -> Outcome:
    figures = []
    for name, (width, layers, heads, hidden) in SIZES.items():
        mixer = {"kind": "attention", "heads": heads, "pattern": "causal", "bias": False}
        layer = {"repeat": layers, "wiring": "pre-norm", "mixer": mixer}
        layer["channel"] = {"kind": "glu", "hidden": hidden, "bias": False}
        tree = {"kind": "decoder", "vocab": VOCAB, "width": width, "norm": "rms", "decoder": [layer]}
        tree |= {"embed": {"tied": False}}
        whole = config(tree).cost(1).parameters
        inside = whole - 2 * VOCAB * width  # embedding and head stay in half precision
        ratio = whole * 2 / (inside * BITS / 8 + 2 * VOCAB * width * 2)
        text = (f"{name}: weights of fp16 over packed", f"{name}：fp16 权重/打包权重")
        figures.append(Figure(text, (ratio,), low=PUBLISHED[name]))
    return Outcome(tuple(figures))


CLAIM = Claim(
    "Ma et al. 2024, The Era of 1-bit LLMs, table 1 and figure 2",
    (
        "BitNet b1.58 needs 2.60 (700M), 2.93 (1.3B), 3.55 (3B) and 7.16 (70B) times less memory than Llama in fp16.",
        "BitNet b1.58 所需内存比 fp16 的 Llama 少 2.60（700M）、2.93（1.3B）、3.55（3B）和 7.16（70B）倍。",
    ),
    (
        "Bytes of the weights at these sizes: ternary maps in two bits, embedding and head in 16. The paper measures "
        "GPU "
        "memory with activations and cache, which dilute the gain: the weights must save at least as much.",
        "按这些规模计算权重字节：三值线性层占两位，嵌入与输出层 16 位。论文测的是显存，激活与缓存会冲淡收益，因此权重"
        "的节省至少应达到该倍数。",
    ),
    measure,
    revised=(
        "the range was at first within 10% of the published ratios, which are of GPU memory and not of weights; by "
        "it, the three smaller sizes were outside",
        "最初的范围是论文比值的 ±10%，但论文测的是显存而非权重；按该范围，三个较小的规模落在范围外",
    ),
)
