"""Ways in which their files differ from ours that several families share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.interop.hf.config_reader import Reader, Tree
from allyouneed.interop.hf.weight_table import Change, Step, Theirs, Weights
from allyouneed.nn.positions.absolute import Sinusoidal


def ungrouped(fused: Tensor, heads: int, groups: int) -> Tensor:
    """Rows group by group (its queries, its key, its value) as ours are: all queries, all keys, all values.

    As many groups as heads is a query, key and value of each head in turn; one group is multi-query attention.
    """
    each = heads // groups + 2
    rows = fused.reshape(groups, each, -1, *fused.shape[1:])  # (groups, its queries + 2, head_width, …)
    return torch.cat([part.flatten(0, 2) for part in (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])])


def regrouped(rows: Tensor, heads: int, groups: int) -> Tensor:
    """The way back of `ungrouped`."""
    sizes = heads // groups, 1, 1  # queries, key and value of a group
    head_width = len(rows) // (groups * sum(sizes))
    parts = rows.split([groups * size * head_width for size in sizes])
    shaped = [part.reshape(groups, size, -1, *rows.shape[1:]) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(shaped, 1).flatten(0, 2)


def grouping(counts: Callable[[Theirs], tuple[int, int]]) -> Change:
    """Between their order of rows, group by group, and ours; `counts`: heads and groups."""
    return Change(
        lambda tensor, config: ungrouped(tensor, *counts(config)),
        lambda tensor, config: regrouped(tensor, *counts(config)),
    )


def bare(config: Theirs) -> bool:
    """Whether files are those of a model without its head, by the name of their class."""
    name = (config.get("architectures") or [""])[0]
    return name.endswith("Model") and not name.endswith(("LMHeadModel", "MTModel", "EncoderModel"))


def headed(config: Reader, tree: Tree) -> Tree:
    """A decoder's tree, by the name of their class: with the head it has, or without one."""
    config.classes("ForCausalLM", "LMHeadModel", "ModelWithLMHead", "Model")
    return tree | {"head": {"kind": "none"}} if bare(config) else tree


def prefixed(prefix: str, head: str = "lm_head.") -> Step:
    """Files of the model without its head leave the prefix out; `head`: what has none anyway."""

    def renamed(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
        if any(name.startswith(prefix) for name in weights):
            return config, weights
        named = {name if name.startswith(head) else prefix + name: tensor for name, tensor in weights.items()}
        return config, named

    return renamed


def unprefixed(prefix: str) -> Step:
    """The way back of `prefixed`."""

    def renamed(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
        if not bare(config):
            return config, weights
        return config, {name.removeprefix(prefix): tensor for name, tensor in weights.items()}

    return renamed


def unless_tied(config: Theirs, weights: Weights, head: str, tokens: str) -> Theirs:
    """A head that the config calls tied is a matrix of its own where the file has another one for it, as transformers
    has it too."""
    own, shared = weights.get(head), weights.get(tokens)
    same = own is None or shared is None or (own.shape == shared.shape and own.equal(shared))
    return config if same else {**config, "tie_word_embeddings": False}


def own_head(head: str, tokens: str) -> Step:
    """`unless_tied` as a step."""
    return lambda config, weights: (unless_tied(config, weights, head, tokens), weights)


def chained(*steps: Step) -> Step:
    """One step after another."""

    def whole(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
        for step in steps:
            config, weights = step(config, weights)
        return config, weights

    return whole


def sinusoids(kind: Sinusoidal, places: int, width: int) -> Tensor:
    """The table (places, width) that others store."""
    table: Tensor = kind.build(width)(torch.arange(places)[None])[0]
    return table


def refuse_other_sinusoids(table: Tensor, kind: Sinusoidal, what: str) -> None:
    """Ours computes them, so a table that holds something else cannot be honoured; a file may be in half precision, and
    one of zeros has not been filled yet."""
    if table.any() and not torch.allclose(table.float(), sinusoids(kind, *table.shape), atol=2e-3):
        raise UserError(f"{what} are no sinusoids; such a model is not known here")


ROW = Change(lambda tensor, config: tensor[0], lambda tensor, config: tensor[None])  # of a batch of one
