"""What the command line promises: lines stay lines, files are whole, and a mistake is one message and exit code 2."""

import contextlib
import csv
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import allyouneed as ayn
import warm_python
from allyouneed.cli import app, main
from allyouneed.cli.messages import show_notes, show_status
from allyouneed.config import preset_names
from allyouneed.interop.load import resolve_device
from parameter_count import parameter_count
from small_model import multilingual_folder, small_folder, write_recipe
from waiting import PATIENCE, until

COMMAND = [sys.executable, "-m", "allyouneed"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
DATES = ["May 5, 2020", "2020年1月1日", "1. Mai 1999"]


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="session")
def model(work):
    return small_folder(work)


@pytest.fixture(scope="session")
def polyglot(tmp_path_factory):
    return multilingual_folder(tmp_path_factory.mktemp("polyglot"))


@pytest.fixture(scope="session")
def truth(model):
    """What the library says about DATES."""
    return ayn.load(model).translate(DATES)


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def lines(self):
        return self.out.split("\n")[:-1]


@pytest.fixture
def ask(capsys, monkeypatch):
    """Run a command in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as stopped:
            main([str(arg) for arg in args])
        return Answer(stopped.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def refused(ask):
    """Run a command that must fail; the one message it gives."""

    def run(*args, **more):
        answer = ask(*args, **more)
        assert (answer.code, answer.out) == (2, ""), answer
        assert answer.err.startswith("allyouneed: ")
        assert answer.err.count("allyouneed: ") == 1 and "Traceback" not in answer.err
        return answer.err.removeprefix("allyouneed: ").rstrip("\n")

    return run


def warm_shell(*args, **more):
    return warm_python.run([*COMMAND, *map(str, args)], capture_output=True, env=ENVIRONMENT, timeout=PATIENCE, **more)


# --- the command itself ---------------------------------------------------------------------------------------------


def test_help_and_import_are_quick_because_they_load_nothing_heavy():
    program = (
        "import sys\n"
        "import allyouneed, allyouneed.cli\n"
        "try: allyouneed.cli.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "print('heavy:', {'torch', 'numpy', 'tokenizers', 'sacrebleu', 'yaml'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT)
    assert found.stdout.splitlines()[-1] == "heavy: set()", found.stderr


def test_the_version_is_printed(ask):
    assert ask("--version").out == f"allyouneed {ayn.__version__}\n"


def test_no_command_prints_help(ask):
    answer = ask()
    assert answer.code == 2
    shown = answer.out + answer.err
    assert all(name in shown for name in ("train", "translate", "evaluate", "describe", "demo", "models", "look"))


@pytest.mark.parametrize(
    "command",
    ["train", "translate", "evaluate", "describe", "demo", "models", "look", "look pattern", "look positions"],
)
def test_every_command_has_help(ask, command):
    answer = ask(*command.split(), "--help")
    assert answer.code == 0 and f"allyouneed {command}" in answer.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["tranlsate"], "No such command 'tranlsate'"),
        (["generate", "hi"], "Missing option '--model'"),
        (["translate", "-m", "x", "--bem", "3", "hi"], "--beam"),
        (["translate", "-m", "x", "--beam", "0", "hi"], "--beam"),
        (["translate", "-m", "x", "--best", "none", "hi"], "--best"),
        (["evaluate", "-m", "x", "--beam", "0", "y"], "--beam"),
        (["describe", "transformer-tiny", "--length", "0"], "--length"),
        (["look", "patern", "causal"], "No such command 'patern'"),
        (["look", "pattern"], "PATTERN"),
        (["look", "pattern", "causal", "--size", "0"], "--size"),
        (["train"], "RECIPE"),
        (["look", "replay", "run"], "Missing argument 'TEXT'; usage: allyouneed look replay [OPTIONS] RUN TEXT"),
    ],
)
def test_wrong_usage_is_one_message_and_code_2(ask, args, said):
    answer = ask(*args)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err and answer.err.startswith("allyouneed: ") and answer.err.count("\n") == 1


def test_exit_codes_and_streams_of_a_process(polyglot):
    """Output is UTF-8 whatever the locale."""
    plain = ENVIRONMENT | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    args = [*COMMAND, "translate", "-m", str(polyglot), "--to", "zh", "--json", "4 June 1998"]
    good = subprocess.run(args, capture_output=True, env=plain, timeout=PATIENCE)
    assert (good.returncode, good.stderr) == (0, b"") and good.stdout.endswith(b"\n")
    assert "月" in json.loads(good.stdout.decode("utf-8"))["translation"]
    bad = warm_shell("translate", "-m", "nowhere", "x")
    said = b"allyouneed: nowhere: no such model folder; nothing is downloaded, so give a local path\n"
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, b"", said)


def test_a_bug_keeps_its_traceback(ask, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("allyouneed.load", broken)
    with pytest.raises(ZeroDivisionError):
        main(["translate", "-m", "x", "hi"])


def every_command(group, path=()):
    for name, command in group.commands.items():
        yield from every_command(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]


def test_flags_take_no_value(ask, refused, model):
    app.load()
    found = dict(every_command(get_command(app)))
    assert len(found) > 20
    for path in ((), *found):
        assert "<bool>" not in ask(*path, "--help").out, path
    said = "--json true: --json is a flag and takes no value; remove 'true' (a text goes after `--`)"
    assert refused("translate", "-m", model, "--json", "true") == said
    assert json.loads(ask("translate", "-m", model, "--json", "--", "true").out)["source"] == "true"
    assert json.loads(ask("translate", "-m", model, "true", "--json").out)["source"] == "true"
    assert refused("models", "--json", "No").startswith("--json No: --json is a flag")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["transl"], ["translate"]),
        (["describe", "transformer-b"], ["transformer-base", "transformer-big"]),
        (["models", "gpt2-m"], ["gpt2-medium"]),
        (["describe", "transl"], ["translator"]),
        (["translate", "--model", "mod"], ["models/"]),
        (["describe", "models/"], ["models/a.yaml", "models/b/"]),
        (["translate", "--devi"], ["--device"]),
        (["translate", "--device", "c"], ["cpu", "cuda"]),
        (["generate", "--method", ""], ["beam", "greedy", "sample"]),
    ],
)
def test_the_shell_completes(ask, monkeypatch, tmp_path, words, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "b").mkdir(parents=True)
    (tmp_path / "models" / "a.yaml").touch()
    (tmp_path / "models" / "c.txt").touch()
    monkeypatch.setenv("_ALLYOUNEED_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["allyouneed", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert ask().out.split() == expected


def test_shared_options_have_one_default(ask):
    """The device is chosen alike everywhere, and whatever reports progress can be silenced."""
    app.load()
    for path, command in every_command(get_command(app)):
        options = {name: param for param in command.params for name in param.opts}
        if "--device" in options:
            assert options["--device"].default == "auto", path
        if "--device" in options or path in {("train",), ("quantize",), ("import",), ("export",)}:
            assert options["--quiet"].opts == ["--quiet", "-q"], path


def test_the_device_is_chosen_by_the_machine_and_the_model(model, monkeypatch):
    assert resolve_device("auto", model) == "cpu" or torch.cuda.is_available()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve_device("auto", model) == "cuda" and resolve_device("cpu", model) == "cpu"
    assert resolve_device("auto", "translator") == "cpu", "int8"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert resolve_device("auto", model) == "cpu"
    with pytest.raises(ayn.UserError, match="torch finds no CUDA GPU"):
        resolve_device("cuda", model)


def test_quiet_prints_results_and_errors_only(ask, refused, model, truth, tmp_path):
    broken = b"\xff\n" + "\n".join(DATES).encode()
    assert "not UTF-8" in ask("translate", "-m", model, stdin=broken).err
    answer = ask("translate", "-m", model, "--quiet", stdin=broken)
    assert (answer.code, answer.err, answer.lines[1:]) == (0, "", truth)
    assert "no such file" in refused("translate", "-q", "-m", model, "-i", tmp_path / "none.txt")
    assert "this run is finished" in ask("train", model.parent.parent / "recipe.yaml").err
    assert ask("train", "--quiet", model.parent.parent / "recipe.yaml").err == ""


# --- translate ------------------------------------------------------------------------------------------------------


def test_arguments_are_translated_as_the_library_does(ask, model, truth):
    answer = ask("translate", "-m", model, *DATES)
    assert (answer.code, answer.lines, answer.err) == (0, truth, "")
    assert len(set(truth)) > 1, "a model that always says the same proves nothing here"


def test_standard_input_keeps_blank_lines_and_whitespace(ask, model, truth):
    source = f"{DATES[0]}\n\n  {DATES[1]}\t\n \t \n{DATES[2]}".encode()
    answer = ask("translate", "-m", model, stdin=source)
    assert answer.out == f"{truth[0]}\n\n  {truth[1]}\t\n \t \n{truth[2]}\n"


@pytest.mark.parametrize("how", ["plain", "windows", "gz"])
def test_a_file_becomes_a_file_line_by_line(ask, model, truth, tmp_path, how):
    text = f"{DATES[0]}\n\n  {DATES[1]} \n{DATES[2]}\n".encode()
    if how == "windows":  # a byte order mark and CRLF, as Notepad writes
        text = b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n")
    source = tmp_path / ("in.txt.gz" if how == "gz" else "in.txt")
    source.write_bytes(gzip.compress(text) if how == "gz" else text)
    answer = ask("translate", "-m", model, "-i", source, "-o", tmp_path / "out.txt")
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    written, end = (tmp_path / "out.txt").read_bytes().decode(), "\r\n" if how == "windows" else "\n"
    assert written == f"{truth[0]}\n\n  {truth[1]} \n{truth[2]}\n".replace("\n", end)
    assert not list(tmp_path.glob("*.part"))


def test_a_column_of_a_table_is_translated_and_nothing_else(ask, polyglot, tmp_path):
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_bytes(b'id;"text"\r\n1;"a ""dog"""\r\n2;12\r\n')
    answer = ask("translate", "-m", polyglot, "--to", "zh", source, target)
    assert answer.code == 2 and not target.exists()
    assert "name the column that is translated (--column: id, text; or 1 to 2)" in answer.err
    answer = ask("translate", "-m", polyglot, "--to", "zh", source, target, "--column", "text")
    assert (answer.code, answer.out) == (0, "")
    written = target.read_bytes()
    assert written.startswith(b'id;"text"\r\n1;"') and written.endswith(b'"\r\n2;12\r\n')
    piped = ["translate", "-m", polyglot, "--to", "zh", "--format", "csv", "--column", "2"]
    assert ask(*piped, stdin=source.read_bytes()).out.encode() == written
    assert "--no-header if it has none" in ask(*piped, stdin=source.read_bytes()).err
    for wrong in (["--column", "text", "a text"], ["--no-header", source], ["--header", "--format", "md", "a"]):
        assert ask("translate", "-m", polyglot, "--to", "zh", *wrong).code == 2


