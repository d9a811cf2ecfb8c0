"""Quantized folders, the bundled translator among them, are exported: their weights are widened first."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.cli.lab.bench import _peers
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.folder import Folder
from allyouneed.interop.load import load
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.precision import quantize, stored_as, widen


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(arg) for arg in args])
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("target", ["hf", "ctranslate2"])
def test_the_bundled_translator_is_exported(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export", "translator", tmp_path / "out", "--to", target) == 0  # 1 if the two differ
    said = capsys.readouterr()
    assert said.err.count("the int8 weights were widened to float32") == 1
    assert "the same 5 of 5 times" in said.out


def test_an_int8_folder_is_measured_against_ctranslate2(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["width=16", "decoder[0].repeat=1", "encoder[0].repeat=1"]
    changes += [f"{part}.heads=2" for part in ("encoder[0].mixer", "decoder[0].mixer", "decoder[0].cross")]
    model = quantize(ayn.build("marian", changes, vocab=tokenizer.size), "int8")
    Folder(model, Vocabularies(tokenizer, tokenizer)).save(tmp_path / "int8")
    with ExitStack() as stack:
        peers = _peers(load(tmp_path / "int8"), tmp_path / "int8", [], ["ctranslate2"], stack)
        assert (Path(peers[1].folder) / "model.bin").is_file() and peers[1].precision == "int8"
    assert "widened to float32" in capsys.readouterr().err


@pytest.mark.parametrize(("precision", "linear"), [("int8", "dense"), ("ternary", "bit"), ("ternary-int8", "bit")])
def test_widened_weights_compute_the_same(precision: str, linear: str) -> None:
    torch.manual_seed(0)
    layer = {"mixer": {"kind": "attention", "heads": 4, "pattern": "causal"}, "channel": {"kind": "ffn", "hidden": 64}}
    tree = {"kind": "decoder", "width": 32, "vocab": 50, "linear": linear, "decoder": [layer | {"repeat": 2}]}
    original = ayn.build(tree).eval()
    stored = quantize(original, precision)
    plain = widen(stored)
    assert stored_as(plain) is None and widen(plain) is plain
    batch = Batch(Rows.of([[3, 14, 15, 9, 26], [5, 35]]))
    tolerance = 1e-5 if precision == "ternary" else 0.03  # int8 rounds activations as well
    found, expected = plain.logits(batch), stored.logits(batch)  # type: ignore[operator]
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
