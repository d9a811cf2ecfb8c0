"""Translators whose models do not write a target token after token."""

from __future__ import annotations

from allyouneed.apps.translate.translator import Translator
from allyouneed.folder import Folder
from allyouneed.infer.engine import Engine
from allyouneed.infer.frames import Frame, sequence_engine
from allyouneed.infer.whole_targets.ctc import CtcEngine
from allyouneed.infer.whole_targets.mask_predict import MaskPredictEngine
from allyouneed.infer.whole_targets.synchronous import SynchronousEngine


class WholeTargetTranslator(Translator):
    writes_whole_targets = True

    def direct_frame(self, text: str, to: str | None = None, from_: str | None = None) -> Frame | None:
        """None: a server's scheduler, which decodes by token, is not used for any text."""
        return None


class MaskPredictTranslator(WholeTargetTranslator):
    """Mask-predict (Ghazvininejad et al. 2019): `iterations` rounds, `beam` lengths."""

    def build_engine(self) -> Engine:
        engine = sequence_engine(self.model, self.folder.tokenizers, self._limit, MaskPredictEngine)
        engine.mask = self.target.mask
        return engine


class CtcTranslator(WholeTargetTranslator):
    """One pass (Libovický and Helcl 2018; Saharia et al. 2020)."""

    def __init__(self, folder: Folder, max_tokens: int | None = None, together: int | None = None) -> None:
        super().__init__(folder, max_tokens, together)
        self.upsample = int(folder.task["upsample"])
        if self._limit is not None:  # positions are those of the copies
            self.max_tokens = min(self.max_tokens, max(1, self._limit // self.upsample))
            self.together = min(self.together, self.max_tokens)

    def build_engine(self) -> Engine:
        engine = sequence_engine(self.model, self.folder.tokenizers, self._limit, CtcEngine)
        engine.upsample = self.upsample
        return engine


class SynchronousTranslator(WholeTargetTranslator):
    """Both directions at once (Zhou et al. 2019), half of the `beam` each."""

    def build_engine(self) -> Engine:
        return sequence_engine(self.model, self.folder.tokenizers, self._limit, SynchronousEngine)
