"""Numbers of a text and its translation."""

from __future__ import annotations

import pytest

from allyouneed.apps.translate.numbers.numbers import differing_numbers, has_quantity


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("It costs 1,000.5 €.", "Es kostet 1.000,5 €."),
        ("1,500 meters", "1500米"),
        ("There are 3.5 million.", "有350万人。"),
        ("1000000 francs", "eine Million"),
        ("He has 20 books.", "他有二十本书。"),
        ("10,000 yen", "一万日元"),
        ("I have 21 dogs.", "J'ai vingt et un chiens."),
        ("It weighs 99 kg.", "Ça pèse quatre-vingt-dix-neuf kilos."),
        ("I have 2.", "Ich habe zwei."),
        ("in 1987", "neunzehnhundertsiebenundachtzig"),
        ("a hundred and one 101", "hunderteins 101"),
        ("at 2:30", "um halb drei"),
        ("at 8", "à 8 heures"),
        ("in the 1990s", "in den 90er Jahren"),
        ("March 31", "3月31日"),
        ("19e siècle 19", "XIX"),
        ("see https://x.com/123", "siehe https://x.com/124"),
        ("no numbers at all", "gar keine"),
    ],
)
def test_equal_numbers_are_accepted_in_any_notation(source: str, target: str) -> None:
    assert differing_numbers(source, target) == differing_numbers(target, source) == []


@pytest.mark.parametrize(
    ("source", "target", "found"),
    [
        ("In 1887.", "Im Jahr 187.", ["1887", "187"]),
        ("He has 20 books.", "他有30本书。", ["20", "30"]),
        ("He is here.", "Er ist seit 15 Jahren hier.", ["15"]),
        ("51.1 degrees", "51 Grad", ["51.1", "51"]),
        ("350万人", "350 million people", ["350万", "350 million"]),
        ("Is ten thousand yen enough?", "1000日元够不够？", ["1000"]),
    ],
)
def test_different_numbers_are_reported(source: str, target: str, found: list[str]) -> None:
    assert differing_numbers(source, target) == found


@pytest.mark.parametrize(
    ("quantity", "text", "there"),
    [
        ("5 kg", "Es wiegt fünf Kilogramm.", True),
        ("5 kg", "它重5公斤。", True),
        ("5 kg", "Es wiegt 5 Pfund.", False),
        ("5 kg", "Es wiegt 15 kg.", False),
        ("$1,000", "1.000 Dollar", True),
        ("20 %", "百分之二十", True),
    ],
)
def test_quantities(quantity: str, text: str, there: bool) -> None:
    assert has_quantity(quantity, text) is there
