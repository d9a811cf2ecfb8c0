"""Written dates mean the ISO date beside them, and no test date was ever trained on."""

import datetime
import random
import re
from pathlib import Path

import pytest

from allyouneed.cli.tour import dates
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Report

BIRTHDAY = datetime.date(2026, 11, 15)


@pytest.mark.parametrize(
    "form",
    [
        "二〇二六年十一月十五日",
        "二零二六年十一月十五日",
        "2026年11月15日",
        "2026年11月15日星期日",
        "15. November 2026",
        "fünfzehnter November 2026",
        "den 15. Nov. 2026",
        "Sonntag, 15. November 2026",
        "the fifteenth of November 2026",
        "November 15th, 2026",
        "15 Nov 2026",
        "Sunday, 15 November 2026",
    ],
)
def test_a_date_is_written_as_people_write_it(form: str) -> None:
    assert form in dates.forms(BIRTHDAY)


@pytest.mark.parametrize(
    ("date", "form"),
    [
        (datetime.date(1903, 2, 1), "February 1st, 1903"),
        (datetime.date(1903, 2, 2), "the 2nd of February, 1903"),
        (datetime.date(1903, 2, 11), "February 11th, 1903"),
        (datetime.date(1903, 2, 13), "February 13th, 1903"),
        (datetime.date(1903, 2, 23), "23rd February 1903"),
        (datetime.date(2000, 10, 10), "二〇〇〇年十月十日"),
        (datetime.date(2000, 10, 20), "二〇〇〇年十月二十日"),
        (datetime.date(2000, 12, 31), "二〇〇〇年十二月三十一日"),
        (datetime.date(2000, 3, 31), "am einunddreißigsten März 2000"),
        (datetime.date(2000, 3, 7), "der siebte März 2000"),
        (datetime.date(2000, 5, 21), "May the twenty-first, 2000"),
    ],
)
def test_irregular_dates_are_written_correctly(date: datetime.date, form: str) -> None:
    assert form in dates.forms(date)


def test_every_form_tells_year_month_and_day_apart() -> None:
    for index in range(len(dates.forms(BIRTHDAY))):
        texts = {
            dates.forms(datetime.date(2000 + y, m, d))[index]
            for y in (0, 1, 10)
            for m in range(1, 13)
            for d in range(1, 29)
        }
        assert len(texts) == 3 * 12 * 28


def test_no_form_can_be_read_two_ways() -> None:
    written = [text for text, _ in dates.generate(5000, seed=1)]
    assert not [text for text in written if re.fullmatch(r"\d\d?[-/. ]+\d\d?[-/. ]+\d+", text)]
    assert not [text for text in written if "\t" in text or "\n" in text or text != text.strip()]


def test_generate_is_repeatable_and_keeps_away_from_excluded_dates() -> None:
    assert dates.generate(100, seed=3) == dates.generate(100, seed=3) != dates.generate(100, seed=4)
    all_but_one = [datetime.date(1900, 1, 1) + datetime.timedelta(n) for n in range(73_049)]
    all_but_one.remove(BIRTHDAY)
    assert {iso for _, iso in dates.generate(50, exclude=all_but_one)} == {"2026-11-15"}


def test_the_splits_share_no_date() -> None:
    train, valid, test = dates.splits(seed=0)
    assert (len(train), len(valid), len(test)) == (dates.TRAIN, dates.VALID, dates.TEST)
    assert dates.splits(seed=0) == (train, valid, test) and dates.splits(seed=1)[2] != test
    seen = [{iso for _, iso in split} for split in (train, valid, test)]
    assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]
    assert len(seen[2]) == dates.TEST, "a thousand test pairs are a thousand dates"
    years = {iso[:4] for iso in seen[0]}
    assert years == {str(year) for year in range(1900, 2100)}


def test_written_files_are_read_by_the_readers(tmp_path: Path) -> None:
    paths = dates.write(tmp_path / "dates", seed=2, train=500, valid=20, test=20)
    assert [path.name for path in paths] == ["train.tsv", "valid.tsv", "test.tsv"]
    for path, split in zip(paths, dates.splits(2, 500, 20, 20), strict=True):
        report = Report()
        assert [(p.source, p.target) for p in PairFiles(path=path).read(report)] == split
        assert report.broken == 0


def test_weekdays_match_their_dates() -> None:
    rng = random.Random(0)
    for _ in range(200):
        date = datetime.date(1900, 1, 1) + datetime.timedelta(rng.randrange(73_049))
        named = [form for form in dates.forms(date) if re.search(r"day|tag,|woch,|星期", form)]
        english, german, chinese = date.strftime("%A"), dates.DE_DAYS[date.weekday()], "一二三四五六日"[date.weekday()]
        assert len(named) >= 7
        assert all(english in form or german in form or f"星期{chinese}" in form for form in named)
