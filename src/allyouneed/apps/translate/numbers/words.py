"""Numbers in words: English, German, French and Chinese, Roman numerals, months."""

from __future__ import annotations

import re
from collections.abc import Collection

MYRIADS = {"万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}
ROMAN = re.compile(r"\b[IVXLC]+(?=\b|e\b)")
CHINESE = re.compile("[零〇一二两兩三四五六七八九十百千万萬亿億]{1,40}")
MONTHS = {
    name: number + 1
    for names in (
        "January February March April May June July August September October November December",
        "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
        "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    )
    for number, name in enumerate(names.split())
}
MONTH = re.compile(rf"\b(?:{'|'.join(MONTHS)})\b")
# words for small numbers, as far as all their forms agree
SMALL = (
    "zero null zéro 零 〇",
    "one first once ein erst un premi 一 首",
    "two second twice both pair zwei zwo beid deux 二 两 兩 双 雙",
    "three third drei dritt trois 三",
    "four vier quatr 四",
    "five fifth fünf cinq 五",
    "six sech 六",
    "seven sieb sept 七",
    "eight acht huit 八",
    "nine ninth neun neuf neuv 九",
    "ten zehn dix 十",
    "eleven elf onz",
    "twelve twelfth dozen zwölf dutzend douz",
)
# zero to nineteen, then the tens
EN, DE, FR = (
    words.split()
    for words in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety",
        "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
        "siebzehn achtzehn neunzehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
        "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept "
        "dix-huit dix-neuf vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt",
    )
)


def says(text: str, values: Collection[float]) -> bool:
    """Whether a text has one of these values in words, as far as we can tell."""
    known = {chinese(one) for one in CHINESE.findall(text)} | {_roman(one) for one in ROMAN.findall(text)}
    known |= {MONTHS[one] for one in MONTH.findall(text)}
    words = re.sub(r"[\s-]+", "-", text.casefold())
    for value in values:
        number = int(value)
        if value in known:
            return True
        if number != value or not 0 <= number < 10**9:
            continue
        if number < len(SMALL) and any(stem in words for stem in SMALL[number].split()):
            return True
        if any(re.sub(r"[\s-]+", "-", form) in words for form in _forms(number)):
            return True
    return False


def chinese(numeral: str) -> int:
    """The value of a Chinese numeral: 二十, 三万五, 一九八七."""
    digits = {char: n for n, char in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "兩": 2}
    if all(char in digits for char in numeral):
        return int("".join(str(digits[char]) for char in numeral))
    total = section = digit = 0
    for char in numeral:
        if char in digits:
            digit = digits[char]
        elif char in MYRIADS:
            unit, here = MYRIADS[char], section + digit
            total = total + here * unit if total >= unit else (total + here) * unit  # 三亿五千万, 一万亿
            section = digit = 0
        else:
            section += (digit or 1) * {"十": 10, "百": 100, "千": 1000}[char]
            digit = 0
    return total + section + digit


def _roman(numeral: str) -> int:
    values = [{"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}[char] for char in numeral]
    return sum(-one if one < after else one for one, after in zip(values, [*values[1:], 0], strict=True))


def _forms(number: int) -> set[str]:
    found = {_english(number), _english(number, " and "), _german(number), _french(number)}
    found |= {re.sub("^one ", "a ", form) for form in found if form.startswith("one ")}
    if 1100 <= number < 2000:  # years
        high, low = divmod(number, 100)
        found |= {f"{_german(high)}hundert{_german(low) if low else ''}"}
        found |= {f"{_english(high)} {_english(low)}" if low else f"{_english(high)} hundred"}
    return found


def _english(number: int, link: str = " ") -> str:
    for size, name in ((10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if number >= size:
            high, low = divmod(number, size)
            return f"{_english(high)} {name}" + (link + _english(low, link) if low else "")
    if number < 20:
        return EN[number]
    return EN[18 + number // 10] + (f"-{EN[number % 10]}" if number % 10 else "")


def _german(number: int) -> str:
    if number >= 10**6:
        high, low = divmod(number, 10**6)
        return ("eine million" if high == 1 else f"{_german(high)} millionen") + (f" {_german(low)}" if low else "")
    for size, name in ((1000, "tausend"), (100, "hundert")):
        if number >= size:
            high, low = divmod(number, size)
            return ("" if high == 1 else _german(high)) + name + (_german(low) if low else "")
    if number < 20:
        return DE[number]
    return (f"{DE[number % 10]}und" if number % 10 else "") + DE[18 + number // 10]


def _french(number: int) -> str:
    if number >= 10**6:
        high, low = divmod(number, 10**6)
        return f"{_french(high)} million" + ("s" if high > 1 else "") + (f" {_french(low)}" if low else "")
    for size, name in ((1000, "mille"), (100, "cent")):
        if number >= size:
            high, low = divmod(number, size)
            many = "s" if size == 100 and high > 1 and not low else ""
            return ("" if high == 1 else _french(high) + " ") + name + many + (" " + _french(low) if low else "")
    if number < 20:
        return FR[number]
    tens, ones = divmod(number, 10)
    if tens in (7, 9):
        tens, ones = tens, ones + 10
    if not ones:
        return FR[18 + tens] + ("s" if tens == 8 else "")
    return FR[18 + tens] + (" et " if ones in (1, 11) and tens < 8 else "-") + FR[ones]
