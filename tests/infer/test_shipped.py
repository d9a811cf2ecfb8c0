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


def test_it_is_small_and_says_where_it_comes_from():
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
def test_it_knows_what_it_reads_and_goes_where_it_is_told(model, text, to, words):
    found = model.translate(text, to)
    assert all(word in found for word in words), found


def test_sentences_of_a_line_are_translated_one_by_one(model):
    alone = [model.translate(one, "de") for one in ("I got up at six.", "I had breakfast.", "I went to bed.")]
    assert model.translate("I got up at six. I had breakfast. I went to bed.", "de") == " ".join(alone)


def test_a_script_it_does_not_know_is_said(model):
    (full,) = model.translate_full(["Где вокзал?"])
    assert any("none of its languages" in note for note in full.notes)


def test_the_command_needs_no_model_named(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "allyouneed", "translate", "机器学习很有趣"],
        capture_output=True, encoding="utf-8", cwd=tmp_path, check=True,
    )  # fmt: skip
    assert "machine learning" in done.stdout.lower()
    assert done.stderr == ""
