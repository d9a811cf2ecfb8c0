import pytest
import torch

from allyouneed.data.batches.packing import PackedBatches
from allyouneed.training.backend import choose_backend
from allyouneed.training.prefetch import DataPosition, count_labels, updates
from allyouneed.training.prepare import RunFolder, prepare
from allyouneed.training.reporting.progress import Reporter
from allyouneed.training.step import accumulate_gradients
from micro_run import Make


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_accumulated_gradients_equal_those_of_one_big_batch(make: Make, smoothing: float):
    recipe = make("model.dropout=0", task={"kind": "translation", "smoothing": smoothing})
    prepared = prepare(recipe, RunFolder(recipe.output), Reporter())
    model = recipe.model_for(prepared.vocabularies).build()
    rows = recipe.batch
    gradients = []
    for many, count in ((8, 1), (2, 4), (1, 8)):
        packed = PackedBatches(prepared.train.items, (rows.source, rows.row), many, seed=1)
        update = next(updates(packed, DataPosition(0, 0), count))
        model.zero_grad()
        loss, _ = accumulate_gradients(model, recipe.task, update.batches, update.tokens, choose_backend(recipe))
        gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for other in gradients[1:]:
        for big, small in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(big, small, rtol=1e-5, atol=1e-6)


def test_an_epoch_gives_every_batch_once_and_an_update_never_spans_two(make: Make):
    recipe = make()
    data = prepare(recipe, RunFolder(recipe.output), Reporter()).train
    flow = updates(data, DataPosition(0, 0), 3)
    seen: list[DataPosition] = []
    while not seen or seen[-1].epoch < 2:
        update = next(flow)
        assert len({place.epoch for place in update.positions}) == 1
        assert update.tokens == sum(map(count_labels, update.batches)) > 0
        seen += update.positions
    counts = [data.steps_per_epoch(epoch) for epoch in (0, 1)]
    expected = [DataPosition(epoch, n) for epoch in (0, 1) for n in range(counts[epoch])]
    assert seen[: len(expected)] == expected


def test_updates_can_start_at_any_position(make: Make):
    recipe = make()
    data = prepare(recipe, RunFolder(recipe.output), Reporter()).train
    flow = updates(data, DataPosition(0, 0), 2)
    first = [next(flow) for _ in range(4)]
    again = next(updates(data, first[2].next, 2))
    assert again.positions == first[3].positions
    for one, other in zip(first[3].batches, again.batches, strict=True):
        assert torch.equal(one.target.tokens, other.target.tokens)
