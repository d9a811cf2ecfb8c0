"""Numbers of a text and its translation."""

from __future__ import annotations

import pytest

from allyouneed.apps.translate.numbers.amounts import expanded
from allyouneed.apps.translate.numbers.numbers import differing_numbers, has_quantity, translated_amount
from allyouneed.apps.translate.spans.spans import protect


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
        ("$1", "1,2 Milliarden Menschen leben von weniger als 1,2 Milliarden Dollar am Tag.", False),
        ("$1", "1,2 Milliarden Menschen leben von weniger als einem Dollar am Tag.", True),
        ("$1", "Eine Milliarde Menschen hat 5 Dollar.", False),
        ("5 kg", "5 Leute wiegen 7 Kilogramm.", False),
        ("€16 billion", "16 Milliarden €", True),
        ("€16 billion", "16 Millionen €", False),
        ("€16 billion", "160亿欧元", True),
        ("三亿", "three hundred million", True),
        ("三亿", "three billion", False),
    ],
)
def test_quantities(quantity: str, text: str, there: bool) -> None:
    assert has_quantity(quantity, text) is there


@pytest.mark.parametrize(
    ("text", "direction", "reading", "target"),
    [
        ("€16bn", "en-de", "€16 billion", "16 Milliarden €"),
        ("€16bn", "en-fr", "€16 billion", "16 milliards d’€"),
        ("$2.5tn", "en-zh", "$2.5 trillion", "2.5万亿美元"),
        ("£3k", "en-de", "£3,000", "3.000 £"),
        ("$5m", "en-zh", "$5 million", "500万美元"),
        ("$90-million", "en-de", "$90 million", "90 Millionen $"),
        ("360 $ Millionen", "de-en", "360 Millionen $", "$360 million"),
        ("US$7.4 billion", "en-zh", "US$7.4 billion", "74亿美元"),
        ("3,5 Mio.", "de-en", "3,5 Millionen", "3.5 million"),
        ("16 Mrd. €", "de-fr", "16 Milliarden €", "16 milliards d’€"),
        ("5 M€", "fr-en", "5 millions de €".replace("de €", "d’€"), "€5 million"),
        ("3亿", "zh-en", "3亿", "300 million"),
        ("1.2万亿", "zh-de", "1.2万亿", "1,2 Billionen"),
        ("三亿五千万", "zh-en", "三亿五千万", "350 million"),
        ("2 billions", "fr-de", "2 billions", "2 Billionen"),
        ("1,25 Milliarden", "de-zh", "1,25 Milliarden", "12.5亿"),
    ],
)
def test_amounts_are_read_and_written_in_words(text: str, direction: str, reading: str, target: str) -> None:
    (span,) = protect(f" {text} x").spans.values()
    assert (span.text, span.kind.name) == (text, "amount")
    here, there = direction.split("-")
    assert (expanded(text, here), translated_amount(text, here, there)) == (reading, target)


@pytest.mark.parametrize(
    "text", ["in 5 m", "a 10k run", "3 MB", "5 mm", "千万不要", "万一", "MD 20", "16 bnx", "T5 billionaire"]
)
def test_what_only_looks_like_an_amount_is_none(text: str) -> None:
    assert "amount" not in {span.kind.name for span in protect(text).spans.values()}


def test_numbers_of_any_length_are_read() -> None:
    for long in ("1" + "0" * 400, "9" * 5000 + " kg", "一" * 5000, "十" * 5000):
        assert isinstance(differing_numbers(long, "x"), list)
        assert differing_numbers("5", long)
        has_quantity(long, "5 kg"), has_quantity("5 kg", long)