def test_windows_line_ends_and_a_byte_order_mark_on_standard_input(ask, model, truth):
    source = b"\xef\xbb\xbf" + "\r\n".join([DATES[0], "", DATES[1]]).encode()
    found = [json.loads(line) for line in ask("translate", "-m", model, "--json", stdin=source).lines]
    assert [one["source"] for one in found] == [DATES[0], "", DATES[1]], "neither is part of the text"
    assert [one["translation"] for one in found] == [truth[0], "", truth[1]]


def test_an_empty_text_is_an_empty_line(ask, model):
    assert ask("translate", "-m", model, "").out == "\n"


def test_empty_input_gives_empty_output_and_a_note(ask, model, tmp_path):
    answer = ask("translate", "-m", model)
    assert (answer.code, answer.out, answer.err) == (0, "", "note: standard input is empty\n")
    empty, out = tmp_path / "empty.txt", tmp_path / "out.txt"
    empty.touch()
    answer = ask("translate", "-m", model, "-i", empty, "-o", out)
    assert (answer.code, answer.err, out.read_bytes()) == (0, f"note: {empty} is empty\n", b"")


def test_invalid_utf_8_is_replaced_with_a_note(ask, model, truth):
    answer = ask("translate", "-m", model, stdin=b"caf\xe9\n" + DATES[0].encode() + b"\n" + b"\xff\n" * 9)
    assert len(answer.lines) == 11 and answer.lines[1] == truth[0]
    notes = answer.err.splitlines()
    assert notes[:2] == [
        "note: standard input:1: not UTF-8; invalid bytes replaced",
        "note: standard input:3: not UTF-8; invalid bytes replaced",
    ]
    assert len(notes) == 4 and notes[-1] == "note: standard input: 10 lines in total were not UTF-8"


