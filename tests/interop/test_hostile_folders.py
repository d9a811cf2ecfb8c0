"""Untrusted folders are read with care: nothing in them is run, nothing is written, no memory is taken unchecked."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import allyouneed as ayn
import tiny_folders as tinyfolders
from allyouneed.cli import main
from allyouneed.config import parse, preset_tree
from allyouneed.data.tokenizers.base import TokenizerConfig, train
from allyouneed.interop.hf.folder import task_and_head
from allyouneed.interop.load import about, load
from allyouneed.nn.models.base import Model

SOME = 1 << 30  # bytes of address space: a machine that is asked for more refuses


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """Allocating what a hostile file asks for fails here, without a user error."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + SOME, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tinyfolders.write(tmp_path / "theirs")


def everything(path: Path) -> dict[str, Any]:
    return {str(file): file.lstat().st_mtime_ns for file in sorted(path.rglob("*"))}


def error_of(path: Path) -> str:
    """The error of loading; every entry point gives the same one, and nothing around the folder changes."""
    before = everything(path.parent)
    with pytest.raises(ayn.UserError) as caught:
        load(path)
    with pytest.raises(ayn.UserError):
        ayn.load(path)
    assert everything(path.parent) == before
    return str(caught.value)


def set_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(tinyfolders.CONFIG | changes))


def safetensors(file: Path, header: dict[str, Any], content: bytes = b"") -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content)


def test_the_unchanged_folder_loads(folder: Path) -> None:
    found = load(folder)
    assert found.task == {"kind": "causal-lm"} and found.max_tokens == 64
    assert torch.equal(found.model.state_dict()["head.weight"], tinyfolders.weights()["lm_head.weight"])


# --- the weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert "model.safetensors: not a valid safetensors file" in error_of(folder)


@pytest.mark.parametrize("length", [0, 7, 10**6, 2**40, 2**63, 2**64 - 1])
def test_a_wrong_length_of_the_header_is_refused(folder: Path, length: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    assert "model.safetensors: not a valid safetensors file" in error_of(folder)


HUGE = 10**13


def entry(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "entries",
    [
        {"a": entry([HUGE], 0, 4 * HUGE)},
        {"a": entry([HUGE], 0, 16)},
        {"a": entry([2**40, 2**40], 0, 16)},
        {"a": entry([-4], 0, 16)},
        {"a": entry([4], 16, 0)},
        {"a": entry([4], -16, 0)},
        {"a": entry([2], 0, 8), "b": entry([3], 4, 16)},
        {"a": entry([2], 0, 8), "b": entry([1], 12, 16)},
        {"a": entry([4], 0, 16) | {"dtype": "F99"}},
        {"a": {"dtype": "F32"}},
        {"a": "text"},
    ],
    ids=[
        "terabytes", "more than stored", "overflow", "negative", "backwards", "before", "overlap", "hole", "dtype",
        "no shape", "text",
    ],
)  # fmt: skip
def test_a_header_with_wrong_offsets_is_refused(folder: Path, entries: dict[str, Any]) -> None:
    safetensors(folder / "model.safetensors", entries, bytes(16))
    assert "model.safetensors: not a valid safetensors file" in error_of(folder)


def test_a_header_that_names_a_tensor_twice_is_refused(folder: Path) -> None:
    twice = '"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'
    text = f"{{{twice}, {twice}}}".encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    assert "'a' is duplicated" in error_of(folder) or "not a valid safetensors file" in error_of(folder)


def test_numbers_of_an_unknown_kind_are_named(folder: Path) -> None:
    save_file({"a": torch.zeros(4, dtype=torch.float8_e4m3fn)}, folder / "model.safetensors")
    assert "unsupported dtype F8_E4M3" in error_of(folder)


def test_weights_that_do_not_fit_are_named_all_at_once(folder: Path) -> None:
    tensors = tinyfolders.weights()
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(5, 16)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(16, 24, 2)
    tensors["model.layers.7.surprise"] = torch.zeros(1)
    tinyfolders.write(folder, tensors)
    message = error_of(folder)
    for name in (
        "model.norm.weight: missing",
        "0.self_attn.q_proj",
        "1.mlp.down_proj",
        "model.layers.7.surprise: not used",
    ):
        assert name in message


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights (model.safetensors or pytorch_model.bin" in error_of(folder)


# --- the index of shards ----------------------------------------------------------------------------------------------


def test_shards_are_read(folder: Path) -> None:
    expected = load(folder).model.state_dict()
    tinyfolders.shard(folder)
    found = load(folder).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "place",
    [
        "../outside.safetensors", "{outside}", "sub/../../outside.safetensors", "..", "", ".", "a\0.safetensors",
        "C:\\x.safetensors",
    ],
)  # fmt: skip
def test_a_path_in_the_index_is_refused(folder: Path, place: str) -> None:
    outside = folder.parent / "outside.safetensors"
    save_file(tinyfolders.weights(), outside)
    (folder / "sub").mkdir()
    places = tinyfolders.shard(folder)
    name = next(iter(places))
    tinyfolders.write_index(folder, places | {name: place.format(outside=outside)})
    message = error_of(folder)
    assert "is not the name of a file in this folder" in message or "is not a .safetensors file" in message


def test_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    places = tinyfolders.shard(folder)
    first = folder / next(iter(places.values()))
    outside = folder.parent / "outside.safetensors"
    first.rename(outside)
    first.symlink_to(outside)
    assert "link to a file outside the folder" in error_of(folder)
    first.unlink()
    first.symlink_to(folder / "moved")
    outside.rename(folder / "moved")
    assert load(folder).task == {"kind": "causal-lm"}, "a link that stays inside is harmless"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_is_a_link_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)
    assert "link to a file outside the folder" in error_of(folder)


