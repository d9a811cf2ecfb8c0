"""A model of several languages, trained from pairs that name theirs, and adapted to somebody's own pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from microrun import MODEL, RECIPE

import allyouneed as ayn
from allyouneed import models
from allyouneed.cli import main
from allyouneed.train import load_recipe, train
from allyouneed.train.log import read_log

LATIN, GREEK, CYRILLIC = "abcdefgh", "αβγδεζηθ", "абвгдежз"
WORDS = [
    "bad",
    "cafe",
    "dead",
    "face",
    "fade",
    "head",
    "bead",
    "cab",
    "gag",
    "hag",
    "ebb",
    "add",
    "beg",
    "chef",
    "deaf",
]


def into(text: str, letters: str) -> str:
    return text.translate(str.maketrans(LATIN, letters))


def write(path: Path, texts: list[str], letters: str) -> str:
    path.write_text("".join(f"{text}\t{into(text, letters)}\n" for text in texts), encoding="utf-8")
    return str(path)


def both_ways(path: str, there: str, **more: Any) -> list[dict[str, Any]]:
    straight = {"path": path, "from": "la", "to": there, **more}
    return [straight, straight | {"columns": [1, 0], "from": there, "to": "la"}]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latin ↔ Greek and Cyrillic letters, one for one; Cyrillic is rarer and read twice as often."""
    folder = tmp_path_factory.mktemp("letters")
    greek = both_ways(write(folder / "greek.tsv", [f"{a} {b}" for a in WORDS for b in WORDS], GREEK), "gr")
    cyrillic = both_ways(write(folder / "cyrillic.tsv", WORDS * 3, CYRILLIC), "cy", weight=2)
    rare = {"path": write(folder / "more.tsv", ["dab"], CYRILLIC), "from": "la", "to": "cy"}
    valid = [*both_ways(write(folder / "valid.tsv", ["dab", "hag bed"], GREEK), "gr"), rare]
    tree = RECIPE | {
        "model": MODEL | {"width": 32},
        "data": {"train": [*greek, *cyrillic], "valid": valid, "max_tokens": 48},
        "steps": 40,
        "validate": {"every": 20, "metric": "bleu", "sentences": 0},
        "decoding": {"beam": 1},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    train(load_recipe(folder / "recipe.yaml"))
    return folder


def test_the_folder_knows_its_languages(first: Path) -> None:
    model = ayn.load(first / "run" / "model")
    assert model.folder.directions == [("la", "gr"), ("gr", "la"), ("la", "cy"), ("cy", "la")]
    assert model.folder.detector.languages == ["cy", "gr", "la"]
    found = model.translate_full(["bad", "βαδ", "бад"])
    assert [one.route for one in found] == [["la", "gr"], ["gr", "la"], ["cy", "la"]]
    assert model.translate_full(["бад"], "gr")[0].route == ["cy", "la", "gr"]


def test_validation_tells_how_good_each_direction_is(first: Path) -> None:
    scores = [entry["valid"] for entry in read_log(first / "run" / "log.jsonl") if "valid" in entry]
    assert len(scores) == 2
    for found in scores:
        names = ["bleu/la-gr", "bleu/gr-la", "bleu/la-cy"]
        assert [name for name in found if "/" in name] == names
        assert found["bleu"] == pytest.approx(sum(found[name] for name in names) / 3)


def test_it_is_adapted_to_somebodys_own_pairs(first: Path, tmp_path: Path) -> None:
    """One direction only, of words it never saw; all it knew before is still in its folder."""
    path = write(tmp_path / "own.tsv", ["gad", "bah", "fab", "hed"] * 20, GREEK)
    tree = {
        "start": str(first / "run" / "model"),
        "data": {"train": {"path": path, "from": "la", "to": "gr"}, "max_tokens": 48},
        "batch": RECIPE["batch"],
        "schedule": {"kind": "constant", "peak": 0.005, "warmup": 5},
        "steps": 30,
        "save": {"every": 30, "keep": 1},
        "average": 0,
        "device": "cpu",
        "precision": "fp32",
        "output": str(tmp_path / "own"),
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(tree))
    result = train(load_recipe(tmp_path / "own.yaml"))
    losses = [entry["plain"] for entry in read_log(tmp_path / "own" / "log.jsonl") if entry.get("plain")]
    assert losses[-1] < 0.5 * losses[0]
    before, after = ayn.load(first / "run" / "model").folder, ayn.load(result.model).folder
    assert after.directions == before.directions
    assert after.detector.scores == before.detector.scores
    assert after.tokenizers.hash == before.tokenizers.hash


# --- the translator that comes with the package, here a toy one ------------------------------------------------------


@pytest.fixture
def packaged(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / models.TRANSLATOR).symlink_to(first / "run" / "model")
    monkeypatch.setattr(models, "HERE", tmp_path)
    return first / "run" / "model"


@pytest.mark.parametrize("options", [[], ["--to", "cy"], ["--to", "cy", "--from", "la"]])
def test_translate_needs_no_model(packaged: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    said = []
    for more in ([], ["--model", str(packaged)]):
        with pytest.raises(SystemExit) as stop:
            main(["translate", "bad cab", *options, *more])
        assert not stop.value.code
        said.append(capsys.readouterr())
    assert said[0] == said[1] and said[0].out.strip()
    keys = dict(zip(("to", "from_"), options[1::2], strict=False))
    assert said[0].out == ayn.load().translate("bad cab", **keys) + "\n"


def test_the_demo_shows_it_first(
    packaged: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from allyouneed import demo

    monkeypatch.setattr(demo, "SENTENCES", [("bad", None), ("бад", "gr")])
    demo.show_translator(packaged, Console(width=200))
    _, *shown, last = capsys.readouterr().out.strip().splitlines()
    model = ayn.load()
    assert shown == [
        f"  bad  →  {model.translate('bad')}  (la → gr)",
        f"  бад  →  {model.translate('бад', 'gr')}  (cy → la → gr)",
    ]
    assert last.endswith("allyouneed translate 'bad'")


def test_without_one_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "HERE", tmp_path)
    assert models.find() is None
    with pytest.raises(SystemExit) as stop:
        main(["translate", "bad"])
    assert stop.value.code == 2
    assert "name a model with --model FOLDER, or train one" in capsys.readouterr().err