def test_a_huge_line_is_translated_in_parts_with_a_note(ask, model):
    answer = ask("translate", "-m", model, "--beam", 1, stdin=b"May 5, 2020 " * 500)
    assert len(answer.lines) == 1 and len(answer.out) > 500
    assert answer.err.startswith("note: ") and "split in" in answer.err


def test_json_has_all_fields(ask, model, truth):
    answer = ask("translate", "-m", model, "--json", "--align", "--best", 2, *DATES, "", "May 5, 2020 " * 30)
    trees = [json.loads(line) for line in answer.lines]
    assert [tree["source"] for tree in trees[:4]] == [*DATES, ""]
    assert [tree["translation"] for tree in trees[:4]] == [*truth, ""]
    for tree in trees[:3]:
        assert tree["candidates"][0]["text"] == tree["translation"]
        assert tree["candidates"][0]["score"] > tree["candidates"][1]["score"]
        link = tree["alignment"][0]
        assert tree["translation"][slice(*link["target_span"])] == link["target"]
        assert tree["source"][slice(*link["source_span"])] == link["source"]
    assert [bool(tree["notes"]) for tree in trees] == [False, False, False, False, True]
    assert answer.err == "", "notes are in the JSON"


def test_n_best_has_scores_and_a_blank_line_after_each_text(ask, model, truth):
    groups = ask("translate", "-m", model, "--best", 3, *DATES[:2]).out.split("\n\n")
    assert len(groups) == 3 and groups[2] == ""
    for group, first in zip(groups[:2], truth[:2], strict=True):
        scores, texts = zip(*(line.split("\t") for line in group.split("\n")), strict=True)
        assert len(texts) == 3 and texts[0] == first
        assert sorted(map(float, scores), reverse=True) == list(map(float, scores))


