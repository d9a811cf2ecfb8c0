"""Positions inside attention: invalid combinations are refused by path with the reason; tables are computed once."""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.positions.relative import Heads
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.nn.positions.t5_bias import Buckets, BucketsModule
from any_part import build, tree

ATTENTION = {"kind": "attention", "heads": 3}
MLA = {"kind": "mla", "heads": 3, "kv_rank": 8, "nope_width": 4, "rope_width": 4, "value_width": 4}

# (what to put where, the path that is named, the reason)
REFUSED = {
    "alibi ahead": (
        {"encoder_mixer": ATTENTION | {"positions": "alibi"}},
        "encoder[0].mixer.positions.symmetric",
        "ahead",
    ),
    "xpos ahead": (
        {"encoder_mixer": ATTENTION | {"positions": {"kind": "rotary", "xpos": 512}}},
        "encoder[0].mixer.positions.xpos",
        "requires a causal pattern",
    ),
    "buckets ahead in causal": (
        {"mixer": ATTENTION | {"pattern": "causal", "positions": {"kind": "buckets", "bidirectional": True}}},
        "decoder[0].mixer.positions.bidirectional",
        "half of the buckets would be unused",
    ),
    "odd buckets": (
        {"encoder_mixer": ATTENTION | {"positions": {"kind": "buckets", "buckets": 7}}},
        "encoder[0].mixer.positions.buckets",
        "is odd",
    ),
    "near buckets": (
        {"encoder_mixer": ATTENTION | {"positions": {"kind": "buckets", "distance": 8}}},
        "encoder[0].mixer.positions.distance",
        "8 must exceed 8",
    ),
    "odd rotary": (
        {"encoder_mixer": ATTENTION | {"head_width": 5, "positions": "rotary"}},
        "encoder[0].mixer.positions.fraction",
        "rotates 5 of 5 features",
    ),
    "no rotary": (
        {"encoder_mixer": ATTENTION | {"positions": {"kind": "rotary", "fraction": 0.1}}},
        "encoder[0].mixer.positions.fraction",
        "rotates 0 of 4 features",
    ),
    "ntk of one plane": (
        {
            "encoder_mixer": ATTENTION
            | {"positions": {"kind": "rotary", "fraction": 0.5, "scaling": {"kind": "ntk", "factor": 2}}}
        },
        "encoder[0].mixer.positions.scaling.kind",
        "at least two planes",
    ),
    "llama3 upside down": (
        {
            "encoder_mixer": ATTENTION
            | {"positions": {"kind": "rotary", "scaling": {"kind": "llama3", "factor": 2, "original": 8, "low": 4}}}
        },
        "encoder[0].mixer.positions.scaling.high",
        "must be greater than low",
    ),
    "yarn upside down": (
        {
            "encoder_mixer": ATTENTION
            | {
                "positions": {
                    "kind": "rotary",
                    "scaling": {"kind": "yarn", "factor": 2, "original": 8, "fast": 1, "slow": 2},
                }
            }
        },
        "encoder[0].mixer.positions.scaling.fast",
        "must be greater than slow",
    ),
    "rotary with additive": (
        {"encoder_mixer": ATTENTION | {"positions": "rotary", "scores": "additive"}},
        "encoder[0].mixer.positions",
        "these scores do not compute",
    ),
    "rotary across": ({"cross": ATTENTION | {"positions": "rotary"}}, "decoder[0].cross.positions", "are undefined"),
    "batch norm of heads": (
        {"encoder_mixer": ATTENTION | {"qk_norm": "batch"}},
        "encoder[0].mixer.qk_norm",
        "one token's features",
    ),
    "mla with shaw": (
        {"encoder_mixer": MLA | {"positions": {"kind": "shaw", "distance": 2}}},
        "encoder[0].mixer.positions",
        "rotary or none",
    ),
    "mla with turned values": (
        {"encoder_mixer": MLA | {"positions": {"kind": "rotary", "values": True}}},
        "encoder[0].mixer.positions.values",
        "from the latent",
    ),
    "mla with additive": ({"encoder_mixer": MLA | {"scores": "additive"}}, "encoder[0].mixer.scores", "bilinear"),
    "mla across": ({"cross": MLA}, "decoder[0].cross.kind", "does not support cross-attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_combinations_are_refused_with_a_reason(name):
    keys, path, reason = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        parse(Model, tree(**keys))
    assert any(text.startswith(f"{path}: ") and reason in text for text in caught.value.problems), caught.value.problems


def count_calls(monkeypatch, cls, name):
    calls, real = [], getattr(cls, name)
    monkeypatch.setattr(cls, name, lambda self, *args: calls.append(1) or real(self, *args))
    return calls


def run(model):
    model.logits(Batch(Rows.of([[1, 2, 3], [4, 5]]), Rows.of([[1, 2], [3, 4, 5]])))


def test_rotary_tables_are_shared_by_all_layers(monkeypatch):
    """Once for the encoder, once for the decoder; each has two layers."""
    calls = count_calls(monkeypatch, RotaryModule, "tables")
    rotary = ATTENTION | {"positions": "rotary"}
    run(build(tree(mixer=rotary | {"pattern": "causal"}, encoder_mixer=rotary)))
    assert len(calls) == 2


def test_rotary_has_no_buffers():
    model = build(tree(encoder_mixer=ATTENTION | {"positions": "rotary"}))
    mixer = model.encoder.blocks[0].sublayers["mixer"]
    assert not list(mixer.relative.buffers()) and not list(mixer.relative.parameters())


def test_a_shared_bias_is_computed_once(monkeypatch):
    calls = count_calls(monkeypatch, BucketsModule, "bias")
    run(build(tree(encoder_mixer=ATTENTION | {"positions": "buckets"})))
    assert len(calls) == 1
    run(build(tree(encoder_mixer=ATTENTION | {"positions": {"kind": "buckets", "untied": True}})))
    assert len(calls) == 3


@pytest.mark.parametrize(
    "positions", ["alibi", "rotary", "buckets", "transformer-xl", {"kind": "shaw", "distance": 2}], ids=str
)
def test_positions_encode_order(positions):
    """Without any positions, the last token of a sentence cannot tell the order of the others."""
    sentences = torch.tensor([[1, 2, 3, 4], [2, 3, 1, 4]])

    def spread(mixer):
        layer = {"mixer": mixer | {"pattern": "causal"}, "channel": {"kind": "ffn", "hidden": 8}}
        keys = {"kind": "decoder", "vocab": 11, "width": 12, "decoder": [layer]}
        with torch.no_grad():
            hidden = build(keys).decode(Rows(sentences))[:, -1]
        return float((hidden[0] - hidden[1]).abs().max())

    assert spread(ATTENTION) < 1e-12
    assert spread(ATTENTION | {"positions": positions}) > 1e-3


MIXERS = {str(p): ATTENTION | {"positions": p} for p in ("alibi", "rotary", "buckets", "transformer-xl")}
MIXERS |= {"shaw": ATTENTION | {"positions": {"kind": "shaw", "distance": 3}}, "mla": MLA}
MIXERS |= {"xpos": ATTENTION | {"positions": {"kind": "rotary", "xpos": 32.0}}}
MIXERS |= {"additive": ATTENTION | {"scores": "additive", "positions": "alibi"}}


@pytest.mark.parametrize("pattern", ["causal & window(5)", "causal & (window(4) | prefix(3))"])
@pytest.mark.parametrize("name", MIXERS)
def test_windowed_decoding_equals_the_whole_pass(name, pattern):
    """A hundred tokens: a cache of constant size has turned by then, and its slots are in no order."""
    layer = {"repeat": 2, "mixer": MIXERS[name] | {"pattern": pattern}, "channel": {"kind": "ffn", "hidden": 8}}
    model = build({"kind": "decoder", "vocab": 11, "width": 12, "decoder": [layer]})
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 11, (2, 100), generator=generator)
    with torch.no_grad():
        whole, states, found, at = model.decode(Rows(tokens)), model.start(2), [], 0
        for size in [70, 1, 1, 3, 20, 1, 1, 1, 2]:
            found.append(model.advance(Rows(tokens[:, at : at + size]), states))
            at += size
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_biases_by_distance_are_those_of_the_pairs(causal):
    part = BucketsModule(Buckets(buckets=8, distance=12), Heads(3, 3, 4, causal))
    positions = torch.arange(30)[None]
    pairs = part.bias(torch.zeros(0), positions, positions, 1.0)[0]  # (heads, queries, keys)
    apart = positions.T - positions
    torch.testing.assert_close(part.distance_bias(30)[:, apart + 29], pairs, atol=0, rtol=0)
    for side in (
        part.distance_bias(30)[:, : 30 - part.constant_from],
        part.distance_bias(30)[:, 29 + part.constant_from :],
    ):
        assert torch.equal(side, side[:, :1].expand_as(side)) and side.shape[1] > 10
