"""Characters of Python's standard library: a text that every machine has, for claims about language models."""

from __future__ import annotations

import argparse
import ast
import csv
import difflib
import json
import textwrap
import typing
from functools import cache
from inspect import getsource
from typing import Any

import torch
from torch import Generator, Tensor, nn

from allyouneed.lab.claims.claim import ClaimRun
from allyouneed.lab.claims.trees import built
from allyouneed.lab.probe.train import Fit, Loss, Sample, fit, score

VOCAB = 128
LEARNT, HELD = (argparse, typing, ast, difflib, json.decoder), (textwrap, csv)  # modules


@cache
def characters(held: bool) -> Tensor:
    text = "\n".join(getsource(module) for module in (HELD if held else LEARNT))
    return torch.tensor([code if (code := ord(letter)) < VOCAB else 0 for letter in text])


def sample(length: int, held: bool = False) -> Sample:
    """Windows of text, and the next character at each place."""
    text = characters(held)

    def make(dice: Generator, rows: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, len(text) - length - 1, (rows, 1), generator=dice)
        window = text[starts + torch.arange(length + 1)]
        return window[:, :-1], window[:, 1:]

    return make


def trained(
    tree: Any, seed: int, run: ClaimRun, length: int = 64, loss: Loss = nn.functional.cross_entropy, **how: Any
) -> nn.Module:
    """A model of characters after a short training. `loss`: of logits and labels."""
    model: nn.Module = built(tree, seed)
    size = Fit(
        **({"rate": 5e-3, "steps": run.pick(300, 3), "rows": run.pick(16, 2), "seed": seed, "device": run.device} | how)
    )
    fit(model, sample(length), size, loss=loss)
    return model


def loss_after(tree: Any, seed: int, run: ClaimRun, **how: Any) -> float:
    """Its loss on modules that it was not trained on, in nats per character."""
    return score(trained(tree, seed, run, **how), sample(64, held=True), run.pick(128, 4))[0]
