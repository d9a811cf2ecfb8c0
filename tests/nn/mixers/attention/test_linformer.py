"""What a Linformer promises besides its equations (tests/parity)."""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from any_part import build, pack


def encoder(repeat=3, **keys):
    mixer = {"kind": "linformer", "heads": 2, "length": 10, "rank": 4} | keys
    layer = {"repeat": repeat, "mixer": mixer, "channel": {"kind": "ffn", "hidden": 6}}
    return {"kind": "encoder", "vocab": 11, "width": 8, "embed": {"positions": "sinusoidal"}, "encoder": [layer]}


@pytest.mark.parametrize(("sharing", "tables"), [("none", 12), ("headwise", 6), ("key-value", 3), ("layerwise", 1)])
def test_projection_sharing_matches_the_paper(sharing, tables):
    """Section 4: of 12 layers with 12 heads it counts 288, 24, 12 and 1; here 3 layers with 2 heads."""
    config = parse(Model, encoder(sharing=sharing))
    model = config.build()
    sizes = {id(p): p.numel() for name, p in model.named_parameters() if "projections" in name}
    assert sum(sizes.values()) == tables * 4 * 10
    assert config.cost().parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_sentence_that_is_too_long_is_refused():
    model = build(encoder())
    with pytest.raises(UserError, match="sentence of 11 tokens exceeds the linformer's length 10"):
        model.logits(Batch(Rows(torch.ones(1, 11, dtype=torch.long))))


def test_padding_may_be_longer_than_any_sentence():
    model = build(encoder())
    tokens = torch.randint(1, 11, (2, 14), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wide = model.logits(Batch(Rows(tokens, lengths=torch.tensor([10, 4]))))
        assert wide.isfinite().all()
        alone = model.logits(Batch(Rows(tokens[1:, :4])))
    torch.testing.assert_close(wide[1:, :4], alone, atol=1e-9, rtol=0)


def test_a_packed_row_may_be_longer_than_any_sentence():
    model = build(encoder())
    sentences = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 1, 2, 3], [4, 5]]
    rows, places = pack(sentences, [0, 0, 0], [1, 0, 2])
    with torch.no_grad():
        found = model.logits(Batch(rows))
        for tokens, (line, span) in zip(sentences, places, strict=True):
            alone = model.logits(Batch(Rows(torch.tensor([tokens]))))[0]
            torch.testing.assert_close(found[line, span], alone, atol=1e-9, rtol=0)


def test_a_linformer_decoder_is_refused():
    tree = encoder() | {"kind": "decoder", "decoder": encoder()["encoder"]}
    del tree["encoder"]
    with pytest.raises(ConfigError, match="every linformer key mixes all tokens"):
        parse(Model, tree)
