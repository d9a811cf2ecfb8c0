"""The numbers that a text has in digits: one grammar for what is noted, put right (repair.py) and localized."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

from allyouneed.apps.translate.numbers.amounts import MONEY, expanded, spelled, with_money
from allyouneed.apps.translate.numbers.words import MYRIADS, chinese, says
from allyouneed.apps.translate.spans.spans import NUMBER_SPAN, SYMBOL, protect

NOTATION = {"en": (",", "."), "zh": (",", "."), "de": (".", ","), "fr": ("\u202f", ",")}  # group mark, decimal mark
SPACES = "\u00a0\u202f\u2009 "
FACTORS = MYRIADS | {
    "十": 10, "百": 100, "千": 1000, "thousand": 1000, "tausend": 1000, "mille": 1000, "milles": 1000, "million": 10**6,
    "millions": 10**6, "millionen": 10**6, "mio": 10**6, "billion": 10**9, "bn": 10**9, "milliard": 10**9,
    "milliards": 10**9, "milliarde": 10**9, "milliarden": 10**9, "mrd": 10**9, "md": 10**9, "trillion": 10**12,
    "billionen": 10**12, "trillions": 10**12, "trillionen": 10**18, "billions": 10**12, "万亿": 10**12, "萬億": 10**12,
}  # fmt: skip
# what they mean in German and French, where that is not what they mean in English
LARGE = {"billion": 10**12, "trillion": 10**18, "trillions": 10**18, "trillionen": 10**18}
WORDS = "|".join(sorted((name for name in FACTORS if len(name) > 1), key=len, reverse=True))
HOUR = r"(?:[01]?\d|2[0-4])"
NUMBER = re.compile(
    # a clock time
    rf"(?<![A-Za-z\d_:.,])(?:(?P<hour>{HOUR})\s?(?:[:：]|h:?|[点點时時])\s?(?P<minute>[0-5]\d)(?![\d:]|[.,]\d)(?:\s?分)?"
    rf"|(?P<hour2>{HOUR})\.(?P<minute2>[0-5]\d)(?=\s?(?:Uhr|[ap]\.?\s?m\b))"
    rf"|(?P<hour3>{HOUR})(?=\s?(?:Uhr|o['’]clock|[ap]\.?\s?m\b|heures?\b|h\b|[点點时時](?![间間]))))"
    # digits
    rf"|(?<!\d)(?<!\d[.,])(?P<digits>(?<!\d )(?!0)\d{{1,3}}(?:[.,'’{SPACES}]\d{{3}}(?!\d))+(?! \d)(?:[.,]\d+)?"
    r"|\d+(?:[.,]\d+)?)(?!\d|[.,]\d)"
    rf"(?P<after>\s?(?P<factor>[多余餘几幾来來]?(?:万亿|萬億|[十百千]?[万萬亿億])|[百千](?!分)|{WORDS})(?![A-Za-zÀ-ɏ]))?"
    # a Chinese numeral from ten on
    r"|(?P<numeral>[零〇一二两兩三四五六七八九]{0,40}[十百千][零〇一二两兩三四五六七八九十百千万萬亿億]{0,40}"
    r"|[一二两兩三四五六七八九][万萬亿億][零〇一二两兩三四五六七八九十百千万萬亿億]{0,40})",
    re.IGNORECASE,
)
LONGEST = 100  # characters of what is read as a number
NEAR = 30  # characters between a number and its unit, at most
DECADE = re.compile(r"['’ ]*(?:s\b|er\b|年代)")
_OCLOCK = r"\s?(?:Uhr|o['’]clock|heures?|h\b(?:\s?\d\d)?|[点點时時]半?)?,?\s?"
# before noon, after noon: what stands before a time, and what stands after it
HALVES_OF_DAY = tuple(
    (re.compile(rf"(?:{ahead})\s*$"), re.compile(rf"(?i){_OCLOCK}(?:{behind})"))
    for ahead, behind in (
        (
            "上午|早上|凌晨|清晨",
            r"a\.?\s?m\b|in the morning|(?:am )?vormittags?\b|morgens\b|am Morgen\b|früh\b|du matin\b",
        ),
        (
            "下午|晚上|傍晚|中午",
            r"p\.?\s?m\b|in the (?:afternoon|evening)|(?:am )?nachmittags?\b|abends\b|am Abend\b"
            r"|de l['’]après-midi|du soir\b",
        ),
    )
)
# what stands before a number with a point that is the name of something
LABEL = re.compile(
    r"(?:\b(?:sections?|sec\.|chapters?|ch\.|figures?|figs?\.|tables?|versions?|releases?|parts?|paragraphs?|clauses?|"
    r"articles?|alinéas?|appendix|items?|steps?|exercises?|equations?|abschnitte?[ns]?|kapiteln?|abbildung(?:en)?|abb\.|"
    r"tabellen?|tab\.|versionen|teile?n?|absatz|absätze|ziffern?|nr\.|anhang|artikeln?|gleichung(?:en)?|chapitres?|"
    r"tableaux?|parties?|paragraphes?|annexes?|n°)|§|版本?|第)\s*$",
    re.IGNORECASE,
)
UNIT = re.compile(r"\s?(?:[%€$£°]|percent|Prozent|pour cent)")
LIST = re.compile(r"[\s,;、，/–—-]*(?:and|or|to|und|oder|bis|et|ou|à|和|或|到|至|及|与)?\s*")
# what a unit may become: stems, in lower case
UNIT_WORDS = {
    "$": "dollar 美元", "€": "euro 欧元", "£": "pound pfund livre 英镑", "¥": "yen yuan 元", "元": "yuan rmb",
    "%": "percent prozent cent 百分", "kg": "kilo 公斤 千克", "g": "gram 克", "km": "kilom 公里 千米",
    "m": "meter metre mètre 米", "cm": "zentim centim 厘米", "mm": "millim 毫米",
    "km/h": "stundenkilometer 时速", "l": "liter litre 升", "h": "hour stunde heure 小时", "min": "minut 分",
    "°C": "grad degree degré 度", "°F": "grad degree degré 度", "°": "grad degree degré 度",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Number:
    """A number as it stands in a text: in digits, a clock time, or a Chinese numeral from ten on. `values`: what it
    means in the notation of its language, times `factor` (of the word `after` it: 350万); `loose`: what else it can
    mean: the 90s are the 1990s, 1.500 may be 1500. `label`: it names something (section 4.10), and is not a value."""

    start: int
    text: str
    values: frozenset[float]
    loose: frozenset[float]
    factor: int = 1
    after: str = ""
    time: tuple[int, int | None] | None = None  # hour and minute
    numeral: bool = False
    label: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def full_end(self) -> int:
        """After its factor."""
        return self.end + len(self.after)

    @property
    def value(self) -> Decimal:
        return Decimal(repr(max(self.values or self.loose)))


@lru_cache(maxsize=256)
def read(text: str, language: str | None = None) -> tuple[Number, ...]:
    """The numbers of a text, in order, in the notation of its language, or (None) in any."""
    return tuple(_numbers(text, language))


def _numbers(text: str, language: str | None) -> Iterator[Number]:
    names, last = set[str](), 0  # labels, and where the last one ends
    for found in NUMBER.finditer(text):
        if (digits := found["digits"]) is None:
            yield _time_or_numeral(found)
            continue
        if len(digits) > LONGEST:
            continue
        word, end = (found["factor"] or "").lower(), found.end("digits")
        factor = LARGE[word] if language in ("de", "fr") and word in LARGE else FACTORS.get(word, 1)
        for char in "" if word in FACTORS else word:
            factor *= FACTORS.get(char, 1)
        loose = readings(digits, language) or readings(digits, None)
        values = loose if readings(digits, language) else set()
        if re.fullmatch(r"\d{1,3}[.,]\d{3}", digits):
            loose = loose | {float(re.sub("[.,]", "", digits))}
        if DECADE.match(text, end):  # the 1990s, die 90er Jahre
            loose = loose | {value % 100 for value in loose} | {1900 + value for value in loose if value < 100}
        if label := not word and not UNIT.match(text, end) and _is_label(text, found.start(), digits, names, last):
            names.add(digits)
            last = end
        exact = frozenset(_times(value, factor) for value in values)
        every = frozenset(
            _times(value, by)
            for value in loose
            for by in {factor, FACTORS.get(word, factor), _larger(word, language, factor)}
        )
        yield Number(found.start(), digits, exact, every, factor, found["after"] or "", label=label)


def _larger(word: str, language: str | None, factor: int) -> int:
    """What a word may mean in a language that is not known: a German billion is an English trillion."""
    return 10**12 if word == "billion" and language is None else factor


def _is_label(text: str, start: int, digits: str, names: set[str], last: int) -> bool:
    """Whether this is the name of a section or version, or an interval: [0,1]."""
    if not re.fullmatch(r"\d+\.\d+", digits):
        return "," in digits and text[:start].endswith("[")
    listed = last > 0 and LIST.fullmatch(text, last, start) is not None
    return listed or digits in names or LABEL.search(text[max(0, start - 20) : start]) is not None


def readings(digits: str, language: str | None) -> set[float]:
    """What a number in digits means in a language, or (None) in any; nothing if it is not written so."""
    found = set()
    for point in {NOTATION[language][1]} if language else ".,":
        whole = rf"(\d+|\d{{1,3}}(?:[{'.,'.replace(point, '')}'’{SPACES}]\d{{3}})+)"
        if match := re.fullmatch(rf"{whole}(?:{re.escape(point)}(\d+))?", digits):
            found.add(float(re.sub(r"\D", "", match[1]) + "." + (match[2] or "0")))
    return found


def localized(digits: str, here: str, there: str) -> str:
    """A number in the notation of another language; as it is, if it is not in that of its own."""
    if not readings(digits, here):
        return digits
    whole, _, rest = digits.partition(NOTATION[here][1])
    group, point = NOTATION[there]
    return re.sub(r"\D", group, whole) + (point + rest if rest else "")


def localized_text(text: str, here: str, there: str) -> str:
    """A text such as `$1,250.50` or `34,6 ml` with its numbers in the notation of another language."""
    if here in NOTATION and there in NOTATION:
        for one in reversed(read(text, here)):
            text = text[: one.start] + localized(one.text, here, there) + text[one.end :]
    return text


def differing_numbers(source: str, target: str) -> list[str]:
    """Numbers in digits that one of two texts has and the other has not, neither in digits nor, as far as we can tell,
    in words. Clock times and months need not be there: they have too many forms (2:30, halb drei; 7月, July)."""
    sides = [(text, read(text)) for text in (_with_numbers(source), _with_numbers(target))]
    found = []
    for (text, numbers), (other, others) in (sides, sides[::-1]):
        known = {value for one in others for value in one.loose}
        found += [
            (one.text + one.after).strip()
            for one in numbers
            if not (one.time or one.numeral or text[one.end :].startswith("月") or one.loose & known)
            and not says(other, one.loose)
        ]
    return list(dict.fromkeys(found))


def translated_amount(text: str, here: str, there: str) -> str:
    """An amount such as `€16bn` in the words of another language."""
    plain = expanded(text, here)
    if here not in NOTATION or there not in NOTATION or len(found := read(plain, here)) != 1 or not found[0].values:
        return text
    money = re.search(MONEY, text)
    return with_money(spelled(found[0].value, there), money and money[0], there)


def has_quantity(quantity: str, text: str) -> bool:
    """Whether a text has a number with its unit beside it, each in symbols or in words."""
    numbers, unit = read(quantity), quantity
    for one in reversed(numbers):
        unit = unit[: one.start] + unit[one.full_end :]
    unit = re.sub(r"[\s+\-−±]", "", unit)
    forms = [unit.casefold(), *UNIT_WORDS.get(unit, "").split()] if unit else [""]
    places = _beside(text, forms)
    return all(
        any(one.loose & other.loose and place for place, other in places)
        or any(says(words, one.loose) for words in _words_before(text, forms))
        for one in numbers
    )


def _beside(text: str, forms: Sequence[str]) -> list[tuple[bool, Number]]:
    """The numbers of a text, and whether one of these forms stands beside each, before the next number."""
    numbers, found, before = read(text), list[tuple[bool, Number]](), 0
    for one, after in zip(numbers, [*(other.start for other in numbers[1:]), len(text)], strict=False):
        around = text[max(before, one.start - NEAR) : min(after, one.full_end + NEAR)].casefold()
        found.append((any(form in around for form in forms), one))
        before = one.full_end
    return found


def _words_before(text: str, forms: Sequence[str]) -> Iterator[str]:
    """What stands before and beside each of these forms, without numbers in digits."""
    if forms == [""]:
        yield text
        return
    lower = text.casefold()
    for form in forms:
        for found in re.finditer(re.escape(form), lower):
            before = re.split(r"[0-9]", lower[max(0, found.start() - NEAR) : found.start()])[-1]
            yield before + re.split(r"[0-9]", lower[found.end() : found.end() + NEAR])[0]


def _with_numbers(text: str) -> str:
    """Without spans other than numbers: the digits of a URL do not count."""
    found = protect(text)
    return SYMBOL.sub(" ", re.sub(NUMBER_SPAN, lambda one: found.spans[one[0]].text, found.template))


def half_of_day(text: str, number: Number) -> int | None:
    """0 for a time that is said to be before noon, 12 after it; None: nothing is said, or 12 in the evening."""
    before, after = text[max(0, number.start - NEAR) : number.start], text[number.end : number.end + NEAR]
    for half, (ahead, behind) in enumerate(HALVES_OF_DAY):
        if ahead.search(before) or behind.match(after):
            evening = number.time is not None and number.time[0] == 12 and re.search(r"晚上\s*$", before)
            return None if evening else 12 * half
    return None


def _time_or_numeral(found: re.Match[str]) -> Number:
    if found["numeral"]:
        values = frozenset({float(chinese(found[0]))})
        return Number(found.start(), found[0], values, values, numeral=True)
    hour, minute = (found[name] or found[f"{name}2"] for name in ("hour", "minute"))
    time = (int(hour or found["hour3"]), int(minute) if minute else None)
    values = frozenset(float(one) for one in time if one is not None)
    return Number(found.start(), found[0], values, values, time=time)


def _times(value: float, factor: int) -> float:
    return float(Decimal(repr(value)) * factor)  # exact: 4.35 million
