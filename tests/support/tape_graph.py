"""A stand-in for CUDA graphs on a CPU: `capture` records the operations of a step, and a replay repeats them on the
memory that they had, whatever has happened to the tensors since. What a step reads through Python (weights that were
replaced, sizes, branches) stays as it was when it was captured, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from allyouneed.infer.cuda_graph import paged_prefill, prefill, runner, slot_loader
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.nn.mixers.rnn import RNNModule
from allyouneed.nn.ops.rnn import Carry, Maps, run_cells


def frozen(value: Any) -> Any:
    """Tensors as views of the memory they have now."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach(), value)


class TapeGraph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = frozen((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, *given, frozen(out)))
        return out

    def replay(self) -> None:
        for func, args, kwargs, before in self.calls:
            after = func(*args, **kwargs)
            for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def capture(
    step: Callable[[], None], tries: int = prefill.WARM_UPS, pool: Any = None, reset: Callable[[], object] | None = None
) -> TapeGraph:
    """In place of `capture_warm`. Recording runs the step, which capturing does not: its results are undone by the
    caller's reset, and by the replay with the same inputs that follows."""
    prefill.warm_up(step, tries, reset)
    if reset is not None:
        reset()
    tape = TapeGraph()
    with tape:
        step()
    return tape


class EmptyGraph:
    """What is captured takes no time on the host, and leaves no results."""

    def replay(self) -> None:
        pass


def capture_nothing(
    step: Callable[[], None], tries: int = prefill.WARM_UPS, pool: Any = None, reset: Callable[[], object] | None = None
) -> EmptyGraph:
    """In place of `capture_warm`, where the work of the host is counted."""
    prefill.warm_up(step, tries, reset)
    return EmptyGraph()


def capture_on_cpu(patch: pytest.MonkeyPatch, capture: Callable[..., Any] = capture) -> None:
    """Decode by captured graphs as on a GPU, on a CPU."""
    for module in (runner, prefill, paged_prefill, slot_loader):
        patch.setattr(module, "capture_warm", capture)
    for module in (runner, prefill, slot_loader):
        patch.setattr(module, "captures_on", lambda device: True)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(ModelRunner, "captures", True)


def flatten_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """cuDNN wants the weights of a network in one piece: torch moves them there, and frees those it had."""

    def move(rnn: nn.RNNBase) -> None:
        weights = rnn._flat_weights
        if len(weights) != len(rnn._flat_weights_names) or any(one is None or one.is_meta for one in weights):
            return
        if len({one.dtype for one in weights}) > 1 or len({one.data_ptr() for one in weights}) < len(weights):
            return
        with torch.no_grad():
            piece = torch.cat([one.detach().flatten() for one in weights])
            for one, part in zip(weights, piece.split([one.numel() for one in weights]), strict=True):
                old = one.detach()
                one.set_(part.view_as(one))
                old.fill_(torch.nan)  # as if the memory had been given to others

    def scan(self: RNNModule, x: Tensor, carry: Carry, real: Tensor | None, which: str = "") -> Any:
        """A step has a kernel of its own there, and rows that are read go through torch's network."""
        alone = x.shape[1] == 1
        return run_cells(self.cell, x, Maps.of(self.float_rnn, which), carry, real) if alone else None

    patch.setattr(nn.RNNBase, "flatten_parameters", move)
    patch.setattr(RNNModule, "scan", scan)
