"""Stochastic depth: sub-layers are skipped for some rows in training, later blocks more often, and never in use."""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model

ROWS = 4000


def model(depth_dropout, blocks=2, wiring="pre-norm", **keys):
    layer = {"repeat": blocks, "wiring": {"kind": wiring, "depth_dropout": depth_dropout}} | {
        "channel": {"kind": "ffn", "hidden": 8}
    }
    tree = {"kind": "encoder", "vocab": 9, "width": 4, "encoder": [layer], "head": "none"}
    torch.manual_seed(0)
    return parse(Model, tree | keys).build()


def rows():
    return Batch(Rows(torch.full((ROWS, 1), 3)))


@pytest.mark.parametrize("wiring", ["pre-norm", "post-norm", "parallel"])
def test_it_changes_nothing_in_use(wiring):
    one, other = model(0.5, wiring=wiring).eval(), model(0.0, wiring=wiring).eval()
    assert torch.equal(one.run(rows(), None)[0], other.run(rows(), None)[0])


def test_a_row_keeps_the_stream_or_gets_the_scaled_output():
    """One block, p = 0.25: x, or x + Sublayer(x) / 0.75 (Huang et al. 2016, eq. 2 and 5)."""
    built = model(0.25, blocks=1).train()
    block = built.encoder.blocks[0]
    assert block.wiring.skip_rate == 0.25
    stream, y = torch.randn(ROWS, 1, 4), torch.randn(ROWS, 1, 4)
    found = block.wiring.after(stream, y, 0, [lambda x: x])
    skipped = (found == stream).all(-1).squeeze(1)
    assert 0.22 < skipped.float().mean() < 0.28
    torch.testing.assert_close(found[~skipped], stream[~skipped] + y[~skipped] / 0.75)


def test_the_rate_grows_linearly_to_the_last_block():
    blocks = model(0.4, blocks=4).encoder.blocks
    assert [block.wiring.skip_rate for block in blocks] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_wiring_without_a_stream_cannot_skip():
    layer = {"wiring": {"kind": "no-skip", "depth_dropout": 0.1}, "channel": {"kind": "ffn", "hidden": 8}}
    with pytest.raises(ConfigError, match="depth_dropout"):
        parse(Model, {"kind": "encoder", "vocab": 9, "width": 4, "encoder": [layer], "head": "none"})
