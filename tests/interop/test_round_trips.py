"""Their files, read and written again: nothing is lost, nothing is added, and transformers computes the same."""

import pytest
from transformers import AutoConfig

import hf_models as foreign
import parity as judge
from allyouneed.interop.families import FAMILIES, matching_families

cases = pytest.mark.parametrize("family, name", foreign.CASES, ids=lambda word: word.replace(" ", "-"))


def equal(found, expected):
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


@cases
def test_files_come_back_as_they_were(family, name, tmp_path):
    theirs = foreign.theirs(family, name)
    config, weights = judge.saved(theirs, tmp_path)
    table = FAMILIES[family]
    model, unused = table.convert(config, weights), table.unused(config, weights)
    found, written = table.write(model, config, unused)
    assert found == config and equal(written, weights)


@cases
def test_a_model_without_its_original_config_is_exported(family, name, tmp_path):
    theirs = foreign.theirs(family, name)
    config, weights = judge.saved(theirs, tmp_path / "theirs")
    table = FAMILIES[family]
    model, unused = table.convert(config, weights), table.unused(config, weights)
    found, written = table.write(model, unused=unused)
    assert equal(written, weights)
    assert found["architectures"] == config["architectures"]
    again = foreign.load(type(theirs), tmp_path / "ours", foreign.with_token_ids(found, config), written)
    assert type(AutoConfig.from_pretrained(tmp_path / "ours")) is type(theirs.config)
    loaded = foreign.load(type(theirs), tmp_path / "theirs", config, weights)
    assert foreign.difference(again, loaded) < judge.TOLERANCE
    assert table in matching_families(model.config)
