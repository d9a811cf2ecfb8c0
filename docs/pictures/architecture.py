"""Draw docs/pictures/architecture.svg and architecture.zh.svg: the slots of a model and what fills each of them.

    python docs/pictures/architecture.py

Only rectangles, lines and text, so that the files stay small and need no library.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1180, 580
SANS = "-apple-system, 'Segoe UI', 'Helvetica Neue', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK, SOFT, LINE = "#1f2933", "#52606d", "#9aa5b1"
COLOURS = {
    "input": "#e8eef7",
    "embed": "#dbeafe",
    "mixer": "#fde8c8",
    "channel": "#d5f0dc",
    "norm": "#eee7fb",
    "wiring": "#ffffff",
    "head": "#fbdfe3",
    "objective": "#f3e6d8",
}

ENGLISH = {
    "input": "input",
    "embed": "embed + positions",
    "block": "N × block",
    "wiring": "wiring",
    "norm": "norm",
    "mixer": "token mixer",
    "channel": "channel mixer",
    "head": "head",
    "objective": "objective",
    "pattern": "pattern (attention)",
    "relative": "positions in attention",
    "linear": "linear map",
    "model": "model",
    "foot": "One config tree, one set of invariant tests. The same module runs whole rows (training), chunks (prefill)",
    "foot2": "and single tokens (decoding) over a state: KV cache, window, recurrent or paged. The results agree.",
}
CHINESE = {
    "input": "输入",
    "embed": "嵌入 + 位置",
    "block": "N × 层",
    "wiring": "连接方式 wiring",
    "norm": "归一化",
    "mixer": "token 混合器",
    "channel": "通道混合器",
    "head": "输出头",
    "objective": "训练目标",
    "pattern": "注意力模式 pattern",
    "relative": "注意力内的位置",
    "linear": "线性映射",
    "model": "整体结构",
    "foot": "一棵配置树，一套不变量测试。同一个模块可以整行计算（训练）、分块计算（预填充）、逐 token 计算（解码），",
    "foot2": "状态显式传递（KV 缓存、滑动窗口、循环状态、分页缓存），三种方式结果一致。",
}

# what fills a slot, as the YAML spells it
CHOICES = {
    "input": ["tokens", "image patches", "log-mel frames"],
    "embed": ["sinusoidal", "learned", "learned-2d", "none"],
    "mixer": [
        "attention (MHA, MQA, GQA)",
        "mla   lsh   linformer",
        "big-bird  longformer  longnet",
        "retention   gated-retention",
        "rwkv   performer   infini",
        "lstm   gru   convolution",
        "synthesizer   lsra   mssa",
        "chunked-cross (RETRO)  …",
    ],
    "pattern": [
        "full  causal  prefix  prompt",
        "window  dilated  strided",
        "global  random-blocks  permuted",
        "combined by  &  |  ~",
    ],
    "relative": ["rotary (linear, ntk, yarn,", "llama3)  alibi  buckets (T5)", "shaw  transformer-xl  xlnet"],
    "channel": [
        "ffn (ReLU, GELU, …)",
        "glu (SwiGLU, …)",
        "moe (Switch, Mixtral,",
        "     shared experts)",
        "rwkv-channel",
        "ista",
    ],
    "norm": ["layer   rms", "scale   batch"],
    "linear": ["dense", "bit (BitNet b1.58)"],
    "wiring": ["post-norm   pre-norm", "sandwich   parallel", "deepnorm   resi-dual", "reversible  …"],
    "head": ["vocabulary", "classes", "tags", "pooled", "none"],
    "objective": [
        "translation", "causal-lm", "prefix-lm", "masked-lm", "permutation-lm", "span-corruption", "classification",
        "tagging", "similarity", "contrastive",
    ],
    "model": ["encoder", "decoder", "encoder-decoder", "decoder-decoder", "two-towers", "retro"],
}  # fmt: skip


class Drawing:
    def __init__(self) -> None:
        self.shapes: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, fill: str, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.shapes.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{LINE}"{dash}/>'
        )

    def text(
        self, x: int, y: int, text: str, size: int = 14, bold: bool = False, mono: bool = False, middle=True
    ) -> None:
        family, weight = MONO if mono else SANS, "600" if bold else "400"
        anchor, colour = "middle" if middle else "start", SOFT if mono else INK
        self.shapes.append(
            f'<text x="{x}" y="{y}" font-family="{family}" font-size="{size}" font-weight="{weight}" '
            f'text-anchor="{anchor}" fill="{colour}" xml:space="preserve">{escape(text)}</text>'
        )

    def arrow(self, x: int, y: int, to: int) -> None:
        self.shapes.append(f'<line x1="{x}" y1="{y}" x2="{to - 5}" y2="{y}" stroke="{SOFT}" stroke-width="2"/>')
        self.shapes.append(f'<path d="M {to - 9} {y - 5} L {to} {y} L {to - 9} {y + 5} Z" fill="{SOFT}"/>')

    def choices(self, x: int, y: int, slot: str, title: str | None = None) -> None:
        if title:
            self.text(x, y, title, 13, bold=True, middle=False)
            y += 20
        for line in CHOICES[slot]:
            self.text(x, y, line, 12, mono=True, middle=False)
            y += 18

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        )
        back = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
        return "\n".join([head, back, *self.shapes, "</svg>\n"])


def draw(words: dict[str, str]) -> str:
    page = Drawing()
    middle = 110  # of the row of boxes
    # the sentence that a model is
    page.box(20, 70, 120, 80, COLOURS["input"])
    page.text(80, middle + 5, words["input"], 15, bold=True)
    page.arrow(140, middle, 165)
    page.box(165, 70, 165, 80, COLOURS["embed"])
    page.text(247, middle + 5, words["embed"], 14, bold=True)
    page.arrow(330, middle, 358)
    page.box(358, 20, 500, 180, "#fafbfc", dashed=True)
    page.text(608, 42, words["block"], 14, bold=True)
    for x, mixer in ((376, "mixer"), (628, "channel")):
        page.box(x, 56, 212, 126, COLOURS["wiring"])
        page.text(x + 106, 78, words["wiring"], 13)
        page.box(x + 12, 90, 62, 76, COLOURS["norm"])
        page.text(x + 43, 133, words["norm"], 13)
        page.box(x + 84, 90, 116, 76, COLOURS[mixer])
        page.text(x + 142, 133, words[mixer], 13, bold=True)
    page.arrow(588, middle + 18, 628)
    page.arrow(858, middle, 886)
    page.box(886, 70, 100, 80, COLOURS["head"])
    page.text(936, middle + 5, words["head"], 15, bold=True)
    page.arrow(986, middle, 1014)
    page.box(1014, 70, 146, 80, COLOURS["objective"])
    page.text(1087, middle + 5, words["objective"], 15, bold=True)
    # and the words that fill its slots
    top = 238
    page.choices(28, top, "input", words["input"])
    page.choices(28, top + 112, "model", words["model"])
    page.choices(173, top, "embed", words["embed"])
    page.choices(173, top + 112, "relative", words["relative"])
    page.choices(400, top, "mixer", words["mixer"])
    page.choices(400, top + 184, "pattern", words["pattern"])
    page.choices(645, top, "channel", words["channel"])
    page.choices(645, top + 148, "wiring", words["wiring"])
    page.choices(890, top + 240, "linear", words["linear"])
    page.choices(890, top, "head", words["head"])
    page.choices(890, top + 148, "norm", words["norm"])
    page.choices(1020, top, "objective", words["objective"])
    page.text(28, 540, words["foot"], 13, middle=False)
    page.text(28, 560, words["foot2"], 13, middle=False)
    return page.svg()


if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "architecture.svg").write_text(draw(ENGLISH), encoding="utf-8")
    (folder / "architecture.zh.svg").write_text(draw(CHINESE), encoding="utf-8")
