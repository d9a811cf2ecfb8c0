"""Compares a generative family with its reference: logits, gradients, decoding steps and greedy continuations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import parity
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Rows

TEXTS = [[1, 5, 7, 9, 3, 2, 11, 6, 13, 4, 8], [4, 4, 8], [12]]


def real(rows: Rows) -> Tensor:
    """(batch, time) bool: real tokens."""
    steps = torch.arange(rows.tokens.shape[1])[None]
    return steps < (rows.tokens.shape[1] if rows.lengths is None else rows.lengths[:, None])


def agree(theirs: Any, folder: Path, texts: Sequence[Sequence[int]] = TEXTS, seed: int = 0) -> tuple[float, float]:
    """Random weights for both; the largest differences of logits and gradients. Ours also decodes token by token."""
    parity.randomise(theirs.eval(), seed)
    model = parity.ours(theirs, folder)
    rows = Rows.of(texts)
    inside = real(rows)
    expected = theirs(input_ids=rows.tokens, attention_mask=inside.long().expand_as(rows.tokens)).logits[inside]
    found = model.logits(Batch(rows))[inside]
    worst = max(parity.difference(found, expected), parity.difference(stepwise(model, rows)[inside], expected))
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    losses = (found * weight).sum(), (expected * weight).sum()
    gradients = parity.gradient_difference(model, theirs, folder, *losses)
    assert worst < parity.TOLERANCE and gradients < parity.TOLERANCE, (worst, gradients)
    return worst, gradients


@torch.no_grad()
def stepwise(model: Any, rows: Rows) -> Tensor:
    """Logits (batch, time, vocab), decoded token by token over the model's states."""
    states = model.start(len(rows.tokens))
    columns = [rows.tokens[:, t : t + 1] for t in range(rows.tokens.shape[1])]
    return torch.cat([model.head(model.advance(Rows(column), states)) for column in columns], 1)


@torch.no_grad()
def greedy(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy continuations of `count` tokens for prompts of unequal lengths."""
    states = model.start(len(prompts))
    rows = Rows.of(prompts)
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts])
    hidden = model.advance(rows, states)[torch.arange(len(prompts)), ends][:, None]
    said = []
    for _ in range(count):
        said.append(model.head(hidden)[:, -1].argmax(-1, keepdim=True))
        hidden = model.advance(Rows(said[-1]), states)
    return torch.cat(said, 1).tolist()


def their_greedy(theirs: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The same by their `generate`, which needs left padding."""
    rows = Rows.of(prompts, side="left")
    longest = rows.tokens.shape[1]
    mask = torch.arange(longest)[None] >= longest - torch.tensor([len(prompt) for prompt in prompts])[:, None]
    options = dict(max_new_tokens=count, do_sample=False, num_beams=1, eos_token_id=None, pad_token_id=0)
    out = theirs.eval().generate(input_ids=rows.tokens, attention_mask=mask.long(), **options)
    return out[:, longest:].tolist()


def continues_alike(theirs: Any, folder: Path, prompts: Sequence[Sequence[int]] = TEXTS, count: int = 12) -> None:
    """Continuations of prompts of unequal lengths match their `generate`."""
    parity.randomise(theirs.eval(), 1)
    with torch.no_grad():  # small biases, so that the whole prompt matters
        for name, parameter in theirs.named_parameters():
            parameter.sub_(1.0 if name.endswith("bias") else 0.0)
            parameter.mul_(2.0 if parameter.dim() > 1 and len(parameter) != theirs.config.vocab_size else 1.0)
    model = parity.ours(theirs, folder)
    expected = their_greedy(theirs, prompts, count)
    assert len({token for row in expected for token in row}) > 2, "always the same token proves little"
    assert greedy(model, prompts, count) == expected


def reads_without_prefix(theirs: Any, folder: Path, prefix: str) -> None:
    """Old files hold the model without its head, with shorter names."""
    parity.randomise(theirs.eval())
    config, weights = parity.saved(theirs, folder)
    bare = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    assert bare.keys() != weights.keys()
    family = FAMILIES[config["model_type"]]
    found, expected = (family.convert(config, given).state_dict() for given in (bare, weights))
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
