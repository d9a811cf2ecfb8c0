"""Compare the numbers of a text and its translation: digits in any notation, Chinese numerals, number words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allyouneed.apps.translate.spans.spans import NUMBER_SPAN, SYMBOL, protect

DIGITS = re.compile(
    r"(?<![\d.,])\d+(?:[.,'\u2019\u00a0\u202f ]\d{3}(?!\d))*(?:[.,]\d+)?\s?(?P<times>[万萬亿億千百]+|"
    r"thousand|million|billion|Tausend|Millionen|Million|Milliarden?|Mio|Mrd|mille|millions?|milliards?)?",
    re.IGNORECASE,
)
TIMES = {
    "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8, "千": 1000, "百": 100, "thousand": 1000, "tausend": 1000,
    "mille": 1000, "million": 10**6, "millions": 10**6, "millionen": 10**6, "mio": 10**6, "billion": 10**9,
    "milliard": 10**9, "milliards": 10**9, "milliarde": 10**9, "milliarden": 10**9, "mrd": 10**9,
}  # fmt: skip
# too many forms to compare: 2:30, half past two, halb drei, 14 h 30, 两点半; 7月, July
CLOCK = re.compile(
    r"\d{1,2}\s?[:h：]\s?\d{2}(?!\d)|\d{1,2}[.]\d{2}(?= Uhr)"
    r"|\d{1,2}\s?(?:o['’]clock|Uhr|heures?|h\b|[ap]\.?m\b|点|時|时)(?:\s?\d{1,2}\s?分)?|\d{1,2}月",
    re.IGNORECASE,
)
# what a unit may become: stems, in lower case
UNIT_WORDS = {
    "$": "dollar 美元", "€": "euro 欧元", "£": "pound pfund livre 英镑", "¥": "yen yuan 元", "元": "yuan rmb",
    "%": "percent prozent cent 百分", "kg": "kilo 公斤 千克", "g": "gram 克", "km": "kilom 公里 千米",
    "m": "meter metre mètre 米", "cm": "zentim centim 厘米", "mm": "millim 毫米",
    "km/h": "stundenkilometer 时速", "l": "liter litre 升", "h": "hour stunde heure 小时", "min": "minut 分",
    "°C": "grad degree degré 度", "°F": "grad degree degré 度", "°": "grad degree degré 度",
}  # fmt: skip
ROMAN = re.compile(r"\b[IVXLC]+(?=\b|e\b)")
CHINESE = re.compile("[零〇一二两兩三四五六七八九十百千万萬亿億]+")
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


def _words(text: str) -> list[str]:
    return text.split()


EN = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
EN_TENS = _words(". . twenty thirty forty fifty sixty seventy eighty ninety")
DE = _words(
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn "
    "achtzehn neunzehn"
)
DE_TENS = _words(". . zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
FR = _words(
    "zéro un deux trois quatre cinq six sept huit neuf dix onze douze treize quatorze quinze seize dix-sept dix-huit "
    "dix-neuf"
)
FR_TENS = _words(". . vingt trente quarante cinquante soixante soixante quatre-vingt quatre-vingt")


def differing_numbers(source: str, target: str) -> list[str]:
    """Numbers in digits that one of two texts has and the other has not, neither in digits nor, as far as we can tell,
    in words. Clock times and months need not be there."""
    here, there = _with_numbers(source), _with_numbers(target)
    if not any(char.isdigit() for char in here + there):
        return []
    found = []
    for text, other in ((here, there), (there, here)):
        known = {value for _, values in _read(other) for value in values} | _in_words(other)
        found += [
            spelling
            for spelling, values in _read(CLOCK.sub(" ", text))
            if not values & known and not _spelled(values, other)
        ]
    return list(dict.fromkeys(found))


def has_quantity(quantity: str, text: str) -> bool:
    """Whether a text has a number with its unit, each in symbols or in words."""
    known = {value for _, values in _read(text) for value in values} | _in_words(text)
    unit = re.sub(r"[\d.,'’+\-−±\s]", "", quantity)
    words = UNIT_WORDS.get(unit, "").split()
    if unit and unit not in text and not any(word in text.casefold() for word in words):
        return False
    return all(values & known or _spelled(values, text) for _, values in _read(quantity))


def _with_numbers(text: str) -> str:
    """Without spans other than numbers: the digits of a URL do not count."""
    found = protect(text)
    return SYMBOL.sub(" ", re.sub(NUMBER_SPAN, lambda one: found.spans[one[0]].text, found.template))


def _read(text: str) -> Iterator[tuple[str, set[float]]]:
    """The numbers in digits: spelling and possible values (`1.500` may be either)."""
    for match in DIGITS.finditer(text):
        plain = match[0][: match.start("times") - match.start()] if match["times"] else match[0]
        plain = plain.strip()
        factors = {1.0}
        if match["times"]:
            factor = 1
            for part in [match["times"].lower()] if match["times"].lower() in TIMES else match["times"]:
                factor *= TIMES.get(part, 1)
            factors = {float(factor)} | ({1e12} if match["times"].lower() == "billion" else set())
        values = {round(value * factor, 6) for value in _values(plain) for factor in factors}
        if re.match(r"s\b|er\b|年代", text[match.end() :].lstrip("'’ ")):  # 1990s, 90er Jahre
            values |= {value % 100 for value in values} | {1900 + value for value in values if value < 100}
        yield match[0].strip(), values


def _values(digits: str) -> set[float]:
    """Of `1,000.5`, `1.000,5`, `1 000`, and both of `1.500`."""
    plain = re.sub("['\u2019\u00a0\u202f ]", "", digits)
    separators = [char for char in plain if char in ".,"]
    if not separators:
        return {float(plain)}
    last = separators[-1]
    if len(set(separators)) == 2:
        whole, _, rest = plain.rpartition(last)
        return {float(re.sub("[.,]", "", whole) + "." + rest)}
    joined = float(plain.replace(last, ""))
    if len(separators) > 1:
        return {joined}
    decimal = float(plain.replace(last, "."))
    return {joined, decimal} if len(plain.rpartition(last)[2]) == 3 else {decimal}


def _in_words(text: str) -> set[float]:
    """Chinese and Roman numerals."""
    found = {float(value) for one in CHINESE.findall(text) for value in _chinese(one)}
    return found | {float(_roman(one)) for one in ROMAN.findall(text)}


def _chinese(numeral: str) -> set[int]:
    digits = {char: n for n, char in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "兩": 2}
    if all(char in digits for char in numeral):  # 一九八七
        return {int("".join(str(digits[char]) for char in numeral))}
    total = section = digit = 0
    for char in numeral:
        if char in digits:
            digit = digits[char]
        elif char in "万萬亿億":
            total, section, digit = (total + section + digit) * TIMES[char], 0, 0
        else:
            section += (digit or 1) * {"十": 10, "百": 100, "千": 1000}[char]
            digit = 0
    return {total + section + digit}


def _roman(numeral: str) -> int:
    values = [{"I": 1, "V": 5, "X": 10, "L": 50, "C": 100}[char] for char in numeral]
    return sum(-one if one < after else one for one, after in zip(values, [*values[1:], 0], strict=True))


def _spelled(values: set[float], text: str) -> bool:
    """Whether a text has one of the values in English, German or French words."""
    words = re.sub(r"[\s-]+", "-", text.casefold())
    for value in values:
        number = int(value)
        if number != value or not 0 <= number < 10**9:
            continue
        if number < len(SMALL) and any(stem in words for stem in SMALL[number].split()):
            return True
        if any(re.sub(r"[\s-]+", "-", form) in words for form in _forms(number)):
            return True
    return False


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
    return EN_TENS[number // 10] + (f"-{EN[number % 10]}" if number % 10 else "")


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
    return (f"{DE[number % 10]}und" if number % 10 else "") + DE_TENS[number // 10]


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
        return FR_TENS[tens] + ("s" if tens == 8 else "")
    return FR_TENS[tens] + (" et " if ones in (1, 11) and tens < 8 else "-") + FR[ones]