def test_alignment_has_a_line_per_target_token(ask, model, truth):
    first, *links = ask("translate", "-m", model, "--align", DATES[0]).out.rstrip("\n").split("\n")
    assert first == truth[0]
    assert "".join(link.split(" ← ")[0].strip() for link in links) == truth[0]
    assert all(link.split(" ← ")[1] in DATES[0] for link in links)


def test_search_options_reach_the_search(ask, model):
    sampling = ["translate", "-m", model, "--best", 4, "--temperature", 2.0, DATES[0]]
    drawn = [ask(*sampling, "--seed", seed).out for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2], "--temperature selects sampling"
    assert drawn[0] == ask(*sampling, "--seed", 1, "--method", "sample").out
    narrow = ask("translate", "-m", model, "--beam", 1, *DATES).lines
    assert narrow == ask("translate", "-m", model, "--method", "greedy", *DATES).lines
    assert narrow == ayn.load(model).translate(DATES, beam=1)


def test_the_language_is_selected_and_a_wrong_one_refused(ask, refused, polyglot):
    text = "4 June 1998"
    chinese, iso = (ask("translate", "-m", polyglot, "--to", to, "--from", "en", text).out for to in ("zh", "iso"))
    assert "月" in chinese and "月" not in iso and "-" in iso
    assert refused("translate", "-m", polyglot, text).endswith("set one: iso, zh")
    assert "'fr' (allowed: iso, zh, zh-Hant)" in refused("translate", "-m", polyglot, "--to", "fr", text)
    assert "unknown source language 'de' (allowed: en, zh)" in refused(
        "translate", "-m", polyglot, "--to", "zh", "--from", "de", text
    )


def test_a_language_for_a_bilingual_model_is_refused(refused, model):
    assert "remove 'de'" in refused("translate", "-m", model, "--to", "de", "x")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--best", 9], "best=9: a beam of 4 finds at most 4; widen the beam"),
        (["--temperature", 0.5, "--method", "beam"], "temperature: only for method 'sample', this is 'beam'"),
        (["--method", "magic"], "method: 'magic' is not allowed; expected 'beam', 'greedy' or 'sample'"),
        (["--method", "sample", "--top-p", 7], "top_p: "),
        (["--device", "tpu"], "unknown device 'tpu' (allowed: auto, cpu, cuda)"),
        (["-i", "some.txt"], "texts and --input are exclusive"),
        (["-o", "/nowhere/out.txt"], "/nowhere/out.txt: there is no folder /nowhere; create it first"),
        (["-o", "/"], "/: is a folder; name a file in it"),
        (["-o", "/proc/out.txt"], "/proc/out.txt: cannot write"),
    ],
)
def test_invalid_options_are_refused(refused, model, args, said):
    assert said in refused("translate", "-m", model, "x", *args)


def test_invalid_options_leave_no_file(refused, model, tmp_path):
    refused("translate", "-m", model, "x", "--best", 9, "-o", tmp_path / "out.txt")
    assert not list(tmp_path.iterdir())


def test_a_text_that_begins_with_a_hyphen_gets_a_hint(ask, model):
    hint = "note: '- buy milk' begins with a hyphen and is read as an option; put -- before the texts"
    answer = ask("translate", "-m", model, "- buy milk")
    assert answer.code == 2 and hint in answer.err
    assert hint not in ask("translate", "-m", model, "--jsno", "x").err
    assert ask("translate", "-m", model, "--", "- buy milk").code == 0


def test_an_argument_that_is_not_text_is_refused(refused, model):
    assert "fix the text" in refused("translate", "-m", model, os.fsdecode(b"\xff"))


def test_unreadable_input_is_named(refused, model, tmp_path):
    assert (
        refused("translate", "-m", model, "-i", tmp_path / "no.txt")
        == f"{tmp_path / 'no.txt'}: no such file; check the path"
    )
    said = f"{tmp_path}: is a folder; name a file in it, or an output folder for all of them"
    assert refused("translate", "-m", model, "-i", tmp_path) == said