def test_a_link_to_itself_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert "model.safetensors" in error_of(folder)


def test_the_links_of_the_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate(("config.json", "model.safetensors")):
        (folder / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert load(snapshot).task == {"kind": "causal-lm"}


def test_all_errors_of_a_shard_index_are_listed(folder: Path) -> None:
    places = tinyfolders.shard(folder)
    first, last = min(places), max(places)
    places[first], places[last] = places[last], places[first]
    places["model.surprise"] = places[first]
    tinyfolders.write_index(folder, places)
    message = error_of(folder)
    assert message.count(first) == 2 and message.count(last) == 2 and "model.surprise: not in" in message
    tinyfolders.write_index(folder, places | {first: "model-00003-of-00002.safetensors"})
    assert "model-00003-of-00002.safetensors: missing" in error_of(folder)


@pytest.mark.parametrize("places", [None, [], {}, "model.safetensors", {"a": 5}, {"a": "model.bin"}])
def test_a_malformed_shard_index_is_refused(folder: Path, places: Any) -> None:
    tinyfolders.shard(folder)
    tinyfolders.write_index(folder, places)
    assert "model.safetensors.index.json" in error_of(folder)


# --- pickles ----------------------------------------------------------------------------------------------------------


class Harm:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.canary),)


def pickled(folder: Path, content: Any) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(content, folder / "pytorch_model.bin")


def test_plain_pickled_weights_are_read(folder: Path) -> None:
    expected = load(folder).model.state_dict()
    pickled(folder, tinyfolders.weights())
    found = load(folder).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (folder / "pytorch_model.bin").unlink()
    tinyfolders.shard(folder, ".bin")
    found = load(folder).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_code_named_by_the_config_is_not_executed(folder: Path, tmp_path: Path) -> None:
    """As CVE-2026-4372: `auto_map` and `_attn_implementation_internal` name code elsewhere."""
    mark = tmp_path / "executed"
    (folder / "modeling_evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    names = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer"), "modeling_evil.Evil")
    set_config(folder, auto_map=names, _attn_implementation_internal="evil/kernel", trust_remote_code=True)
    with contextlib.suppress(ayn.UserError):
        load(folder)
    assert not mark.exists()


def test_code_in_a_pickle_is_not_executed(folder: Path) -> None:
    canary = folder.parent / "canary"
    pickled(folder, tinyfolders.weights() | {"harm": Harm(canary)})
    message = error_of(folder)
    assert "contains more than weights" in message and "nothing in it was executed" in message
    assert not canary.exists()


@pytest.mark.parametrize("old", [False, True])
def test_a_plain_pickle_is_not_executed(folder: Path, old: bool) -> None:
    canary = folder.parent / "canary"
    (folder / "model.safetensors").unlink()
    if old:
        content = tinyfolders.weights() | {"harm": Harm(canary)}
        torch.save(content, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(canary)))
    assert "pytorch_model.bin: cannot be read" in error_of(folder)
    assert not canary.exists()


def test_a_pickle_named_safetensors_is_not_executed(folder: Path) -> None:
    canary = folder.parent / "canary"
    torch.save({"harm": Harm(canary)}, folder / "model.safetensors")
    assert "contains more than weights" in error_of(folder)
    assert not canary.exists()


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {"a": 5},
        {5: torch.zeros(1)},
        {"model.norm.weight": torch.zeros(1).expand(10**9)},
        {"a": torch.eye(3).to_sparse()},
    ],
    ids=["list", "number", "nameless", "larger than stored", "sparse"],
)
def test_pickles_of_something_else_are_refused(folder: Path, content: Any) -> None:
    pickled(folder, content)
    assert "pytorch_model.bin" in error_of(folder)


def test_a_packed_pickle_is_refused(folder: Path) -> None:
    """A kilobyte may unpack to gigabytes."""
    pickled(folder, tinyfolders.weights())
    file, bomb = folder / "pytorch_model.bin", folder / "bomb"
    with zipfile.ZipFile(file) as archive, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in archive.infolist():
            packed.writestr(entry.filename, archive.read(entry))
    bomb.replace(file)
    assert "is compressed" in error_of(folder)


