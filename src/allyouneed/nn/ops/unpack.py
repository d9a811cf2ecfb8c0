"""One sentence a row, from the left: how a recurrence sees a batch, whatever its rows look like.

Rows packed with several sentences, and rows padded on the left, are laid out anew and afterwards put back; a row that
already begins with its sentence stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from allyouneed.nn.context import Context, TokenLayout


@dataclass(frozen=True, eq=False)
class Sentences:
    """`real` (sentences, longest) bool: where there is a token, always from the left; None: everywhere.

    `tokens` and `places` say where each real token stands in the rows and in the sentences, both counted from the
    first row's first place on; None: rows are sentences.
    """

    real: Tensor | None
    tokens: Tensor | None = None
    places: Tensor | None = None

    @classmethod
    def of(cls, layout: TokenLayout) -> Sentences:
        """Asks the device how many sentences there are and how long, unless rows are sentences."""
        if layout.segments is None or (layout.start is not None and not layout.packed):
            return cls(layout.real)
        segments = layout.segments
        rows = torch.arange(len(segments), device=segments.device)[:, None]
        numbers = (rows * (segments.max() + 1) + segments).flatten()  # one for each sentence of the batch
        tokens = (segments > 0).flatten().nonzero().flatten()
        _, sentence, counts = numbers[tokens].unique(return_inverse=True, return_counts=True)
        order = sentence.argsort(stable=True)
        longest = int(counts.max()) if len(counts) else 0
        steps = torch.arange(len(tokens), device=tokens.device) - (counts.cumsum(0) - counts)[sentence[order]]
        real = torch.arange(longest, device=tokens.device) < counts[:, None]
        return cls(real, tokens[order], sentence[order] * longest + steps)

    def gather(self, x: Tensor) -> Tensor:
        """(batch, time, …) to (sentences, longest, …), with zeros behind each."""
        if self.tokens is None or self.places is None or self.real is None:
            return x
        lined = x.new_zeros(self.real.numel(), *x.shape[2:])
        return lined.index_copy(0, self.places, x.flatten(0, 1)[self.tokens]).unflatten(0, self.real.shape)

    def scatter(self, y: Tensor, like: Tensor) -> Tensor:
        """Back to the rows of `like` (batch, time, …), with zeros where there is padding."""
        if self.tokens is None or self.places is None:
            return y
        batch, time = like.shape[:2]
        rows = y.new_zeros(batch * time, *y.shape[2:])
        return rows.index_copy(0, self.tokens, y.flatten(0, 1)[self.places]).unflatten(0, (batch, time))


def sentences(context: Context) -> Sentences:
    """Of the tokens of this pass, found once for all layers. New tokens of a text being decoded come from the left."""
    layout = context.queries
    if context.slots is not None:
        return context.plan("sentences", lambda: Sentences(layout.real))
    return context.plan("sentences", lambda: Sentences.of(layout))
