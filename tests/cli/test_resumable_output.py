"""Promises about files that are written line by line: in order, nothing lost, nothing twice, whichever process is
killed and when; little memory; and a message for every obstacle."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import allyouneed as ayn
import warm_python
from allyouneed.cli import main, text_commands
from allyouneed.cli.options import TextFileOptions
from allyouneed.cli.text import resumable_output
from allyouneed.cli.text import streams as streams_module
from allyouneed.cli.text.resumable_output import ResumableOutput
from allyouneed.cli.text_commands import TextCommand
from allyouneed.errors import UserError
from small_model import small_folder
from upper_command import KilledError, Killer, Shout, shout
from waiting import PATIENCE

LINES = [f"line {n}" if n % 7 else "" for n in range(1, 200)]


def run(
    command: TextCommand[Any],
    texts: list[str] | None,
    input_: Path | None = None,
    output: Path | None = None,
    as_json: bool = False,
    **files: Any,
) -> None:
    text_commands.run(command, texts, TextFileOptions(input_=input_, output=output, **files), as_json)


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text_commands, "FIRST_CHUNK", 4)
    path = tmp_path / "book.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "book.up.txt"


def truth(book: Path, folder: Path, **more: Any) -> bytes:
    whole = folder / "whole"
    run(shout(**more), None, book, whole)
    found = whole.read_bytes()
    whole.unlink()
    return found


def left(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


@pytest.mark.parametrize("blanks", [True, False])
def test_resuming_after_a_kill_at_any_moment_gives_the_same_file(
    book: Path, out: Path, monkeypatch: pytest.MonkeyPatch, blanks: bool
) -> None:
    expected = truth(book, out.parent, blanks=blanks)
    assert len(expected.splitlines()) == len(LINES)
    killer, moments = Killer(monkeypatch), 0
    while True:
        killer.left = moments
        try:
            run(shout(blanks), None, book, out)
        except KilledError:
            assert not out.exists() or out.read_bytes() == expected, "under its name it is whole"
            killer.left = float("inf")
            if left(out) != [out.name]:
                run(shout(blanks), None, book, out)
            moments += 1
            assert (left(out), out.read_bytes()) == ([out.name], expected)
            out.unlink()
            continue
        break
    assert moments > 50 and (left(out), out.read_bytes()) == ([out.name], expected)


@pytest.mark.parametrize("suffix", [".txt", ".gz", ".zst"])
def test_a_run_killed_repeatedly_loses_nothing(
    book: Path, out: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    out = out.with_name("out" + suffix)
    expected = truth(book, out.parent)
    killer, dice, kills = Killer(monkeypatch), random.Random(5), 0
    for _ in range(25):
        while True:
            killer.left = dice.randrange(12)
            try:
                run(shout(), None, book, out)
                break
            except KilledError:
                kills += 1
                if left(out) == [out.name]:
                    break
        killer.left = float("inf")
        assert b"".join(line + b"\n" for line in unpacked(out)) == expected and left(out) == [out.name]
        out.unlink()
    assert kills > 100


def unpacked(path: Path) -> Iterator[bytes]:
    from allyouneed.data.files.lines import raw_lines

    return raw_lines(path)


def test_compressed_files_are_valid(book: Path, out: Path) -> None:
    packed, empty = out.with_suffix(".gz"), out.with_name("empty.gz")
    run(shout(), None, book, packed)
    with gzip.open(packed) as file:
        assert file.read() == truth(book, out.parent)
    (out.parent / "nothing").touch()
    run(shout(), None, out.parent / "nothing", empty)
    with gzip.open(empty) as file:
        assert file.read() == b"" and empty.stat().st_size
    packed.rename(out.parent / "again.gz")
    run(shout(), None, out.parent / "again.gz", out)
    assert out.read_text().splitlines()[-1] == f"{len(LINES) - 1}: {len(LINES) - 1}: LINE {len(LINES)}"


# --- what goes on, and what does not --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"one\r\ntwo\r\n",
        b"one\r\ntwo\n\r\n\nthree\r\n",
        b"one\n\ntwo\r\n",
        b"a\rb\r\n\r\nc",
        b"one\ntwo",
    ],
)
def test_each_line_ends_as_it_did(content: bytes, out: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Also where some end otherwise than others; a last line without an end gets that of the line before."""
    path = out.with_name("in.txt")
    path.write_bytes(content)
    last = b"" if content.endswith(b"\n") else b"\r\n" if b"\r\n" in content else b"\n"
    wanted = (content + last).upper().split(b"\n")
    for blanks in (True, False):
        run(shout(blanks, bad="nothing"), None, path, out, force=True)
        found = out.read_bytes().split(b"\n")
        assert [line.partition(b": ")[2] if b": " in line else line for line in found] == wanted
    run(shout(), None, path)
    assert capfdbinary.readouterr().out.count(b"\r\n") == (content + last).count(b"\r\n")


