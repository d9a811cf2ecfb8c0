import re
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.errors import UserError
from allyouneed.training import start
from allyouneed.training.backend import choose_backend
from allyouneed.training.planning import memory
from allyouneed.training.planning.memory import (
    available_memory,
    check_memory,
    estimate,
    format_bytes,
    memory_in_use,
)
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


HUGE: list[dict[str, Any]] = [
    {"batch": {"rows": 1_000_000}},
    {"batch": {"rows": 2_000_000_000, "row": 1_000_000}},
    {"batch": {"rows": 1, "row": 2_000_000_000}, "data": {"max_tokens": 16}},
    {"batch": {"source_row": 2_000_000_000}},
    {"set": ["width=200000"]},
    {"set": ["encoder[0].channel.hidden=1000000000"]},
    {"set": ["decoder[0].mixer.head_width=100000000"]},
    {"set": ["embed.positions={kind: learned, length: 1000000000}"]},
]


@pytest.mark.parametrize("changes", HUGE, ids=str)
def test_a_run_that_cannot_fit_is_refused_before_anything_is_built(
    make: Make, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = changes.get("data")
    recipe = make(model="transformer-tiny", **{key: value for key, value in changes.items() if key != "data"})
    recipe = recipe if data is None else recipe.model_copy(update={"data": recipe.data.model_copy(update=data)})
    monkeypatch.setattr(start, "prepare", lambda *_: pytest.fail("prepared"))
    monkeypatch.setattr("allyouneed.nn.models.base.ModelModule.__init__", lambda *_: pytest.fail("built"))
    with pytest.raises(UserError, match=r"^this run takes about .* [TG]B \(weights .*\); .* are free; "):
        start.train(recipe)


def test_the_advice_fits_into_the_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make(model="transformer-tiny", batch={"rows": 1_000_000, "row": 512})
    monkeypatch.setattr(memory, "available_memory", lambda device: 10**9)
    with pytest.raises(UserError) as caught:
        check_memory(recipe, recipe.model_for(None), choose_backend(recipe))
    found = re.search(r"batch.rows: (\d+) with accumulate: (\d+)", str(caught.value))
    assert found is not None and int(found[1]) * int(found[2]) >= 1_000_000
    smaller = make(model="transformer-tiny", batch={"rows": int(found[1]), "row": 512})
    need, there = check_memory(smaller, smaller.model_for(None), choose_backend(smaller))
    assert there == 10**9 and need.activations <= there


def test_a_run_that_may_fit_is_tried(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make(model="transformer-tiny", batch={"rows": 4, "row": 128})
    machine, config = choose_backend(recipe), recipe.model_for(None)
    need = estimate(recipe, config, machine).total
    for free, fits in ((need // 2 + 1, True), (need // 2 - 1, False)):
        monkeypatch.setattr(memory, "available_memory", lambda device, free=free: free)
        with nullcontext() if fits else pytest.raises(UserError, match="this run takes"):
            check_memory(recipe, config, machine)


def test_checkpointed_activations_take_less(make: Make) -> None:
    changes: dict[str, Any] = {"model": "transformer-base", "batch": {"rows": 4, "row": 128}}
    plain, checkpointed = make(**changes), make(**changes, checkpoint_activations=True)
    machine, config = choose_backend(plain), plain.model_for(None)
    assert estimate(checkpointed, config, machine).activations < estimate(plain, config, machine).activations / 3


def test_a_module_whose_weights_do_not_fit_is_not_built() -> None:
    for changes in (["width=200000"], ["encoder[0].channel.hidden=1000000000"]):
        with pytest.raises(UserError, match=r"the weights of .* parameters take .* GB; .* GB are free"):
            ayn.build("transformer-tiny", changes)
    with torch.device("meta"):  # takes no memory
        assert ayn.build("transformer-tiny", ["encoder[0].channel.hidden=100000000"]) is not None


def test_a_limit_of_the_address_space_is_a_limit_of_memory() -> None:
    script = (
        "import resource, torch; from allyouneed.runtime.memory import available_memory as free; "
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); print(free(torch.device('cpu')))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 0 <= int(found.stdout) < 3 << 30
