"""seq2seq, summarisation and correction: one mechanism, from pairs to texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import allyouneed as ayn
from allyouneed.config import parse
from allyouneed.errors import UserError
from allyouneed.infer.predictors.rewriting.seq2seq import sentences
from allyouneed.tasks.task import Task
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from toy_texts import Listener, recipe

Trained = Callable[[str], tuple[Path, str]]
LONG = "the cat sees the sea. " * 12


@pytest.fixture(scope="module")
def load(trained: Trained) -> Callable[[str], Any]:
    return lambda run: ayn.load(trained(run)[0] / "model")


def test_a_decoder_and_an_encoder_decoder_answer_alike(load: Callable[[str], Any]) -> None:
    for run in ("seq2seq", "seq2seq decoder"):
        model = load(run)
        assert type(model).__name__ == "Seq2Seq"
        (one,) = model.seq2seq_full(["the cat sees the sea"], best=2)
        assert one.source == "the cat sees the sea" and len(one.candidates) == 2
        assert one.candidates[0].score >= one.candidates[1].score and one.text == model.seq2seq(one.source)
        assert set(one.text) <= set("猫狗朋友老人孩子她看见喜欢跟着听大海小鸟月亮面包房"), one.text


def test_a_model_decides_how_its_source_is_read() -> None:
    task = parse(Task, {"kind": "correction"}, "task")  # type: ignore[type-abstract]
    assert (task.sides, task.two_vocabularies) == (2, True)
    prompted = task.for_model({"kind": "decoder"})
    assert (prompted.sides, prompted.two_vocabularies) == (1, False)


def test_evaluate_reports_the_metrics_of_the_task(trained: Trained, texts: Path) -> None:
    for run, name in (("summarisation", "pairs.tsv"), ("correction", "misspelt.tsv")):
        result = ayn.evaluate(trained(run)[0] / "model", texts / f"valid.{name}")
        task = parse(Task, {"kind": run}, "task")  # type: ignore[type-abstract]
        assert set(result.figures) == set(task.metrics) - {"loss"}
        assert all(0 <= value <= 100.1 for value in result.figures.values() if value < 100), result.text


def test_a_long_text_is_truncated_or_summarised_in_pieces(load: Callable[[str], Any]) -> None:
    model = load("summarisation")
    windows = model.windows(LONG)
    assert "".join(windows) == LONG and len(windows) > 1
    assert all(len(model.tokenizer.encode(window.strip())) <= model.room for window in windows)
    (cut,) = model.summarise_full([LONG])
    assert cut.text == model.summarise(windows[0]) and "the rest was left out" in cut.notes[-1]
    (whole,) = model.summarise_full([LONG], long="windows")
    assert whole.text == "".join(model.summarise(windows)) and f"in {len(windows)} pieces" in whole.notes[-1]
    assert model.summarise_full(["the cat sees the sea"])[0].notes == []


def test_long_training_sources_are_truncated_with_a_report(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "long.tsv").write_text(f"{LONG}\t猫\nthe cat\t猫\n", encoding="utf-8")
    data = {"train": {"path": str(tmp_path / "long.tsv")}, "max_tokens": 32}
    said = {}
    for run in ("summarisation", "seq2seq", "seq2seq decoder"):
        listener = Listener()
        task: dict[str, Any] = {"kind": run.split()[0]} | ({"long": "truncate"} if "decoder" in run else {})
        made = recipe(tmp_path, texts, run, task=task, data=data)
        prepared = prepare(made, RunFolder(tmp_path / run), Reporter(listener.console))
        assert max(int(side.max()) for side in prepared.train.items.lengths(0)) <= 32
        said[run] = listener.text
    assert "2 kept, 0 left out" in said["summarisation"] and "truncated to data.max_tokens: 1" in said["summarisation"]
    assert "1 kept, 1 left out" in said["seq2seq"] and "truncated" not in said["seq2seq"]
    assert "truncated to data.max_tokens: 1" in said["seq2seq decoder"]


def test_a_corrector_shows_its_edits_and_keeps_the_spaces_between_sentences(load: Callable[[str], Any]) -> None:
    model = load("correction")
    text = "the cat sees teh sea.  \n a dog likes teh moon."
    (one,) = model.correct_full([text])
    assert one.text == model.correct("the cat sees teh sea.") + "  \n " + model.correct("a dog likes teh moon.")
    at = one.source
    for edit in reversed(one.edits):
        assert text[edit.begin : edit.end] == edit.before
        at = at[: edit.begin] + edit.after + at[edit.end :]
    assert at.split() == one.text.split()
    assert model.correct(["", " \n"]) == ["", " \n"]


def test_an_unsure_corrector_keeps_the_source(load: Callable[[str], Any]) -> None:
    model, text = load("correction"), "the cat sees teh sea."
    (changed,) = model.correct_full([text])
    if changed.text == text:
        pytest.fail("the toy model corrects nothing")
    before, after = model.log_probs([text, text], [text, changed.text])
    gain = after - before
    assert model.correct(text, margin=gain + 0.1) == text
    if gain > 0.1:
        assert model.correct(text, margin=gain - 0.1) == changed.text
    with pytest.raises(UserError, match="margin=-1: must be 0 or more"):
        model.correct(text, margin=-1)


def test_the_log_probabilities_are_those_of_the_search(load: Callable[[str], Any]) -> None:
    """Of a decoder too, which sees its prompt from both sides."""
    from allyouneed.infer.predictors.rewriting.corrector import Corrector

    for run in ("seq2seq", "seq2seq decoder"):
        model = load(run)
        (one,) = model.seq2seq_full(["the cat sees the sea"], length_penalty=0.0, beam=1)
        (found,) = Corrector(model.folder).log_probs([one.source], [one.text])
        assert one.candidates[0].finished and found == pytest.approx(one.score, abs=1e-3)


@given(st.text('aB. !?\n。”"\t…1', max_size=20))
def test_sentences_joined_are_the_text(text: str) -> None:
    assert "".join(sentences(text)) == text


def test_sentences_end_where_a_reader_ends_them() -> None:
    assert sentences("Mr. Smith left. No. 5 is 3.14 wide!  今天好。“明天？”\nEnd") == [
        "Mr. Smith left. ", "No. 5 is 3.14 wide!  ", "今天好。", "“明天？”\n", "End",
    ]  # fmt: skip