def test_a_folder_without_a_model_is_named(refused, model, work, tmp_path):
    assert refused("translate", "-m", work / "run", "x") == f"{work / 'run'}: is a run folder; its model is {model}"
    assert "no config.json" in refused("translate", "-m", tmp_path, "x")
    damaged = tmp_path / "model"
    shutil.copytree(model, damaged)
    with (damaged / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert "model.safetensors: damaged" in refused("translate", "-m", damaged, "x")


def test_a_pipe_is_written_to_and_a_link_stays_a_link(ask, model, truth, tmp_path):
    pipe = tmp_path / "pipe"  # one of our own: a test run by root must never be able to replace a real device
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        try:
            assert ask("translate", "-m", model, DATES[0], "-o", pipe).code == 0
            assert pipe.is_fifo(), "it must not be replaced by a file"
            assert reader.communicate(timeout=PATIENCE)[0].decode() == truth[0] + "\n"
        finally:
            reader.kill()
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    assert ask("translate", "-m", model, DATES[0], "-o", tmp_path / "link.txt", "--force").code == 0
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == truth[0] + "\n"


def test_the_input_file_is_never_overwritten(ask, model, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(DATES), "utf-8")
    said = ask("translate", "-m", model, "-i", file, "-o", file, "--force")
    assert said.code == 2 and said.err.endswith("text.txt: is the input file; name another file\n")
    assert file.read_text("utf-8") == "\n".join(DATES) and list(tmp_path.iterdir()) == [file]


def test_a_full_disk_is_one_message(model):
    with open("/dev/full", "w") as full:
        command = [*COMMAND, "translate", "-m", str(model), "x"]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT, timeout=PATIENCE)
    assert (found.returncode, found.stderr) == (2, b"allyouneed: the output: No space left on device\n")


def test_a_closed_output_pipe_is_not_an_error_message(model, tmp_path):
    (tmp_path / "in.txt").write_text("May 5, 2020\n" * 3000)
    command = [*COMMAND, "translate", "-m", str(model), "--beam", "1", "-i", str(tmp_path / "in.txt")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read().splitlines()  # a model this small has its troubles, and notes say so
    assert all(line.startswith(b"note: ") for line in said), said
    assert process.wait(PATIENCE) == 1


def test_a_pipe_is_answered_line_by_line(model, truth):
    """Each answer is there before the next line is written."""
    command = [*COMMAND, "translate", "-m", str(model)]
    with warm_python.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT) as process:
        watchdog = threading.Timer(PATIENCE, process.kill)  # a pipe that is not answered
        watchdog.start()
        for text, expected in zip([*DATES, "", "no end of line"], [*truth, "", None], strict=True):
            process.stdin.write(text.encode() + (b"" if expected is None else b"\n"))
            process.stdin.flush()
            if expected is None:
                process.stdin.close()
            found = process.stdout.readline().decode()
            assert found.endswith("\n") and found.strip() == (found.strip() if expected is None else expected), text
        watchdog.cancel()
        assert process.stdout.read() == b"" and process.wait(PATIENCE) == 0


def interrupt(process, when):
    """Ctrl-C as soon as `when()`."""
    until(lambda: when() or process.poll() is not None)
    assert process.poll() is None, "it ended before it could be interrupted"
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=PATIENCE)[1].decode()


def test_ctrl_c_while_translating_keeps_the_old_file_and_the_finished_lines(model, tmp_path):
    (tmp_path / "in.txt").write_text("May 5, 2020\n" * 100_000)
    out, part = tmp_path / "out.txt", tmp_path / "out.txt.part"
    out.write_text("old")
    command = [*COMMAND, "translate", "-m", str(model), "-i", str(tmp_path / "in.txt"), "-o", str(out), "--force"]
    process = warm_python.Popen(command, stderr=subprocess.PIPE, env=ENVIRONMENT)
    journal = tmp_path / "out.txt.journal"
    said = interrupt(process, lambda: journal.exists() and journal.read_bytes().count(b"\n") > 1)
    assert process.returncode == 130 and said.endswith("lines are done; run the same command to resume\n")
    assert out.read_text() == "old"
    assert part.read_text().endswith("\n"), "no half line"


