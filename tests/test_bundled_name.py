"""`translator` names the bundled model wherever a folder or a preset is expected; other names are explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.interop.load import about, load, vocabularies, weight_files
from allyouneed.models import shipped
from allyouneed.training import load_recipe

RECIPE = "start: translator\ndata: {train: {path: pairs.tsv, from: en, to: de}}\noutput: out\n"


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(arg) for arg in args])
    return int(stopped.value.code or 0)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_name_stands_for_the_folder() -> None:
    assert ayn.load("translator").folder.path == load(Path("translator")).path == shipped()
    assert about("translator") == about(shipped()) and weight_files("translator") == weight_files(shipped())
    assert vocabularies("translator").hash == vocabularies(shipped()).hash
    assert ayn.model_config("translator") == ayn.model_config(shipped())


def test_recipes_start_from_it_or_train_its_shape(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    (tmp_path / "tune.yaml").write_text(RECIPE)
    assert load_recipe("tune.yaml").start == shipped()
    (tmp_path / "new.yaml").write_text(RECIPE.replace("start", "model").replace(", from: en, to: de", ""))
    assert load_recipe("new.yaml").model_for(None).width == ayn.model_config("translator").width
    assert load_recipe("new.yaml", ["model.width=192"]).model_for(None).width == 192


def test_a_folder_of_that_name_takes_precedence(tmp_path: Path) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "pairs.tsv").write_text("a\tb\n")
    (recipes / "tune.yaml").write_text(RECIPE)
    (tmp_path / "translator").mkdir()  # in the working directory, not next to the recipe
    assert load_recipe(recipes / "tune.yaml").start == shipped()
    with pytest.raises(ayn.UserError, match=r"^translator: not a model folder"):
        ayn.load("translator")


def test_commands_take_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("describe", "translator") == 0 and "41,821,184 parameters" in capsys.readouterr().out
    assert run("models", "translator") == 0 and "41.8M" in capsys.readouterr().out
    (tmp_path / "pairs.tsv").write_text("Hello!\tHallo!\n")
    assert run("evaluate", "pairs.tsv", "-m", "translator", "--to", "de") == 0 and "BLEU" in capsys.readouterr().out
    assert run("quantize", "translator", "out", "--to", "int8") == 2 and "already stored" in capsys.readouterr().err
    (tmp_path / "in.txt").write_text("Hello!\n")
    assert run("translate", "-m", "translator", "--to", "de", "-i", "in.txt", "-o", "out.txt") == 0


@pytest.mark.parametrize(
    ("name", "explained"),
    [
        ("gpt2", ["gpt2: no such model folder", "preset", "without weights", "nothing is downloaded", "`model: gpt2`"]),
        ("translater", ["did you mean 'translator'?"]),
        ("google/gemma", ["google/gemma: no such model folder", "nothing is downloaded"]),
    ],
)
@pytest.mark.parametrize(
    "command", [["generate", "-m", "NAME", "hi"], ["export", "NAME", "out", "--to", "hf"], ["bench", "NAME"]]
)
def test_other_names_are_explained(
    command: list[str], name: str, explained: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*(name if word == "NAME" else word for word in command)) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in explained) and said.count("\n") == 1
