"""Put right the numbers of a translation: those that a model garbled, and those left in the notation of the source.

Numbers in digits are matched by value. One whose value is missing replaces what stands there instead, if that is clear:
as many numbers are wrong as are missing, in the same order. `1,234.5` reads wrongly in German and becomes `1.234,5`;
`4.2` does not, and may be a section: it stays. What is written in words, and what the target says otherwise (`14:30`,
2:30 p.m.), is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from allyouneed.apps.translate.numbers.amounts import linked, spelled
from allyouneed.apps.translate.numbers.numbers import HALVES_OF_DAY, NOTATION, Number, half_of_day, localized, read
from allyouneed.apps.translate.numbers.words import says
from allyouneed.apps.translate.splitting.edits import Edit, apply

SHORT_FACTOR = re.compile(r"\s?(?:[kKMGT]|[tb]n|Mio|Mrd|Md)(?![a-z])")
HALVES = re.compile(r"(?i)\b[ap]\.?\s?m\b|上午|下午|晚上|早上|凌晨|中午|傍晚|清晨")
NEXT = re.compile(r"[\s().+/–—-]*")  # between the parts of a phone number, a range
NEXT_WRONG = re.compile(r"[\s().,:：+/–—\-h点點时時]*")
AT = re.compile(r"(?i)\b(?:at|by|until|till|um|ab|bis|gegen|à|vers|dès)\s$")  # before a time
NAME = re.compile(r"(?<=[\w,;:)] )[A-Z]\w*\s$")  # before the number of a version: Python 3.11


def put_right(source: str, target: str, here: str, there: str) -> str:
    """The translation with the numbers of its source; `here`, `there`: languages, of which the notation is known."""
    if here not in NOTATION or there not in NOTATION or not re.search("[0-9]", source):
        return target
    missing, wrong = [one for one in read(source, here) if not one.numeral], list(read(target, there))
    halves = HALVES.search(source + " " + target) is not None
    edits = list(_set_times(missing, wrong, source, target, there)) + list(_set_amounts(missing, wrong, target, there))
    for same in (_equal, _similar, _copied):
        for one in list(missing):
            other = next((other for other in wrong if same(one, other, halves)), None)
            if other is not None:
                missing.remove(one)
                wrong.remove(other)
                edits.append(Edit(other.start, other.end, _readable(one, other, source, here, there)))
    values = {value for one in read(source, here) for value in one.values}
    wrong = [one for one in wrong if one.values or not {float(part) for part in re.split(r"\D", one.text)} <= values]
    runs, places = _runs(missing, source, NEXT, target), _runs(wrong, target, NEXT_WRONG, source)
    if len(runs) == len(places):
        edits += _replace(runs, places, source, target, here, there)
    return apply(target, sorted(edits))


def _set_times(missing: list[Number], wrong: list[Number], source: str, target: str, there: str) -> Iterator[Edit]:
    """Times whose half of the day is said in the source, or that the target misstates: 3 p.m. is 15 Uhr. Those that are
    dealt with are taken out of both lists."""
    for one in [one for one in missing if one.time is not None and source[one.end : one.end + 1] != "半"]:
        assert one.time is not None
        half, hour, minute = half_of_day(source, one), *one.time
        day = hour % 12 + half if half is not None else hour
        same = [other for other in wrong if _same_on_the_dial(one.time, other.time or _bare_hour(other, target))]
        if not same or (half is None and hour <= 12):
            continue
        other, said = same[0], half_of_day(target, same[0])
        written = other.time[0] if other.time is not None else hour
        if said is None:
            right = written == day
        else:
            right = (written if written > 12 else written % 12 + said) == day and not (there == "en" and written > 12)
        missing.remove(one)
        wrong.remove(other)
        if not right:
            yield _time_of_day(day, minute, other, target, there)
        elif there == "en" and "h" in other.text and other.time is not None:
            yield Edit(other.start, other.end, _clock(other.time, there))


def _same_on_the_dial(one: tuple[int, int | None], other: tuple[int, int | None] | None) -> bool:
    return other is not None and one[0] % 12 == other[0] % 12 and (one[1] or 0) == (other[1] or 0)


def _bare_hour(number: Number, text: str) -> tuple[int, int | None] | None:
    """A number without minutes or unit as a time, if a word says that it is one: at 4."""
    known = AT.search(text[: number.start]) is not None and not number.after and re.fullmatch(r"\d\d?", number.text)
    return (int(number.text), None) if known else None


def _time_of_day(day: int, minute: int | None, other: Number, target: str, there: str) -> Edit:
    """A time on the clock of 24 hours; in English and Chinese, with its half of the day."""
    start, end = other.start, other.end
    for ahead, behind in HALVES_OF_DAY:  # what the target says, wrongly
        if (found := behind.match(target, end)) is not None:
            end = found.end()
        if (found := ahead.search(target[:start])) is not None:
            start = found.start()
    clock = f"{day % 12 or 12}" + ("" if minute is None else f":{minute:02d}")
    if there == "zh":
        left = re.match(r"[点點时時]", target[other.end :]) if other.text[-1].isdigit() else None
        mark = "" if left or minute is not None else "点"
        return Edit(start, end, f"{'下午' if day >= 12 else '上午'}{clock}{mark}")
    if there == "en":
        end = found.end() if (found := re.compile(r"\s?o['’]clock").match(target, end)) is not None else end
        return Edit(start, end, f"{clock} {'pa'[day < 12]}.m" + "." * (target[end : end + 1] != "."))
    return Edit(start, end, _clock((day, minute), there))


def _set_amounts(missing: list[Number], wrong: list[Number], target: str, there: str) -> Iterator[Edit]:
    """Numbers with the right digits before the wrong word: 3亿 is 300 million, not 3 billion. Those that are dealt with
    are taken out of both lists."""
    there_already = {value for other in wrong for value in other.values}
    for one in list(missing):
        if one.time or one.label or one.values & there_already:
            continue
        other = next((it for it in wrong if not it.time and one.factor != it.factor and _same_digits(one, it)), None)
        if other is None or SHORT_FACTOR.match(target[other.end :][:4]) or not one.values:
            continue
        missing.remove(one)
        wrong.remove(other)
        yield Edit(other.start, other.full_end, linked(spelled(one.value, there), target[other.full_end :], there))


def _same_digits(one: Number, other: Number) -> bool:
    return not other.numeral and _digits(one).strip("0") == _digits(other).strip("0") != ""


def _equal(one: Number, other: Number, halves: bool) -> bool:
    if one.label or one.time or other.time:
        return other.text == one.text if one.label else one.time == other.time
    return bool(one.values & other.values) and not _codes_differ(one.text, other.text)


def _similar(one: Number, other: Number, halves: bool) -> bool:
    """`halves`: of a day may be meant: 2:30 p.m. is 14:30."""
    if one.label or one.time or other.time:
        if one.label or one.time is None or other.time is None:
            return one.time is not None and other.text == f"{one.time[0]}.{one.time[1] or 0:02}"
        day = 12 if halves else 24
        return one.time[0] % day == other.time[0] % day and (one.time[1] or 0) == (other.time[1] or 0)
    short, long = sorted((one.text, other.text), key=len)
    if len(short) == 2 and len(long) == 4 and long.isdigit() and long.endswith(short):
        return True  # 1998/1999, 1998-99
    return bool(one.loose & other.values) and not _codes_differ(one.text, other.text)


def _copied(one: Number, other: Number, halves: bool) -> bool:
    return other.text == one.text and not one.time and (one.factor == other.factor or not one.values)


def _codes_differ(one: str, other: str) -> bool:
    """Leading zeros belong to a code: 007, 0602."""
    coded = any(len(text) > 1 and text[0] == "0" and text.isdigit() for text in (one, other))
    return coded and one != other and len(one + other) > 4


def _readable(one: Number, other: Number, source: str, here: str, there: str) -> str:
    """How the reader of the translation should see a number that has its value."""
    if other.time is not None:
        return _clock(other.time, there) if there == "en" and "h" in other.text else other.text
    dotted = re.fullmatch(r"\d+\.\d+", other.text) and not other.values
    return other.text if dotted or other.values & one.loose else _written(one, source, here, there)


def _runs(some: Sequence[Number], text: str, between: re.Pattern[str], other: str) -> list[list[Number]]:
    """Numbers that stand together (a phone number, a range); without single ones that the other text has in words."""
    runs: list[list[Number]] = []
    for one in some:
        if runs and between.fullmatch(text, runs[-1][-1].end, one.start):
            runs[-1].append(one)
        else:
            runs.append([one])
    return [run for run in runs if len(run) > 1 or run[0].time or not says(other, run[0].values)]


def _replace(
    missing: Sequence[list[Number]], wrong: Sequence[list[Number]], source: str, target: str, here: str, there: str
) -> list[Edit]:
    """Numbers of the source in place of wrong ones; what stands together is replaced together."""
    edits = []
    for run, place in zip(missing, wrong, strict=True):
        after = target[place[-1].end :][:4]
        if not _garbled(run, place, after):
            continue
        if len(run) == len(place):
            for good, bad in zip(run, place, strict=True):
                if not (len(run) == 1 or _garbled([good], [bad], after)) or not _fits(good, bad):
                    continue
                if good.time is not None and (half := half_of_day(source, good)) is not None:
                    edits.append(_time_of_day(good.time[0] % 12 + half, good.time[1], bad, target, there))
                else:
                    edits.append(Edit(bad.start, bad.end, _written(good, source, here, there)))
        elif len(run) == 1 and _fits(run[0], place[-1]):
            edits.append(Edit(place[0].start, place[-1].end, _written(run[0], source, here, there)))
        elif len(run) > 1:
            first, start = _with_prefix(source, run[0].start), _with_prefix(target, place[0].start)
            edits.append(Edit(start, place[-1].end, source[first : run[-1].end]))
    return edits


def _garbled(good: Sequence[Number], bad: Sequence[Number], after: str) -> bool:
    """Whether one can be a garbled form of the other: most digits are the same, in the same order. `after`: what
    follows. Equal digits may be another notation (`1.5 million`, `1,5 M€`), which is left alone."""
    a, b = ("".join(_digits(one) for one in some) for some in (good, bad))
    if not a or not b:
        return False
    if len(good) == 1 and good[0].time is not None and (len(bad) > 1 or bad[0].time is not None):
        return good[0].time[0] == int(_digits(bad[0])[:2] if len(bad) > 1 else (bad[0].time or (0,))[0]) or a[0] == b[0]
    if a.strip("0") == b.strip("0"):
        same = (a == b or good[0].label) and len(good) == len(bad) == 1 and good[0].factor == bad[0].factor
        return same and not SHORT_FACTOR.match(after)
    rows = [0] * (len(b) + 1)  # longest common subsequence
    for char in a:
        before = 0
        for n, other in enumerate(b):
            before, rows[n + 1] = rows[n + 1], before + 1 if char == other else max(rows[n + 1], rows[n])
    common, longest = rows[-1], max(len(a), len(b))
    share = 0.6 if longest < 8 else 0.45
    return common >= share * longest or (common == min(len(a), len(b)) and 2 * common >= longest)


def _digits(number: Number) -> str:
    return str(int(max(number.values))) if number.numeral else re.sub("[^0-9]", "", number.text)


def _fits(good: Number, bad: Number) -> bool:
    """Whether one can stand in the place of the other: before the same factor; with minutes, if it is a time."""
    if good.time is not None:
        return good.time[1] is not None and not bad.numeral and (bad.time is None or bad.time[1] is not None)
    return bad.time is None and good.factor == bad.factor


def _written(good: Number, source: str, here: str, there: str) -> str:
    """A number of the source as the target writes it."""
    if good.time is not None:
        return _clock(good.time, there)
    return good.text if good.label or NAME.search(source[: good.start]) else localized(good.text, here, there)


def _clock(time: tuple[int, int | None], language: str) -> str:
    hour, minute = time
    if minute is None:
        return str(hour)
    return f"{hour} h {minute:02d}" if language == "fr" else f"{hour}:{minute:02d}"


def _with_prefix(text: str, start: int) -> int:
    """Where a phone number begins, with its plus or bracket."""
    while start and text[start - 1] in "+(":
        start -= 1
    return start
