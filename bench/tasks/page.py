"""docs/results/tasks.md from the table of experiments and the recorded scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "results" / "tasks.md"
# 97.5 % points of Student's t distribution by degrees of freedom
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
COUNTED = ("accuracy", "exact")  # shares of the examples
HEAD = """# Tasks against published figures

Each figure of ours is from an ordinary recipe (`bench/tasks/experiments.yaml`), scored once on the test data; what was
chosen (the checkpoint) was chosen on the validation data. With several seeds, a figure is their mean with the 95 %
interval of the mean over seeds; with one seed it has the 95 % interval of the share for so many test examples, where it
is a share. Published figures are under their authors' conditions, which differ as stated; those marked ° are from
general knowledge. A figure below the published one is reported as it is, with what we think is missing.

```text
python tests/real/fetch.py WEIGHTS
python bench/tasks/run.py --data DATA --weights WEIGHTS --only NAME
```

English models start from all-MiniLM-L6-v2 (22.6 million parameters), Chinese ones from m3e-small (24 million; for
research only, so nothing trained from it is shipped). Figures on a CPU were trained in bf16 by one thread of a shared
machine, hence few seeds.
"""


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of their mean."""
    if len(values) < 2:
        return None
    return STUDENT.get(len(values) - 1, 2.0) * stdev(values) / math.sqrt(len(values))


def figure(records: Sequence[dict[str, Any]], metric: str) -> str:
    values = [one["scores"]["test"][metric] for one in records if metric in (one["scores"].get("test") or {})]
    if not values:
        return "–"
    half = interval(values)
    if half is None and metric in COUNTED:  # normal approximation of the binomial distribution
        share, count = values[0] / 100, records[0]["examples"]["test"]
        half = 196 * math.sqrt(share * (1 - share) / count)
    return f"{mean(values):.2f}" + ("" if half is None else f" ± {half:.2f}")


def baselines(records: Sequence[dict[str, Any]], metrics: Sequence[str]) -> list[list[str]]:
    found = (records[0].get("baselines") or {}).get("test") or [] if records else []
    return [
        [one["name"], *(f"{one['figures'][m]:.2f}" if m in one["figures"] else "–" for m in metrics), "", "baseline"]
        for one in found
    ]


def section(name: str, experiment: dict[str, Any], records: Sequence[dict[str, Any]]) -> str:
    metrics, shown = experiment["metrics"], experiment.get("names", {})
    rows = []
    for one in experiment["published"]:
        figures = [f"{value:g}" for value in one["figures"]] + ["–"] * (len(metrics) - len(one["figures"]))
        rows.append([one["system"], *figures, "", one["source"] + ("°" if one.get("recalled") else "")])
    if "aim" in experiment:
        rows.append(["the aim", f"{experiment['aim']:g}", *["–"] * (len(metrics) - 1), "", ""])
    mine: list[dict[str, Any]] = []
    for run in experiment["runs"]:
        for device in ("cuda", "cpu"):
            found = [one for one in records if one["key"][:2] == [name, run] and one["key"][3] == device]
            if found:
                mine = mine if mine and mine[0]["baselines"] else found
                minutes = mean(one["training_seconds"] for one in found) / 60
                seeds, place = f"{len(found)} seed{'s' * (len(found) > 1)}", found[0]["machine"].split(";")[0]
                where = f"{seeds}, {place}, {minutes:.0f} min each" if found[0]["steps"] else f"{place}, not trained"
                rows.append(
                    [f"**ours, {run}**", *(f"**{figure(found, m)}**" for m in metrics), where, f"`--only {name}-{run}`"]
                )
        if not any(one["key"][:2] == [name, run] for one in records):
            rows.append([f"ours, {run}", *["not run yet"] * len(metrics), "", f"`--only {name}-{run}`"])
    if not experiment["runs"]:
        rows.append(["ours", *["no recipe yet"] * len(metrics), "", ""])
    rows += baselines(mine, metrics)
    titles = [shown.get(metric, metric) for metric in metrics]
    lines = [f"## {name}", "", f"{experiment['title'][0].upper()}{experiment['title'][1:]}."]
    lines += [f"Published: {experiment['conditions']}."] if experiment.get("conditions") else []
    lines += ["", f"| | {' | '.join(titles)} | runs | from |", f"|---|{'--:|' * len(titles)}---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if experiment.get("missing"):
        lines += ["", f"What is missing: {experiment['missing']}."]
    return "\n".join(lines) + "\n"


def write_page(table: dict[str, Any], records: list[dict[str, Any]], page: Path = PAGE) -> None:
    parts = [HEAD, *(section(name, experiment, records) for name, experiment in table.items())]
    page.write_text("\n".join(parts), "utf-8")
