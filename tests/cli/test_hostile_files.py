"""Any value in any field of any file that is read ends in a result or in one message, never in a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import hostile_files as hostile
from hostile_files import Subject

MAKERS: dict[str, Callable[[Path], Subject]] = {
    "ours": hostile.translator,
    "imported": lambda path: hostile.imported(path / "ours", hostile.foreign(path / "theirs")),
    "theirs": hostile.foreign,
    "vocabulary files": hostile.vocab_files,
    "run": hostile.run_folder,
}
SPECIAL = [
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    2**64,
    10**12,
    10**39,
    1e300,
    0.5,
    "",
    "kind",
    "\x1b[31m",
    "../config.json",
    [],
    {},
]
DEEP: list[Any] = [[]]
for _ in range(300):
    DEEP = [DEEP]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(SPECIAL)
values = st.recursive(
    scalars | st.just(DEEP),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    found = MAKERS[request.param](tmp_path_factory.mktemp("subject") / "folder")
    name, work = found.files[0], tmp_path_factory.mktemp("intact") / "folder"
    assert all(code == 0 for code, _ in hostile.attack(found, work, name, hostile.read(found.folder / name)))
    return found


def attack_often(subject: Subject, work: Path, count: int) -> None:
    fields = [(name, at) for name in subject.files for at in hostile.paths(hostile.read(subject.folder / name))]

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(fields), values)
    def run(field: tuple[str, tuple[hostile.Key, ...]], value: Any) -> None:
        name, at = field
        tree = hostile.replaced(hostile.read(subject.folder / name), at, value)
        for code, errors in hostile.attack(subject, work, name, tree):
            assert code in (0, 2), errors
            assert "Traceback" not in errors and "\x1b" not in errors
            assert code == 0 or errors.startswith("allyouneed: ") or "\nallyouneed: " in errors

    run()


@pytest.mark.parametrize("subject", MAKERS, indirect=True)
def test_any_value_in_any_field(subject: Subject, tmp_path: Path) -> None:
    attack_often(subject, tmp_path / "folder", 10)


@pytest.mark.slow
@pytest.mark.parametrize("subject", MAKERS, indirect=True)
def test_many_values_in_any_field(subject: Subject, tmp_path: Path) -> None:
    attack_often(subject, tmp_path / "folder", 1000)
