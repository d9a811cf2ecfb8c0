"""Put right the numbers of a translation: those that a model garbled, and the notation of the target language.

Numbers in digits are matched by value. One that has no equal in the translation replaces what stands there instead, if
that is clear: as many numbers are wrong as are missing, in the same order. `1,234.5` becomes `1.234,5` in German. What
is written in words, and what the target says otherwise (`14:30`, 2:30 p.m.), is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from allyouneed.apps.translate.numbers.numbers import TIMES, _chinese, _in_words, _spelled
from allyouneed.apps.translate.splitting.edits import Edit, apply

# group separator to write, those to read, decimal mark
NOTATION = {
    "en": (",", ",\u00a0\u202f\u2009'’", "."),
    "zh": (",", ",\u00a0\u202f\u2009", "."),
    "de": (".", ".\u00a0\u202f\u2009'’ ", ","),
    "fr": ("\u202f", ".\u00a0\u202f\u2009 ", ","),
}
MAGNITUDES = TIMES | {"trillion": 10**12, "billionen": 10**12, "md": 10**9, "bn": 10**9, "milles": 1000}
FACTOR = "[多余餘几幾来來]?(?:[十百千]?[万萬亿億])|" + "|".join(
    sorted((n for n in MAGNITUDES if len(n) > 1), key=len, reverse=True)
)
NUMBER = re.compile(
    r"(?<![A-Za-z0-9_])(?<![0-9][.,])(?<![A-Za-z]-)"
    r"(?P<digits>(?<![0-9] )(?!0)[0-9]{1,3}(?:[.,'’\u00a0\u202f\u2009 ][0-9]{3}(?![0-9]))+(?! [0-9])(?:[.,][0-9]+)?"
    rf"|[0-9]+(?:[.,][0-9]+)?)(?![0-9]|[.,][0-9]|(?-i:[A-Z]))(?:\s?(?P<factor>{FACTOR})(?![A-Za-zÀ-ɏ]))?"
    r"|(?P<numeral>[零〇一二两兩三四五六七八九]*[十百千][零〇一二两兩三四五六七八九十百千万萬亿億]*)",
    re.IGNORECASE,
)
TIME = re.compile(
    r"(?<![0-9:.,])([0-9]{1,2})\s?(?:[:：]|h:?|[点點时時])\s?([0-9]{2})(?![0-9:]|[.,][0-9])(?:\s?分)?"
    r"|(?<![0-9:.,])([0-9]{1,2})\.([0-9]{2})(?=\s?(?:Uhr|[ap]\.?\s?m\b))"
    r"|(?<![0-9:.,])([0-9]{1,2})(?=\s?(?:Uhr|o['’]clock|[ap]\.?\s?m\b|heures?\b|h\b|[点點时時](?![间間])))",
    re.IGNORECASE,
)
SHORT_FACTOR = re.compile(r"\s?(?:[kKMGT]|[tb]n|Mio|Mrd|Md)(?![a-z])")
HALVES = re.compile(r"(?i)\b[ap]\.?\s?m\b|上午|下午|晚上|早上|凌晨|中午|傍晚|清晨")
NEXT = re.compile(r"[\s().+/–—-]*")  # between the parts of a phone number, a range
NEXT_WRONG = re.compile(r"[\s().,:：+/–—\-h点點时時]*")
MONTHS = {
    name: number + 1
    for names in (
        "january february march april may june july august september october november december",
        "januar februar märz april mai juni juli august september oktober november dezember",
        "janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    )
    for number, name in enumerate(names.split())
}
DECADE = re.compile(r"['’]?s\b|er\b|\s?年代")
# before a number with a point that is no decimal: a version, a section
NAMED = re.compile(r"(?:(?<=[\w,;:)] )[A-Z]\w*|(?i:version|section|chapter|figure|table|release|part)|版本?|第)\s*$")
MONTH = re.compile(rf"(?i)\b(?:{'|'.join(MONTHS)})\b")


@dataclass
class Figure:
    """A number of a text. `values`: what it can mean in the notation of its language; `others`: in any."""

    start: int
    end: int
    text: str
    values: set[float]
    others: set[float] = field(default_factory=set)
    factor: float = 1.0
    time: tuple[int, int | None] | None = None  # hour and minute, if it has one
    is_numeral: bool = False  # Chinese
    is_name: bool = False  # a version, a section: 3.11
    matched: bool = False


def put_right(source: str, target: str, here: str, there: str) -> str:
    """The translation with the numbers of its source; `here`, `there`: languages, of which the notation is known."""
    if here not in NOTATION or there not in NOTATION or not re.search("[0-9]", source):
        return target
    wanted = [one for one in figures(source, here) if not one.is_numeral]
    for one in wanted:
        if re.fullmatch("[0-9]{1,3}[.,][0-9]{3}", one.text):  # often written as in another language
            one.values |= {float(re.sub("[^0-9]", "", one.text)) * one.factor}
    found = figures(target, there)
    edits = _match(wanted, found, source, target, here, there)
    missing = _runs([one for one in wanted if not one.matched], source, NEXT, target)
    wrong = _runs([one for one in found if not one.matched], target, NEXT_WRONG, source)
    if len(missing) == len(wrong):
        edits += _replace(missing, wrong, source, target, here, there)
    return apply(target, sorted(edits)) if edits else target


def figures(text: str, language: str) -> list[Figure]:
    """The numbers and clock times of a text in digits, in order; Chinese numerals from ten on."""
    found = []
    for one in TIME.finditer(text):
        hour, minute = int(one[1] or one[3] or one[5]), one[2] or one[4]
        found.append(
            Figure(one.start(), one.end(), one[0], set(), time=(hour, None if minute is None else int(minute)))
        )
    times = [(one.start, one.end) for one in found]
    for one in NUMBER.finditer(text):
        if any(start < one.end() and one.start() < end for start, end in times):
            continue
        if one["numeral"]:
            values = {float(value) for value in _chinese(one[0])}
            found.append(Figure(one.start(), one.end(), one[0], values, is_numeral=True))
            continue
        factor = _factor(one["factor"] or "")
        end = one.end("digits")
        plain = text[one.start() : end]
        values = {value * factor for value in readings(plain, language)}
        if DECADE.match(text, end):  # the 1990s, die 90er Jahre
            values |= {value % 100 for value in values} | {1900 + value for value in values if value < 100}
        others = {value * factor for other in ("en", "de") for value in readings(plain, other)}
        found.append(
            Figure(one.start(), end, plain, values, others, factor, is_name=bool(NAMED.search(text[: one.start()])))
        )
    return sorted(found, key=lambda figure: figure.start)


def readings(digits: str, language: str) -> set[float]:
    """What a number in digits means in a language; nothing if it is not written so."""
    _, groups, point = NOTATION[language]
    found = re.fullmatch(
        rf"([0-9]+|[0-9]{{1,3}}(?:[{re.escape(groups)}][0-9]{{3}})+)(?:{re.escape(point)}([0-9]+))?", digits
    )
    if found is None:
        return set()
    return {float(re.sub("[^0-9]", "", found[1]) + "." + (found[2] or "0"))}


def localized(digits: str, here: str, there: str) -> str:
    """A number in the notation of another language; as it is, if it is not in that of its own."""
    if not readings(digits, here):
        return digits
    _, groups, point = NOTATION[here]
    whole, _, rest = digits.partition(point)
    group, _, mark = NOTATION[there]
    return re.sub(f"[{re.escape(groups)}]", group, whole) + (mark + rest if rest else "")


def localized_text(text: str, here: str, there: str) -> str:
    """A text such as `$1,250.50` or `34,6 ml` with its numbers in the notation of another language."""
    if here not in NOTATION or there not in NOTATION:
        return text

    def replaced(found: re.Match[str]) -> str:
        digits = found["digits"]
        return found[0] if digits is None else found[0].replace(digits, localized(digits, here, there))

    return NUMBER.sub(replaced, text)


def _factor(word: str) -> float:
    word = word.lower()
    if word in MAGNITUDES:
        return float(MAGNITUDES[word])
    product = 1.0
    for char in word:
        product *= {"十": 10}.get(char, MAGNITUDES.get(char, 1))
    return product


def _is_in_words(figure: Figure, text: str) -> bool:
    """Whether a text has this number in words."""
    if figure.time is not None:
        return False
    months = {float(MONTHS[one.lower()]) for one in MONTH.findall(text)}
    return bool(figure.values & (_in_words(text) | months)) or _spelled(figure.values, text)


def _match(
    wanted: Sequence[Figure], found: Sequence[Figure], source: str, target: str, here: str, there: str
) -> list[Edit]:
    """Pair numbers of the same value; what has the notation of the source is rewritten."""
    edits = []
    halves = HALVES.search(source + " " + target) is not None
    for own in (True, False):  # those in the target's notation first
        for one in wanted:
            if one.matched:
                continue
            for other in found:
                if other.matched or not _same(one, other, own, halves):
                    continue
                one.matched = other.matched = True
                if not own and not one.is_name and _word_before(source, one) != _word_before(target, other):
                    edits.append(Edit(other.start, other.end, localized(other.text, here, there)))
                elif there == "en" and other.time is not None and other.time[1] is not None and "h" in other.text:
                    edits.append(Edit(other.start, other.end, _clock(other.time, there)))
                break
    return edits


def _word_before(text: str, figure: Figure) -> str:
    """`Python 3.11`: a name that both texts have; different texts if there is none, so that they never agree."""
    found = re.search(r"[A-Za-z]\w*(?=\s$)", text[: figure.start])
    return found[0] if found else text


def _same(one: Figure, other: Figure, own: bool, halves: bool) -> bool:
    if one.time is not None and other.time is not None:
        hours = {one.time[0] % 12, other.time[0] % 12} if halves else {one.time[0], other.time[0]}
        return own and len(hours) == 1 and (one.time[1] or 0) == (other.time[1] or 0)
    if one.time is not None or other.time is not None:
        return False
    if not own:  # "1,400" in French is often meant as in English
        return other.text == one.text and not re.fullmatch("[0-9]{1,3},[0-9]{3}", one.text)
    short, long = sorted((one.text, other.text), key=len)
    if len(short) == 2 and len(long) == 4 and long.isdigit() and long.endswith(short):
        return True  # 1998/1999, 1998-99
    if max(_zeros(one.text), _zeros(other.text)) and one.text != other.text and len(one.text + other.text) > 4:
        return False
    return any(abs(a - b) <= 1e-9 * max(1, abs(a)) for a in one.values or one.others for b in other.values)


def _zeros(digits: str) -> bool:
    """Leading zeros belong to a code: 007, 0602."""
    return len(digits) > 1 and digits[0] == "0" and digits.isdigit()


def _alike(good: Sequence[Figure], bad: Sequence[Figure], after: str) -> bool:
    """Whether one can be a garbled form of the other: most digits are the same, in the same order. `after`: what
    follows. Equal digits may be another notation (`1.5 million`, `1,5 M€`), which is left alone."""
    a, b = ("".join(_digits(one) for one in some) for some in (good, bad))
    if not a or not b:
        return False
    if len(good) == 1 and good[0].time is not None and (len(bad) > 1 or bad[0].time is not None):
        return good[0].time[0] == int(_digits(bad[0])[:2] if len(bad) > 1 else (bad[0].time or (0,))[0]) or a[0] == b[0]
    if a.strip("0") == b.strip("0"):
        return (
            a == b and len(good) == len(bad) == 1 and good[0].factor == bad[0].factor and not SHORT_FACTOR.match(after)
        )
    rows = [0] * (len(b) + 1)  # longest common subsequence
    for char in a:
        before = 0
        for n, other in enumerate(b):
            before, rows[n + 1] = rows[n + 1], before + 1 if char == other else max(rows[n + 1], rows[n])
    common, longest = rows[-1], max(len(a), len(b))
    share = 0.6 if longest < 8 else 0.45
    return common >= share * longest or (common == min(len(a), len(b)) and 2 * common >= longest)


def _digits(figure: Figure) -> str:
    text = str(int(max(figure.values))) if figure.is_numeral else figure.text
    return re.sub("[^0-9]", "", text)


def _clock(time: tuple[int, int | None], language: str) -> str:
    hour, minute = time
    if minute is None:
        return str(hour)
    return f"{hour} h {minute:02d}" if language == "fr" else f"{hour}:{minute:02d}"


def _runs(some: Sequence[Figure], text: str, between: re.Pattern[str], other: str) -> list[list[Figure]]:
    """Numbers that stand together (a phone number, a range); without single ones that the other text has in words."""
    runs: list[list[Figure]] = []
    for one in some:
        if runs and between.fullmatch(text, runs[-1][-1].end, one.start):
            runs[-1].append(one)
        else:
            runs.append([one])
    return [run for run in runs if len(run) > 1 or not _is_in_words(run[0], other)]


def _replace(
    missing: Sequence[list[Figure]], wrong: Sequence[list[Figure]], source: str, target: str, here: str, there: str
) -> list[Edit]:
    """Numbers of the source in place of wrong ones; what stands together is replaced together."""
    edits = []
    for run, place in zip(missing, wrong, strict=True):
        after = target[place[-1].end :][:4]
        if not _alike(run, place, after):
            continue
        if len(run) == len(place):
            for good, bad in zip(run, place, strict=True):
                if (len(run) == 1 or _alike([good], [bad], after)) and _fits(good, bad):
                    edits.append(Edit(bad.start, bad.end, _written(good, here, there)))
        elif len(run) == 1 and _fits(run[0], place[-1]):
            edits.append(Edit(place[0].start, place[-1].end, _written(run[0], here, there)))
        elif len(run) > 1:
            first, start = _with_prefix(source, run[0].start), _with_prefix(target, place[0].start)
            edits.append(Edit(start, place[-1].end, source[first : run[-1].end]))
    return edits


def _fits(good: Figure, bad: Figure) -> bool:
    """Whether one can stand in the place of the other: before the same factor; with minutes, if it is a time."""
    if good.time is not None:
        return good.time[1] is not None and not bad.is_numeral and (bad.time is None or bad.time[1] is not None)
    return bad.time is None and good.factor == bad.factor


def _with_prefix(text: str, start: int) -> int:
    """Where a phone number begins, with its plus or bracket."""
    while start and text[start - 1] in "+(":
        start -= 1
    return start


def _written(good: Figure, here: str, there: str) -> str:
    """A number of the source as the target writes it."""
    if good.time is not None:
        return _clock(good.time, there)
    return good.text if good.is_name else localized(good.text, here, there)
