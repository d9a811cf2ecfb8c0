"""A translation memory: the same is taken, the like is offered, and TMX is read and written."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

import allyouneed as ayn
from allyouneed.apps.translate.documents.formats import read_document
from allyouneed.apps.translate.documents.memory import TranslationMemory
from allyouneed.cli import main
from allyouneed.errors import UserError

TMX = """<?xml version="1.0"?>
<tmx version="1.4"><header srclang="en"/><body>
<tu><tuv xml:lang="en-US"><seg>The <bpt i="1">&lt;b></bpt>red<ept i="1">&lt;/b></ept> car is fast.</seg></tuv>
 <tuv xml:lang="de"><seg>Flott ist der <bpt i="1">&lt;b></bpt>rote<ept i="1">&lt;/b></ept> Wagen.</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>Good morning to all of you.</seg></tuv>
 <tuv xml:lang="de"><seg>Moin, ihr &amp; alle.</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>Good morning to all of you.</seg></tuv><tuv xml:lang="de"><seg>Later</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>Alone</seg></tuv></tu>
</body></tmx>"""


def memory() -> TranslationMemory:
    return TranslationMemory.parse(TMX.encode())


def test_the_same_sentence_is_taken_in_both_directions_the_first_one_of_several() -> None:
    found = memory().find(" Good morning to all of you.\n", "English", "de-DE")
    assert found is not None and (found.target, found.likeness) == (" Moin, ihr & alle.\n", 1.0)
    back = memory().find("Moin, ihr & alle.", "de", "en")
    assert back is not None and back.target == "Good morning to all of you."
    assert memory().find("Good morning to all of you.", "en", "fr") is None
    assert memory().find("Alone", "en", "de") is None and memory().find("x", None, "de") is None


def test_a_sentence_with_tags_keeps_the_tags_of_its_document() -> None:
    page = read_document('<p>The <b class="x">red</b> car is fast.</p>', "html")
    found = memory().find(page.units[0].passage, "en", "de")
    assert found is not None and page.write([found.target]) == '<p>Flott ist der <b class="x">rote</b> Wagen.</p>'
    other = read_document("<p>The <b><i>red</i></b> car is fast.</p>", "html").units[0].passage
    near = memory().find(other, "en", "de")
    assert near is not None and near.likeness < 1, "its tags are others"


def test_a_like_sentence_is_offered_and_an_unlike_one_is_not() -> None:
    found = memory().find("Good evening to all of you.", "en", "de")
    assert found is not None and 0.75 <= found.likeness < 1 and "Moin, ihr & alle." in found.note
    assert memory().find("Where is the station?", "en", "de") is None


def test_what_is_added_is_written_as_tmx_and_read_again() -> None:
    page = read_document("<p>A <b>new</b> car &amp; more</p><p>12</p>", "html")
    saved = memory()
    saved.add([unit.passage for unit in page.units], ["Ein neuer Wagen".join(page.units[0].marks)], "en", "de")
    again = TranslationMemory.parse(saved.write().encode())
    assert again.units == saved.units and len(again.units) == 4
    ElementTree.fromstring(saved.write())
    found = again.find(page.units[0].passage, "en", "de")
    assert found is not None and page.write([found.target]) == "<p><b>Ein neuer Wagen</b></p><p>12</p>"
    saved.add(["Good morning to all of you."], ["Guten Tag"], "en", "de")
    assert len(saved.units) == 4, "what is known stays"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"<a/>", "not TMX: there is no <tmx>"), (b"<tmx>", "has no end"), (b"\xff", r"not UTF-8 \(byte 0\)")],
)
def test_what_is_no_memory_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TranslationMemory.parse(content)


def test_the_command_reads_and_writes_memories_and_keeps_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.tmx").write_text(TMX)
    page, out, saved = tmp_path / "a.html", tmp_path / "b.html", tmp_path / "new.tmx"
    page.write_text("<p>The <b>red</b> car is fast.</p><p>Good morning to all of us.</p><p>I like Red Square.</p>")
    arguments = [str(page), str(out), "--format", "auto", "--to", "de", "--memory", str(tmp_path / "m.tmx")]
    with pytest.raises(SystemExit, match="0"):
        main(["translate", *arguments, "--save-memory", str(saved), "--keep", "Red Square"])
    assert out.read_text().startswith("<p>Flott ist der <b>rote</b> Wagen.</p>") and "Red Square" in out.read_text()
    assert "the memory has 'Good morning to all of you.' (83% alike): 'Moin, ihr & alle.'" in capsys.readouterr().err
    assert len(TranslationMemory.read(saved).units) == 3
    with pytest.raises(SystemExit, match="2"):
        main(["translate", "Hi", "--save-memory", str(saved)])
    assert "--save-memory is for documents" in capsys.readouterr().err


def test_the_translator_asks_the_memory_first() -> None:
    model = ayn.load()
    both = model.translate_full(["Good morning to all of you.", "The car is red."], "de", memory=memory())
    assert [one.text for one in both] == ["Moin, ihr & alle.", "Das Auto ist rot."]
    assert both[0].route == ["en", "de"]
