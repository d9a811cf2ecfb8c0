"""One Transformer whose every part is exchangeable, from raw data to a served model.

    import allyouneed as ayn

    model = ayn.load("runs/my-model/model")          # a predictor for the task the model was trained for
    model.translate(["机器学习很有趣"])                 # raw text in, raw text out; or .generate, .classify, .tag, …

    module = ayn.build("transformer-base", vocab=37000)   # a torch module with fresh weights
    module(source, target)                                # logits, for a training loop of your own
    ayn.save(module, tokenizer, "my-model")               # a folder that ayn.load reads

    ayn.train("recipe.yaml")                              # or let a recipe train it
    ayn.evaluate("runs/my-model/model", "test.tsv")

Imports are lazy: importing this package is quick and has no side effects.
"""
# a task that is named in `load` gives another type than an unknown one:
# mypy: disable-error-code="overload-overlap"

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from allyouneed import apps as apps  # registers what they add to the core
from allyouneed.errors import UserError as UserError

if TYPE_CHECKING:
    from torch import nn

    from allyouneed.apps.browse.browser import Browser as Browser
    from allyouneed.apps.translate.translator import Translator as Translator
    from allyouneed.apps.typed import AnyPredictor
    from allyouneed.data.tokenizers.base import Tokenizer
    from allyouneed.infer.predictors.base import EvaluationResult, Predictor
    from allyouneed.infer.predictors.captioner import Captioner as Captioner
    from allyouneed.infer.predictors.classifier import Classifier as Classifier
    from allyouneed.infer.predictors.click_predictor import ClickPredictor as ClickPredictor
    from allyouneed.infer.predictors.embedder import Embedder as Embedder
    from allyouneed.infer.predictors.fill_mask import MaskFiller as MaskFiller
    from allyouneed.infer.predictors.generator import Generator as Generator
    from allyouneed.infer.predictors.image_classifier import ImageClassifier as ImageClassifier
    from allyouneed.infer.predictors.image_matcher import ImageMatcher as ImageMatcher
    from allyouneed.infer.predictors.interleaved import InterleavedGenerator as InterleavedGenerator
    from allyouneed.infer.predictors.question_answerer import QuestionAnswerer as QuestionAnswerer
    from allyouneed.infer.predictors.reranker import Reranker as Reranker
    from allyouneed.infer.predictors.reward import RewardModel as RewardModel
    from allyouneed.infer.predictors.rewriting.corrector import Corrector as Corrector
    from allyouneed.infer.predictors.rewriting.denoiser import Denoiser as Denoiser
    from allyouneed.infer.predictors.rewriting.fill_spans import SpanFiller as SpanFiller
    from allyouneed.infer.predictors.rewriting.seq2seq import Seq2Seq as Seq2Seq
    from allyouneed.infer.predictors.rewriting.summariser import Summariser as Summariser
    from allyouneed.infer.predictors.tagger import Tagger as Tagger
    from allyouneed.infer.predictors.transcriber import Transcriber as Transcriber
    from allyouneed.infer.speech.audio_classifier import AudioClassifier as AudioClassifier
    from allyouneed.interop.save import TokenizerLike
    from allyouneed.nn.models.base import Model, ModelModule
    from allyouneed.training import Recipe, Result

__version__ = "0.1.0"
__all__ = [
    "UserError",
    "__version__",
    "build",
    "evaluate",
    "load",
    "load_recipe",
    "model_config",
    "plugin",
    "save",
    "train",
    "train_tokenizer",
]
Folderlike = str | Path


