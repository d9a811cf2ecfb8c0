"""The translator that comes with the package."""

import subprocess
import sys
from pathlib import Path

import pytest

import allyouneed as ayn
from allyouneed.models import shipped


@pytest.fixture(scope="module")
def model():
    return ayn.load()


def test_it_is_small_and_documents_its_data():
    folder = shipped()
    assert (folder / "model.safetensors").stat().st_size <= 25_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    for said in ("CC BY 2.0 FR", "Tatoeba", "limits", "tok:zh", "recipes/terms"):
        assert said in card


def test_the_running_example(model):
    found = model.translate("机器学习很有趣").lower()
    assert "machine learning" in found
    assert "interesting" in found


@pytest.mark.parametrize(
    ("text", "to", "words"),
    [
        ("Wo ist der Bahnhof?", None, {"station"}),
        ("Je voudrais un café, s'il vous plaît.", None, {"coffee"}),
        ("I like to eat apples.", "de", {"Äpfel"}),
        ("I like to eat apples.", "fr", {"pommes"}),
        ("I like to eat apples.", None, {"苹果"}),
        ("机器学习很有趣", "de", {"Lernen", "interessant"}),
    ],
)
def test_it_detects_the_source_and_takes_the_target(model, text, to, words):
    found = model.translate(text, to)
    assert all(word in found for word in words), found


def test_sentences_of_a_line_are_translated_one_by_one(model):
    alone = [model.translate(one, "de") for one in ("I got up at six.", "I had breakfast.", "I went to bed.")]
    assert model.translate("I got up at six. I had breakfast. I went to bed.", "de") == " ".join(alone)


def test_an_unknown_script_is_noted(model):
    (full,) = model.translate_full(["Где вокзал?"])
    assert any("not that of a known language" in note for note in full.notes)


def test_the_command_works_without_a_model_option(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "allyouneed", "translate", "机器学习很有趣"],
        capture_output=True, encoding="utf-8", cwd=tmp_path, check=True,
    )  # fmt: skip
    assert "machine learning" in done.stdout.lower()
    assert done.stderr == ""
