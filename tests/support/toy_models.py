"""Models to decode with: a random one with decisive logits, and one that copies its source."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.config import override, parse, preset_tree
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.base import State, States

PAD, BOS, EOS, VOCAB = 0, 1, 2, 61


def random_model(seed: int = 0, vocab: int = VOCAB, ends: float = 3.0) -> Any:
    """Random weights, sharpened so that no two tokens are nearly equal, with sentences of many lengths."""
    torch.manual_seed(seed)
    tree = override(preset_tree("transformer-tiny"), [f"vocab={vocab}", "width=32", "dropout=0"])
    model = parse(Model, tree).build()  # type: ignore[type-abstract]
    norm, embed = model.decoder.blocks[-1].wiring.norms[-1], model.embed.tokens.weight
    with torch.no_grad():
        embed.normal_(std=0.4)
        norm.weight.normal_()
        norm.bias.copy_(ends * embed[EOS] / embed[EOS].square().sum())
    return model.eval()


class Heard(State):
    """The tokens of a source, shared by its beams."""

    shared = True

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def select(self, rows: Tensor) -> None:
        self.tokens = self.tokens.index_select(0, rows)

    def trim(self, length: int, each: Tensor | None = None) -> None:
        pass

    @property
    def bytes(self) -> int:
        return self.tokens.numel()


class Echo(nn.Module):
    """Copies its source. `swap` replaces tokens."""

    def __init__(self, vocab: int, unheard: set[int], swap: dict[int, int] | None = None) -> None:
        super().__init__()
        self.vocab, self.unheard, self.swap = vocab, unheard, swap or {}
        self.head = nn.Identity()
        self.noise = nn.Parameter(torch.rand(vocab, generator=torch.Generator().manual_seed(0)))
        self.heard: list[list[int]] = []  # every source, for tests to inspect

    def start(self, source: Rows) -> States:
        lengths = source.lengths if source.lengths is not None else [source.tokens.shape[1]] * len(source.tokens)
        rows = [row[: int(length)] for row, length in zip(source.tokens.tolist(), lengths, strict=True)]
        self.heard.extend(rows)
        said = Rows.of([[self.swap.get(t, t) for t in row if t not in self.unheard] for row in rows], EOS).tokens
        return States([{"heard": Heard(said)}], len(rows), source.tokens.device, None)

    def advance(self, new: Rows, states: States, last: bool = False) -> Tensor:
        (layer,) = states.layers
        heard = layer["heard"]
        assert isinstance(heard, Heard)
        tokens = heard.tokens.repeat_interleave(states.group, 0)
        place = min(states.lengths[0], tokens.shape[1] - 1)
        states.lengths = [seen + new.tokens.shape[1] for seen in states.lengths]
        return (nn.functional.one_hot(tokens[:, place], self.vocab) * 20.0 + self.noise)[:, None]
