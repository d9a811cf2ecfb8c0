"""Which use a model folder has: by the task it was trained for."""

from __future__ import annotations

from importlib import import_module

from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.predictors.base import Predictor

# where the class is, so that a folder's use is imported and no other
USES = {
    "translation": ("translator", "Translator"),
    "seq2seq": ("seq2seq", "Seq2Seq"),
    "causal-lm": ("generator", "Generator"),
    "prefix-lm": ("generator", "Generator"),
    "masked-lm": ("fill_mask", "MaskFiller"),
    "permutation-lm": ("fill_mask", "Asker"),
    "span-corruption": ("fill_spans", "SpanFiller"),
    "classification": ("classifier", "Classifier"),
    "tagging": ("tagger", "Tagger"),
    "similarity": ("embedder", "Embedder"),
    "contrastive": ("embedder", "Embedder"),
    "transcription": ("transcriber", "Transcriber"),
    "image-classification": ("image_classifier", "ImageClassifier"),
    "image-text": ("image_matcher", "ImageMatcher"),
}


def predictor(folder: Folder) -> Predictor:
    """The folder, ready to do what it was trained for."""
    task = folder.task.get("kind")
    if task not in USES:
        raise UserError(f"{folder.path}: trained for {task!r}, which has no use here; there are {', '.join(USES)}")
    module, name = USES[task]
    made: Predictor = getattr(import_module(f"allyouneed.infer.predictors.{module}"), name)(folder)
    return made