@overload
def load(
    folder: None = None, device: str = "cpu", task: Literal["translation"] | None = None, dtype: str | None = None
) -> Translator: ...
@overload
def load(
    folder: Literal["translator"], device: str = "cpu", task: None = None, dtype: str | None = None
) -> Translator: ...
@overload
def load(
    folder: Folderlike,
    device: str = "cpu",
    *,
    task: Literal["translation", "mask-predict", "ctc-translation", "synchronous-translation"],
    dtype: str | None = None,
) -> Translator: ...
@overload
def load(
    folder: Folderlike,
    device: str = "cpu",
    *,
    task: Literal["causal-lm", "prefix-lm", "chat", "dpo"],
    dtype: str | None = None,
) -> Generator: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["interleaved"], dtype: str | None = None
) -> InterleavedGenerator: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["preference"], dtype: str | None = None
) -> RewardModel: ...
@overload
def load(folder: Folderlike, device: str = "cpu", *, task: Literal["seq2seq"], dtype: str | None = None) -> Seq2Seq: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["summarisation"], dtype: str | None = None
) -> Summariser: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["correction"], dtype: str | None = None
) -> Corrector: ...
@overload
def load(
    folder: Folderlike,
    device: str = "cpu",
    *,
    task: Literal["masked-lm", "translation-lm", "permutation-lm"],
    dtype: str | None = None,
) -> MaskFiller: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["span-corruption"], dtype: str | None = None
) -> SpanFiller: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["denoising"], dtype: str | None = None
) -> Denoiser: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["classification"], dtype: str | None = None
) -> Classifier: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["question-answering"], dtype: str | None = None
) -> QuestionAnswerer: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["tagging", "replaced-token"], dtype: str | None = None
) -> Tagger: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["similarity", "contrastive"], dtype: str | None = None
) -> Embedder: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["reranking"], dtype: str | None = None
) -> Reranker: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["click"], dtype: str | None = None
) -> ClickPredictor: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["transcription"], dtype: str | None = None
) -> Transcriber: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["image-classification"], dtype: str | None = None
) -> ImageClassifier: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["audio-classification"], dtype: str | None = None
) -> AudioClassifier: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["image-text"], dtype: str | None = None
) -> ImageMatcher: ...
@overload
def load(
    folder: Folderlike, device: str = "cpu", *, task: Literal["captioning"], dtype: str | None = None
) -> Captioner: ...
@overload
def load(
    folder: Folderlike | None = None, device: str = "cpu", task: str | None = None, dtype: str | None = None
) -> AnyPredictor: ...
def load(
    folder: Folderlike | None = None, device: str = "cpu", task: str | None = None, dtype: str | None = None
) -> Predictor:
    """Load a model folder, ours or Hugging Face's, as the predictor of its task: a `Translator`, a `Generator`, …
    (docs/tasks.md). Without a folder, or with "translator": the bundled translator.

    `device`: "cpu", "cuda", or "auto" (a GPU if there is one). `task`: its own task, or another that its weights allow
    (`similarity`: text embeddings); named here, type checkers know the predictor. `dtype`: the precision of the weights
    (`float32`, `bfloat16`, `float16`); default: as stored."""
    from allyouneed.infer.predictors.registry import predictor
    from allyouneed.interop.load import load as load_folder
    from allyouneed.interop.load import resolve_device
    from allyouneed.models import TRANSLATOR

    path = folder or TRANSLATOR
    return predictor(load_folder(path, resolve_device(device, path), dtype, task))


def model_config(model: str | Path | dict[str, Any], changes: list[str] | None = None, **values: Any) -> Model:
    """The config of a preset, a YAML file, a model folder or a tree. `changes` are dotted:
    `encoder[0].mixer.heads=4`."""
    from allyouneed.config import override, parse, preset_tree
    from allyouneed.nn.models.base import Model

    if isinstance(model, Path) or (isinstance(model, str) and Path(model).is_dir()):
        from allyouneed.interop.load import about

        tree = about(model)["model"]
    else:
        tree = preset_tree(model) if isinstance(model, str) else model
    where = "" if isinstance(model, dict) else str(model)
    return parse(Model, override(tree, changes or []) | values, where)  # type: ignore[type-abstract]


def build(model: str | Path | dict[str, Any], changes: list[str] | None = None, **values: Any) -> ModelModule:
    """A freshly initialized module: `ayn.build("transformer-base", vocab=37000)`. Called with tensors it gives logits:
    `module(source, target)` for an encoder-decoder, `module(tokens)` for other models (docs/calling.md)."""
    import torch

    from allyouneed.nn.models.sight import blind_pool
    from allyouneed.runtime.memory import check_weights

    config = model_config(model, changes, **values)
    if (reason := blind_pool(config)) is not None:
        raise UserError(f"model.{reason}")
    check_weights(config.cost(1).parameters, torch.get_default_device())
    return cast("ModelModule", config.build())


