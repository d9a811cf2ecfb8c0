"""Tasks, and for each the predictor class that serves it and the commands that call it.

The only such table: `allyouneed.load`, the command line and `evaluate` read it. Classes are imported when used.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from allyouneed.errors import UserError, near

if TYPE_CHECKING:  # the command line reads this table without importing torch
    from allyouneed.folder import Folder
    from allyouneed.infer.predictors.base import Predictor


@dataclass(frozen=True)
class TaskEntry:
    """`module` and `predictor`: where the class is, in this package. `commands`: those of `allyouneed`, the main one
    first. `pretrained`: the body also serves `similarity`, with a pooled head."""

    module: str
    predictor: str
    commands: tuple[str, ...]
    pretrained: bool = False

    @property
    def predictor_class(self) -> type[Predictor]:
        return cast("type[Predictor]", getattr(import_module(f"{__package__}.{self.module}"), self.predictor))


# in the order of `allyouneed --help`
TASKS = {
    "translation": TaskEntry("translator", "Translator", ("translate",)),
    "mask-predict": TaskEntry("whole_targets", "MaskPredictTranslator", ("translate",)),
    "ctc-translation": TaskEntry("whole_targets", "CtcTranslator", ("translate",)),
    "synchronous-translation": TaskEntry("whole_targets", "SynchronousTranslator", ("translate",)),
    "causal-lm": TaskEntry("generator", "Generator", ("generate", "chat"), pretrained=True),
    "prefix-lm": TaskEntry("generator", "Generator", ("generate",)),
    "interleaved": TaskEntry("interleaved", "InterleavedGenerator", ("generate",)),
    "chat": TaskEntry("generator", "Generator", ("chat", "generate")),
    "dpo": TaskEntry("generator", "Generator", ("chat", "generate")),
    "preference": TaskEntry("reward", "RewardModel", ("score",)),
    "seq2seq": TaskEntry("seq2seq", "Seq2Seq", ("seq2seq",)),
    "masked-lm": TaskEntry("fill_mask", "MaskFiller", ("fill-mask",), pretrained=True),
    "translation-lm": TaskEntry("fill_mask", "TranslationMaskFiller", ("fill-mask",), pretrained=True),
    "permutation-lm": TaskEntry("fill_mask", "PermutationMaskFiller", ("fill-mask",), pretrained=True),
    "span-corruption": TaskEntry("fill_spans", "SpanFiller", ("fill-mask",)),
    "classification": TaskEntry("classifier", "Classifier", ("classify",)),
    "tagging": TaskEntry("tagger", "Tagger", ("tag",)),
    "similarity": TaskEntry("embedder", "Embedder", ("embed", "similarity")),
    "contrastive": TaskEntry("embedder", "Embedder", ("embed", "similarity")),
    "transcription": TaskEntry("transcriber", "Transcriber", ("transcribe",)),
    "click": TaskEntry("click_predictor", "ClickPredictor", ("predict-click",)),
    "image-classification": TaskEntry("image_classifier", "ImageClassifier", ("classify-image",)),
    "image-text": TaskEntry("image_matcher", "ImageMatcher", ("match-image",)),
}


def commands() -> list[str]:
    """Every command that uses a model, once."""
    return list(dict.fromkeys(command for entry in TASKS.values() for command in entry.commands))


def translates(task: str) -> bool:
    """Whether models of this task are translators."""
    return task in TASKS and "translate" in TASKS[task].commands


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
    return TASKS[task].predictor_class(folder)
