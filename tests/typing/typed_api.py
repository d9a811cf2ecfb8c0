"""Checked by mypy (`make check`), never run: the types that completion and type checkers see."""

from pathlib import Path
from typing import assert_type

from torch import Tensor

import allyouneed as ayn
from allyouneed.apps.typed import AnyPredictor
from allyouneed.infer.predictors.base import EvaluationResult
from allyouneed.nn.models.base import ModelModule
from allyouneed.training import Recipe, Result


def predictors(folder: Path) -> None:
    assert_type(ayn.load(), ayn.Translator)
    assert_type(ayn.load("translator", "cuda"), ayn.Translator)
    assert_type(ayn.load(folder, task="translation"), ayn.Translator)
    assert_type(ayn.load(folder, task="causal-lm"), ayn.Generator)
    assert_type(ayn.load(folder, task="seq2seq"), ayn.Seq2Seq)
    assert_type(ayn.load(folder, task="masked-lm"), ayn.MaskFiller)
    assert_type(ayn.load(folder, task="span-corruption"), ayn.SpanFiller)
    assert_type(ayn.load(folder, task="classification"), ayn.Classifier)
    assert_type(ayn.load(folder, "cuda", task="tagging"), ayn.Tagger)
    assert_type(ayn.load(folder, task="similarity", dtype="bfloat16"), ayn.Embedder)
    assert_type(ayn.load(folder, task="transcription"), ayn.Transcriber)
    assert_type(ayn.load(folder, task="image-classification"), ayn.ImageClassifier)
    assert_type(ayn.load(folder, task="image-text"), ayn.ImageMatcher)


def methods(folder: Path) -> None:
    model = ayn.load(folder)
    assert_type(model, AnyPredictor)
    assert_type(model.translate("a"), str)
    assert_type(model.translate(["a"], "de"), list[str])
    assert_type(model.generate(["a"]), list[str])
    assert_type(model.embed(["a"]), Tensor)
    assert_type(model.to("cuda", "bfloat16"), AnyPredictor)
    assert_type(ayn.load().to("cpu").save(folder), Path)
    ayn.load(folder, task="classification").translate("a")  # type: ignore[attr-defined]


def training(folder: Path) -> None:
    assert_type(ayn.load_recipe(folder), Recipe)
    assert_type(ayn.train(folder), Result)
    assert_type(ayn.evaluate(ayn.load(), folder), EvaluationResult)
    module = ayn.build("gpt2")
    assert_type(module, ModelModule)
    assert_type(module.config.width, int)
    assert_type(ayn.save(module, ayn.train_tokenizer(["a"]), folder), Path)
