"""CTranslate2 folders as other converters write them, and damaged ones."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest
import torch
from ctranslate2.specs import model_spec, transformer_spec

from allyouneed.errors import UserError
from allyouneed.infer.predictors.forward import NamedForward
from allyouneed.interop.ctranslate2.binary import Variables
from allyouneed.interop.load import load

WIDTH, NAMES = 8, ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(9))]


def write(out: Path, **more: Any) -> Path:
    """A random pre-norm model without a table of positions, which CTranslate2 then computes, and without a scale."""
    spec = transformer_spec.TransformerSpec.from_config(1, 2, pre_norm=True)
    dice = np.random.default_rng(0)

    def fill(owner: Any, name: str, value: Any) -> None:
        last = name.rpartition("/")[2]
        wide = {"linear_0": 3, "linear_1": 1}
        rows = {"embeddings": len(NAMES), "projection": len(NAMES)}
        parts = name.split("/")
        if last == "weight":
            part, size = parts[-2], WIDTH
            if "self_attention" in parts:
                size = WIDTH * wide[part]
            elif "attention" in parts:
                size = WIDTH * (2 if part == "linear_1" else 1)
            shape = (rows.get(part.removesuffix("_0"), size), WIDTH)
            setattr(owner, last, dice.standard_normal(shape).astype(np.float32) * 0.5)
        elif last in ("gamma", "beta"):
            setattr(owner, last, dice.standard_normal(WIDTH).astype(np.float32))

    model_spec.visit_spec(spec, fill)
    for side in (spec.encoder, spec.decoder):
        side.__dict__.pop("scale_embeddings")
    spec.register_source_vocabulary(NAMES)
    spec.register_target_vocabulary(NAMES)
    for key, value in more.items():
        setattr(spec.decoder, key, value)
    spec.validate()
    spec.optimize()
    out.mkdir()
    spec.save(str(out))
    return out


def test_options_that_a_file_leaves_out_have_their_defaults(tmp_path: Path) -> None:
    out = write(tmp_path / "out")
    theirs, ours = ctranslate2.Translator(str(out), intra_threads=1), load(out)
    source, target = [4, 7, 5, 11, 3], [6, 8, 3]
    scores = theirs.score_batch([[NAMES[n] for n in source]], [[NAMES[n] for n in target]])[0].log_probs
    logits = NamedForward(ours.model).logits({"tokens": [source], "targets": [[1, *target]]})[0].log_softmax(-1)
    assert torch.allclose(logits[range(4), [*target, 2]], torch.tensor(scores), atol=1e-5)
    assert "no subword file" in ours.notes[0]


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    out = write(tmp_path / "out", scale_alibi=True)
    with pytest.raises(UserError, match="decoder/scale_alibi: not supported"):
        load(out)


def test_damaged_files_are_one_message(tmp_path: Path) -> None:
    file = write(tmp_path / "out") / "model.bin"
    whole = file.read_bytes()
    bad = [whole[:size] for size in (2, 9, 40, 3000, len(whole) - 1)]
    bad += [whole + b"x", struct.pack("<I", 99) + whole[4:]]
    name = len("TransformerSpec") + 1
    bad.append(whole[: 10 + name] + struct.pack("<I", 1 << 31) + whole[14 + name :])  # number of variables
    for content in bad:
        file.write_bytes(content)
        with pytest.raises(UserError, match="not a valid CTranslate2 model"):
            load(file.parent)


def test_a_variable_of_another_type_or_shape_is_refused_or_read(tmp_path: Path) -> None:
    """Types of the same size, and shapes of as many numbers: the file as a whole is still well-formed."""
    out = write(tmp_path / "out")
    file, refusals = out / "model.bin", set()
    whole, entries = file.read_bytes(), Variables(file).entries
    for name, entry in entries.items():
        at, rank = entry.start - 5, len(entry.shape)  # the type, after the dimensions and before the size
        changes = [(at, bytes([kind])) for kind in range(6)]
        changes += [(at - 4 * rank, struct.pack(f"<{rank}I", *entry.shape[::-1]))]
        changes += [] if rank else [(entry.start, bytes([value])) for value in (0, 1, 127, 128, 255)]
        for place, value in changes:
            file.write_bytes(whole[:place] + value + whole[place + len(value) :])
            try:
                load(out)
            except UserError as error:
                refusals.add(str(error).partition("model.bin: ")[2].replace(name, "NAME"))
    assert "NAME: int32 without a scale" in refusals
    assert any("not a valid CTranslate2 model: ZeroDivisionError" in told for told in refusals)
