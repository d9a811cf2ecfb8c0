"""Folders written by an earlier version keep working: a run resumes bit for bit, a model loads and translates the same,
an interrupted `translate` is finished. See tests/fixtures/v0_1/README.md."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.files import checksum
from allyouneed.folder import WEIGHTS
from allyouneed.training import load_recipe, train
from allyouneed.training.reporting.log import read_log
from micro_run import Listener

OLD = Path(__file__).parents[1] / "fixtures" / "v0_1"
WRITTEN_ON = ("2.13.0+cpu", "AVX512")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "v0_1"))


def same_numbers_expected() -> bool:
    """Other torch versions and vector widths sum in another order; resuming then warns (see below)."""
    return (torch.__version__, torch.backends.cpu.get_cpu_capability()) == WRITTEN_ON


def losses(log: Path) -> list[tuple[int, float, float, float]]:
    return [(one["step"], one["loss"], one["norm"], one["rate"]) for one in read_log(log) if "loss" in one]


def test_an_old_run_resumes_bit_for_bit(old: Path, listener: Listener) -> None:
    from safetensors.torch import load_file

    result = train(load_recipe(old / "recipe.yaml"), resume=True, console=listener.console)
    assert result.steps == 9 and "after step 6" in listener.text
    resumed, whole = losses(old / "run" / "log.jsonl"), losses(old / "whole" / "log.jsonl")
    weights, expected = load_file(result.model / WEIGHTS), load_file(old / "whole" / "model" / WEIGHTS)
    assert [one[0] for one in resumed] == list(range(1, 10)) and weights.keys() == expected.keys()
    if same_numbers_expected():
        hexed = [[[number.hex() for number in one[1:]] for one in entries] for entries in (resumed, whole)]
        assert hexed[0] == hexed[1]
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    else:
        for one, other in zip(resumed, whole, strict=True):
            assert one[1:] == pytest.approx(other[1:], rel=1e-4)
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], rtol=1e-3, atol=1e-4)


def test_resuming_with_another_torch_version_warns(old: Path, listener: Listener) -> None:
    trainer = old / "run" / "checkpoints" / "step-00000006" / "training" / "trainer.json"
    about: dict[str, Any] = json.loads(trainer.read_text())
    about.pop("checksum")
    about["torch"] = "2.1.0"
    about["checksum"] = checksum(about)
    trainer.write_text(json.dumps(about) + "\n")
    assert train(load_recipe(old / "recipe.yaml"), console=listener.console).steps == 9
    assert f"saved with torch 2.1.0, this is {torch.__version__}" in listener.text


def test_an_old_model_folder_translates_the_same(old: Path) -> None:
    translator = ayn.load(old / "dates_model")
    recorded = json.loads((old / "translate" / "translations.json").read_text())
    for one in recorded:
        assert translator.translate(one["source"]) == one["beam"]
        assert translator.translate(one["source"], beam=1) == one["greedy"]
        (found,) = translator.translate_full([one["source"]], best=2)
        assert [c.text for c in found.candidates] == [text for text, _ in one["best"]]
        for candidate, (_, score) in zip(found.candidates, one["best"], strict=True):
            assert math.isclose(candidate.score, score, rel_tol=1e-4)


def test_an_old_interrupted_translation_is_finished(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = old / "translate"
    part = (folder / "out.txt.part").read_bytes()
    assert len(part) > json.loads((folder / "out.txt.journal").read_bytes().splitlines()[-1])["size"]
    names = [str(folder / name) for name in ("in.txt", "out.txt")]
    with pytest.raises(SystemExit) as ended:
        main(["translate", "--model", str(old / "dates_model"), *names])
    assert not ended.value.code
    assert "after line 128" in capsys.readouterr().err
    assert (folder / "out.txt").read_bytes() == (folder / "whole.txt").read_bytes()
    assert not list(folder.glob("out.txt.*"))
