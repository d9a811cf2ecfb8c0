"""A run that goes on from a model folder."""

from pathlib import Path

import pytest
import torch
import yaml
from microrun import Make

from allyouneed.config import ConfigError
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.train import load_recipe, train
from allyouneed.train.log import read_log


def second_stage(make: Make, first: Path, folder: Path) -> str:
    """The micro recipe, without its model and tokenizer, from the first run's model on."""
    tree = yaml.safe_load((make(steps=3).output / "recipe.yaml").read_text())
    tree = {key: value for key, value in tree.items() if key not in ("model", "set", "tokenizer", "output")}
    path = folder / "second.yaml"
    path.write_text(yaml.safe_dump(tree | {"start": str(first), "steps": 3, "output": str(folder / "second")}))
    return str(path)


def test_a_run_starts_from_the_weights_and_the_tokenizer_of_a_folder(make: Make, tmp_path: Path):
    first = train(make(steps=12, schedule={"kind": "constant", "peak": 0.01, "warmup": 0}))
    path = second_stage(make, first.model, tmp_path)
    result = train(load_recipe(path, ["schedule.peak=1e-12"]))
    before, after = Folder.load(first.model), Folder.load(result.model)
    assert after.vocabularies.hash == before.vocabularies.hash
    for old, new in zip(before.model.parameters(), after.model.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-6)
    losses = [entry["loss"] for entry in read_log(tmp_path / "second" / "log.jsonl") if "loss" in entry]
    fresh = [entry["loss"] for entry in read_log(first.model.parent / "log.jsonl") if "loss" in entry]
    assert losses[0] < fresh[0]


def test_start_and_model_exclude_each_other_and_a_missing_folder_is_named(make: Make, tmp_path: Path):
    first = train(make(steps=2))
    path = second_stage(make, first.model, tmp_path)
    with pytest.raises(ConfigError, match="one of the two"):
        load_recipe(path, ["model=transformer-tiny"])
    with pytest.raises(ConfigError, match="brings its own tokenizer"):
        load_recipe(path, ["tokenizer.vocab=300"])
    with pytest.raises(UserError, match="no such model folder"):
        load_recipe(path, [f"start={tmp_path}/nowhere"])
