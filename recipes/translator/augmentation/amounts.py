"""Amounts and dates in four languages: every function draws one and gives its text in each language.

Numbers with separators follow the language: 1,234.5 in English and Chinese, 1.234,5 in German, 1 234,5 in French;
without separators they stay without. Numeric dates (14.03.2021, 3/14/2021) stay as they are, since the order of day
and month is unknown. Dates in words, months and weekdays follow CLDR (Babel).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import date, time, timedelta

from babel.dates import format_date, get_day_names, get_month_names

from allyouneed.apps.translate.numbers import words as number_words

LANGUAGES = ("en", "de", "fr", "zh")
LOCALES = {"en": "en_US", "de": "de_DE", "fr": "fr_FR", "zh": "zh_Hans_CN"}
SEPARATORS = {"en": (",", "."), "de": (".", ","), "fr": (" ", ","), "zh": (",", ".")}
Texts = dict[str, str]


def same(text: str) -> Texts:
    return dict.fromkeys(LANGUAGES, text)


def number(digits: str, grouped: bool, language: str) -> str:
    """`digits`: with a decimal point, if any."""
    thousands, point = SEPARATORS[language]
    whole, dot, rest = digits.partition(".")
    if grouped:
        whole = f"{int(whole):,}".replace(",", thousands)
    return whole + (point + rest if dot else "")


def numbers_in(digits: str, grouped: bool = False) -> Texts:
    return {language: number(digits, grouped, language) for language in LANGUAGES}


def suffixed(texts: Texts, *suffixes: str) -> Texts:
    return {language: texts[language] + suffix for language, suffix in zip(LANGUAGES, suffixes, strict=True)}


def integer(rng: random.Random, digits: int) -> int:
    return rng.randint(10 ** (digits - 1) if digits > 1 else 2, 10**digits - 1)


def count(rng: random.Random) -> Texts:
    value = integer(rng, rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 7)))
    if rng.random() < 0.25 and value >= 100:
        value = value // 100 * 100
    return numbers_in(str(value), value >= 1000 and rng.random() < 0.7)


def decimal(rng: random.Random) -> str:
    whole = rng.choice((0, integer(rng, rng.choice((1, 1, 2, 3)))))
    return f"{whole}.{rng.randint(1, 10 ** rng.choice((1, 1, 2)) - 1)}"


def any_number(rng: random.Random) -> Texts:
    kind = rng.random()
    if kind < 0.4:
        return numbers_in(decimal(rng))
    if kind < 0.55:
        return numbers_in(f"{integer(rng, rng.randint(4, 6))}.{rng.randint(1, 99)}", True)
    if kind < 0.65:
        return {language: "-" + text for language, text in numbers_in(decimal(rng)).items()}
    return count(rng)


def percent(rng: random.Random) -> Texts:
    texts = numbers_in(decimal(rng)) if rng.random() < 0.5 else same(str(rng.randint(2, 100)))
    if rng.random() < 0.6:
        return suffixed(texts, "%", " %", " %", "%")
    return suffixed(texts, rng.choice((" percent", " per cent")), " Prozent", " pour cent", "%")


CURRENCIES = (  # symbol, code, words
    ("$", "USD", (" dollars", " Dollar", " dollars", "美元")),
    ("€", "EUR", (" euros", " Euro", " euros", "欧元")),
    ("£", "GBP", (" pounds", " Pfund", " livres", "英镑")),
    ("¥", "JPY", (" yen", " Yen", " yens", "日元")),
    ("", "CNY", (" yuan", " Yuan", " yuans", "元")),
    ("", "CHF", (" Swiss francs", " Schweizer Franken", " francs suisses", "瑞士法郎")),
    ("", "RUB", (" rubles", " Rubel", " roubles", "卢布")),
    ("", "INR", (" rupees", " Rupien", " roupies", "卢比")),
)


def money(rng: random.Random) -> Texts:
    symbol, code, words = rng.choice(CURRENCIES[: rng.choice((2, 5, 8))])
    value = str(integer(rng, rng.choice((1, 2, 2, 3, 3, 4, 5, 6))))
    grouped = len(value) > 3 and rng.random() < 0.75
    cents = f".{rng.randint(0, 99):02}" if rng.random() < 0.35 else ""
    texts = numbers_in(value + cents, grouped)
    form = rng.random()
    if symbol and form < 0.45:
        after = {language: f"{texts[language]} {symbol}" for language in LANGUAGES}
        return after | {
            "en": symbol + texts["en"],
            "zh": texts["zh"] + words[3] if symbol != "¥" else "¥" + texts["zh"],
        }
    if form < 0.6:
        return {language: f"{texts[language]} {code}" for language in LANGUAGES}
    return suffixed(texts, *words)


def scaled(rng: random.Random) -> tuple[Texts, bool]:
    """A large number with its scale, and whether French needs `de` after it."""
    power = rng.choice((3, 6, 6, 6, 9, 9))
    texts = rng.choice(("", "", "5")) if power > 3 else ""
    digits = str(integer(rng, rng.randint(1, 3)))
    if power > 3 and len(digits) < 3 and (texts or rng.random() < 0.5):
        digits += f".{rng.randint(1, 9)}"
    words = {
        3: (" thousand", " Tausend", " mille", ""),
        6: (" million", " Millionen", " millions", ""),
        9: (" billion", " Milliarden", " milliards", ""),
    }[power]
    found = suffixed(numbers_in(digits), *words)
    found["zh"] = chinese_scale(round(float(digits) * 10**power))
    return found, power > 3


def chinese_scale(value: int) -> str:
    """35000000 → 3500万, 450000 → 45万, 2500000000 → 25亿, 1234 → 1234."""
    for size, name in ((10**8, "亿"), (10**4, "万")):
        if value >= size and value % (size // 100) == 0:
            return f"{value / size:.2f}".rstrip("0").rstrip(".") + name
    return str(value)


def large(rng: random.Random) -> Texts:
    texts, de = scaled(rng)
    return texts | {"fr:de": texts["fr"] + (" de " if de else " ")}


def large_money(rng: random.Random) -> Texts:
    texts, de = scaled(rng)
    _, _, words = rng.choice(CURRENCIES[:5])
    link = " " if not de else " d'" if words[2] == " euros" else " de "
    return suffixed(texts, words[0], words[1], link + words[2].strip(), words[3])


UNITS = {
    "distance": (
        ("km", (" kilometers", " Kilometer", " kilomètres", "公里")),
        ("m", (" meters", " Meter", " mètres", "米")),
        ("", (" miles", " Meilen", " miles", "英里")),
    ),
    "unit": (
        ("cm", (" centimeters", " Zentimeter", " centimètres", "厘米")),
        ("mm", (" millimeters", " Millimeter", " millimètres", "毫米")),
        ("m", (" meters", " Meter", " mètres", "米")),
        ("km", (" kilometers", " Kilometer", " kilomètres", "公里")),
        ("", (" feet", " Fuß", " pieds", "英尺")),
        ("", (" inches", " Zoll", " pouces", "英寸")),
    ),
    "weight": (
        ("kg", (" kilograms", " Kilogramm", " kilogrammes", "公斤")),
        ("g", (" grams", " Gramm", " grammes", "克")),
        ("t", (" tons", " Tonnen", " tonnes", "吨")),
        ("", (" pounds", " Pfund", " livres", "磅")),
    ),
    "volume": (
        ("l", (" liters", " Liter", " litres", "升")),
        ("ml", (" milliliters", " Milliliter", " millilitres", "毫升")),
    ),
    "degrees": (
        ("°C", (" degrees Celsius", " Grad Celsius", " degrés Celsius", "摄氏度")),
        ("°F", (" degrees Fahrenheit", " Grad Fahrenheit", " degrés Fahrenheit", "华氏度")),
        ("°C", (" degrees", " Grad", " degrés", "度")),
    ),
    "bytes": tuple((unit, (f" {unit}",) * 4) for unit in ("kB", "KB", "MB", "GB", "TB", "MiB", "GiB")),
}


def measure(kind: str) -> Callable[[random.Random], Texts]:
    def draw(rng: random.Random) -> Texts:
        symbol, words = rng.choice(UNITS[kind])
        value = str(integer(rng, rng.choice((1, 2, 2, 3, 4)))) if kind != "degrees" else str(rng.randint(2, 250))
        if rng.random() < 0.35:
            value += f".{rng.randint(1, 9)}"
        texts = numbers_in(
            value, value.partition(".")[0] > "999" and len(value.partition(".")[0]) > 3 and rng.random() < 0.6
        )
        if symbol and rng.random() < 0.5:
            gap = "" if symbol.startswith("°") and rng.random() < 0.5 else " "
            return suffixed(texts, gap + symbol, " " + symbol, " " + symbol, gap + symbol)
        return suffixed(texts, *words)

    return draw


def some_day(rng: random.Random) -> date:
    return date(rng.choice((1700, 1900, 1950, 2000, 2000)), 1, 1) + timedelta(days=rng.randrange(365 * 60))


PATTERNS = {
    "long": {"en": ("MMMM d, y", "d MMMM y"), "de": ("d. MMMM y",), "fr": ("d MMMM y",), "zh": ("y年M月d日",)},
    "full": {
        "en": ("EEEE, MMMM d, y",), "de": ("EEEE, 'den' d. MMMM y",), "fr": ("EEEE d MMMM y",), "zh": ("y年M月d日EEEE",)
    },
    "short": {"en": ("MMMM d", "d MMMM"), "de": ("d. MMMM",), "fr": ("d MMMM",), "zh": ("M月d日",)},
    "month": {"en": ("MMMM y",), "de": ("MMMM y",), "fr": ("MMMM y",), "zh": ("y年M月",)},
}  # fmt: skip


def dated(day: date, style: str, rng: random.Random) -> Texts:
    found = {}
    for language in LANGUAGES:
        text = format_date(day, rng.choice(PATTERNS[style][language]), LOCALES[language])
        found[language] = text
    if style != "month" and day.day == 1:
        found["fr"] = found["fr"].replace("1 ", "1er ", 1)
    return found


def spelt_date(rng: random.Random) -> Texts:
    return dated(some_day(rng), rng.choice(("long", "long", "short")), rng)


def any_date(rng: random.Random) -> Texts:
    day = some_day(rng)
    if rng.random() < 0.4:
        return dated(day, rng.choice(("long", "full", "month", "short")), rng)
    return same(day.strftime(rng.choice(("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%Y.%m.%d"))))


def clock(rng: random.Random) -> Texts:
    return same(f"{rng.randrange(24):02}:{rng.randrange(60):02}" + rng.choice(("", "", f":{rng.randrange(60):02}")))


def time_of_day(rng: random.Random) -> Texts:
    at = time(rng.randrange(1, 24), rng.choice((0, 15, 30, 45, rng.randrange(60))))
    plain = f"{at.hour}:{at.minute:02}"
    return {
        "en": plain,
        "de": f"{plain} Uhr",
        "fr": f"{at.hour} h {at.minute:02}" if at.minute else f"{at.hour} h",
        "zh": plain,
    }


def am_pm(rng: random.Random) -> Texts:
    hour, minute = rng.randrange(1, 12), rng.choice((0, 15, 30, 45, rng.randrange(60)))
    late = rng.random() < 0.6
    rest = f":{minute:02}" if minute else ""
    day = hour + 12 * late
    return {
        "en": f"{hour}{rest} " + rng.choice(("p.m.", "pm") if late else ("a.m.", "am")).rstrip("."),
        "de": f"{day}{rest} Uhr",
        "fr": f"{day} h {minute:02}" if minute else f"{day} h",
        "zh": ("晚上" if day >= 18 else "下午" if late else "上午" if hour > 5 else "凌晨")
        + (f"{hour}点{minute}分" if minute else f"{hour}点"),
    }


def phone(rng: random.Random) -> Texts:
    def digits(size: int) -> str:
        return "".join(rng.choice("0123456789") for _ in range(size))

    forms = (
        f"+{rng.choice((1, 33, 44, 49, 86))} {digits(2)} {digits(3)} {digits(4)}",
        f"({digits(3)}) {digits(3)}-{digits(4)}",
        f"{digits(3)}-{digits(4)}",
        f"0{digits(2)}-{digits(8)}",
        f"0{digits(3)} {digits(6)}",
        f"0{digits(1)} {digits(2)} {digits(2)} {digits(2)} {digits(2)}",
        f"1{digits(10)}",
        f"0{digits(4)}/{digits(5)}",
    )
    return same(rng.choice(forms))


def version(rng: random.Random) -> Texts:
    parts = ".".join(
        str(rng.choice((rng.randrange(10), rng.randrange(30)))) for _ in range(rng.choice((2, 2, 3, 3, 4)))
    )
    return same(rng.choice(("", "", "v")) + parts + rng.choice(("", "", "", "-beta", "rc1", "-alpha.2")))


def score(rng: random.Random) -> Texts:
    here, there = rng.randrange(12), rng.randrange(12)
    return {
        "en": f"{here}{rng.choice('–-')}{there}",
        "de": f"{here}:{there}",
        "fr": f"{here}-{there}",
        "zh": f"{here}:{there}",
    }


def ordinal(rng: random.Random) -> Texts:
    value = rng.choice((rng.randint(2, 12), rng.randint(2, 99)))
    ending = "th" if value % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th")
    return {"en": f"{value}{ending}", "de": f"{value}.", "fr": f"{value}e", "zh": str(value)}


def century(rng: random.Random) -> Texts:
    value = rng.randint(9, 21)
    ending = {21: "st"}.get(value, "th")
    roman = to_roman(value)
    return {"en": f"{value}{ending}", "de": f"{value}.", "fr": rng.choice((f"{value}e", f"{roman}e")), "zh": str(value)}


def to_roman(value: int) -> str:
    text = ""
    for size, letters in (
        (100, "C"),
        (90, "XC"),
        (50, "L"),
        (40, "XL"),
        (10, "X"),
        (9, "IX"),
        (5, "V"),
        (4, "IV"),
        (1, "I"),
    ):
        text += letters * (value // size)
        value %= size
    return text


def spread(rng: random.Random) -> Texts:
    low = rng.choice((rng.randint(2, 20), rng.randint(2, 90)))
    high = low + rng.randint(1, 30)
    if rng.random() < 0.5:
        return same(f"{low}{rng.choice(('-', '–'))}{high}")
    return {"en": f"{low} to {high}", "de": f"{low} bis {high}", "fr": f"{low} à {high}", "zh": f"{low}到{high}"}


def chinese_words(value: int) -> str:
    """Up to 9999."""
    digits, text, zero = "零一二三四五六七八九", "", False
    for size, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        one, value = divmod(value, size)
        if one:
            text += ("零" if zero and text else "") + digits[one] + name
            zero = False
        else:
            zero = True
    return text.removeprefix("一") if text.startswith("一十") else text


def in_words(rng: random.Random) -> Texts:
    value = rng.choice((rng.randint(2, 12), rng.randint(13, 99), rng.randint(13, 99), rng.randint(2, 99) * 100))
    value += value % 100 == 1
    chinese = "两" if value == 2 else chinese_words(value)
    spelt = {"en": number_words._english, "de": number_words._german, "fr": number_words._french}
    return {**{one: words(value) for one, words in spelt.items()}, "zh": chinese}


def weekday(rng: random.Random) -> Texts:
    day = rng.randrange(7)
    return {one: get_day_names("wide", locale=LOCALES[one])[day] for one in LANGUAGES}


def month(rng: random.Random) -> Texts:
    one = rng.randint(1, 12)
    return {language: get_month_names("wide", "stand-alone", LOCALES[language])[one] for language in LANGUAGES} | {
        "zh": f"{one}月"
    }
