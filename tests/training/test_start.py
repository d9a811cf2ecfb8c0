"""Fine-tuning from a model folder."""

import json
from pathlib import Path

import pytest
import torch
import yaml

import allyouneed as ayn
from allyouneed.config import ConfigError
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.nn.models.precision import dequantize, quantize
from allyouneed.nn.models.weights import named_tensors
from allyouneed.training import load_recipe, train
from allyouneed.training.reporting.log import read_log
from micro_run import Listener, Make


def second_stage(make: Make, first: Path, folder: Path) -> str:
    """The micro recipe, without its model and tokenizer, from the first run's model on."""
    tree = yaml.safe_load((make(steps=3).output / "recipe.yaml").read_text())
    tree = {key: value for key, value in tree.items() if key not in ("model", "set", "tokenizer", "output")}
    path = folder / "second.yaml"
    path.write_text(yaml.safe_dump(tree | {"start": str(first), "steps": 3, "output": str(folder / "second")}))
    return str(path)


def test_folders_that_are_created_are_named(make: Make, listener: Listener, tmp_path: Path):
    recipe = make(steps=1).model_copy(update={"output": tmp_path / "no" / "such" / "run"})
    train(recipe, console=listener.console)
    assert f"created the folder {tmp_path / 'no'}\n" in listener.text
    train(recipe, fresh=True, console=listener.console)
    assert listener.text.count("created the folder") == 1


def test_a_run_starts_from_the_weights_and_the_tokenizer_of_a_folder(make: Make, tmp_path: Path):
    task = {"kind": "translation", "marked_terms": True}
    first = train(make(steps=12, schedule={"kind": "constant", "peak": 0.01, "warmup": 0}, task=task))
    path = second_stage(make, first.model, tmp_path)
    result = train(load_recipe(path, ["schedule.peak=1e-12"]))
    before, after = Folder.load(first.model), Folder.load(result.model)
    assert before.task["marked_terms"] is after.task["marked_terms"] is True, "what it has learnt to read"
    assert after.vocabularies.hash == before.vocabularies.hash
    for old, new in zip(before.model.parameters(), after.model.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-6)
    losses = [entry["loss"] for entry in read_log(tmp_path / "second" / "log.jsonl") if "loss" in entry]
    fresh = [entry["loss"] for entry in read_log(first.model.parent / "log.jsonl") if "loss" in entry]
    assert losses[0] < fresh[0]


def test_start_and_model_exclude_each_other_and_a_missing_folder_is_named(make: Make, tmp_path: Path):
    first = train(make(steps=2))
    path = second_stage(make, first.model, tmp_path)
    with pytest.raises(ConfigError, match="set either 'model'"):
        load_recipe(path, ["model=transformer-tiny"])
    with pytest.raises(ConfigError, match="has its own tokenizer"):
        load_recipe(path, ["tokenizer.vocab=300"])
    with pytest.raises(UserError, match="no such model folder"):
        load_recipe(path, [f"start={tmp_path}/nowhere"])


def test_a_run_starts_from_a_model_in_eight_bits(make: Make, tmp_path: Path):
    first = train(make(steps=12, schedule={"kind": "constant", "peak": 0.01, "warmup": 0}))
    folder, plain = Folder.load(first.model), Folder.load(first.model)
    folder.model = quantize(folder.model, "int8")
    folder.save(tmp_path / "small")
    path = second_stage(make, tmp_path / "small", tmp_path)
    after = Folder.load(train(load_recipe(path, ["schedule.peak=1e-12"])).model)
    assert named_tensors(after.model).keys() == named_tensors(plain.model).keys()
    for old, new in zip(plain.model.parameters(), after.model.parameters(), strict=True):
        step = old.abs().amax(-1, keepdim=True) / 127
        assert ((new - old).abs() <= 0.51 * step + 1e-6).all()


@pytest.mark.parametrize("tied", [True, False])
def test_int8_weights_have_the_names_of_trainable_ones(tied: bool):
    model = ayn.build("gpt2", [f"embed.tied={str(tied).lower()}", "decoder[0].repeat=1"], vocab=50)
    wanted = {name: tensor.shape for name, tensor in named_tensors(model).items()}
    assert {name: tensor.shape for name, tensor in dequantize(quantize(model, "int8")).items()} == wanted


def test_packed_ternary_models_cannot_be_trained():
    with pytest.raises(UserError, match="cannot be trained"):
        dequantize(quantize(ayn.build("transformer-tiny", ["linear={kind: bit}"], vocab=50), "ternary"))


@pytest.mark.parametrize("recorded", [True, False])
def test_a_changed_tokenizer_is_noticed_on_resume(make: Make, tmp_path: Path, recorded: bool):
    train(make(steps=4))
    if not recorded:  # runs of earlier versions: the checkpoint knows it
        (tmp_path / "run" / "tokenizer" / "hash.json").unlink()
    train(make(steps=5))
    file = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    tree = json.loads(file.read_text())
    vocab = tree["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(tree))
    with pytest.raises(UserError, match="the tokenizer is not the one that this run has been trained with"):
        train(make(steps=6))
