"""A model in fewer bits: what it costs is measured and said, and its folder is read like any other."""

from __future__ import annotations

import copy
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.config import override, parse, preset_tree
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.lab.quantization import compare, quantized
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.mixers.rnn import Int8RNN
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.precision import dequantize, stored_as, to_int8
from allyouneed.nn.models.weights import named_tensors
from toy_models import BOS, EOS, PAD, random_model


class Answer(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: Any) -> Answer:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in words])
        return Answer(stopped.value.code or 0, *capsys.readouterr())  # type: ignore[arg-type]

    return run


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    Folder(random_model(vocab=tokenizer.size), Vocabularies(tokenizer, tokenizer), card="# Mine\n").save(tmp_path / "m")
    return tmp_path / "m"


def size(path: Path) -> int:
    return (path / "model.safetensors").stat().st_size


@pytest.mark.parametrize("way", [{"method": "beam"}, {"method": "greedy"}])
def test_int8_models_decode_the_same_alone_and_in_a_batch(sources: list[list[int]], way: dict[str, Any]) -> None:
    """Up to rounding: a difference in the last digit can become a step of 1/255 of a token's range, which does not
    change the tokens of this decisive model."""
    engine = Engine(to_int8(random_model()), BOS, EOS, PAD, forbidden=[PAD, BOS])
    decoding = Decoding(**way, extra=8)
    together = [answer[0].tokens for answer in engine.generate(sources, decoding)]
    alone = [engine.generate([source], decoding, sample_keys=[[n]])[0][0].tokens for n, source in enumerate(sources)]
    assert together == alone


@pytest.mark.parametrize(("to", "share"), [("int8", 0.5), ("bf16", 0.55)])
def test_a_quantized_folder_is_smaller_and_loads(
    ask: Callable[..., Answer], folder: Path, tmp_path: Path, to: str, share: float
) -> None:
    done = ask("quantize", folder, tmp_path / "small", "--to", to, "--limit", "20")
    assert done.code == 0, done.err
    assert [line.split("  ")[0] for line in done.out.splitlines()[1:]] == [
        "same answer, %", "added perplexity, %", "tokens/s", "weights, MB",
    ]  # fmt: skip
    assert size(tmp_path / "small") < share * size(folder)
    about = json.loads((tmp_path / "small" / "config.json").read_text())
    assert about.get("stored") == ("int8" if to == "int8" else None)
    assert about["model"] == json.loads((folder / "config.json").read_text())["model"]
    before, after = Folder.load(folder).model, Folder.load(tmp_path / "small").model
    assert stored_as(after) == about.get("stored")
    text = "The quick brown fox"
    assert isinstance(ayn.load(tmp_path / "small").translate([text], max_length=5)[0], str)
    said = "Stored as" in (tmp_path / "small" / "README.md").read_text()
    assert said and before.config == after.config


def test_what_is_loaded_is_what_was_saved(folder: Path, tmp_path: Path, sources: list[list[int]]) -> None:
    _, after = quantized(folder, "int8")
    after.save(tmp_path / "small")
    decoding = Decoding(method="greedy", extra=8)
    found = [
        [answer[0].log_prob for answer in Engine(model, BOS, EOS, PAD).generate(sources, decoding)]
        for model in (after.model, Folder.load(tmp_path / "small").model)
    ]
    assert found[0] == found[1]


def test_too_great_a_loss_is_refused_and_nothing_is_written(
    ask: Callable[..., Answer], folder: Path, tmp_path: Path
) -> None:
    done = ask("quantize", folder, tmp_path / "small", "--to", "int8", "--limit", "0")
    assert done.code == 2 and "more than --limit 0; nothing was written" in done.err
    assert "--data FILE" in done.err and "--force" in done.err
    assert "tokens/s" in done.out and not (tmp_path / "small").exists()
    done = ask("quantize", folder, tmp_path / "small", "--to", "int8", "--limit", "0", "--force", "--json")
    assert done.code == 0 and (tmp_path / "small" / "model.safetensors").is_file()
    assert json.loads(done.out)["loss"] > 0 and "more than --limit 0" in done.err


