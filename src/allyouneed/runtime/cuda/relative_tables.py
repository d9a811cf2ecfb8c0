"""Tables of vectors by distance, which the attention kernel looks up, computed from the weights of a layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from allyouneed.nn.mixers.attention.attention import SelfAttention
from allyouneed.nn.ops.attention.decode import RelativeTables
from allyouneed.nn.positions.shaw import ShawModule
from allyouneed.nn.positions.transformer_xl import TransformerXLModule
from allyouneed.runtime.cuda.derived import derive
from allyouneed.runtime.cuda.static_cache import StaticStates
from allyouneed.runtime.program import Unsupported


def relative_tables(part: SelfAttention, states: StaticStates) -> RelativeTables | None:
    """Tables of positions whose scores depend on the query: Shaw's vectors and Transformer-XL's, projected for all
    distances of a row."""
    relative = part.relative
    if isinstance(relative, ShawModule):
        return _shaw(relative, states)
    if isinstance(relative, TransformerXLModule):
        if part.kv_heads != part.heads:
            raise Unsupported("queries that share keys have no fused kernel where vectors of distances differ by head")
        return _transformer_xl(relative, states)
    return None


def _shaw(relative: ShawModule, states: StaticStates) -> RelativeTables:
    if relative.adds_key_bias:
        raise Unsupported("the attention kernel multiplies vectors of distances with queries only")

    def past(table: nn.Embedding) -> Tensor:
        """The table from distance 0 on: no key is ahead."""
        return derive(states, lambda: table.weight[: relative.distance + 1].flip(0))

    values = None if relative.values_table is None else past(relative.values_table)
    return RelativeTables(past(relative.keys_table)[None], values, None, None)


def _transformer_xl(relative: TransformerXLModule, states: StaticStates) -> RelativeTables:
    content, place = (vectors[:, 0] for vectors in (relative.biases.content, relative.biases.place))
    most = states.capacity if relative.clamp is None else min(states.capacity, relative.clamp + 1)
    away = torch.arange(most, device=states.device)

    def project() -> Tensor:
        every = relative.far(relative.sinusoids(away).to(place.dtype))  # (distances, inner)
        return every.unflatten(-1, (len(place), -1)).transpose(0, 1).contiguous()

    return RelativeTables(derive(states, project), None, content, place)
