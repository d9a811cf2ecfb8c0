"""docs/architecture.md and its Chinese page name files, classes and functions that exist; folders stay small and class
names distinct."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from bench.house import MOST_ENTRIES, folders, repeated_classes

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "allyouneed"
TEXT, CHINESE = (
    (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("architecture.md", "zh/architecture.md")
)
MOST_HOPS, MOST_REPEATED = 12, 5
REFERENCE = re.compile(r"`([\w/]+\.(?:py|cpp|h|toml))(?::([\w.]+))?`")


def references(text: str) -> list[tuple[str, str]]:
    return list(dict.fromkeys(REFERENCE.findall(text)))


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title!r}"
    return found[1]


def names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Dotted names defined in a module body: functions, classes with their members, constants."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name
            case ast.ClassDef():
                yield prefix + node.name
                yield from names(node.body, f"{prefix}{node.name}.")
            case ast.Assign():
                yield from (prefix + target.id for target in node.targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


@pytest.mark.parametrize(("path", "name"), references(TEXT + CHINESE))
def test_every_reference_exists(path: str, name: str) -> None:
    file = SOURCE / path if (SOURCE / path).exists() else ROOT / path
    assert file.exists(), f"no file {path}"
    if name and file.suffix == ".py":
        assert name in names(ast.parse(file.read_text(encoding="utf-8")).body), f"{path} does not define {name}"
    elif name:
        assert re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")), f"{path} does not mention {name}"


@pytest.mark.parametrize("title", ["A batch in training", "A request in decoding"])
def test_paths_are_short_and_every_hop_names_its_code(title: str) -> None:
    hops = re.findall(r"^\d+\. .*(?:\n   .*)*", section(title), re.MULTILINE)
    assert 0 < len(hops) <= MOST_HOPS
    assert all(references(hop) for hop in hops)


def test_every_row_of_the_index_names_its_code() -> None:
    rows = [line for line in section("Where do I find …").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    assert all(references(row) for row in rows)


def test_packages_are_drawn_in_the_order_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if "allyouneed.cli" in c.get("layers", ()))
    height = {
        name.strip(" ()").removeprefix("allyouneed."): -at for at, row in enumerate(layers) for name in row.split("|")
    }
    drawing = re.search(r"```text\n(.*?)```", section("Packages"), re.DOTALL)
    assert drawing
    drawn = [re.findall(r"[a-z]\w+", line.split("  ")[0]) for line in drawing[1].splitlines() if line[:1].isalpha()]
    heights = [[height[name] for name in line] for line in drawn]
    assert all(min(above) > max(below) for above, below in pairwise(heights))
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert packages <= {name for line in drawn for name in line}


def test_folders_are_small() -> None:
    crowded = {name: count for name, count in folders(SOURCE) if count > MOST_ENTRIES}
    assert not crowded, crowded


def test_few_class_names_stand_in_several_modules() -> None:
    repeated = repeated_classes(SOURCE)
    assert len(repeated) <= MOST_REPEATED, repeated
