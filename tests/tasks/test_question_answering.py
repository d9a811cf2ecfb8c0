"""Answers are found in texts of any length, and none where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import allyouneed as ayn
from allyouneed.data.batches.questions import Windows
from allyouneed.errors import UserError
from allyouneed.infer.predictors.question_answerer import best_spans
from allyouneed.training import Recipe
from allyouneed.training.prepare import PreparedData, RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from toy_texts import Listener, recipe

Trained = Callable[[str], tuple[Path, str]]
QUESTION = "where does Anna live?"
FACT = "Anna lives in Ulm. Li Na lives in Paris."


@pytest.fixture(scope="module")
def model(trained: Trained) -> Any:
    return ayn.load(trained("question-answering")[0] / "model")


@given(st.integers(1, 40), st.integers(8, 20), st.sampled_from([0.1, 0.5, 1.0]))
def test_windows_cover_the_text_and_end_with_it(length: int, room: int, share: float) -> None:
    found = Windows.split(np.array([length, length]), np.array([room, room]), share)
    mine = found.texts == 1
    begins, ends = found.begins[mine], found.begins[mine] + found.lengths[mine]
    assert begins[0] == 0 and ends[-1] == length and (found.lengths <= room).all()
    assert (begins[1:] <= ends[:-1]).all() and (np.diff(begins) > 0).all()


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 5))
def test_the_best_spans_are_those_of_all(time: int, longest: int, top: int) -> None:
    scores = torch.randn(time, 2, generator=torch.Generator().manual_seed(time))
    pairs = [(a, b) for a in range(time) for b in range(a, min(time, a + longest))]
    expected = sorted(((float(scores[a, 0] + scores[b, 1]), a, b) for a, b in pairs), reverse=True)[:top]
    found = best_spans(scores, longest, top)
    assert [place for _, *place in found] == [place for _, *place in expected]
    assert [score for score, *_ in found] == pytest.approx([score for score, *_ in expected])


def test_labels_are_the_tokens_of_the_answer(
    prepared: Callable[[str], tuple[Recipe, PreparedData]], texts: Path
) -> None:
    _, data = prepared("question-answering")
    rows = [line.split("\t") for line in (texts / "train.asked.tsv").read_text(encoding="utf-8").splitlines()]
    seen = [0, 0]
    tokenizer, batches = data.vocabularies.target, list(data.train.batches(0))
    labelled = [
        (row, label) for b in batches for row, label in zip(b.rows.tokens.tolist(), b.labels.tolist(), strict=True)
    ]
    for tokens, (first, last) in labelled:
        seen[first > 0] += 1
        if first:
            said = tokenizer.decode([n for n in tokens if n not in tokenizer.specials])
            answer = tokenizer.decode(tokens[first : last + 1]).strip()
            assert any(answer == row[2] and row[0] in said for row in rows), (said, answer)
    assert min(seen) > 0


def test_a_window_without_the_whole_answer_has_none(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text(f"{QUESTION}\t{'A bird. ' * 40}{FACT}\tUlm\n", encoding="utf-8")
    made = recipe(
        tmp_path, texts, "question-answering", data={"train": {"path": str(tmp_path / "x.tsv")}, "max_tokens": 48}
    )
    data = prepare(made, RunFolder(tmp_path / "run"), Reporter(Listener().console))
    batches = list(data.train.batches(0))
    found = torch.cat([batch.labels for batch in batches])
    assert len(found) == len(data.train.items) > 3
    assert 1 <= int((found[:, 0] > 0).sum()) < len(found) and ((found[:, 0] > 0) == (found[:, 1] > 0)).all()


def test_unanswerable_questions_are_left_out_unless_they_are_to_be_learned(texts: Path, tmp_path: Path) -> None:
    listener = Listener()
    made = recipe(tmp_path, texts, "question-answering", task="question-answering")
    prepare(made, RunFolder(tmp_path / "run"), Reporter(listener.console))
    assert "set task.unanswerable: true" in listener.text and "no answer:" in listener.text


def test_an_answer_is_a_part_of_the_text_however_long(model: Any) -> None:
    text = f"{'The sea is wide. ' * 30}{FACT}{' A bird sings.' * 30}"
    (found,) = model.answer_full([(QUESTION, text)], top=3, threshold=1e9)
    assert len(found.answers) == 3
    for one in found.answers:
        assert text[one.begin : one.end] == one.text != ""
    scores = [one.score for one in found.answers]
    assert scores == sorted(scores, reverse=True) and found.nothing == pytest.approx(-scores[0])
    assert model.answer(QUESTION, text, threshold=1e9) == found.text
    assert model.answer(QUESTION, text, threshold=-1e9) == ""
    assert model.answer([(QUESTION, text), (QUESTION, FACT)], threshold=1e9)[0] == found.text


def test_the_answer_does_not_depend_on_the_other_questions(model: Any) -> None:
    asked = [(QUESTION, FACT), ("where does Li Na live?", f"{'It is so. ' * 50}{FACT}")]
    together = model.answer_full(asked, threshold=1e9)
    for one, alone in zip(together, [model.answer_full([pair], threshold=1e9)[0] for pair in asked], strict=True):
        assert one.text == alone.text and one.nothing == pytest.approx(alone.nothing, abs=1e-4)


def test_invalid_questions_are_refused(model: Any) -> None:
    for call, said in (
        (lambda: model.answer(QUESTION), "takes a question and a text"),
        (lambda: model.answer_full([QUESTION]), "a list of"),
        (lambda: model.answer(QUESTION, " "), "the text is empty"),
        (lambda: model.answer("why " * 80, FACT), "shorten it"),
        (lambda: model.answer(QUESTION, FACT, top=0), "1 or more"),
    ):
        with pytest.raises(UserError, match=said):
            call()


def test_evaluate_scores_questions_with_and_without_answers(trained: Trained, texts: Path) -> None:
    result = ayn.evaluate(trained("question-answering")[0] / "model", texts / "valid.asked.tsv")
    assert set(result.figures) == {"f1", "exact"} and "with an answer: F1" in result.text