def test_a_background_job_hears_ctrl_c(monkeypatch):
    """A shell starts it with SIGINT ignored."""
    from allyouneed.__main__ import main

    monkeypatch.setattr("allyouneed.cli.main", lambda: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            main()
    finally:
        signal.signal(signal.SIGINT, before)


# --- train ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_training_saves_and_the_same_command_resumes(tmp_path):
    recipe = write_recipe(tmp_path, steps=1_000_000)
    log = tmp_path / "run" / "log.jsonl"
    process = warm_python.Popen([*COMMAND, "train", str(recipe)], stderr=subprocess.PIPE, env=ENVIRONMENT)
    said = interrupt(process, lambda: log.exists() and log.stat().st_size)
    assert process.returncode == 130 and "Traceback" not in said
    step = int(said.split("stopped at step ")[1].split(" ")[0].replace(",", ""))
    again = warm_shell("train", recipe, "--set", f"steps={step + 3}", text=True)
    assert again.returncode == 0, again.stderr
    assert f"resuming the run in {tmp_path / 'run'} after step {step:,}" in again.stderr
    assert (tmp_path / "run" / "model" / "config.json").exists()


def test_a_finished_run_is_left_alone_and_a_changed_recipe_refused(ask, refused, work, model):
    answer = ask("train", work / "recipe.yaml")
    assert answer.code == 0 and "this run is finished" in answer.err
    said = refused("train", work / "recipe.yaml", "--set", "seed=4")
    assert "--restart" in said and "seed: 1 before, 4 now" in said


def test_restart_starts_over(ask, tmp_path):
    recipe = write_recipe(tmp_path, steps=2)
    ask("train", recipe)
    answer = ask("train", recipe, "--restart", "--set", "seed=4")
    assert answer.code == 0 and "finished" not in answer.err
    assert "seed: 4" in (tmp_path / "run" / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("stepz=5", "stepz: unknown; did you mean 'steps'?"),
        ("model.widht=5", "model.widht: unknown; did you mean 'width'?"),
        ("model=transformer-bse", "did you mean 'transformer-base'?"),
        ("steps", "--set 'steps': expected key=value"),
        ("model.encoder[7].mixer.heads=1", "encoder has entries 0 to 0, not '7'"),
        ("data.train=nowhere.tsv", "nowhere.tsv: no such file or directory; check the path"),
    ],
)
def test_an_invalid_recipe_is_reported_by_path(refused, tmp_path, change, said):
    assert said in refused("train", write_recipe(tmp_path), "--set", change)


def test_an_unreadable_recipe_is_named(refused, tmp_path):
    assert "none.yaml: cannot read" in refused("train", tmp_path / "none.yaml")
    assert f"{tmp_path}: cannot read" in refused("train", tmp_path)
    (tmp_path / "empty.yaml").touch()
    assert "empty.yaml: a recipe is a mapping, this is NoneType" in refused("train", tmp_path / "empty.yaml")
    (tmp_path / "odd.yaml").write_text("model: [")
    assert "odd.yaml: not valid YAML" in refused("train", tmp_path / "odd.yaml")


# --- evaluate -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def sides(work, model):
    """The test pairs as two aligned files."""
    columns = zip(*(line.split("\t") for line in (work / "test.tsv").read_text("utf-8").splitlines()), strict=True)
    paths = work / "test.source", work / "test.target"
    for path, lines in zip(paths, columns, strict=True):
        path.write_text("\n".join(lines) + "\n", "utf-8")
    return paths


