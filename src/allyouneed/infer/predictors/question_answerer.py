"""Answers to questions, found in a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from allyouneed.data.batches.questions import LEAST, Windows, text_offset
from allyouneed.data.files.questions import AskedText
from allyouneed.errors import UserError, quote
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, Predictor, evenly_spaced, run_in_batches
from allyouneed.metrics.questions import question_figures
from allyouneed.nn.batch import Batch

Asked = tuple[str, str]  # a question and a text


@dataclass(frozen=True)
class TextAnswer:
    """Characters [begin, end) of the text. `score`: the sum of the scores of its ends, less that of no answer. An empty
    text: the model finds none."""

    text: str
    begin: int
    end: int
    score: float


@dataclass(frozen=True)
class Answered:
    """A question and its answers, best first; `nothing`: how much higher the scores of no answer are than the best."""

    question: str
    answers: list[TextAnswer]
    nothing: float
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.answers[0].text


class QuestionAnswerer(Predictor):
    """Finds answers in texts of any length: a long one is read in windows that overlap, and the best answer of all is
    given."""

    @overload
    def answer(self, questions: str, context: str, **options: Any) -> str: ...

    @overload
    def answer(self, questions: Sequence[Asked], **options: Any) -> list[str]: ...

    def answer(self, questions: str | Sequence[Asked], context: str | None = None, **options: Any) -> str | list[str]:
        """The answer to a question, found in `context`, or to each of a list of (question, text). Empty: there is none.
        `options`: see `answer_full`."""
        if isinstance(questions, str):
            if context is None:
                raise UserError("answer takes a question and a text, or a list of (question, text)")
            return self.answer_full([(questions, context)], **options)[0].text
        return [full.text for full in self.answer_full(questions, **options)]

    def answer_full(
        self, questions: Sequence[Asked], *, top: int = 1, threshold: float | None = None, longest: int | None = None
    ) -> list[Answered]:
        """The same with scores, places and the `top` best. `threshold`: how much the scores of no answer must exceed
        those of the best one to answer nothing; default: as trained. `longest`: the most tokens of an answer."""
        task = self.folder.task
        most = int(task.get("longest", 30)) if longest is None else longest
        if top < 1 or most < 1:
            raise UserError("top and longest must be 1 or more")
        level = float(task.get("threshold", 0.0)) if threshold is None else threshold
        may_refuse = bool(task.get("unanswerable")) or threshold is not None
        asked = [_check(one) for one in questions]
        tokens = [self.tokenizer.encode_batch(one) for one in asked]
        rooms = [self._room(one[0], question) for one, (question, _) in zip(asked, tokens, strict=True)]
        lengths = np.array([len(text) for _, text in tokens], np.int64)
        windows = Windows.split(lengths, np.array(rooms, np.int64), float(task.get("share", 0.5)))
        rows = [
            self.tokenizer.frame(tokens[text][0], tokens[text][1][begin : begin + length])
            for text, begin, length in zip(*(part.tolist() for part in windows), strict=True)
        ]
        offsets = [text_offset(self.tokenizer, len(question)) for question, _ in tokens]

        def best(batch: list[int]) -> list[tuple[float, list[tuple[float, int, int]]]]:
            scores = self.model.logits(Batch(self.to_rows([rows[n] for n in batch]))).float().cpu()
            found = []
            for row, number in enumerate(batch):
                text, begin, length = (int(part[number]) for part in windows)
                here = scores[row, offsets[text] : offsets[text] + length]
                spans = [(score, first + begin, last + begin) for score, first, last in best_spans(here, most, top)]
                found.append((float(scores[row, 0].sum()), spans))
            return found

        found = run_in_batches(self.model, [len(row) for row, _ in rows], best)
        made = []
        for number, (question, context) in enumerate(asked):
            mine = [found[n] for n in np.flatnonzero(windows.texts == number)]
            nothing = min(score for score, _ in mine)  # no window has an answer
            ranked = sorted({span for _, spans in mine for span in spans}, key=lambda span: (-span[0], span[1:]))
            answers = self._texts(context, ranked[:top], nothing)
            gap = -answers[0].score if answers else float("inf")
            refused = may_refuse and gap > level
            if refused or not answers:
                answers = [TextAnswer("", 0, 0, 0.0), *answers][:top]
            made.append(Answered(question, answers, gap))
        return made

    def _room(self, text: str, question: Sequence[int]) -> int:
        room = self.max_input - self.tokenizer.template.count(2) - len(question)
        if room < LEAST:
            raise UserError(
                f"{quote(text)}: the question has {len(question)} tokens, and question and text together at most "
                f"{self.max_input}; shorten it"
            )
        return room

    def _texts(self, context: str, spans: Sequence[tuple[float, int, int]], nothing: float) -> list[TextAnswer]:
        places, found = self.tokenizer.spans(context), []
        for score, first, last in spans:
            begin, end = places[first][0], places[last][1]
            text = context[begin:end]
            begin += len(text) - len(text.lstrip())
            found.append(TextAnswer(text.strip(), begin, begin + len(text.strip()), score - nothing))
        return found

    def judge(
        self, examples: Sequence[AskedText], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        found = self.answer([(example.question, example.context) for example in examples])
        figures, text = question_figures(found, [example.answers for example in examples])
        samples = [
            {"question": example.question, "expected": " | ".join(example.answers) or "-", "found": answer or "-"}
            for example, answer in evenly_spaced(list(zip(examples, found, strict=True)), show)
        ]
        return EvaluationResult(figures, text, samples)


def best_spans(scores: Tensor, longest: int, top: int) -> list[tuple[float, int, int]]:
    """scores (time, 2) of tokens to begin and to end an answer: the best `top` spans of up to `longest` tokens, each
    with the sum of its two scores."""
    time, width = len(scores), min(longest, len(scores))
    if not time:
        return []
    ends = torch.cat([scores[:, 1], scores.new_full((width - 1,), float("-inf"))]).unfold(0, width, 1)
    sums = scores[:, :1] + ends  # (time, width): answers from here, one token longer each
    values, places = sums.flatten().topk(min(top, time * width))
    pairs = zip(values.tolist(), places.tolist(), strict=True)
    return [(value, place // width, place // width + place % width) for value, place in pairs if value > float("-inf")]


def _check(asked: Any) -> list[str]:
    if isinstance(asked, str) or len(asked) != 2 or not all(isinstance(text, str) for text in asked):
        raise UserError("answer_full takes a list of (question, text)")
    question, context = asked
    if not question.strip() or not context.strip():
        raise UserError(f"{quote(question)}: the {'text' if question.strip() else 'question'} is empty")
    return [question, context]
