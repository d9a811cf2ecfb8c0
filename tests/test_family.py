"""docs/family.md reports the parity measurements of every preset."""

import json

import pytest

from allyouneed.config import preset_names
from family_table import PAGE, RESULTS, page, system_and_paper
from parity import TOLERANCE

MEASURED = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_page_is_generated_from_the_results():
    assert PAGE.read_text(encoding="utf-8") == page(MEASURED)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_reference(name):
    system, paper = system_and_paper(name)
    assert paper
    assert [result for result in MEASURED if result["system"] == system], f"no measurement of {system}"


def test_all_differences_are_within_tolerance():
    assert all(result["outputs"] <= TOLERANCE and (result["gradients"] or 0) <= TOLERANCE for result in MEASURED)
