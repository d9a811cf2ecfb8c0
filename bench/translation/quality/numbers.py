"""Generated sentences with numbers of every kind, and whether a translation has the number, and no other.

Two judgements: `value`, the number is there in any notation; `local`, it is there as the target language writes it
(`1,234.5` in English and Chinese, `1.234,5` in German, `1 234,5` in French). Words do not count, but for currencies,
units and months; Chinese numerals with 万 and 亿 do.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import NamedTuple

from bench.translation.quality import number_templates as templates
from bench.translation.quality.data import DIRECTIONS, Direction

_MONTHS = {
    "en": "January February March April May June July August September October November December",
    "de": "Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    "fr": "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
}
MONTHS = {language: names.split() for language, names in _MONTHS.items()}
CURRENCIES = {  # symbol, the words that may stand for it
    "$": "dollar 美元 美金 usd",
    "€": "euro 欧元 eur",
    "£": "pound pfund livre 英镑 gbp",
    "¥": "yen yuan 元 cny rmb jpy",
}
UNITS = {
    "kg": "kilo 公斤 千克", "g": "gram 克", "km": "kilom 公里 千米", "cm": "centim zentim 厘米",
    "km/h": "kilomet stundenkilom 公里 千米", "ml": "millilit 毫升", "l": "liter litre 升", "GB": "gigab go 吉",
    "°C": "degr grad celsius 度", "MHz": "megah 兆赫", "kWh": "kilowatt 千瓦 度", "m²": "square quadrat carré 平方",
}  # fmt: skip
SPACES = re.compile("[\u00a0\u202f\u2009\u2007 ]")
NUMBER = re.compile(r"(?<![\d.,'])\d+(?:(?:[.,' ](?=\d{3}(?!\d)))\d{3})*(?:[.,]\d+)?(?!\d)")
MYRIADS = {
    "百万": 10**6,
    "千万": 10**7,
    "万": 10**4,
    "亿": 10**8,
    "million": 10**6,
    "billion": 10**9,
    "thousand": 10**3,
}


class Case(NamedTuple):
    kind: str
    direction: Direction
    source: str
    judge: Callable[[str], tuple[bool, bool]]  # of a translation: (value, local)


class Written(NamedTuple):
    """A number in the source, and how to judge a translation into a language."""

    text: str
    judge: Callable[[str], tuple[bool, bool]]


def cases(count: int) -> Iterator[Case]:
    """About `count` sentences, the same number of every kind in every direction; always the same ones."""
    each = max(1, round(count / (len(KINDS) * len(DIRECTIONS))))
    for kind, (sentences, make) in KINDS.items():
        for here, there in DIRECTIONS:
            draw = random.Random(f"{kind} {here} {there}")
            lines = sentences[here].splitlines()
            for number in range(each):
                made = make(draw, here, there)
                yield Case(kind, (here, there), lines[number % len(lines)].replace("{}", made.text), made.judge)


def plain(text: str) -> str:
    text = text.replace("²", "")
    return SPACES.sub(" ", unicodedata.normalize("NFKC", text)).replace("’", "'")


def written(value: int, decimals: str, language: str, grouped: bool = True) -> str:
    """A number as a language writes it: 1,234.5 · 1.234,5 · 1 234,5."""
    group, point = {"de": (".", ","), "fr": ("\u202f", ",")}.get(language, (",", "."))
    whole = f"{value:,}".replace(",", group) if grouped and value >= 1000 else str(value)
    return whole + (point + decimals if decimals else "")


def readings(text: str, language: str | None) -> set[float]:
    """What a number in digits can mean: in this language, or (None) in any."""
    text = text.replace(" ", "").replace("'", "")
    marks = re.sub(r"\d", "", text)
    found = set()
    for group, point in {("de"): [(".", ",")], "fr": [(".", ",")], None: [(",", "."), (".", ",")]}.get(
        language, [(",", ".")]
    ):
        if marks.count(point) > 1 or (point in marks and not marks.endswith(point)):
            continue
        whole, _, rest = text.partition(point)
        if group in rest or (group in whole and not re.fullmatch(rf"\d{{1,3}}(?:\{group}\d{{3}})+", whole)):
            continue
        found.add(float(whole.replace(group, "") + ("." + rest if rest else "")))
    return found


def quantity(value: int, decimals: str, there: str, wanted: str = "") -> Callable[[str], tuple[bool, bool]]:
    """The translation has this number once and no other; `wanted`: one of these words or symbols as well."""
    exact = float(f"{value}.{decimals or '0'}")

    def judge(text: str) -> tuple[bool, bool]:
        text = plain(text)
        if wanted and not any(word in text.casefold() for word in wanted.casefold().split()):
            return False, False
        if there == "zh":
            text = re.sub(r"(?<!\d)5月", "五月", text)  # May, of the sentence around the number
        found = list(NUMBER.finditer(text))
        if len(found) != 1:
            return False, False
        times = re.match(r"\s?(百万|千万|万|亿|million|billion|thousand)", text[found[0].end() :])
        factor = MYRIADS[times[1]] if times else 1

        def means(language: str | None) -> bool:
            return any(abs(one * factor - exact) < 1e-6 for one in readings(found[0][0], language))

        return means(None), means(there)

    return judge


def digits(text: str) -> Callable[[str], tuple[bool, bool]]:
    """The translation has these digits in this order and no others."""
    wanted = re.sub(r"\D", "", text)

    def judge(translation: str) -> tuple[bool, bool]:
        return (re.sub(r"\D", "", plain(translation)) == wanted,) * 2

    return judge


def verbatim(text: str) -> Callable[[str], tuple[bool, bool]]:
    def judge(translation: str) -> tuple[bool, bool]:
        translation = plain(translation)
        good = translation.count(text) == 1 and not re.search(r"\d", translation.replace(text, ""))
        return good, good

    return judge


def _small(draw: random.Random, here: str, there: str) -> Written:
    value = draw.randrange(13, 1000)
    return Written(str(value), quantity(value, "", there))


def _large(draw: random.Random, here: str, there: str) -> Written:
    value = int(10 ** draw.uniform(3, 8))
    return Written(str(value), quantity(value, "", there))


def _grouped(draw: random.Random, here: str, there: str) -> Written:
    value = int(10 ** draw.uniform(3.001, 9))
    return Written(written(value, "", here), quantity(value, "", there))


def _decimal(draw: random.Random, here: str, there: str) -> Written:
    value, decimals = draw.randrange(0, 1000), f"{draw.randrange(1, 100):02d}"[: draw.choice((1, 2))]
    decimals = decimals if decimals.strip("0") else "5"
    return Written(written(value, decimals, here), quantity(value, decimals, there))


def _grouped_decimal(draw: random.Random, here: str, there: str) -> Written:
    value, decimals = int(10 ** draw.uniform(3.001, 7)), f"{draw.randrange(1, 100):02d}"
    return Written(written(value, decimals, here), quantity(value, decimals, there))


def _currency(draw: random.Random, here: str, there: str) -> Written:
    symbol = draw.choice(list(CURRENCIES))
    value, decimals = int(10 ** draw.uniform(1, 6)), draw.choice(("", "", f"{draw.randrange(1, 100):02d}"))
    number = written(value, decimals, here)
    before = here == "en" or (here == "zh" and draw.random() < 0.5)
    words = {"$": "美元", "€": "欧元", "£": "英镑", "¥": "元"}
    text = f"{symbol}{number}" if before else f"{number}{words[symbol]}" if here == "zh" else f"{number} {symbol}"
    return Written(text, quantity(value, decimals, there, f"{symbol} {CURRENCIES[symbol]}"))


def _percent(draw: random.Random, here: str, there: str) -> Written:
    value, decimals = draw.randrange(1, 100), draw.choice(("", str(draw.randrange(1, 10))))
    text = written(value, decimals, here) + (" %" if here in ("de", "fr") else "%")
    return Written(text, quantity(value, decimals, there, "% percent prozent cent 百分"))


def _date(draw: random.Random, here: str, there: str) -> Written:
    year, month, day = draw.randrange(1800, 2040), draw.randrange(1, 13), draw.randrange(1, 29)
    name = MONTHS[here][month - 1] if here in MONTHS else ""
    first = here == "fr" and day == 1
    text = {
        "en": f"{name} {day}, {year}", "de": f"{day}. {name} {year}", "fr": f"{day}{'er' * first} {name} {year}",
        "zh": f"{year}年{month}月{day}日",
    }[here]  # fmt: skip
    return Written(text, _date_judge(year, month, day, there))


def _date_judge(year: int, month: int, day: int, there: str) -> Callable[[str], tuple[bool, bool]]:
    def judge(text: str) -> tuple[bool, bool]:
        text = plain(text)
        numbers = [int(one) for one in re.findall(r"\d+", text)]
        named = there in MONTHS and re.search(rf"\b{MONTHS[there][month - 1]}\b", text, re.IGNORECASE) is not None
        wanted = sorted([year, day] if named else [year, month, day])
        local = f"{year}年{month}月{day}日" in text.replace(" ", "") if there == "zh" else named
        return sorted(numbers) == wanted, sorted(numbers) == wanted and local

    return judge


def _iso(draw: random.Random, here: str, there: str) -> Written:
    year, month, day = draw.randrange(1990, 2040), draw.randrange(1, 13), draw.randrange(1, 29)

    def judge(text: str) -> tuple[bool, bool]:
        text = re.sub(r"(?i)\bversion 2\b|版本 ?2|第 ?2 ?版|\bv2\b|2 ?版", "", plain(text))
        same = verbatim(f"{year}-{month:02d}-{day:02d}")(text)
        other = _date_judge(year, month, day, there)(text)
        return same[0] or other[0], same[1] or other[1]

    return Written(f"{year}-{month:02d}-{day:02d}", judge)


def _time(draw: random.Random, here: str, there: str) -> Written:
    hour, minute = draw.randrange(0, 24), draw.randrange(1, 60)
    text = {"de": f"{hour}:{minute:02d} Uhr", "fr": f"{hour} h {minute:02d}"}.get(here, f"{hour}:{minute:02d}")

    def judge(text: str) -> tuple[bool, bool]:
        text = plain(text).replace("：", ":")
        found = re.findall(r"\d+", text)
        if len(found) != 2 or int(found[1]) != minute:
            return False, False
        half = re.search(r"(?i)\b[ap]\.? ?m\b|上午|下午|晚上|早上|凌晨", text) is not None
        good = int(found[0]) == hour or (half and int(found[0]) % 12 == hour % 12)
        forms = {"de": r"\d[:.]\d\d", "fr": r"\d ?[h:] ?\d\d", "zh": r"\d ?[:点时] ?\d+"}
        return good, good and re.search(forms.get(there, r"\d[:.]\d\d"), text) is not None

    return Written(text, judge)


def _phone(draw: random.Random, here: str, there: str) -> Written:
    def some(count: int) -> str:
        return str(draw.randrange(10 ** (count - 1), 10**count))

    text = draw.choice(
        (
            f"+49 {some(2)} {some(7)}", f"+1 {some(3)}-{some(3)}-{some(4)}", f"({some(3)}) {some(3)}-{some(4)}",
            f"+33 1 {some(2)} {some(2)} {some(2)} {some(2)}", f"+86 {some(3)} {some(4)} {some(4)}",
            f"0{some(3)} {some(6)}",
        )
    )  # fmt: skip
    return Written(text, digits(text))


def _range(draw: random.Random, here: str, there: str) -> Written:
    low = draw.randrange(2, 90)
    high = low + draw.randrange(2, 40)
    text = f"{low}{draw.choice('–-')}{high}"

    def judge(text: str) -> tuple[bool, bool]:
        good = re.findall(r"\d+", plain(text)) == [str(low), str(high)]
        return good, good

    return Written(text, judge)


def _unit(draw: random.Random, here: str, there: str) -> Written:
    unit = draw.choice(list(UNITS))
    value, decimals = int(10 ** draw.uniform(0.4, 3)), draw.choice(("", str(draw.randrange(1, 10))))
    return Written(
        f"{written(value, decimals, here)} {unit}", quantity(value, decimals, there, f"{plain(unit)} {UNITS[unit]}")
    )


def _year(draw: random.Random, here: str, there: str) -> Written:
    value = draw.randrange(1500, 2040)
    return Written(str(value), digits(str(value)))


def _version(draw: random.Random, here: str, there: str) -> Written:
    text = draw.choice(("", "", "v")) + ".".join(str(draw.randrange(0, 20)) for _ in range(3))
    return Written(text, verbatim(text))


def _numbered(draw: random.Random, here: str, there: str) -> Written:
    text = str(draw.randrange(10 ** draw.randrange(2, 9), 10**9))
    return Written(text, verbatim(text))


MAGNITUDES = {
    "en": {10**3: "thousand", 10**6: "million", 10**9: "billion", 10**12: "trillion"},
    "de": {10**6: "Million Millionen Mio.", 10**9: "Milliarde Milliarden Mrd.", 10**12: "Billion Billionen"},
    "fr": {10**6: "million millions M", 10**9: "milliard milliards Md", 10**12: "billion billions"},
    "zh": {10**4: "万", 10**6: "百万", 10**7: "千万", 10**8: "亿", 10**12: "万亿"},
}
ABBREVIATIONS = {
    "en": {10**3: "k", 10**6: "m", 10**9: "bn", 10**12: "tn"}, "de": {10**6: " Mio.", 10**9: " Mrd."},
    "fr": {10**6: " M", 10**9: " Md"}, "zh": {10**4: "万", 10**8: "亿"},
}  # fmt: skip


def amount(value: Decimal, there: str, wanted: str = "") -> Callable[[str], tuple[bool, bool]]:
    """The translation has this value once, in digits and words, and no other number; `wanted`: as in `quantity`."""
    sizes = [*MAGNITUDES[there].items(), *ABBREVIATIONS[there].items()]
    factors = {form.casefold(): factor for factor, forms in sizes for form in forms.split()}
    pattern = re.compile(f"(?:{'|'.join(sorted(map(re.escape, factors), key=len, reverse=True))})(?![a-zà-ÿ])")

    def judge(text: str) -> tuple[bool, bool]:
        text = plain(text)
        if wanted and not any(word in text.casefold() for word in wanted.casefold().split()):
            return False, False
        found = list(NUMBER.finditer(text))
        if len(found) != 1:
            return False, False
        word = pattern.match(text[found[0].end() :].casefold().lstrip())
        factor = 1 if word is None else factors[word[0]]
        good = any(abs(Decimal(repr(one)) * factor - value) < Decimal("0.001") for one in readings(found[0][0], there))
        return good, good

    return judge


def _size(draw: random.Random, sizes: Sequence[int]) -> tuple[str, int, Decimal]:
    """Digits in the English notation, a factor, and their product."""
    factor, digits = draw.choice(list(sizes)), str(draw.randrange(1, 100))
    digits += draw.choice(("", f".{draw.randrange(1, 10)}"))
    return digits, factor, Decimal(digits) * factor


def _abbreviated(draw: random.Random, here: str, there: str) -> Written:
    digits, factor, value = _size(draw, list(ABBREVIATIONS[here]))
    symbol = draw.choice(("$", "€", "£"))
    number = (digits.replace(".", ",") if here in ("de", "fr") else digits) + ABBREVIATIONS[here][factor]
    words = {"$": "美元", "€": "欧元", "£": "英镑"}
    space = "" if here == "fr" else " "
    text = (
        f"{symbol}{number}"
        if here == "en"
        else f"{number}{words[symbol]}"
        if here == "zh"
        else f"{number}{space}{symbol}"
    )
    return Written(text, amount(value, there, f"{symbol} {CURRENCIES[symbol]}"))


def _in_words(draw: random.Random, here: str, there: str) -> Written:
    sizes = (10**4, 10**8, 10**12) if here == "zh" else (10**6, 10**9)
    digits, factor, value = _size(draw, sizes)
    several = Decimal(digits) >= 2 if here == "fr" else digits != "1"
    word = MAGNITUDES[here][factor].split()[several and here in ("de", "fr")]
    number = digits.replace(".", ",") if here in ("de", "fr") else digits
    symbol = draw.choice(("$", "€"))
    currency = {"de": {"$": "Dollar", "€": "Euro"}, "fr": {"$": "de dollars", "€": "d'euros"},
                "zh": {"$": "美元", "€": "欧元"}}  # fmt: skip
    if here == "en":
        text = f"{symbol}{number} {word}"
    else:
        text = (
            f"{number}{word}{currency[here][symbol]}" if here == "zh" else f"{number} {word} {currency[here][symbol]}"
        )
    return Written(text, amount(value, there, f"{symbol} {CURRENCIES[symbol]}"))


def _half_day(draw: random.Random, here: str, there: str) -> Written:
    hour, minute = draw.randrange(1, 12), draw.choice((0, draw.randrange(10, 60)))
    after = draw.random() < 0.5
    clock = f"{hour}:{minute:02d}" if minute else str(hour)
    text = {
        "en": f"{clock} {'p.m.' if after else 'a.m.'}",
        "de": f"{clock} Uhr {'nachmittags' if after else 'morgens'}",
        "fr": (f"{hour} h {minute:02d}" if minute else f"{hour} heures") + (" du soir" if after else " du matin"),
        "zh": f"{'下午' if after else '上午'}{clock}{'' if minute else '点'}",
    }[here]
    return Written(text, lambda text: _judge_half_day(text, there, hour, minute, after))


def _judge_half_day(text: str, there: str, hour: int, minute: int, after: bool) -> tuple[bool, bool]:
    text = plain(text).replace("：", ":")
    found = list(map(int, re.findall(r"\d+", text)))
    said = [
        bool(re.search(words, text, re.IGNORECASE))
        for words in (
            r"\ba\.? ?m\b|morning|morgens|vormittag|früh|matin|上午|早上|凌晨|清晨|am Morgen",
            r"\bp\.? ?m\b|afternoon|evening|night|nachmittag|abend|soir|après-midi|下午|晚上|傍晚",
        )
    ]
    if there == "de":
        said[0] = re.search("morgens|vormittag|früh|am Morgen", text) is not None
    wanted = [minute] if minute else []
    plainly = found in ([hour + 12 * after, *wanted], [hour + 12 * after, *(wanted or [0])]) and not said[not after]
    halved = found in ([hour, *wanted], [hour, *(wanted or [0])]) and said == [not after, after]
    return plainly or halved, plainly or halved


KINDS: dict[str, tuple[dict[str, str], Callable[[random.Random, str, str], Written]]] = {
    "integers to 999": (templates.COUNTS, _small),
    "integers to 10⁸": (templates.COUNTS, _large),
    "with separators": (templates.COUNTS, _grouped),
    "decimals": (templates.VALUES, _decimal),
    "separators and decimals": (templates.VALUES, _grouped_decimal),
    "currencies": (templates.PRICES, _currency),
    "amounts, abbreviated": (templates.PRICES, _abbreviated),
    "amounts in words": (templates.PRICES, _in_words),
    "times of half a day": (templates.HALF_DAYS, _half_day),
    "percent": (templates.SHARES, _percent),
    "dates in words": (templates.DATES, _date),
    "dates, ISO": (templates.ISO, _iso),
    "times": (templates.TIMES, _time),
    "phone numbers": (templates.PHONES, _phone),
    "ranges": (templates.RANGES, _range),
    "units": (templates.UNITS, _unit),
    "years": (templates.YEARS, _year),
    "versions": (templates.VERSIONS, _version),
    "reference numbers": (templates.NUMBERED, _numbered),
}
