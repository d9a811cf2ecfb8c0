"""Their files, read and written again: nothing is lost, nothing is added, and transformers computes the same."""

import pytest
from transformers import AutoConfig

import hf_models as foreign
import parity
from allyouneed.interop.families import FAMILIES, matching_families


@pytest.fixture(scope="module", params=foreign.CASES, ids=lambda case: "-".join(case).replace(" ", "-"))
def saved(request, tmp_path_factory):
    """A table, a model of theirs, and its config and weights as they save them."""
    theirs = foreign.theirs(*request.param)
    return FAMILIES[request.param[0]], theirs, *parity.saved(theirs, tmp_path_factory.mktemp("theirs"))


def equal(found, expected):
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


def test_files_come_back_as_they_were(saved):
    table, _, config, weights = saved
    model, unused = table.convert(config, weights), table.unused(config, weights)
    found, written = table.write(model, config, unused)
    assert found == config and equal(written, weights)


def test_a_model_without_its_original_config_is_exported(saved, tmp_path):
    table, theirs, config, weights = saved
    model, unused = table.convert(config, weights), table.unused(config, weights)
    found, written = table.write(model, unused=unused)
    assert equal(written, weights)
    assert found["architectures"] == config["architectures"]
    again = foreign.load(type(theirs), tmp_path / "ours", foreign.with_token_ids(found, config), written)
    assert type(AutoConfig.from_pretrained(tmp_path / "ours")) is type(theirs.config)
    assert foreign.difference(again, theirs) < parity.TOLERANCE
    assert table in matching_families(model.config)
