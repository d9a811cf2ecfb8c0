"""`merge` joins complete shards of one job, in every format, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from allyouneed.cli import text_commands
from allyouneed.cli.options import FileOptions
from allyouneed.cli.text.merge import merge
from allyouneed.cli.text.resumable_output import partial_paths
from allyouneed.cli.text.shards import Shard
from allyouneed.cli.text_commands import TextCommand
from allyouneed.data.files.lines import raw_lines
from allyouneed.errors import UserError
from upper_command import Shout, shout

LINES = [f"line {n}" for n in range(1, 52)]
VECTORS: TextCommand[Shout] = TextCommand(
    "embedding",
    lambda texts, first: [Shout(str(first + number)) for number, _ in enumerate(texts)],
    lambda one: "",
    lambda one: {},
    chunk=4,
    width=2,
    pack=lambda one: np.array([one.text, 1], dtype=np.float32).tobytes(),
)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


def run(book: Path, output: Path, *shards: str, command: TextCommand[Shout] | None = None) -> None:
    for shard in shards:
        files = FileOptions(input_=book, output=output, shard=shard)
        text_commands.run(command or shout(chunk=8), None, files, False)


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst"])
def test_merged_shards_are_the_output_of_the_whole_job(book: Path, tmp_path: Path, suffix: str) -> None:
    out, whole = tmp_path / f"out{suffix}", tmp_path / f"whole{suffix}"
    run(book, out, "2/3", "1/3", "3/3")
    merge(out)
    text_commands.run(shout(chunk=8), None, FileOptions(input_=book, output=whole), False)
    found = list(raw_lines(out))
    assert len(found) == len(LINES) and found == list(raw_lines(whole))
    assert Shard(1, 3).output(out).exists(), "shards are kept unless --remove"


def test_arrays_are_merged_under_one_header(book: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors.npy"
    run(book, out, *(f"{n}/12" for n in range(1, 13)), command=VECTORS)
    merge(out, remove=True)
    assert np.load(out).tolist() == [[n, 1] for n in range(len(LINES))]
    assert {path.name for path in tmp_path.iterdir()} == {"book.txt", "vectors.npy"}


def test_missing_and_unfinished_shards_are_named(book: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    with pytest.raises(UserError, match=r"there are no shards of it, such as out.1-of-2.txt"):
        merge(out)
    run(book, out, "1/4", "3/4", "4/4")
    unfinished = Shard(3, 4).output(out)
    journal = partial_paths(unfinished)[1]
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:2]))
    unfinished.rename(partial_paths(unfinished)[0])
    Shard(4, 4).output(out).write_text("changed by hand\n")
    with pytest.raises(UserError) as refused:
        merge(out)
    said = str(refused.value)
    assert "out.2-of-4.txt: is missing" in said
    assert "out.3-of-4.txt: is incomplete (8 lines are done)" in said
    assert "out.4-of-4.txt: has changed since it was complete" in said
    assert not out.exists()


def test_shards_of_two_jobs_are_not_mixed(book: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    run(book, out, "1/2", "2/2", "1/3")
    with pytest.raises(UserError, match="shards of 2 and of 3; move those of one job away"):
        merge(out)
    for leftover in tmp_path.glob("*-of-3*"):
        leftover.unlink()
    first = partial_paths(Shard(1, 2).output(out))[1]
    first.write_bytes(first.read_bytes().replace(b'"json": false', b'"json": true', 1))
    with pytest.raises(UserError, match=r"out.2-of-2.txt: has other settings than .*out.1-of-2.txt"):
        merge(out)


def test_an_existing_output_is_kept_unless_forced(book: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    run(book, out, "1/1")
    out.write_text("mine\n")
    with pytest.raises(UserError, match="already exists; --force overwrites it"):
        merge(out)
    assert out.read_text() == "mine\n"
    merge(out, force=True)
    assert len(out.read_text().splitlines()) == len(LINES)
