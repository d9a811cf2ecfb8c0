"""Benchmarks are found where documentation, comments and other benchmarks say they are."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "bench"
FOLDERS = ("bench", "docs", "recipes", "src", "tests")
SUFFIXES = {".py", ".md", ".sh", ".yaml", ".toml"}


def test_every_path_of_a_benchmark_that_is_named_somewhere_exists():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    files += [ROOT / name for name in ("Makefile", "pyproject.toml", "README.md", "README.zh.md")]
    missing = {
        (str(file.relative_to(ROOT)), path)
        for file in files
        for path in re.findall(r"\bbench/[\w/.-]*\w\.(?:py|sh)\b", file.read_text(encoding="utf-8"))
        if not (ROOT / path).exists()
    }
    assert not missing


def test_what_benchmarks_import_from_each_other_exists_and_scripts_find_it():
    for file in [*BENCH.rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        text = file.read_text(encoding="utf-8")
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        imports = [node for node in imports if (node.module or "").startswith("bench.")]
        for node in imports:
            place = ROOT / node.module.replace(".", "/")
            assert place.is_dir() or place.with_suffix(".py").is_file(), (file, node.module)
        if imports and 'if __name__ == "__main__"' in text:
            assert "sys.path.append(str(Path(__file__).parents[2]))" in text, file


def test_the_readme_of_the_benchmarks_lists_every_file():
    page = (BENCH / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([\w/]+\.(?:py|sh))`", page, re.MULTILINE))
    files = {path for path in BENCH.rglob("*") if path.suffix in (".py", ".sh") and "quality" not in path.parts}
    assert listed == {str(path.relative_to(BENCH)) for path in files} - {"__init__.py"}