def test_the_same_pairs_score_the_same_however_they_are_stored(ask, model, work, sides, tmp_path):
    source, target = sides
    pairs = zip(source.read_text("utf-8").splitlines(), target.read_text("utf-8").splitlines(), strict=True)
    pairs = [{"source": left, "target": right} for left, right in pairs]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (tmp_path / "test.json").write_text(json.dumps(pairs))
    with (tmp_path / "test.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerows([["iso", "date"], *([pair["target"], pair["source"]] for pair in pairs)])
    out = tmp_path / "out.txt"
    how = [
        ["-m", model, work / "test.tsv", "-o", out],
        ["-m", model, tmp_path / "test.jsonl"],
        ["-m", model, tmp_path / "test.json"],
        ["-m", model, tmp_path / "test.csv", "--columns", "date,iso"],
        ["-m", model, "--source", source, "--target", target],
        ["--hypotheses", out, "--target", target],
        ["--hypotheses", out, work / "test.tsv"],
    ]
    first, *others = (ask("evaluate", "--json", *args) for args in how)
    scores = json.loads(first.out)
    assert scores["sentences"] == 20 and scores["bleu_interval"]["low"] <= scores["bleu_interval"]["high"]
    assert [other.out for other in others] == [first.out] * 6
    assert out.read_text("utf-8").splitlines() == ayn.load(model).translate(source.read_text("utf-8").splitlines())


def test_perfect_translations_score_100_and_lowercase_ignores_case(ask, tmp_path):
    hypotheses, references = tmp_path / "a.txt", tmp_path / "b.txt"
    hypotheses.write_text("the cat sat on the mat today\n" * 3)
    references.write_text("THE CAT SAT ON THE MAT TODAY\n" * 3)
    args = ["evaluate", "--hypotheses", hypotheses, "--json", "--target"]
    assert json.loads(ask(*args, hypotheses).out)["bleu"] == pytest.approx(100)
    assert json.loads(ask(*args, references).out)["bleu"] < 10
    loose = json.loads(ask(*args, references, "-lc").out)
    assert loose["bleu"] == pytest.approx(100) and "case:lc" in loose["bleu_signature"]


def test_chinese_is_counted_by_character(ask, tmp_path):
    file = tmp_path / "zh.txt"
    file.write_text("今天天气很好我们去公园\n", "utf-8")
    for how in (["--tokenize", "zh"], ["--to", "zh-Hant"]):
        answer = ask("evaluate", "--hypotheses", file, "--target", file, *how)
        assert "tok:zh" in answer.out and "BLEU  100.0" in answer.out


def test_a_multilingual_model_detects_the_language_or_takes_the_option(ask, polyglot):
    pairs = polyglot.parent.parent / "zh.tsv"
    found = ask("evaluate", "-m", polyglot, pairs, "--beam", 1)
    assert found.code == 0 and "en → zh" in found.err and "tok:zh" in found.out
    assert "tok:zh" in ask("evaluate", "-m", polyglot, pairs, "--to", "zh", "--beam", 1).out


def test_evaluated_files_are_not_overwritten(refused, model, tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("May 5, 2020\t2020-05-05\n")
    (tmp_path / "link.tsv").symlink_to(pairs)
    for output in ("pairs.tsv", "link.tsv"):
        assert "is the input file" in refused("evaluate", "-m", model, pairs, "-o", tmp_path / output)
    assert pairs.read_text() == "May 5, 2020\t2020-05-05\n"


def test_unusable_pairs_are_named(ask, refused, model, work, sides, tmp_path):
    mixed = tmp_path / "mixed.tsv"
    mixed.write_text("one\ttwo\nno tab\n")
    answer = ask("evaluate", "-m", model, mixed, "--beam", 1)
    assert answer.code == 0 and "of 1 sentence" in answer.out
    assert f"{mixed}:2: 1 column(s)" in answer.err
    assert "no usable test pair" in refused("evaluate", "-m", model, sides[0])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "give one of --model (translate, then score) and --hypotheses (score a file)"),
        (["-m", "MODEL", "--hypotheses", "SOURCE", "PAIRS"], "give one of --model"),
        (["-m", "MODEL"], "give PAIRS (one file with both sides), or --source and --target"),
        (["-m", "MODEL", "--source", "SOURCE"], "give PAIRS (one file with both sides), or --source and --target"),
        (["-m", "MODEL", "PAIRS", "--target", "SOURCE"], "give PAIRS (one file with both sides)"),
        (["-m", "MODEL", "--source", "SOURCE", "--target", "SHORT"], "has 20 lines but"),
        (["--hypotheses", "SOURCE", "--target", "SHORT"], "20 translations but 2 references"),
        (["-m", "MODEL", "nowhere.tsv"], "nowhere.tsv: no such file or directory"),
        (["--hypotheses", "nowhere.txt", "PAIRS"], "nowhere.txt: no such file"),
        (["-m", "MODEL", "PAIRS", "--tokenize", "foo"], "--tokenize foo: expected 13a"),
        (["--hypotheses", "SOURCE", "PAIRS", "--beam", "2"], "--hypotheses translates nothing"),
        (["-m", "MODEL", "PAIRS", "-o", "/nowhere/out.txt"], "there is no folder /nowhere"),
    ],
)
def test_invalid_arguments_of_evaluate_are_refused_before_any_work(
    refused, model, work, sides, tmp_path, args, said, monkeypatch
):
    monkeypatch.setattr(
        "allyouneed.apps.translate.translator.Translator.translate_full", None
    )  # would fail with a traceback
    (tmp_path / "short.txt").write_text("1\n2\n")
    names = {"MODEL": model, "PAIRS": work / "test.tsv", "SOURCE": sides[0], "SHORT": tmp_path / "short.txt"}
    assert said in refused("evaluate", *(names.get(arg, arg) for arg in args))


# --- describe and demo ----------------------------------------------------------------------------------------------


