"""Picture files: whole, of the kind their name says, the same each time."""

import re
import sys

import pytest

import warm_python
from allyouneed.apps.inspect.pictures import pattern, positions
from allyouneed.apps.inspect.pictures.figure import save
from allyouneed.errors import UserError
from allyouneed.errors.extras import install_hint

BEGINS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def some():
    drawn = positions.panels(["sinusoidal", "buckets"], positions.Sizes(12, 16, 2))
    return pattern.panels(["causal & window(3)"]) + drawn


@pytest.mark.parametrize("suffix", BEGINS)
def test_files_have_their_format_and_are_reproducible(tmp_path, suffix):
    for name in ("one", "two"):
        save(some(), tmp_path / f"{name}{suffix}")
    one, two = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "two"))
    assert one.startswith(BEGINS[suffix]) and one == two
    assert len(list(tmp_path.iterdir())) == 2, "nothing is left beside them"


def test_titles_and_notes_are_in_the_picture(tmp_path):
    save(some(), tmp_path / "all.svg")
    text = (tmp_path / "all.svg").read_text("utf-8")
    for said in ("causal &amp; window(3)", "query", "key", "position", "dimension", "bias", "learned: random weights"):
        assert f"<!-- {said}" in text.replace("\n", " ") or said in text, said


def test_a_name_that_cannot_be_is_refused(tmp_path):
    for path, said in (
        (tmp_path / "a.jpg", r"allowed: .png, .svg, .pdf"),
        (tmp_path / "no" / "a.png", "does not exist; create it first"),
    ):
        with pytest.raises(UserError, match=said):
            save(some(), path)
    (tmp_path / "b.png").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        save(some(), tmp_path / "b.png")


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=re.escape(f"needs matplotlib: {install_hint('look')}")):
        save(some(), tmp_path / "a.png")


def test_matplotlib_is_loaded_when_there_is_something_to_draw():
    program = (
        "import sys\n"
        "from allyouneed.apps.inspect.pictures import canvas, figure, pattern, positions\n"
        "from allyouneed.apps.inspect.reference import models, pages\n"
        "canvas.draw(pattern.panels(['causal']) + positions.panels(['alibi'], positions.Sizes()), 80)\n"
        "assert 'matplotlib' not in sys.modules"
    )
    assert warm_python.run([sys.executable, "-c", program]).returncode == 0