def save(
    module: nn.Module,
    tokenizer: TokenizerLike,
    folder: str | Path,
    *,
    task: str | None = None,
    labels: Sequence[str] = (),
    max_tokens: int | None = None,
    card: str = "",
) -> Path:
    """Write a model folder that `load` and every command read, from a module of `build` and a loop of your own.

    `tokenizer`: of `train_tokenizer` or of a predictor; two for source and target; a model folder's; None for a model
    without text. `task`: what it was trained for; default: the usual task of such a model. `labels`: the names of its
    classes or tags. `max_tokens`: the longest text to read at once. `card`: the text of README.md. An earlier model
    folder at this path is replaced."""
    from allyouneed.infer.predictors.registry import check_task
    from allyouneed.interop.save import build_folder, save_folder

    made = build_folder(module, tokenizer, task, labels, max_tokens, card)
    check_task(made.task["kind"])
    return save_folder(made, folder)


def train_tokenizer(texts: Iterable[str], vocab: int = 8000, **options: Any) -> Tokenizer:
    """Learn a subword tokenizer from texts. `options`: the keys of `tokenizer:` in a recipe (`kind`, …)."""
    from allyouneed.config import parse
    from allyouneed.data.tokenizers.base import TokenizerConfig
    from allyouneed.data.tokenizers.base import train as learn

    return learn(parse(TokenizerConfig, {"vocab": vocab} | options, "tokenizer"), texts)


def load_recipe(path: str | Path, changes: Iterable[str] = (), plugins: Iterable[str] = ()) -> Recipe:
    """Read a recipe (docs/training.md). `changes`: as `--set`, e.g. `["steps=100", "model.width=64"]`."""
    from allyouneed.training import load_recipe as read

    return read(path, changes, plugins)


def train(recipe: str | Path | Recipe | Mapping[str, Any], changes: Iterable[str] = (), **options: Any) -> Result:
    """Train by a recipe: a YAML file, its keys, or what `load_recipe` gives. The result names the folder of the model
    (`.model`) and its `.scores`.

    An unfinished run of the same recipe is resumed, a finished one is left alone; `fresh=True` starts over."""
    from allyouneed.config import override, parse
    from allyouneed.training import Recipe
    from allyouneed.training import train as run

    if isinstance(recipe, str | Path):
        recipe = load_recipe(recipe, changes)
    elif isinstance(recipe, Mapping):
        recipe = parse(Recipe, override(dict(recipe), changes), "recipe")
    return run(recipe, **options)


def evaluate(
    model: str | Path | Predictor,
    path: str | Path,
    to: str | None = None,
    from_: str | None = None,
    device: str = "cpu",
) -> EvaluationResult:
    """Score a model on a file of examples with the metrics of its task: `.figures` by name, and `.text`.

    The file is read like the training data. `to`, `from_`: the languages of its pairs, for multilingual models."""
    from allyouneed.infer.evaluate import evaluate as score

    predictor = load(model, device) if isinstance(model, str | Path) else model
    result, report = score(predictor, path, to, from_)
    if report.dropped:
        result.notes.append(report.text())
    return result


def plugin(source: str | Path) -> ModuleType:
    """Import parts of your own from a .py file or a module, so that configs and model folders can use them; the
    imported module."""
    from allyouneed.plugins import load as load_plugin

    return load_plugin(source)


def __getattr__(name: str) -> Any:
    """`ayn.Browser`, and the predictor classes, for annotations and isinstance: `ayn.Translator`, …"""
    from allyouneed.infer.predictors.registry import TASKS

    if name == "Browser":
        from allyouneed.apps.browse.browser import Browser

        return Browser
    for entry in TASKS.values():
        if entry.predictor == name:
            return entry.predictor_class
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
