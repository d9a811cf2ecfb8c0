"""Ways in which their files differ from ours that several families share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from allyouneed.interop.table import Theirs, Weights


def ungrouped(fused: Tensor, heads: int, groups: int) -> Tensor:
    """Rows group by group (its queries, its key, its value) as ours are: all queries, all keys, all values.

    As many groups as heads is a query, key and value of each head in turn; one group is multi-query attention.
    """
    each = heads // groups + 2
    rows = fused.reshape(groups, each, -1, *fused.shape[1:])  # (groups, its queries + 2, head_width, …)
    return torch.cat([part.flatten(0, 2) for part in (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])])


def prefixed(prefix: str) -> Callable[[Theirs, Weights], tuple[Theirs, Weights]]:
    """Files of the model without its head leave the prefix out."""

    def renamed(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
        if any(name.startswith(prefix) for name in weights):
            return config, weights
        bare = {name if name.startswith("lm_head.") else prefix + name: tensor for name, tensor in weights.items()}
        return config, bare

    return renamed
