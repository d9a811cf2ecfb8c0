"""Differences between Hugging Face files and ours that several families share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.interop.hf.config_reader import is_headless
from allyouneed.interop.hf.weight_table import CheckpointTransform, HfConfig, TensorTransform, Weights
from allyouneed.nn.positions.absolute import Sinusoidal


def split_groups(fused: Tensor, heads: int, groups: int) -> Tensor:
    """Rows ordered by group (its queries, its key, its value) -> all queries, all keys, all values.

    As many groups as heads: query, key and value of each head in turn; one group: multi-query attention.
    """
    each = heads // groups + 2
    rows = fused.reshape(groups, each, -1, *fused.shape[1:])  # (groups, queries of a group + 2, head_width, …)
    return torch.cat([part.flatten(0, 2) for part in (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])])


def merge_groups(rows: Tensor, heads: int, groups: int) -> Tensor:
    """Inverse of `split_groups`."""
    sizes = heads // groups, 1, 1  # queries, key and value of a group
    head_width = len(rows) // (groups * sum(sizes))
    parts = rows.split([groups * size * head_width for size in sizes])
    shaped = [part.reshape(groups, size, -1, *rows.shape[1:]) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(shaped, 1).flatten(0, 2)


def grouped_qkv(counts: Callable[[HfConfig], tuple[int, int]]) -> TensorTransform:
    """Fused projections ordered by group; `counts(config)`: heads and groups."""
    return TensorTransform(
        lambda tensor, config: split_groups(tensor, *counts(config)),
        lambda tensor, config: merge_groups(tensor, *counts(config)),
    )


def add_prefix(prefix: str, head: str = "lm_head.") -> CheckpointTransform:
    """Files of a model without its head omit the prefix; weights under `head` never have it."""

    def rename(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
        if any(name.startswith(prefix) for name in weights):
            return config, weights
        named = {name if name.startswith(head) else prefix + name: tensor for name, tensor in weights.items()}
        return config, named

    return rename


def remove_prefix(prefix: str) -> CheckpointTransform:
    """Inverse of `add_prefix`."""

    def rename(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
        if not is_headless(config):
            return config, weights
        return config, {name.removeprefix(prefix): tensor for name, tensor in weights.items()}

    return rename


def untie_if_different(config: HfConfig, weights: Weights, head: str, tokens: str) -> HfConfig:
    """A head that the config calls tied is untied where the file stores a different matrix for it, as in
    transformers."""
    own, shared = weights.get(head), weights.get(tokens)
    same = own is None or shared is None or (own.shape == shared.shape and own.equal(shared))
    return config if same else {**config, "tie_word_embeddings": False}


def untie_head(head: str, tokens: str) -> CheckpointTransform:
    """`untie_if_different` as a transform."""
    return lambda config, weights: (untie_if_different(config, weights, head, tokens), weights)


def chain(*steps: CheckpointTransform | None) -> CheckpointTransform:
    def run(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
        for step in filter(None, steps):
            config, weights = step(config, weights)
        return config, weights

    return run


def sinusoid_table(kind: Sinusoidal, positions: int, width: int) -> Tensor:
    """The table (positions, width) that some files store."""
    return kind.build(width)(torch.arange(positions)[None])[0]


def check_sinusoids(table: Tensor, kind: Sinusoidal, what: str) -> None:
    """Refuse a table that is not sinusoidal, since ours is computed. Half precision is allowed, and so are zeros
    (not yet initialised)."""
    if table.any() and not torch.allclose(table.float(), sinusoid_table(kind, *table.shape), atol=2e-3):
        raise UserError(f"{what} are not sinusoids; such a model is not supported")


ROW = TensorTransform(lambda tensor, config: tensor[0], lambda tensor, config: tensor[None])  # drop a batch of one
