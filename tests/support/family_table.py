"""docs/family.md: system → preset → part files → paper → reference → largest difference.

    make family      run the parity tests, collect their measurements, write docs/results/parity.json and the page

The table is generated: system and paper come from the first line of a preset (`# System: paper, equation`), files from
its parts, reference and differences from the tests.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from allyouneed.config import PRESETS, Part, parse, preset_names, preset_tree
from allyouneed.nn.models.base import Model
from family_names import CHINESE, PAGES

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "docs/results/parity.json", ROOT / "docs/family.md"
HEAD = """# The family

Every system is a preset over the same parts, verified against a reference implementation or the paper's written-out
equations with the same random weights. The last columns give the largest difference of any output and any gradient,
relative to the largest entry where that exceeds one. `make family` writes this page from the measurements of the parity
tests ([results/parity.json](results/parity.json)); `allyouneed models` lists the cost of each preset.
[Unlimiformer](family/unlimiformer.md) (无限长输入 Transformer) is an option of decoding, not a preset.

| system | presets | parts | paper | reference | outputs | gradients |
|---|---|---|---|---|---|---|
"""
TAIL = """
A difference of 0 means bit-identical results: the same operations in the same order.

## Not included

* Hardwired Transformer chips (Etched's Sohu and similar): hardware for these parts, not a part.
* Long convolutions (Hyena): not derived from attention; they would fit the mixer slot.
* kNN-LM: a decoding method with a data store, not a layer; RETRO covers retrieval as a layer.
* Nyströmformer, Routing Transformer, Compressive Transformer, FNet: efficient attention whose ideas other parts cover
  (Linformer and Performer, LSH, Infini-attention's memory, Synthesizer's random weights).
* Adaptive softmax and adaptive embeddings (in Transformer-XL's large models): a head for word vocabularies, unnecessary
  with subwords.
"""


def system_and_paper(preset: str) -> tuple[str, str]:
    """The first line of a preset: `# System: paper, equation.`"""
    first = (PRESETS / f"{preset}.yaml").read_text(encoding="utf-8").splitlines()[0]
    system, colon, paper = first.removeprefix("# ").partition(": ")
    assert first.startswith("# ") and colon, f"{preset}.yaml must begin with '# System: paper, equation', not {first!r}"
    return system, paper.rstrip(".")


def parts(node: Any) -> Iterator[Part]:
    """The parts a preset sets; defaults are not listed."""
    if isinstance(node, BaseModel):
        if isinstance(node, Part):
            yield node
        fields = type(node).model_fields.items()
        node = [value for name, field in fields if (value := getattr(node, name)) != field.default]
    if isinstance(node, list | tuple):
        for child in node:
            yield from parts(child)


def files(preset: str) -> list[str]:
    """The files of a preset's parts, in order of occurrence."""
    config = parse(Model, preset_tree(preset))  # type: ignore[type-abstract]
    sources = [Path(str(inspect.getsourcefile(type(part)))) for part in parts(config)]
    return list(dict.fromkeys(source.relative_to(PRESETS.parent).as_posix() for source in sources))


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
        links = ", ".join(
            f"[{Path(file.removesuffix('/__init__.py')).stem}](../src/allyouneed/{file})" for file in made
        )
        paper = system_and_paper(names[0])[1] if names else ""
        judges = sorted({result["judge"] for result in measured[system]})
        mine = [[result for result in measured[system] if result["judge"] == judge] for judge in judges]
        figures = ["<br>".join(worst(some, what) for some in mine) for what in ("outputs", "gradients")]
        cells = [title(system), ", ".join(f"`{name}`" for name in names), links, paper, "<br>".join(judges), *figures]
        lines.append("| " + " | ".join(cells) + " |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


def title(system: str) -> str:
    """The system, linked to its page if it has one, and its Chinese name."""
    page = PAGES.get(system)
    linked = system if page is None else f"[{system}](family/{page}.md)"
    return linked if system not in CHINESE else f"{linked}<br>{CHINESE[system]}"


def worst(results: list[dict[str, Any]], what: str) -> str:
    found = [result[what] for result in results if result[what] is not None]
    return f"{max(found):.0e}" if found else "–"


def gather(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    return sorted(found, key=lambda result: (result["system"].lower(), result["judge"], result["test"]))


if __name__ == "__main__":
    gathered = gather(Path(sys.argv[1]))
    RESULTS.write_text(json.dumps(gathered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(gathered), encoding="utf-8")
    print(f"{len(gathered)} measurements, {PAGE.relative_to(ROOT)}")
