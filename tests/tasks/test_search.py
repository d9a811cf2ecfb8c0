"""Texts are embedded once, and found by the vectors that were saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.data.retrieval.nearest import nearest
from allyouneed.errors import UserError
from allyouneed.infer.predictors.embedder import Embedder
from allyouneed.infer.retrieval import text_index
from served import served_client

Trained = Callable[[str], tuple[Path, str]]
TEXTS = ["the cat sees the sea", "a dog likes the moon", "她 hears some bread", "a child follows a bird"]


@pytest.fixture
def embedder(trained: Trained) -> Any:
    return ayn.load(trained("contrastive")[0] / "model")


def run(*words: Any) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in words])
    return int(stopped.value.code or 0)


def test_a_saved_index_finds_what_comparing_with_every_text_finds(embedder: Any, tmp_path: Path) -> None:
    embedder.index(TEXTS, tmp_path / "index")
    opened = ayn.load(tmp_path / "index")
    for query in ("the cat", "moon"):
        scores = np.array(embedder.similarity([(query, text) for text in TEXTS]))
        found = opened.search(query, top=3)
        assert [one.index for one in found] == np.argsort(-scores)[:3].tolist()
        assert [one.score for one in found] == pytest.approx(np.sort(scores)[::-1][:3].tolist(), abs=1e-5)
        assert [one.text for one in found] == [TEXTS[one.index] for one in found]
    assert opened.search(["moon"], top=1) == [opened.search("moon", top=1)]
    assert len(opened.search("moon", top=99)) == len(TEXTS)


def test_only_new_texts_are_embedded_when_texts_are_added(
    embedder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder.index(TEXTS[:2], tmp_path / "index")
    embedded = list[str]()
    plain = Embedder.embed

    def counted(self: Any, texts: Any, *rest: Any) -> Any:
        embedded.extend([texts] if isinstance(texts, str) else texts)
        return plain(self, texts, *rest)

    monkeypatch.setattr(Embedder, "embed", counted)
    added = ayn.load(tmp_path / "index").index([*TEXTS, TEXTS[3], " "])
    assert embedded == TEXTS[2:] and len(added.texts) == 4
    assert ayn.load(tmp_path / "index").search(TEXTS[3], top=1)[0].text == TEXTS[3]


def test_an_interrupted_index_keeps_what_it_had_finished(
    embedder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_index, "TOGETHER", 2)

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedder.index(TEXTS, tmp_path / "index", stop)
    for name in (text_index.ROWS, text_index.VECTORS):  # of a run that was killed while it wrote
        with (tmp_path / "index" / "index" / name).open("ab") as file:
            file.write(b"half a row")
    opened = ayn.load(tmp_path / "index")
    assert len(opened.texts) == 2 and opened.search(TEXTS[1], top=1)[0].index == 1
    again = opened.index(TEXTS)
    assert [row for row, _ in again.texts.rows(range(4))] == TEXTS
    assert again.search(TEXTS[3], top=1)[0].index == 3


def test_another_model_is_refused_and_says_why(embedder: Any, trained: Trained, tmp_path: Path) -> None:
    embedder.index(TEXTS, tmp_path / "index")
    other = ayn.load(trained("similarity")[0] / "model")
    with pytest.raises(UserError, match=r"is not the model that embedded the texts.*cannot be compared"):
        other.index(["more"], tmp_path / "index")
    other.save(tmp_path / "index")
    with pytest.raises(UserError, match="has no index"):  # saving a model replaces the folder
        ayn.load(tmp_path / "index").search("cat")
    with pytest.raises(UserError, match="has no index; make one with `allyouneed index"):
        embedder.search("cat")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not an index"):
        embedder.index(TEXTS, tmp_path / "full")


def test_damaged_files_are_named(embedder: Any, tmp_path: Path) -> None:
    embedder.index(TEXTS, tmp_path / "index")
    vectors = tmp_path / "index" / "index" / text_index.VECTORS
    vectors.write_bytes(vectors.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"vectors\.f32 incomplete; make the index again"):
        ayn.load(tmp_path / "index").search("cat")
    (tmp_path / "index" / "index" / text_index.META).write_text("[]")
    with pytest.raises(UserError, match="cannot be read"):
        ayn.load(tmp_path / "index").search("cat")


def test_commands_index_a_table_and_search_in_it(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, ranker = trained("contrastive")[0] / "model", trained("reranking")[0] / "model"
    table = tmp_path / "table.csv"
    table.write_text('id;body\n1;the cat sees the sea\n2;"a dog\nlikes; the moon"\n3;她\n', encoding="utf-8")
    made = ("index", table, "--column", "body", "--output", tmp_path / "index")
    assert run(*made, "--model", model) == 0 and run(*made) == 0
    assert "3 texts, 0 of them new" in capsys.readouterr().err
    assert run("search", "--model", tmp_path / "index", "--json", "--top", 2, "moon", "cat") == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["query"] == "moon" and len(second["found"]) == 2
    rows = {one["text"]: one["columns"] for one in first["found"] + second["found"]}
    assert rows.get("a dog\nlikes; the moon", {"id": "2"}) == {"id": "2"} and len(rows) >= 2
    assert run("search", "--model", tmp_path / "index", "--rerank", ranker, "moon") == 0
    scores = [float(line.split("\t")[0]) for line in capsys.readouterr().out.splitlines() if line]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    assert run("index", table, "--model", model, "--output", tmp_path / "other") == 2
    assert "no texts in 'text' (columns: id, body)" in capsys.readouterr().err
    assert run("index", table, "--output", tmp_path / "other") == 2
    assert "is no index yet; name the embedding model with --model" in capsys.readouterr().err


def test_the_server_searches_and_ranks_anew(embedder: Any, trained: Trained, tmp_path: Path) -> None:
    embedder.index([(text, {"number": n}) for n, text in enumerate(TEXTS)], tmp_path / "index")
    served = {"index": tmp_path / "index", "ranker": trained("reranking")[0] / "model"}
    with served_client(served) as (_, client):
        found = client.post("/v1/tasks/search", json={"model": "index", "inputs": ["moon"], "top": 2}).json()
        expected = ayn.load(tmp_path / "index").search("moon", top=2)
        assert [one["text"] for one in found["results"][0]] == [one.text for one in expected]
        assert found["results"][0][0]["columns"] == {"number": expected[0].index}
        body = {"model": "index", "inputs": ["moon"], "top": 4, "rerank": "ranker"}
        anew = client.post("/v1/tasks/search", json=body).json()["results"][0]
        ranked = ayn.load(served["ranker"]).rerank("moon", TEXTS)
        assert [one["index"] for one in anew] == [one.index for one in ranked]
        refused = client.post("/v1/tasks/search", json={"model": "ranker", "inputs": ["moon"]})
        assert refused.status_code == 400 and "cannot search texts" in refused.text


@pytest.mark.parametrize(("queries", "count", "top"), [(1, 5, 3), (3, 40, 7), (4, 3, 9)])
def test_blocks_give_what_all_scores_give(queries: int, count: int, top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from allyouneed.data.retrieval import nearest as module

    monkeypatch.setattr(module, "QUERIES", 2)
    monkeypatch.setattr(module, "SCORES", 16)
    dice = torch.Generator().manual_seed(0)
    asked, vectors = (torch.randint(-2, 3, (n, 4), generator=dice).float() for n in (queries, count))  # many are equal
    hidden = torch.rand(queries, count, generator=dice).numpy() < 0.2
    scores = (asked @ vectors.T).masked_fill(torch.from_numpy(hidden), -torch.inf).numpy()
    found, numbers = nearest(asked, vectors.numpy(), top, lambda row: hidden[row])
    assert found.tolist() == [sorted(row, reverse=True)[:top] for row in scores.tolist()]
    assert all(scores[n, at] == value for n in range(queries) for at, value in zip(numbers[n], found[n], strict=True))
