"""Translation language models read a sentence and its translation as one text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import allyouneed as ayn
from allyouneed.errors import UserError
from allyouneed.infer.predictors.fill_mask import TranslationMaskFiller
from allyouneed.nn.batch import IGNORE
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from toy_texts import ENCODER, Listener, recipe

Trained = Callable[[str], tuple[Path, str]]


def test_items_are_framed_sentences_with_restarting_positions_and_languages(texts: Path, tmp_path: Path) -> None:
    given = recipe(tmp_path, texts, "translation-lm", "task.alone=0.3")
    items = prepare(given, RunFolder(given.output), Reporter(Listener().console)).train.items
    marks, members = items.tokenizer.template.count(), np.arange(len(items))  # type: ignore[attr-defined]
    reads = items.reads(3)  # type: ignore[attr-defined]
    assert reads.any(1).all() and 0.6 < reads.all(1).mean() < 0.8
    batch = items.collate(3, members)
    tokens, features = batch.sides[0].tokens, batch.sides[0].features
    assert batch.labels is not None and len(tokens) == items.lengths(3)[0].sum() == len(batch.labels)
    at = 0
    for number in members.tolist():
        for language in np.flatnonzero(reads[number]).tolist():
            ids = items.store[("source", "target")[language]][number]  # type: ignore[attr-defined]
            span = slice(at, at + len(ids) + marks)
            assert (features["types"][span] == language).all()
            assert features["positions"][span].tolist() == list(range(len(ids) + marks))
            labels, inner = batch.labels[span][1:-1], tokens[span][1:-1]
            assert (labels != IGNORE).any()
            assert np.array_equal(np.where(labels == IGNORE, inner, labels), ids)
            at = span.stop


def test_the_translation_is_read(trained: Trained) -> None:
    model = ayn.load(trained("translation-lm")[0] / "model")
    assert isinstance(model, TranslationMaskFiller)
    (alone,), (both,) = (
        model.fill_mask("the cat <mask> the sea", 1),
        model.fill_mask("the cat <mask> the sea\t猫看见大海", 1),
    )
    assert alone[0].text.startswith("the cat") and "\t" not in alone[0].text
    assert both[0].text == f"the cat {both[0].token.strip()} the sea\t猫看见大海"
    (framed,) = [model._row("the cat <mask>\t猫看见")]
    rows = model.to_rows([framed])
    assert rows.types is not None and rows.positions is not None
    second = int((rows.types == 0).sum())
    assert rows.positions[0].tolist() == [*range(second), *range(rows.tokens.shape[1] - second)]
    first = model.logits(tokens=[framed[0]], types=[framed[1]])
    assert not torch.equal(first, model.logits(tokens=[framed[0]], types=[[0] * len(framed[1])]))
    with pytest.raises(UserError, match="contains no <mask>"):
        model.fill_mask("the cat\t猫")


def test_a_model_without_language_vectors_is_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.embed\.types: translation-lm adds a vector for each language"):
        recipe(tmp_path, texts, "translation-lm", model=ENCODER)
