"""docs/family.md says what was measured, of every preset there is."""

import json

import pytest

from allyouneed.config import preset_names
from family_table import PAGE, RESULTS, page, system_and_paper
from parity import TOLERANCE

MEASURED = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_made_of_the_results():
    assert PAGE.read_text(encoding="utf-8") == page(MEASURED)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_judge(name):
    system, paper = system_and_paper(name)
    assert paper
    assert [result for result in MEASURED if result["system"] == system], f"nothing was measured of {system}"


def test_nothing_is_farther_from_its_judge_than_allowed():
    assert all(result["outputs"] <= TOLERANCE and (result["gradients"] or 0) <= TOLERANCE for result in MEASURED)
