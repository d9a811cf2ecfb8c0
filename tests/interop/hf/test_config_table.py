"""A table of a config: each kind of line, both ways."""

import pytest

from allyouneed.errors import UserError
from allyouneed.interop.hf.config_table import ConfigTable, Conversion
from allyouneed.interop.hf.config_writer import ModelTree

KINDS = Conversion(
    lambda config, line: [{"f": "ffn", "m": "moe"}[letter] for letter in config[line.key]],
    lambda ours, line: "".join(layer["channel.kind"][0] for layer in ours.layers("decoder")),
)
TEXT = """
width = size
width: 7
width = size
decoder.repeat = depth
decoder.mixer.heads = attention.heads ?? 2
decoder.mixer.head_width = attention.width or size // attention.heads
decoder.wiring = after ?? false |{true: {kind: post-norm}, false: pre-norm}
decoder[*].channel.kind = kinds |kinds
decoder.channel<ffn>.hidden = hidden or 4 * size
decoder.channel<moe>: {top: 1}
decoder.channel<moe>.experts = experts
mode in [plain, bare]
-> {mode: plain, attention: {bias: false}}
width -> other_size
ignore attention.bias, other_size,
    speed_*
"""
TABLE = ConfigTable(TEXT, {"kinds": KINDS})
CONFIG = {"size": 8, "depth": 3, "kinds": "ffm", "experts": 5}
FULL = CONFIG | {"hidden": 32, "after": False, "mode": "plain", "other_size": 8}
LAYER = {"mixer": {"heads": 2, "head_width": 4}, "wiring": "pre-norm"}
TREE = {
    "width": 8,
    "decoder": [
        LAYER | {"repeat": 2, "channel": {"kind": "ffn", "hidden": 32}},
        LAYER | {"repeat": 1, "channel": {"kind": "moe", "top": 1, "experts": 5}},
    ],
}


def test_a_config_is_read():
    assert TABLE.read(CONFIG) == TREE
    assert TABLE.read(CONFIG | {"mode": "bare", "speed_limit": 3, "attention": {"bias": True}}) == TREE
    post = TABLE.read(CONFIG | {"after": True, "hidden": 9, "attention": {"heads": 4, "width": 3}})["decoder"][0]
    assert post["wiring"] == {"kind": "post-norm"} and post["channel"]["hidden"] == 9
    assert post["mixer"] == {"heads": 4, "head_width": 3}


def test_a_tree_is_written():
    assert TABLE.write(ModelTree(TREE)) == FULL | {"attention": {"heads": 2, "width": 4, "bias": False}}


def test_keys_of_parts_that_are_not_there_are_neither_required_nor_written():
    config = {"size": 8, "depth": 1, "kinds": "f"}
    assert TABLE.read(config) == TABLE.read(config | {"experts": 5})
    assert "experts" not in TABLE.write(ModelTree(TABLE.read(config)))


def test_refused_values_and_unknown_keys_are_listed_at_once():
    with pytest.raises(UserError) as refusal:
        TABLE.read(CONFIG | {"mode": "odd", "trick": 1, "attention": {"twist": 2}})
    for told in ("mode: 'odd' is not supported (allowed: plain, bare)", "trick: 1 is", "attention.twist: 2 is"):
        assert told in str(refusal.value)


def test_a_missing_part_of_ours_is_named():
    ours = ModelTree({"kind": "encoder", "width": 8})
    TABLE.write(ours)
    assert "decoder.mixer.heads: required, but this encoder has none" in ours.problems
