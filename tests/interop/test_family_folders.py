"""Every family as a whole folder: in, kept as ours, and out again without a bit changed; both compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import hf_models as foreign
from allyouneed.folder import Folder
from allyouneed.interop.hf import export
from allyouneed.interop.load import about, load
from allyouneed.lab import selfcheck

FIRST = list({family: name for family, name in reversed(foreign.CASES)}.items())
# one of each kind of input, and those whose places depend on the padding token
KINDS = ("bert", "roberta", "gpt2", "t5", "m2m_100", "vit", "clip", "whisper")


@pytest.mark.parametrize(("family", "name"), FIRST, ids=lambda word: word.replace(" ", "-"))
def test_a_folder_round_trips_bit_by_bit(family: str, name: str, tmp_path: Path) -> None:
    foreign.theirs(family, name).save_pretrained(tmp_path / "theirs")
    load(tmp_path / "theirs", as_stored=True).save(tmp_path / "ours")
    kept = Folder.load(tmp_path / "ours", as_stored=True)
    assert kept.origin["family"] == family
    assert about(tmp_path / "theirs")["model"] == about(tmp_path / "ours")["model"]
    (tmp_path / "back").mkdir()
    export.write(kept, tmp_path / "back")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("theirs", "back"))
    assert before.keys() == after.keys()
    assert all(after[key].dtype == tensor.dtype and after[key].equal(tensor) for key, tensor in before.items())
    configs = [json.loads((tmp_path / place / "config.json").read_text()) for place in ("theirs", "back")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("family", KINDS)
def test_the_check_covers_each_kind_of_model(family: str, tmp_path: Path) -> None:
    theirs = foreign.theirs(family, dict(FIRST)[family])
    theirs.save_pretrained(tmp_path / "theirs")
    check = selfcheck.against_transformers(tmp_path / "theirs", tmp_path / "theirs")
    assert check.agreed and "largest difference of outputs" in check.lines[0], check.lines
    foreign.theirs(family, dict(FIRST)[family], seed=1).save_pretrained(tmp_path / "other")
    check = selfcheck.against_transformers(tmp_path / "theirs", tmp_path / "other")
    assert not check.agreed and "MISMATCH" in check.lines[0]
