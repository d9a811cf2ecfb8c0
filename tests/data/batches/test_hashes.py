"""The cached checksums of input files."""

from __future__ import annotations

from pathlib import Path

import pytest

from allyouneed.data.batches import store
from allyouneed.data.batches.store import InputHashes


@pytest.fixture
def old_files(tmp_path: Path) -> list[Path]:
    """Files that were not written just now, which would not be cached."""
    files = [tmp_path / f"{number}.txt" for number in range(50)]
    for file in files:
        file.write_text(file.name)
    return files


def test_the_sums_of_many_files_are_written_once(
    old_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    monkeypatch.setattr(store, "write_text", lambda path, text: written.append(path.write_text(text)))
    monkeypatch.setattr(store.time, "time_ns", lambda: max(f.stat().st_mtime_ns for f in old_files) + 3_000_000_000)
    with InputHashes(tmp_path / "sums.json") as hashes:
        found = [hashes.sha256(file) for file in old_files]
    assert len(written) == 1 and len(set(found)) == 50
    monkeypatch.setattr(store, "sha256", lambda _: pytest.fail("hashed again"))
    with InputHashes(tmp_path / "sums.json") as hashes:
        assert [hashes.sha256(file) for file in old_files] == found
    assert len(written) == 1


def test_an_interrupted_start_keeps_the_sums_it_has(
    old_files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.time, "time_ns", lambda: max(f.stat().st_mtime_ns for f in old_files) + 3_000_000_000)
    with pytest.raises(KeyboardInterrupt), InputHashes(tmp_path / "sums.json") as hashes:
        hashes.sha256(old_files[0])
        raise KeyboardInterrupt
    assert str(old_files[0].resolve()) in InputHashes(tmp_path / "sums.json").known
