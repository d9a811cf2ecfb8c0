"""A multilingual model trained on pairs with language tags, and fine-tuned on other pairs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import allyouneed as ayn
from allyouneed import models
from allyouneed.cli import main
from allyouneed.errors import UserError
from allyouneed.infer.evaluate import evaluate
from allyouneed.training import load_recipe, train
from allyouneed.training.reporting.log import read_log
from micro_run import MODEL, RECIPE

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


def test_validation_scores_each_direction(first: Path) -> None:
    scores = [entry["valid"] for entry in read_log(first / "run" / "log.jsonl") if "valid" in entry]
    assert len(scores) == 2
    for found in scores:
        names = ["bleu/la-gr", "bleu/gr-la", "bleu/la-cy"]
        assert [name for name in found if "/" in name] == names
        assert found["bleu"] == pytest.approx(sum(found[name] for name in names) / 3)


def test_fine_tuning_keeps_the_languages_it_does_not_see(first: Path, tmp_path: Path) -> None:
    """One direction only, of words it never saw; all it knew before is still in its folder."""
    path = write(tmp_path / "own.tsv", ["gad", "bah", "fab", "hed"] * 20, GREEK)
    own = {"path": path, "from": "la", "to": "gr"}
    longer: Any = {"steps": 30, "save": {"every": 30, "keep": 1}}
    rate = {"kind": "constant", "peak": 0.005, "warmup": 5}
    recipe = adapting(tmp_path, first / "run" / "model", own, schedule=rate, **longer)
    result = train(load_recipe(recipe))
    losses = [entry["plain"] for entry in read_log(tmp_path / "own" / "log.jsonl") if entry.get("plain")]
    assert losses[-1] < 0.5 * losses[0]
    before, after = ayn.load(first / "run" / "model").folder, ayn.load(result.model).folder
    assert after.directions == before.directions
    assert after.detector.scores == before.detector.scores
    assert after.tokenizers.hash == before.tokenizers.hash


def adapting(folder: Path, start: Path, *train: dict[str, Any], **more: Any) -> Path:
    tree = {
        "start": str(start),
        "data": {"train": list(train), "max_tokens": 48},
        "batch": RECIPE["batch"],
        "steps": 1,
        "save": {"every": 1, "keep": 1},
        "average": 0,
        "device": "cpu",
        "precision": "fp32",
        "output": str(folder / "own"),
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(tree | more))
    return folder / "own.yaml"


def test_pairs_without_languages_are_rejected(first: Path, tmp_path: Path) -> None:
    path, start = write(tmp_path / "own.tsv", WORDS, GREEK), first / "run" / "model"
    said = {"path": path, "from": "la", "to": "gr"}
    with pytest.raises(UserError) as refused:
        load_recipe(adapting(tmp_path, start, said, {"path": path}))
    where = f"data.train[1] ({path}): set `from:` and `to:`; "
    assert where in str(refused.value) and str(refused.value).endswith("(cy, gr, la)")
    with pytest.raises(UserError, match="set `from:`; "):
        load_recipe(adapting(tmp_path, start, {"path": path, "to": "gr"}))
    both = {"train": [said], "valid": {"path": path}, "test": {"path": path}, "max_tokens": 48}
    with pytest.raises(UserError, match=r"2 problems\n  data\.valid\[0\].*\n  data\.test\[0\]"):
        load_recipe(adapting(tmp_path, start, data=both))
    assert load_recipe(adapting(tmp_path, start, said)).start == start


def test_an_unknown_target_language_is_rejected(first: Path, tmp_path: Path) -> None:
    path, start = write(tmp_path / "own.tsv", WORDS, GREEK), first / "run" / "model"
    with pytest.raises(UserError) as refused:
        load_recipe(adapting(tmp_path, start, {"path": path, "from": "la", "to": "ja"}))
    message = str(refused.value)
    assert f"data.train[0] ({path}): `to: ja`" in message and "(languages: cy, gr, la). Choose one of them" in message
    with pytest.raises(UserError, match=r"`to: grr` \(did you mean 'gr'\?\)"):
        load_recipe(adapting(tmp_path, start, {"path": path, "from": "la", "to": "grr"}))


def test_languages_of_a_recipe_become_the_codes_of_its_start_model(first: Path, tmp_path: Path) -> None:
    path, start = write(tmp_path / "own.tsv", WORDS, GREEK), first / "run" / "model"
    plain = load_recipe(adapting(tmp_path, start, {"path": path, "from": "la", "to": "gr"}))
    named = load_recipe(adapting(tmp_path, start, {"path": path, "from": "Latin", "to": "GR"}))
    assert named == plain
    assert load_recipe(adapting(tmp_path, start, {"path": path, "from": "拉丁语", "to": "gr"})) == plain


@pytest.mark.parametrize(("title", "licence"), [("# Letters", "CC0"), ("# Letters", None), (None, None)])
def test_the_model_card_names_the_start_model(
    first: Path, tmp_path: Path, title: str | None, licence: str | None
) -> None:
    start = shutil.copytree(first / "run" / "model", tmp_path / "letters")
    lines = [title or "", "", *([f"- licence of the weights: {licence}"] if licence else [])]
    (start / "README.md").write_text("\n".join([*lines, "", "## Recipe", "", "licence: not this one", ""]))
    path = write(tmp_path / "own.tsv", WORDS, GREEK)
    result = train(load_recipe(adapting(tmp_path, start, {"path": path, "from": "la", "to": "gr"})))
    name = "letters" if title is None else "Letters"
    wanted = f"\n- started from {name} (licence {licence or 'not stated'})\n"
    assert wanted in (result.model / "README.md").read_text()


# --- a file that does not say which way it goes ----------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return int(stop.value.code or 0), *capsys.readouterr()


@pytest.mark.parametrize(("letters", "there"), [(GREEK, "gr"), (CYRILLIC, "cy")])
def test_evaluate_finds_the_direction(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], letters: str, there: str
) -> None:
    words = ["evaluate", write(tmp_path / "test.tsv", WORDS, letters), "--model", first / "run" / "model", "--json"]
    code, out, note = told(capsys, *words)
    assert code == 0 and f"note: detected direction la → {there}" in note
    assert (0, out) == told(capsys, *words, "--to", there, "--from", "la")[:2]
    assert "detected direction" not in told(capsys, *words, "--to", there)[2]


def test_quantize_finds_the_direction(first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "test.tsv", WORDS, CYRILLIC)
    words = ["quantize", first / "run" / "model", tmp_path / "small", "--to", "bf16", "--limit", 100, "--data", data]
    code, _, said = told(capsys, *words)
    assert code == 0 and f"note: {data}: detected direction la → cy" in said
    model = ayn.load(first / "run" / "model")
    scored = evaluate(model, data)[0]
    assert scored.figures == evaluate(model, data, to="cy", from_="la")[0].figures
    assert scored.figures != evaluate(model, data, to="gr", from_="la")[0].figures


def test_without_a_detector_the_directions_are_named(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ayn.load(first / "run" / "model").folder
    folder.detector = None
    folder.save(tmp_path / "deaf")
    data = write(tmp_path / "test.tsv", WORDS[:3], CYRILLIC)
    for words, options, way in (
        (["evaluate", data, "--model", tmp_path / "deaf"], "--from and --to", "--to"),
        (
            ["quantize", tmp_path / "deaf", tmp_path / "q", "--to", "bf16", "--data", data],
            "--from and --into",
            "--into",
        ),
    ):
        code, _, said = told(capsys, *words)
        assert code == 2 and "la → gr, gr → la, la → cy, cy → la" in said and f"set one with {options}" in said
        more = [] if words[0] == "evaluate" else ["--limit", 100]
        assert told(capsys, *words, way, "cy", *more)[0] == 0


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

    import allyouneed.cli.tour as demo

    monkeypatch.setattr(demo, "SENTENCES", [("bad", None), ("бад", "gr")])
    demo.show_translator(packaged, Console(width=200))
    _, *shown, last = capsys.readouterr().out.strip().splitlines()
    model = ayn.load()
    assert shown == [
        f"  bad  →  {model.translate('bad')}  (la → gr)",
        f"  бад  →  {model.translate('бад', 'gr')}  (cy → la → gr)",
    ]
    assert last.endswith("allyouneed translate 'bad'")


def test_without_a_shipped_model_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "HERE", tmp_path)
    assert models.find() is None
    with pytest.raises(SystemExit) as stop:
        main(["translate", "bad"])
    assert stop.value.code == 2
    assert "set --model FOLDER, or train one" in capsys.readouterr().err