# --- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[]",
        "[1, 2]",
        '"llama"',
        "null",
        "",
        "\0" * 9,
        "[" * 10**5,
        '{"model_type": "llama", "model_type": "llama"}',
        '{"model_type": "llama", "vocab_size": NaN}',
        '{"model_type": "llama", "vocab_size": Infinity}',
        '{"model_type": "llama", "vocab_size": ' + "9" * 10000 + "}",
        '{"model_type": ["llama"]}',
        '{"model_type": "nothing known"}',
        '{"model_type": "llama"}',
        '{"architectures": ["LlamaForCausalLM"]}',
    ],
    ids=lambda text: text[:24],
)
def test_a_malformed_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert error_of(folder)


def test_a_config_of_a_gigabyte_is_not_read(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.truncate(10**9)
    assert "too large for a config" in error_of(folder)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("size", [10**12, 10**9, 2**63, 10**30, -1, 0, 1.5, "many", [], {}, None])
def test_a_size_that_does_not_match_the_weights_is_refused(folder: Path, key: str, size: Any) -> None:
    set_config(folder, **{key: size})
    assert error_of(folder)


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("size", [10**12, 10**30, -1, 1.5, "many", [5]])
def test_optional_sizes_are_checked_too(folder: Path, key: str, size: Any) -> None:
    set_config(folder, **{key: size})
    assert error_of(folder)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_layers", "n_layer", "encoder_layers"])
@pytest.mark.parametrize("family", ["llama", "albert", "gpt2", "t5", "bart", "bert"])
def test_a_billion_layers_are_refused_before_iterating(folder: Path, family: str, key: str) -> None:
    set_config(folder, model_type=family, **{key: 10**9})
    assert "1,000,000,000 layers, but the weights are 21 tensors" in error_of(folder)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["RagModel"], "architectures: RagModel is a class of no supported family"),
        ("RagModel", "architectures: RagModel is a class of no supported family"),
        ([None], r"architectures: \[None\] is not a list of class names"),
        ({"LlamaModel": 1}, "architectures: .* is not a list of class names"),
    ],
)
def test_a_class_that_is_not_of_the_family_is_refused(folder: Path, names: Any, told: str) -> None:
    set_config(folder, architectures=names)
    assert re.search(told, error_of(folder))


def test_a_decoder_is_not_left_out_where_the_family_cannot(tmp_path: Path) -> None:
    config = {"model_type": "bart", "architectures": ["BartEncoderModel"]}
    model = parse(Model, preset_tree("bart-base"))  # type: ignore[type-abstract]
    with pytest.raises(ayn.UserError, match="BartEncoderModel is not supported: the model has no head for similarity"):
        task_and_head(tmp_path, config, model, None)


def test_malformed_labels_are_reported(folder: Path) -> None:
    for wrong in ([1], 5, "text"):
        set_config(folder, id2label=wrong, architectures=["LlamaForSequenceClassification"])
        assert error_of(folder)


@pytest.mark.parametrize("wrong", [{"num_beams": 10**9}, {"num_beams": "many"}, {"num_beams": -1}, {"max_length": "x"}])
def test_a_malformed_generation_config_is_refused(folder: Path, wrong: dict[str, Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(wrong))
    if "max_length" in wrong:
        set_config(folder)
        assert load(folder).decoding == {"method": "greedy"}, "a length in all says nothing of what is new"
    else:
        assert "num_beams" in error_of(folder)


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_must_fit_the_embedding(folder: Path) -> None:
    texts = ["a small text for a small tokenizer, quite a small one, and some more words to learn from it"] * 3
    train(TokenizerConfig(vocab=280), texts).save(folder / "tokenizer.json")
    assert load(folder).tokenizers.target.size <= 300, "room for more tokens than there are is no mistake"
    tensors = tinyfolders.weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:200].clone()
    tinyfolders.write(folder, tensors, vocab_size=200)
    assert "tokens" in error_of(folder) and "200" in error_of(folder)


def test_a_malformed_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Evil"}}')
    assert "tokenizer.json" in error_of(folder)


# --- sentence-transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "modules",
    [
        "not JSON",
        "5",
        [{"type": "sentence_transformers.models.Transformer", "path": ".."}, {"type": "models.Pooling", "path": "1"}],
        [{"type": "sentence_transformers.models.Transformer", "path": "/etc"}, {"type": "models.Pooling", "path": "1"}],
        [{"type": "sentence_transformers.models.Transformer", "path": ""}, {"type": "os.system", "path": ""}],
        [{"type": "sentence_transformers.models.Transformer", "path": ""}],
    ],
)
def test_a_malformed_list_of_modules_is_refused(folder: Path, modules: Any) -> None:
    (folder / "modules.json").write_text(modules if isinstance(modules, str) else json.dumps(modules))
    assert "modules.json" in error_of(folder)


# --- every way in -----------------------------------------------------------------------------------------------------


def test_commands_report_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_config(folder, num_hidden_layers=10**9)
    for command in (["describe", str(folder)], ["translate", "-m", str(folder), "text"]):
        with pytest.raises(SystemExit) as stopped:
            main(command)
        shown = capsys.readouterr()
        assert (stopped.value.code, shown.out) == (2, "")
        assert shown.err.startswith("allyouneed: ") and "Traceback" not in shown.err


def test_metadata_is_read_without_the_weights(folder: Path) -> None:
    assert about(folder)["model"]["width"] == 16
