"""Head of a conditional masked language model (Ghazvininejad et al. 2019, "Mask-Predict"): tokens, and the length of
the target."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from allyouneed.nn.common import Common
from allyouneed.nn.context import Memory
from allyouneed.nn.cost import Cost
from allyouneed.nn.heads.pooling import pool
from allyouneed.nn.heads.vocabulary import HeadModule, VocabularyHead, VocabularyHeadModule


class MaskPredictHead(VocabularyHead):
    """Predicts the masked tokens of a target that the decoder sees as a whole, and from the source how many tokens the
    target has (3.3: P(N | X)). The encoder state of the source's end mark serves as the paper's LENGTH token."""

    causal: ClassVar[bool] = False

    kind: Literal["mask-predict"] = "mask-predict"  # type: ignore[assignment]
    lengths: Annotated[int, Field(gt=0)] = 256
    """The longest target, in tokens."""

    def build(self, common: Common, vocab: int | None, tied: Tensor | None) -> HeadModule:
        assert vocab is not None
        return MaskPredictHeadModule(self, common, vocab, tied)

    def cost(self, common: Common, vocab: int | None, inner: int, tied: bool) -> Cost:
        """The length is predicted once per source: its FLOPs are not counted per token."""
        lengths = Cost(parameters=self.lengths * (common.width + 1))
        return super().cost(common, vocab, inner, tied) + lengths

    def problems(self, common: Common, vocab: int | None) -> list[tuple[str, str]]:
        copies = [("copy", "only for the vocabulary head")] if self.copy_ else []
        return super().problems(common, vocab) + copies


class MaskPredictHeadModule(VocabularyHeadModule):
    def __init__(self, config: MaskPredictHead, common: Common, vocab: int, tied: Tensor | None) -> None:
        super().__init__(config, common, vocab, tied)
        self.length = nn.Linear(common.width, config.lengths)

    def length_logits(self, memory: Memory) -> Tensor:
        """(sentences, lengths) from the encoder's output: column n stands for n + 1 tokens."""
        return self.length(pool(memory.hidden, memory.layout, "last"))
