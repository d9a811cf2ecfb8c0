"""Filters drop what they should, and report it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.data.files import filters as module
from allyouneed.data.files.filters import DigestSet, Filters
from allyouneed.data.files.pairs import Pair
from allyouneed.data.files.readers import Report


def keep(pairs: list[tuple[str, str]], **config: object) -> tuple[list[tuple[str, str]], Report]:
    report = Report(read=len(pairs))
    numbered = (Pair(source, target, "a.tsv", line) for line, (source, target) in enumerate(pairs, start=1))
    kept = list(Filters.model_validate(config).apply(numbered, report))
    return [(pair.source, pair.target) for pair in kept], report


def test_an_empty_side_is_left_out_unless_asked_for() -> None:
    pairs = [("a", "b"), ("", "b"), ("a", " \t\u3000")]
    kept, report = keep(pairs)
    assert kept == [("a", "b")] and report.kept == 1 and report.drops["empty"].count == 2
    assert "a.tsv:2: the source is empty" in report.text() and "a.tsv:3: the target is empty" in report.text()
    assert keep(pairs, empty=False)[0] == pairs


def test_long_and_lopsided_pairs_are_dropped_and_reported_by_line() -> None:
    pairs = [("aaaa", "bb"), ("aaaaa", "bb"), ("a" * 11, "b" * 11), ("a" * 10, "b" * 10)]
    kept, report = keep(pairs, ratio=2, max_length=10)
    assert kept == [pairs[0], pairs[3]]
    assert "a.tsv:2: 5 against 2 characters" in report.text() and "a.tsv:3: 11 characters" in report.text()


def test_duplicates_keep_the_first_and_only_whole_pairs_count() -> None:
    pairs = [("a", "b"), ("a", "c"), ("a", "b"), ("ab", ""), ("", "ab"), ("a", "b")]
    kept, report = keep(pairs, duplicates=True, empty=False)
    assert kept == [("a", "b"), ("a", "c"), ("ab", ""), ("", "ab")]
    assert report.drops["duplicate"].count == 2 and "a.tsv:3" in report.text() and report.kept == 4
    assert keep(pairs, empty=False)[0] == pairs


def test_the_same_pair_towards_another_language_is_no_duplicate() -> None:
    pairs = [Pair("a", "b", "x", 1, "de"), Pair("a", "b", "x", 2, "nl")]
    assert len(list(Filters(duplicates=True).apply(pairs, Report()))) == 2


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=12), max_size=20))
@settings(deadline=None)
def test_a_digest_set_reports_values_not_seen_before(chunks: list[list[int]]) -> None:
    seen, reference = DigestSet(), set[int]()
    for chunk in chunks:
        expected = []
        for value in chunk:
            expected.append(value not in reference)
            reference.add(value)
        assert seen.add(np.array(chunk, dtype=np.uint64)).tolist() == expected
    assert sum(len(level) for level in seen.levels) == len(reference)


def test_duplicates_are_found_across_chunks_in_eight_bytes_a_pair() -> None:
    seen = DigestSet()
    for start in range(0, 40 * module.CHUNK, module.CHUNK):
        assert seen.add(np.arange(start, start + module.CHUNK, dtype=np.uint64)).all()
    assert not seen.add(np.arange(module.CHUNK, dtype=np.uint64)).any()
    assert sum(level.nbytes for level in seen.levels) == 40 * module.CHUNK * 8 and len(seen.levels) < 8
