"""The size of the house: lines of each package, crowded folders, class names in several modules, and how many modules
of the package a command loads. `--root`: another checkout, to compare with.

    python bench/house.py [--root CHECKOUT]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_ENTRIES = 20
PACKAGING = ("__init__.py", "__main__.py", "__pycache__", "py.typed")
FLAT_LISTS = ("presets", "interop/families")  # one file per preset and per family
COMMANDS = (["--help"], ["translate", "机器学习很有趣"])
PROGRAM = """
import atexit, json, sys

path = sys.argv.pop(1)
own = lambda: [name for name in sys.modules if name.startswith("allyouneed")]
atexit.register(lambda: open(path, "w").write(json.dumps(own())))
from allyouneed.__main__ import main

main()
"""


def lines_by_package(source: Path) -> dict[str, int]:
    """Lines of Python of each package and each app; modules at the top count as one package."""
    found: Counter[str] = Counter()
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).parts
        depth = 2 if parts[0] == "apps" and len(parts) > 2 else 1
        found["/".join(parts[:depth]) if len(parts) > 1 else "(top)"] += len(path.read_text("utf-8").splitlines())
    return dict(sorted(found.items()))


def folders(source: Path) -> Iterator[tuple[str, int]]:
    """Folders by path, with the number of their entries."""
    for folder in [source, *sorted(path for path in source.rglob("*") if path.is_dir() and path.name != "__pycache__")]:
        name = folder.relative_to(source).as_posix()
        if name not in FLAT_LISTS:
            yield name, sum(entry.name not in PACKAGING for entry in folder.iterdir())


def repeated_classes(source: Path) -> dict[str, list[str]]:
    """Class names at the top of several modules, with these modules."""
    found: dict[str, list[str]] = {}
    for path in sorted(source.rglob("*.py")):
        for name in set(re.findall(r"^class (\w+)", path.read_text("utf-8"), re.MULTILINE)):
            found.setdefault(name, []).append(path.relative_to(source).as_posix())
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def modules_loaded(arguments: list[str], work: Path, source: Path) -> list[str]:
    """Modules of the package that are loaded when this command ends."""
    listed = work / "modules.json"
    run = [sys.executable, "-c", PROGRAM, str(listed), *arguments]
    subprocess.run(run, check=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(source.parent)})
    return list(json.loads(listed.read_text()))


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT)
    source = parser.parse_args().root.resolve() / "src" / "allyouneed"
    lines = lines_by_package(source)
    apps = sum(count for name, count in lines.items() if name.startswith("apps"))
    for name, count in lines.items():
        print(f"{name:<16} {count:>7,}")
    print(f"{'all':<16} {sum(lines.values()):>7,}\n{'without apps':<16} {sum(lines.values()) - apps:>7,}")
    crowded = [f"{name} ({count})" for name, count in folders(source) if count > MOST_ENTRIES]
    print(f"folders with more than {MOST_ENTRIES} entries: {len(crowded)}  {', '.join(crowded)}")
    repeated = repeated_classes(source)
    print(f"class names in several modules: {len(repeated)}  {', '.join(repeated)}")
    with tempfile.TemporaryDirectory() as work:
        for arguments in COMMANDS:
            count = len(modules_loaded(arguments, Path(work), source))
            print(f"modules loaded by `allyouneed {' '.join(arguments)}`: {count}")


if __name__ == "__main__":
    main()
