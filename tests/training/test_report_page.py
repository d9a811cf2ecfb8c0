"""At the end of a run, a page says what it did: one file, no network, any task."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from allyouneed.data.files.readers import Report
from allyouneed.folder import Folder
from allyouneed.training import train
from allyouneed.training.reporting.page import CURVES, PAGE, RunFacts, confusion, curves, picture, write_page
from browser import Tab, chromium
from micro_run import Listener, Make

SAMPLES = [{"text": f"text {n} <b>", "expected": "ab"[n % 2], "found": "ab"[n % 3 == 0]} for n in range(90)]
SCORES = [("valid", "", {"accuracy": 50.0}), ("valid", "always 'a'", {"accuracy": 60.0})]
RUN = RunFacts(
    "a </script><script>run", {"task": "classification"}, ["accuracy"], {"accuracy": True}, SCORES, SAMPLES,
    ["a", "b"], Report(read=100), "seed: 1\n",
)  # fmt: skip


def content(page: Path) -> dict[str, Any]:
    found = re.search(
        r'<script id="content" type="application/json">(.*?)</script>', page.read_text("utf-8"), re.DOTALL
    )
    assert found is not None
    tree: dict[str, Any] = json.loads(found[1])
    return tree


def test_the_page_holds_what_the_run_was(tmp_path: Path) -> None:
    found = content(write_page(tmp_path, RUN))
    assert found["title"] == RUN.title, "texts of the data do not end the script"
    assert found["counts"] == {"wrong": 45, "right": 45} and found["confusion"]["labels"] == ["a", "b"]
    assert found["scores"][1] == ["valid", "always 'a'", {"accuracy": 60.0}]
    assert len(found["examples"]["wrong"]) == 20 and all(
        one["expected"] != one["found"] for one in found["examples"]["wrong"]
    )
    assert found["data"]["read"] == 100 and found["recipe"] == "seed: 1\n"


def test_images_that_are_files_are_shown(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("RGB", (300, 200), (200, 10, 10)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    names = [str(tmp_path / "a.png"), str(tmp_path / "b.png"), "train.npz, image 3"]
    samples = [{"image": name, "expected": "a", "found": "b"} for name in names]
    found = content(write_page(tmp_path, replace(RUN, samples=samples)))["examples"]["wrong"]
    assert [one["image"] for one in found] == names
    assert [one.get("picture", "")[:23] for one in found] == ["data:image/jpeg;base64,", "", ""]


def test_figures_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    nan = replace(RUN, scores=[("valid", "", {"auc": float("nan"), "loss": 1.0})])
    assert content(write_page(tmp_path, nan))["scores"] == [["valid", "", {"loss": 1.0}]]


def test_confusions_count_every_class_once() -> None:
    pairs = [("a", "a"), ("a", "b"), ("b", "b"), ("a", "a")]
    assert confusion(pairs, ["a", "b", "c"]) == {"labels": ["a", "b"], "rows": [[2, 1], [0, 1]], "left_out": 1}
    assert confusion([("two words", "other")], ["a", "b"]) is None, "answers of other tasks are no classes"


def test_the_picture_draws_every_curve_of_several_points() -> None:
    points = {"train loss": [(1, 4.0), (2, 2.0), (3, 1.0)], "valid a<b": [(1, 5.0), (3, 5.0)], "once": [(1, 1.0)]}
    root = ElementTree.fromstring(picture(points))
    space = "{http://www.w3.org/2000/svg}"
    lines = [line.attrib["points"].split() for line in root.iter(f"{space}polyline")]
    assert lines[0] == ["80.0,30.0", "350.0,103.3", "620.0,140.0"] and len(lines) == 2 and len(lines[1]) == 2
    said = [text.text for text in root.iter(f"{space}text")]
    assert {"train loss", "valid a<b", "4", "1", "5"} <= set(said) and "once" not in said
    assert not list(ElementTree.fromstring(picture({})))


def test_curves_are_means_of_steps_and_all_figures_of_validations() -> None:
    entries: list[dict[str, Any]] = [{"step": n, "loss": float(n)} for n in range(1, 801)]
    entries += [{"step": 801, "loss": None}, {"step": 800, "valid": {"loss": 2.0, "auc": float("nan")}}]
    found = curves(entries)
    assert len(found["train loss"]) == 400 and found["train loss"][0] == (2, 1.5)
    assert found["valid loss"] == [(800, 2.0)] and "valid auc" not in found


def test_every_run_ends_with_a_page(make: Make, listener: Listener) -> None:
    recipe = make(valid=True, test=True, steps=4, validate={"every": 2, "metric": "bleu"}, decoding={"beam": 1})
    result = train(recipe, console=listener.console)
    found = content(recipe.output / PAGE)
    assert f"a report is in {recipe.output / PAGE}" in listener.text
    assert [(split, name) for split, name, _ in found["scores"]] == [
        (split, name) for split in ("valid", "test") for name in ("", "the source, unchanged", "nothing")
    ]
    assert sum(found["counts"].values()) == 10, "every example of the test set was predicted"
    assert (
        found["curves"].keys() >= {"train loss", "valid loss", "valid bleu"} and len(found["curves"]["train loss"]) == 4
    )
    card = Folder.load(result.model).card
    assert f"[{PAGE}](../{PAGE})" in card and f"[{CURVES}](../{CURVES})" in card
    assert "polyline" in (recipe.output / CURVES).read_text(encoding="utf-8")
    assert f"[{PAGE}](../{PAGE})" in Folder.load(result.model).card
    train(recipe, fresh=True, console=listener.console)


def test_a_page_that_cannot_be_written_loses_no_result(
    make: Make, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Path:
        raise OSError("no space left")

    monkeypatch.setattr("allyouneed.training.finish.write_page", failing)
    recipe = make(steps=2)
    train(recipe, console=listener.console)
    assert "warning: writing the report failed (OSError: no space left)" in listener.text
    assert (recipe.output / "result.json").exists()


def test_a_browser_shows_the_page_in_both_languages(tmp_path: Path) -> None:
    with chromium() as browser:
        tab = Tab(browser, "file://")
        tab.page.goto(write_page(tmp_path, RUN).as_uri())
        assert tab.page.title() == RUN.title and tab.page.locator("h1").inner_text() == RUN.title
        assert "Confusion of classes" in tab.page.inner_text("main") and "text 0 <b>" in tab.page.inner_text("main")
        tab.page.click("#language")
        assert "混淆矩阵" in tab.page.inner_text("main")
        assert not tab.problems
