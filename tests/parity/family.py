"""docs/family.md: system → preset → part files → paper → judge → largest difference seen.

    make family      runs the parity tests, gathers what they measured, writes docs/results/parity.json and the page

Nothing in the table is typed: presets name system and paper in their first line (`# System: paper, equation`), parts
say which file they are in, the tests say who judged and how far apart the numbers were.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from allyouneed.config import PRESETS, Part, parse, preset_names, preset_tree
from allyouneed.nn.model import Model

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs/results/parity.json", ROOT / "docs/family.md"
HEAD = """# The family

Every system is a preset of one core. The judge is somebody else's code, or the paper's equations written out, given the
same random weights; a difference is the largest seen in any output (and in any gradient), relative to the largest entry
where that is above one. This page is written by `make family` from what the parity tests measured
([results/parity.json](results/parity.json)); `allyouneed models` lists what each preset costs.

| system | presets | made of | paper | judge | outputs | gradients |
|---|---|---|---|---|---|---|
"""


def system_and_paper(preset: str) -> tuple[str, str]:
    """The first line of a preset: `# System: paper, equation.`"""
    first = (PRESETS / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()[0]
    system, colon, paper = first.removeprefix("# ").partition(": ")
    assert first.startswith("# ") and colon, f"{preset}.yaml begins with '# System: paper, equation', not {first!r}"
    return system, paper.rstrip(".")


def parts(node: Any) -> Iterator[Part]:
    if isinstance(node, BaseModel):
        if isinstance(node, Part):
            yield node
        node = [getattr(node, name) for name in type(node).model_fields]
    if isinstance(node, list | tuple):
        for child in node:
            yield from parts(child)


def files(preset: str) -> list[str]:
    """The files of the parts a preset is made of, in the order they are met."""
    config = parse(Model, preset_tree(preset))  # type: ignore[type-abstract]
    modules = [type(part).__module__.removeprefix("allyouneed.").replace(".", "/") for part in parts(config)]
    return list(dict.fromkeys(f"{module}.py" for module in modules))


def page(results: list[dict[str, Any]]) -> str:
    measured: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        measured[result["system"]].append(result)
    presets: dict[str, list[str]] = defaultdict(list)
    for name in preset_names():
        presets[system_and_paper(name)[0]].append(name)
    lines = []
    for system in sorted(set(measured) | set(presets), key=str.lower):
        names = presets.get(system, [])
        made = list(dict.fromkeys(file for name in names for file in files(name)))
        links = ", ".join(f"[{Path(file).stem}](../src/allyouneed/{file})" for file in made)
        paper = system_and_paper(names[0])[1] if names else ""
        for judge in sorted({result["judge"] for result in measured[system]}) or [""]:
            mine = [result for result in measured[system] if result["judge"] == judge]
            cells = [system, ", ".join(f"`{name}`" for name in names), links, paper, judge]
            lines.append("| " + " | ".join([*cells, worst(mine, "outputs"), worst(mine, "gradients")]) + " |")
    return HEAD + "\n".join(lines) + "\n"


def worst(results: list[dict[str, Any]], what: str) -> str:
    found = [result[what] for result in results if result[what] is not None]
    return f"{max(found):.0e}" if found else ""


def gather(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    return sorted(found, key=lambda result: (result["system"].lower(), result["judge"], result["test"]))


if __name__ == "__main__":
    gathered = gather(Path(sys.argv[1]))
    RESULTS.write_text(json.dumps(gathered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(gathered), encoding="utf-8")
    print(f"{len(gathered)} measurements, {PAGE.relative_to(ROOT)}")
