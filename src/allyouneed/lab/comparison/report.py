"""The report of a comparison: one page without network, in English and Chinese, and the same words for a terminal.

The page is a function of the stored results alone, so that a resumed comparison ends with the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from allyouneed.files import write_text
from allyouneed.lab.comparison.compare import Contender, ModelComparison, Standing, sized_facts
from allyouneed.lab.comparison.speed import CONTEXTS
from allyouneed.lab.page import Bilingual, bullets, document, figures, heading, paragraph, same, table
from allyouneed.lab.rates import NEAR
from allyouneed.lab.statistics import ConfidenceInterval
from allyouneed.lab.svg import Axis, Series, pareto, plot, short
from allyouneed.training.planning.memory import format_bytes

PAGE = "compare.html"
MODELS = "models"  # folder of the solved models, as YAML


MATCHED = {
    "parameters": Bilingual("the number of parameters", "参数量"),
    "flops": Bilingual("the FLOPs of a token", "每个词元的计算量"),
    "state": Bilingual("the decoding state after 1,024 tokens", "读入 1,024 个词元后的解码状态大小"),
    "time": Bilingual("the seconds of training, at the same number of parameters", "训练时长（参数量也相同）"),
}
VERDICTS = {
    "best": Bilingual("lowest loss", "损失最低"),
    "worse": Bilingual("worse", "较差"),
    "inconclusive": Bilingual("inconclusive", "无法区分"),
}


def recommendation(found: ModelComparison) -> list[Bilingual]:
    """What to take, and why; the first is the recommendation itself."""
    if found.guesses:
        return [
            Bilingual(
                "Nothing can be recommended yet: no model is better than guessing. Train longer (--steps).",
                "暂时无法给出建议：没有模型胜过随机猜测。请训练更久（--steps）。",
            )
        ]
    if not found.standings or found.recommended is None:
        return [Bilingual("Nothing can be recommended: no model finished.", "无法给出建议：没有模型训练成功。")]
    best, name = found.standings[0], found.recommended
    chosen = next(one for one in found.standings if one.name == name)
    others = [one.name for one in found.tied if one.name != name]
    lines = [Bilingual(f"Take {name}.", f"建议选用 {name}。")]
    loss = best.loss.text()
    if not others:
        lines.append(
            Bilingual(
                f"It predicts held-out text best: loss {loss}; every other model is worse by more than chance allows.",
                f"它对留出文本的预测最准：损失为 {loss}；其余模型都更差，且差距超出了偶然误差。",
            )
        )
    else:
        listed = ", ".join(others)
        lines.append(
            Bilingual(
                f"On held-out text it cannot be told apart from {listed} with these seeds and this much training: the "
                f"intervals of their differences contain zero. The lowest loss is {loss} ({best.name}).",
                f"在留出文本上，以现有的随机种子数和训练量无法将它与 {listed} 区分开：差值的置信区间包含零。"
                f"最低损失为 {loss}（{best.name}）。",
            )
        )
        lines += _pace_reason(found, chosen, others)
    for one in found.standings:
        if one.verdict == "worse" and one.behind is not None:
            behind, en, zh = one.behind.text(), "", ""
            if found.corpus.recipe.task.has_perplexity:
                more = f"{100 * (math.exp(min(one.behind.mean, 50.0)) - 1):.1f}%"
                en, zh = f" (perplexity {more} higher)", f"（困惑度高 {more}）"
            lines.append(Bilingual(f"{one.name} is worse by {behind}{en}.", f"{one.name} 的损失高出 {behind}{zh}。"))
    parameters = found.contender(name).sized.model.cost().parameters
    lines.append(
        Bilingual(
            f"This holds for models of about {short(parameters)} parameters trained for "
            f"{found.contender(name).steps:,} steps on this data. Larger models or longer training may order them "
            "differently.",
            f"以上结论适用于约 {short(parameters)} 参数、在此数据上训练 {found.contender(name).steps:,} 步的模型；"
            "模型更大或训练更久时，名次可能不同。",
        )
    )
    return lines


def _pace_reason(found: ModelComparison, chosen: Standing, others: Sequence[str]) -> list[Bilingual]:
    """What decides between models that are as good."""
    name, rival = chosen.name, max(others, key=found.pace)
    (mine, trained), (theirs, other) = found.pace(name), found.pace(rival)
    context = f"{CONTEXTS[-1]:,}"
    if name == found.standings[0].name:
        wide = [one for one in others if one not in found.equals]
        if wide:
            listed, seeds = ", ".join(wide), found.settings.seeds
            return [
                Bilingual(
                    f"It is taken for its lowest loss. {listed} may be as good, or clearly worse: {seeds} seeds leave "
                    f"both open. More seeds (--seeds {2 * seeds}) or steps would tell.",
                    f"因此取损失最低者。{listed} 也许同样好，也许明显更差，{seeds} 个种子不足以判断；"
                    f"增加种子（--seeds {2 * seeds}）或步数可以分辨。",
                )
            ]
        return [
            Bilingual(
                "None of them is clearly faster, so the lowest loss decides.",
                "它们的速度也没有明显差别，因此取损失最低者。",
            )
        ]
    if mine and theirs:
        return [
            Bilingual(
                f"Of these it decodes fastest after {context} tokens: {mine:,.0f} tokens/s, {rival} {theirs:,.0f}.",
                f"其中它在读入 {context} 个词元后解码最快：每秒 {mine:,.0f} 个词元，{rival} 为 {theirs:,.0f}。",
            )
        ]
    if mine:
        return [
            Bilingual(
                f"Of these it alone decodes after {context} tokens: {mine:,.0f} tokens/s.",
                f"其中只有它能在读入 {context} 个词元后继续解码：每秒 {mine:,.0f} 个词元。",
            )
        ]
    return [
        Bilingual(
            f"Of these it trains fastest: {trained:,.0f} tokens/s, {rival} {other:,.0f}.",
            f"其中它训练最快：每秒 {trained:,.0f} 个词元，{rival} 为 {other:,.0f}。",
        )
    ]


def summary(found: ModelComparison) -> str:
    """The standings and the recommendation for a terminal."""
    width = max(map(len, (one.name for one in found.contenders)), default=0)
    lines = []
    for one in found.standings:
        behind = "" if one.behind is None else f"  +{one.behind.text()}"
        lines.append(f"{one.name:<{width}}  loss {one.loss.text()}{behind}  {VERDICTS[one.verdict].en}")
    ranked = {one.name for one in found.standings}
    lines += [f"{one.name:<{width}}  no result" for one in found.contenders if one.name not in ranked]
    lines += [f"{name}: left out: {reason}" for name, reason in found.left_out.items()]
    lines += [f"warning: {one.name}: {text}" for one in found.contenders for text in one.warnings]
    return "\n".join([*lines, "", *(text.en for text in recommendation(found))])


def write_report(found: ModelComparison, folder: Path, command: str) -> Path:
    """The page, and the solved models beside it as YAML."""
    (folder / MODELS).mkdir(exist_ok=True)
    for one in found.contenders:
        tree = yaml.safe_dump(one.sized.tree, sort_keys=False, allow_unicode=True, default_flow_style=None)
        write_text(folder / MODELS / f"{one.name}.yaml", tree)
    write_text(folder / PAGE, page(found, command))
    return folder / PAGE


def page(found: ModelComparison, command: str) -> str:
    names = ", ".join(one.name for one in found.contenders)
    title = Bilingual(f"Compared: {names}", f"对比：{names}")
    first, *reasons = recommendation(found)
    body = [
        f"<p class='best' style='font-size:1.25rem;color:var(--ink)'>{first.html}</p>",
        bullets(reasons),
        heading(Bilingual("Results", "结果")),
        _results(found),
        _notes(found),
        heading(Bilingual("Quality against cost", "质量与开销")),
        paragraph(
            Bilingual(
                "Lower is better; bars are 95% intervals. The dotted line joins models that no other beats in both.",
                "越低越好；竖线为 95% 置信区间。虚线连接的模型没有被任何其他模型在两方面同时超过（帕累托前沿）。",
            )
        ),
        figures(_fronts(found)),
        heading(Bilingual("Learning rates and training", "学习率与训练过程")),
        paragraph(
            Bilingual(
                "Every model was tried at the same rates, by one rule; a wide valley is easy to train. Diverged runs "
                "are not drawn.",
                "所有模型按同一规则尝试相同的学习率；谷越宽越容易训练。发散的训练没有画出。",
            )
        ),
        figures(_curves(found)),
        heading(Bilingual("What they are", "各模型是什么")),
        _models(found),
        heading(Bilingual("How it was done", "方法")),
        bullets(_method(found)),
        heading(Bilingual("Commands", "命令")),
        f"<pre>{escape(_commands(found, command))}</pre>",
    ]
    return document(title, body)


def _results(found: ModelComparison) -> str:
    """Two tables: quality, and cost."""
    perplexity = found.corpus.recipe.task.has_perplexity
    heads = [
        Bilingual("model", "模型"),
        Bilingual("loss", "损失"),
        Bilingual("behind the best", "与最优之差"),
        Bilingual("verdict", "结论"),
    ]
    heads += [Bilingual("perplexity", "困惑度")] if perplexity else []
    heads += [Bilingual("seeds", "种子数"), Bilingual("rate", "学习率"), Bilingual("valley", "谷宽")]
    rows = []
    for one in found.standings:
        contender = found.contender(one.name)
        assert contender.curve is not None
        row = [same(one.name), same(one.loss.text()), same("" if one.behind is None else f"+{one.behind.text()}")]
        row += [VERDICTS[one.verdict]]
        row += [same(f"{math.exp(min(one.loss.mean, 700.0)):.2f}")] if perplexity else []
        row += [same(str(one.loss.seeds)), same(f"{contender.curve.best:g}"), same(f"×{contender.curve.width:.1f}")]
        rows.append(row)
    ranked = {one.name for one in found.standings}
    rows += [[same(one.name), Bilingual("no result", "无结果")] for one in found.contenders if one.name not in ranked]
    return table(heads, rows, found.recommended or "") + _costs(found)


def _costs(found: ModelComparison) -> str:
    facts = {one.name: sized_facts(one, found.corpus.recipe.max_tokens) for one in found.contenders}
    keeps = any(fact["state"] for fact in facts.values())
    decodes = any(isinstance(one, float) for model in found.contenders for one in model.costs["decoding"].values())
    energy = any(one.costs.get("joules") for one in found.contenders)
    heads = [Bilingual("model", "模型"), Bilingual("parameters", "参数量"), Bilingual("FLOPs/token", "FLOPs/词元")]
    heads += [Bilingual("training, tokens/s", "训练，词元/秒"), Bilingual("memory of an update", "一次更新的内存")]
    if decodes:
        heads += [Bilingual(f"decoding at {_k(n)}, tokens/s", f"{_k(n)} 处解码，词元/秒") for n in CONTEXTS]
    if keeps:
        heads += [Bilingual(f"state at {_k(n)}", f"{_k(n)} 处状态") for n in CONTEXTS]
    heads += [Bilingual("J/token", "焦耳/词元")] if energy else []
    rows = []
    for one in found.contenders:
        fact, costs = facts[one.name], one.costs
        row = [same(one.name), same(f"{fact['parameters']:,}"), same(short(fact["flops"]))]
        row += [same(f"{costs['training']:,.0f}"), _amount(costs["memory"])]
        if decodes:
            row += [_speed(costs["decoding"].get(str(n))) for n in CONTEXTS]
        if keeps:
            row += [_amount(fact["state"].get(str(n))) for n in CONTEXTS]
        row += [same(f"{costs['joules']:.2e}" if costs.get("joules") else "–")] if energy else []
        rows.append(row)
    return table(heads, rows, found.recommended or "")


def _k(length: int) -> str:
    return f"{length // 1024}k"


def _speed(value: Any) -> Bilingual:
    return same(f"{value:,.0f}" if isinstance(value, float) else "–")


def _amount(count: float | None) -> Bilingual:
    return same("–" if count is None else format_bytes(count))


def _notes(found: ModelComparison) -> str:
    """Guards: what a reader must know."""
    texts = [same(f"{one.name}: {text}") for one in found.contenders for text in one.warnings]
    reasons: dict[str, list[str]] = {}
    for one in found.contenders:
        for context in CONTEXTS:
            reason = one.costs.get("decoding", {}).get(str(context))
            if isinstance(reason, str) and reason != "does not continue texts":
                reasons.setdefault(f"{one.name}: {reason}", []).append(_k(context))
    texts += [
        Bilingual(
            f"{reason}, so its decoding at {' and '.join(at)} was not measured",
            f"{reason}；{'、'.join(at)} 处的解码没有测量",
        )
        for reason, at in reasons.items()
    ]
    texts += [Bilingual(f"{name} was left out: {why}", f"{name} 未参加：{why}") for name, why in found.left_out.items()]
    return bullets(texts) if texts else ""


def _fronts(found: ModelComparison) -> list[tuple[Bilingual, str]]:
    ranked = {one.name: one.loss for one in found.standings}
    losses = {one.name: ranked[one.name] for one in found.contenders if one.name in ranked}  # colours as elsewhere
    length = found.corpus.recipe.max_tokens
    facts = {name: sized_facts(found.contender(name), length) for name in losses}
    costs = {name: found.contender(name).costs for name in losses}
    long = str(CONTEXTS[-1])
    chosen = [
        ("state", Bilingual("Loss and state at 32k", "损失与 32k 处的状态"), "bytes", True, False,
         {name: fact["state"].get(long) for name, fact in facts.items()}),
        ("decode", Bilingual("Loss and decoding at 32k", "损失与 32k 处的解码速度"), "tokens/s", False, True,
         {name: _number(cost["decoding"].get(long)) for name, cost in costs.items()}),
        ("train", Bilingual("Loss and training speed", "损失与训练速度"), "tokens/s", False, True,
         {name: cost["training"] for name, cost in costs.items()}),
        ("flops", Bilingual("Loss and FLOPs of a token", "损失与每个词元的计算量"), "FLOPs", False, False,
         {name: fact["flops"] for name, fact in facts.items()}),
    ]  # fmt: skip
    plots = []
    for _, title, unit, log, higher, values in chosen:
        points = {name: (value, losses[name].mean) for name, value in values.items() if value}
        if len(points) < 2:
            continue
        series = {name: Series([point], [_bar(losses[name])], lines=False) for name, point in points.items()}
        plots.append((title, plot(series, Axis(unit, log), Axis("loss"), title.en, pareto(points, higher))))
    return plots


def _number(value: Any) -> float | None:
    return value if isinstance(value, float) else None


def _bar(loss: ConfidenceInterval) -> tuple[float, float]:
    return loss.low, loss.high


def _curves(found: ModelComparison) -> list[tuple[Bilingual, str]]:
    rates = {one.name: Series(list(one.curve.finished.items())) for one in found.contenders if one.curve is not None}
    title = Bilingual("Loss by learning rate", "不同学习率下的损失")
    plots = [(title, plot(rates, Axis("rate", True), Axis("loss"), title.en))]
    runs = {one.name: next(iter(one.finished.values()), None) for one in found.contenders}
    series = {name: Series([(x, y) for x, y in run["curve"]], marks=False) for name, run in runs.items() if run}
    title = Bilingual("Training loss, first seed", "训练损失（第一个种子）")
    return [*plots, (title, plot(series, Axis("step", True), Axis("loss"), title.en))]


def _models(found: ModelComparison) -> str:
    rows = []
    for one in found.contenders:
        fact = sized_facts(one, found.corpus.recipe.max_tokens)
        rows.append([same(one.name), same(fact["words"]), same(fact["sizes"])])
    heads = (Bilingual("model", "模型"), Bilingual("parts", "部件"), Bilingual("sizes", "尺寸"))
    lines = "".join(
        "<tr>" + "".join(f"<td style='white-space:normal'>{cell.html}</td>" for cell in row) + "</tr>" for row in rows
    )
    top = "".join(f"<th>{head.html}</th>" for head in heads)
    return f'<div class="wide"><table><tr>{top}</tr>{lines}</table></div>'


def _method(found: ModelComparison) -> list[Bilingual]:
    settings, corpus = found.settings, found.corpus
    match = MATCHED[settings.match]
    rates = ", ".join(f"{rate:g}" for rate in settings.rule.rates)
    tokens = next((run["tokens"] for one in found.contenders for run in one.finished.values()), 0)
    counts = sorted({one.steps for one in found.contenders})
    steps = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,}–{counts[-1]:,}"
    files = ", ".join(path.name for entry in corpus.recipe.data.train for path in entry.files())
    examples = corpus.prepared.examples
    what = corpus.recipe.task.file_type.examples
    unit, dropout = corpus.recipe.task.loss_unit, found.contenders[0].sized.tree["dropout"]
    return [
        Bilingual(
            f"Task {corpus.recipe.task_kind}; {examples:,} {what} of {files}; the same tokenizer, batches and order "
            f"for every model. Dropout {dropout:g}.",
            f"任务 {corpus.recipe.task_kind}；训练样本 {examples:,} 个，来自 {files}；所有模型使用相同的分词器、批次和"
            f"数据顺序。丢弃率 {dropout:g}。",
        ),
        Bilingual(
            f"Matched by {match.en}: sizes were solved for by the cost functions, from the first model's.",
            f"按{match.zh}对齐：以第一个模型为准，由开销函数解出各模型的尺寸。",
        ),
        Bilingual(
            f"{steps} steps, {short(tokens)} {unit} each run; {settings.seeds} seeds, which decide weights and order.",
            f"每次训练 {steps} 步、{short(tokens)} 个词元；{settings.seeds} 个随机种子，决定初始权重与数据顺序。",
        ),
        Bilingual(
            f"Rates: {rates}; the grid grows while the best rate is at its edge. The valley is the factor between the "
            f"neighbouring rates within {100 * NEAR:.0f}% of the lowest loss.",
            f"学习率：{rates}；若最优值在网格边缘，则继续扩展。谷宽是损失与最低值相差不到 {100 * NEAR:.0f}% 的"
            f"相邻学习率之间的倍数。",
        ),
        Bilingual(
            "Intervals are at 95%: validation examples are resampled in pairs, seeds by Student's t. Inconclusive: "
            "the interval of the difference contains zero. Half of the validation groups choose the rate, the others "
            "judge.",
            "置信区间为 95%：验证样本成对重采样，随机种子用学生 t 分布。“无法区分”指差值的区间包含零。"
            "一半验证数据用于选学习率，另一半用于评判。",
        ),
        Bilingual(f"Measured on {found.machine}, models taking turns.", f"在 {found.machine} 上测量，各模型轮流进行。"),
    ]


def _commands(found: ModelComparison, command: str) -> str:
    lines = [command]
    if found.recommended is not None:
        one: Contender = found.contender(found.recommended)
        assert one.curve is not None
        changes = f"--set model={MODELS}/{one.name}.yaml --set 'schedule={{kind: cosine, peak: {one.curve.best:g}}}'"
        lines += ["", "# train the recommended model longer; run it in the folder of this page"]
        lines += [f"allyouneed train recipe.yaml {changes}"]
    return "\n".join(lines)
