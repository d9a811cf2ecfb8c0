"""Lessons: complete in both languages, and what they show exists in the bundled translator."""

from __future__ import annotations

from pathlib import Path

import pytest

import allyouneed as ayn
from allyouneed.apps.inspect.assets import LANGUAGES
from allyouneed.apps.inspect.offline import view_model
from allyouneed.apps.inspect.views import build_document, find_view
from allyouneed.apps.inspect.views.lessons import lessons
from allyouneed.apps.inspect.views.model import ViewModel
from allyouneed.cli import main
from allyouneed.cli.look.inside import EXAMPLE


@pytest.fixture(scope="module")
def model() -> ViewModel:
    return view_model(ayn.load("translator"))


def test_every_lesson_is_complete_in_both_languages() -> None:
    found = build_document("lessons", None)["data"]["lessons"]
    assert 10 <= len(found) <= 12 and len({one["name"] for one in found}) == len(found)
    for lesson in found:
        for field in ("title", "text", "try"):
            assert set(lesson[field]) == set(LANGUAGES) and all(lesson[field].values()), lesson["name"]
        assert len(lesson["text"]["en"]) == len(lesson["text"]["zh"])
        assert all(isinstance(value, str) for value in lesson["params"].values())  # as in a hash


@pytest.mark.parametrize("lesson", lessons(), ids=lambda one: one["name"])
def test_what_a_lesson_shows_can_be_computed(lesson: dict, model: ViewModel) -> None:
    assert lesson["view"] in {name for name, _ in lesson["requests"]}
    for name, asked in lesson["requests"]:
        found = build_document(name, model, text=EXAMPLE, **asked)
        assert found["view"] == name and found["data"]
        assert set(asked) <= set(find_view(name).request.model_fields)


def run(path: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["look", "lessons", "-o", str(path)])
    return int(ended.value.code or 0)


def test_the_command_writes_one_file_with_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lessons.html"
    assert run(path) == 0
    text = path.read_text(encoding="utf-8")
    for name in ("lessons", "walk", "mixing", "why", "what_if", "use"):
        assert f'"view":"{name}"' in text
    assert run(tmp_path / "no" / "lessons.html") == 2
    assert "no such folder" in capsys.readouterr().err
