"""Commands that use models give the results of the library and behave like `translate`."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import allyouneed as ayn
import warm_python
from allyouneed.cli import app, main
from allyouneed.infer.predictors.image_classifier import ImageClass
from allyouneed.infer.predictors.image_matcher import ImageMatch
from allyouneed.infer.predictors.registry import TASKS, commands
from allyouneed.infer.predictors.transcriber import Segment, Transcript
from waiting import PATIENCE

Trained = Callable[[str], tuple[Path, str]]
REVIEWS = ["the film is wonderful.", "a dog likes the sea. the film is a bore."]
# a command, a run it fits, and texts for it
FITS: dict[str, tuple[str, list[str]]] = {
    "generate": ("causal-lm", ["the cat", "a dog likes"]),
    "fill-mask": ("masked-lm", ["the cat<mask> the sea.", "<mask> dog<mask>"]),
    "seq2seq": ("seq2seq", ["the cat sees the sea", "a dog likes the moon"]),
    "summarise": ("summarisation", ["the cat sees the sea", "a dog likes the moon"]),
    "correct": ("correction", ["the cat see the sea.", "a dog likes teh moon."]),
    "classify": ("classification", REVIEWS),
    "tag": ("tagging", ["Anna lives in New York .", "王芳 comes from Ulm"]),
    "answer": ("question-answering", ["where does Anna live?\tAnna lives in Ulm.", "where does Li Na live?\tAnna is."]),
    "embed": ("similarity", ["the cat sees the moon", "a dog"]),
    "similarity": ("similarity", ["the cat sees the moon\ta dog", "a\ta"]),
}


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.split("\n")[:-1]

    @property
    def trees(self) -> list[Any]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trained: Trained) -> Callable[..., Answer]:
    """ask("tag", …): the command with a model it fits; model="…" for that of another run, or a path."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(command: str, *args: Any, model: str | Path | None = None, stdin: str = "") -> Answer:
        name = FITS[command][0] if model is None else model
        folder = name if isinstance(name, Path) else trained(name)[0] / "model"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        with pytest.raises(SystemExit) as stopped:
            main([command, "--model", str(folder), *map(str, args)])
        return Answer(int(stopped.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def load(trained: Trained) -> Callable[[str], Any]:
    return lambda run: ayn.load(trained(run)[0] / "model")


# --- what all of them promise ---------------------------------------------------------------------------------------


def test_every_task_has_a_command() -> None:
    app.load()
    registered = {command.name for command in app.registered_commands}
    assert all(set(entry.commands) <= registered for entry in TASKS.values())
    assert set(commands()) - {entry.commands[0] for entry in TASKS.values()} == {"similarity", "search"}


def test_every_task_has_a_predictor_class() -> None:
    assert {entry.predictor_class.__name__ for entry in TASKS.values()} == {entry.predictor for entry in TASKS.values()}


@pytest.mark.parametrize("command", commands())
def test_help_and_a_missing_model(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allyouneed.models.find", lambda name="": None)  # the translator that comes with the package
    for args, code, said in (([command, "--help"], 0, f"allyouneed {command}"), ([command, "x"], 2, "--model")):
        with pytest.raises(SystemExit) as stopped:
            main(args)
        shown = capsys.readouterr()
        assert (stopped.value.code or 0) == code and said in shown.out + shown.err


@pytest.mark.parametrize("command", FITS)
def test_arguments_lines_and_files_give_the_same_results(
    command: str, ask: Callable[..., Answer], tmp_path: Path
) -> None:
    texts = FITS[command][1]
    options = ["--max-length", 9] if command == "generate" else []
    lines = "".join(text + "\n" for text in texts)
    (tmp_path / "in.txt").write_text(lines, encoding="utf-8")
    typed = ask(command, *options, stdin=lines)
    assert typed.code == 0 and typed.out and typed.err == ""
    filed = ask(command, *options, "--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt")
    assert (filed.code, filed.out) == (0, "")
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == typed.out
    if command != "similarity":  # two arguments are a pair
        assert ask(command, *options, *texts).out == typed.out
    told = ask(command, *options, *([] if command == "embed" else ["--json"]), stdin=lines)
    assert len(told.trees) == len(texts) and all("text" in t or "texts" in t for t in told.trees)


@pytest.mark.parametrize("command", FITS)
def test_a_pipe_is_answered_line_by_line(
    command: str, ask: Callable[..., Answer], trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a line is there before the next line is written, and it is the answer of the whole file."""
    run, texts = FITS[command]
    options = ["--method", "greedy", "--max-length", "5"] if command == "generate" else []
    whole = ask(command, *options, stdin="".join(text + "\n" for text in texts)).out
    (stdin, to_command), (from_command, stdout) = os.pipe(), os.pipe()
    answers = []

    def talk() -> None:
        for text in texts:
            os.write(to_command, text.encode() + b"\n")
            answers.append(os.read(from_command, 1 << 16) if select.select([from_command], [], [], 30)[0] else None)
        os.close(to_command)

    talker = threading.Thread(target=talk)
    with open(stdin) as reads, open(stdout, "w", encoding="utf-8") as writes:
        monkeypatch.setattr(sys, "stdin", reads)
        monkeypatch.setattr(sys, "stdout", writes)
        talker.start()
        with pytest.raises(SystemExit) as stopped:
            main([command, "--model", str(trained(run)[0] / "model"), *options])
        talker.join()
    rest = os.read(from_command, 1 << 16)
    os.close(from_command)
    assert not stopped.value.code and None not in answers
    assert b"".join([*answers, rest]).decode() == whole and all(answers)


@pytest.mark.parametrize("command", FITS)
def test_blank_lines_stay_where_they_are(command: str, ask: Callable[..., Answer]) -> None:
    first, second = FITS[command][1]
    options = ["--method", "greedy", "--max-length", 5] if command == "generate" else []
    plain = ask(command, *options, stdin=f"{first}\n\n{second}\n")
    alone = [ask(command, *options, stdin=f"{text}\n") for text in (first, second)]
    if command == "embed":
        assert len(plain.trees) == 3 and plain.trees[1]["text"] == "" and len(plain.trees[1]["vector"]) == 32
    elif command != "generate":
        assert plain.out == f"{alone[0].out}\n{alone[1].out}"
    else:
        assert plain.lines[1] == "" and len(plain.lines) == 3
    assert ask(command, *options).err == "note: standard input is empty\n"


def test_correct_prints_the_edits(ask: Callable[..., Answer]) -> None:
    text = "the cat sees teh sea."
    plain, whole = ask("correct", text), ask("correct", text, "--json").trees[0]
    places = [f"{e['begin']}-{e['end']}\t{e['before']}\t{e['after']}" for e in whole["edits"]]
    assert ask("correct", text, "--edits").lines == [*plain.lines, *places, ""]
    assert ask("correct", text, "--margin", 1000).lines == [text]


def test_texts_are_ranked_best_first(ask: Callable[..., Answer], load: Callable[[str], Any]) -> None:
    query, texts, model = "the cat sees the sea", ["猫看见大海", "狗喜欢月亮", "她听见面包"], "reranking"
    expected = [f"{one.score:.4f}\t{one.text}" for one in load(model).rerank(query, texts)]
    assert ask("rerank", "--query", query, model=model, stdin="\n".join(texts)).lines == expected
    assert ask("rerank", "--query", query, "--top", 2, *texts, model=model).lines == expected[:2]
    assert ask("rerank", "--query", query, "--json", *texts, model=model).trees[0].keys() == {"query", "text", "score"}


def test_a_text_may_have_several_labels(ask: Callable[..., Answer], load: Callable[[str], Any]) -> None:
    text = "the cat sees the sea. a dog likes the moon."
    labels = load("classification several").classify(text)
    assert ask("classify", text, model="classification several").lines == ["|".join(labels)]
    assert ask("classify", "--json", text, model="classification several").trees[0]["labels"] == labels


def test_questions_about_one_text(ask: Callable[..., Answer], tmp_path: Path) -> None:
    text = "Anna lives in Ulm. Li Na lives in Paris."
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    questions = ["where does Anna live?", "where does Li Na live?"]
    found = ask("answer", *questions, "--context", tmp_path / "text.txt", "--threshold", 1000)
    assert found.lines == ask("answer", "--threshold", 1000, stdin="".join(f"{q}\t{text}\n" for q in questions)).lines
    ranked = ask("answer", questions[0], "--context", tmp_path / "text.txt", "--threshold", 1000, "--top", 2).lines
    assert len(ranked) == 3 and ranked[0].split("\t")[2] == found.lines[0]
    begin, end = map(int, ranked[0].split("\t")[1].split("-"))
    assert text[begin:end] == found.lines[0]
    assert ask("answer", "--context", "-").code == 2


def test_a_model_of_another_task_names_its_command(ask: Callable[..., Answer]) -> None:
    for command, model, said in [
        ("generate", "tagging", "a model for tagging cannot continue texts; use `allyouneed tag`"),
        ("tag", "causal-lm", "a model for causal-lm cannot tag words; use `allyouneed generate`"),
        ("translate", "masked-lm", "a model for masked-lm cannot translate; use `allyouneed fill-mask`"),
        ("embed", "translation", "cannot embed texts; use `allyouneed translate`"),
        ("classify-image", "similarity", "cannot classify images; use `allyouneed embed`"),
        ("transcribe", "classification", "cannot transcribe sound; use `allyouneed classify`"),
        ("seq2seq", "prefix-lm", "cannot rewrite texts; use `allyouneed generate`"),
    ]:
        answer = ask(command, "x", model=model)
        assert (answer.code, answer.out) == (2, "") and answer.err.endswith(said + "\n"), answer.err


@pytest.mark.parametrize(
    ("command", "args", "said"),
    [
        ("classify", ["--device", "tpu"], "unknown device 'tpu' (allowed: auto, cpu, cuda)"),
        ("classify", ["--dtype", "int3"], "--dtype int3: expected float32, bfloat16, float16"),
        ("tag", ["-i", "x.txt"], "texts and --input are exclusive"),
        ("generate", ["--whole"], "--whole is for --input and standard input"),
        ("generate", ["--temperature", "-1"], "temperature"),
        ("generate", ["--method", "magic"], "'magic' is not allowed"),
        ("fill-mask", [], "contains no <mask>"),
        ("similarity", [], "expected two texts, got 1"),
        ("similarity", ["y", "--top", 3], "--top requires --query"),
        ("embed", ["-o", "/nowhere/x.npy"], "there is no folder /nowhere"),
        ("generate", ["--index", "/nowhere"], "/nowhere: not an index"),
    ],
)
def test_invalid_options_are_one_message(
    command: str, args: list[Any], said: str, ask: Callable[..., Answer], tmp_path: Path
) -> None:
    answer = ask(command, "x", *args)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("allyouneed: ") and said in answer.err and "Traceback" not in answer.err


def test_a_bad_line_is_named_and_results_before_it_are_kept(ask: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("the<mask> sea\n\nno mask\n<mask>\n")
    whole = ask("fill-mask", "-i", tmp_path / "in.txt", "-o", tmp_path / "out.txt")
    assert whole.code == 2 and not (tmp_path / "out.txt").exists()
    assert f"{tmp_path / 'in.txt'}:3: 'no mask': contains no <mask>" in whole.err
    assert f"note: {tmp_path / 'out.txt'}: 2 lines are done; run the same command to resume" in whole.err
    assert (tmp_path / "out.txt.part").read_text() == ask("fill-mask", "the<mask> sea").out + "\n"
    assert "standard input:2: 3 columns" in ask("classify", stdin="a\nb\tc\td\n").err
    assert "standard input:1: 1 column; expected two texts" in ask("similarity", stdin="a\n").err


def test_truncation_is_noted(ask: Callable[..., Answer]) -> None:
    for command, text in (("classify", "the film " * 60), ("embed", "the cat " * 60)):
        answer = ask(command, text)
        assert answer.code == 0 and answer.err.startswith("note: ") and "truncated to" in answer.err
    told = ask("classify", "--json", "the film " * 60)
    assert told.err == "" and "truncated to" in told.trees[0]["notes"][0]


def test_half_precision(ask: Callable[..., Answer]) -> None:
    exact, coarse = (ask("embed", "--dtype", dtype, "a dog").trees[0]["vector"] for dtype in ("float32", "bfloat16"))
    assert exact != coarse and np.allclose(exact, coarse, atol=0.1)


# --- generate -------------------------------------------------------------------------------------------------------

SURE = ["--method", "greedy", "--max-length", 12]


def test_one_prompt_is_streamed_and_many_are_lines(
    ask: Callable[..., Answer], load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("causal-lm")
    expected = model.generate(["the cat", "a dog"], method="greedy", max_length=12)
    assert ask("generate", *SURE, "the cat").out == expected[0] + "\n"
    assert ask("generate", *SURE, stdin="the cat\n").out == expected[0] + "\n"
    assert ask("generate", *SURE, "--echo", "the cat").out == f"the cat{expected[0]}\n"
    assert ask("generate", *SURE, "the cat", "a dog").out == "".join(text + "\n" for text in expected)
    assert ask("generate", *SURE, "--echo", "the cat", "a dog").lines[1] == f"a dog{expected[1]}"
    monkeypatch.setattr("allyouneed.infer.predictors.generator.Generator.generate_full", lambda *a, **k: [])
    assert ask("generate", *SURE, "the cat").out == expected[0] + "\n", "it is told as it comes"


def test_options_reach_the_search(ask: Callable[..., Answer], load: Callable[[str], Any]) -> None:
    model = load("causal-lm")
    drawn = [ask("generate", "--temperature", 2.0, "--top-k", 20, "--seed", s, "the cat").out for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == model.generate("the cat", temperature=2.0, top_k=20, seed=1) + "\n"
    free = model.generate("the cat", method="greedy", max_length=12)
    stop = free[4:7]
    assert ask("generate", *SURE, "--stop", stop, "--stop", "zzz", "the cat").out == free[: free.index(stop)] + "\n"
    options = {"repetition_penalty": 1.8, "min_p": 0.05, "top_p": 0.9, "seed": 3, "max_length": 7}
    args = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert ask("generate", *args, "the cat").out == model.generate("the cat", **options) + "\n"
    best = ask("generate", "--method", "beam", "--beam", 3, "--best", 2, "--max-length", 6, "the cat")
    (full,) = model.generate_full(["the cat"], method="beam", beam=3, best=2, max_length=6)
    assert best.out == "".join(f"{c.score:.4f}\t{c.text}\n" for c in full.candidates) + "\n"
    (tree,) = ask("generate", *SURE, "--json", "the cat").trees
    assert tree["prompt"] == "the cat" and tree["text"] == free == tree["candidates"][0]["text"]


@pytest.mark.parametrize("run", ["prefix-lm", "prefix-lm text", "causal-lm decoder-decoder"])
def test_other_generative_models_stream_too(run: str, ask: Callable[..., Answer], load: Callable[[str], Any]) -> None:
    expected = load(run).generate("the cat likes", method="greedy", max_length=12)
    assert ask("generate", *SURE, "the cat likes", model=run).out == expected + "\n" and expected


def test_a_whole_text_is_one_prompt_and_line_breaks_are_escaped(
    ask: Callable[..., Answer], load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = load("causal-lm")
    expected = model.generate("the cat\n\na dog", method="greedy", max_length=12)
    assert ask("generate", *SURE, "--whole", stdin="the cat\n\na dog\n").out == expected + "\n"
    said = "one\ntwo\r\nthree"
    monkeypatch.setattr("allyouneed.infer.predictors.generator.detokenize", lambda *a: said)
    assert ask("generate", *SURE, "a", "b").lines == [r"one\ntwo\nthree"] * 2
    assert [tree["text"] for tree in ask("generate", *SURE, "--json", "a", "b").trees] == [said] * 2


def test_interactive_input_is_answered_line_by_line(trained: Trained) -> None:
    """In a terminal: a prompt, its answer, the next prompt."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "allyouneed", "generate", "-m", str(trained("causal-lm")[0] / "model")]
    process = warm_python.Popen(
        [*command, "--method", "greedy", "--max-length", "5"],
        stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout and process.stderr
    for prompt in ("the cat\n", "a dog\n"):
        os.write(leader, prompt.encode())
        assert process.stdout.readline().endswith(b"\n")
    os.write(leader, b"\x04")
    assert process.wait(PATIENCE) == 0 and b"Type a text and Enter" in process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    os.close(leader)
    os.close(follower)


def test_ctrl_c_while_streaming(trained: Trained) -> None:
    command = [sys.executable, "-m", "allyouneed", "generate", "-m", str(trained("causal-lm")[0] / "model")]
    process = warm_python.Popen(
        [*command, "--max-length", "100000", "--min-length", "100000", "the cat"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    heard = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    assert heard and process.returncode == 130 and b"Traceback" not in said


# --- the others -----------------------------------------------------------------------------------------------------


def test_masks(ask: Callable[..., Answer], load: Callable[[str], Any]) -> None:
    text = "the<mask> sees<mask>."
    found = load("masked-lm").fill_mask(text, top=2)
    shown = [f"{f.score:.4f}\t{f.token}\t{f.text}" for mask in found for f in mask]
    assert ask("fill-mask", "--top", 2, text).lines == [*shown, ""]
    (tree,) = ask("fill-mask", "--json", "--top", 2, text).trees
    assert [[f["token"] for f in mask] for mask in tree["masks"]] == [[f.token for f in mask] for mask in found]
    gaps = load("span-corruption").fill(["my friend<mask>."])
    assert ask("fill-mask", "my friend<mask>.", model="span-corruption").lines == gaps


def test_classes(ask: Callable[..., Answer], load: Callable[[str], Any]) -> None:
    model = load("classification")
    assert ask("classify", *REVIEWS).lines == model.classify(REVIEWS) == ["pos", "neg"]
    pair = ("the film", "is wonderful")
    (full,) = model.classify_full([pair])
    shown = [f"{score:.4f}\t{label}" for label, score in full.scores.items()]
    assert ask("classify", "--top", 2, "\t".join(pair)).lines == [*shown, ""]
    (tree,) = ask("classify", "--json", stdin="\t".join(pair) + "\n").trees
    assert tree["text"] == list(pair) and tree["label"] == full.label and len(tree["scores"]) == 2
    assert len(ask("classify", "--json", "--top", 1, "x").trees[0]["scores"]) == 1


def test_tags(ask: Callable[..., Answer]) -> None:
    text = "Anna lives in New York ."
    shown = ask("tag", text).out
    assert shown == "Anna\tB-PER\nlives\tO\nin\tO\nNew\tB-LOC\nYork\tI-LOC\n.\tO\n\n"
    (tree,) = ask("tag", "--json", text).trees
    assert tree["words"] == text.split() and tree["tags"][3] == "B-LOC"
    assert tree["spans"] == [
        {"kind": "PER", "begin": 0, "end": 1, "words": ["Anna"]},
        {"kind": "LOC", "begin": 3, "end": 5, "words": ["New", "York"]},
    ]


def test_vectors(ask: Callable[..., Answer], load: Callable[[str], Any], tmp_path: Path) -> None:
    texts = ["the cat sees the moon", "a dog", ""]
    expected = load("similarity").embed(texts)
    trees = ask("embed", *texts).trees
    assert [tree["text"] for tree in trees] == texts
    torch.testing.assert_close(torch.tensor([tree["vector"] for tree in trees]), expected)
    answer = ask("embed", "--output", tmp_path / "v.npy", stdin="".join(text + "\n" for text in texts))
    found = np.load(tmp_path / "v.npy")
    assert (answer.code, answer.out) == (0, "") and found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)
    assert ask("embed", "-o", tmp_path / "none.npy").code == 0 and np.load(tmp_path / "none.npy").shape == (0, 32)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["none.npy", "v.npy"]


def test_similarity(ask: Callable[..., Answer], load: Callable[[str], Any]) -> None:
    pairs = [("the cat sees the moon", "a dog"), ("a", "a"), ("a child", "the moon")]
    scores = load("similarity").similarity(pairs)
    lines = "".join("\t".join(pair) + "\n" for pair in pairs)
    assert ask("similarity", *pairs[0]).out == f"{scores[0]:.4f}\n"
    assert ask("similarity", stdin=lines).lines == [f"{score:.4f}" for score in scores]
    trees = ask("similarity", "--json", stdin=lines).trees
    assert [tree["texts"] for tree in trees] == [list(pair) for pair in pairs]
    assert [tree["similarity"] for tree in trees] == pytest.approx(scores, abs=1e-6)
    texts = ["the sea", "a dog", "a child likes the sea"]
    against = load("similarity").similarity([("the sea", text) for text in texts])
    shown = [f"{score:.4f}\t{text}" for score, text in zip(against, texts, strict=True)]
    assert ask("similarity", "--query", "the sea", *texts).lines == shown
    best = sorted(shown, reverse=True)[:2]
    assert ask("similarity", "--query", "the sea", "--top", 2, stdin="\n".join(texts)).lines == best
    assert best[0].startswith("1.0000\tthe sea")


def test_vectors_of_a_pretrained_model(ask: Callable[..., Answer]) -> None:
    (tree,) = ask("embed", "a dog", model="masked-lm").trees
    assert len(tree["vector"]) == 32


# --- sound and images: what the commands do with what is found ------------------------------------------------------


class Everything:
    """A model of images and sounds that records its requests."""

    def __init__(self) -> None:
        self.folder = SimpleNamespace(notes=["a note of the folder"], task={"kind": "image-text"})
        self.model = torch.nn.Linear(1, 1)
        self.asked: list[Any] = []

    def transcribe_full(self, sounds: list[str], **options: Any) -> list[Transcript]:
        self.asked.append((sounds, options))
        parts = [Segment(0.0, 1.5, " Hello."), Segment(1.5, 62.25, " Good\nbye.")]
        return [Transcript(" Hello. Good bye.", parts, 62.25, "en", [f"{sound}: noisy"]) for sound in sounds]

    def classify_image_full(self, images: list[str], top: int) -> list[ImageClass]:
        self.asked.append((images, top))
        return [ImageClass("cat", dict(list({"cat": 0.75, "dog": 0.25}.items())[:top])) for _ in images]

    def match_image_full(self, images: list[str], texts: list[str]) -> list[ImageMatch]:
        self.asked.append((images, texts))
        return [ImageMatch(texts[1], {texts[0]: 0.25, texts[1]: 0.75}, {texts[0]: 0.1, texts[1]: 0.2}) for _ in images]


@pytest.fixture
def senses(monkeypatch: pytest.MonkeyPatch) -> Everything:
    made = Everything()
    monkeypatch.setattr("allyouneed.load", lambda *a, **k: made)
    return made


def test_sounds(ask: Callable[..., Answer], senses: Everything, tmp_path: Path) -> None:
    answer = ask("transcribe", "a.wav", "b.flac", model=tmp_path)
    assert answer.lines == ["Hello. Good bye."] * 2
    assert answer.err.splitlines() == [
        f"note: {tmp_path}: a note of the folder",
        "note: a.wav: noisy",
        "note: b.flac: noisy",
    ]
    args = ["--language", "en", "--to-english", "--timestamps", "--beam", 3]
    assert ask("transcribe", "a.wav", *args, model=tmp_path).lines == [
        "0.00\t1.50\tHello.",
        r"1.50\t62.25\tGood\nbye.".replace(r"\t", "\t"),
        "",
    ]
    assert senses.asked[-1] == (["a.wav"], {"language": "en", "task": "translate", "timestamps": True, "beam": 3})
    (tree,) = ask("transcribe", "--json", model=tmp_path, stdin="a.wav\n").trees
    assert tree["sound"] == "a.wav" and tree["segments"][1]["end"] == 62.25 and tree["notes"] == ["a.wav: noisy"]


def test_images(ask: Callable[..., Answer], senses: Everything, tmp_path: Path) -> None:
    assert ask("classify-image", "a.png", "b.png", model=tmp_path).lines == ["cat", "cat"]
    assert ask("classify-image", "--top", 2, "a.png", model=tmp_path).lines == ["0.7500\tcat", "0.2500\tdog", ""]
    (tree,) = ask("classify-image", "--json", "a.png", model=tmp_path).trees
    assert tree == {"image": "a.png", "label": "cat", "scores": {"cat": 0.75, "dog": 0.25}}


def test_images_and_texts(ask: Callable[..., Answer], senses: Everything, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a dog\n\n")
    answer = ask("match-image", "a.png", "--text", "a cat", "--texts", tmp_path / "texts.txt", model=tmp_path)
    assert answer.lines == ["0.7500\ta dog", "0.2500\ta cat", ""] and senses.asked[-1] == (
        ["a.png"],
        ["a cat", "a dog"],
    )
    (tree,) = ask("match-image", "a.png", "-t", "x", "-t", "y", "--json", model=tmp_path).trees
    assert tree["image"] == "a.png" and tree["text"] == "y" and tree["cosines"] == {"x": 0.1, "y": 0.2}
    assert "no candidate texts" in ask("match-image", "a.png", model=tmp_path).err
