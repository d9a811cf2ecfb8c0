"""Plain parts straight from the equations of "Attention Is All You Need", to write down models that nobody else has.

A part reads the weights of ours by name (`Weights`), so an oracle is short and every gradient can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import parity


class Weights:
    """Copies of a model's parameters by name below a path."""

    def __init__(self, values: dict[str, Tensor], path: str = "") -> None:
        self.values, self.path = values, path

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        return cls({name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()})

    def at(self, path: str) -> Weights:
        return Weights(self.values, f"{self.path}{path}.")

    def __getitem__(self, name: str) -> Tensor:
        return self.values[self.path + name]


def linear(x: Tensor, weights: Weights) -> Tensor:
    return x @ weights["weight"].T + weights["bias"]


def layer_norm(x: Tensor, weights: Weights, eps: float = 1e-5) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weights["weight"] + weights["bias"]


def attention(x: Tensor, source: Tensor, seen: Tensor, heads: int, weights: Weights) -> Tensor:
    """For one sentence: x (time, width) attends to source (keys, width) where `seen` (time, keys) allows."""
    width = x.shape[-1]
    if x is source:
        q, k, v = linear(x, weights.at("qkv")).split(width, -1)
    else:
        q, (k, v) = linear(x, weights.at("q")), linear(source, weights.at("kv")).split(width, -1)
    each = width // heads
    found = []
    for head in range(heads):
        own = slice(head * each, (head + 1) * each)
        scores = (q[:, own] @ k[:, own].T / math.sqrt(each)).masked_fill(~seen, -math.inf)
        found.append(scores.softmax(-1) @ v[:, own])
    return linear(torch.cat(found, -1), weights.at("out"))


def ffn(x: Tensor, weights: Weights, activation: Callable[[Tensor], Tensor] = torch.relu) -> Tensor:
    return linear(activation(linear(x, weights.at("up"))), weights.at("down"))


def sinusoids(time: int, width: int) -> Tensor:
    table = torch.zeros(time, width)
    for place in range(time):
        for i in range(width // 2):
            angle = place / 10000 ** (2 * i / width)
            table[place, 2 * i], table[place, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return table


def past(time: int) -> Tensor:
    return torch.ones(time, time, dtype=torch.bool).tril()


def differences(model: nn.Module, weights: Weights, found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Differences of outputs and gradients, relative where those are large."""
    pull = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    (found * pull).sum().backward()
    (expected * pull).sum().backward()
    worst = 0.0
    for name, parameter in model.named_parameters():
        gradient = weights[name].grad
        assert parameter.grad is not None and gradient is not None, f"{name} got no gradient"
        if gradient.any():
            worst = max(worst, parity.difference(parameter.grad, gradient))
    return parity.difference(found.detach(), expected.detach()), worst
