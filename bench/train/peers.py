"""What training on a GPU is measured against (gpu.py), and how its users feed it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from allyouneed.data.batches.packing import generator
from allyouneed.nn.batch import IGNORE
from allyouneed.tasks.translation.translation import PairItems

SMOOTHING = 0.1
LENGTHS = (8, 12, 16, 24)  # of the peer's batches; 99% of the sentence pairs are no longer


class TorchTransformer(nn.Module):
    def __init__(self, vocab: int, width: int = 512, heads: int = 8, layers: int = 6, hidden: int = 2048) -> None:
        super().__init__()
        self.width = width
        self.tokens = nn.Embedding(vocab, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self.core = nn.Transformer(width, heads, layers, layers, hidden, 0.1, batch_first=True)
        for module in self.core.modules():  # the paper's dropout: neither on attention weights nor inside the FFN
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = 0.0
        self.dropout = nn.Dropout(0.1)
        angles = torch.arange(1024)[:, None] * 10000 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], -1), persistent=False)

    def compiled(self) -> TorchTransformer:
        for layer in [*self.core.encoder.layers, *self.core.decoder.layers]:
            layer.compile(dynamic=False)
        self.embed, self.loss_of = torch.compile(self.embed, dynamic=False), torch.compile(self.loss_of, dynamic=False)
        return self

    def embed(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens) * math.sqrt(self.width) + self.table[: tokens.shape[1]])

    def loss_of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = (hidden @ self.tokens.weight.T.to(hidden.dtype)).flatten(0, 1).float()
        return cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, label_smoothing=SMOOTHING, reduction="sum")

    def forward(self, source: Tensor, source_pad: Tensor, target: Tensor, target_pad: Tensor, labels: Tensor) -> Tensor:
        time_target = target.shape[1]
        hidden = self.core(
            self.embed(source),
            self.embed(target),
            tgt_mask=torch.ones(time_target, time_target, dtype=torch.bool, device=target.device).triu(1),
            src_key_padding_mask=source_pad,
            tgt_key_padding_mask=target_pad,
            memory_key_padding_mask=source_pad,
            tgt_is_causal=True,
        )
        return self.loss_of(hidden, labels)


class Bucketed:
    """Sentence pairs in batches of like lengths, each of one of a few shapes: as users feed a compiled model."""

    def __init__(self, items: PairItems, tokens: int) -> None:
        self.items, self.tokens = items, tokens

    def batches(self, epoch: int) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """How many real target tokens, and what the model takes."""
        rng = generator(1, epoch)
        longest = np.maximum(*self.items.lengths(0)[:2])
        groups: list[tuple[int, np.ndarray]] = []
        for shorter, length in zip((0, *LENGTHS), LENGTHS, strict=False):
            members = rng.permutation(np.flatnonzero((longest > shorter) & (longest <= length)))
            rows = self.tokens // length
            groups += [(length, members[n : n + rows]) for n in range(0, len(members) - rows + 1, rows)]
        for number in rng.permutation(len(groups)):
            yield self.padded(*groups[number])

    def padded(self, length: int, members: np.ndarray) -> tuple[int, tuple[Tensor, ...]]:
        filled = self.items.collate(0, members)
        assert filled.labels is not None
        found: list[Tensor] = []
        for side, lengths in zip(filled.sides, self.items.lengths(0), strict=True):
            counts = torch.from_numpy(lengths[members].astype(np.int64))
            real = torch.arange(length) < counts[:, None]
            found += [self.spread(side.tokens, real, 0), ~real]
        labels = self.spread(filled.labels, real, IGNORE)
        return int((labels != IGNORE).sum()), tuple(tensor.pin_memory() for tensor in (*found, labels))

    def spread(self, values: np.ndarray, real: Tensor, empty: int) -> Tensor:
        return torch.full(real.shape, empty).masked_scatter_(real, torch.from_numpy(values))


def one_of_each(data: Bucketed) -> list[tuple[int, tuple[Tensor, ...]]]:
    """Two batches of every shape."""
    found: dict[int, list[tuple[int, tuple[Tensor, ...]]]] = {}
    for batch in data.batches(0):
        found.setdefault(batch[1][0].shape[1], []).append(batch)
        if len(found) == len(LENGTHS) and all(len(batches) > 1 for batches in found.values()):
            break
    return [batch for batches in found.values() for batch in batches[:2]]


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """GPT-2 in the manner of nanoGPT."""

    def __init__(self, vocab: int = 50304, width: int = 768, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))
