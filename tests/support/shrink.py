"""A preset made small enough to train in a test, with everything that makes it what it is still in place.

`shrink(config)` keeps the tree and takes numbers down by what they mean, which their names say: a width in proportion
to the model's, heads to at most four, layers of one kind to at most two, a window to a few places. `batch_for(config)`
is something such a model can read.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from allyouneed.config import parse, tree_of
from allyouneed.nn.batch import MEDIA, Batch, Media, Neighbours, Rows, Signal
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.two_stream import append_query_stream

WIDTH, GRID, PATCH, LONGEST = 32, 3, 4, 24
PROPORTIONAL = ("width", "hidden", "inner", "kv_rank", "query_rank", "row_width")
INSIDE_HEADS = ("head_width", "nope_width", "rope_width", "value_width")
MOST = {"repeat": 2, "length": LONGEST, "experts": 4, "mels": 8, "classes": 5, "labels": 5, "rows": 6, "columns": 4}
MOST |= {"chunk": 4, "grid": GRID}  # several chunks per text; the patches of an image
MOST |= {"slots": 3}  # of an image in a text
AS_IS = ("distance", "buckets", "seed", "offset", "limit", "channels")  # already small, or tied to another number
OFF = ("dropout", "jitter")


def shrink(config: Model) -> Model:
    tree = tree_of(config, full=True)
    return parse(Model, _dict(tree, WIDTH / tree["width"]), "shrunk")  # type: ignore[type-abstract]


def small(number: int) -> int:
    """Keeps powers of two and the order of numbers."""
    return number if number <= 4 else min(max(2, number // 16), 8)


def _value(key: str, value: Any, ratio: float) -> Any:
    if isinstance(value, dict):
        return _dict(value, ratio)
    if isinstance(value, list):
        return [_value(key, entry, ratio) for entry in value]
    if key == "pattern":
        return re.sub(r"\d+", lambda found: str(small(int(found[0]))), value)
    if key in OFF:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int) or key in AS_IS:
        return value
    if key in PROPORTIONAL:
        return max(8, round(value * ratio / 8) * 8)
    if key in INSIDE_HEADS:
        return 8
    if key in MOST:
        return min(value, MOST[key])
    if key in ("vocab", "source", "target"):
        return 50 + len(key)  # different vocabularies stay different
    return value if value <= 64 else 8 * small(value.bit_length())


def _dict(tree: dict[str, Any], ratio: float) -> dict[str, Any]:
    found = {key: _value(key, value, ratio) for key, value in tree.items()}
    if isinstance(heads := tree.get("heads"), int):
        found["heads"] = 4 if heads >= 4 else min(heads, 2)
        if (few := tree.get("kv_heads")) is not None:
            found["kv_heads"] = 1 if few == 1 else found["heads"] if few == heads else 2
    if "experts" in tree:
        found["top"] = min(tree["top"], 2)
        if found["router"]["groups"] is not None:
            found["router"]["groups"] |= {"count": 2, "top": 1}
    if tree.get("kind") == "recurrent-memory":
        found["segment"] = LONGEST  # one pass per layer; tests/nn/models/test_recurrent_memory.py has several segments
    if tree.get("kind") == "lsh":
        found["buckets"] = 4  # so that some of a few tokens share a bucket
    if tree.get("kind") == "waveform":
        found |= {"channels": 8, "reach": 16, "groups": 4}
    if tree.get("kind") == "patches":
        found |= {"patch": PATCH, "image": GRID * PATCH}
        sizes = {"length": GRID**2 + tree["class_token"] + tree["distillation_token"], "rows": GRID, "columns": GRID}
        found["positions"] |= {key: value for key, value in sizes.items() if key in found["positions"]}
    return found


def _rows(vocab: int, limit: int | None, dice: torch.Generator) -> Rows:
    longest = min(limit or LONGEST, LONGEST)
    lengths = [max(1, longest - 3 * n) for n in range(6)]
    return Rows.of([torch.randint(1, vocab, (length,), generator=dice).tolist() for length in lengths])


SHAPES = {
    "patches": lambda embed: (embed.channels, GRID * PATCH, GRID * PATCH),
    "frames": lambda embed: (embed.mels, LONGEST),
    "waveform": lambda embed: (1, 320 * LONGEST),  # a position is 320 samples
}


def _read(embed: Any, vocab: int | None, dice: torch.Generator) -> Rows | Signal:
    """Input of an encoder. The first token of every text is global (Longformer)."""
    if embed.reads is Rows:
        assert vocab is not None
        rows = _rows(vocab, embed.limit, dice)
        first = torch.zeros_like(rows.tokens, dtype=torch.bool)
        first[:, 0] = True
        if getattr(embed, "asks", False):  # the second token comes last in the order (XLNet); two types
            second = torch.zeros_like(rows.tokens)
            second[:, 1] = 1
            return append_query_stream(replace(rows, order=second, types=first.long()), [[1]] * len(second))
        return replace(rows, chosen=first)
    return Signal(torch.randn(6, *SHAPES[embed.kind](embed), generator=dice))


def _neighbours(config: Any, rows: int, dice: torch.Generator) -> Neighbours:
    """Neighbours of each complete chunk, some shorter, some missing."""
    shape = rows, LONGEST // config.chunk, config.neighbours
    tokens = torch.randint(1, config.vocab, (*shape, config.length), generator=dice)
    return Neighbours(tokens, torch.randint(0, config.length + 1, shape, generator=dice))


def _interleaved(config: Any, written: Rows, dice: torch.Generator) -> Batch:
    """Each tower's medium in every other row, after a token."""
    slots, media = torch.zeros_like(written.tokens), {}
    for number, name in enumerate(MEDIA):
        if (tower := config.towers.get(name)) is not None:
            slots[number::2, 1 : 1 + tower.resampler.slots] = number + 1
            media[name] = _read(tower.encoder.embed, None, dice).values[:3]
    return Batch(replace(written, slots=slots), Media(**media))


def batch_for(config: Any, seed: int = 0) -> Batch:
    """Six inputs of unequal lengths, the same every time."""
    dice, vocabs = torch.Generator().manual_seed(seed), config.vocabs
    target = None if vocabs is None else vocabs.target
    if config.kind == "two-towers":
        return Batch(_read(config.text.embed, target, dice), _read(config.image.embed, None, dice))
    if config.kind == "encoder":
        return Batch(_read(config.embed, target, dice))
    written = _rows(target, config.embed.limit, dice)
    if config.kind == "encoder-decoder":
        return Batch(written, _read(config.source_embed or config.embed, vocabs.source, dice))
    if config.kind == "retro":
        return Batch(written, _neighbours(config, len(written.tokens), dice))
    if config.kind == "interleaved":
        return _interleaved(config, written, dice)
    return Batch(written)
