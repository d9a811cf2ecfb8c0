"""`allyouneed look …`: pages from the command line, and one message with exit code 2 for every mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from allyouneed import load
from allyouneed.cli import main
from served import write_folder

DATA = re.compile(r'<script type="application/json" id="documents">(.*?)</script>', re.DOTALL)
TEXT = "a cat sat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("look") / "translator", "translator", max_tokens=16)


def run(folder: Path, page: Path, command: str, *more: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["look", command, *more, "-m", str(folder), "--device", "cpu", "-o", str(page), "--quiet"])
    return int(ended.value.code or 0)


def documents(page: Path) -> list[dict]:
    found = DATA.search(page.read_text(encoding="utf-8"))
    assert found
    return json.loads(found[1])["documents"]


def test_inside_writes_every_view_of_a_sentence_and_what_clicks_lead_to(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run(folder, page, "inside", TEXT, "--target", "a") == 0
    found = documents(page)
    assert list(dict.fromkeys(one["view"] for one in found)) == ["walk", "truth", "mixing", "why", "what_if", "value"]
    walk = found[0]["data"]
    tokens = max(map(len, walk["tokens"].values()))
    assert {one["request"]["position"] for one in found if one["view"] == "walk"} == set(range(tokens))
    assert {one["request"]["site"] for one in found if one["view"] == "value"} == {box["name"] for box in walk["boxes"]}
    assert {one["request"]["answer"] for one in found if one["view"] == "why"} == set(range(len(walk["answers"])))
    masked = [one["request"]["mask"] for one in found if one["view"] == "what_if" and one["request"]["mask"]]
    assert masked == [[n] for n in range(len(walk["tokens"]["encoder"]))]


def test_a_notebook_object_has_the_same_documents(folder: Path, tmp_path: Path) -> None:
    page = load(folder).look(TEXT, "mixing", site="decoder.0.cross")
    assert page.documents[0]["data"]["site"] == "decoder.0.cross" and "mixing" in repr(page)
    assert documents(page.save(tmp_path / "page.html")) == page.documents


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["walk", ""], "the text is empty"),
        (["walk", "cat " * 40], "tokens; at most 16 can be shown, shorten it"),
        (["mixing", TEXT, "--site", "decoder.9.mixer"], "decoder.9.mixer"),
        (["mixing", TEXT, "--head", "99"], "99"),
        (["why", TEXT, "--answer", "999"], "999"),
        (["why", TEXT, "--method", "guess"], "method: Input should be 'causal'"),
        (["what-if", TEXT, "--ablate", "decoder.7"], "decoder.7"),
        (["what-if", TEXT, "--ablate", "decoder.0.mixer.heads[99]"], "99"),
        (["what-if", TEXT, "--mask", "77"], "77"),
        (["what-if", TEXT, "--edit", "encoder.0=1"], "expected SITE[I,J]=NUMBER"),
        (["what-if", TEXT, "--edit", "encoder.0[1,2]=x"], "'x' is not a number"),
        (["what-if", TEXT, "--place", "a,b"], "expected integers"),
        (["what-if", TEXT, "--patch", "encoder.0"], "expected SITE=TEXT"),
    ],
)
def test_a_mistake_is_one_message(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], said: str
) -> None:
    page = tmp_path / "page.html"
    assert run(folder, page, *command) == 2
    error = capsys.readouterr().err
    assert error.startswith("allyouneed: ") and error.count("\n") == 1 and said in error
    assert not page.exists()


@pytest.mark.parametrize(
    ("model", "page", "said"),
    [("nowhere", "page.html", "nowhere"), ("", "page.pdf", "an .html file"), ("", "no/page.html", "no such folder")],
)
def test_a_wrong_path_is_one_message(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, page: str, said: str
) -> None:
    assert run(Path(model) if model else folder, tmp_path / page, "walk", TEXT) == 2
    error = capsys.readouterr().err
    assert error.startswith("allyouneed: ") and error.count("\n") == 1 and said in error
