"""docs/claims.md in both languages, and a picture for each topic: written from the registry and its results."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from allyouneed.lab.claims.claim import Claim, Figure, Outcome, find, names, topic, verdict
from allyouneed.lab.svg import HEIGHT, WIDTH, Axis, Series, plot

TOPICS = {
    "attention": ("Attention and its cost", "注意力及其代价"),
    "positions": ("Positions", "位置编码"),
    "depth": ("Wirings, norms and depth", "残差连接、归一化与深度"),
    "recurrence": ("Recurrence and state spaces", "循环与状态空间"),
    "memory": ("Decoding memory and speed", "解码的内存与速度"),
    "sparse": ("Sparse patterns", "稀疏模式"),
    "approximation": ("Approximations", "近似注意力"),
    "training": ("Training and objectives", "训练与目标"),
}
VERDICTS = {
    "confirmed": ("confirmed", "证实"),
    "refuted": ("refuted", "否定"),
    "inconclusive": ("inconclusive at this scale", "此规模下无定论"),
    "not testable": ("not testable here", "此处无法检验"),
    "not run": ("not run yet", "尚未运行"),
}
WORDS = {
    "title": ("# Are the papers' claims true?", "# 论文的说法成立吗？"),
    "other": ("[中文](zh/claims.md)", "[English](../claims.md)"),
    "about": (
        "Each claim has the smallest experiment that could refute it, and for every figure the range that the paper "
        "predicts. Inside the range, with the interval over seeds, it is confirmed; outside, refuted; across a bound, "
        "inconclusive. Ranges were written before the first run; where a test or a range was changed after it, the "
        "claim says so. A claim marked “as recalled” was not checked against its paper. "
        "`allyouneed claims --write docs` runs what has not run and writes this page; `--cpu` leaves out what needs a "
        "GPU.",
        "每条说法都配有可能否定它的最小实验，并为每个数字给出论文所预期的范围。数值（连同各种子的区间）落在范围内即证"
        "实，"
        "落在范围外即否定，跨越边界则无定论。范围在首次运行前写定；若首次运行后改动了实验或范围，该条会注明。"
        "标注“凭记忆”的说法未与论文核对。`allyouneed claims --write docs` 运行尚未运行的实验并写出本页；"
        "`--cpu` 略去需要 GPU 的部分。",
    ),
    "table": ("| claim | verdict | paper |", "| 说法 | 结论 | 论文 |"),
    "claim": ("Claim", "说法"),
    "recalled": (" (as recalled)", "（凭记忆）"),
    "test": ("Test", "实验"),
    "revised": ("Changed after a first run", "首次运行后的改动"),
    "figures": ("| figure | measured | predicted |", "| 数字 | 实测 | 预期 |"),
    "verdict": ("Verdict", "结论"),
    "reason": ("Why not", "原因"),
    "command": ("Command", "命令"),
    "gpu": (" (needs a GPU)", "（需要 GPU）"),
    "picture": ("Curves of these claims", "以上说法的曲线"),
    "any": ("any", "不限"),
    "control": (" (control)", "（对照）"),
}


def page(outcomes: Mapping[str, Outcome], chinese: bool = False) -> str:
    at, folder = int(chinese), "../pictures" if chinese else "pictures"
    word = {name: texts[at] for name, texts in WORDS.items()}
    found = {name: verdict(find(name), outcomes.get(name)) for name in names()}
    counts = Counter[str](found.values())
    told = [
        f"{counts[key]} {texts[0]}" if not chinese else f"{texts[1]} {counts[key]}"
        for key, texts in VERDICTS.items()
        if counts[key]
    ]
    total = f"{len(found)} claims: {', '.join(told)}." if not chinese else f"共 {len(found)} 条：{'，'.join(told)}。"
    lines = [word["title"], "", word["other"], "", word["about"], "", total, ""]
    for key, titles in TOPICS.items():
        own = [name for name in found if topic(name) == key]
        lines += [f"## {titles[at]}", "", word["table"], "|---|---|---|"]
        lines += [f"| [{name}](#{name}) | {VERDICTS[found[name]][at]} | {find(name).paper} |" for name in own]
        if any(outcomes[name].curves for name in own if name in outcomes):
            lines += ["", f"![{word['picture']}]({folder}/claims-{key}.svg)"]
        for name in own:
            lines += ["", f"### {name}", "", *_section(name, find(name), outcomes.get(name), word, at)]
        lines.append("")
    return "\n".join(lines)


def _section(name: str, claim: Claim, outcome: Outcome | None, word: Mapping[str, str], at: int) -> Iterator[str]:
    yield f"**{word['claim']}{'' if claim.checked else word['recalled']}**: {claim.says[at]}"
    yield f"({claim.paper})" if not at else f"（{claim.paper}）"
    yield ""
    if claim.measure is None:
        yield f"**{word['reason']}**: {claim.why_not[at]}"
        return
    yield f"**{word['test']}**: {claim.tests[at]}"
    yield ""
    if claim.revised[at]:
        yield f"**{word['revised']}**: {claim.revised[at]}."
        yield ""
    if outcome is not None:
        yield word["figures"]
        yield "|---|---:|---:|"
        for one in outcome.figures:
            control = word["control"] if one.control else ""
            yield f"| {one.name[at]}{control} | {measured(one)} | {predicted(one) or word['any']} |"
        yield ""
    yield f"**{word['verdict']}**: {VERDICTS[verdict(claim, outcome)][at]}. **{word['command']}**: " + (
        f"`allyouneed claims {name}`{word['gpu'] if claim.needs == 'gpu' else ''}"
    )


def number(value: float) -> str:
    """Three digits, plain where that is short."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "∞"
    if 1e-3 <= abs(value) < 1e5:
        text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        return re.sub(r"(\.\d*?)0+$", r"\1", text).rstrip(".") if "." in text else text
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")


