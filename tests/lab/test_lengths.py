import json
from pathlib import Path

import pytest
import torch

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.lab.lengths import length_curve

WORDS = "the cat sat on a mat and saw the dog run to the barn " * 40


def folder(path, positions):
    tokenizer = train(TokenizerConfig(vocab=300), [WORDS])
    torch.manual_seed(0)
    layer = {"wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 2, "pattern": "causal"}}
    config = {"kind": "decoder", "vocab": tokenizer.size, "width": 16, "embed": {"positions": positions}}
    module = ayn.build(config | {"decoder": [layer | {"channel": {"kind": "ffn", "hidden": 32}}]}).eval()
    Folder(module, Vocabularies(tokenizer, tokenizer), {"kind": "causal-lm"}, {}, max_tokens=64).save(path)
    return path


@pytest.fixture
def text(tmp_path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(WORDS)
    return file


def test_the_same_tokens_are_predicted_after_every_context(tmp_path, text):
    """A model that sees two tokens only is as good after any context."""
    path = folder(tmp_path / "model", "none")
    model = ayn.load(path)
    for layer in model.model.decoder.blocks:
        torch.nn.init.zeros_(layer.sublayers["mixer"].out.weight)
        if layer.sublayers["mixer"].out.bias is not None:
            torch.nn.init.zeros_(layer.sublayers["mixer"].out.bias)
    found = length_curve(model, text, [40, 64, 128])
    values = [row.value.mean for row in found.rows]
    assert values == pytest.approx([values[0]] * 3, abs=1e-5)
    assert all(row.change.high - row.change.low < 1e-4 for row in found.rows[1:])


def test_lengths_that_a_model_cannot_read_are_said(tmp_path, text):
    found = length_curve(ayn.load(folder(tmp_path / "model", {"kind": "learned", "length": 64})), text, [48, 64, 128])
    assert [row.value is None for row in found.rows] == [False, False, True]
    assert "at most 64 tokens" in found.text() and "<svg" in found.svg("model")


def test_a_text_too_short_for_the_lengths_is_refused(tmp_path, text):
    model = ayn.load(folder(tmp_path / "model", "none"))
    with pytest.raises(UserError, match="too few for contexts of 100,000"):
        length_curve(model, text, [100_000])
    with pytest.raises(UserError, match="at least 33"):
        length_curve(model, text, [8])


def test_the_command_prints_a_table_and_saves_the_curve(tmp_path, text, capsys):
    path = folder(tmp_path / "model", "sinusoidal")
    line = ["evaluate", str(text), "--model", str(path), "--lengths", "40,80"]
    main_ok([*line, "--output", str(tmp_path / "curve.svg")])
    assert "80" in capsys.readouterr().out and (tmp_path / "curve.svg").read_text().startswith("<svg")
    main_ok([*line, "--json"])
    assert [row["length"] for row in json.loads(capsys.readouterr().out)["lengths"]] == [40, 80]
    for wrong in ("a,b", "0", "40,"):
        with pytest.raises(SystemExit) as ended:
            main([*line[:-1], wrong])
        assert ended.value.code == 2


def main_ok(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code