def test_a_file_of_examples_measures_the_loss(ask: Callable[..., Answer], folder: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("The fox\tthe dog\nHow are you\tI am fine\n" * 2, encoding="utf-8")
    done = ask("quantize", folder, tmp_path / "small", "--to", "int8", "--data", pairs, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["unit"] == "points of bleu" and {"bleu", "chrf", "tokens/s"} <= set(found["measured"])


def test_only_ternary_trained_models_become_ternary(tmp_path: Path, tokenizer: Tokenizer, folder: Path) -> None:
    with pytest.raises(UserError, match=r"of kind 'bit'.*train with"):
        quantized(folder, "ternary")
    torch.manual_seed(0)
    tree = override(preset_tree("transformer-tiny"), [f"vocab={tokenizer.size}", "width=32", "linear.kind=bit"])
    model = parse(Model, tree).build()  # type: ignore[type-abstract]
    Folder(model, Vocabularies(tokenizer, tokenizer)).save(tmp_path / "bit")
    before, after = quantized(tmp_path / "bit", "ternary")
    assert compare(before, after).loss == pytest.approx(0, abs=1e-3)
    after.save(tmp_path / "small")
    assert json.loads((tmp_path / "small" / "config.json").read_text())["stored"] == "ternary"
    again = Folder.load(tmp_path / "small")
    assert stored_as(again.model) == "ternary" and size(tmp_path / "small") < 0.6 * size(tmp_path / "bit")
    assert compare(before, again).loss == pytest.approx(0, abs=1e-3)
    quantized(tmp_path / "bit", "ternary-int8")[1].save(tmp_path / "smaller")
    again = Folder.load(tmp_path / "smaller")
    assert stored_as(again.model) == "ternary-int8" and size(tmp_path / "smaller") < 0.8 * size(tmp_path / "small")


def test_recurrent_networks_are_quantized_except_in_older_folders(tmp_path: Path) -> None:
    layer = {"mixer": "lstm", "channel": {"kind": "ffn", "hidden": 16}}
    tree = {"kind": "decoder", "vocab": 31, "width": 24, "decoder": [layer]}
    model = parse(Model, tree).build().eval()  # type: ignore[type-abstract]
    batch = Batch(Rows.of([[1, 2, 3, 4], [5, 6]]))
    logits = model.logits(batch)  # type: ignore[operator]
    older = to_int8(copy.deepcopy(model), stored=named_tensors(model))
    for name, part, kind in (("old", older, torch.nn.LSTM), ("new", to_int8(model), Int8RNN)):
        Folder(part, None).save(tmp_path / name)
        again: Any = Folder.load(tmp_path / name).model
        assert type(again.decoder.blocks[0].sublayers["mixer"].rnn) is kind and stored_as(again) == "int8"
        torch.testing.assert_close(again.logits(batch), part.logits(batch))
        assert (again.logits(batch) - logits).abs().max() < 0.03 * logits.abs().max()
        assert dequantize(again).keys() == named_tensors(parse(Model, tree).build()).keys()  # type: ignore[type-abstract]
    assert size(tmp_path / "new") < 0.5 * size(tmp_path / "old")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "int4"], "(allowed: int8, bf16, ternary"),
        (["--to", "int8", "--data", "nowhere.tsv"], "nowhere.tsv"),
    ],
)
def test_user_errors_are_reported(
    ask: Callable[..., Answer], folder: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    done = ask("quantize", folder, tmp_path / "small", *words)
    assert done.code == 2 and said in done.err and "Traceback" not in done.err
    assert not (tmp_path / "small").exists()


def test_a_quantized_model_is_not_quantized_or_cast_again(folder: Path, tmp_path: Path) -> None:
    _, after = quantized(folder, "int8")
    after.save(tmp_path / "small")
    with pytest.raises(UserError, match="already stored as int8"):
        quantized(tmp_path / "small", "int8")
    with pytest.raises(UserError, match="remove the dtype"):
        Folder.load(tmp_path / "small", dtype="bfloat16")
    assert stored_as(Folder.load(tmp_path / "small", dtype="float32").model) == "int8"
