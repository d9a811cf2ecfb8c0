"""Commands of docs/compare.md that take too long to be run: they are parsed."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from allyouneed.cli import app

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS / "compare.md", DOCS / "zh" / "compare.md")


def commands(page):
    blocks = re.findall(r"^```text\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("allyouneed ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_documented_commands_are_understood(page):
    found = commands(page)
    assert {words[1] for words in found} == {"compare", "scaling", "evaluate", "train"}
    for name in {words[1] for words in found}:
        app.load(name)
    group = get_command(app)
    with group.make_context("allyouneed", ["models"], resilient_parsing=True) as context:
        for words in found:
            group.get_command(context, words[1]).make_context(words[1], words[2:], parent=context)


def test_both_pages_have_the_same_commands():
    assert commands(PAGES[0]) == commands(PAGES[1])
