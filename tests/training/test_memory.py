import pytest
import torch

from allyouneed.training.backend import choose_backend
from allyouneed.training.planning.memory import available_memory, estimate, format_bytes, memory_in_use
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from allyouneed.training.step import accumulate_gradients
from micro_run import Make


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_estimate_is_within_a_factor_of_two_of_what_is_held(make: Make, precision: str):
    recipe = make(model="transformer-tiny", batch={"rows": 4, "row": 128}, precision=precision)
    prepared = prepare(recipe, RunFolder(recipe.output), Reporter())
    config, machine = recipe.model_for(prepared.vocabularies), choose_backend(recipe)
    model = config.build().train()
    batch = next(iter(prepared.train.batches(0)))
    seen: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        accumulate_gradients(model, recipe.task, [batch], 100, machine)
    guessed = estimate(recipe, config, machine)
    kept = sum(seen.values())
    assert guessed.activations / 2 < kept < guessed.activations * 2
    parameters = sum(p.numel() for p in model.parameters())
    optimiser = recipe.optimiser.build(model)
    optimiser.step()
    state = sum(t.nbytes for s in optimiser.state.values() for t in s.values())
    assert abs(guessed.optimiser - state) < 0.01 * state
    measured = 8 * parameters + state + kept
    assert guessed.total / 2 < measured < guessed.total * 2


def test_sizes_are_printed_with_units():
    assert [format_bytes(n) for n in (12, 34_000, 5_600_000, 7_890_000_000, 2e13)] == [
        "12 B",
        "34 kB",
        "6 MB",
        "7.9 GB",
        "20.0 TB",
    ]
    free, held = available_memory(torch.device("cpu")), memory_in_use(torch.device("cpu"))
    assert free is None or free > 0
    assert held is None or held > 10_000_000
