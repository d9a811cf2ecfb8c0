"""Tasks, and for each the predictor class that serves it and the commands that call it; methods that apps provide.

The only such table: `allyouneed.load`, the command line and `evaluate` read it. Apps add theirs (`register`). Classes
and methods are imported when used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from allyouneed.errors import UserError, near

if TYPE_CHECKING:  # the command line reads this table without importing torch
    from allyouneed.folder import Folder
    from allyouneed.infer.predictors.base import Predictor


class TaskEntry(NamedTuple):
    """`module` and `predictor`: where the class is. `commands`: those of `allyouneed`, the main one
    first. `pretrained`: the body also serves `similarity`, with a pooled head."""

    module: str
    predictor: str
    commands: tuple[str, ...]
    pretrained: bool = False

    @property
    def predictor_class(self) -> type[Predictor]:
        return cast("type[Predictor]", getattr(import_module(self.module), self.predictor))


# in the order of `allyouneed --help`
TASKS = {
    "causal-lm": TaskEntry(f"{__package__}.generator", "Generator", ("generate", "chat"), pretrained=True),
    "prefix-lm": TaskEntry(f"{__package__}.generator", "Generator", ("generate",)),
    "interleaved": TaskEntry(f"{__package__}.interleaved", "InterleavedGenerator", ("generate",)),
    "chat": TaskEntry(f"{__package__}.generator", "Generator", ("chat", "generate")),
    "dpo": TaskEntry(f"{__package__}.generator", "Generator", ("chat", "generate")),
    "preference": TaskEntry(f"{__package__}.reward", "RewardModel", ("score",)),
    "seq2seq": TaskEntry(f"{__package__}.rewriting.seq2seq", "Seq2Seq", ("seq2seq",)),
    "summarisation": TaskEntry(f"{__package__}.rewriting.summariser", "Summariser", ("summarise",)),
    "correction": TaskEntry(f"{__package__}.rewriting.corrector", "Corrector", ("correct",)),
    "masked-lm": TaskEntry(f"{__package__}.fill_mask", "MaskFiller", ("fill-mask",), pretrained=True),
    "translation-lm": TaskEntry(f"{__package__}.fill_mask", "TranslationMaskFiller", ("fill-mask",), pretrained=True),
    "permutation-lm": TaskEntry(f"{__package__}.fill_mask", "PermutationMaskFiller", ("fill-mask",), pretrained=True),
    "span-corruption": TaskEntry(f"{__package__}.rewriting.fill_spans", "SpanFiller", ("fill-mask",)),
    "denoising": TaskEntry(f"{__package__}.rewriting.denoiser", "Denoiser", ("fill-mask",)),
    "classification": TaskEntry(f"{__package__}.classifier", "Classifier", ("classify",)),
    "question-answering": TaskEntry(f"{__package__}.question_answerer", "QuestionAnswerer", ("answer",)),
    "tagging": TaskEntry(f"{__package__}.tagger", "Tagger", ("tag",)),
    "replaced-token": TaskEntry(f"{__package__}.tagger", "Discriminator", ("tag",), pretrained=True),
    "similarity": TaskEntry(f"{__package__}.embedder", "Embedder", ("embed", "similarity", "search")),
    "contrastive": TaskEntry(f"{__package__}.embedder", "Embedder", ("embed", "similarity", "search")),
    "reranking": TaskEntry(f"{__package__}.reranker", "Reranker", ("rerank",)),
    "transcription": TaskEntry(f"{__package__}.transcriber", "Transcriber", ("transcribe",)),
    "audio-classification": TaskEntry(
        "allyouneed.infer.speech.audio_classifier", "AudioClassifier", ("classify-audio",)
    ),
    "click": TaskEntry(f"{__package__}.click_predictor", "ClickPredictor", ("predict-click",)),
    "image-classification": TaskEntry(f"{__package__}.image_classifier", "ImageClassifier", ("classify-image",)),
    "captioning": TaskEntry(f"{__package__}.captioner", "Captioner", ("caption",)),
    "image-text": TaskEntry(f"{__package__}.image_matcher", "ImageMatcher", ("match-image",)),
}
METHODS: dict[str, str] = {}  # of every predictor, by name: "module:function"


def register(tasks: Mapping[str, TaskEntry], methods: Mapping[str, str]) -> None:
    """Add the tasks and methods of apps. Their tasks come before those of the core."""
    own = dict(TASKS)
    TASKS.clear()
    TASKS.update({**tasks, **own})
    METHODS.update(methods)


def provided(method: str) -> Callable[..., Any]:
    """The function that an app provides as this method of every predictor."""
    module, _, name = METHODS[method].partition(":")
    return cast("Callable[..., Any]", getattr(import_module(module), name))


def commands() -> list[str]:
    """Every command that uses a model, once."""
    return list(dict.fromkeys(command for entry in TASKS.values() for command in entry.commands))


def translates(task: str) -> bool:
    """Whether models of this task are translators."""
    return task in TASKS and "translate" in TASKS[task].commands


def embeds(task: str) -> bool:
    """Whether models of this task were made to embed texts."""
    return task in TASKS and "embed" in TASKS[task].commands


def check_task(task: str) -> None:
    if task not in TASKS:
        raise UserError(f"unknown task {task!r}{near(task, TASKS)} (allowed: {', '.join(TASKS)})")


def predictor(folder: Folder) -> Predictor:
    """The predictor for the task that the folder was trained for."""
    from allyouneed.config import parse
    from allyouneed.infer.decoding.options import Decoding

    task = str(folder.task.get("kind"))
    try:
        check_task(task)
    except UserError as error:
        raise UserError(f"{folder.path}: {error}") from None
    parse(Decoding, folder.decoding, f"{folder.path}: decoding")
    return TASKS[task].predictor_class.of(folder)
