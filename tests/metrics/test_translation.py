"""Translations are scored as by sacrebleu, so that everyone can compare."""

from __future__ import annotations

import pytest
import sacrebleu

from allyouneed.errors import UserError
from allyouneed.metrics.translation import evaluate, tokenize_for

HYPOTHESES = ["the cat sat on the mat", "how are you today my friend", "completely wrong words here", ""]
REFERENCES = ["the cat sat on a mat", "how are you today my friend", "nothing matches at all", "not empty"]

LONG = ["the cat sat on a mat", "how are you today my friend", "nothing in here matches at all", "this is not empty"]


def test_scores_equal_sacrebleus() -> None:
    scores = evaluate(HYPOTHESES, REFERENCES, resamples=0)
    assert scores.bleu == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores.chrf == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert (scores.exact, scores.sentences, scores.bleu_interval) == (0.25, 4, None)
    assert "tok:13a" in scores.bleu_signature and "version:" in scores.chrf_signature


def test_chinese_is_counted_by_character() -> None:
    hypotheses, references = ["我爱你，北京天安门。"], ["我爱他，北京天安门。"]
    assert evaluate(hypotheses, references, "zh-Hans", resamples=0).bleu > 50
    assert evaluate(hypotheses, references, "en", resamples=0).bleu < 10
    assert [tokenize_for(tag) for tag in ("zh", "zh_TW", "ja", "de", None)] == ["zh", "zh", "char", "13a", "13a"]
    assert "tok:none" in evaluate(hypotheses, references, "zh", tokenize="none", resamples=0).bleu_signature


def test_case_counts_by_default() -> None:
    shouted = [text.upper() for text in REFERENCES]
    assert evaluate(shouted, REFERENCES, resamples=0).bleu < 1
    assert evaluate(shouted, REFERENCES, lowercase=True, resamples=0).bleu == pytest.approx(100)


def test_the_interval_holds_the_score_and_is_the_same_each_time() -> None:
    scores = evaluate(HYPOTHESES * 20, REFERENCES * 20)
    assert scores == evaluate(HYPOTHESES * 20, REFERENCES * 20)
    assert scores.bleu_interval is not None and scores.chrf_interval is not None
    assert scores.bleu_interval.low < scores.bleu < scores.bleu_interval.high
    assert scores.chrf_interval.low < scores.chrf < scores.chrf_interval.high
    assert "bs:1000" in scores.bleu_signature


def test_short_lines_have_an_interval() -> None:
    """Some resamples of two short lines score 0, others do not."""
    scores = evaluate(["yes", "no"], ["yes", "ja"])
    assert scores.chrf_interval is not None
    assert 0 <= scores.chrf_interval.low < scores.chrf < scores.chrf_interval.high


def test_scores_are_printed_readably() -> None:
    lines = evaluate(LONG, LONG).text().splitlines()
    assert lines[0].startswith("BLEU  100.0  [100.0, 100.0]  nrefs:1|")
    assert lines[1].startswith("chrF  100.0  [100.0, 100.0]  nrefs:1|")
    assert lines[2] == "exact 100.0 %  of 4 sentences"


def test_mistakes_are_explained() -> None:
    with pytest.raises(UserError, match="4 translations but 3 references"):
        evaluate(HYPOTHESES, REFERENCES[:3])
    with pytest.raises(UserError, match="nothing to evaluate"):
        evaluate([], [])
    with pytest.raises(UserError, match="every reference is empty"):
        evaluate(["a"], [" "])
    with pytest.raises(UserError, match=r"unknown tokenize='moses' .allowed: 13a"):
        evaluate(["a"], ["a"], tokenize="moses")
    with pytest.raises(UserError, match="lists of texts"):
        evaluate("a", ["a"])
