"""Decoders without a head: their hidden states, files that leave the prefix out, and the way back."""

import pytest
import torch
import transformers

import hf_models as foreign
import parity
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES, matching_families
from allyouneed.interop.hf.folder import task_of
from allyouneed.nn.batch import Batch, Rows

TOKENS = torch.tensor([[3, 5, 9, 1, 4, 7]])
WRITERS = {family: name for family, name in reversed(foreign.CASES) if foreign.writes(family)}


@pytest.mark.parametrize("family, name", WRITERS.items())
@torch.no_grad()
def test_a_headless_model_round_trips(family, name, tmp_path):
    whole = foreign.theirs(family, name)
    bare = whole.base_model
    config, weights = parity.saved(bare, tmp_path / "saved")
    assert config["architectures"] == [type(bare).__name__]
    assert task_of(config) == "similarity" and task_of({"model_type": family}) == "causal-lm"
    table = FAMILIES[family]
    model = table.convert(config, weights)
    with torch.compiler.set_stance("force_eager"):  # BitNet compiles how it rounds
        expected = bare(input_ids=TOKENS, use_cache=False).last_hidden_state
    assert parity.difference(model.logits(Batch(Rows(TOKENS))), expected) < parity.TOLERANCE
    for theirs in (config, None):
        found, written = table.write(model, theirs, table.unused(config, weights))
        assert found["architectures"] == config["architectures"]
        assert written.keys() == weights.keys() and all(written[key].equal(weights[key]) for key in weights)
    again = foreign.load(getattr(transformers, found["architectures"][0]), tmp_path / "ours", found, written)
    assert foreign.difference(again, foreign.load(type(again), tmp_path / "theirs", config, weights)) < parity.TOLERANCE
    assert table in matching_families(model.config)


@pytest.mark.parametrize("family", WRITERS)
def test_a_class_of_another_task_is_refused_by_name(family):
    config = foreign.theirs(family, WRITERS[family]).config.to_dict()
    with pytest.raises(UserError, match="architectures: 'SomethingForSequenceClassification' is not supported"):
        FAMILIES[family].tree(config | {"architectures": ["SomethingForSequenceClassification"]})
