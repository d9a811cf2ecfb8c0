"""Written dates in English, German and Chinese → ISO dates: the translation task that needs no download.

It is small enough for two cores and two minutes, yet a real one: three languages, two scripts, months that must be
known by heart and digits that must be copied in another order. Dates, not their spellings, are split, so a test date
was never seen in training in any form. Ambiguous forms (03/04/2026) are not written.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Collection
from pathlib import Path

FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
TRAIN, VALID, TEST = 60_000, 1_000, 1_000


def _words(text: str) -> list[str]:
    return text.split()


EN_MONTHS = _words("January February March April May June July August September October November December")
EN_SHORT = _words("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec")
EN_DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
EN_ORDINALS = _words(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth twenty-first twenty-second twenty-third "
    "twenty-fourth twenty-fifth twenty-sixth twenty-seventh twenty-eighth twenty-ninth thirtieth thirty-first"
)

DE_MONTHS = _words("Januar Februar März April Mai Juni Juli August September Oktober November Dezember")
DE_SHORT = _words("Jan. Feb. März Apr. Mai Juni Juli Aug. Sept. Okt. Nov. Dez.")
DE_DAYS = _words("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag")
DE_ORDINALS = _words(  # without the ending: "fünfzehnt" + "er" / "en" / "e"
    "erst zweit dritt viert fünft sechst siebt acht neunt zehnt elft zwölft dreizehnt vierzehnt fünfzehnt sechzehnt "
    "siebzehnt achtzehnt neunzehnt zwanzigst einundzwanzigst zweiundzwanzigst dreiundzwanzigst vierundzwanzigst "
    "fünfundzwanzigst sechsundzwanzigst siebenundzwanzigst achtundzwanzigst neunundzwanzigst dreißigst "
    "einunddreißigst"
)

ZH_DIGITS = "〇一二三四五六七八九"
ZH_WEEKDAYS = "一二三四五六日"

Form = Callable[[datetime.date], str]


def _english_ordinal(day: int) -> str:
    suffix = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{suffix}"


def _chinese_number(number: int) -> str:
    """1 to 99 as spoken: 十, 十一, 二十, 三十一."""
    tens, ones = divmod(number, 10)
    return (ZH_DIGITS[tens] if tens > 1 else "") + ("十" if tens else "") + (ZH_DIGITS[ones] if ones else "")


def _chinese_year(year: int, zero: str = "〇") -> str:
    return "".join(ZH_DIGITS[int(digit)] for digit in str(year)).replace("〇", zero)


def _en(date: datetime.date) -> tuple[str, str, str, str]:
    return EN_MONTHS[date.month - 1], EN_SHORT[date.month - 1], EN_DAYS[date.weekday()], EN_ORDINALS[date.day - 1]


def _de(date: datetime.date) -> tuple[str, str, str, str]:
    return DE_MONTHS[date.month - 1], DE_SHORT[date.month - 1], DE_DAYS[date.weekday()], DE_ORDINALS[date.day - 1]


ENGLISH: tuple[Form, ...] = (
    lambda d: f"{d.day} {_en(d)[0]} {d.year}",
    lambda d: f"{d.day} {_en(d)[1]} {d.year}",
    lambda d: f"{_en(d)[0]} {d.day}, {d.year}",
    lambda d: f"{_en(d)[0]} {_english_ordinal(d.day)}, {d.year}",
    lambda d: f"{_en(d)[1]} {d.day}, {d.year}",
    lambda d: f"{_english_ordinal(d.day)} {_en(d)[0]} {d.year}",
    lambda d: f"{_english_ordinal(d.day)} of {_en(d)[0]} {d.year}",
    lambda d: f"the {_english_ordinal(d.day)} of {_en(d)[0]}, {d.year}",
    lambda d: f"the {_en(d)[3]} of {_en(d)[0]} {d.year}",
    lambda d: f"{_en(d)[0]} the {_en(d)[3]}, {d.year}",
    lambda d: f"{_en(d)[2]}, {d.day} {_en(d)[0]} {d.year}",
    lambda d: f"{_en(d)[2]}, {_en(d)[0]} {d.day}, {d.year}",
    lambda d: f"{_en(d)[2]}, the {_en(d)[3]} of {_en(d)[0]} {d.year}",
    lambda d: f"{d.day:02d}-{_en(d)[1]}-{d.year}",
    lambda d: f"{d.year} {_en(d)[0]} {d.day}",
)
GERMAN: tuple[Form, ...] = (
    lambda d: f"{d.day}. {_de(d)[0]} {d.year}",
    lambda d: f"{d.day:02d}. {_de(d)[0]} {d.year}",
    lambda d: f"{d.day}. {_de(d)[1]} {d.year}",
    lambda d: f"den {d.day}. {_de(d)[1]} {d.year}",
    lambda d: f"den {d.day}. {_de(d)[0]} {d.year}",
    lambda d: f"am {d.day}. {_de(d)[0]} {d.year}",
    lambda d: f"der {d.day}. {_de(d)[0]} {d.year}",
    lambda d: f"{_de(d)[3]}er {_de(d)[0]} {d.year}",
    lambda d: f"am {_de(d)[3]}en {_de(d)[0]} {d.year}",
    lambda d: f"der {_de(d)[3]}e {_de(d)[0]} {d.year}",
    lambda d: f"{_de(d)[2]}, {d.day}. {_de(d)[0]} {d.year}",
    lambda d: f"{_de(d)[2]}, der {d.day}. {_de(d)[0]} {d.year}",
    lambda d: f"{_de(d)[2]}, den {_de(d)[3]}en {_de(d)[0]} {d.year}",
)
CHINESE: tuple[Form, ...] = (
    lambda d: f"{d.year}年{d.month}月{d.day}日",
    lambda d: f"{d.year}年{d.month:02d}月{d.day:02d}日",
    lambda d: f"{d.year} 年 {d.month} 月 {d.day} 日",
    lambda d: f"{d.year}年{d.month}月{d.day}号",
    lambda d: f"公元{d.year}年{d.month}月{d.day}日",
    lambda d: f"{_chinese_year(d.year)}年{_chinese_number(d.month)}月{_chinese_number(d.day)}日",
    lambda d: f"{_chinese_year(d.year, '零')}年{_chinese_number(d.month)}月{_chinese_number(d.day)}日",
    lambda d: f"{_chinese_year(d.year)}年{_chinese_number(d.month)}月{_chinese_number(d.day)}号",
    lambda d: f"{d.year}年{d.month}月{d.day}日星期{ZH_WEEKDAYS[d.weekday()]}",
    lambda d: (
        f"{_chinese_year(d.year)}年{_chinese_number(d.month)}月{_chinese_number(d.day)}日"
        f"，星期{ZH_WEEKDAYS[d.weekday()]}"
    ),
)
LANGUAGES: dict[str, tuple[Form, ...]] = {"en": ENGLISH, "de": GERMAN, "zh": CHINESE}


def forms(date: datetime.date) -> list[str]:
    """Every way this date is written, before upper and lower case."""
    return [form(date) for group in LANGUAGES.values() for form in group]


def _write(date: datetime.date, rng: random.Random) -> str:
    text = rng.choice(LANGUAGES[rng.choice(list(LANGUAGES))])(date)
    return rng.choices([text, text.lower(), text.upper()], [6, 1, 3])[0]


def generate(count: int, seed: int = 0, exclude: Collection[datetime.date] = ()) -> list[tuple[str, str]]:
    """`count` pairs (written date, ISO date), never of a date in `exclude`."""
    banned = set(exclude)
    days = (LAST - FIRST).days + 1
    allowed = [day for day in (FIRST + datetime.timedelta(n) for n in range(days)) if day not in banned]
    if not allowed:
        raise ValueError("every date is excluded")
    return _pairs(count, allowed, random.Random(seed))


def _pairs(count: int, dates: list[datetime.date], rng: random.Random) -> list[tuple[str, str]]:
    """Pairs of different dates as long as there are any, then from the beginning again."""
    order: list[datetime.date] = []
    while len(order) < count:
        order += rng.sample(dates, min(len(dates), count - len(order)))
    return [(_write(date, rng), date.isoformat()) for date in order]


def splits(
    seed: int = 0, train: int = TRAIN, valid: int = VALID, test: int = TEST
) -> tuple[list[tuple[str, str]], list[tuple[str, str]], list[tuple[str, str]]]:
    """Train, valid and test pairs; no date of one is in another."""
    rng = random.Random(seed)
    dates = [FIRST + datetime.timedelta(n) for n in range((LAST - FIRST).days + 1)]
    if valid + test >= len(dates):
        raise ValueError(f"valid + test must leave dates to train on; there are {len(dates)}")
    rng.shuffle(dates)
    held_out = valid + test
    return (
        _pairs(train, dates[held_out:], rng),
        _pairs(valid, dates[:valid], rng),
        _pairs(test, dates[valid:held_out], rng),
    )


def write(folder: Path | str, seed: int = 0, train: int = TRAIN, valid: int = VALID, test: int = TEST) -> list[Path]:
    """Write train.tsv, valid.tsv and test.tsv; the paths written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, pairs in zip(("train", "valid", "test"), splits(seed, train, valid, test), strict=True):
        path = folder / f"{name}.tsv"
        path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8", newline="\n")
        paths.append(path)
    return paths
