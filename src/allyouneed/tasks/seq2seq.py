"""Write one text from another: any pairs, summaries, corrections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from allyouneed.data.batches.encoding import Encoding, TextEncoding
from allyouneed.data.batches.packing import Items
from allyouneed.data.batches.store import Store
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.language.prefix_lm import PromptItems
from allyouneed.tasks.task import Loss, token_loss
from allyouneed.tasks.translation.translation import PairItems, PairTask

ROUGE = {"rouge-l": True, "rouge-1": True, "rouge-2": True}
OTHERS = {"exact": True, "chrf": True, "bleu": True, "cer": False, "wer": False, "loss": False}


class SequenceToSequence(PairTask):
    """Each target token given the source and the target before it, in any language or notation, with label smoothing
    (the paper, 5.4). An encoder reads the source; in a decoder it is the prompt (Raffel et al. 2020, 3.2.1)."""

    kinds: ClassVar[tuple[str, ...]] = ("encoder-decoder", "decoder")
    metrics: ClassVar[dict[str, bool]] = {"exact": True} | ROUGE | OTHERS
    kind: Literal["seq2seq"] = "seq2seq"
    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Label smoothing (the paper, 5.4)."""
    prompts: bool = False
    """The source is the prompt of a decoder; the model determines it."""
    long: Literal["drop", "truncate"] = "drop"
    """Training sources longer than `data.max_tokens`: left out, or read up to there; both are reported."""

    @property
    def sides(self) -> int:  # type: ignore[override]
        return 1 if self.prompts else 2

    @property
    def two_vocabularies(self) -> bool:  # type: ignore[override]
        return not self.prompts

    def for_model(self, model: Mapping[str, Any]) -> Self:
        return self.model_copy(update={"prompts": model.get("kind") == "decoder"})

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        source, target = vocabularies.source, vocabularies.target
        cut = self.long == "truncate"
        if self.prompts:  # begin and end mark around the source, the end mark of the target
            both = {"source": target, "target": target}
            return TextEncoding(both, max_tokens, special_count=1, separators=1, truncate=cut)
        special_count = max(1, sum(map(len, source.source_affixes)))
        return TextEncoding({"source": source, "target": target}, max_tokens, special_count, truncate=cut)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return PromptItems(store, vocabularies.target) if self.prompts else PairItems(store, vocabularies)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        return token_loss(model.head, hidden, labels, self.smoothing)


class Summarisation(SequenceToSequence):
    """`seq2seq` of texts and their summaries, scored by ROUGE; long texts are truncated."""

    metrics: ClassVar[dict[str, bool]] = ROUGE | OTHERS
    kind: Literal["summarisation"] = "summarisation"  # type: ignore[assignment]
    long: Literal["drop", "truncate"] = "truncate"


class Correction(SequenceToSequence):
    """`seq2seq` of texts with errors and the same texts without, scored by the F0.5 of edits."""

    metrics: ClassVar[dict[str, bool]] = {"f0.5": True, "precision": True, "recall": True} | OTHERS | ROUGE
    kind: Literal["correction"] = "correction"  # type: ignore[assignment]
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Leave a text as it is unless its correction is exp(margin) times as probable."""
    free_keys: ClassVar[tuple[str, ...]] = ("margin",)
