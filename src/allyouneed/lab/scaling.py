"""Scaling of one architecture on one corpus: L(N, D) = E + A/N^α + B/D^β (Hoffmann et al. 2022, eq. 2), fitted to a
ladder of small models, and the size that a budget of FLOPs is best spent on (their eq. 4).

The fit minimises squared relative errors. Given α and β the law is linear in E, A and B, so these are solved for, and
the other two searched on a grid that is refined (variable projection, Golub, Pereyra 1973): there is no descent that
could stop early (Besiroglu et al. 2024). Error bars are those of fits to resampled residuals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allyouneed.errors import UserError
from allyouneed.lab.comparison.compare import fitted
from allyouneed.lab.comparison.sizes import scaled, sizes_text
from allyouneed.lab.comparison.training import open_corpus, train_model
from allyouneed.lab.page import Bilingual, bullets, document, figures, heading, paragraph, same, table
from allyouneed.lab.rates import RateRule, sweep
from allyouneed.lab.statistics import student
from allyouneed.lab.store import Result, ResultStore
from allyouneed.lab.svg import Axis, Series, plot, short

EXPONENTS = np.linspace(0.02, 1.5, 38)  # of the first grid, for α and β
FINER, LEVELS = 4, 4  # each grid around the best point has steps so many times smaller; grids
RESAMPLES = 200
GROWTH = math.sqrt(2)  # of the width from a rung to the next
Floats = NDArray[np.float64]
LEAST = 6  # points; the law has five parameters
TRUSTED = 10.0  # times the largest compute of the ladder: predictions beyond are marked


@dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = E + A/N^α + B/D^β."""

    a: float  # A
    b: float  # B
    e: float  # E, the loss of an endless model on endless data
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def best_size(self, flops: float) -> float:
        """The parameters that reach the lowest loss with this compute, where C = 6·N·D (eq. 4)."""
        share = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        return float(share * (flops / 6) ** (self.beta / (self.alpha + self.beta)))


@dataclass(frozen=True)
class ScalingFit:
    """A law and the laws of resampled residuals."""

    law: ScalingLaw
    resampled: tuple[ScalingLaw, ...]
    residual: float  # root mean square of log L

    def interval(self, of: Callable[[ScalingLaw], float]) -> tuple[float, float]:
        """95% of the resampled laws say something between."""
        low, high = np.quantile([of(one) for one in self.resampled], [0.025, 0.975])
        return float(low), float(high)


def fit(points: Sequence[tuple[float, float, float]], seed: int = 0, resamples: int = RESAMPLES) -> ScalingFit:
    """Fit the law to points (parameters, tokens, loss)."""
    if len(points) < LEAST or len({n for n, _, _ in points}) < 2 or len({d for _, d, _ in points}) < 2:
        raise UserError(f"{len(points)} runs; a fit needs at least {LEAST}, of several sizes and several lengths")
    sizes, tokens, losses = np.log(np.array(points, np.float64)).T
    observed = np.exp(losses)
    weights = 1 / observed
    (law,) = _solve(sizes, tokens, observed[None], weights)
    predicted = np.array([law.loss(n, d) for n, d, _ in points])
    residuals = losses - np.log(predicted)
    # residuals of a fit with five parameters are smaller than those of the truth, and their size is uncertain
    freedom = max(1, len(points) - 5)
    wider = residuals * math.sqrt(len(points) / freedom) * student(freedom) / student(1000)
    drawn = np.random.default_rng(seed).integers(len(points), size=(resamples, len(points)))
    again = _solve(sizes, tokens, predicted * np.exp(wider[drawn]), weights)
    return ScalingFit(law, tuple(again), float(np.sqrt((residuals**2).mean())))


