"""A missing optional package is noticed before work begins, with advice that works here."""

from __future__ import annotations

from pathlib import Path

import pytest

from allyouneed.cli import main
from allyouneed.errors import extras
from small_model import write_recipe


def test_the_advice_fits_a_clone_and_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    assert extras.install_hint("look") == "pip install 'allyouneed[look]'"
    (tmp_path / "pyproject.toml").touch()
    assert extras.install_hint("look") == f"pip install -e '{tmp_path}[look]'"
    monkeypatch.chdir(tmp_path)
    assert extras.install_hint("look") == "pip install -e '.[look]'"


def test_every_extra_is_one_of_the_project() -> None:
    declared = (extras.CLONE / "pyproject.toml").read_text("utf-8").split("[project.optional-dependencies]")[1]
    assert all(f"\n{extra} = [" in declared for extra in extras.EXTRAS)


@pytest.mark.parametrize(
    ("args", "extra"),
    [
        (["look", "pattern", "no such pattern", "-o", "a.png"], "look"),
        (["transcribe", "-m", "nowhere", "a.wav", "b.FLAC"], "sound"),
        (["transcribe", "-m", "nowhere", "-i", "list.txt"], "sound"),
        (["transcribe", "-m", "nowhere", "sounds"], "sound"),
        (["classify-image", "-m", "nowhere", "a.png"], "image"),
        (["match-image", "-m", "nowhere", "-t", "a cat", "a.png"], "image"),
        (["generate", "-m", "nowhere", "--index", "nowhere", "x"], "retrieval"),
        (["index", "nowhere.txt", "-e", "nowhere", "-o", "x"], "retrieval"),
        (["export", "nowhere", "x", "--to", "ctranslate2"], "ctranslate2"),
        (["bench", "nowhere", "--against", "ctranslate2"], "ctranslate2"),
        (["train", "recipe.yaml", "--set", "tensorboard=true"], "tensorboard"),
        (["init", "a.xlsx"], "xlsx"),
        (["init", "a.parquet"], "parquet"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_missing_package_is_reported_before_any_file_is_opened(
    args: list[str],
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.txt").write_text("a.wav\nb.mp3\n")
    Path("sounds").mkdir()
    Path("a.xlsx").touch()
    Path("a.parquet").touch()
    Path("sounds", "a.ogg").touch()
    write_recipe(tmp_path)
    module = extras.EXTRAS[extra][0]
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(SystemExit) as stopped:
        main(args)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.endswith(f" needs {module}: {extras.install_hint(extra)}\n"), said
    assert not Path("run").exists()
