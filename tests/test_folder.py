"""A model is a folder: it round-trips, and every problem with it has a clear message."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import any_part as anypart
from allyouneed import folder as folder_module
from allyouneed.config import parse
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.errors import UserError
from allyouneed.files import sha256, write_folder
from allyouneed.folder import Folder
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from any_part import CASES, KIND_CASES, tree

BATCH = Batch(Rows.of([[1, 2, 3], [4, 5, 6, 7, 8]]), Rows.of([[1, 2, 3, 4], [5, 6]]))


@pytest.fixture(scope="session")
def vocabularies():
    one = train(TokenizerConfig(vocab=270), ["a small text for a small tokenizer, a small one"] * 3)
    return Vocabularies(one, one)


@pytest.fixture(scope="session")
def other_vocabularies():
    one = train(TokenizerConfig(vocab=270), ["quite another text, with quite other letters"] * 3)
    return Vocabularies(one, one)


@pytest.fixture
def saved(tmp_path, vocabularies):
    """A folder on disk and the model in it."""
    content = Folder(build(tree()).float(), vocabularies, decoding={"beam": 4}, card="# Mine\n")
    content.save(tmp_path / "model")
    return tmp_path / "model", content


def build(tree, seed=0):
    """A small model with room for the tokens of the small tokenizers."""
    vocab = {"source": 300, "target": 300} if isinstance(tree["vocab"], dict) else 300
    return anypart.build(tree | {"vocab": vocab}, seed)


def reseal(path):
    """Correct the checksums, as after an intended change of a file."""
    about = json.loads((path / "config.json").read_text())
    about["sha256"] = {name: sha256(path / name) for name in about["sha256"]}
    (path / "config.json").write_text(json.dumps(about))


def said(path):
    with pytest.raises(UserError) as caught:
        Folder.load(path)
    return str(caught.value)


@pytest.mark.parametrize("name", KIND_CASES)
def test_a_loaded_model_gives_the_same_logits(name, tmp_path, vocabularies):
    model = build(CASES[name]).float()
    Folder(model, vocabularies).save(tmp_path / "model")
    loaded = Folder.load(tmp_path / "model").model
    assert not loaded.training
    assert loaded.config == model.config
    assert torch.equal(loaded.logits(BATCH), model.logits(BATCH))


def test_all_other_fields_round_trip(saved, vocabularies):
    path, content = saved
    loaded = Folder.load(path)
    assert loaded.decoding == {"beam": 4}
    assert loaded.task == content.task
    assert loaded.card == "# Mine\n"
    assert loaded.vocabularies.joint
    assert loaded.vocabularies.hash == vocabularies.hash
    assert loaded.path == path
    files = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(file.name for file in path.iterdir()) == files
    assert len({file.stat().st_mode & 0o777 for file in path.iterdir()}) == 1  # who may read one may read all


def test_two_tokenizers_round_trip(tmp_path, vocabularies, other_vocabularies):
    both = Vocabularies(vocabularies.source, other_vocabularies.source)
    Folder(build(tree()), both).save(tmp_path / "model")
    loaded = Folder.load(tmp_path / "model").vocabularies
    assert not loaded.joint
    assert (loaded.source.hash, loaded.target.hash) == (both.source.hash, both.target.hash)


def test_a_tied_matrix_is_stored_once_and_stays_tied(saved):
    path, content = saved
    stored = load_file(path / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == sum(p.numel() for p in content.model.parameters())
    assert [name for name, tensor in stored.items() if tensor.shape == (300, 12)] == ["embed.tokens.weight"]
    loaded = Folder.load(path).model
    assert loaded.head.weight is loaded.embed.tokens.weight


def test_the_config_is_written_in_full(saved):
    path, content = saved
    about = json.loads((path / "config.json").read_text(encoding="utf-8"))
    assert about["model"]["encoder"][0]["mixer"] == {
        "kind": "attention",
        "heads": 3,
        "kv_heads": None,
        "head_width": None,
        "pattern": "full",
        "positions": {"kind": "none"},
        "scores": {"kind": "scaled-dot", "scale": None},
        "soft_cap": None,
        "qk_norm": None,
        "sub_norm": None,
        "cache": "keys",
        "bias": True,
        "dropout": 0.0,
    }
    assert parse(Model, about["model"]) == content.model.config


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_named(saved, name):
    path, _ = saved
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    assert said(path) == f"{path / name}: damaged (checksum differs from config.json); copy it again"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(saved, name):
    path, _ = saved
    (path / name).unlink()
    assert said(path) == f"{path}: {name} is missing; the folder is incomplete, copy it again"


def test_all_damaged_files_are_reported_at_once(saved):
    path, _ = saved
    (path / "tokenizer.json").unlink()
    (path / "model.safetensors").write_bytes(b"short")
    message = said(path)
    assert "tokenizer.json is missing" in message
    assert "model.safetensors" in message and "damaged" in message


def test_a_folder_that_is_not_a_model_is_named(tmp_path):
    assert said(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such model folder"
    assert said(tmp_path) == f"{tmp_path}: not a model folder (it has no config.json)"
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert said(model.parent) == f"{model.parent}: is a run folder; its model is {model}"
    (tmp_path / "config.json").write_text("{")
    assert "config.json: cannot read" in said(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["MarianMTModel"]}')
    assert "config.json: neither a config of allyouneed" in said(tmp_path)


def test_a_folder_of_a_later_format_is_refused(saved):
    path, _ = saved
    about = json.loads((path / "config.json").read_text()) | {"format": 99}
    (path / "config.json").write_text(json.dumps(about))
    assert "folder format 99 is not 1" in said(path)


def test_the_tokenizer_of_another_model_is_refused(saved, other_vocabularies):
    path, _ = saved
    other_vocabularies.save(path)
    reseal(path)
    assert said(path) == f"{path}: tokenizer.json is not the one this model was trained with"


def test_all_weights_that_do_not_fit_are_named_at_once(saved):
    path, _ = saved
    stored = load_file(path / "model.safetensors")
    del stored["encoder.blocks.0.sublayers.mixer.out.bias"]
    stored["decoder.blocks.7.norm"] = torch.zeros(3)
    stored["embed.tokens.weight"] = torch.zeros(10, 12)
    save_file(stored, path / "model.safetensors")
    reseal(path)
    assert said(path).splitlines() == [
        f"{path / 'model.safetensors'}: the weights do not fit the config",
        "  encoder.blocks.0.sublayers.mixer.out.bias: missing",
        "  decoder.blocks.7.norm: unexpected",
        "  embed.tokens.weight: (10, 12) in the file, (300, 12) in the model",
    ]


def test_a_config_edited_wrongly_is_named_by_file_and_path(saved):
    path, _ = saved
    about = json.loads((path / "config.json").read_text())
    about["model"]["encoder"][0]["mixer"]["haeds"] = 4
    (path / "config.json").write_text(json.dumps(about))
    message = said(path)
    assert "config.json: model: " in message
    assert "encoder[0].mixer.haeds: unknown; did you mean 'heads'?" in message


def test_invalid_safetensors_are_named(saved):
    path, _ = saved
    (path / "model.safetensors").write_bytes(b"not this")
    reseal(path)
    assert "model.safetensors: not a valid safetensors file" in said(path)


def everything_in(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("moment", ["weights", "tokenizer", "checksum", "swap", "last sync"])
def test_an_interrupted_save_keeps_the_old_folder(saved, moment, monkeypatch):
    path, content = saved
    before = everything_in(path.parent)

    def fail(*_, **__):
        raise KeyboardInterrupt

    once = [True]

    def fail_swap(self, target, rename=Path.rename):
        if target == path and once:
            once.clear()
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        if moment == "weights":
            patch.setattr("safetensors.torch.save_file", fail)
        elif moment == "tokenizer":
            patch.setattr(Vocabularies, "save", fail)
        elif moment == "checksum":
            patch.setattr(folder_module, "sha256", fail)
        elif moment == "swap":
            patch.setattr(Path, "rename", fail_swap)
        else:
            patch.setattr("os.fsync", fail)
        with pytest.raises(KeyboardInterrupt):
            Folder(build(tree(), seed=1).float(), content.vocabularies).save(path)
    assert everything_in(path.parent) == before
    assert torch.equal(Folder.load(path).model.logits(BATCH), content.model.logits(BATCH))


def test_saving_again_replaces_the_folder(saved):
    path, content = saved
    (path / "stale.txt").write_text("from before")
    second = Folder(build(tree(), seed=1).float(), content.vocabularies)
    second.save(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["model"]
    assert not (path / "stale.txt").exists()
    assert torch.equal(Folder.load(path).model.logits(BATCH), second.model.logits(BATCH))


def test_a_folder_may_be_moved_and_have_any_name(saved, tmp_path):
    path, content = saved
    moved = tmp_path / "モデル mit Leerzeichen"
    shutil.move(path, moved)
    assert torch.equal(Folder.load(moved).model.logits(BATCH), content.model.logits(BATCH))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, vocabularies):
    small = anypart.build(tree() | {"vocab": vocabularies.target.size - 1}).float()
    Folder(small, vocabularies).save(tmp_path / "model")
    assert f"tokenizer has {vocabularies.target.size} tokens" in said(tmp_path / "model")


def test_the_task_round_trips(tmp_path, vocabularies):
    Folder(build(tree()).float(), vocabularies, max_tokens=77, directions=[("zh", "en"), (None, "de")]).save(
        tmp_path / "m"
    )
    loaded = Folder.load(tmp_path / "m")
    assert (loaded.max_tokens, loaded.directions) == (77, [("zh", "en"), (None, "de")])


def test_an_unwritable_folder_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_folder(tmp_path / "file" / "model", lambda folder: None)
