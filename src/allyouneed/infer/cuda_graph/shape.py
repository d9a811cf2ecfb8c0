"""The shape of a graph runner (runner.py): what its graphs were captured for."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from allyouneed.infer.decoding.base import DecodingSpec, RequestState
from allyouneed.infer.speculative.drafts import DraftModel


class Shape(NamedTuple):
    """What a runner is made for: a specification, slots, positions of a row and of a source, weights at these
    addresses, which graphs have captured, and whether stop conditions are checked in every step."""

    kind: DecodingSpec
    slots: int
    capacity: int
    sources: int
    weights: int
    stops: bool = False


def tokens_per_step(spec: DecodingSpec) -> int:
    """How many tokens of each row a model reads at once."""
    return 1 if spec.draft is None else int(spec.draft.ahead) + 1


def all_addresses(model: Any, spec: DecodingSpec) -> int:
    """`weight_addresses` of the model, and of its draft if that is another one."""
    own = weight_addresses(model)
    return hash((own, weight_addresses(spec.draft.runner.model))) if isinstance(spec.draft, DraftModel) else own


def weight_addresses(model: Any) -> int:
    """A hash of the addresses and the dtype of the weights. (Going through `model.parameters()` takes a
    millisecond.)"""
    found: list[Any] = [next(model.parameters()).dtype]
    modules = [model]
    while modules:
        module = modules.pop()
        for weight in module._parameters.values():
            if weight is not None:
                found.append(weight.data_ptr())
        modules += [inside for inside in module._modules.values() if inside is not None]
    return hash(tuple(found))


def next_power(size: int, least: int) -> int:
    """The next power of two: few shapes serve all sizes."""
    return max(least, 1 << (size - 1).bit_length())


ROOM = 1024  # positions that a row may get beyond those it needs
SHARE = 64  # of the device's memory, for the states of a batch that gets them


def room(model: Any, rows: int) -> int:
    """Positions for each of this many rows: as many as take little memory, so that one runner serves prompts of many
    lengths; a step must not take longer for it (runtime/cuda/capture.py `reads_past_tokens_only`)."""
    weight, capacity = next(model.parameters()), ROOM
    while capacity and rows * model.config.cost(capacity).state_bytes(capacity, weight.itemsize, captured=True) > (
        device_memory(weight.device) / SHARE
    ):
        capacity //= 2
    return capacity


def device_memory(device: torch.device) -> int:
    """Bytes, whether free or not; 0 on a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def needs_stops(state: RequestState) -> bool:
    """Whether its stop condition is checked in every step: where beams compete, a text that has stopped leaves room
    for another."""
    options = state.spec.decoding
    return state.request.stop is not None and options.method == "beam" and options.beam > 1


def rows_in_memory(model: Any, capacity: int) -> int:
    """How many rows of `capacity` positions fit into half of the free device memory; on a CPU, any number."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return sys.maxsize
    free, _ = torch.cuda.mem_get_info(device)
    cost = model.config.cost(capacity)
    size = cost.state_bytes(capacity, next(model.parameters()).itemsize, captured=True)
    return int(free) // 2 // max(1, int(size))
