"""Sources of any length for any encoder-decoder, without training: Unlimiformer (Bertsch et al. 2023, 2.1-2.3).

The source is encoded in overlapping chunks, whose middles are kept; the decoder attends to the nearest of all hidden
states (nn/mixers/attention/long_memory.py). The model itself is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allyouneed.data.retrieval.corpus import import_faiss
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Unlimited
from allyouneed.nn.batch import Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.mixers.attention.attention import CrossAttention
from allyouneed.nn.mixers.attention.long_memory import LongMemory
from allyouneed.nn.models.encoder_decoder import EncoderDecoderModel
from allyouneed.nn.patterns.core import Full
from allyouneed.nn.states.base import States

BUDGET = 8192  # tokens encoded at once
CLUSTERED = 1 << 14  # tokens; in longer sources faiss searches some clusters only
PROBED = 32  # of those


class UnlimitedModel(nn.Module):
    """What decoding needs of a model (`DecodableModel`): a source may have any length."""

    unlimited = True

    def __init__(self, model: Any, options: Unlimited, trained: int) -> None:
        """`trained`: the most tokens of a source in training."""
        super().__init__()
        check_model(model)
        self.model, self.config, self.head, self.options = model, model.config, model.head, options
        limit = model.config.source_limit
        self.chunk = options.chunk or (trained if limit is None else min(trained, limit))
        if limit is not None and self.chunk > limit:
            raise UserError(f"unlimited.chunk: {self.chunk} tokens, more than the {limit} positions of the model")

    def start(self, source: Rows) -> States:
        memory = self.encode(source)
        return States(self.model.decoder.new_states(), len(memory.hidden), memory.hidden.device, memory)

    def advance(self, new: Rows, states: States, last: bool = False) -> Tensor:
        found: Tensor = self.model.advance(new, states, last)
        return found

    def encode(self, source: Rows) -> LongMemory:
        assert source.side == "right" and source.segments is None, "one source per row, padded on the right"
        device, (rows, time) = source.tokens.device, source.tokens.shape
        lengths = [time] * rows if source.lengths is None else source.lengths.tolist()
        chunks = [(row, chunk) for row, length in enumerate(lengths) for chunk in split_source(length, self)]
        hidden: Tensor | None = None
        most = max(1, BUDGET // self.chunk)
        for begin in range(0, len(chunks), most):
            some = chunks[begin : begin + most]
            pieces = Rows.of([source.tokens[row, chunk.begin : chunk.end].tolist() for row, chunk in some])
            encoded = self.model.encode(pieces.to(device)).hidden
            if hidden is None:
                hidden = encoded.new_zeros(rows, time, encoded.shape[2])
            for (row, chunk), states in zip(some, encoded, strict=True):
                span = slice(chunk.keep - chunk.begin, chunk.until - chunk.begin)
                hidden[row, chunk.keep : chunk.until] = states[span]
        assert hidden is not None, "a source needs at least one token"
        layout = TokenLayout.of(Rows(torch.empty(rows, time, device=device), source.lengths))
        indexes = None
        if self.options.index == "faiss":
            indexes = [build_index(states[:length]) for states, length in zip(hidden, lengths, strict=True)]
        return LongMemory(hidden, layout, tokens=source.tokens, keys=self.options.keys, indexes=indexes)


class SourceChunk(NamedTuple):
    """Tokens [begin, end) are encoded; the states of [keep, until) are kept."""

    begin: int
    end: int
    keep: int
    until: int


def split_source(length: int, model: UnlimitedModel) -> Iterator[SourceChunk]:
    """Chunks of the same size, each keeping what has context on both sides, as in the authors' code: the first keeps
    its beginning, the last, which ends with the source, its end."""
    size = model.chunk
    margin = int(size * model.options.overlap / 2)
    if length <= size:
        yield SourceChunk(0, length, 0, length)
        return
    begin, kept = 0, 0
    while kept < length:
        begin = min(begin, length - size)
        end = begin + size
        until = length if end == length else end - margin
        yield SourceChunk(begin, end, kept, until)
        begin, kept = begin + size - 2 * margin, until


def build_index(states: Tensor) -> Any:
    """A faiss index of inner products: exact for short sources, of clusters for long ones."""
    faiss, vectors = import_faiss(), states.float().cpu().contiguous().numpy()
    count, width = vectors.shape
    clusters = "" if count < CLUSTERED else f"IVF{int(count**0.5)},"
    index = faiss.index_factory(width, f"{clusters}Flat", faiss.METRIC_INNER_PRODUCT)
    if clusters:
        index.train(vectors)
        index.nprobe = PROBED
    index.add(vectors)
    return index


def check_model(model: Any) -> None:
    """Raise where the decoder does not attend to all source tokens by cross-attention."""
    if not isinstance(model, EncoderDecoderModel):
        kind = getattr(getattr(model, "config", None), "kind", type(model).__name__)
        raise UserError(f"unlimited: needs an encoder-decoder for text, not a {kind} model")
    config: Any = model.config
    if (config.source_embed or config.embed).reads is not Rows:
        raise UserError("unlimited: needs an encoder-decoder for text; this model reads images or sound")
    blocks: list[Any] = list(model.decoder.blocks)
    for number, block in enumerate(blocks):
        cross = block.sublayers["cross"] if "cross" in block.sublayers else None  # noqa: SIM401  # ModuleDict has no get
        if cross is not None and (type(cross) is not CrossAttention or not isinstance(cross.pattern, Full)):
            raise UserError(
                f"unlimited: needs attention to all source tokens; layer {number} of the decoder has another cross"
            )