def _solve(sizes: Floats, tokens: Floats, losses: Floats, weights: Floats) -> list[ScalingLaw]:
    """The law of each row of losses (rows, points)."""
    grid = np.stack(np.meshgrid(EXPONENTS, EXPONENTS), -1).reshape(1, -1, 2)  # (1, candidates, 2)
    step = EXPONENTS[1] - EXPONENTS[0]
    rows = np.arange(len(losses))
    for _ in range(LEVELS):
        errors, values = _linear(grid, sizes, tokens, losses, weights)
        best = errors.argmin(1)
        exponents, found = np.broadcast_to(grid, (len(losses), *grid.shape[1:]))[rows, best], values[rows, best]
        around = np.arange(-FINER, FINER + 1) * (step := step / FINER)
        local = np.stack(np.meshgrid(around, around), -1).reshape(-1, 2)
        grid = np.maximum(exponents[:, None] + local, 1e-3)
    centres = sizes.mean(), tokens.mean()
    return [
        ScalingLaw(float(a * np.exp(alpha * centres[0])), float(b * np.exp(beta * centres[1])), e, alpha, beta)
        for (e, a, b), (alpha, beta) in zip(found.tolist(), exponents.tolist(), strict=True)
    ]


def _linear(grid: Floats, sizes: Floats, tokens: Floats, losses: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """For each row of losses and each α, β of its grid: the sum of squared relative errors, and E, A, B, the latter two
    for sizes and tokens about their means. Laws with a negative part are none."""
    columns = [np.zeros((*grid.shape[:2], len(sizes)))]
    columns += [-grid[..., n, None] * (axis - axis.mean()) for n, axis in enumerate((sizes, tokens))]
    design = np.exp(np.stack(columns, -1)) * weights[:, None]  # (rows or 1, candidates, points, 3)
    inverse = np.linalg.pinv(design)
    wanted = (losses * weights)[:, None, :, None]  # (rows, 1, points, 1)
    values = inverse @ wanted
    errors = ((design @ values - wanted) ** 2).sum((2, 3))
    negative = np.minimum(values[..., 0], 0)
    return errors + (negative < 0).any(-1) * 1e9, np.maximum(values[..., 0], 1e-12)


@dataclass(frozen=True)
class Rung:
    """A model of the ladder at one length of training."""

    parameters: int
    tokens: int
    loss: float
    flops: float  # of the whole training, by the parts
    sizes: str
    rate: float


@dataclass(frozen=True)
class Ladder:
    name: str
    rungs: list[Rung]
    fit: ScalingFit
    warnings: list[str]
    budgets: tuple[float, ...]

    @property
    def reach(self) -> float:
        """The largest compute that was tried."""
        return max(6.0 * one.parameters * one.tokens for one in self.rungs)


def climb(
    name: str,
    tree: Mapping[str, Any],
    folder: Path,
    widths: Sequence[int],
    steps: Sequence[int],
    blocks: int,
    budgets: Sequence[float] = (),
    processes: int = 1,
    rule: RateRule | None = None,
    count: Callable[[int, int], None] = lambda done, total: None,
) -> Ladder:
    """Train a ladder: every width at its rate, which the rule finds in the shortest runs, for each number of steps."""
    corpus, store = open_corpus(str(folder), loud=True), ResultStore(folder / "results")
    trees, refused = fitted(corpus, {name: tree})
    if refused:
        raise UserError(f"{name}: {refused[name]}")
    length, facts = corpus.recipe.max_tokens, corpus.facts()
    models = {str(width): scaled(trees[name], width, blocks, length) for width in widths}

    def run(wanted: Sequence[tuple[str, float, int]]) -> list[Result]:
        experiments = [
            {"kind": "training", "model": models[width], "rate": rate, "seed": 1, "steps": number} | facts
            for width, rate, number in wanted
        ]
        return store.run(experiments, partial(train_model, folder=str(folder)), processes, count)

    def train(wanted: list[tuple[str, float]]) -> dict[tuple[str, float], float | None]:
        found = run([(width, rate, min(steps)) for width, rate in wanted])
        return {key: result["loss"] for key, result in zip(wanted, found, strict=True)}

    curves = sweep(list(models), train, rule)
    warnings = [f"width {width}: {text}" for width, curve in curves.items() for text in curve.warnings()]
    wanted = [(width, curves[width].best or 0.0, n) for width in models for n in steps if curves[width].best]
    rungs = []
    for (width, rate, number), result in zip(wanted, run(wanted), strict=True):
        if result["loss"] is None:
            warnings.append(f"width {width}, {number} steps: diverged ({result['diverged']}) and is not in the fit")
            continue
        config = corpus.config(models[width])
        cost = config.cost(length)
        work = 3.0 * cost.flops * result["tokens"]
        rungs.append(Rung(cost.parameters, result["tokens"], result["loss"], work, sizes_text(config), rate))
    found = fit([(one.parameters, one.tokens, one.loss) for one in rungs])
    warnings += undetermined(found)
    return Ladder(name, rungs, found, warnings, tuple(budgets) or _usual_budgets(rungs))


def undetermined(found: ScalingFit) -> list[str]:
    """What the runs do not determine: an exponent whose interval is as wide as itself."""
    lines = []
    for name, key in (("alpha", "alpha"), ("beta", "beta")):
        low, high = found.interval(lambda law, key=key: getattr(law, key))  # type: ignore[misc]
        if high - low > getattr(found.law, key):
            lines.append(
                f"inconclusive: {name} is between {low:.2g} and {high:.2g}, so no size is given for a budget; take "
                "more --sizes and --lengths, and longer runs (--steps)"
            )
    return lines


def _usual_budgets(rungs: Sequence[Rung]) -> tuple[float, ...]:
    most = max(6.0 * one.parameters * one.tokens for one in rungs)
    first = 10.0 ** math.floor(math.log10(most))
    return first, 10 * first, 100 * first


def widths_of(least: int, count: int) -> tuple[int, ...]:
    """Widths of the rungs, multiples of 8."""
    return tuple(dict.fromkeys(max(8, round(least * GROWTH**n / 8) * 8) for n in range(count)))


def budget_rows(found: Ladder) -> list[dict[str, Any]]:
    """For each budget, the size with the lowest loss, its tokens and its loss, with intervals; none where the runs do
    not determine the law."""
    rows = []
    for flops in () if undetermined(found.fit) else found.budgets:
        size = found.fit.law.best_size(flops)
        low, high = found.fit.interval(lambda law, flops=flops: law.best_size(flops))  # type: ignore[misc]
        loss = found.fit.law.loss(size, flops / (6 * size))
        rows.append(
            {
                "flops": flops,
                "parameters": size,
                "low": low,
                "high": high,
                "tokens": flops / (6 * size),
                "loss": loss,
                "far": flops > TRUSTED * found.reach,
            }
        )
    return rows


def law_lines(found: Ladder) -> list[tuple[str, float, tuple[float, float]]]:
    """Each parameter of the law, with its interval."""
    names = {"E": "e", "A": "a", "B": "b", "alpha": "alpha", "beta": "beta"}
    return [
        (name, getattr(found.fit.law, key), found.fit.interval(lambda law, key=key: getattr(law, key)))  # type: ignore[misc]
        for name, key in names.items()
    ]


def text(found: Ladder) -> str:
    """The fit and its predictions for a terminal."""
    lines = []
    for one in found.rungs:
        work = f"6ND {6.0 * one.parameters * one.tokens:.2e}  by the parts {one.flops:.2e}"
        lines.append(
            f"{one.parameters:>10,} parameters  {one.tokens:>10,} tokens  loss {one.loss:.4f}  rate {one.rate:g}  "
            f"{work}"
        )
    lines += ["", "L(N, D) = E + A / N^alpha + B / D^beta"]
    lines += [f"  {name:<5} {value:.4g}  [{low:.4g}, {high:.4g}]" for name, value, (low, high) in law_lines(found)]
    lines += [f"  residual {100 * found.fit.residual:.2f}% of the loss, {len(found.rungs)} runs", ""]
    for row in budget_rows(found):
        far = "  (far beyond the ladder)" if row["far"] else ""
        lines.append(
            f"{row['flops']:.0e} FLOPs: {short(row['parameters'])} parameters "
            f"[{short(row['low'])}, {short(row['high'])}], {short(row['tokens'])} tokens, loss {row['loss']:.3f}{far}"
        )
    return "\n".join([*lines, *(f"warning: {one}" for one in found.warnings)])


def page(found: Ladder, command: str) -> str:
    """The report, in both languages."""
    by_tokens: dict[int, list[Rung]] = {}
    for one in found.rungs:
        by_tokens.setdefault(one.tokens, []).append(one)
    losses = {
        f"{short(tokens)} tokens": Series(
            [(one.parameters, one.loss) for one in sorted(rungs, key=lambda r: r.parameters)]
        )
        for tokens, rungs in sorted(by_tokens.items())
    }
    sizes = sorted({one.parameters for one in found.rungs})
    grid = np.geomspace(sizes[0], sizes[-1], 30)
    lines = {
        f"fit, {short(tokens)}": Series([(float(n), found.fit.law.loss(float(n), tokens)) for n in grid], marks=False)
        for tokens in sorted(by_tokens)
    }
    compute = {
        f"{short(n)} parameters": Series(
            [
                (6.0 * n * one.tokens, one.loss)
                for one in sorted(found.rungs, key=lambda r: r.tokens)
                if one.parameters == n
            ]
        )
        for n in sizes
    }
    rows = [
        [same(f"{row['flops']:.0e}"), same(f"{short(row['parameters'])} [{short(row['low'])}, {short(row['high'])}]"),
         same(short(row["tokens"])), same(f"{row['loss']:.3f}"),
         Bilingual("far beyond the ladder", "远超阶梯范围") if row["far"] else same("")]
        for row in budget_rows(found)
    ]  # fmt: skip
    title = Bilingual(f"Scaling of {found.name}", f"{found.name} 的缩放规律")
    first = Bilingual("Loss by size", "损失与参数量")
    second = Bilingual("Loss by compute, C = 6ND", "损失与计算量，C = 6ND")
    return document(
        title,
        [
            heading(Bilingual("The law", "规律")),
            "<p>L(N, D) = E + A/N<sup>α</sup> + B/D<sup>β</sup></p>",
            table(
                [Bilingual("parameter", "参数"), Bilingual("value", "取值"), Bilingual("95% interval", "95% 区间")],
                [
                    [same(n), same(f"{v:.4g}"), same(f"{low:.4g} – {high:.4g}")]
                    for n, v, (low, high) in law_lines(found)
                ],
            ),
            heading(Bilingual("The best size for a budget", "给定算力的最优规模")),
            table(
                [
                    Bilingual("FLOPs", "FLOPs"),
                    Bilingual("parameters", "参数量"),
                    Bilingual("tokens", "词元数"),
                    Bilingual("loss", "损失"),
                    same(""),
                ],
                rows,
            )
            if rows
            else paragraph(
                Bilingual(
                    "Inconclusive: these runs do not determine the law, so no size is given (see below).",
                    "无法确定：这些训练不足以确定规律，因此不给出规模（原因见下）。",
                )
            ),
            figures(
                [
                    (first, plot(losses | lines, Axis("parameters", True), Axis("loss"), first.en)),
                    (second, plot(compute, Axis("FLOPs", True), Axis("loss"), second.en)),
                ]
            ),
            heading(Bilingual("Runs", "训练")),
            table(
                [
                    Bilingual("sizes", "尺寸"),
                    Bilingual("parameters", "参数量"),
                    Bilingual("tokens", "词元数"),
                    Bilingual("rate", "学习率"),
                    Bilingual("loss", "损失"),
                    same("6ND"),
                    Bilingual("FLOPs by the parts", "按部件计算的 FLOPs"),
                ],
                [
                    [
                        same(r.sizes),
                        same(f"{r.parameters:,}"),
                        same(f"{r.tokens:,}"),
                        same(f"{r.rate:g}"),
                        same(f"{r.loss:.4f}"),
                        same(f"{6.0 * r.parameters * r.tokens:.2e}"),
                        same(f"{r.flops:.2e}"),
                    ]
                    for r in found.rungs
                ],
            ),
            bullets([same(one) for one in found.warnings]) if found.warnings else "",
            heading(Bilingual("Command", "命令")),
            f"<pre>{escape(command)}</pre>",
        ],
    )
