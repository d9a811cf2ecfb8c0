"""Reading a config of theirs: nothing that may matter is ignored silently."""

import pytest

from allyouneed.errors import UserError
from allyouneed.interop.hf.config_reader import ConfigReader, strict_config


@strict_config("known_*")
def tree(config):
    inside = config.nested("inner")
    found = {"width": config["width"], "act": config.activation("act"), "mode": config.require("mode", "a", "b")}
    found |= {"depth": inside.get("depth", 3), "heads": config.first_of("heads", "n_head")}
    inside.refuse_unread()
    return found


GIVEN = {"width": 8, "act": "gelu_new", "n_head": 2}


def test_read_values_become_the_tree():
    assert tree(GIVEN) == {"width": 8, "act": "gelu-tanh", "mode": "a", "depth": 3, "heads": 2}


def test_keys_without_effect_are_allowed():
    off = {"trick": None, "other_trick": False, "third": 0, "fourth": []}
    assert tree(GIVEN | off | {"known_thing": 5, "use_cache": True, "eos_token_id": 2}) == tree(GIVEN)


def test_all_unsupported_keys_are_listed_at_once():
    config = GIVEN | {
        "act": "snake",
        "mode": "c",
        "trick": 7,
        "inner": {"depth": 1, "twist": True},
        "model_type": "toy",
    }
    with pytest.raises(UserError) as refusal:
        tree(config)
    assert str(refusal.value).splitlines()[0] == "toy: unsupported config"
    for said in ("act: 'snake'", "mode: 'c' is not supported (allowed: a, b)", "trick: 7", "inner.twist: True"):
        assert said in str(refusal.value)


def test_a_missing_key_is_named():
    with pytest.raises(UserError, match="width: missing in the config"):
        tree({"act": "relu", "n_head": 1})
    with pytest.raises(UserError, match="heads: missing in the config"):
        tree({"width": 1, "act": "relu"})


def test_a_reader_is_a_mapping():
    reader = ConfigReader(GIVEN)
    assert dict(reader) == GIVEN and len(reader) == 3 and "width" in reader and "depth" not in reader
