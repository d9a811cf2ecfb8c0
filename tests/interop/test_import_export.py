"""Foreign folders are imported and exported again: nothing is lost, and both models are compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import allyouneed as ayn
import any_part as anypart
import tiny_folders as tinyfolders
from allyouneed.cli import main
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, Vocabularies, train
from allyouneed.folder import Folder
from allyouneed.interop.hf.checkpoint import HfCheckpoint
from allyouneed.interop.hf.export import save_sharded
from allyouneed.interop.load import about, load
from allyouneed.lab import selfcheck

Ask = Callable[..., tuple[int, str, str]]
TEXTS = ["a small text for a small tokenizer", "quite another text, with quite other letters", "and a third one"] * 3


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command: its exit code, and what it printed."""

    def run(*args: Any) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([str(arg) for arg in args])
        shown = capsys.readouterr()
        return int(stopped.value.code or 0), shown.out, shown.err

    return run


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    return train(TokenizerConfig(vocab=280), TEXTS)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tinyfolders.write(tmp_path / "theirs")


@pytest.fixture
def bert(tmp_path: Path, words: Tokenizer) -> Path:
    """A masked language model with everything such a folder holds, and an unused pooler."""
    from transformers import BertConfig, BertForPreTraining

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
    BertForPreTraining(BertConfig(vocab_size=300, max_position_embeddings=32, **sizes)).save_pretrained(tmp_path / "b")
    words.save(tmp_path / "b" / "tokenizer.json")
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "chat_template": "{{ kept }}",
    }
    (tmp_path / "b" / "tokenizer_config.json").write_text(json.dumps(options))
    (tmp_path / "b" / "README.md").write_text("# A card\n")
    return tmp_path / "b"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: Path, other: Path) -> bool:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    return all(first[name].dtype == second[name].dtype and first[name].equal(second[name]) for name in first)


# --- there and back ---------------------------------------------------------------------------------------------------


