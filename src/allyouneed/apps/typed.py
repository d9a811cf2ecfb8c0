"""What `allyouneed.load` returns, for type checkers and completion. Nothing of it exists at run time."""

from __future__ import annotations

from allyouneed.apps.translate.translator import Translator
from allyouneed.infer.predictors.captioner import Captioner
from allyouneed.infer.predictors.click_predictor import ClickPredictor
from allyouneed.infer.predictors.embedder import Embedder
from allyouneed.infer.predictors.fill_mask import MaskFiller
from allyouneed.infer.predictors.image_classifier import ImageClassifier
from allyouneed.infer.predictors.image_matcher import ImageMatcher
from allyouneed.infer.predictors.interleaved import InterleavedGenerator
from allyouneed.infer.predictors.question_answerer import QuestionAnswerer
from allyouneed.infer.predictors.reranker import Reranker
from allyouneed.infer.predictors.reward import RewardModel
from allyouneed.infer.predictors.rewriting.corrector import Corrector
from allyouneed.infer.predictors.rewriting.fill_spans import SpanFiller
from allyouneed.infer.predictors.rewriting.summariser import Summariser
from allyouneed.infer.predictors.tagger import Tagger
from allyouneed.infer.predictors.transcriber import Transcriber
from allyouneed.infer.speech.audio_classifier import AudioClassifier


class AnyPredictor(  # type: ignore[misc]  # its bases disagree on some methods; the first one is shown
    Translator,
    InterleavedGenerator,  # a Generator
    Summariser,  # a Seq2Seq
    Corrector,
    MaskFiller,
    SpanFiller,
    Reranker,  # a Classifier
    QuestionAnswerer,
    Tagger,
    Embedder,
    Transcriber,
    AudioClassifier,
    ImageClassifier,
    ImageMatcher,
    Captioner,
    RewardModel,
    ClickPredictor,
):
    """The predictor of a folder whose task is known only at run time: the methods of all tasks are offered. Name the
    task (`load(folder, task="classification")`) to get the type of its predictor alone."""