def measured(one: Figure) -> str:
    low, high = one.interval
    spread = "" if low == high else f" [{number(low)}, {number(high)}]"
    return number(one.mean) + spread


def predicted(one: Figure) -> str:
    if not one.predicts:
        return ""
    if math.isinf(one.low) or math.isinf(one.high):
        return f"≥ {number(one.low)}" if math.isinf(one.high) else f"≤ {number(one.high)}"
    return number(one.low) if one.low == one.high else f"{number(one.low)} … {number(one.high)}"


def pictures(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """An SVG for each topic that has curves, two plots in a row."""
    found = {}
    for key in TOPICS:
        plots = [(name, one) for name, one in outcomes.items() if topic(name) == key and one.curves]
        if plots:
            found[f"claims-{key}.svg"] = _sheet(plots)
    return found


def _sheet(plots: list[tuple[str, Outcome]]) -> str:
    cells = []
    for name, one in plots:
        series = {label: Series(sorted(line.items())) for label, line in one.curves.items()}
        drawn = plot(series, Axis(one.axes[0], one.log), Axis(one.axes[1], one.log), name)
        cells.append((name, drawn, HEIGHT + 16 * len(series)))
    body, top = [], 0
    for first in range(0, len(cells), 2):
        row = cells[first : first + 2]
        for column, (name, drawn, height) in enumerate(row):
            x = column * (WIDTH + 20)
            body.append(
                f'<text x="{x + 58}" y="{top + 16}" font-family="system-ui,sans-serif" font-size="13">{name}</text>'
            )
            body.append(drawn.replace("<svg ", f'<svg x="{x}" y="{top + 22}" width="{WIDTH}" height="{height}" ', 1))
        top += 34 + max(height for _, _, height in row)
    wide = WIDTH * 2 + 20 if len(cells) > 1 else WIDTH
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {top}" width="{wide}" height="{top}">'
    return "\n".join([head, f'<rect width="{wide}" height="{top}" fill="white"/>', *body, "</svg>", ""])