def test_a_folder_comes_back_as_it_was(bert: Path, tmp_path: Path, ask: Ask) -> None:
    code, out, err = ask("import", bert, tmp_path / "ours")
    assert code == 0 and "a model for masked-lm" in err, (out, err)
    assert "largest difference of outputs" in out and "(allowed 1e-04" in out and "MISMATCH" not in out
    code, out, err = ask("export", tmp_path / "ours", tmp_path / "back", "--to", "hf")
    assert code == 0 and "largest difference of outputs" in out and "MISMATCH" not in out
    assert same(bert, tmp_path / "back") and "bert.pooler.dense.weight" in tensors(tmp_path / "back")
    for file in bert.iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "back" / file.name).exists(), file.name
    assert json.loads((bert / "config.json").read_text()) == json.loads((tmp_path / "back" / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md"):
        assert (bert / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def test_what_is_imported_is_a_folder_like_any_other(llama: Path, tmp_path: Path, ask: Ask) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_p": 0.9, "typical_p": 0.5}))
    code, out, err = ask("import", llama, tmp_path / "ours")
    assert code == 0 and "generated text the same 5 of 5 times" in out
    assert "note: typical_p: 0.5 is not supported" in err
    theirs, ours = load(llama), load(tmp_path / "ours")
    assert ours.task == theirs.task == {"kind": "causal-lm"} and ours.max_tokens == 64
    assert ours.decoding == theirs.decoding == {"method": "sample", "top_k": 50, "top_p": 0.9}
    assert ours.origin["family"] == "llama" and ours.origin["config"]["rope_theta"] == 10000.0
    given = {"tokens": [[5, 6, 7], [8, 9, 10, 11]]}
    found, expected = ayn.load(tmp_path / "ours").logits(**given), ayn.load(llama).logits(**given)
    assert torch.equal(found, expected) and found.abs().max() > 0.1
    assert about(llama)["model"] == about(tmp_path / "ours")["model"]


def test_their_folder_can_be_exported_directly(llama: Path, tmp_path: Path, ask: Ask) -> None:
    code, _, _ = ask("export", llama, tmp_path / "back", "--to", "hf", "--no-check")
    assert code == 0 and same(llama, tmp_path / "back")


def test_folders_that_are_created_are_named(llama: Path, tmp_path: Path, ask: Ask) -> None:
    """A typing error in a path must not go unnoticed."""
    for n, words in enumerate(
        (["import", "--no-check"], ["export", "--to", "hf", "--no-check"], ["quantize", "--to", "bf16"])
    ):
        name, *options = words
        top = tmp_path / f"new{n}"
        code, _, err = ask(name, llama, top / "a" / "out", *options)
        assert code == 0 and f"note: created the folder {top}\n" in err
        code, _, err = ask(name, llama, top / "a" / "more", *options)
        assert code == 0 and "created the folder" not in err


# --- precision --------------------------------------------------------------------------------------------------------


def test_the_precision_of_the_file_is_kept_or_another_chosen(tmp_path: Path, ask: Ask) -> None:
    narrow = tinyfolders.write(tmp_path / "narrow", tinyfolders.weights(dtype=torch.bfloat16), dtype="bfloat16")
    assert {p.dtype for p in load(narrow).model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load(narrow, dtype="float32").model.parameters()} == {torch.float32}
    code, out, _ = ask("import", narrow, tmp_path / "wide", "--dtype", "float32")
    assert code == 0 and "MISMATCH" not in out
    assert {tensor.dtype for tensor in tensors(tmp_path / "wide").values()} == {torch.float32}
    wide = tinyfolders.write(tmp_path / "whole")
    code, out, _ = ask("import", wide, tmp_path / "rounded", "--dtype", "bfloat16")
    assert code == 0 and "(allowed 1e-04" in out and "generated text the same 5 of 5 times" in out
    assert {tensor.dtype for tensor in tensors(tmp_path / "rounded").values()} == {torch.bfloat16}
    with pytest.raises(ayn.UserError, match="dtype 'int8': expected float32, bfloat16, float16"):
        ayn.load(wide, dtype="int8")
    code, _, err = ask("import", wide, tmp_path / "no", "--dtype", "int8")
    assert code == 2 and "expected float32" in err and not (tmp_path / "no").exists()


def test_a_file_of_several_precisions_is_computed_in_one_and_kept_as_it_is(tmp_path: Path, ask: Ask) -> None:
    mixed = tinyfolders.weights(dtype=torch.bfloat16)
    mixed |= {name: tensor.float() for name, tensor in mixed.items() if "norm" in name}
    theirs = tinyfolders.write(tmp_path / "theirs", mixed)
    assert {p.dtype for p in load(theirs).model.parameters()} == {torch.bfloat16}
    ayn.load(theirs).logits(tokens=[[5, 6, 7]])
    assert ask("import", theirs, tmp_path / "ours", "--no-check")[0] == 0
    assert ask("export", tmp_path / "ours", tmp_path / "back", "--to", "hf", "--no-check")[0] == 0
    assert same(theirs, tmp_path / "back")


# --- shards -----------------------------------------------------------------------------------------------------------


def test_large_weights_are_sharded(llama: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "config.json").write_text((llama / "config.json").read_text())
    weights = tinyfolders.weights()
    save_sharded(weights, tmp_path / "parts", most=20_000)
    files = sorted(file.name for file in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    read = HfCheckpoint.open(tmp_path / "parts").weights
    assert all(read[name].equal(tensor) for name, tensor in weights.items())
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "parts").state_dict()
    assert all(theirs[name].equal(tensor) for name, tensor in weights.items())


# --- the check itself -------------------------------------------------------------------------------------------------


def test_different_models_are_a_mismatch(llama: Path, tmp_path: Path) -> None:
    weights = tinyfolders.weights()
    weights["model.layers.1.mlp.down_proj.weight"][3, 4] += 0.5
    other = tinyfolders.write(tmp_path / "other", weights)
    check = selfcheck.against_transformers(llama, other)
    assert not check.agreed and "MISMATCH" in check.lines[0]
    assert selfcheck.against_transformers(llama, llama).agreed


def test_different_generated_text_is_a_mismatch(llama: Path, tmp_path: Path) -> None:
    other = tinyfolders.write(tmp_path / "other", tinyfolders.weights(seed=1))
    check = selfcheck.against_transformers(llama, other)
    assert not check.agreed and "generated text the same 0 of 5 times: MISMATCH" in check.lines


def test_a_folder_that_transformers_cannot_load_is_reported(llama: Path, tmp_path: Path) -> None:
    broken = tinyfolders.write(tmp_path / "broken", hidden_act="none such")
    check = selfcheck.against_transformers(llama, broken)
    assert not check.agreed and "transformers cannot load" in check.lines[0]


def test_a_model_too_large_for_memory_is_not_compared(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "_free_memory", lambda: 1000.0)
    check = selfcheck.against_transformers(llama, llama)
    assert check.agreed and check.lines == ["not compared: that needs 0.0 GB of memory; 0.0 GB are free"]


def test_a_config_that_names_no_class_is_a_language_model(tmp_path: Path) -> None:
    theirs = tinyfolders.write(tmp_path / "theirs", architectures=None)
    assert load(theirs).task == {"kind": "causal-lm"}
    assert selfcheck.against_transformers(theirs, theirs).agreed


def test_disagreement_is_exit_code_1(llama: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "difference", lambda *_: 0.25)
    code, out, _ = ask("import", llama, tmp_path / "ours")
    assert code == 1 and "largest difference of outputs 2.5e-01 (allowed 1e-04" in out and "MISMATCH" in out
    code, out, _ = ask("export", tmp_path / "ours", tmp_path / "back", "--to", "hf")
    assert code == 1 and "MISMATCH" in out
    assert ask("export", tmp_path / "ours", tmp_path / "again", "--to", "hf", "--no-check")[0] == 0


def test_missing_transformers_is_noted(llama: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "has_transformers", lambda: False)
    code, out, err = ask("import", llama, tmp_path / "ours")
    assert (code, out) == (0, "") and "not compared with the original: transformers is not installed" in err


# --- where it goes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["import"], ["export", "--to", "hf"]])
def test_nothing_is_overwritten(llama: Path, tmp_path: Path, ask: Ask, command: list[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        code, out, err = ask(*command, llama, tmp_path / name)
        assert (code, out) == (2, "") and f"{tmp_path / name}: already exists" in err
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert ask(*command, llama, tmp_path / "empty", "--no-check")[0] == 0
    assert (tmp_path / "empty" / "config.json").is_file()


def test_a_folder_that_cannot_be_read_leaves_nothing(llama: Path, tmp_path: Path, ask: Ask) -> None:
    (llama / "model.safetensors").write_bytes(b"short")
    before = sorted(tmp_path.iterdir())
    code, out, err = ask("import", llama, tmp_path / "ours")
    assert (code, out) == (2, "") and "model.safetensors: not a valid safetensors file" in err
    assert sorted(tmp_path.iterdir()) == before


def test_user_errors_are_reported(llama: Path, tmp_path: Path, ask: Ask) -> None:
    code, _, err = ask("export", llama, tmp_path / "out", "--to", "nobody")
    assert code == 2 and "--to nobody: unknown export target (allowed: hf" in err
    code, _, err = ask("import", tmp_path / "nowhere", tmp_path / "out")
    assert code == 2 and "no such model folder" in err
    assert ask("import", llama, tmp_path / "ours", "--no-check")[0] == 0
    code, _, err = ask("import", tmp_path / "ours", tmp_path / "out")
    assert code == 2 and "is already a folder of allyouneed" in err


# --- models of ours ---------------------------------------------------------------------------------------------------


def test_a_model_of_ours_is_written_for_transformers(words: Tokenizer, tmp_path: Path, ask: Ask) -> None:
    tree = {
        "kind": "encoder-decoder",
        "vocab": 300,
        "width": 12,
        "embed": {"positions": {"kind": "sinusoidal", "order": "halves"}},
        "encoder": [{"mixer": {"kind": "attention", "heads": 2}, "channel": {"kind": "ffn", "hidden": 20}}],
        "decoder": [
            {
                "mixer": {"kind": "attention", "heads": 2, "pattern": "causal"},
                "cross": {"kind": "attention", "heads": 2},
                "channel": {"kind": "ffn", "hidden": 20},
            }
        ],
    }
    mine = Folder(anypart.build(tree).float(), Vocabularies(words, words), decoding={"beam": 3, "penalty": "power"})
    mine.save(tmp_path / "mine")
    code, out, err = ask("export", tmp_path / "mine", tmp_path / "theirs", "--to", "hf")
    assert code == 0, (out, err)
    assert "MISMATCH" not in out and "generated text the same 5 of 5 times" in out
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["model_type"] == "marian" and config["dtype"] == "float32"
    ids = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    assert [config[key] for key in ids] == [words.pad, words.bos, words.eos, words.bos]
    generation = json.loads((tmp_path / "theirs" / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["do_sample"]) == (3, False)
    again = load(tmp_path / "theirs")
    assert again.task == {"kind": "translation"} and again.tokenizers.source.size == words.size


def test_a_model_no_family_can_express_is_refused_by_name(tmp_path: Path, words: Tokenizer, ask: Ask) -> None:
    tree = anypart.tree() | {"vocab": 300}
    tree["decoder"] = [layer | {"mixer": {"kind": "retention", "heads": 2}} for layer in tree["decoder"]]
    Folder(anypart.build(tree).float(), Vocabularies(words, words)).save(tmp_path / "mine")
    code, _, err = ask("export", tmp_path / "mine", tmp_path / "out", "--to", "hf")
    assert code == 2 and "no family of transformers can express this model; the closest is" in err
    assert not (tmp_path / "out").exists()
