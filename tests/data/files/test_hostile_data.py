"""Files made to do harm: bombs of every kind, headers that lie, views and arrays without end, devices in the place of
files. Each is refused with one message that says why, or read as far as it is there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import hostile_data
import warm_python
from allyouneed.config import parse
from allyouneed.data.files.readers import Files, Report

SECONDS = 300
HALF = '{"text": "\\ud800", "label": "a", "prompt": "\\ud800", "chosen": "\\ud800", "rejected": "b"}\n'


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What came of each file, by its name."""
    folder = tmp_path_factory.mktemp("hostile")
    paths = os.pathsep.join([*sys.path, str(Path(hostile_data.__file__).parent)])
    ended = warm_python.run(
        [sys.executable, hostile_data.__file__, str(folder)],
        capture_output=True,
        timeout=SECONDS,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    return dict(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize(("name", "said"), [(name, said) for name, _, said in hostile_data.MADE])
def test_a_hostile_file_is_refused_or_read_as_far_as_it_is_there(
    name: str, said: str, messages: dict[str, str]
) -> None:
    found = messages.get(name, f"{name}: {said}")  # its library is not installed
    assert said in found and len(found.splitlines()) == 1
    assert name in found or found.startswith("read ")


@pytest.mark.parametrize("kind", ["labelled", "text", "prompts", "comparisons"])
def test_half_a_character_is_reported_by_its_row(kind: str, tmp_path: Path) -> None:
    """Such a text cannot be encoded, so that a tokenizer would fail far from the file."""
    path = tmp_path / "a.jsonl"
    path.write_text(HALF + HALF.replace("\\ud800", "\\ud83d\\ude00 good"))
    part, report = Files.find(kind), Report()
    assert part is not None
    (found,) = parse(part, {"path": str(path)}).read(report)
    assert "😀 good" in " ".join(found.texts) and report.broken == 1
    assert "a.jsonl:1: " in report.text() and "surrogate" in report.text()
