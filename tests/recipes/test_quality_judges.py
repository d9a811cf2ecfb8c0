"""bench/translation/quality: judges of translations that have no reference accept what is right and nothing else."""

import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "recipes" / "translator"))
    monkeypatch.syspath_prepend(str(ROOT))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("bench", "dictionaries")]:
        del sys.modules[name]


def test_numbers_are_judged_by_value_and_by_notation():
    from bench.translation.quality import numbers

    accepts = numbers.quantity(1234, "5", "de")
    assert accepts("Es sind 1.234,5 Meter.") == (True, True) and accepts("Es sind 1,234.5 Meter.") == (True, False)
    for wrong in ("Es sind 1234 Meter.", "Es sind 1.234,5 von 7 Metern.", "Es sind viele Meter."):
        assert accepts(wrong) == (False, False)
    assert numbers.quantity(3_500_000, "", "zh")("有350万人。") == (True, True)
    assert numbers.quantity(12, "", "fr", "€ euro")("Il coûte 12 dollars.") == (False, False)


def test_every_kind_accepts_its_own_sentence_and_refuses_another():
    from bench.translation.quality import numbers

    found = list(numbers.cases(len(numbers.KINDS) * 6 * 2))
    assert {case.kind for case in found} == set(numbers.KINDS) and len({case.direction for case in found}) == 6
    for case in found:
        _, make = numbers.KINDS[case.kind]
        here = case.direction[0]
        made, other = (make(random.Random(seed), here, here) for seed in (1, 2))  # a translation into itself
        assert made.judge(made.text)[0], (case.kind, made.text)
        assert not made.judge(other.text)[0] and not made.judge("")[0]


def test_loops_and_wrong_words_are_found():
    from bench.translation.quality import checks, words

    assert checks.loops("of the Republic of the Republic of the Republic of the Republic") and checks.loops("弟弟弟弟")
    assert not checks.loops("It was very, very good, and so was the other one.")
    question = words.Question("know", {"etw. wissen", "kennen"})
    assert words.judge(question, "wissen", "de") == words.judge(question, "kennen.", "de") == (True, True)
    assert words.judge(question, "Kennen", "de") == (True, False)
    assert words.judge(question, "sehen", "de") == (False, False)
