"""Promises about one job on many machines: every line once, in order, whichever shard is killed or restarted."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allyouneed.cli import text_commands
from allyouneed.cli.options import FileOptions, PathFileOptions, TextFileOptions
from allyouneed.cli.text.shards import Shard
from allyouneed.cli.text.text_input import file_arguments
from allyouneed.cli.text_commands import TextCommand
from allyouneed.errors import UserError
from upper_command import KilledError, Killer, Shout, shout

LINES = [f"line {n}" if n % 5 else "" for n in range(1, 104)]


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text_commands, "FIRST_CHUNK", 4)
    path = tmp_path / "in" / "book.txt"
    path.parent.mkdir()
    path.write_text("\n".join(LINES) + "\n")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "book.up.txt"


def run(
    input_: Path, output: Path, shard: str | None = None, command: TextCommand[Shout] | None = None, **more: Any
) -> None:
    as_json = more.pop("as_json", False)
    files = FileOptions(input_=input_, output=output, shard=shard, **more)
    text_commands.run(command or shout(blanks=False, chunk=16), None, files, as_json)


def whole(book: Path, folder: Path) -> bytes:
    run(book, folder / "whole")
    found = (folder / "whole").read_bytes()
    (folder / "whole").unlink()
    return found


def joined(out: Path, count: int) -> bytes:
    return b"".join(Shard(n, count).output(out).read_bytes() for n in range(1, count + 1))


@pytest.mark.parametrize("count", [1, 3, 12, 200])
def test_joined_shards_are_the_output_of_the_whole_job(book: Path, out: Path, count: int) -> None:
    """Also the numbers of the texts, which decide what is sampled."""
    for index in random.Random(1).sample(range(1, count + 1), count):
        run(book, out, f"{index}/{count}")
    assert joined(out, count) == whole(book, out.parent)
    names = [path.name for path in sorted(out.parent.iterdir()) if not path.name.endswith(".journal")]
    assert names == [Shard(n, count).output(out).name for n in range(1, count + 1)], "in order of their names"


def test_shard_files_are_named_by_their_number() -> None:
    assert Shard(3, 12).output(Path("a/book.de.txt")) == Path("a/book.de.03-of-12.txt")
    assert Shard(3, 4).output(Path("book.txt.gz")) == Path("book.3-of-4.txt.gz")
    assert Shard(3, 4).output(Path("book")) == Path("book.3-of-4")


def test_shards_are_killed_and_started_again_in_any_order(
    book: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, dice, kills = whole(book, out.parent), random.Random(3), 0
    killer = Killer(monkeypatch)
    for _ in range(4):
        left = {1, 2, 3}
        while left:
            index = dice.choice([1, 2, 3])  # a finished one too
            killer.left = dice.randrange(14)
            try:
                run(book, out, f"{index}/3")
                left.discard(index)
            except KilledError:
                kills += 1
        killer.left = float("inf")
        assert joined(out, 3) == expected and not list(out.parent.glob("*.part"))
        for path in list(out.parent.iterdir()):
            path.unlink()
    assert kills > 30


def test_a_finished_shard_is_not_done_again(book: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(book, out, "2/3")
    asked: list[str] = []
    use = shout(blanks=False)

    def predict(texts: list[str], first: int) -> Any:
        asked.extend(texts)
        return use.predict(texts, first)

    counted = replace(use, predict=predict)
    shard = Shard(2, 3).output(out)
    before = shard.stat().st_mtime_ns
    run(book, out, "2/3", counted)
    assert not asked and shard.stat().st_mtime_ns == before and "is complete already" in capsys.readouterr().err
    shard.unlink()
    run(book, out, "2/3", counted)
    assert len(asked) == sum(map(bool, LINES[34:68])), "it was taken away"
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(UserError, match="has changed since it was complete"):
        run(book, out, "2/3")


def test_shards_of_different_jobs_are_not_mixed(book: Path, out: Path) -> None:
    run(book, out, "1/2")
    with pytest.raises(UserError, match=r"book\.up\.1-of-2\.txt: this shard has other settings \(json was False\)"):
        run(book, out, "2/2", as_json=True)
    book.write_text(book.read_text() + "one more\n")
    with pytest.raises(UserError, match=r"other settings \(lines was 103\)"):
        run(book, out, "2/2")
    with pytest.raises(UserError, match=r"other settings \(lines was 103\)"):
        run(book, out, "1/2")


def test_the_files_of_a_folder_are_dealt_out(book: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "deep/b.txt", "c.txt.gz", ".hidden"):
        path = book.parent / name
        path.parent.mkdir(exist_ok=True)
        data = f"text of {name}\n".encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    target = out.parent / "all"
    for shard in ("1/3", "3/3", "2/3", "1/3"):
        run(book.parent, target, shard)
    found = [path.relative_to(target) for path in sorted(target.rglob("*")) if path.is_file()]
    assert [str(path) for path in found if path.suffix != ".journal"] == ["a.txt", "book.txt", "c.txt.gz", "deep/b.txt"]
    assert (target / "book.txt").read_bytes() == whole(book, out.parent)
    assert (target / "deep/b.txt").read_text() == "0: TEXT OF DEEP/B.TXT\n"
    assert gzip.decompress((target / "c.txt.gz").read_bytes()) == b"0: TEXT OF C.TXT.GZ\n"
    assert capsys.readouterr().err.count("is complete already") == 2
    with pytest.raises(UserError, match="is inside the input folder"):
        run(book.parent, book.parent / "out", "1/3")


def test_paths_of_a_folder_are_lines(book: Path, out: Path) -> None:
    for name in ("c.wav", "a.WAV", "b.flac", "notes.md"):
        (book.parent / name).touch()
    for shard in ("1/2", "2/2"):
        files = PathFileOptions(input_=book.parent, output=out, shard=shard)
        text_commands.run(shout(chunk=4), None, files, True, suffixes=(".wav", ".flac"))
    said = [json.loads(line)["said"] for line in joined(out, 2).splitlines()]
    assert [line.split("/")[-1] for line in said] == ["A.WAV", "B.FLAC", "C.WAV"]


def test_vectors_are_joined_too(book: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(texts: list[str], first: int) -> list[Shout]:
        return [Shout(str(first + number)) for number, _ in enumerate(texts)]

    command: TextCommand[Shout] = TextCommand(
        "embedding", predict, lambda one: "", lambda one: {}, chunk=16, width=2,
        pack=lambda one: np.array([one.text, 1], dtype=np.float32).tobytes(),
    )  # fmt: skip
    out, killer, kills = out.with_suffix(".npy"), Killer(monkeypatch), 0
    for index in (2, 1):
        for left in (*range(1, 40, 3), float("inf")):
            killer.left = left
            try:
                run(book, out, f"{index}/2", command)
            except KilledError:
                kills += 1
    found = np.concatenate([np.load(Shard(n, 2).output(out)) for n in (1, 2)])
    assert kills > 6 and found.tolist() == [[n, 1] for n in range(len(LINES))]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/2"])
def test_a_wrong_shard_is_refused(book: Path, out: Path, text: str) -> None:
    with pytest.raises(UserError, match=f"--shard {text}: expected I/N with I from 1 to N"):
        run(book, out, text)


def test_what_cannot_be_divided_is_refused(book: Path, out: Path) -> None:
    for files in (
        TextFileOptions(input_=book, shard="1/2"),
        TextFileOptions(output=out, shard="1/2"),
        TextFileOptions(input_=Path("-"), output=out, shard="1/2"),
        TextFileOptions(input_=book, output=out, whole=True, shard="1/2"),
    ):
        with pytest.raises(UserError, match="--shard needs an input file or folder and an output"):
            text_commands.run(shout(), None, files)


def test_arguments_are_input_and_output(
    book: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(book.parent.parent)
    for arguments, options in (
        (["in", "done"], FileOptions(shard="1/2")),
        (["in/", "done"], FileOptions()),
        (["in/book.txt", "done"], FileOptions()),
    ):
        texts, files = file_arguments(arguments, options)
        assert texts is None and (files.input_, files.output) == (Path(arguments[0]), Path("done"))
    capsys.readouterr()
    assert file_arguments(["in", "done"], FileOptions())[0] == ["in", "done"], "words, that happen to be a folder"
    assert capsys.readouterr().err == "note: 'in' is read as a text; use --input to read the folder\n"
    assert file_arguments(["in", "out.txt"], PathFileOptions(), paths=True)[1].input_ == Path("in")
    assert file_arguments(["a.wav", "b.wav"], PathFileOptions(), paths=True)[0] == ["a.wav", "b.wav"]
    assert file_arguments(["in/book.txt", "x.jsonl"], PathFileOptions(), paths=True)[1].output == Path("x.jsonl")
