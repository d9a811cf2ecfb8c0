"""docs/journeys.md: what works with what, and docs/results/journeys.json, which the tests of journeys hold it to.

    make journeys

runs the tests of journeys with JOURNEYS_RESULTS=FOLDER, into which every journey writes how its steps ended, and writes
both languages of the page from there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from allyouneed.config import parse, preset_names, preset_tree
from allyouneed.nn.models.base import Model
from journey import STEPS

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs/results/journeys.json"
TEXTS = {
    "journeys.md": {
        "title": "# Journeys",
        "other": "[中文](zh/journeys.md)",
        "about": """\
From a file to a model in use, with small models: train by a recipe (the process dies after the second update, and the
run is resumed), ask the model in Python, by its command and over HTTP, score it, look inside, store it as int8, export
it to a folder of Hugging Face. ✓: the step works; a number: it is refused with the message below. `make journeys`
writes this page; `make test` goes the same ways.""",
        "tasks": "## Every task\n\nWith a small model of its kind, which no family of transformers may express.",
        "presets": "## Every preset\n\nWith its usual task; the last column lists the other tasks that train it.",
        "columns": "preset | task",
        "others": "also trained for",
        "untrained": "## Not trained from files alone\n\n",
        "messages": "## Messages",
    },
    "zh/journeys.md": {
        "title": "# 全程",
        "other": "[English](../journeys.md)",
        "about": """\
用小模型从文件走到可用的模型：按配方训练（进程在第二次更新后被杀死，再续训），在 Python、命令行和 HTTP 中提问，
评测，查看内部，存为 int8，导出为 Hugging Face 文件夹。✓ 表示该步可行；数字表示被拒绝，信息见页末。
本页由 `make journeys` 生成，`make test` 走同样的路。""",
        "tasks": "## 每个任务\n\n使用该任务的一个小模型；transformers 不一定有能表示它的模型类。",
        "presets": "## 每个预设\n\n使用预设的常用任务；最后一列是还能训练它的其他任务。",
        "columns": "预设 | 任务",
        "others": "还可用于",
        "untrained": "## 不能仅由文件训练\n\n",
        "messages": "## 信息",
    },
}


def records() -> bool:
    """Whether journeys are recorded, not compared."""
    return "JOURNEYS_RESULTS" in os.environ


def compare(name: str, found: Mapping[str, str]) -> None:
    """Hold the steps of a journey to the record; or write them to it."""
    if (folder := os.environ.get("JOURNEYS_RESULTS")) is not None:
        path = Path(folder) / f"{name.replace(' ', '.')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({name: found}, ensure_ascii=False), encoding="utf-8")
        return
    record = json.loads(RECORD.read_text("utf-8"))
    expected = record["steps"].get(name)
    if name.startswith("tasks "):
        expected = dict.fromkeys(record["tasks"].get(name.removeprefix("tasks "), []), "")
    said = {step: message.partition("\n")[0] for step, message in found.items()}
    if not name.startswith("tasks "):
        expected = {step: expected[step] for step in said}
    assert said == expected, f"{name}: not what docs/journeys.md says; if it should be so, run `make journeys`"


def table(
    rows: Mapping[str, Mapping[str, str]], more: Mapping[str, str], texts: Mapping[str, str], notes: list[str]
) -> str:
    """A row for each journey. `more`: its last cell."""
    last = [texts["others"]] if more else []
    names = texts["columns"].split(" | ") if more else texts["columns"].split(" | ")[1:]
    lines = ["| " + " | ".join([*names, *STEPS, *last]) + " |", "|" + "---|" * (len(names) + len(STEPS) + len(last))]
    for name, steps in rows.items():
        preset, _, task = name.partition(" ")
        cells = [f"`{preset}`", f"`{task}`"] if more else [f"`{task}`"]
        for step in STEPS:
            message = steps.get(step, "–")
            if message and message not in notes:
                notes.append(message)
            cells.append(str(notes.index(message) + 1) if message else "✓")
        lines.append("| " + " | ".join([*cells, *([more[name]] if more else [])]) + " |")
    return "\n".join(lines)


def write(folder: Path) -> None:
    found: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*.json")):
        for name, steps in json.loads(path.read_text("utf-8")).items():
            found[name] = {step: message.partition("\n")[0] for step, message in steps.items()}
    trained = {name.removeprefix("tasks "): [*steps] for name, steps in found.items() if name.startswith("tasks ")}
    steps = {name: one for name, one in found.items() if not name.startswith("tasks ")}
    RECORD.write_text(
        json.dumps({"steps": steps, "tasks": trained}, ensure_ascii=False, indent=1, sort_keys=True) + "\n", "utf-8"
    )
    render(steps, trained)


def render(steps: Mapping[str, Mapping[str, str]], trained: Mapping[str, list[str]]) -> None:
    for page, texts in TEXTS.items():
        notes: list[str] = []
        runs = {name: one for name, one in steps.items() if name.startswith("- ")}
        presets = {name: one for name, one in steps.items() if name not in runs}
        more = {}
        for name in presets:
            preset, _, task = name.partition(" ")
            more[name] = ", ".join(f"`{other}`" for other in trained.get(preset, []) if other != task) or "–"
        parts = [texts["title"], texts["other"], texts["about"], texts["tasks"], table(runs, {}, texts, notes)]
        parts += [texts["presets"], table(presets, more, texts, notes)]
        left = [name for name in preset_names() if not any(one.startswith(f"{name} ") for one in presets)]
        if left:
            kinds = [f"`{name}` ({parse(Model, preset_tree(name)).kind})" for name in left]  # type: ignore[type-abstract]
            parts.append(texts["untrained"] + ", ".join(kinds))
        parts += [texts["messages"], "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))]
        (ROOT / "docs" / page).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
