"""A cross-encoder learns which texts answer a query, from random and from hard negatives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import allyouneed as ayn
from allyouneed.errors import UserError
from allyouneed.metrics.ranking import ranking_figures
from allyouneed.training import Recipe
from allyouneed.training.prepare import PreparedData, RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from toy_texts import Listener, recipe

Trained = Callable[[str], tuple[Path, str]]
Prepared = Callable[[str], tuple[Recipe, PreparedData]]


def test_every_query_is_read_with_its_own_text_and_with_others(prepared: Prepared) -> None:
    _, data = prepared("reranking")
    items: Any = data.train.items
    assert len(items) == 3 * data.examples and items.one_per_row is False
    for epoch in (0, 1):
        numbers = items.text_numbers(epoch)
        labels = items.collate(epoch, np.arange(len(items))).answers.reshape(-1, 3)
        assert (labels == np.array([1, 0, 0])).all()
        assert items.is_right(items.queries, numbers[:, 0]).all()
        assert not any(items.is_right(items.queries, column).any() for column in numbers[:, 1:].T)
    assert (items.text_numbers(0)[:, 1:] != items.text_numbers(1)[:, 1:]).any()
    assert (items.text_numbers(0) == prepared("reranking")[1].spare.items.text_numbers(0)).all()


def test_hard_negatives_are_the_most_similar_texts_that_are_not_right(
    prepared: Prepared, trained: Trained, texts: Path, tmp_path: Path
) -> None:
    embedder = trained("contrastive")[0] / "model"
    task = {"kind": "reranking", "negatives": 3, "hard": str(embedder)}
    listener = Listener()
    made = recipe(tmp_path, texts, "reranking", task=task)
    items: Any = prepare(made, RunFolder(tmp_path / "run"), Reporter(listener.console)).train.items
    assert "hard to tell apart" in listener.text
    model, decode = ayn.load(embedder), items.tokenizer.decode
    known = [decode(items.store["second"][int(n)].tolist()) for n in items.firsts]
    query = decode(items.store["text"][0].tolist())
    scores = np.array(model.similarity([(query, text) for text in known]))
    wrong = [n for n in np.argsort(-scores) if not items.is_right(items.queries[:1], np.array([n]))[0]]
    assert scores[items.hard[0][0]] == pytest.approx(scores[wrong[0]], abs=1e-5)
    assert not items.is_right(np.repeat(items.queries[:1], len(items.hard[0])), items.hard[0]).any()
    drawn = items.text_numbers(0)
    assert all(set(row[1:3].tolist()) <= set(hard.tolist()) for row, hard in zip(drawn, items.hard, strict=True))
    again: Any = prepare(made, RunFolder(tmp_path / "run"), Reporter(Listener().console)).train.items
    assert (again.hard == items.hard).all() and list(tmp_path.glob("run/**/hard-*.npy"))
    with pytest.raises(UserError, match=r"task\.hard: .* is not a model folder"):
        prepare(
            recipe(tmp_path, texts, "reranking", task=task | {"hard": str(texts)}),
            RunFolder(tmp_path / "no"),
            Reporter(Listener().console),
        )


def test_texts_are_ranked_by_their_probability(trained: Trained, texts: Path) -> None:
    model = ayn.load(trained("reranking")[0] / "model")
    assert type(model).__name__ == "Reranker"
    found = model.rerank("the cat sees the sea", ["猫看见大海", "狗喜欢月亮", "她听见面包"], top=2)
    assert (
        len(found) == 2
        and found[0].score >= found[1].score
        and found[0].text in ("猫看见大海", "狗喜欢月亮", "她听见面包")
    )
    scores = model.relevance([("the cat sees the sea", one.text) for one in found])
    assert scores == pytest.approx([one.score for one in found], abs=1e-6)
    result = ayn.evaluate(model, texts / "valid.pairs.tsv")
    assert set(result.figures) == {"mrr", "ndcg@10"} and "each with up to 20 texts" in result.text
    assert result.figures == ayn.evaluate(model, texts / "valid.pairs.tsv").figures


def test_mrr_and_ndcg_by_hand() -> None:
    scores = [np.array([0.1, 0.9, 0.5]), np.array([0.9, 0.1, 0.5])]
    relevant = [np.array([True, False, True]), np.array([True, False, False])]
    figures = ranking_figures(scores, relevant)
    second = (1 / np.log2(3) + 1 / np.log2(4)) / (1 + 1 / np.log2(3))
    assert figures == pytest.approx({"mrr": 100 * (1 / 2 + 1) / 2, "ndcg@10": 100 * (second + 1) / 2})
    assert ranking_figures([np.zeros(3)], [np.array([True, False, False])])["mrr"] == pytest.approx(100 / 3)  # ties
    assert ranking_figures([np.arange(20.0)], [np.arange(20) == 0]) == pytest.approx({"mrr": 5, "ndcg@10": 0})
    with pytest.raises(UserError, match="0 rankings"):
        ranking_figures([], [])
