"""The query stream: what it attends to, what attends to it, and cached segments."""

import pytest
import torch

from allyouneed.config import parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.two_stream import append_query_stream, query_stream
from any_part import build

TIME, VOCAB = 7, 11
ORDER = torch.tensor([[0, 3, 0, 1, 0, 2, 0], [2, 0, 0, 1, 0, 0, 0]])
PLACES = [[1, 3, 5], [0, 3]]
TOKENS = torch.randint(1, VOCAB, (2, TIME), generator=torch.Generator().manual_seed(0))
TYPES = torch.tensor([[0, 0, 0, 1, 1, 1, 2], [1, 1, 0, 0, 0, 0, 2]])


@pytest.fixture(scope="module", params=["keys", "hidden"])
def model(request):
    mixer = {"kind": "attention", "heads": 3, "pattern": "permuted", "positions": "xlnet", "cache": request.param}
    layer = {"repeat": 3, "mixer": mixer, "channel": {"kind": "ffn", "hidden": 14}}
    keys = {"kind": "encoder", "vocab": VOCAB, "width": 12, "embed": {"asks": True}, "encoder": [layer]}
    return build(parse(Model, keys))


def run(model, tokens, order=ORDER, places=PLACES, types=TYPES):
    with torch.no_grad():
        return model(Batch(append_query_stream(Rows(tokens, order=order, types=types), places)))


def test_the_query_stream_depends_on_earlier_tokens_only(model):
    before = run(model, TOKENS)
    for row, places in enumerate(PLACES):
        for place in range(TIME):
            changed = TOKENS.clone()
            changed[row, place] = changed[row, place] % (VOCAB - 1) + 1
            moved = (run(model, changed) - before).abs().amax(-1) > 1e-6
            assert not moved[1 - row].any()
            for number, asked in enumerate(places):
                assert bool(moved[row, TIME + number]) == bool(ORDER[row, place] < ORDER[row, asked])
            for other in range(TIME):
                assert bool(moved[row, other]) == bool(ORDER[row, place] <= ORDER[row, other])


def test_no_token_attends_to_the_query_stream(model):
    with torch.no_grad():
        alone = model(Batch(Rows(TOKENS, order=ORDER, types=TYPES)))
    torch.testing.assert_close(run(model, TOKENS)[:, :TIME], alone)
    fewer = run(model, TOKENS, places=[[5], [3]])
    torch.testing.assert_close(fewer[0, TIME], run(model, TOKENS)[0, TIME + 2])
    torch.testing.assert_close(fewer[1, TIME], run(model, TOKENS)[1, TIME + 1])


def test_only_equality_of_types_matters(model):
    found = run(model, TOKENS)
    torch.testing.assert_close(run(model, TOKENS, types=(TYPES + 1) % 3), found)
    assert (run(model, TOKENS, types=TYPES.clamp(max=1)) - found).abs().max() > 1e-3
    torch.testing.assert_close(run(model, TOKENS, types=None), run(model, TOKENS, types=torch.full_like(TYPES, 3)))


@pytest.mark.parametrize("cuts", [[4], [2, 5], [1, 2, 3, 4, 5, 6]])
def test_segments_over_cached_states_equal_the_whole(model, cuts):
    """Segments come in order; the last one has a factorisation order and a query stream."""
    begin = cuts[-1]
    bounds = [0, *cuts]
    order = torch.zeros_like(TOKENS)
    for number, (low, high) in enumerate(zip(bounds, cuts, strict=False)):
        order[:, low:high] = number
    count = TIME - begin
    last = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(row)) for row in range(2)])
    order[:, begin:] = len(cuts) + last
    places = torch.arange(count - 1, -1, -1).expand(2, -1)
    expected = run(model, TOKENS, order, (begin + places).tolist())
    states, found = model.start(2), []
    with torch.no_grad():
        for low, high in zip(bounds, cuts, strict=False):
            found.append(model.advance(Rows(TOKENS[:, low:high], types=TYPES[:, low:high]), states))
            states.detach()
        rows = Rows(TOKENS[:, begin:], order=last, types=TYPES[:, begin:])
        found.append(model.advance(rows, states, query_stream(rows, places)))
    assert states.lengths == [TIME, TIME]
    torch.testing.assert_close(torch.cat(found, 1), expected)


def test_a_segment_with_padding_is_refused(model):
    with pytest.raises(ValueError, match="without padding"):
        model.advance(Rows.of([[1, 2], [3]]), model.start(2))
