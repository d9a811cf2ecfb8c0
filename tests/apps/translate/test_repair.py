"""Numbers of a translation: what a model garbled is put right, and written as the target language does."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.apps.translate.numbers.numbers import localized, readings
from allyouneed.apps.translate.numbers.repair import put_right
from allyouneed.apps.translate.spans.spans import protect

RIGHT = [  # source, translation, languages, what it becomes
    ("There were 313 people.", "Es waren 31 Personen.", "en-de", "Es waren 313 Personen."),
    ("The value is 142,511.92.", "La valeur est 142,511.92.", "en-fr", "La valeur est 142\u202f511,92."),
    ("Das Ergebnis war 1.234,5.", "The result was 1.234,5.", "de-en", "The result was 1,234.5."),
    ("1.500 Leute", "1.500 people", "de-en", "1,500 people"),
    ("We sold 4,975,421 tickets.", "On a vendu 4975,421 billets.", "en-fr", "On a vendu 4\u202f975\u202f421 billets."),
    ("Er kam um 5:13 Uhr an.", "He arrived at 5:30.", "de-en", "He arrived at 5:13."),
    ("Il part à 15 h 14.", "He leaves at 15 h 14.", "fr-en", "He leaves at 15:14."),
    ("It begins at 20:33.", "Cela commence à 20 h 30.", "en-fr", "Cela commence à 20 h 33."),
    ("火车2:13开。", "The train leaves at 2:130.", "zh-en", "The train leaves at 2:13."),
    ("It takes 60-66 days.", "Es dauert 60-6 Tage.", "en-de", "Es dauert 60-66 Tage."),
    ("Read pages 89–121.", "Lies die Seiten 8912.", "en-de", "Lies die Seiten 89–121."),
    ("Call +33 1 91 90 89 25 now.", "Ruf jetzt 3191909825 an.", "en-de", "Ruf jetzt +33 1 91 90 89 25 an."),
    ("It costs 3.5 million dollars.", "Es kostet 35 Millionen Dollar.", "en-de", "Es kostet 3,5 Millionen Dollar."),
    ("There were 806 people.", "有八十六个人。", "en-zh", "有806个人。"),
    ("5 dogs and 313 cats", "fünf Hunde und 31 Katzen", "en-de", "fünf Hunde und 313 Katzen"),
]
RIGHT += [  # amounts and times of half a day
    (
        "公司投资了3亿美元。",
        "The company invested 3 billion dollars.",
        "zh-en",
        "The company invested 300 million dollars.",
    ),
    ("他有5万元。", "He has 5 thousand yuan.", "zh-en", "He has 50,000 yuan."),
    ("投资为1.2万亿元。", "The investment is 1.2 million yuan.", "zh-en", "The investment is 1.2 trillion yuan."),
    ("The deal is worth €16 billion.", "这笔交易价值 €16 亿。", "en-zh", "这笔交易价值 €160亿。"),
    ("It costs $69.8 trillion.", "Es kostet 69,8 Trillionen Dollar.", "en-de", "Es kostet 69,8 Billionen Dollar."),
    ("Er hat 3 Milliarden Euro.", "He has 3 million euros.", "de-en", "He has 3 billion euros."),
    ("It costs $3 million.", "Cela coûte 3 milliards de dollars.", "en-fr", "Cela coûte 3 millions de dollars."),
    ("It costs $3 million.", "Cela coûte 3 dollars.", "en-fr", "Cela coûte 3 millions de dollars."),
    ("Il a 2,5 billions.", "He has 2.5 billion.", "fr-en", "He has 2.5 trillion."),
    ("It starts at 3 p.m. and ends at 5 a.m.", "Um 3 Uhr bis 5 Uhr.", "en-de", "Um 15 Uhr bis 5 Uhr."),
    ("We meet at 2:30 pm.", "Nous nous rencontrons à 2 h 30.", "en-fr", "Nous nous rencontrons à 14 h 30."),
    ("We leave at 12 a.m.", "Wir fahren um 12 Uhr.", "en-de", "Wir fahren um 0 Uhr."),
    ("It starts at 11 PM.", "会议上午11点开始。", "en-zh", "会议下午11点开始。"),
    ("会议下午3:30开始。", "It starts at 3:30.", "zh-en", "It starts at 3:30 p.m."),
    ("会议下午4点开始。", "It starts at 4 on Mondays.", "zh-en", "It starts at 4 p.m. on Mondays."),
    ("Es beginnt um 15 Uhr.", "It starts at 15 p.m.", "de-en", "It starts at 3 p.m."),
    ("Es beginnt um 9 Uhr abends.", "It starts at 9 o'clock.", "de-en", "It starts at 9 p.m."),
    ("C'est à 8 heures du soir.", "It is at 8 a.m.", "fr-en", "It is at 8 p.m."),
    ("It starts at 1:52 p.m.", "Cela commence à 10 h 52.", "en-fr", "Cela commence à 13 h 52."),
]
FINE = [
    ("It costs 3.5 million dollars.", "它花费350万美元。", "en-zh"),
    ("He came at 2:30 p.m.", "Er kam um 14:30 Uhr.", "en-de"),
    ("She was born on March 15, 2024.", "她出生于2024年3月15日。", "en-zh"),
    ("她出生于1955年10月9日。", "She was born on October 9, 1955.", "zh-en"),
    ("In the 1990s there were 5.", "In den 90er Jahren waren es 5.", "en-de"),
    ("Python 3.11 came in 2022.", "Python 3.11 kam 2022.", "en-de"),
    ("We use Windows 8.1 here.", "Wir nutzen hier Windows 8.1.", "en-de"),
    ("the 21st century", "das 21. Jahrhundert", "en-de"),
    ("I have 2 dogs.", "Ich habe zwei Hunde.", "en-de"),
    ("He had 3 of 10.", "Er hatte etwas davon.", "en-de"),  # nothing says where they belong
    ("It costs $1.5 million.", "Es kostet 1,5 M€.", "en-de"),
    ("It grew by 0.2 percentage points.", "它增长了0.2百分点。", "en-zh"),
    ("There are 5 million of 3 kinds.", "Es sind 5 Millionen von 3 Arten.", "en-de"),
    ("It costs $1 million.", "Es kostet eine Million Dollar.", "en-de"),
    ("It starts at 3 p.m.", "Es beginnt um 3 Uhr nachmittags.", "en-de"),
    ("会议下午3点开始。", "It starts at 3 o'clock in the afternoon.", "zh-en"),
    ("会议晚上8点半开始。", "It starts at 8:30 in the evening.", "zh-en"),
    ("La réunion commence à 15 h.", "The meeting starts at 15:00.", "fr-en"),
    ("Er kam um 2 Uhr nachts.", "He came at 2 o'clock.", "de-en"),
    ("他晚上12点来。", "He came at 12 o'clock.", "zh-en"),
    ("It starts at 3 p.m. for 3 people.", "Es beginnt um 15 Uhr für 3 Leute.", "en-de"),
    ("Numbers: 1.5", "Numeri: 15", "en-it"),  # unknown notation
]


@pytest.mark.parametrize(("source", "target", "languages", "wanted"), RIGHT)
def test_numbers_are_put_right(source, target, languages, wanted):
    assert put_right(source, target, *languages.split("-")) == wanted
    assert put_right(source, wanted, *languages.split("-")) == wanted


@pytest.mark.parametrize(("source", "target", "languages"), FINE)
def test_what_is_right_or_unclear_stays(source, target, languages):
    assert put_right(source, target, *languages.split("-")) == target


LABELS = [  # source, translation, what it becomes
    ("en-de", "Sections 4.2 and 4.10 explain it.", "Die Abschnitte 4,2 und 4,10 erklären es.", "4.2 4.10"),
    ("en-de", "Sections 4.2 and 4.10 explain it.", "Die Abschnitte 4.2 und 4.1 erklären es.", "4.2 4.10"),
    ("en-fr", "Sections 4.2 and 4.10 explain it.", "Les sections 4.2 et 4.10 l'expliquent.", "4.2 4.10"),
    ("en-zh", "Sections 4.2 and 4.10 explain it.", "第 4.2 节和 4.10 节解释了它。", "4.2 4.10"),
    ("de-en", "Die Abschnitte 4.2 und 4.10 erklären es.", "Sections 4.2 and 4.10 explain it.", "4.2 4.10"),
    ("fr-en", "Les sections 4.2 et 4.10 l'expliquent.", "Sections 4.2 and 4.10 explain it.", "4.2 4.10"),
    ("zh-en", "第4.2节和第4.10节对此作了解释。", "Sections 4.2 and 4.10 explain it.", "4.2 4.10"),
    ("en-de", "It needs version 1.10 or 1.9.", "Es braucht Version 1,10 oder 1,9.", "1.10 1.9"),
    ("en-de", "It needs version 1.10 or 1.9.", "Es braucht Version 1.10 oder 1.9.", "1.10 1.9"),
    ("en-fr", "It needs version 1.10 or 1.9.", "Il faut la version 1.10 ou 1,9.", "1.10 1.9"),
    ("en-zh", "It needs version 1.10 or 1.9.", "它需要 1.10 或 1.9 版本。", "1.10 1.9"),
    ("de-en", "Es braucht Version 1.10 oder 1.9.", "It needs version 1.10 or 1.9.", "1.10 1.9"),
    ("de-en", "Version 2.100 ist da.", "Version 2.100 is here.", "2.100"),
    ("fr-en", "Il faut la version 1.10 ou 1.9.", "It needs version 1.10 or 1.9.", "1.10 1.9"),
    ("zh-en", "适用于版本1.10或1.9。", "It needs version 1.10 or 1.9.", "1.10 1.9"),
    ("en-de", "Version 2.1 is 4.8 percent faster.", "Version 2.1 ist 4,8 Prozent schneller.", "2.1 4,8"),
    ("en-de", "Python 3.10 and 3.9 are supported.", "Python 3.10 und 3.9 werden unterstützt.", "3.10 3.9"),
    ("en-de", "See 4.2 for more.", "Mehr dazu in 4.2.", "4.2"),
]


@pytest.mark.parametrize(("languages", "source", "target", "wanted"), LABELS)
def test_the_number_of_a_section_or_version_is_no_decimal(languages, source, target, wanted):
    found = put_right(source, target, *languages.split("-"))
    assert " ".join(re.findall(r"\d+(?:[.,]\d+)*", found)) == wanted
    assert re.sub(r"[\d.,]", "", found) == re.sub(r"[\d.,]", "", target)


def written(whole: int, decimals: str, language: str) -> str:
    return localized(f"{whole:,}" + (f".{decimals}" if decimals else ""), "en", language)


values = st.lists(
    st.tuples(st.integers(0, 10**7), st.text("0123456789", max_size=3)),
    min_size=1,
    max_size=5,
    unique_by=lambda value: float(f"{value[0]}.{value[1] or 0}"),
)
directions = st.sampled_from(["en-de", "de-en", "en-fr", "fr-en", "en-zh", "zh-en"])


@given(values, directions, st.randoms(use_true_random=False), st.integers(0, 5), st.integers(1, 10**7))
@settings(max_examples=300, deadline=None)
def test_a_number_whose_value_is_there_is_never_touched(numbers, direction, draw, wrong, other):
    here, there = direction.split("-")
    source = " x ".join(written(*value, here) for value in numbers)
    shuffled = draw.sample(numbers, len(numbers))
    target = [written(*value, there) for value in shuffled]
    assert put_right(source, " x ".join(target), here, there) == " x ".join(target)
    if wrong < len(target) and all(other != float(f"{whole}.{rest or 0}") for whole, rest in numbers):
        target[wrong] = str(other)
        found = put_right(source, " x ".join(target), here, there).split(" x ")
        assert found[:wrong] + found[wrong + 1 :] == target[:wrong] + target[wrong + 1 :]


@pytest.mark.parametrize(
    ("source", "target", "languages"),
    [
        ("Call +1 609-185-7633.", "Rufen Sie +1 609-185-7633 an.", "en-de"),
        ("Our number is +1 609-185-7633.", "Our number is +1 609-185-7633.", "de-en"),
        ("It is in [0, 1].", "它在 [0,1] 中。", "en-zh"),
        ("Il est dans [0,1].", "It is in [0,1].", "fr-en"),
        ("CHECK_CRC32: 32-bit check", "CHECK_CRC32 : contrôle sur 32-bit", "en-fr"),
        ("It begins at 10:32.", "Es beginnt um 10.32.", "en-de"),
        ("Nexus-Dart-150-Motor", "Nexus Dart 150 engine", "de-en"),
    ],
)
def test_phone_numbers_intervals_and_names_stay(source, target, languages):
    assert put_right(source, target, *languages.split("-")) == target


@given(st.integers(0, 10**12), st.text("0123456789", max_size=3), st.sampled_from(["en", "de", "fr", "zh"]))
@settings(max_examples=60, deadline=None)
def test_notation_keeps_the_value(whole, decimals, there):
    english = f"{whole:,}" + (f".{decimals}" if decimals else "")
    made = localized(english, "en", there)
    assert readings(made, there) == readings(english, "en") == {float(english.replace(",", ""))}
    assert localized(made, there, "en") == english


@given(st.text("a1250.,: 万十-+()h点%", max_size=25), st.text("b1250.,: 万十-+()h点%", max_size=25))
@settings(max_examples=60, deadline=None)
def test_any_text_is_accepted_and_words_stay(source, target):
    for languages in (("en", "de"), ("zh", "en"), ("fr", "zh")):
        found = put_right(source, target, *languages)
        assert re.sub("[^b%]", "", found) == re.sub("[^b%]", "", target)


def test_digits_are_no_smiley():
    assert not protect("The result was 83.").spans and not protect("It is 83.77.").spans
    assert [span.text for span in protect("Fine :3 and 8)").spans.values()] == [":3", "8)"]