@pytest.fixture
def half(book: Path, out: Path) -> Path:
    """Someone pressed Ctrl-C after some lines."""
    stop_at(book, out, "LINE 60")
    assert left(out) == [out.name + ".journal", out.name + ".part"]
    return out


def stop_at(book: Path, out: Path, where: str, **more: Any) -> None:
    use = shout()

    def plain(one: Shout) -> str:
        if where in one.text:
            raise KeyboardInterrupt
        return use.plain(one)

    with pytest.raises(KeyboardInterrupt):
        run(TextCommand(use.doing, use.predict, plain, use.tree, chunk=16), None, book, out, **more)


def test_ctrl_c_says_how_to_resume(book: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop_at(book, out, "LINE 60")
    assert capsys.readouterr().err == f"note: {out}: 48 lines are done; run the same command to resume\n"
    stop_at(book, out, "LINE 60", restart=True)
    assert "48 lines are done; run the same command without --restart to resume" in capsys.readouterr().err
    stop_at(book, out, "LINE 50")  # nothing more was done, and nothing is lost
    going = f"note: {out}: resuming after line 48\n"
    assert capsys.readouterr().err == going + f"note: {out}: 48 lines are done; run the same command to resume\n"
    run(shout(), None, book, out)
    assert capsys.readouterr().err == going
    assert out.read_bytes() == truth(book, out.parent)
    out.unlink()
    stop_at(book, out, "LINE 2")
    assert capsys.readouterr().err == f"note: {out}: no line is done yet; run the same command to resume\n"
    assert not left(out)


@pytest.mark.parametrize("moment", range(12))
def test_ctrl_c_at_any_moment_reports_the_finished_lines(
    book: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moment: int
) -> None:
    """Before, in the middle of and after each thing that is asked of the disk."""
    calls = [0]

    def interrupted(call: Callable[..., Any], *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4 + moment // 2:
            if moment % 2:
                call(*args)
            raise KeyboardInterrupt
        return call(*args)

    for name in ("write", "fsync"):
        monkeypatch.setattr(os, name, partial(interrupted, getattr(os, name)))
    with pytest.raises(KeyboardInterrupt):
        run(shout(), None, book, out)
    said = capsys.readouterr().err
    journal = out.with_name(out.name + ".journal")
    done = json.loads(journal.read_bytes().splitlines()[-1])["lines"] if journal.exists() else 0
    assert said == f"note: {out}: {f'{done} lines are' if done else 'no line is'} done{'' if done else ' yet'}; " + (
        "run the same command to resume\n"
    )
    run(shout(), None, book, out)
    assert out.read_bytes() == truth(book, out.parent)


def test_no_line_is_predicted_twice(book: Path, half: Path) -> None:
    use, asked = shout(), list[str]()
    counted = TextCommand(
        use.doing, lambda some, first: asked.extend(some) or use.predict(some, first), use.plain, use.tree
    )  # type: ignore[func-returns-value]
    run(counted, None, book, half)
    assert asked == LINES[48:]


def test_a_changed_input_is_refused_but_not_one_that_was_extended(book: Path, half: Path) -> None:
    was = book.read_text()
    book.write_text(was.replace("line 5\n", "line five\n"))
    with pytest.raises(
        UserError, match=r"48 lines are done, but the first lines of .*book\.txt have changed since; --restart"
    ):
        run(shout(), None, book, half)
    book.write_text("\n".join(LINES[:20]))
    with pytest.raises(UserError, match="have changed since"):
        run(shout(), None, book, half)
    book.write_text(was.replace("line 150\n", "line of dread\n") + "one more\n")
    run(shout(), None, book, half)
    assert half.read_bytes() == truth(book, half.parent), "what was done is the same, so it counts"


def test_restart_starts_over(book: Path, half: Path) -> None:
    book.write_text("other\nlines\n")
    run(shout(), None, book, half, restart=True)
    assert half.read_text() == "0: OTHER\n1: LINES\n" and left(half) == [half.name]


def test_changed_options_are_refused_and_named(half: Path, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError,
        match=r"48 lines were written with other settings \(json was False\); use the same settings to resume, or",
    ):
        run(shout(), None, book, half, as_json=True)
    monkeypatch.setattr(text_commands, "recorded_options", lambda: {"beam": 2, "model": "abc"})
    with pytest.raises(UserError, match=r"\(beam was not set, model was not set\)"):
        run(shout(), None, book, half)


def test_an_existing_file_is_not_replaced_without_force(book: Path, out: Path) -> None:
    out.write_text("mine")
    with pytest.raises(UserError, match="already exists; --force overwrites it, or name another file"):
        run(shout(), None, book, out)
    with pytest.raises(UserError, match="already exists; --force overwrites it, or name another file"):
        run(shout(), ["x"], None, out)
    assert out.read_text() == "mine" and left(out) == [out.name]
    stop_at(book, out, "LINE 60", force=True)
    assert out.read_text() == "mine"
    run(shout(), None, book, out, force=True)
    assert out.read_bytes() == truth(book, out.parent)


def test_a_file_created_meanwhile_by_another_process_is_not_replaced(book: Path, half: Path) -> None:
    use = shout()

    def ask(asked: list[str], first: int) -> Any:
        half.write_text("theirs") if asked else None
        return use.predict(asked, first)

    with pytest.raises(UserError, match="was created by another process meanwhile"):
        run(TextCommand(use.doing, ask, use.plain, use.tree), None, book, half)
    assert half.read_text() == "theirs"
    half.unlink()
    run(use, None, book, half)
    assert half.read_bytes() == truth(book, half.parent)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("way", ["its name", "a link to the output", "a link to the input", "another name"])
def test_the_input_is_never_the_output(book: Path, way: str, whole: bool) -> None:
    was, link = book.read_bytes(), book.with_name("link.txt")
    if way == "another name":
        link.hardlink_to(book)
    elif way != "its name":
        link.symlink_to(book)
    given = link if way == "a link to the input" else book
    output = book if way in ("its name", "a link to the input") else link
    names = left(book)
    for restart in (False, True):
        with pytest.raises(UserError, match=r"\.txt: is the input file; name another file"):
            run(shout(), None, given, output, whole=whole, force=True, restart=restart)
    assert book.read_bytes() == was and left(book) == names


def test_redirected_standard_input_is_never_the_output(book: Path, model: Path) -> None:
    was = book.read_bytes()
    command = [sys.executable, "-m", "allyouneed", "translate", "-m", str(model), "--force", "-o", str(book)]
    with book.open("rb") as file:
        found = warm_python.run(command, stdin=file, capture_output=True, text=True, timeout=PATIENCE)
    assert found.returncode == 2 and "is the input file; name another file" in found.stderr
    assert book.read_bytes() == was and left(book) == [book.name]


def test_a_kill_after_the_rename_is_recovered_and_another_input_is_refused(
    book: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the last two things: the file has its name, the journal is still there."""
    expected = truth(book, out.parent)
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(ResumableOutput, "__exit__", lambda work, *_: work._close())
        patch.setattr(Path, "unlink", lambda *_: (_ for _ in ()).throw(KilledError))
        run(shout(), None, book, out)
    assert left(out) == [out.name, out.name + ".journal"] and out.read_bytes() == expected
    was = book.read_text()
    book.write_text(was.replace("line 5\n", "line five\n"))
    with pytest.raises(UserError, match="have changed since"):
        run(shout(), None, book, out)
    book.write_text(was)
    run(shout(), None, book, out)
    assert left(out) == [out.name] and out.read_bytes() == expected


def test_concurrent_runs_are_refused(book: Path, half: Path) -> None:
    with ResumableOutput(half, {"json": False}), pytest.raises(UserError, match="another process is writing it"):
        run(shout(), None, book, half)
    run(shout(), None, book, half)


def test_foreign_journals_are_left_alone(book: Path, half: Path) -> None:
    with pytest.raises(UserError, match=r"an interrupted run is writing it; finish that run first, or delete"):
        run(shout(), ["x"], None, half)
    part, journal = half.with_name(half.name + ".part"), half.with_name(half.name + ".journal")
    part.write_bytes(part.read_bytes()[:-5])
    with pytest.raises(UserError, match=r"\.part: shorter than its journal says; --restart begins again"):
        run(shout(), None, book, half)
    for content in ("dear diary", "dear diary\n", '{"settings": {}}\nrubbish\n'):
        journal.write_text(content)
        with pytest.raises(UserError, match=r"\.journal: not a journal of allyouneed; move it away"):
            run(shout(), None, book, half)
        assert journal.read_text() == content


def test_foreign_part_files_are_left_alone(book: Path, out: Path) -> None:
    part = out.with_name(out.name + ".part")
    part.write_text("theirs")
    for more in ({}, {"restart": True}, {"force": True}):
        with pytest.raises(UserError, match=r"\.part: has no journal, so it cannot be resumed; move it away"):
            run(shout(), None, book, out, **more)
    with pytest.raises(UserError, match=r"\.part: already exists; --force overwrites it, or move it away"):
        run(shout(), ["x"], None, out)
    assert part.read_text() == "theirs" and left(out) == [part.name]
    part.unlink()
    run(shout(), None, book, out)
    assert left(out) == [out.name]


def test_a_full_disk_keeps_what_was_finished(
    book: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, room = os.write, 900

    def full(file: int, data: Any) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(file, data[:room])
        room -= done
        return done

    monkeypatch.setattr(resumable_output.os, "write", full)
    with pytest.raises(UserError, match=r"book\.up\.txt: cannot write: No space left on device"):
        run(shout(), None, book, out)
    assert "lines are done; run the same command to resume" in capsys.readouterr().err
    monkeypatch.undo()
    run(shout(), None, book, out)
    assert out.read_text().splitlines() == [f"{n}: {line.upper()}" for n, line in enumerate(LINES)]


def test_a_bad_line_is_named_and_those_before_it_are_kept(book: Path, out: Path) -> None:
    with pytest.raises(UserError, match=r"book\.txt:101: a bad line"):
        run(shout(bad="line 101"), None, book, out)
    assert out.with_name(out.name + ".part").read_text().splitlines()[-1] == f"99: {LINES[99].upper()}"
    book.write_text(book.read_text().replace("line 101\n", "a good line\n"))
    run(shout(bad="line 101"), None, book, out)
    assert out.read_text().splitlines()[100] == "100: A GOOD LINE"


def test_many_notes_are_counted(book: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(shout(odd="line 100"), None, book, out)
    notes = capsys.readouterr().err.splitlines()
    assert notes == [f"note: {book}:100: odd"]
    out.unlink()
    run(shout(odd="line"), None, book, out)
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 21 and notes[-1] == f"note: {book}: 151 more notes; --json includes all of them"


def test_progress_is_reported_without_a_terminal(
    book: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(streams_module, "monotonic", lambda: float(next(clock)))
    run(shout(), None, book, out)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "shouting: 30 of 199 (15.1%), about 0:02:49 left, 1.0 per second"
    assert said[-1] == "shouting: 180 of 199 (90.5%), about 0:00:19 left, 1.0 per second" and len(said) == 6


# --- memory ---------------------------------------------------------------------------------------------------------


def peak(folder: Path, lines: int) -> int:
    """The most bytes that Python held while a file of `lines` lines was written."""
    book, out = folder / "long.txt", folder / "long.out"
    with book.open("w") as file:
        file.writelines(f"line {n} of very many that are not held at a time\n" for n in range(lines))
    tracemalloc.start()
    run(shout(chunk=512), None, book, out)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with out.open() as file:
        assert all(line == f"{n}: LINE {n} OF VERY MANY THAT ARE NOT HELD AT A TIME\n" for n, line in enumerate(file))
    out.unlink()
    return found


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    small, large = peak(tmp_path, 10_000), peak(tmp_path, 30_000)
    assert large < 1.1 * small + 100_000 and large < 3_000_000


@pytest.mark.slow
def test_a_million_lines_in_little_memory(tmp_path: Path) -> None:
    assert peak(tmp_path, 1_000_000) < 3_000_000


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("work"))


DATES = ["May 5, 2020", "", "2020年1月1日", "1. Mai 1999"] * 30


@pytest.fixture
def dates(tmp_path: Path) -> Path:
    path = tmp_path / "dates.txt"
    path.write_text("\n".join(DATES) + "\n", "utf-8")
    return path


def command(*args: Any) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(arg) for arg in args])
    return int(stopped.value.code or 0)


def test_two_files_are_an_input_and_an_output(
    model: Path, dates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "iso.txt", tmp_path / "iso.jsonl"
    expected = ayn.load(model).translate(DATES[:4], beam=1) * 30
    assert command("translate", "-m", model, "--beam", 1, dates, out) == 0
    assert out.read_text("utf-8").splitlines() == expected
    assert out.stat().st_mode & 0o777 == dates.stat().st_mode & 0o777, "a file like any other"
    assert command("translate", "-m", model, "--beam", 1, "--json", dates, again) == 0
    assert [json.loads(line)["translation"] for line in again.read_text("utf-8").splitlines()] == expected
    capsys.readouterr()
    assert command("translate", "-m", model, "--beam", 1, dates, "-") == 0
    assert capsys.readouterr().out.splitlines() == expected
    assert command("translate", "-m", model, "--beam", 1, "iso.txt", "May") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2, "words are texts"


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ("none.txt", "out.txt", "none.txt: no such file; check the path"),
        (".", "out.txt", "is a folder; name a file in it"),
        ("dates.txt", ".", "is a folder; name a file in it"),
        ("dates.txt", "no/out.txt", "there is no folder no; create it first"),
        ("dates.txt", "dates.txt", "is the input file; name another file"),
        ("dates.txt", "./dates.txt", "is the input file; name another file"),
    ],
)
def test_problems_with_files_are_one_message(
    model: Path,
    dates: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    first: str,
    second: str,
    said: str,
) -> None:
    monkeypatch.chdir(dates.parent)
    assert command("translate", "-m", model, first, second) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1 and not shown.out
    assert [path.name for path in dates.parent.iterdir()] == ["dates.txt"]


def test_one_argument_that_is_a_file_is_read(
    model: Path, dates: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(dates.parent)
    assert command("translate", "-m", model, "--input", "dates.txt") == 0
    expected = capsys.readouterr().out
    assert command("translate", "-m", model, "dates.txt") == 0
    found = capsys.readouterr()
    assert (
        found.out == expected
        and found.err.splitlines()[0] == "note: dates.txt is a file: reading it; to use its name as a text, pipe it in"
    )
    assert command("translate", "-m", model, "dates.txt", "May 5, 2020", "1. Mai 1999") == 0
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 3 and "'dates.txt' is read as a text; use --input" in found.err


def test_options_and_model_decide_whether_a_run_is_resumed(
    model: Path, dates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "iso.txt"
    monkeypatch.setattr(text_commands, "FIRST_CHUNK", 32)
    add, room = ResumableOutput.add, [2]

    def tired(work: ResumableOutput, *args: Any, **more: Any) -> None:
        room[0] -= 1
        if not room[0]:
            raise KeyboardInterrupt
        add(work, *args, **more)

    monkeypatch.setattr(ResumableOutput, "add", tired)
    assert command("translate", "-m", model, "--beam", 1, dates, out) == 130
    assert capsys.readouterr().err.endswith(f"note: {out}: 32 lines are done; run the same command to resume\n")
    room[0] = -1
    assert command("translate", "-m", model, "--beam", 2, "-i", dates, "-o", out) == 2
    assert (
        "32 lines were written with other settings (beam was 1); use the same settings to resume"
        in capsys.readouterr().err
    )
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        copy.joinpath(path.name).write_bytes(path.read_bytes())
    assert command("translate", "-m", copy, "--beam", 1, "-i", dates, "-o", out) == 0, "a model may be moved"
    assert out.read_text("utf-8").splitlines() == ayn.load(model).translate(DATES[:4], beam=1) * 30


def test_a_closed_standard_output_ends_the_command_quietly(model: Path, dates: Path) -> None:
    def closed(*args: Any) -> tuple[int, str]:
        command = ["sh", "-c", '"$@" >&-', "sh", sys.executable, "-m", "allyouneed", "translate", "-m", model, *args]
        found = subprocess.run([str(part) for part in command], stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
        return found.returncode, found.stderr

    assert closed("--beam", 1, "May 5, 2020") == (1, "")
    out = dates.with_name("iso.txt")
    assert closed("--beam", 1, "--json", dates, out) == (0, ""), "what needs none does without it"
    assert len(out.read_text("utf-8").splitlines()) == len(DATES)


KILLS = """
import os, random, signal, sys, time
from functools import partial
import torch
import allyouneed.cli.generation as generation
from allyouneed.cli import main
import allyouneed.apps.translate.translator
torch.set_num_threads(1)
generation.TextCommand = partial(generation.TextCommand, chunk=20)
seed, rounds, *command = sys.argv[1:]
out = command[-1]
dice, kills = random.Random(int(seed)), 0

def size():
    return os.path.getsize(out + ".journal") if os.path.exists(out + ".journal") else 0

for _ in range(int(rounds)):
    while True:
        before, child = size(), os.fork()
        if not child:
            try:
                main(command)
            except SystemExit as stop:
                os._exit(stop.code or 0)
            os._exit(9)
        done, end = 0, None  # it goes a little further, and dies
        while not done and (end is None or time.monotonic() < end):
            done, status = os.waitpid(child, os.WNOHANG)
            if end is None and size() > before:
                end = time.monotonic() + dice.random() * 0.02 * (before > 0)
            time.sleep(0.0005)
        if not done:
            os.kill(child, signal.SIGKILL)
            done, status = os.waitpid(child, 0)
            kills += os.WIFSIGNALED(status)
            if os.path.exists(out) and not size():
                break  # all was done, but for the farewell
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, status
            break
    print(kills, open(out, encoding="utf-8").read(), sep="\\n", end="", flush=True)
    os.unlink(out)
"""


def killed(model: Path, dates: Path, rounds: int) -> int:
    """How often a real process was killed while it translated the same file again and again, each time the same way."""
    out = dates.with_name("killed.txt")
    options = ["translate", "-m", str(model), "--beam", "1", str(dates), str(out)]
    args = [sys.executable, "-c", KILLS, "3", str(rounds), *options]
    found = warm_python.run(args, capture_output=True, text=True, encoding="utf-8", timeout=PATIENCE)
    assert found.returncode == 0, found.stderr
    expected = ayn.load(model).translate(DATES[:4], beam=1) * 30
    shown = found.stdout.splitlines()
    for number in range(rounds):
        assert shown[number * 121 + 1 : (number + 1) * 121] == expected
    assert left(out) == ["dates.txt"]
    return int(shown[(rounds - 1) * 121])


def test_a_killed_process_loses_and_repeats_no_line(model: Path, dates: Path) -> None:
    assert killed(model, dates, 1) >= 1


@pytest.mark.slow
def test_a_process_killed_very_often_loses_and_repeats_no_line(model: Path, dates: Path) -> None:
    assert killed(model, dates, 12) >= 12