@pytest.mark.slow  # test_describe.py describes every preset without the command
@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_described(ask, name):
    answer = ask("describe", name)
    assert answer.code == 0
    assert f"{parameter_count(ayn.model_config(name)):,} parameters" in answer.lines[0]


def test_a_description_in_a_pipe_is_not_truncated():
    found = warm_python.run(
        [*COMMAND, "describe", "transformer-base"], capture_output=True, text=True, env=ENVIRONMENT | {"COLUMNS": "20"}
    )
    assert "channel  ffn, hidden 2048  2,099,712" in found.stdout and "\nparameters   63,082,496\n" in found.stdout


def test_a_file_a_folder_and_changes_are_described(ask, model, tmp_path):
    assert "width 16" in ask("describe", model).lines[0]
    assert "width 48" in ask("describe", model, "--set", "width=48").lines[0]
    file = tmp_path / "mine.yaml"
    preset = Path(ayn.__file__).parent / "presets" / "transformer-tiny.yaml"
    file.write_text(preset.read_text("utf-8"), "utf-8")
    assert ask("describe", file).out == ask("describe", "transformer-tiny").out
    changed = ask("describe", file, "--set", "decoder[0].mixer.pattern=causal & window(7)").out
    assert "pattern causal & window(7)" in changed


def test_invalid_arguments_of_describe_are_refused(refused, work, tmp_path):
    assert "did you mean 'transformer-base'?" in refused("describe", "transformer-bas")
    assert "did you mean 'width'?" in refused("describe", "transformer-tiny", "--set", "widht=3")
    assert "its model is" in refused("describe", work / "run")
    assert "no config.json" in refused("describe", tmp_path)
    assert "none.yaml: cannot read" in refused("describe", tmp_path / "none.yaml")


# --- models and look ------------------------------------------------------------------------------------------------


def test_models_print_a_table_without_a_terminal():
    """In a pipe nothing is cut to a terminal's width."""
    found = warm_shell("models", "--papers", text=True)
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    firsts = [words[0] for line in lines if (words := line.split())]
    assert [word for word in firsts if word in preset_names()] == [*preset_names()]
    assert any("Attention Is All You Need" in line for line in lines) and "\x1b" not in found.stdout


def test_models_are_filtered_sorted_and_printed_as_json(ask, refused):
    trees = json.loads(ask("models", "transformer-b", "--json", "--sort", "state").out)
    assert [tree["name"] for tree in trees] == ["transformer-base", "transformer-big"]
    assert trees[0]["parameters"] == ayn.model_config("transformer-base").cost().parameters
    assert [at["length"] for at in trees[0]["at"]] == [1024, 32768] and "Vaswani" in trees[0]["paper"]
    assert "no preset contains 'gtp'" in refused("models", "gtp")
    assert "unknown --sort age (allowed: " in refused("models", "--sort", "age")


def test_a_pattern_is_drawn_in_the_terminal_and_as_a_file(ask, refused, tmp_path):
    answer = ask("look", "pattern", "causal & window(3)", "full", "--size", 6)
    assert answer.code == 0 and answer.lines[1].split() == ["█▄····", "██████"]
    answer = ask("look", "pattern", "causal", "-o", tmp_path / "p.svg")
    assert (answer.code, answer.out, answer.err) == (0, "", f"{tmp_path / 'p.svg'}: written\n")
    assert (tmp_path / "p.svg").read_text("utf-8").startswith("<?xml")
    assert "unknown pattern 'causl'" in refused("look", "pattern", "causl")
    assert "allowed: .png" in refused("look", "pattern", "causal", "-o", tmp_path / "p.gif")


def test_positions_are_drawn_in_the_terminal_and_as_a_file(ask, refused, tmp_path):
    assert "key − query from -63 to 0" in ask("look", "positions", "alibi").out
    assert ask("look", "positions", "sinusoidal", "--output", tmp_path / "p.png").code == 0
    assert (tmp_path / "p.png").stat().st_size > 5000
    assert "allowed: adaptive-span, alibi" in refused("look", "positions", "alibu")


def test_the_demo_requires_a_folder(refused, tmp_path):
    (tmp_path / "file").touch()
    assert (
        refused("demo", "--folder", tmp_path / "file") == f"{tmp_path / 'file'}: is a file; name a folder for the demo"
    )


def test_threads_wait_passively_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for told, expected in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if told:
            monkeypatch.setenv("OMP_WAIT_POLICY", told)
        with pytest.raises(SystemExit):
            main(["--version"])
        assert os.environ["OMP_WAIT_POLICY"] == expected


def test_a_status_line_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server starts, although the device of its log is full."""
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)
    show_status("serving on http://127.0.0.1:8000")
    show_notes(["created the folder out"])
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        full.close()
