"""Activation checkpointing: the same gradients with less memory."""

from typing import Any

import pytest
import torch

from allyouneed.training.backend import choose_backend
from allyouneed.training.distributed.apply import checkpoint_activations
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from allyouneed.training.step import accumulate_gradients
from micro_run import BLOCK, MODEL, Make

MOE = {
    "kind": "moe", "experts": 4, "top": 2, "expert": {"kind": "ffn", "hidden": 8},
    "router": {"scores": "sigmoid", "correction": 0.01},
}  # fmt: skip
BIASED = BLOCK | {"repeat": 2, "mixer": {"kind": "attention", "heads": 2, "positions": "buckets"}}
MODELS = {
    "attention": MODEL,
    "experts": MODEL | {"encoder": [BLOCK | {"channel": MOE, "repeat": 2}]},
    "a bias that layers share": MODEL | {"encoder": [BIASED]},
    "two streams": MODEL | {"encoder": [BLOCK | {"repeat": 2, "wiring": "resi-dual"}]},
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_recomputed_blocks_have_the_same_gradients(make: Make, model: dict[str, Any]):
    recipe = make(model=model, checkpoint_activations=True)  # with dropout: the same draw again
    prepared, machine = prepare(recipe, RunFolder(recipe.output), Reporter()), choose_backend(recipe)
    batch = next(prepared.train.batches(0))
    found, kept = [], []
    for twice in (False, True):
        torch.manual_seed(3)
        model = recipe.model_for(prepared.vocabularies).build().train()
        if twice:
            checkpoint_activations(model)
        held = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal held
            held += tensor.nbytes
            return tensor

        torch.manual_seed(4)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, plain = accumulate_gradients(model, recipe.task, [batch, batch], 200, machine)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss, "plain": plain} | gradients | dict(model.named_buffers()))
        kept.append(held)
    assert kept[1] < kept[0] / 2
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-6, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")
